"""Waits for a traffic window, by the clock alone."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Self

from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.traffic_windows import capacity_in_window, describe_sizes, sizes_by_name, to_window_result
from edl_airflow.waits.conditions import Condition, Observation
from edl_runtime.autoscale.traffic.windows import FARTHEST, Sizes, TrafficWindows, WindowSpan

LOOK_AGAIN_S = 60.0
"""The longest sleep in seconds: clocks may be set and machines suspended, and a long sleep would not notice."""

LOOK_SOON_S = 0.1
"""The shortest sleep in seconds: sleeps may end a little early."""


class TrafficObservation(Observation, frozen=True, kw_only=True):
    """The window that holds at a moment."""

    span: WindowSpan


class TrafficCondition(Condition[TrafficObservation], frozen=True, kw_only=True, tag="traffic"):
    """The window of the name `window`, if one is given, that leaves `at_least` so much to training.

    `total` is the cluster's capacity by resource, `quota` what all instances together may use of it.
    """

    windows: TrafficWindows
    window: str = ""
    at_least: Mapping[str, float] = {}
    total: Mapping[str, float] = {}
    quota: Mapping[str, float] = {}
    conn_id: str = ""

    @property
    def about(self) -> str:
        return self._wanted()

    def view(self, now: float) -> TrafficObservation:
        """Return the window at a moment, in Unix seconds."""
        return TrafficObservation(span=self.windows.at(datetime.fromtimestamp(now, UTC)))

    def pause_s(self, view: TrafficObservation, now: float) -> float:
        """Return the seconds until the next check."""
        ends = (view.span.end.timestamp() if view.span.end else None, self.until, self.deadline)
        pause = min(end for end in ends if end is not None) - now
        return min(max(pause, LOOK_SOON_S), LOOK_AGAIN_S)

    def check(self, view: TrafficObservation) -> TaskOutcome | None:
        if self._fits(view.span.name, view.span.sizes):
            return TaskOutcome(ended="ready", name=self.about, window=to_window_result(view.span))
        if view.span.end is None:
            reason = f"{view.span.name!r} holds, and does not end within {FARTHEST.days} days"
            return TaskOutcome(ended="impossible", name=self.about, reason=reason)
        sizes = sizes_by_name(self.windows)
        if not any(self._fits(name, each) for name, each in sizes.items()):
            known = ", ".join(f"{name} ({describe_sizes(each)})" for name, each in sizes.items())
            has = ", ".join(f"{amount:g} {name}" for name, amount in sorted(self.total.items()))
            return TaskOutcome(ended="impossible", name=self.about, reason=f"no window is that: {known}; of {has}")
        return None

    def on_timeout(self, view: TrafficObservation) -> TaskOutcome:
        until = f" until {view.span.end.isoformat()}" if view.span.end else ""
        return TaskOutcome(ended="not_yet", name=self.about, reason=f"{view.span.name!r} holds{until}")

    def after(self, view: TrafficObservation) -> Self:  # noqa: ARG002 (nothing to remember)
        return self

    def _fits(self, name: str, sizes: Sizes) -> bool:
        has = capacity_in_window(sizes, self.total, self.quota)
        enough = all(has.get(resource, 0.0) >= amount for resource, amount in self.at_least.items())
        return enough and self.window in ("", name)

    def _wanted(self) -> str:
        room = [f"{amount:g} {resource}" for resource, amount in sorted(self.at_least.items())]
        named = f"window {self.window!r}" if self.window else ""
        return " with ".join(filter(None, (named or "a window", f"at least {' and '.join(room)}" if room else "")))
