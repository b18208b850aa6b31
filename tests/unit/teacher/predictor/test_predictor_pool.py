"""When a predictor counts as hung, and which one is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.clock import LoopClock

from edl_runtime.protocol.errors import TeacherError
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.teacher.http.routes import answer_head
from edl_runtime.teacher.metrics import DeviceLoad, TeacherMetrics
from edl_runtime.teacher.models.model import ModelOptions
from edl_runtime.teacher.predictor.execute import EncodedAnswer
from edl_runtime.teacher.predictor.pool import CHECKS_PER_LIMIT, PING_LIMIT_S, PredictorPool, _PredictorProcess
from edl_runtime.teacher.predictor.process import PING, RECORD, unpack
from edl_runtime.teacher.shm.arena import READING, RUNNING, Arena

SIGNATURE = ModelSignature(name="m")
LIMIT_S = 2 * PING_LIMIT_S


class Channel:
    """Records what is sent to a predictor."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def write(self, data: bytes) -> None:
        self.told += [record[0] for record in unpack(data)[0]]


class Played(_PredictorProcess):
    """A predictor whose process is played by the test."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(ModelOptions(model="m"), arena, 0, TeacherMetrics(), DeviceLoad(1))
        self.channel = Channel()
        self.answers: list[EncodedAnswer] = []
        self._transport = self.channel  # type: ignore[assignment]
        self._announced.set_result(SIGNATURE)

    def ask(self, slot: int) -> None:
        self.submit(slot, 0, None, self.answers.append)

    def answer(self, slot: int) -> None:
        self.data_received(RECORD.pack(slot, 200, -1, 0))


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(4096, slots=8)
    yield made
    made.close()


async def beats(clock: LoopClock, count: int) -> None:
    for _ in range(count):
        await clock.advance(PING_LIMIT_S / CHECKS_PER_LIMIT)


async def test_one_that_answers_now_and_then_does_not_hang(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the time for one answer, however long the others wait for their turn."""
    clock, predictor = LoopClock(monkeypatch), Played(arena)
    for slot in range(3):
        predictor.ask(slot)
    failed = asyncio.create_task(predictor.failed(LIMIT_S))
    for slot in range(2):
        await beats(clock, 2 * CHECKS_PER_LIMIT - 1)
        predictor.answer(slot)
    await beats(clock, 2 * CHECKS_PER_LIMIT - 1)
    assert not failed.done()
    await beats(clock, 2)
    assert failed.done()
    assert "no answer for 10 s, with 1 requests pending" in str(failed.result())


async def test_an_idle_one_is_pinged(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs when it does not answer that, sooner than one that has much to do."""
    clock, predictor = LoopClock(monkeypatch), Played(arena)
    failed = asyncio.create_task(predictor.failed(LIMIT_S))
    await beats(clock, CHECKS_PER_LIMIT - 1)
    assert predictor.channel.told == [PING]
    predictor.answer(PING)
    await beats(clock, CHECKS_PER_LIMIT - 1)
    assert predictor.channel.told == [PING, PING]
    assert not failed.done()
    await beats(clock, 2)
    assert failed.done()
    assert "no answer for 5 s, not even a ping" in str(failed.result())


async def test_a_teacher_that_was_stopped_itself_does_not_blame_its_predictor(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long both were: silence is counted in checks."""
    clock, predictor = LoopClock(monkeypatch), Played(arena)
    failed = asyncio.create_task(predictor.failed(LIMIT_S))
    await beats(clock, 1)
    await clock.advance(3600.0)
    assert not failed.done()
    failed.cancel()


async def test_requests_of_one_that_is_lost_are_another_teacher_s(arena: Arena) -> None:
    """Those in flight and those that come are answered 503."""
    predictor = Played(arena)
    predictor.ask(0)
    predictor.connection_lost(None)
    predictor.ask(1)
    assert [answer.status for answer in predictor.answers] == [503, 503]
    assert isinstance(await predictor.failed(LIMIT_S), TeacherError)


@pytest.mark.parametrize("stage", [READING, RUNNING])
async def test_a_request_that_it_died_under_is_told_apart(arena: Arena, stage: int) -> None:
    """From those that only waited; and not in what the slot is used for next."""
    predictor = Played(arena)
    for slot in range(2):
        predictor.ask(slot)
    arena.stages[1] = stage
    predictor.connection_lost(None)
    predictor.ask(1)
    assert [answer.predictor_died for answer in predictor.answers] == [False, True, False]
    assert b"edl-predictor-died: 1" in answer_head(predictor.answers[1], keep_alive=True)


async def test_one_that_reads_a_request_does_not_hang(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Much JSON takes long on a busy machine, and no longer than its limit allows."""
    clock, predictor = LoopClock(monkeypatch), Played(arena)
    predictor.ask(0)
    arena.stages[0] = READING
    failed = asyncio.create_task(predictor.failed(LIMIT_S))
    await beats(clock, 9 * CHECKS_PER_LIMIT)
    assert not failed.done()
    arena.stages[0] = RUNNING
    await beats(clock, 3 * CHECKS_PER_LIMIT)
    assert failed.done()


async def test_the_one_with_the_fewest_to_do_is_asked(arena: Arena) -> None:
    """Of several devices."""
    one, other = Played(arena), Played(arena)
    both = PredictorPool([one, other], SIGNATURE, TeacherMetrics(), DeviceLoad(2))
    for slot in range(3):
        both.submit(slot, 0, None, one.answers.append)
    one.answer(0)
    one.answer(2)
    both.submit(3, 0, None, one.answers.append)
    assert (one.channel.told, other.channel.told) == ([0, 2, 3], [1])
