"""Shrinks that wait for a person."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as some

from edl_runtime.autoscale.policy.decide import decide
from edl_runtime.autoscale.policy.model import Limit, Node, Target, Workload
from edl_runtime.autoscale.policy.wrappers import RequireApproval, ShrinkApproval
from edl_runtime.specs import Bounds

NOW = 100_000.0
NODES = [Node(name="node", free={"cpu": 100.0})]


def job(
    name: str, low: int, high: int, have: int, *, waiting: int = 0, limit: int | None = None, resumes: bool = True
) -> Workload:
    return Workload(
        name=name,
        bounds=Bounds(low, high),
        resources={"cpu": 1.0},
        nodes=("node",) * have + ("",) * waiting,
        submitted_s=NOW - 5000,
        limit=None if limit is None else Limit(instances=limit, reason=f"window 'day' allows {limit}"),
        resumes=resumes,
    )


def targets(policy: RequireApproval, jobs: Sequence[Workload], cpus: float) -> dict[str, Target]:
    return policy(jobs, NODES, {"cpu": cpus}, now_s=NOW, pause_s=1.0)


def approved(**floors: int) -> RequireApproval:
    """The policy where so many instances of each were approved, and nothing of others."""
    return RequireApproval({name: ShrinkApproval(approved=True, target=floor) for name, floor in floors.items()})


def decided(policy: RequireApproval, jobs: Sequence[Workload], cpus: float) -> tuple[dict[str, int], set[str]]:
    """Return how many instances each is to have, and who waits for an approval."""
    found = targets(policy, jobs, cpus)
    return {name: target.instances for name, target in found.items()}, set(policy.waiting)


def reasons(policy: RequireApproval, jobs: Sequence[Workload], cpus: float) -> dict[str, str]:
    return {name: target.reason for name, target in targets(policy, jobs, cpus).items()}


def test_who_is_not_approved_keeps_what_it_has_and_others_grow_beside_it() -> None:
    """Each takes what is left and no more, and the reason says what waits."""
    jobs = [job("large", 1, 9, 6), job("small", 1, 9, 1)]
    assert decided(approved(), jobs, 8.0) == ({"large": 6, "small": 2}, {"large"})
    assert reasons(approved(), jobs, 8.0)["large"] == (
        "stays at 6 until somebody approves that it shrinks from 6 to 4: this is its share of the 8 cpu that training "
        "may use"
    )
    assert decided(approved(large=4), jobs, 8.0) == ({"large": 4, "small": 4}, set())


def test_what_waits_for_a_place_needs_no_approval() -> None:
    """It loses nothing: no instance of it runs."""
    assert decided(approved(), [job("pending", 4, 4, 0, waiting=4)], 2.0) == ({"pending": 0}, set())
    half = [job("half", 1, 9, 3, waiting=4)]
    assert decided(approved(), half, 3.0) == ({"half": 3}, set())
    assert decided(approved(), half, 2.0) == ({"half": 3}, {"half"})


def test_nobody_is_asked_whether_one_is_suspended_that_can_not_be() -> None:
    """Without a checkpoint a job goes on with its minimum; so far it shrinks once somebody approves."""
    jobs = [job("first", 2, 9, 4, limit=0, resumes=False)]
    assert decided(approved(), jobs, 8.0) == ({"first": 4}, {"first"})
    assert reasons(approved(), jobs, 8.0)["first"] == (
        "stays at 4 until somebody approves that it goes on with 2, since it has no checkpoint to be suspended with; "
        "else it is suspended: window 'day' allows 0, and its minimum is 2"
    )
    for floor in (2, 0):
        assert decided(approved(first=floor), jobs, 8.0) == ({"first": 2}, set())
    assert decided(approved(), [job("first", 2, 9, 2, limit=0, resumes=False)], 8.0) == ({"first": 2}, set())


def test_nobody_shrinks_below_what_was_approved() -> None:
    """So far it shrinks at once, others take what that leaves, and the reason says what waits."""
    jobs = [job("first", 1, 9, 6, limit=0), job("second", 1, 9, 1)]
    assert decided(approved(first=5), jobs, 8.0) == ({"first": 5, "second": 3}, {"first"})
    why = "shrinks so far as was approved, to 5, until somebody approves that it is suspended"
    assert reasons(approved(first=5), jobs, 8.0)["first"].startswith(why)


def test_the_room_of_those_that_were_approved_to_leave_is_taken_at_once() -> None:
    """On a node that was full, too: who waits does not wait for the next pass."""
    jobs = [job("large", 1, 8, 8), job("waits", 4, 4, 0), job("small", 2, 2, 0)]
    full = [Node(name="node", free={"cpu": 0.0})]
    found = approved(large=6)(jobs, full, {}, now_s=NOW, pause_s=1.0)
    assert {name: target.instances for name, target in found.items()} == {"large": 6, "waits": 0, "small": 2}


def test_who_was_refused_is_said_to_be() -> None:
    """Nobody is asked about it for a while, so nothing waits for somebody's approval there."""
    refused = RequireApproval({"first": ShrinkApproval(approved=False, target=2)})
    assert reasons(refused, [job("first", 1, 9, 6, limit=2)], 20.0)["first"] == (
        "stays at 6 as somebody has refused that it shrinks from 6 to 2: window 'day' allows 2"
    )


def test_who_would_shrink_only_beside_those_that_may_not_is_not_said_to_wait() -> None:
    """An approval of the others would take nothing from it, and nobody is asked about it."""
    jobs = [job("large", 1, 9, 8), job("small", 1, 9, 3)]
    assert decided(approved(large=0, small=0), jobs, 6.0)[0] == {"large": 3, "small": 3}
    assert decided(approved(), jobs, 6.0) == ({"large": 8, "small": 3}, {"large"})
    why = reasons(approved(), jobs, 6.0)
    assert why["large"].endswith("shrinks from 8 to 3: this is its share of the 6 cpu that training may use")
    assert why["small"] == "stays at 3 beside others that may not shrink"


def test_the_last_instance_that_runs_stays() -> None:
    """The last indexes leave first: one without a place before it is kept with it, and counts for others."""
    gap = Workload(name="gap", bounds=Bounds(1, 9), resources={"cpu": 1.0}, nodes=("n1", "", "n2", ""), submitted_s=0.0)
    jobs = [gap, job("other", 1, 9, 1)]
    assert decided(approved(), jobs, 4.0) == ({"gap": 3, "other": 1}, {"gap"})
    assert targets(approved(), jobs, 4.0)["gap"].nodes == ("n1", "", "n2")


def test_who_is_kept_has_its_minimum() -> None:
    """Also where fewer run, since one below it trains no more; and with an answer from when the minimum was less."""
    jobs = [job("some", 3, 5, 1, waiting=3, limit=0), job("less", 2, 5, 4, limit=0)]
    assert decided(approved(less=1), jobs, 20.0) == ({"some": 3, "less": 2}, {"some", "less"})


JOBS = some.lists(
    some.tuples(some.integers(1, 3), some.integers(0, 5), some.integers(0, 6), some.none() | some.integers(0, 6)),
    min_size=1,
    max_size=6,
)


@given(shapes=JOBS, cpus=some.integers(0, 20))
def test_nobody_shrinks_unapproved_and_growth_takes_only_what_is_left(
    shapes: list[tuple[int, int, int, int | None]], cpus: int
) -> None:
    """Whatever the jobs and the answers; and with all approved it is the policy itself."""
    jobs = [job(f"job-{number}", low, low + more, have) for number, (low, more, have, _) in enumerate(shapes)]
    floors = {f"job-{number}": floor for number, (*_, floor) in enumerate(shapes) if floor is not None}
    found = targets(approved(**floors), jobs, float(cpus))
    for each in jobs:
        assert found[each.name].instances >= min(each.instances, floors.get(each.name, each.instances))
    if any(found[each.name].instances > each.instances for each in jobs):
        assert sum(target.instances for target in found.values()) <= cpus
    everybody = dict.fromkeys((each.name for each in jobs), 0)
    assert targets(approved(**everybody), jobs, float(cpus)) == decide(
        jobs, NODES, {"cpu": float(cpus)}, now_s=NOW, pause_s=1.0
    )
