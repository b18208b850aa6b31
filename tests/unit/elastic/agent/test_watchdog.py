"""How an agent measures its worker's steps, and finds that it hangs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.elastic.generations import generation

from edl_runtime.elastic.agent.reconciler import WorkerPhase, WorkerState
from edl_runtime.elastic.agent.reporter import StepMeter
from edl_runtime.elastic.agent.watchdog import ProcessSample, Watchdog
from edl_runtime.elastic.comm.agent_protocol import StepDone
from edl_runtime.elastic.rendezvous.generation import GroupView, MemberLease, TrainerMember


def stepped(step: int, at: float, *, generation: int = 1, samples: int | None = None) -> StepDone:
    done = samples if samples is not None else step * 10
    return StepDone(generation=generation, step=step, at=at, epoch=0, samples=done, total_steps=100, clock_s=at - 50)


def test_progress_is_of_the_last_ten_seconds() -> None:
    """Older steps do not count; the time left follows from the median step."""
    steps = StepMeter()
    assert steps.progress(instances=2, generation=1) is None
    for step in range(1, 31):
        steps.add(msgspec.structs.replace(stepped(step, at=100.0 + step), metrics={"accuracy": step / 100}))
    report = steps.progress(instances=2, generation=1)
    assert report is not None
    assert (report.step, report.samples_per_s, report.time_left_s) == (30, 10.0, 70.0)
    assert (report.share, report.metrics) == (0.3, {"accuracy": 0.3})
    assert "2 instances" in report.line()


def test_a_pause_is_from_the_last_step_before_to_the_first_after() -> None:
    """Also when that step repeats one after a restart from a checkpoint; no rate is below 0 then."""
    steps = StepMeter()
    steps.add(stepped(1, 10.0))
    assert steps.pause_s is None
    steps.add(stepped(5, 14.0))
    steps.add(msgspec.structs.replace(stepped(3, 15.5, generation=2), at=0.0))
    report = steps.progress(instances=1, generation=2)
    assert report is not None
    assert (steps.pause_s, steps.paused_in) == (1.5, 1)
    assert (steps.step, steps.generation, report.samples_per_s) == (3, 2, 0.0)
    assert steps.median_s == 1.0


def view(*waits_for: int, up: int = 1) -> GroupView:
    """Return a view in which the members after this one wait for these steps."""
    ids = tuple(f"{index}-x" for index in range(1 + len(waits_for)))
    members = tuple(
        MemberLease(
            member=TrainerMember(id=each, index=int(each[0]), waits_for=step, up=up),
            deadline=9e9,
            heartbeat_at=0,
            since=0,
        )
        for each, step in zip(ids, (0, *waits_for), strict=True)
    )
    return GroupView(now=0.0, members=members, number=1, generation=generation(1, ids), state="active")


SLEEPS = ProcessSample("sleeping")
STOPPED = ProcessSample("stopped", 3.0, 70)
MEMBER = WorkerState(phase="member", called=True)
PLAIN = WorkerState(phase="member", elastic=False)
ALONE = view()


def check(
    watchdog: Watchdog,
    group: GroupView,
    now: float,
    *,
    worker: WorkerState = MEMBER,
    process: ProcessSample = SLEEPS,
    was_heard: bool = False,
    median_s: float = 0.1,
) -> str:
    """Check with a view that Redis has just returned."""
    seen = msgspec.structs.replace(group, now=now + 1.0)
    return watchdog.check(seen, worker, process, was_heard=was_heard, median_s=median_s, now=now)


def first_verdict(
    watchdog: Watchdog,
    group: GroupView,
    *,
    busy: float = 0.0,
    moves_until_s: float = 0.0,
    worker: WorkerState = MEMBER,
    was_heard: bool = False,
    process: ProcessSample = SLEEPS,
    **seen: Any,
) -> float | None:
    """Return after how many seconds of a minute the worker counts as hung, None if it does not.

    `busy`: its share of a processor. `moves_until_s`: for how long it moves state, and says so.
    """
    for now in (tick * 0.25 for tick in range(240)):
        moving = msgspec.structs.replace(worker, moves=round(4 * min(now, moves_until_s)))
        used = msgspec.structs.replace(process, cpu_s=process.cpu_s + busy * now)
        heard = was_heard or now < moves_until_s
        if check(watchdog, group, now, worker=moving, process=used, was_heard=heard, **seen):
            return now
    return None


def about(seconds: float) -> Any:
    """Two checks more or less."""
    return pytest.approx(seconds, abs=0.5)


def test_a_silent_worker_that_others_wait_for_hangs() -> None:
    """Silence alone does not count before the limit: a worker may hold the GIL for long while it computes."""
    assert first_verdict(Watchdog("0-x", 600), view(7, 7)) == about(2.25)
    assert first_verdict(Watchdog("0-x", 600), view(7, 0)) == about(2.25)
    assert first_verdict(Watchdog("0-x", 600), view(7, 7), median_s=2.0) == about(10)
    assert first_verdict(Watchdog("0-x", 600), view(0, 0)) is None
    assert first_verdict(Watchdog("0-x", 600), ALONE) is None


def test_a_silent_worker_that_computes_has_until_the_limit() -> None:
    """Something in it holds the GIL, such as a compiler; a little time of idle threads does not count."""
    assert first_verdict(Watchdog("0-x", 600), view(7, 7), busy=0.5) is None
    assert first_verdict(Watchdog("0-x", 5), view(7, 7), busy=0.5) == about(5.25)
    assert first_verdict(Watchdog("0-x", 600), view(7, 7), busy=0.02) == about(2.25)


def test_a_worker_that_nobody_waits_for_hangs_when_it_is_silent_and_idle_until_the_limit() -> None:
    """As one that trains alone, or all at once. Not while it computes, nor before it has called `elastic.init`."""
    uncalled = msgspec.structs.replace(MEMBER, called=False)
    for group in (ALONE, view(0, 0)):
        assert first_verdict(Watchdog("0-x", 20), group) == about(20.25)
        assert first_verdict(Watchdog("0-x", 20), group, busy=0.02) == about(20.25)
        assert first_verdict(Watchdog("0-x", 20), group, busy=0.5) is None
        assert first_verdict(Watchdog("0-x", 20), group, was_heard=True) is None
        assert first_verdict(Watchdog("0-x", 20), group, worker=uncalled) is None
        assert first_verdict(Watchdog("0-x", 20), group, worker=PLAIN) is None


def test_a_stopped_worker_that_others_wait_for_hangs_sooner() -> None:
    """The system reports it, however long a step takes. It has been stopped for a second itself."""
    assert first_verdict(Watchdog("0-x", 600), view(7, 7), process=STOPPED, median_s=2.0) == about(1.25)
    watchdog = Watchdog("0-x", 600)
    for tick in range(40):
        assert not check(watchdog, view(7, 7), tick * 0.25, was_heard=True)
    *before, said = [check(watchdog, view(7, 7), 10 + tick * 0.25, process=STOPPED) for tick in range(5)]
    assert "is stopped" in said
    assert not any(before)


@pytest.mark.parametrize("phase", ["loading", "loaded", "starting", "ready", "member", "done"])
def test_a_stopped_worker_hangs_without_anybody_that_waits(phase: WorkerPhase) -> None:
    """Alone, with all others, before it joins, after its last step, as a plain script; but no process that is gone."""
    for group in (ALONE, view(0, 0)):
        for worker in (MEMBER, PLAIN):
            there = msgspec.structs.replace(worker, phase=phase)
            assert first_verdict(Watchdog("0-x", 600), group, process=STOPPED, worker=there) == about(5.0)
            assert first_verdict(Watchdog("0-x", 600), group, worker=there) is None
    absent = WorkerState(phase="absent", called=True)
    assert first_verdict(Watchdog("0-x", 5), ALONE, process=ProcessSample(), worker=absent) is None


def test_a_stopped_worker_that_has_to_leave_is_waited_for_by_its_agent() -> None:
    """A second is enough, so that there is grace left."""
    leaving = msgspec.structs.replace(MEMBER, phase="leaving")
    assert first_verdict(Watchdog("0-x", 600), ALONE, process=STOPPED, worker=leaving) == about(1.0)
    assert first_verdict(Watchdog("0-x", 5), view(7, 7), worker=leaving, was_heard=True) is None


@pytest.mark.parametrize(
    ("group", "worker"),
    [(view(7, 7), MEMBER), (ALONE, MEMBER), (ALONE, PLAIN)],
    ids=["awaited", "alone", "plain"],
)
def test_a_worker_that_is_stopped_again_and_again_lives(group: GroupView, worker: WorkerState) -> None:
    """Something throttles it, and each check may find it stopped; it has run in between, whether it is heard or not."""
    watchdog = Watchdog("0-x", 600)
    for tick in range(400):
        stopped = ProcessSample("stopped", cpu_s=0.0125 * tick, switches=2 * tick)
        heard = worker.elastic and tick % 2 == 0
        assert not check(watchdog, group, tick * 0.25, process=stopped, worker=worker, was_heard=heard)


def test_a_reason_is_said_once() -> None:
    """A process that can't be killed at once, as it waits for a disk, does not keep its agent busy."""
    watchdog = Watchdog("0-x", 20)
    said = [now for now in (tick * 0.25 for tick in range(240)) if check(watchdog, ALONE, now, process=SLEEPS)]
    assert said == [about(20.25), about(40.5)]


def test_a_worker_with_heartbeats_has_until_the_limit() -> None:
    """Where all others wait for it, and it does not wait itself."""
    waits = msgspec.structs.replace(MEMBER, waits_for=7)
    assert first_verdict(Watchdog("0-x", 5), view(7, 7), was_heard=True) == about(5.25)
    assert first_verdict(Watchdog("0-x", 5), view(7, 0), was_heard=True) is None
    assert first_verdict(Watchdog("0-x", 5), view(7, 7), was_heard=True, worker=waits) is None


def test_waits_at_different_steps_do_not_add_up() -> None:
    """Others wait at the end of each step; the same step in the same generation counts."""
    watchdog = Watchdog("0-x", 600)
    for tick in range(100):
        assert not check(watchdog, view(tick + 1), tick * 0.25)
    watchdog = Watchdog("0-x", 600)
    for tick in range(100):
        assert not check(watchdog, view(7, up=tick), tick * 0.25)


def test_a_worker_that_moves_state_does_not_hang() -> None:
    """It reads a checkpoint, or sends state to others, for longer than a step may take."""
    assert first_verdict(Watchdog("0-x", 5), view(7, 7), was_heard=True, moves_until_s=30.0) == about(35.25)
    assert first_verdict(Watchdog("0-x", 600), view(7, 7), process=STOPPED, moves_until_s=30.0) == about(31.25)


def test_an_old_view_adds_no_waiting() -> None:
    """While Redis is away nothing is known of the others, and training continues; what is stopped is replaced."""
    watchdog = Watchdog("0-x", 5)
    away = view(7, 7)

    def unseen(now: float, process: ProcessSample, *, was_heard: bool) -> str:
        return watchdog.check(away, MEMBER, process, was_heard=was_heard, median_s=0.1, now=now)

    for tick in range(400):
        assert not unseen(tick * 0.25, SLEEPS, was_heard=True)
    assert not check(watchdog, away, 100.0, was_heard=True)
    assert not unseen(103.0, STOPPED, was_heard=False)
    assert any(unseen(103.25 + tick * 0.25, STOPPED, was_heard=False) for tick in range(24))


@pytest.mark.parametrize("group", [view(7), ALONE], ids=["awaited", "alone"])
def test_an_agent_that_was_stopped_itself_does_not_count_that_time(group: GroupView) -> None:
    """It reads what its worker sent meanwhile after the next check; both may have been stopped with their machine."""
    watchdog = Watchdog("0-x", 600)
    assert not check(watchdog, group, 0.0, was_heard=True)
    assert not check(watchdog, group, 100.0)
    assert not check(watchdog, group, 100.25, process=STOPPED)
    assert not check(watchdog, group, 200.0, process=STOPPED)
