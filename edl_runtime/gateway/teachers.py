"""The teachers of a pool, and which one a part of a request is sent to."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterable

import msgspec

from edl_runtime.distill.teacher_connections import TeacherHealth
from edl_runtime.external.address import ServerAddress
from edl_runtime.gateway.errors import NoGoodTeacherError
from edl_runtime.gateway.requests import PoolModel
from edl_runtime.meter import BusyMeter
from edl_runtime.protocol.llm import Kind, LlmServer
from edl_runtime.registry.members import Member

MOST_PARTS = 128
"""That a teacher is asked at a time; so many fill it, and each takes a connection, whose pool gets slow by many."""


TestScores = list[tuple[int, float]]
"""Of the self-test's tokens behind the first: each token, and its mean log-probability."""


class LlmTeacher:
    """A registered server of a language model.

    - `tested`: whether it has passed its self-test; only then, and out of quarantine, is it `good`.
    - `scores`: of the self-test's tokens, once it has passed one; empty for a kind that tells none.
    - `tokens`, `parts`: what it is asked now.
    - `failed`: set when it has to be tested again.
    - `left`: set when it is in the pool no more.
    """

    def __init__(self, member: Member, server: LlmServer) -> None:
        self.address = member.address
        self.model = member.signature.name if member.signature else ""
        self.server = server
        self.kind: Kind = server.kind
        self.weight = member.weight
        self.fence = member.fence
        parsed = ServerAddress.parse(member.address)
        self.url = f"{'https' if parsed.scheme.endswith('https') else 'http'}://{parsed.endpoint}"
        self.health = TeacherHealth(member.address)
        self.tested = False
        self.scores: TestScores = []
        self.failed = asyncio.Event()
        self.left = asyncio.Event()
        self.tokens = 0
        self.parts = 0

    @property
    def good(self) -> bool:
        return self.tested and not self.health.reason

    def has_room(self, tokens: int) -> bool:
        """Whether it may be asked so many tokens more; a part of any size by itself."""
        return not self.parts or (self.parts < MOST_PARTS and self.tokens + tokens <= self.server.tokens_in_flight)

    def fail(self, reason: str) -> None:
        """Put it into quarantine, which ends with a self-test."""
        self.health.quarantine(reason)
        self.failed.set()

    def doubt(self) -> None:
        """Have it tested at once, before it gets more."""
        self.tested = False
        self.failed.set()


def common_model(teachers: Iterable[LlmTeacher]) -> PoolModel:
    """Return what one or more teachers of a pool have in common: the least of their limits."""
    known = list(teachers)
    first = known[0]
    lengths = [one.server.max_model_len for one in known if one.server.max_model_len is not None]
    sizes = [one.server.vocab_size for one in known if one.server.vocab_size is not None]
    capped = [one.server.max_logprobs for one in known if one.server.max_logprobs >= 0]
    server = msgspec.structs.replace(
        first.server,
        max_model_len=min(lengths, default=None),
        vocab_size=min(sizes, default=None),
        max_logprobs=min(capped, default=-1),
    )
    return PoolModel(first.model, server)


class _Waiter:
    """A part that waits for a teacher; `woken` when it has one, and when the pool's teachers change."""

    def __init__(self, kinds: frozenset[Kind], tokens: int, avoided: Collection[str]) -> None:
        self.kinds = kinds
        self.tokens = tokens
        self.avoided = avoided
        self.woken = asyncio.Event()
        self.teacher: LlmTeacher | None = None


class TeacherQueue:
    """Gives parts to the least loaded of the pool's good teachers, first come, first served.

    - `teachers`: by address; call `changed` after a change of them, or of one's health.
    """

    def __init__(self, pool: str) -> None:
        self.teachers: dict[str, LlmTeacher] = {}
        self.busy = BusyMeter(time.monotonic())
        self.waits = BusyMeter(time.monotonic())
        self._pool = pool
        self._waiting: deque[_Waiter] = deque()

    def good(self, kinds: Collection[Kind]) -> list[LlmTeacher]:
        """Return the good teachers of these kinds."""
        return [teacher for teacher in self.teachers.values() if teacher.good and teacher.kind in kinds]

    @property
    def quarantined(self) -> dict[str, str]:
        """The teachers that get no requests, and why."""
        return {one.address: one.health.reason for one in self.teachers.values() if one.health.reason}

    @property
    def tokens_waiting(self) -> int:
        return sum(waiter.tokens for waiter in self._waiting)

    @property
    def parts_waiting(self) -> int:
        return len(self._waiting)

    def changed(self) -> None:
        """Note that teachers came, left, failed or recovered."""
        self._offer()
        for waiter in self._waiting:
            waiter.woken.set()

    async def take(self, kinds: frozenset[Kind], tokens: int, avoided: Collection[str], wait_s: float) -> LlmTeacher:
        """Return a teacher for a part of so many tokens, if there is one not of `avoided`; `give_back` it.

        Waits as long as good teachers are busy. Raises NoGoodTeacherError when there has been none for `wait_s`.
        """
        waiter = _Waiter(kinds, tokens, avoided)
        self._waiting.append(waiter)
        self.waits.begin("", time.monotonic())
        try:
            self._offer()
            await self._wait(waiter, wait_s)
        except BaseException:
            if waiter.teacher:
                self.give_back(waiter.teacher, tokens)
            raise
        finally:
            self.waits.end("", time.monotonic())
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._offer()  # those behind it
        assert waiter.teacher is not None  # noqa: S101 - `_wait` returns for nothing else
        return waiter.teacher

    async def _wait(self, waiter: _Waiter, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        until: float | None = None
        while waiter.teacher is None:
            waiter.woken.clear()
            if self.good(waiter.kinds):
                until, began = None, loop.time()
            elif until is None:
                until = loop.time() + wait_s
            try:
                async with asyncio.timeout_at(until):
                    await waiter.woken.wait()
            except TimeoutError:
                if waiter.teacher is None:
                    others = tuple(f"{address}: {reason}" for address, reason in self.quarantined.items())
                    raise NoGoodTeacherError(self._pool, loop.time() - began, others) from None

    def try_take(self, kinds: frozenset[Kind], tokens: int, avoided: Collection[str]) -> LlmTeacher | None:
        """Return an idle teacher that is not of `avoided`, while no part waits; else None."""
        idle = [one for one in self.good(kinds) if not one.parts and one.address not in avoided]
        if self._waiting or not idle:
            return None
        self._begin(idle[0], tokens)
        return idle[0]

    def give_back(self, teacher: LlmTeacher, tokens: int) -> None:
        """Note that the teacher is no longer asked this part."""
        teacher.tokens -= tokens
        teacher.parts -= 1
        self.busy.end(teacher, time.monotonic())
        self._offer()

    def _begin(self, teacher: LlmTeacher, tokens: int) -> None:
        teacher.tokens += tokens
        teacher.parts += 1
        self.busy.begin(teacher, time.monotonic())

    def _offer(self) -> None:
        """Give teachers to the parts that wait. None overtakes an earlier one that waits for the same teachers."""
        blocked: set[Kind] = set()
        for waiter in list(self._waiting):
            if not blocked.isdisjoint(waiter.kinds) or not (good := self.good(waiter.kinds)):
                continue
            others = [teacher for teacher in good if teacher.address not in waiter.avoided] or good
            free = [teacher for teacher in others if teacher.has_room(waiter.tokens)]
            if not free:
                blocked |= waiter.kinds
                continue
            waiter.teacher = min(free, key=lambda teacher: teacher.tokens / teacher.weight)
            self._begin(waiter.teacher, waiter.tokens)
            self._waiting.remove(waiter)
            waiter.woken.set()
