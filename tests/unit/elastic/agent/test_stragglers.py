"""Who is a straggler."""

from __future__ import annotations

import msgspec
import pytest
from support.elastic.generations import generation

from edl_runtime.elastic.agent.reporter import StepMeter
from edl_runtime.elastic.agent.stragglers import StragglerWatch, peers_compute_s, slowdown
from edl_runtime.elastic.comm.agent_protocol import StepDone
from edl_runtime.elastic.rendezvous.generation import GroupView, MemberLease, TrainerMember


def test_a_step_is_measured_without_the_wait_for_others() -> None:
    """In all ranks it takes as long; a new generation is measured anew."""
    meter = StepMeter()
    for step in range(1, 6):
        clock_s = 10.0 + 0.5 * step
        done = StepDone(generation=1, step=step, at=0.0, clock_s=clock_s, waited_s=0.3 * step, epoch=0, samples=step)
        meter.add(done)
    assert meter.median_s == pytest.approx(0.5)
    assert meter.compute_s == pytest.approx(0.2)
    meter.add(msgspec.structs.replace(done, generation=2, step=6, clock_s=99.0))
    assert meter.compute_s == 0.0


def test_the_median_of_peers_counts() -> None:
    """Not the mean, so that another straggler hides none; what is too little to see counts for nothing."""
    assert slowdown(0.4, [0.1, 0.1, 9.0]) == pytest.approx(4.0)
    assert slowdown(0.4, [0.2]) == pytest.approx(2.0)
    assert slowdown(0.004, [0.001]) == 1.0
    assert slowdown(0.4, []) == 1.0


def test_peers_are_those_that_train_together() -> None:
    """Whose times are known, in a generation that all have entered."""
    members = [
        TrainerMember(id="0-a", index=0, compute_s=0.1),
        TrainerMember(id="1-b", index=1, compute_s=0.2),
        TrainerMember(id="2-c", index=2),
        TrainerMember(id="3-d", index=3, compute_s=0.3),
        TrainerMember(id="4-e", index=4, compute_s=0.4, finished=True),
    ]
    leases = tuple(MemberLease(member=each, deadline=9.0, heartbeat_at=0.0, since=0.0) for each in members)
    view = GroupView(now=0.0, members=leases, generation=generation(1, ["0-a", "1-b", "2-c", "4-e"]), state="active")
    assert peers_compute_s(view, "0-a") == [0.2]
    assert peers_compute_s(msgspec.structs.replace(view, state="forming"), "0-a") == []


def test_a_straggler_is_named_once_it_has_been_slow_for_long() -> None:
    """And until it has not been for as long; what comes and goes changes nothing."""
    watch = StragglerWatch(factor=1.5, for_s=10.0)
    ratios = [1.6, 1.6, 1.4, 1.6, 1.7, 1.8, 1.2, 1.9, 1.2, 1.0, 1.0, 1.0]
    told = [watch.observe(ratio, 5.0 * number) for number, ratio in enumerate(ratios)]
    assert told == [0, 0, 0, 0, 0, 1.8, 1.8, 1.9, 1.9, 1.9, 0, 0]
