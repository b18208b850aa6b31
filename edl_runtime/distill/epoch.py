"""What the pipeline keeps while it runs: passes over the source, and each connection's part in them."""

from __future__ import annotations

from collections import deque

from edl_runtime.distill.batches import Batch, Request
from edl_runtime.distill.gathering import Gathering


class Epoch:
    """One pass over the source: the batches that were put in and not yet taken, in order.

    - `awaited`: the script waits for news of it.
    - `gathering`: the items that the source gave and nobody is asked about yet, once it is fed.
    - `over`: the script has left it, at its end or before.
    """

    __slots__ = ("awaited", "batches", "ended", "error", "gathering", "over", "waits_for_signature")

    def __init__(self) -> None:
        self.batches: deque[Batch] = deque()
        self.awaited = False
        self.ended = False
        self.error: BaseException | None = None  # of the source; raised after the batches before it
        self.gathering: Gathering | None = None
        self.over = False
        self.waits_for_signature = False

    def drop(self) -> int:
        """Be over; return the weight of the batches that nobody will take."""
        self.over = True
        weight = 0
        for batch in self.batches:
            batch.dropped = True
            weight += batch.weight
        self.batches.clear()
        return weight


class Lane:
    """What the pipeline knows of one connection: its teacher, and what that is asked at the moment, since when.

    `gave_back` is true when another teacher is asked the same since this one may never answer.
    """

    __slots__ = ("address", "asked", "asked_at", "gave_back", "leaving")

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked: Request | None = None
        self.asked_at = 0.0  # monotonic seconds
        self.gave_back = False
        self.leaving = False

    def ask(self, request: Request, now: float) -> None:
        """Note what it is asked."""
        self.asked = request
        self.asked_at = now
        self.gave_back = False

    @property
    def pending(self) -> Request | None:
        """What it is asked, if an answer is still wanted."""
        request = self.asked
        return request if request is not None and not request.settled else None
