"""Shrinks that wait for a person."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as some

from edl_runtime.autoscale.approval import Approved
from edl_runtime.autoscale.jobs import Job, Limit, Node, Target
from edl_runtime.autoscale.policy import decide
from edl_runtime.specs import Bounds

NOW = 100_000.0
NODES = [Node(name="node", free={"cpu": 100.0})]


def job(name: str, low: int, high: int, have: int, *, waiting: int = 0, limit: int | None = None) -> Job:
    return Job(
        name=name,
        bounds=Bounds(low, high),
        resources={"cpu": 1.0},
        nodes=("node",) * have + ("",) * waiting,
        submitted_s=NOW - 5000,
        limit=None if limit is None else Limit(instances=limit, reason=f"window 'day' allows {limit}"),
    )


def targets(policy: Approved, jobs: Sequence[Job], cpus: float) -> dict[str, Target]:
    return policy(jobs, NODES, {"cpu": cpus}, now_s=NOW, pause_s=1.0)


def counts(found: dict[str, Target]) -> dict[str, int]:
    return {name: target.instances for name, target in found.items()}


def test_who_is_not_approved_keeps_what_it_has_and_others_grow_beside_it() -> None:
    """Each takes what is left and no more, and the reason says what waits."""
    jobs = [job("large", 1, 9, 6), job("small", 1, 9, 1)]
    policy = Approved(())
    found = targets(policy, jobs, 8.0)
    assert counts(found) == {"large": 6, "small": 2}
    assert policy.waiting == {"large"}
    assert found["large"].reason == (
        "stays at 6 until somebody approves that it shrinks from 6 to 4: this is its share of the 8 cpu that training "
        "may use"
    )
    approved = Approved(["large"])
    assert counts(targets(approved, jobs, 8.0)) == {"large": 4, "small": 4}
    assert not approved.waiting


def test_only_those_that_were_approved_shrink() -> None:
    """Others that would keep what they have, also when that leaves more for nobody."""
    jobs = [job("one", 1, 9, 6, limit=2), job("two", 1, 9, 6, limit=3)]
    policy = Approved(["two", "gone"])
    assert counts(targets(policy, jobs, 20.0)) == {"one": 6, "two": 3}
    assert policy.waiting == {"one"}


def test_what_waits_for_a_place_needs_no_approval() -> None:
    """It loses nothing: no instance of it runs."""
    policy = Approved(())
    assert counts(targets(policy, [job("pending", 4, 4, 0, waiting=4)], 2.0)) == {"pending": 0}
    assert counts(targets(policy, [job("half", 1, 9, 3, waiting=4)], 3.0)) == {"half": 3}
    assert not policy.waiting
    assert counts(targets(policy, [job("half", 1, 9, 3, waiting=4)], 2.0)) == {"half": 3}
    assert policy.waiting == {"half"}


JOBS = some.lists(
    some.tuples(some.integers(1, 3), some.integers(0, 5), some.integers(0, 6), some.booleans()), min_size=1, max_size=6
)


@given(shapes=JOBS, cpus=some.integers(0, 20))
def test_nobody_shrinks_unapproved_and_growth_takes_only_what_is_left(
    shapes: list[tuple[int, int, int, bool]], cpus: int
) -> None:
    """Whatever the jobs; and with all approved it is the policy itself."""
    jobs = [job(f"job-{number}", low, low + more, have) for number, (low, more, have, _) in enumerate(shapes)]
    approved = {f"job-{number}" for number, shape in enumerate(shapes) if shape[3]}
    policy = Approved(approved)
    found = targets(policy, jobs, float(cpus))
    for each in jobs:
        assert each.name in approved or found[each.name].instances >= each.instances
    if any(found[each.name].instances > each.instances for each in jobs):
        assert sum(target.instances for target in found.values()) <= cpus
    everybody = [each.name for each in jobs]
    assert targets(Approved(everybody), jobs, float(cpus)) == decide(
        jobs, NODES, {"cpu": float(cpus)}, now_s=NOW, pause_s=1.0
    )
