"""Teachers that come, go, die and hang while a student reads."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import msgspec
import pytest
from support.students.readers import POOL, Batches, reader_of, slow_teacher, wait_for_teachers
from support.teachers.process import PATIENCE_S, running_teacher, wait_until

from edl_runtime.distill import Discovered, Fixed
from edl_runtime.settings import RuntimeSettings


def test_a_killed_teacher_s_work_is_done_by_another(settings: RuntimeSettings) -> None:
    """SIGKILL with requests in flight loses, repeats and reorders nothing, long before a request times out."""
    batches = Batches(120, seconds=0.005)
    with (
        slow_teacher(settings) as first,
        slow_teacher(settings) as second,
        reader_of(batches, Discovered(POOL), settings) as reader,
    ):
        wait_for_teachers(settings, 2)
        seen = []
        killed = False
        longest = 0.0
        last = time.monotonic()
        for batch in reader:
            seen.append(batch)
            if not killed and len(reader.stats().answered) == 2:
                first.process.kill()
                killed = True
            elif killed:
                longest = max(longest, time.monotonic() - last)
            last = time.monotonic()
        batches.check(seen)
        assert 0 < longest < 10
        assert reader.stats().answered[second.address] > 100


def test_a_teacher_that_hangs_is_not_waited_for(settings: RuntimeSettings) -> None:
    """What a stopped process was asked is asked of another as soon as its lease has run out."""
    batches = Batches(60, seconds=0.005)
    with (
        slow_teacher(settings) as first,
        slow_teacher(settings),
        reader_of(batches, Discovered(POOL), settings) as reader,
    ):
        wait_for_teachers(settings, 2)
        seen = []
        begin = 0.0
        for batch in reader:
            seen.append(batch)
            if not begin and len(reader.stats().answered) == 2:
                first.process.send_signal(signal.SIGSTOP)
                begin = time.monotonic()
        batches.check(seen)
        assert begin
        assert time.monotonic() - begin < 15


def test_new_teachers_are_used_without_a_restart(settings: RuntimeSettings) -> None:
    """A pool that grows from one to three while the student reads gives each new one work soon."""
    batches = Batches(10**6, seconds=0.002)
    with contextlib.ExitStack() as stack:
        stack.enter_context(slow_teacher(settings))
        reader = stack.enter_context(reader_of(batches, Discovered(POOL), settings))
        joined: dict[str, float] = {}
        starting: list[threading.Thread] = []

        def add() -> None:
            teacher = stack.enter_context(slow_teacher(settings))
            joined[teacher.address] = time.monotonic()

        for number, _ in enumerate(reader):
            if number == 0:
                starting = [threading.Thread(target=add), threading.Thread(target=add)]
                for thread in starting:
                    thread.start()
            answered = reader.stats().answered
            for address, since in list(joined.items()):
                if address in answered:
                    del joined[address]
                else:
                    assert time.monotonic() - since < 10, "a new teacher has no work"
            if len(answered) == 3:
                break
        for thread in starting:
            thread.join()
        assert reader.stats().teachers == 3


def test_a_teacher_that_leaves_is_not_missed(settings: RuntimeSettings) -> None:
    """SIGTERM drains: the reader goes on with the others, and nothing is lost."""
    batches = Batches(100, seconds=0.005)
    with slow_teacher(settings) as leaving, slow_teacher(settings):
        with reader_of(batches, Discovered(POOL), settings) as reader:
            seen = []
            for batch in reader:
                seen.append(batch)
                if len(seen) == 20:
                    leaving.terminate()
            batches.check(seen)
            wait_until(lambda: reader.stats().teachers == 1)
        assert leaving.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_all_teachers_gone_is_a_pause(settings: RuntimeSettings) -> None:
    """The reader waits, goes on with whoever comes, and has lost nothing."""
    batches = Batches(40, seconds=0.005)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(slow_teacher(settings))
        reader = stack.enter_context(reader_of(batches, Discovered(POOL), settings))
        seen = []
        for batch in reader:
            seen.append(batch)
            if len(seen) == 10:
                first.process.kill()
                first.process.wait()
                stack.enter_context(slow_teacher(settings))
        batches.check(seen)


def test_a_predictor_that_hangs_costs_little(settings: RuntimeSettings) -> None:
    """A teacher that says it is ready and answers nothing is asked once by each connection, then left alone."""
    settings = msgspec.structs.replace(settings, teacher_timeout_s=1.0)
    batches = Batches(200)
    with (
        running_teacher("support.models:slow") as hung,
        running_teacher("support.models:slow") as good,
        reader_of(batches, Fixed((hung.address, good.address)), settings) as reader,
    ):
        batches.check(list(reader))
        predictor = hung.predictor
        predictor.suspend()
        try:
            begin = time.monotonic()
            batches.check(list(reader))
            assert time.monotonic() - begin < 10
            wait_until(lambda: reader.stats().teachers == 1)
        finally:
            predictor.resume()  # so that it notices that its front is gone
