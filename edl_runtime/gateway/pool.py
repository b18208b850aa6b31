"""A pool that the gateway follows: tests its teachers, and has requests answered by them in parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AsyncExitStack, aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from edl_runtime.concurrency import all_completed, first_completed
from edl_runtime.distill.discovery import DemandMeter, PoolCounts
from edl_runtime.distill.dispatch_policy import HedgingPolicy
from edl_runtime.errors import SpecError
from edl_runtime.gateway.errors import PartFailedError, RequestRefusedError, TeacherFailedError
from edl_runtime.gateway.http import TeacherClient
from edl_runtime.gateway.requests import ALL_KINDS, PoolModel, Question, Request
from edl_runtime.gateway.room import Holding
from edl_runtime.gateway.self_test import TIMES, check_serves, others_of, read_alike, test_question
from edl_runtime.gateway.splitting import MIN_TOKENS, split
from edl_runtime.gateway.stats import PoolStats
from edl_runtime.gateway.teachers import LlmTeacher, TeacherQueue, TestScores, common_model
from edl_runtime.gateway.vllm import Answer, BadAnswerError
from edl_runtime.log import get_logger
from edl_runtime.pool_reports import StudentReport
from edl_runtime.protocol.llm import Kind, llm_server
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member, student_id
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.keys import Service

if TYPE_CHECKING:
    from redis.asyncio import Redis

MOST_TRIES = 4
"""A part that so many teachers have failed at is not asked of more: it may be the cause."""

SILENT_S = 5.0
"""A teacher that has left the pool may finish a stream that it has begun, but not be silent for longer."""

T = TypeVar("T")

log = get_logger(__name__)


class FollowedPool:
    """A pool whose teachers answer requests; it is followed from `start` to `stop`. They wait for `wait_s` at most.

    The gateway is one of the pool's students in the registry: `edl pools` shows its teachers in quarantine, and
    autoscaling sees its demand. It shares the pool's teachers with other gateways.
    """

    def __init__(self, name: str, redis: Redis, http: TeacherClient, settings: RuntimeSettings, wait_s: float) -> None:
        self.name = name
        self.stats = PoolStats()
        self.queue = TeacherQueue(name)
        self._redis = redis
        self._http = http
        self._settings = settings
        self.wait_s = wait_s
        self._hedging = HedgingPolicy(time.monotonic())
        self._listed = asyncio.Event()
        self._demand = DemandMeter(self._counts, want=None)
        self._running: asyncio.Task[None] | None = None
        self._tests: dict[LlmTeacher, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Start following the registry."""
        self._running = asyncio.create_task(self._run(), name=f"pool {self.name}")

    @property
    def ended(self) -> bool:
        """Whether it can't be followed any more: Redis was unavailable at the start."""
        return self._running is None or self._running.done()

    async def stop(self) -> None:
        """Stop following the registry."""
        tasks = [task for task in (self._running, *self._tests.values()) if task]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def is_healthy(self) -> bool:
        """Whether it has a good teacher. Raises RegistryUnavailableError."""
        await self._wait_listed()
        return bool(self.queue.good(ALL_KINDS))

    async def model(self, kinds: frozenset[Kind]) -> PoolModel:
        """Return what its teachers of these kinds have in common; waits for one, if there is none.

        Raises RequestRefusedError if it has only others, NoGoodTeacherError, RegistryUnavailableError.
        """
        await self._wait_listed()
        there = {teacher.kind for teacher in self.queue.teachers.values()}
        if there and there.isdisjoint(kinds):
            have, need = " and ".join(sorted(there)), " or ".join(sorted(kinds))
            raise RequestRefusedError(f"pool {self.name!r} has teachers of {have}, but this request needs {need}")
        return common_model(await self._good(kinds))

    async def wait_for_teacher(self) -> None:
        """Wait until it has a good teacher of any kind. Raises NoGoodTeacherError, RegistryUnavailableError."""
        await self._wait_listed()
        await self._good(ALL_KINDS)

    async def _good(self, kinds: frozenset[Kind]) -> list[LlmTeacher]:
        """Return its good teachers of these kinds; waits for one, if there is none."""
        if good := self.queue.good(kinds):
            return good
        teacher = await self.queue.take(kinds, 0, (), self.wait_s)
        self.queue.give_back(teacher, 0)
        return self.queue.good(kinds) or [teacher]  # it may be doubted again already

    async def answer(self, request: Request, holding: Holding) -> bytes:
        """Return the answer to a whole request, which holds what its answer takes as it comes.

        Raises RequestRefusedError, NoGoodTeacherError, PartFailedError, RegistryUnavailableError, RequestTooLargeError,
        NoRoomError.
        """
        began = time.monotonic()
        request.check(await self.model(request.kinds))
        await holding.reserve(request.expected)
        parts = split(request.tokens, len(self.queue.good(request.kinds)))
        answers = await all_completed(*(self._answer_part(request, holding, rows) for rows in parts))
        content = await asyncio.to_thread(request.join, answers)
        self.stats.count_answer(sum(request.tokens), len(request.tokens), time.monotonic() - began)
        return content

    async def stream(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield a teacher's answer to a request of one part as it comes.

        Raises as `answer`, and TeacherFailedError once a part of it has come.
        """
        request.check(await self.model(request.kinds))
        rows, tokens = range(len(request.tokens)), sum(request.tokens)
        failed: list[TeacherFailedError] = []
        began, begun = time.monotonic(), False
        while True:
            teacher = await self._take(request, tokens, failed)
            try:
                async with aclosing(self._received(teacher, request.question(teacher.kind, rows))) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                self.stats.count_answer(tokens, len(rows), time.monotonic() - began)
            except TeacherFailedError as error:
                self._note_failure(teacher, error)
                failed.append(error)
                if begun:  # the caller has had a part of the answer
                    raise
            else:
                return
            finally:
                self.queue.give_back(teacher, tokens)

    async def _received(self, teacher: LlmTeacher, question: Question) -> AsyncGenerator[bytes, None]:
        """Yield what a teacher sends, unless it has left the pool, and sends nothing: it may be stopped."""
        left = asyncio.create_task(teacher.left.wait())
        try:
            async with AsyncExitStack() as stack:
                stream = self._http.stream(teacher, question)
                response = await _unless_left(teacher, left, stack.enter_async_context(stream), grace_s=0.0)
                chunks = response.aiter_raw()
                while chunk := await _unless_left(teacher, left, anext(chunks, b""), grace_s=SILENT_S):
                    yield chunk
        finally:
            left.cancel()

    async def _answer_part(
        self, request: Request, holding: Holding, rows: range, *before: TeacherFailedError
    ) -> Answer:
        tokens = sum(request.tokens[rows.start : rows.stop])
        failed = list(before)
        while True:
            teacher = await self._take(request, tokens, failed)
            try:
                answer = await self._ask_hedged(request, holding, rows, tokens, teacher)
            except TeacherFailedError as error:
                failed.append(error.with_traceback(None))  # without the frames that have this list
                self.stats.retries += 1
            else:
                if failed:
                    self._blame(failed)
                return answer

    def _blame(self, failed: list[TeacherFailedError]) -> None:
        """Put those into quarantine that failed at what another teacher has answered: it was not the request."""
        for error in failed:
            teacher = self.queue.teachers.get(error.address)
            if teacher and error.answered:
                teacher.fail(error.reason)
        self.queue.changed()

    async def _take(self, request: Request, tokens: int, failed: list[TeacherFailedError]) -> LlmTeacher:
        tries = sum(not error.unreached for error in failed)
        if tries >= MOST_TRIES:
            raise PartFailedError(self.name, tries, str(failed[-1]))
        return await self.queue.take(request.kinds, tokens, {error.address for error in failed}, self.wait_s)

    async def _ask_hedged(
        self, request: Request, holding: Holding, rows: range, tokens: int, first: LlmTeacher
    ) -> Answer:
        """Ask a teacher, an idle one too if it is slow, and any if it leaves the pool; the first good answer counts."""
        asked = {self._start(request, holding, rows, tokens, first): first}
        elsewhere = asyncio.create_task(self._answer_elsewhere(request, holding, rows, first))
        scale = max(tokens, MIN_TOKENS) / MIN_TOKENS
        try:
            while True:
                alone = request.hedged and len(asked) == 1
                delay_s = self._hedging.delay_s * scale if alone else None
                waits = {elsewhere, *asked}
                done, _ = await asyncio.wait(waits, timeout=delay_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done & asked.keys():
                    teacher = asked.pop(task)
                    if task.exception() is None:
                        self.stats.hedges_won += teacher is not first
                        return task.result()
                    is_last = not asked and not first.left.is_set()
                    if is_last or not isinstance(task.exception(), TeacherFailedError):
                        return task.result()  # raises
                if elsewhere in done:
                    return elsewhere.result()
                if not done and (second := self._hedge(request, tokens, first)):
                    asked[self._start(request, holding, rows, tokens, second)] = second
        finally:
            for task in (elsewhere, *asked):
                task.cancel()
            await asyncio.gather(elsewhere, *asked, return_exceptions=True)

    async def _answer_elsewhere(self, request: Request, holding: Holding, rows: range, first: LlmTeacher) -> Answer:
        """Return the answer of others once `first` has left the pool: it may be stopped, and never answer."""
        await first.left.wait()
        self.stats.retries += 1
        log.info("part.asked_elsewhere", pool=self.name, left=first.address)
        failure = TeacherFailedError(first.address, "it has left the pool", unreached=True)
        return await self._answer_part(request, holding, rows, failure)

    def _start(
        self, request: Request, holding: Holding, rows: range, tokens: int, teacher: LlmTeacher
    ) -> asyncio.Task[Answer]:
        """Ask a taken teacher; it is given back even if the task is cancelled before it runs."""
        task = asyncio.create_task(self._ask(request, holding, rows, tokens, teacher))
        task.add_done_callback(lambda _: self.queue.give_back(teacher, tokens))
        return task

    def _hedge(self, request: Request, tokens: int, first: LlmTeacher) -> LlmTeacher | None:
        """Return a second teacher to ask, if one is idle and the budget allows it."""
        second = self.queue.try_take(request.kinds, tokens, (first.address,))
        if second is None:
            return None
        if not self._hedging.spend(time.monotonic()):
            self.queue.give_back(second, tokens)
            return None
        self.stats.hedges += 1
        log.info("part.hedged", pool=self.name, slow=first.address, teacher=second.address, tokens=tokens)
        return second

    async def _ask(self, request: Request, holding: Holding, rows: range, tokens: int, teacher: LlmTeacher) -> Answer:
        """Return a teacher's answer, which is held. Raises RequestRefusedError, TeacherFailedError, as `answer`."""
        began = time.monotonic()
        held = 0

        async def hold(size: int) -> None:
            nonlocal held
            await holding.grow(size * request.answer_takes)
            held += size * request.answer_takes

        try:
            content = await self._http.ask(teacher, request.question(teacher.kind, rows), hold)
            answer = await asyncio.to_thread(request.read, teacher.kind, rows, content)
            held = 0  # it is the request's now
        except BadAnswerError as error:
            failure = TeacherFailedError(teacher.address, str(error), answered=True)
            self._note_failure(teacher, failure)
            raise failure from None
        except TeacherFailedError as error:
            self._note_failure(teacher, error)
            raise
        finally:
            holding.unuse(held)
        if request.hedged:
            self._hedging.note((time.monotonic() - began) * MIN_TOKENS / max(tokens, MIN_TOKENS))
        self.stats.parts += 1
        return answer

    def _note_failure(self, teacher: LlmTeacher, error: TeacherFailedError) -> None:
        self.stats.failures += 1
        log.warning("part.failed", pool=self.name, teacher=teacher.address, cause=error.reason)
        if error.answered:
            teacher.doubt()
        else:
            teacher.fail(error.reason)
        self.queue.changed()

    # The registry, and the teachers' health

    async def _wait_listed(self) -> None:
        if not self._listed.is_set() and self._running is not None:
            await first_completed(_event(self._listed), _result(self._running))

    async def _run(self) -> None:
        service = Service(self._settings.namespace, self.name, "students")
        me = Member(id=student_id("gateway", 0), address=self._settings.host)
        try:
            async with hold_lease(self._redis, service, me, ttl_s=self._settings.lease_ttl_s, make_report=self._report):
                async for members in Directory(self._redis, self._settings.namespace).watch(self.name):
                    self._update(members)
        finally:
            for test in self._tests.values():
                test.cancel()

    def _update(self, members: list[Member]) -> None:
        there = {member.address: member for member in members}
        for address, teacher in list(self.queue.teachers.items()):
            if address not in there or there[address].fence != teacher.fence:
                del self.queue.teachers[address]
                self._tests.pop(teacher).cancel()
                if address not in there:  # one that is there has registered anew
                    teacher.left.set()
        for address, member in there.items():
            server = llm_server(member.signature)
            if server is None or address in self.queue.teachers:
                continue
            with suppress(SpecError):
                teacher = self.queue.teachers[address] = LlmTeacher(member, server)
                self._tests[teacher] = asyncio.create_task(self._keep_tested(teacher))
        self._listed.set()
        self.queue.changed()

    async def _keep_tested(self, teacher: LlmTeacher) -> None:
        """Test a teacher when it joins, and after each quarantine."""
        while True:
            began = time.monotonic()
            teacher.failed.clear()
            try:
                teacher.scores = await self._test(teacher)
                self._compare(teacher)
            except (BadAnswerError, RequestRefusedError) as error:
                teacher.fail(str(error))
            except TeacherFailedError as error:
                teacher.fail(error.reason)
            except Exception as error:  # noqa: BLE001 -- else nobody would learn of it, and the teacher stay untested
                teacher.fail(f"its self-test can't be made: {type(error).__name__}: {error}")
            else:
                teacher.health.note_answer(began)
                teacher.tested = True
            self.queue.changed()
            if not teacher.health.reason:
                await teacher.failed.wait()
            await asyncio.sleep(teacher.health.probe_due_in_s(time.monotonic()))

    async def _test(self, teacher: LlmTeacher) -> TestScores:
        check_serves(await self._http.get(teacher, "/v1/models"), teacher.model)
        if teacher.kind == "swift":
            return []
        question = test_question(teacher.model, teacher.server)
        return read_alike(teacher.server, [await self._http.ask(teacher, question) for _ in range(TIMES)])

    def _compare(self, tested: LlmTeacher) -> None:
        """Put those into quarantine that have other weights than the pool. Raises BadAnswerError if `tested` has."""
        known = sorted((one for one in self.queue.teachers.values() if one.scores), key=lambda one: one.fence)
        reason = "its scores are not those of most of the pool: has it other weights under the same name?"
        others = [known[place] for place in others_of([one.scores for one in known])]
        for other in others:
            if other is not tested and other.good:
                other.fail(reason)
        if tested in others:
            raise BadAnswerError(reason)

    def _counts(self) -> PoolCounts:
        now = time.monotonic()
        return PoolCounts(
            connected=frozenset(teacher.address for teacher in self.queue.teachers.values() if teacher.good),
            in_flight=sum(teacher.parts for teacher in self.queue.teachers.values()),
            queued=self.queue.parts_waiting,
            waited_s=self.queue.waits.total_s(now),
            asked_s=self.queue.busy.total_s(now),
            batches=self.stats.answers,
            samples=self.stats.sequences,
        )

    def _report(self) -> StudentReport:
        return self._demand.report(self.queue.quarantined)


async def _unless_left(teacher: LlmTeacher, left: asyncio.Task[Any], received: Awaitable[T], grace_s: float) -> T:
    """Return what is received, for which a teacher has `grace_s` from when it has `left`. Raises TeacherFailedError."""
    receiving = asyncio.ensure_future(received)
    try:
        await asyncio.wait({receiving, left}, return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():
            await asyncio.wait({receiving}, timeout=grace_s)
        if not receiving.done():
            raise TeacherFailedError(teacher.address, "it has left the pool, and sends nothing more", unreached=True)
        return receiving.result()
    finally:
        if receiving.cancel():
            await asyncio.wait({receiving})


async def _event(event: asyncio.Event) -> None:
    await event.wait()


async def _result(task: asyncio.Task[None]) -> None:
    await asyncio.shield(task)
