"""Teachers that die, stop and come back in the middle of an epoch."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import psutil
import pytest
from support.students.readers import POOL, Batches, reader_of, slow_teacher, wait_for_teachers
from support.students.watching import SLACK_S, OddTeacher, all_answered, read_epoch, read_until, tell, together
from support.teachers.process import Teacher, running_teacher, wait_until

from edl_runtime.distill import Discovered, Fixed
from edl_runtime.distill.batches import MOST_FAILURES
from edl_runtime.settings import RuntimeSettings

STALL_S = 0.5
BATCHES = Batches(120, seconds=0.005)


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    """Somebody who looks while the student reads."""
    with ThreadPoolExecutor() as aside:
        yield aside


@pytest.mark.slow
def test_a_killed_teacher_is_out_of_use_at_once(settings: RuntimeSettings, aside: ThreadPoolExecutor) -> None:
    """SIGKILL with requests in flight: its connections tell, long before its lease runs out."""
    gone: list[Future[float]] = []
    with (
        together(slow_teacher(settings), slow_teacher(settings)) as (first, second),
        reader_of(BATCHES, Discovered(POOL), settings) as reader,
    ):
        wait_for_teachers(settings, 2)

        def kill() -> None:
            first.process.kill()
            gone.append(aside.submit(wait_until, lambda: reader.stats().teachers == 1))

        seen, longest_gap_s = read_epoch(reader, kill, when=all_answered(reader, 2))
        BATCHES.check(seen)
        stats = reader.stats()
    gone_s = gone[0].result()
    tell(f"killed: out of use after {gone_s:.3f} s, longest gap {longest_gap_s:.3f} s")
    assert gone_s < 0.5
    assert longest_gap_s < STALL_S + SLACK_S
    assert 0 < stats.retries <= 4  # what its two connections were asked, and may have been asked again before it showed
    assert stats.answered[second.address] > stats.answered[first.address]


@contextlib.contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["teacher", "predictor"])
def test_a_stopped_teacher_is_not_waited_for(what: str, settings: RuntimeSettings, aside: ThreadPoolExecutor) -> None:
    """What it was asked another answers; it is out of use with its lease, or its first timeout, and then comes back."""
    settings = msgspec.structs.replace(settings, teacher_timeout_s=2.0)
    gone: list[Future[float]] = []
    with (
        together(slow_teacher(settings), slow_teacher(settings)) as (first, _),
        reader_of(BATCHES, Discovered(POOL), settings) as reader,
        contextlib.ExitStack() as stop,
    ):
        wait_for_teachers(settings, 2)
        BATCHES.check(list(reader))  # by which it is known how long answers take
        parts = [first.predictor] if what == "predictor" else [first.predictor, psutil.Process(first.process.pid)]

        def stop_it() -> None:
            stop.enter_context(stopped(*parts))
            gone.append(aside.submit(wait_until, lambda: reader.stats().teachers == 1))

        seen, longest_gap_s = read_epoch(reader, stop_it, when=all_answered(reader, 2))
        BATCHES.check(seen)
        read_until(reader, BATCHES, lambda: reader.stats().teachers == 1)
        gone_s = gone[0].result()
        tell(f"stopped: out of use after {gone_s:.3f} s, longest gap {longest_gap_s:.3f} s")
        assert longest_gap_s < STALL_S + SLACK_S
        assert gone_s < (settings.lease_ttl_s if what == "teacher" else settings.teacher_timeout_s) + SLACK_S
        assert 0 < reader.stats().hedges <= 4
        answered = reader.stats().answered[first.address]
        stop.close()
        read_until(reader, BATCHES, lambda: reader.stats().answered[first.address] > answered)
        assert reader.stats().quarantined == {}


@pytest.mark.slow
def test_all_teachers_dead_is_a_pause_until_one_registers(settings: RuntimeSettings, aside: ThreadPoolExecutor) -> None:
    """Nothing is lost, and whoever comes is asked within a second of its registering."""
    with contextlib.ExitStack() as stack:
        teachers = stack.enter_context(together(slow_teacher(settings), slow_teacher(settings)))
        reader = stack.enter_context(reader_of(BATCHES, Discovered(POOL), settings))
        wait_for_teachers(settings, 2)
        coming: list[Future[tuple[Teacher, float]]] = []

        def begin() -> tuple[Teacher, float]:
            return stack.enter_context(slow_teacher(settings)), time.monotonic()

        def kill_all() -> None:
            for teacher in teachers:
                teacher.process.kill()
                teacher.process.wait()
            coming.append(aside.submit(begin))

        arrived: list[float] = []
        seen = []
        for batch in reader:
            seen.append(batch)
            if not coming and len(reader.stats().answered) == 2:
                kill_all()
            if len(reader.stats().answered) == 3:
                arrived.append(time.monotonic())
        BATCHES.check(seen)
        _, ready_at = coming[0].result()
        tell(f"first batch {arrived[0] - ready_at:.3f} s after a teacher was ready")
        assert arrived[0] - ready_at < 1.0 + SLACK_S


@pytest.mark.slow
def test_a_teacher_that_is_restarted_at_its_address_goes_on() -> None:
    """With nobody to tell where teachers are, the only one's own return is noticed."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_teacher("support.models:slow"))
        reader = stack.enter_context(reader_of(BATCHES, Fixed((first.address,)), RuntimeSettings(teacher_wait_s=30)))

        def restart() -> None:
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            stack.enter_context(running_teacher("support.models:slow", "--port", first.address.rpartition(":")[2]))

        seen, longest_gap_s = read_epoch(reader, restart, when=lambda: reader.stats().batches == 20)
        BATCHES.check(seen)
        tell(f"first batch {longest_gap_s:.3f} s after the restart")
        assert longest_gap_s < 1.0 + SLACK_S


@pytest.mark.slow
def test_a_liar_that_is_left_alone_ends_nothing(odd: OddTeacher, aside: ThreadPoolExecutor) -> None:
    """While the good one is away for a time, what the liar fails waits for it: it may be back."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_teacher("support.models:slow"))
        settings = RuntimeSettings(teacher_wait_s=30)
        reader = stack.enter_context(reader_of(BATCHES, Fixed((first.address, odd.address)), settings))

        def restart() -> None:
            time.sleep(2.5)  # in which the liar is asked more often than a request may be failed
            stack.enter_context(running_teacher("support.models:slow", "--port", first.address.rpartition(":")[2]))

        def leave_it_alone() -> None:
            odd.become("garbage")
            first.process.kill()
            first.process.wait()
            aside.submit(restart)

        seen, longest_gap_s = read_epoch(reader, leave_it_alone, when=all_answered(reader, 2))
        BATCHES.check(seen)
        assert longest_gap_s > 2.0
        assert len(odd.asked()) >= MOST_FAILURES
