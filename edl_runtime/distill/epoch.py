"""What the pipeline keeps while it runs: the current pass over the source, and each connection's part in it."""

from __future__ import annotations

from collections import deque

from edl_runtime.distill.batches import Batch, Request


class Epoch:
    """One pass over the source: the batches that were put in and not yet taken, in order."""

    __slots__ = ("batches", "ended", "error", "failure", "waits_for_signature")

    def __init__(self) -> None:
        self.batches: deque[Batch] = deque()
        self.ended = False
        self.error: BaseException | None = None  # of the source; raised after the batches before it
        self.failure: BaseException | None = None  # of a request; raised at once
        self.waits_for_signature = False

    @property
    def waits_for_teachers(self) -> bool:
        """Whether it is a teacher's turn, and not the source's."""
        return bool(self.batches) or self.waits_for_signature


class Lane:
    """What the pipeline knows of one connection: its teacher, and what that is asked at the moment, in which epoch."""

    __slots__ = ("address", "asked", "epoch", "leaving")

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked: Request | None = None
        self.epoch: Epoch | None = None
        self.leaving = False

    def ask(self, request: Request, epoch: Epoch | None) -> None:
        """Note what it is asked."""
        self.asked = request
        self.epoch = epoch

    def pending(self, epoch: Epoch | None) -> Request | None:
        """Return what it is asked, if that is of this epoch and still unanswered."""
        request = self.asked
        return request if request is not None and self.epoch is epoch and not request.answered else None

    def release(self, epoch: Epoch | None) -> Request | None:
        """Be asked nothing any more; return what was pending."""
        request = self.pending(epoch)
        self.asked = None
        return request
