"""How an agent measures its worker's steps, and finds that it hangs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.elastic.generations import generation

from edl_runtime.elastic.agent.reconciler import WorkerState
from edl_runtime.elastic.agent.reporter import StepMeter
from edl_runtime.elastic.agent.watchdog import Watchdog
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


SEEN: dict[str, Any] = {"was_heard": False, "stopped": False, "cpu_s": 0.0, "median_s": 0.1}


def check(watchdog: Watchdog, group: GroupView, now: float, *, waits_for: int = 0, moves: int = 0, **seen: Any) -> str:
    """Check with a view that Redis has just returned."""
    worker = WorkerState(waits_for=waits_for, moves=moves)
    return watchdog.check(msgspec.structs.replace(group, now=now + 1.0), worker, now=now, **{**SEEN, **seen})


def first_verdict(
    watchdog: Watchdog, group: GroupView, *, busy: float = 0.0, moves_until_s: float = 0.0, **seen: Any
) -> float | None:
    """Return after how many seconds of a minute the worker counts as hung, None if it does not.

    `busy`: its share of a processor. `moves_until_s`: for how long it moves state.
    """
    for now in (tick * 0.25 for tick in range(240)):
        if check(watchdog, group, now, cpu_s=busy * now, moves=round(4 * min(now, moves_until_s)), **seen):
            return now
    return None


def test_a_silent_worker_that_others_wait_for_hangs() -> None:
    """Silence alone does not count: a worker may hold the GIL for long while it computes."""
    assert first_verdict(Watchdog("0-x", 600), view(7, 7)) == pytest.approx(2.25, abs=0.3)
    assert first_verdict(Watchdog("0-x", 600), view(7, 0)) == pytest.approx(2.25, abs=0.3)
    assert first_verdict(Watchdog("0-x", 600), view(7, 7), median_s=2.0) == pytest.approx(10, abs=0.5)
    assert first_verdict(Watchdog("0-x", 600), view(0, 0)) is None
    assert first_verdict(Watchdog("0-x", 600), view()) is None


def test_a_silent_worker_that_computes_has_until_the_limit() -> None:
    """Something in it holds the GIL, such as a compiler; a little time of idle threads does not count."""
    assert first_verdict(Watchdog("0-x", 600), view(7, 7), busy=0.5) is None
    assert first_verdict(Watchdog("0-x", 5), view(7, 7), busy=0.5) == pytest.approx(5.25, abs=0.3)
    assert first_verdict(Watchdog("0-x", 600), view(7, 7), busy=0.02) == pytest.approx(2.25, abs=0.3)


def test_a_stopped_worker_hangs_sooner() -> None:
    """The system reports it; but not while no other waits for it."""
    stopped = first_verdict(Watchdog("0-x", 600), view(7, 7), stopped=True, median_s=2.0)
    assert stopped == pytest.approx(1.25, abs=0.3)
    assert first_verdict(Watchdog("0-x", 600), view(0, 0), stopped=True) is None


def test_a_worker_with_heartbeats_has_until_the_limit() -> None:
    """Where all others wait for it, and it does not wait itself."""
    assert first_verdict(Watchdog("0-x", 5), view(7, 7), was_heard=True) == pytest.approx(5.25, abs=0.3)
    assert first_verdict(Watchdog("0-x", 5), view(7, 0), was_heard=True) is None
    assert first_verdict(Watchdog("0-x", 5), view(7, 7), was_heard=True, waits_for=7) is None


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
    assert first_verdict(Watchdog("0-x", 5), view(7, 7), was_heard=True, moves_until_s=30.0) == pytest.approx(
        35.25, abs=0.3
    )
    stopped = first_verdict(Watchdog("0-x", 600), view(7, 7), stopped=True, moves_until_s=30.0)
    assert stopped == pytest.approx(31.25, abs=0.3)


def test_an_old_view_adds_no_waiting() -> None:
    """While Redis is unavailable nothing is known of the others, and training continues."""
    watchdog = Watchdog("0-x", 5)
    away = view(7, 7)
    for tick in range(400):
        assert not watchdog.check(away, WorkerState(), now=tick * 0.25, **{**SEEN, "was_heard": True})
    assert not check(watchdog, away, 100.0, was_heard=True)


def test_an_agent_that_was_stopped_itself_does_not_count_that_time() -> None:
    """It reads what its worker sent meanwhile after the next check."""
    watchdog = Watchdog("0-x", 600)
    assert not check(watchdog, view(7), 0.0, was_heard=True)
    assert not check(watchdog, view(7), 100.0)
