"""A ledger as plain Python says it is: what the real one must answer."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

LIMIT = 3


@dataclass
class LedgerModel:
    """Tickets and where they are; `doing` says whose, and where the lease began."""

    epochs: int
    added: int = 0
    closed: bool = False
    epoch: int = 0
    next: int = 0
    back: dict[int, int] = field(default_factory=dict)
    doing: dict[int, tuple[str, int]] = field(default_factory=dict)
    acked: dict[int, tuple[int, int]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    failures: dict[int, int] = field(default_factory=dict)

    def lease(self, worker: str, most: int) -> list[tuple[int, int]] | None:
        given: list[tuple[int, int]] = []
        while len(given) < most:
            if self.back:
                ticket = min(self.back, key=lambda ticket: (self.back[ticket], str(ticket)))
                offset = self.back.pop(ticket)
            elif self.next < (self.epoch + 1) * self.added:
                ticket, offset, self.next = self.next, 0, self.next + 1
            elif self.closed and not given and not self.doing and self.epoch + 1 < self.epochs:
                self.epoch += 1
                continue
            else:
                break
            if self.failures.get(ticket, 0) >= LIMIT:
                self.dropped.add(ticket)
            else:
                given.append((ticket, offset))
        self.doing |= {ticket: (worker, offset) for ticket, offset in given}
        return given or ([] if self.doing or not self.closed else None)

    def ack(self, ticket: int, step: int) -> None:
        _, start = self.doing.pop(ticket)
        self.acked[ticket] = (start, step)

    def fail(self, ticket: int, offset: int) -> bool:
        self.doing.pop(ticket)
        self.failures[ticket] = self.failures.get(ticket, 0) + 1
        if self.failures[ticket] < LIMIT:
            self.back[ticket] = offset
            return False
        self.dropped.add(ticket)
        return True

    def release(self, step: int, positions: Mapping[int, int], alive: Collection[str], *, failed: bool) -> int:
        held = {ticket: start for ticket, (worker, start) in self.doing.items() if worker not in alive}
        later = {ticket: start for ticket, (start, acked_at) in self.acked.items() if acked_at > step}
        for ticket, start in held.items():
            offset = max(start, positions.get(ticket, 0))
            if failed:
                self.fail(ticket, offset)
            else:
                del self.doing[ticket]
                self.back[ticket] = offset
        for ticket, start in later.items():
            del self.acked[ticket]
            self.back[ticket] = max(start, positions.get(ticket, 0))
        return len(held) + len(later)

    def commit(self, step: int, positions: Mapping[int, int]) -> LedgerModel:
        """Return what a checkpoint holds: all in hand has come back."""
        self.done |= {ticket for ticket, (_, acked_at) in self.acked.items() if acked_at <= step}
        self.acked = {ticket: acked for ticket, acked in self.acked.items() if acked[1] > step}
        saved = copy.deepcopy(self)
        saved.release(step, positions, (), failed=False)
        return saved

    def restored(self, now: LedgerModel, *, forgotten: bool, stream: bool) -> LedgerModel:
        """Return this checkpoint's ledger; a Redis that has not forgotten adds what it knows besides."""
        back = copy.deepcopy(self)
        if not forgotten:
            for ticket, count in now.failures.items():
                back.failures[ticket] = max(count, back.failures.get(ticket, 0))
            if stream:
                back.added, back.closed = max(now.added, self.added), now.closed or self.closed
        return back

    def counts(self) -> dict[str, int]:
        return {
            "todo": self.added * (self.epochs if self.closed else 1) - self.next + len(self.back),
            "doing": len(self.doing),
            "acked": len(self.acked),
            "done": len(self.done),
            "set_aside": len([count for count in self.failures.values() if count >= LIMIT]),
        }
