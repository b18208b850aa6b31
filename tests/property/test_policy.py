"""The policy, for any jobs, nodes and capacity."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.depth import examples

from edl_runtime.autoscale.policy.decide import MIN_RUN_S, PAYBACK_WINDOW_S, RESIZE_COOLDOWN_S, STARVATION_S, decide
from edl_runtime.autoscale.policy.groups import groups_of
from edl_runtime.autoscale.policy.model import Limit, Node, Speedup, Target, Workload
from edl_runtime.errors import SpecError
from edl_runtime.specs import Bounds

NOW = 100_000.0
SIZES = st.sampled_from([{"gpu": 1.0}, {"gpu": 2.0, "cpu": 1.0}, {"gpu": 0.5, "cpu": 0.1}, {"cpu": 2.0}])
SPEEDUPS = st.none() | st.builds(
    Speedup, a=st.sampled_from([0.0, 0.01, 0.06, 1.0]), phi=st.sampled_from([4.0, 64.0, math.inf])
)
TIMES = st.sampled_from(
    [NOW - 50_000, NOW - STARVATION_S, NOW - 2000, NOW - RESIZE_COOLDOWN_S, NOW - 100, NOW, NOW + 500]
)
MOST_MOVES = 3
"""Passes until all have found a place who lost one to another."""
PAUSES = st.sampled_from([0.0, 1.0, 30.0, 300.0])


@st.composite
def clusters(
    draw: st.DrawFn, sizes: st.SearchStrategy[dict[str, float]] = SIZES, *, all_new: bool = False
) -> tuple[list[Workload], list[Node]]:
    """Return jobs, some of whose instances are on the nodes, and the nodes with what is free beside these."""
    names = [f"node-{number}" for number in range(draw(st.integers(0, 4)))]
    nodes = [
        Node(name=name, free={"gpu": draw(st.integers(0, 8)) / 2, "cpu": draw(st.integers(0, 30)) / 10})
        for name in names
    ]
    jobs = []
    for number in range(draw(st.integers(0, 6))):
        least = draw(st.integers(1, 4))
        places = st.lists(st.sampled_from([*names, ""]), max_size=7)
        jobs.append(
            Workload(
                name=f"job-{number}",
                bounds=Bounds(least, least + draw(st.integers(0, 6))),
                resources=draw(sizes),
                nodes=() if all_new else tuple(draw(places)),
                priority=draw(st.integers(0, 1)),
                weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
                submitted_s=NOW if all_new else draw(TIMES),
                changed_s=None if all_new else draw(st.none() | TIMES),
                resized_s=None if all_new else draw(st.none() | TIMES),
                by_hand=draw(st.booleans()),
                speedup=draw(SPEEDUPS),
                limit=draw(st.none() | st.builds(Limit, instances=st.integers(0, 8), reason=st.just("the window"))),
                students=draw(st.sampled_from([None, None, 0, 2])),
            )
        )
    pools = [job.name for job in jobs if job.students is not None]
    asks = st.lists(st.sampled_from([*pools, "elsewhere"]), max_size=2, unique=True).map(tuple)
    jobs = [msgspec.structs.replace(job, pools=draw(asks)) if job.students is None else job for job in jobs]
    return jobs, nodes


CAPACITIES = st.fixed_dictionaries(
    {}, optional={"gpu": st.integers(0, 40).map(lambda half: half / 2), "cpu": st.integers(0, 90).map(lambda n: n / 10)}
)


def applied(
    jobs: Sequence[Workload], nodes: Sequence[Node], targets: Mapping[str, Target], now_s: float
) -> tuple[list[Workload], list[Node]]:
    """Return jobs and nodes once all targets are reached."""
    free = {node.name: dict(node.free) for node in nodes}
    for job in jobs:
        for sign, places in ((1, job.nodes), (-1, targets[job.name].nodes)):
            for place in filter(None, places):
                for name, need in job.resources.items():
                    free[place][name] = round(free[place].get(name, 0) + sign * need, 6)
    for left in free.values():
        assert min(left.values(), default=0) >= 0
    after = []
    for job in jobs:
        target = targets[job.name]
        times: dict[str, Any] = {"changed_s": now_s if bool(target.instances) != job.runs else job.since_s}
        if target.instances != job.instances:
            times |= {"resized_s": now_s, "by_hand": False}
        after.append(msgspec.structs.replace(job, nodes=target.nodes, **times))
    return after, [Node(name=name, free=left) for name, left in free.items()]


@pytest.mark.slow
@given(clusters(), CAPACITIES, PAUSES)
def test_it_stays_within_bounds_capacity_and_nodes(
    cluster: tuple[list[Workload], list[Node]], capacity: Mapping[str, float], pause_s: float
) -> None:
    """All have none or as many as their bounds allow, together no more than the capacity, and room on their nodes.

    Who keeps some instances keeps the first, and none of them moves.
    """
    jobs, nodes = cluster
    targets = decide(jobs, nodes, capacity, now_s=NOW, pause_s=pause_s)
    assert list(targets) == [job.name for job in jobs]
    for job in jobs:
        target = targets[job.name]
        assert target.instances == 0 or target.instances in job.bounds
        assert not job.limit or target.instances <= job.limit.instances
        assert len(target.nodes) == target.instances
        assert all(before in ("", after) for before, after in zip(job.nodes, target.nodes, strict=False))
        assert target.reason
    for resource, amount in capacity.items():
        assert sum(job.resources.get(resource, 0) * targets[job.name].instances for job in jobs) <= amount + 1e-9
    applied(jobs, nodes, targets, NOW)


@given(clusters(), CAPACITIES, PAUSES)
def test_asked_again_it_changes_nothing(
    cluster: tuple[list[Workload], list[Node]], capacity: Mapping[str, float], pause_s: float
) -> None:
    """When its targets are reached at once, it has the same ones: nothing swings to and fro.

    But who has lost its place to another may go elsewhere, once it has left.
    """
    jobs, nodes = cluster
    for _ in range(MOST_MOVES):
        targets = decide(jobs, nodes, capacity, now_s=NOW, pause_s=pause_s)
        jobs, nodes = applied(jobs, nodes, targets, NOW)
        if not any("others took its place" in target.reason for target in targets.values()):
            break
    again = decide(jobs, nodes, capacity, now_s=NOW, pause_s=pause_s)
    assert {name: target.nodes for name, target in again.items()} == {
        name: target.nodes for name, target in targets.items()
    }


@given(clusters(), CAPACITIES, PAUSES)
def test_a_group_has_room_together_or_none(
    cluster: tuple[list[Workload], list[Node]], capacity: Mapping[str, float], pause_s: float
) -> None:
    """No job runs without a pool that it asks, and no pool without one of those that ask it, if nobody else uses it."""
    jobs, nodes = cluster
    targets = decide(jobs, nodes, capacity, now_s=NOW, pause_s=pause_s)
    for pool in [job for job in jobs if job.students is not None]:
        asking = [targets[job.name].instances > 0 for job in jobs if pool.name in job.pools]
        if not targets[pool.name].instances:
            assert not any(asking)
        elif not pool.students and asking:
            assert any(asking)


@given(clusters(), CAPACITIES, PAUSES)
def test_what_waits_and_fits_starts(
    cluster: tuple[list[Workload], list[Node]], capacity: Mapping[str, float], pause_s: float
) -> None:
    """Beside all targets no group has room.

    Unless the room is reserved, its own was another's until now, or somebody has suspended it a moment ago.
    """
    jobs, nodes = cluster
    targets = decide(jobs, nodes, capacity, now_s=NOW, pause_s=pause_s)
    after, free = applied(jobs, nodes, targets, NOW)
    for group in groups_of(after):
        if targets[group.job.name].instances or not group.is_allowed:
            continue
        new = [member for member in group.members if not targets[member.name].instances]
        reasons = {targets[member.name].reason for member in new}
        if not any(words in reason for reason in reasons for words in ("reserved", "others took", "somebody")):
            assert not fits(new, free, left_of(capacity, after))


def left_of(capacity: Mapping[str, float], jobs: Sequence[Workload]) -> dict[str, float]:
    """Return what is left of the capacity beside these jobs' instances."""
    used = {name: sum(job.resources.get(name, 0) * len(job.nodes) for job in jobs) for name in capacity}
    return {name: amount - used[name] + 1e-9 for name, amount in capacity.items()}


def fits(new: Sequence[Workload], nodes: Sequence[Node], left: Mapping[str, float]) -> bool:
    """Whether the minimums of these jobs have room, tried node by node."""
    if any(sum(job.resources.get(name, 0) * job.bounds.min for job in new) > much for name, much in left.items()):
        return False
    free = [dict(node.free) for node in nodes]
    for job in sorted(new, key=lambda job: -max(job.resources.values())):
        for _ in range(job.bounds.min):
            room = [each for each in free if all(each.get(name, 0) + 1e-9 >= n for name, n in job.resources.items())]
            if not room:
                return False
            for name, need in job.resources.items():
                room[0][name] -= need
    return True


@given(clusters(), CAPACITIES, PAUSES, st.randoms(use_true_random=False))
def test_the_order_of_the_jobs_does_not_matter(
    cluster: tuple[list[Workload], list[Node]], capacity: Mapping[str, float], pause_s: float, rng: random.Random
) -> None:
    """Jobs may come in any order."""
    jobs, nodes = cluster
    shuffled = rng.sample(jobs, len(jobs))
    assert decide(shuffled, nodes, capacity, now_s=NOW, pause_s=pause_s) == decide(
        jobs, nodes, capacity, now_s=NOW, pause_s=pause_s
    )


@given(clusters(st.just({"gpu": 1.0})), st.integers(0, 30), st.integers(1, 5), PAUSES)
def test_more_capacity_is_never_less_used(
    cluster: tuple[list[Workload], list[Node]], capacity: int, more: int, pause_s: float
) -> None:
    """With more capacity, as many instances run or more, unless room is reserved for a job that waits for long."""
    jobs, _ = cluster
    nodes = [Node(name=name, free={"gpu": 100.0}) for name in ["big", *(f"node-{number}" for number in range(4))]]
    jobs = [msgspec.structs.replace(job, submitted_s=NOW, changed_s=NOW) for job in jobs]
    totals = [
        sum(t.instances for t in decide(jobs, nodes, {"gpu": gpus}, now_s=NOW, pause_s=pause_s).values())
        for gpus in (capacity, capacity + more)
    ]
    assert totals[0] <= totals[1]


@given(clusters(st.just({"gpu": 1.0}), all_new=True), st.integers(0, 60), st.integers(1, 9))
def test_more_capacity_is_no_less_for_anybody(
    cluster: tuple[list[Workload], list[Node]], capacity: int, more: int
) -> None:
    """With more capacity no job has fewer instances, as long as it was enough for all of them."""
    jobs, _ = cluster
    nodes = [Node(name="big", free={"gpu": 100.0})]
    capacity += sum(job.bounds.min for job in jobs)
    few, many = (decide(jobs, nodes, {"gpu": gpus}, now_s=NOW, pause_s=1.0) for gpus in (capacity, capacity + more))
    assert all(few[job.name].instances <= many[job.name].instances for job in jobs)


@settings(max_examples=examples(5, 100))
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=2, max_size=6), st.integers(6, 8))
def test_nobody_starves(bounds: list[tuple[int, int]], gpus: int) -> None:
    """Jobs that never end take turns: each runs again and again, however large its minimum is."""
    jobs = [
        Workload(name=f"job-{number}", bounds=Bounds(least, least + more), resources={"gpu": 1}, submitted_s=0)
        for number, (least, more) in enumerate(bounds)
    ]
    nodes = [Node(name="node", free={"gpu": gpus})]
    ran: Counter[str] = Counter()
    round_s = len(jobs) * (STARVATION_S + MIN_RUN_S)
    now_s = 0.0
    while now_s < 2 * round_s:
        targets = decide(jobs, nodes, {"gpu": gpus}, now_s=now_s, pause_s=1.0)
        jobs, nodes = applied(jobs, nodes, targets, now_s)
        ran.update(job.name for job in jobs if job.runs and now_s >= round_s)
        now_s += RESIZE_COOLDOWN_S
    assert set(ran) == {job.name for job in jobs}


def job(name: str, least: int, most: int, have: int = 0, **more: object) -> Workload:
    """Return a job of one GPU for an instance, with what it has on one node."""
    given = {"resources": {"gpu": 1}, "nodes": ("node",) * have, **more}
    return msgspec.convert({"name": name, "bounds": {"min": least, "max": most}, **given}, Workload)


def placed(
    jobs: Sequence[Workload],
    *nodes: Node,
    capacity: Mapping[str, float] | None = None,
    now_s: float = NOW,
    pause_s: float = 1.0,
) -> dict[str, Target]:
    return decide(jobs, nodes, capacity or {}, now_s=now_s, pause_s=pause_s)


def counts(jobs: Sequence[Workload], gpus: float, free: float = 100.0, **when: float) -> dict[str, int]:
    """Return how many instances each is to have, on one node."""
    targets = placed(jobs, Node(name="node", free={"gpu": free}), capacity={"gpu": gpus}, **when)
    return {name: target.instances for name, target in targets.items()}


def reasons(jobs: Sequence[Workload], gpus: float, free: float = 100.0, **when: float) -> dict[str, str]:
    """Return why."""
    targets = placed(jobs, Node(name="node", free={"gpu": free}), capacity={"gpu": gpus}, **when)
    return {name: target.reason for name, target in targets.items()}


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        pytest.param(
            [job("a", 1, 10), job("b", 1, 10), job("c", 1, 2)], {"a": 5, "b": 5, "c": 2}, id="max-min without speed-ups"
        ),
        pytest.param([job("a", 1, 18, weight=2), job("b", 1, 18)], {"a": 8, "b": 4}, id="by weight"),
        pytest.param([job("a", 1, 8, 8, resized_s=NOW)], {"a": 8}, id="who was resized just now keeps what it has"),
        pytest.param(
            [job("a", 1, 12, 12, resized_s=NOW), job("b", 6, 6)], {"a": 6, "b": 6}, id="until another needs it"
        ),
        pytest.param([job("a", 1, 99, 20, resized_s=NOW)], {"a": 12}, id="or capacity goes"),
        pytest.param([job("a", 1, 12, 7), job("b", 1, 12, 5)], {"a": 7, "b": 5}, id="nearly equal is not moved"),
        pytest.param([job("a", 1, 12, 5), job("b", 1, 12, 7)], {"a": 5, "b": 7}, id="neither way"),
        pytest.param([job("a", 1, 12, 8), job("b", 1, 12, 4)], {"a": 7, "b": 5}, id="but what is worth it is"),
    ],
)
def test_twelve_gpus_are_shared_out(jobs: list[Workload], expected: dict[str, int]) -> None:
    """What one can't use goes to others, and nothing is moved to and fro for a little more."""
    assert counts(jobs, 12) == expected


def test_more_goes_to_those_that_make_more_of_it() -> None:
    """A job that scales badly leaves instances to one that scales well."""
    found = counts([job("well", 1, 12, speedup={"a": 0.01}), job("badly", 1, 12, speedup={"a": 0.3, "phi": 4})], 12)
    assert found["well"] > 2 * found["badly"] > 0


def test_an_instance_that_would_slow_a_job_down_is_not_granted() -> None:
    """Past the peak of its goodput a job gets no more, and the capacity stays free."""
    slow = job("slow", 1, 100, speedup={"a": 0.1, "phi": 4})
    assert counts([slow], 100) == {"slow": 6}
    goodput = Speedup(a=0.1, phi=4).goodput
    assert max(range(1, 101), key=goodput) == 6
    assert reasons([msgspec.structs.replace(slow, nodes=("node",) * 6)], 100) == {
        "slow": "stays at 6: more instances would not train faster"
    }


def test_a_higher_priority_has_its_minimum_first() -> None:
    """For it jobs of lower priority shrink, and are suspended where that is not enough."""
    jobs = [job("low", 2, 8, 8), job("low-2", 2, 2, 2), job("high", 6, 6, priority=1)]
    assert counts(jobs, 10) == {"low": 2, "low-2": 2, "high": 6}
    assert counts(jobs, 8) == {"low": 2, "low-2": 0, "high": 6}
    assert reasons(jobs, 8)["low-2"] == (
        "is suspended, with a checkpoint: its minimum of 2 does not fit beside those that come first"
    )


def test_who_gave_way_on_a_full_node_has_no_place_there() -> None:
    """There is capacity for both and a node for one: the other is suspended, and not counted where it was."""
    jobs = [job("low", 2, 2, 2), job("high", 2, 2, priority=1)]
    assert counts(jobs, 100, free=0) == {"low": 0, "high": 2}
    assert reasons(jobs, 100, free=0)["low"] == "is suspended, with a checkpoint: others took its place"


def test_a_job_that_waits_does_not_suspend_an_equal() -> None:
    """Unless it has waited for long, and the other's turn has not just begun."""
    running = job("runs", 4, 4, 4, changed_s=NOW - MIN_RUN_S)
    assert counts([running, job("waits", 4, 4, submitted_s=NOW)], 4) == {"runs": 4, "waits": 0}
    long = job("waits", 4, 4, submitted_s=NOW - STARVATION_S)
    assert counts([running, long], 4) == {"runs": 0, "waits": 4}
    just_begun = job("runs", 4, 4, 4, changed_s=NOW - MIN_RUN_S + 1)
    assert counts([just_begun, long], 4) == {"runs": 4, "waits": 0}
    ahead = job("runs", 4, 4, 4, changed_s=NOW + 1)  # by a clock that was put back
    assert counts([ahead, long], 4) == {"runs": 0, "waits": 4}


def test_a_pool_that_students_wait_for_has_its_minimum_before_its_equals() -> None:
    """They have their places and do nothing without teachers. A pool without students is as any job."""
    jobs = [job("runs", 1, 4, 4, changed_s=NOW), job("waits", 3, 4, submitted_s=NOW - STARVATION_S)]
    unused = job("teachers", 2, 2, submitted_s=NOW, students=0)
    assert counts([*jobs, unused], 4) == {"runs": 1, "waits": 3, "teachers": 0}
    used = msgspec.structs.replace(unused, students=2)
    assert counts([*jobs, used], 4) == {"runs": 2, "waits": 0, "teachers": 2}
    idle = job("teachers", 2, 2, 2, students=0)
    assert reasons([idle], 1) == {"teachers": "is suspended: its minimum of 2 needs 2 gpu, training may use 1"}


def test_a_pool_that_nobody_uses_makes_way_for_whoever_waits() -> None:
    """Of any priority; but students may still come in its first minutes, or once it has its turn."""
    waits = job("waits", 1, 1, priority=-1, submitted_s=NOW)
    unused = job("teachers", 1, 1, 1, students=0, changed_s=NOW - MIN_RUN_S)
    assert counts([unused, waits], 1) == {"teachers": 0, "waits": 1}
    assert counts([unused, waits], 2) == {"teachers": 1, "waits": 1}
    new = msgspec.structs.replace(unused, changed_s=NOW - MIN_RUN_S + 1)
    assert counts([new, waits], 1) == {"teachers": 1, "waits": 0}
    was_suspended = job("teachers", 1, 1, students=0, changed_s=NOW - 1)
    runs = job("runs", 2, 2, 2, changed_s=NOW - MIN_RUN_S)
    assert counts([was_suspended, runs], 2) == {"teachers": 0, "runs": 2}
    starved = msgspec.structs.replace(was_suspended, changed_s=NOW - STARVATION_S)
    assert counts([starved, runs], 2) == {"teachers": 1, "runs": 0}
    was_submitted = job("teachers", 1, 1, students=0, submitted_s=NOW)
    assert counts([was_submitted, runs], 2) == {"teachers": 1, "runs": 0}


def test_a_student_and_its_pool_have_room_together_or_none() -> None:
    """Where one place is left no pool takes it whose student stays suspended, and others that wait do."""
    groups = [
        one
        for number in range(2)
        for one in (
            job(f"student-{number}", 1, 4, resized_s=NOW, pools=(f"pool-{number}",)),
            job(f"pool-{number}", 1, 1, number, students=0, limit=Limit(instances=1, reason="it has no students")),
        )
    ]
    trainings = [job(f"training-{number}", 1, 1, resized_s=NOW) for number in range(3)]
    assert [name for name, count in counts([*groups, *trainings], 1).items() if count] == ["training-0"]
    assert reasons(groups, 1) == {
        "student-0": "waits: its minimum of 1 with that of 'pool-0' needs 2 gpu, training may use 1",
        "pool-0": "waits: none of its students trains",
        "student-1": "waits: its minimum of 1 with that of 'pool-1' needs 2 gpu, training may use 1",
        "pool-1": "is suspended: none of its students trains",
    }
    assert counts(groups, 3) == {"student-0": 2, "pool-0": 1, "student-1": 0, "pool-1": 0}
    assert counts(groups, 4) == {"student-0": 1, "pool-0": 1, "student-1": 1, "pool-1": 1}


def test_a_pool_stays_while_one_of_its_students_does() -> None:
    """Several jobs may share it, and others use it, too. A job of a higher priority comes before all of them."""
    pool = job("pool", 1, 4, 1, students=0)
    large, small = job("large", 4, 4, 4, pools=("pool",)), job("small", 1, 1, 1, pools=("pool",))
    assert counts([pool, large, small], 6) == {"pool": 1, "large": 4, "small": 1}
    assert counts([pool, large, small], 5) == {"pool": 4, "large": 0, "small": 1}
    assert counts([pool, large], 4) == {"pool": 0, "large": 0}
    used = msgspec.structs.replace(pool, students=1)
    assert counts([used, large], 4) == {"pool": 4, "large": 0}
    closed = Limit(instances=0, reason="window 'evening' allows 0")
    limited = [msgspec.structs.replace(used, limit=closed), small]
    assert counts(limited, 9) == {"pool": 0, "small": 0}
    assert reasons(limited, 9)["small"] == (
        "is suspended, with a checkpoint: its pool 'pool': window 'evening' allows 0, and its minimum is 1"
    )
    first = [job("first", 1, 1, priority=1), pool, small]
    assert counts(first, 2) == {"first": 1, "pool": 0, "small": 0}
    assert counts([job("elsewhere", 1, 1, pools=("gone",))], 1) == {"elsewhere": 1}


def test_a_group_that_has_no_room_takes_none() -> None:
    """Nobody makes way for a student whose pool fits nowhere."""
    nodes = [Node(name="node", free={"gpu": 0, "cpu": 0})]
    runs = job("runs", 1, 3, 3, resources={"cpu": 1})
    group = [
        job("student", 1, 1, priority=1, resources={"cpu": 1}, pools=("pool",)),
        job("pool", 1, 1, priority=1, resources={"gpu": 1}, students=0),
    ]
    assert {name: one.instances for name, one in placed([runs, *group], *nodes).items()} == {
        "runs": 3,
        "student": 0,
        "pool": 0,
    }


def test_a_pool_that_finds_no_room_makes_way_though_a_student_may_follow() -> None:
    """What it holds until the student's turn is for those that come first."""
    pool = job("pool", 2, 2, nodes=("node", ""), students=1)
    waits, student = job("waits", 1, 1), job("student", 1, 1, pools=("pool",))
    assert counts([pool, waits, student], 100, free=0) == {"pool": 0, "waits": 1, "student": 0}


def test_as_many_jobs_run_as_can() -> None:
    """Where minimums do not fit, the largest waits, and of the same size the oldest."""
    jobs = [
        job("large", 3, 4, 4, changed_s=0),
        job("old", 2, 2, submitted_s=NOW - 2),
        job("young", 2, 2, submitted_s=NOW - 1),
    ]
    assert counts(jobs, 4) == {"large": 0, "old": 2, "young": 2}
    assert counts(jobs, 3) == {"large": 0, "old": 0, "young": 2}


def test_room_is_saved_for_one_that_has_waited_for_long() -> None:
    """Small jobs that come all the time do not keep a large one from ever starting."""
    running = job("runs", 1, 1, 1, changed_s=NOW)
    jobs = [running, job("large", 4, 4, submitted_s=NOW - STARVATION_S), job("small", 1, 1, submitted_s=NOW)]
    assert counts(jobs, 4) == {"runs": 1, "large": 0, "small": 0}
    assert reasons(jobs, 4)["small"] == "waits: room is reserved for a job that has waited for long"
    tried = job("large", 4, 4, submitted_s=0, changed_s=0, resized_s=NOW)  # to start, where no node had room
    assert counts([running, tried, jobs[2]], 4) == {"runs": 1, "large": 0, "small": 0}
    group = [job("large", 2, 2, submitted_s=NOW - STARVATION_S, pools=("pool",)), job("pool", 2, 2, students=0)]
    assert counts([running, *group, jobs[2]], 4) == {"runs": 1, "large": 0, "pool": 0, "small": 0}
    assert counts([running, *group, jobs[2]], 3) == {"runs": 1, "large": 0, "pool": 0, "small": 1}
    too_large = [running, job("large", 5, 5, submitted_s=NOW - STARVATION_S), jobs[2]]
    assert counts(too_large, 4) == {"runs": 1, "large": 0, "small": 1}
    assert reasons(too_large, 4)["large"] == "waits: its minimum of 5 needs 5 gpu, training may use 4"


def test_room_is_saved_only_where_others_end_for_it() -> None:
    """A job that is never suspended may run for days, as may a pool that others use."""
    large, small = job("large", 4, 4, submitted_s=NOW - STARVATION_S), job("small", 1, 1, submitted_s=NOW)
    for stays in (job("stays", 1, 1, 1, changed_s=NOW, resumes=False), job("stays", 1, 1, 1, students=1)):
        assert counts([stays, large, small], 4) == {"stays": 1, "large": 0, "small": 1}


@pytest.mark.parametrize(
    ("ago_s", "rests"), [(RESIZE_COOLDOWN_S - 1, True), (RESIZE_COOLDOWN_S, False), (-1000, False)]
)
def test_a_job_that_was_just_resized_takes_no_room_from_others(ago_s: float, rests: bool) -> None:  # noqa: FBT001
    """It comes last to start again, and grows into nobody's room, but for what would else be unused."""
    rested = {"resized_s": NOW - ago_s}
    assert counts([job("a", 1, 9, 2, **rested), job("b", 1, 9, 6)], 8) == (
        {"a": 2, "b": 6} if rests else {"a": 4, "b": 4}
    )
    assert counts([job("a", 1, 9, 2, **rested), job("b", 1, 9, 4)], 8) == (
        {"a": 2, "b": 6} if rests else {"a": 4, "b": 4}
    )
    assert counts([job("a", 1, 9, 2, **rested), job("b", 1, 4, 4)], 8) == {"a": 4, "b": 4}
    waits = [job("a", 2, 2, **rested), job("b", 3, 3, submitted_s=NOW)]
    assert counts(waits, 4) == ({"a": 0, "b": 3} if rests else {"a": 2, "b": 0})
    assert counts(waits, 5) == {"a": 2, "b": 3}


@pytest.mark.parametrize(("ago_s", "held"), [(RESIZE_COOLDOWN_S - 1, True), (RESIZE_COOLDOWN_S, False)])
def test_a_size_that_somebody_has_set_stays_for_some_minutes(ago_s: float, held: bool) -> None:  # noqa: FBT001
    """It does not grow or start again, whatever is free. It makes way as ever."""
    given = {"resized_s": NOW - ago_s, "by_hand": True}
    assert counts([job("a", 1, 8, 4, **given)], 8) == {"a": 4 if held else 8}
    assert counts([job("a", 1, 8, 4, **given)], 3) == {"a": 3}
    assert counts([job("a", 4, 4, **given)], 8) == {"a": 0 if held else 4}
    assert reasons([job("a", 4, 4, **given)], 8) == {
        "a": "waits: somebody has given it its size within the last minutes" if held else "starts with 4"
    }


def test_a_job_grows_only_if_that_makes_up_for_the_pause() -> None:
    """One instance more of sixteen gains little; a long pause is not worth it, and twice as many may be."""
    fewer = job("a", 1, 17, 16)
    assert counts([fewer], 17, pause_s=1) == {"a": 17}
    assert counts([fewer], 17, pause_s=60) == {"a": 16}
    assert reasons([fewer], 17, pause_s=60) == {"a": "stays at 16: growing would not make up for a pause of 60 s"}
    assert counts([job("a", 1, 32, 16)], 32, pause_s=60) == {"a": 32}


def test_growing_makes_up_for_the_pause_with_a_margin() -> None:
    """Within a quarter of an hour it makes up one and a half times for what the pause cost."""
    doubles = job("a", 1, 2, 1, speedup={"a": 0})
    longest = PAYBACK_WINDOW_S / 1.5
    assert counts([doubles], 2, pause_s=longest - 1) == {"a": 2}
    assert counts([doubles], 2, pause_s=longest) == {"a": 1}


@pytest.mark.parametrize(("weight", "moved"), [(1.2, 0), (1.3, 1)])
def test_an_instance_is_moved_where_it_is_worth_a_quarter_more(weight: float, moved: int) -> None:
    """To a job that was nearly equal but for its weight."""
    jobs = [job("a", 1, 9, 4, weight=weight), job("b", 1, 9, 5)]
    assert counts(jobs, 9) == {"a": 4 + moved, "b": 5 - moved}


def test_what_a_limit_takes_from_one_goes_to_others() -> None:
    """In the same pass; and who may have fewer than its minimum has none and keeps nobody waiting."""
    window = Limit(instances=2, reason="window 'evening' allows 2")
    jobs = [job("limited", 1, 10, 8, limit=window), job("other", 4, 10, 2), job("large", 3, 10, limit=window)]
    assert counts(jobs, 10, 0) == {"limited": 2, "other": 8, "large": 0}
    assert reasons(jobs, 10, 0) == {
        "limited": "shrinks from 8 to 2: window 'evening' allows 2",
        "other": "grows from 2 to 8",
        "large": "waits: window 'evening' allows 2, and its minimum is 3",
    }
    old = [job("large", 3, 10, limit=window, submitted_s=NOW - 2 * STARVATION_S), job("new", 1, 2, submitted_s=NOW)]
    assert counts(old, 4) == {"large": 0, "new": 2}


def test_the_reason_of_a_pool_at_its_maximum_has_what_its_students_need() -> None:
    """Also where that is all that its bounds allow; what allows more than these is no reason."""
    need = Limit(instances=6, reason="students wait 40 % of the time: 6 could do what they ask")
    wide = Limit(instances=8, reason="window 'night' allows 8")
    jobs = [job("grows", 1, 6, 3, limit=need), job("stays", 1, 6, 6, limit=need), job("wide", 1, 6, 6, limit=wide)]
    assert reasons(jobs, 18) == {
        "grows": f"grows from 3 to 6: {need.reason}",
        "stays": f"stays at 6: {need.reason}",
        "wide": "stays at 6, its maximum",
    }


def test_instances_are_packed_by_node_and_not_by_sums() -> None:
    """Four GPUs on four nodes are no room for an instance that needs two."""
    nodes = [Node(name=f"node-{number}", free={"gpu": 1}) for number in range(4)]
    wide = job("wide", 1, 2, resources={"gpu": 2})
    target = placed([wide], *nodes, capacity={"gpu": 4})["wide"]
    assert (target.instances, target.reason) == (0, "waits: no node has room for its minimum of 1")
    target = placed([wide], *nodes, Node(name="large", free={"gpu": 3}), capacity={"gpu": 4})["wide"]
    assert (target.instances, target.nodes) == (1, ("large",))


def test_instances_go_where_they_leave_least_behind() -> None:
    """The larger room stays whole, for an instance that needs it."""
    nodes = Node(name="large", free={"gpu": 8}), Node(name="small", free={"gpu": 2})
    jobs = [job("small", 2, 2, submitted_s=1), job("large", 1, 1, resources={"gpu": 8}, submitted_s=2)]
    found = {name: target.nodes for name, target in placed(jobs, *nodes).items()}
    assert found == {"small": ("small", "small"), "large": ("large",)}


def test_who_waits_gets_room_on_a_full_node() -> None:
    """An instance that its job can spare leaves the node where it is needed."""
    nodes = Node(name="big", free={"gpu": 0, "memory": 64}), Node(name="other", free={"gpu": 0, "memory": 1})
    spreads = job("spreads", 1, 4, nodes=("other", "other", "big", "other"), submitted_s=1)
    targets = placed([spreads, job("waits", 1, 1, resources={"gpu": 1, "memory": 32}, submitted_s=2)], *nodes)
    assert targets["waits"].nodes == ("big",)
    assert targets["spreads"].nodes == ("other", "other")
    assert targets["spreads"].reason == "shrinks from 4 to 2: others took its place"


def test_a_resize_that_no_node_can_hold_is_taken_back() -> None:
    """Instances without a place, as pods that no node takes, are wanted only as long as there is room somewhere."""
    stuck = job("stuck", 2, 4, nodes=("node", "node", "", ""))
    assert counts([stuck], 8, free=1) == {"stuck": 3}
    assert reasons([stuck], 8, free=1) == {"stuck": "shrinks from 4 to 3: no node has room for another"}


def test_what_a_share_is_of_does_not_hang_on_pods_without_a_place() -> None:
    """Else what instances are worth to each other changed as soon as they had one, and with it the targets."""
    node = Node(name="node", free={"gpu": 8, "cpu": 8})
    jobs = [job("a", 1, 8), job("b", 1, 8, resources={"gpu": 0.5, "cpu": 0.9})]
    alone, beside = placed(jobs, node), placed([*jobs, job("c", 80, 80, nodes=("",) * 80, priority=-1)], node)
    assert {name: beside[name].instances for name in "ab"} == {name: alone[name].instances for name in "ab"}


def test_what_a_refused_job_leaves_goes_to_others() -> None:
    """A job that lacks one place for its minimum gives up the one it has, and another grows there in the same pass."""
    jobs = [job("wants-two", 2, 2, 1, submitted_s=1), job("grows", 1, 2, 1, priority=1)]
    assert counts(jobs, 100, free=0) == {"wants-two": 0, "grows": 2}


def test_instances_on_a_node_that_is_gone_have_no_place() -> None:
    """They are placed again."""
    lost = job("lost", 2, 2, nodes=("gone", "gone"))
    assert placed([lost], Node(name="node", free={"gpu": 2}))["lost"].nodes == ("node", "node")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"weight": 0}, "job 'a': weight: got 0.0, allowed is a number above 0"),
        ({"resources": {"gpu": -1}}, "job 'a': resources['gpu']: got -1.0, allowed is a number, 0 to 1e+14"),
        ({"resources": {"gpu": 0}}, "job 'a': resources: got {'gpu': 0.0}, allowed is at least one quantity above 0"),
        ({"speedup": {"a": 2}}, "speedup.a: got 2.0, allowed is 0 to 1"),
        ({"speedup": {"phi": 0}}, "speedup.phi: got 0.0, allowed is above 0"),
    ],
)
def test_what_a_job_may_not_be(given: dict[str, object], says: str) -> None:
    """An error names the field, what was given and what is allowed."""
    with pytest.raises((SpecError, msgspec.ValidationError)) as raised:
        job("a", 1, 2, **given)
    assert says in str(raised.value)
