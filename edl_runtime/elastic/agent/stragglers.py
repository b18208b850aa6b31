"""Whether an instance is a straggler: it computes its part of each step longer than its peers, and has for long. Pure.

All wait for the slowest at the end of a step, so the time of a step tells nothing; the time before that wait does.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from edl_runtime.elastic.rendezvous.generation import GroupView

MIN_EXCESS_S = 0.01
"""Less than this a step is no loss that anybody could see, and may be the clock's or the scheduler's."""


def slowdown(own_s: float, peers_s: Sequence[float]) -> float:
    """Return how many times as long as its peers, by their median, an instance computes; 1 where that is unknown."""
    usual_s = statistics.median(peers_s) if peers_s else 0.0
    return own_s / usual_s if usual_s > 0 and own_s - usual_s >= MIN_EXCESS_S else 1.0


def peers_compute_s(view: GroupView, me: str) -> list[float]:
    """Return how long the other members of the active generation compute in a step, where that is known."""
    if view.generation is None or view.state != "active":
        return []
    there = (each.member for each in view.members if each.member.id in view.generation.members)
    return [each.compute_s for each in there if each.id != me and each.compute_s and not each.finished]


class StragglerWatch:
    """Decides whether an instance is a straggler: from when it has been slow for `for_s`, until it has not for as long.

    Slow is a slowdown of at least `factor`. So it changes at most once in `for_s`, however busy its machine is.
    """

    def __init__(self, factor: float, for_s: float) -> None:
        self._factor = factor
        self._for_s = for_s
        self._ratio = 0.0
        self._differs_since: float | None = None

    def observe(self, ratio: float, now: float) -> float:
        """Return by which slowdown it is a straggler, 0 if it is none. Call it now and again with the present one."""
        is_slow = ratio >= self._factor
        if is_slow == bool(self._ratio):
            self._differs_since = None
        elif self._differs_since is None:
            self._differs_since = now
        elif now - self._differs_since >= self._for_s:
            self._differs_since = None
            self._ratio = ratio if is_slow else 0.0
        if is_slow and self._ratio:
            self._ratio = ratio
        return self._ratio
