"""What should be, by what there is: the policy under windows, for jobs as a backend knows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.autoscale.jobs import NOON, job

from edl_runtime.autoscale.cluster.snapshot import ClusterSnapshot
from edl_runtime.autoscale.planner import RescalingPlan, RescalingRules, make_plan
from edl_runtime.autoscale.policy.decide import decide
from edl_runtime.autoscale.policy.interface import Policy
from edl_runtime.autoscale.policy.model import Limit, Target, Workload
from edl_runtime.autoscale.traffic.schema import to_windows
from edl_runtime.backends.interface import Capacity, JobStatus, NodeCapacity
from edl_runtime.errors import SpecError
from edl_runtime.specs import Bounds


def planned(
    jobs: Sequence[JobStatus],
    cpus: float,
    *,
    others: float = 0.0,
    needs: dict[str, Limit] | None = None,
    students: dict[str, tuple[str, ...]] | None = None,
    at: float = NOON,
    **rules: Any,
) -> RescalingPlan:
    """Return the plan for a node of so many CPUs on which others have reserved some."""
    used = sum(
        job.scaling.resources["cpu"] * sum(bool(one.node) for one in job.instances) for job in jobs if job.scaling
    )
    there = Capacity(nodes=(node(cpus, max(0.0, round(cpus - others - used, 6))),))
    surveyed = ClusterSnapshot(at=at, jobs=tuple(jobs), capacity=there, needs=needs or {}, students=students or {})
    return make_plan(surveyed, RescalingRules(**rules))


def on(nodes: Sequence[NodeCapacity], *jobs: JobStatus, policy: Policy = decide, **rules: Any) -> RescalingPlan:
    """Return the plan for these nodes."""
    return make_plan(
        ClusterSnapshot(at=NOON, jobs=jobs, capacity=Capacity(nodes=tuple(nodes))), RescalingRules(**rules), policy
    )


def node(cpus: float, free: float = 0.0, name: str = "node", **more: Any) -> NodeCapacity:
    return NodeCapacity(name=name, total={"cpu": cpus}, free={"cpu": free}, **more)


def counts(found: RescalingPlan) -> dict[str, int]:
    return {one.name: one.target for one in found.targets}


def reasons(found: RescalingPlan) -> dict[str, str]:
    return {one.name: one.reason for one in found.targets}


def tutorial(first: int, second: int, third: int | None = None, third_pending: int = 0) -> list[JobStatus]:
    jobs = [job("example", Bounds(2, 10), 0.036, first), job("example1", Bounds(2, 8), 0.040, second)]
    if third is not None:
        jobs.append(job("example2", Bounds(4, 4), 0.108, third, pending=third_pending))
    return jobs


def test_the_tutorials_jobs_make_way_for_the_third() -> None:
    """Other load is 184m of 1000m and the highest 0.9: ten and eight run; with the third, four and three or so."""
    load: dict[str, Any] = {"others": 0.184, "max_load": 0.9}
    assert counts(planned(tutorial(2, 2), 1.0, **load)) == {"example": 10, "example1": 8}
    full = planned(tutorial(10, 8), 1.0, **load)
    assert counts(full) == {"example": 10, "example1": 8}
    assert full.capacity == {"cpu": 0.716}
    third = planned(tutorial(10, 8, 0, 4), 1.0, **load)
    assert counts(third)["example2"] == 4
    assert {counts(third)["example"], counts(third)["example1"]} <= {3, 4}
    assert [one.name for one in third.changes] == ["example", "example1"]  # the third one's pods wait already
    assert not planned(tutorial(counts(third)["example"], counts(third)["example1"], 4), 1.0, **load).changes


def test_devices_and_pods_count_whole() -> None:
    """The highest load is a share of CPU and memory: of eight free GPUs all are used, and all places for pods."""
    has = {"cpu": 10.0, "memory": 100.0, "gpu": 8.0, "rdma/hca": 8.0, "pods": 8.0}
    needs = {"cpu": 0.1, "memory": 1.0, "gpu": 1.0, "rdma/hca": 1.0, "pods": 1.0}
    grows = job("job", Bounds(1, 9), 0.1, 0, pending=1, resources=needs)
    found = on([NodeCapacity(name="node", total=has, free=has)], grows, max_load=0.97)
    assert counts(found) == {"job": 8}
    assert found.capacity == {"cpu": 9.7, "memory": 97.0, "gpu": 8.0, "rdma/hca": 8.0, "pods": 8.0}


NEARLY_ALL = {"cluster": "97%"}

WINDOWS = to_windows(
    {
        "windows": [
            {
                "name": "day",
                "start": "07:00",
                "end": "22:00",
                "sizes": {"cluster": "50%", "jobs": {"limited": 2, "missing": 1}, "pools": {"teachers": 1}},
            }
        ],
        "default": {},
    }
)


def test_what_runs_beyond_the_room_is_no_room() -> None:
    """Processes start whether or not there is room: jobs on 2.2 of 2 CPUs don't let training use more than it may."""
    found = planned([job("a", Bounds(1, 10), 0.1, 12), job("b", Bounds(1, 10), 0.1, 10)], 2.0, max_load=0.7)
    assert found.capacity == {"cpu": 1.4}
    assert counts(found) == {"a": 7, "b": 7}


def test_windows_say_how_much_there_is() -> None:
    """For all, and for one; a size for what is not there is told, for it may be misspelt."""
    jobs = [job("limited", Bounds(1, 9), 1.0, 4), job("other", Bounds(1, 9), 1.0, 4)]
    found = planned(jobs, 10.0, windows=WINDOWS)
    assert counts(found) == {"limited": 2, "other": 3}
    assert reasons(found)["limited"] == "shrinks from 4 to 2: window 'day' allows 2"
    assert found.window == "day"
    assert found.until == NOON + 10 * 3600
    assert found.notes == (
        "window 'day' has a size for job 'missing', and there is no such job now",
        "window 'day' has a size for pool 'teachers', and there is no such pool now",
    )
    in_berlin = msgspec.structs.replace(WINDOWS, time_zone="Europe/Berlin")
    assert found.why == "window 'day' holds until 22:00"
    assert planned(jobs, 10.0, windows=in_berlin).why == "window 'day' holds until 22:00 (Europe/Berlin)"
    night = planned(jobs, 10.0, windows=WINDOWS, at=NOON + 11 * 3600)
    assert counts(night) == {"limited": 5, "other": 5}
    assert (night.window, night.until) == ("default", NOON + 19 * 3600)


def test_jobs_shrink_before_the_window_begins() -> None:
    """By the lead time, and not before; and grow when it is over, not before."""
    jobs = [job("limited", Bounds(1, 9), 1.0, 4), job("other", Bounds(1, 9), 1.0, 4)]
    seven = NOON - 5 * 3600
    assert counts(planned(jobs, 10.0, windows=WINDOWS, at=seven - 61)) == {"limited": 5, "other": 5}
    early = planned(jobs, 10.0, windows=WINDOWS, at=seven - 60)
    assert counts(early) == {"limited": 2, "other": 3}
    assert [(window.name, window.start) for window in early.following] == [("day", seven)]
    assert planned(jobs, 10.0, windows=WINDOWS, at=seven - 61).following == ()
    assert counts(planned(jobs, 10.0, windows=WINDOWS, at=NOON + 10 * 3600 - 1)) == {"limited": 2, "other": 3}


def test_what_cannot_be_resized_has_what_it_has() -> None:
    """A job of one process is nobody's target, and what it reserves is no more for the others, windows or none."""
    single, other = job("single", Bounds(1, 1), 3.0, 1, elastic=False), job("other", Bounds(1, 9), 1.0, 1)
    found = planned([single, other], 10.0, windows=WINDOWS)
    assert counts(found) == {"other": 2}
    assert found.capacity == {"cpu": 2.0}
    found = on([node(3)], single, job("other", Bounds(1, 9), 1.0, 3))
    assert counts(found) == {"other": 0}
    assert found.capacity == {"cpu": 0.0}


def test_who_has_no_checkpoint_is_not_suspended() -> None:
    """It goes on with its minimum, and others share what is left beside that; one that has not begun yet waits."""
    jobs = [
        job("first", Bounds(3, 3), 1.0, 3, priority=1),
        job("second", Bounds(2, 4), 1.0, 3, resumes=False),
        job("third", Bounds(3, 4), 1.0, 0, pending=2, resumes=False),
    ]
    found = planned(jobs, 10.0, max_load=0.4)
    assert counts(found) == {"first": 0, "second": 2, "third": 0}
    assert reasons(found)["second"] == (
        "keeps 2, because it has no checkpoint to resume from; otherwise it is suspended: its minimum "
        "of 2 does not fit beside those that come first"
    )
    assert counts(planned(jobs, 10.0, max_load=0.5)) == {"first": 3, "second": 2, "third": 0}
    assert counts(planned(jobs, 10.0, max_load=0.1)) == {"first": 0, "second": 2, "third": 0}, "what runs, runs"


def test_a_pool_is_not_suspended_while_students_use_it() -> None:
    """A student of one process keeps its CPU, so that it would wait for ever for the teachers that make way for it."""
    jobs = [
        job("student", Bounds(1, 1), 1.0, 1, elastic=False, resumes=False),
        job("teachers", Bounds(1, 3), 1.0, 2, kind="pool"),
    ]
    used = planned(jobs, 4.0, windows=ONE_CPU, students={"teachers": ("student",)})
    assert counts(used) == {"teachers": 1}
    assert reasons(used)["teachers"] == (
        "keeps 1, because students use it; otherwise it is suspended: its minimum of 1 needs 1 cpu, training may use 0"
    )
    unused = planned(jobs, 4.0, windows=ONE_CPU, students={"teachers": ()})
    assert reasons(unused) == {"teachers": "is suspended: its minimum of 1 needs 1 cpu, training may use 0"}


@pytest.mark.parametrize(("named", "joined"), [("teachers", ()), ("", ("student",))])
def test_a_pool_and_its_elastic_students_are_suspended_together(named: str, joined: tuple[str, ...]) -> None:
    """It knows them by their EDL_POOL, or as they have joined the pool. One that is never suspended keeps both."""
    given: dict[str, Any] = {"windows": ONE_CPU, "students": {"teachers": joined}}
    teachers = job("teachers", Bounds(1, 3), 1.0, 1, kind="pool")
    student = job("student", Bounds(1, 1), 1.0, 1, pool=named)
    assert counts(planned([student, teachers, job("waits", Bounds(1, 1), 1.0, 0, pending=1)], 4.0, **given)) == {
        "student": 0,
        "teachers": 0,
        "waits": 1,
    }
    lasting = job("student", Bounds(1, 1), 1.0, 1, pool=named, resumes=False)
    kept = planned([lasting, teachers], 4.0, **given)
    assert counts(kept) == {"student": 1, "teachers": 1}
    assert reasons(kept)["teachers"].startswith("keeps 1, because students use it")


def test_a_student_that_is_not_resized_keeps_its_pool() -> None:
    """From its start on, before it has joined. Others of its pool come and go."""
    teachers = job("teachers", Bounds(1, 1), 1.0, 1, kind="pool")
    stays = job("stays", Bounds(1, 1), 1.0, 1, elastic=False, pool="teachers")
    goes = job("goes", Bounds(1, 1), 1.0, 1, pool="teachers")
    assert counts(planned([teachers, goes, stays], 2.0)) == {"goes": 0, "teachers": 1}
    waits = job("stays", Bounds(1, 1), 1.0, 0, pending=1, elastic=False, pool="teachers")
    assert counts(planned([teachers, goes, waits], 1.0)) == {"goes": 0, "teachers": 0}


def test_who_keeps_servers_in_a_pool_belongs_to_it() -> None:
    """It has another name than the pool, which its EDL_POOL names."""
    keeper = job("teachers-servers", Bounds(1, 1), 1.0, 0, kind="pool", pool="teachers")
    student = job("student", Bounds(1, 1), 1.0, 0, pool="teachers")
    assert counts(planned([keeper, student], 1.0)) == {"student": 0, "teachers-servers": 0}
    assert counts(planned([keeper, student], 2.0)) == {"student": 1, "teachers-servers": 1}


def test_an_own_policy_may_not_suspend_a_pool_whose_student_runs() -> None:
    """Whatever it knows of groups."""

    def trainers_first(jobs: Sequence[Workload], *_: object, **__: object) -> dict[str, Target]:
        return {one.name: Target(instances=int(one.students is None), reason="is no trainer") for one in jobs}

    teachers = job("teachers", Bounds(1, 1), 1.0, 1, kind="pool")
    found = on([node(2)], job("student", Bounds(1, 1), 1.0, 1, pool="teachers"), teachers, policy=trainers_first)
    assert counts(found) == {"student": 1, "teachers": 1}


ONE_CPU = to_windows({"windows": [], "default": {"cluster": {"cpu": 1}}})


def test_who_is_kept_leaves_what_it_has_beyond_its_minimum_to_others() -> None:
    """In the same pass; and with instances that have no place it keeps those that run."""
    large = job("large", Bounds(1, 9), 1.0, 8, resumes=False)
    found = planned([large, job("new", Bounds(4, 4), 1.0, 0, pending=4, priority=1)], 8.0, windows=SMALL)
    assert counts(found) == {"large": 1, "new": 4}
    gaps = stranded(job("large", Bounds(1, 9), 1.0, 3, resumes=False), 0)
    assert counts(planned([gaps], 8.0, windows=SMALL)) == {"large": 2}


SMALL = to_windows({"windows": [], "default": {"jobs": {"large": 0}}})


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 5), st.booleans(), st.integers(0, 1)), max_size=5
    ),
    st.integers(0, 12),
)
def test_a_plan_never_exceeds_what_there_is(drawn: list[tuple[int, int, int, bool, int]], allowed: int) -> None:
    """Unless those that can't be suspended take more than that by their minimums alone."""
    jobs = [
        job(f"job-{number}", Bounds(least, least + more), 1.0, have, resumes=resumes, priority=priority)
        for number, (least, more, have, resumes, priority) in enumerate(drawn)
    ]
    found = planned(jobs, 24.0, max_load=max(allowed, 0.001) / 24)
    kept = sum(one.target for one in found.targets if "no checkpoint" in one.reason)
    assert sum(one.target for one in found.targets) <= max(allowed, kept)


def test_a_quota_limits_what_it_names_alone() -> None:
    """Where nobody may see nodes, one stands for all, and what the quota does not name there is enough of."""
    there = Capacity(
        nodes=(NodeCapacity(name="quota", total={"cpu": 10.0}, free={"cpu": 8.0}),),
        quota_total={"cpu": 10.0},
        quota_left={"cpu": 8.0},
        only_node="quota",
    )
    jobs = [
        job("runs", Bounds(1, 9), 1.0, 2, resources={"cpu": 1.0, "pods": 1.0}),
        job("new", Bounds(1, 4), 1.0, 0, pending=1, resources={"pods": 1.0, "memory": 5.0}),
    ]
    found = make_plan(ClusterSnapshot(at=NOON, jobs=tuple(jobs), capacity=there), RescalingRules())
    assert counts(found) == {"runs": 9, "new": 4}


def test_a_job_that_waits_for_memory_says_so_in_gibibytes() -> None:
    """As people write it."""
    there = {"cpu": 8.0, "memory": 30.5 * 2**30}
    asks = job("big", Bounds(1, 4), 1.0, 0, pending=1, resources={"cpu": 1.0, "memory": 900 * 2.0**30})
    found = on([NodeCapacity(name="node", total=there, free=there)], asks)
    assert reasons(found) == {"big": "waits: its minimum of 1 needs 900 GiB memory, training may use 30.5 GiB"}


def test_room_is_where_a_job_may_be() -> None:
    """A tainted node and one without a label have room, and yet others make way for who may not be there."""
    tainted = ({"key": "control-plane", "value": "", "effect": "NoSchedule"},)
    nodes = (
        node(4, labels={"disk": "fast"}),
        node(4, 4, "slow", labels={}),
        node(4, 4, "control", labels={"disk": "fast"}, taints=tainted),
    )
    for selects, stay in (({"disk": "fast"}, 2), ({}, 4)):
        runs = job("runs", Bounds(1, 4), 1.0, 4, node_selector={"disk": "fast"})
        new = job("new", Bounds(2, 2), 1.0, 0, pending=2, node_selector=selects)
        assert counts(on(nodes, runs, new)) == {"runs": stay, "new": 2}


def test_nobody_makes_way_on_a_node_that_takes_no_more() -> None:
    """Who leaves a cordoned node, and still runs there, leaves nothing to others."""
    closed = ({"key": "node.kubernetes.io/unschedulable", "value": "", "effect": "NoSchedule"},)
    nodes = (node(4, labels={}, taints=closed), node(0.5, 0.5, "other", labels={}))
    new = job("new", Bounds(1, 2), 1.0, 0, pending=1, priority=1)
    assert counts(on(nodes, job("runs", Bounds(1, 4), 1.0, 4), new)) == {"runs": 4, "new": 0}


def closed(total: float, used: float, name: str = "node") -> NodeCapacity:
    """Return a cordoned node, of which pods reserve what is used."""
    return node(used, name=name, closed_total={"cpu": total})


@pytest.mark.parametrize("given", [{"max_load": 0.97}, {"windows": to_windows({"windows": [], "default": NEARLY_ALL})}])
def test_nobody_makes_way_where_a_node_is_closed(given: dict[str, Any]) -> None:
    """What runs there is limited by no share, neither the highest load nor a window's, and takes none of others'."""
    four = job("four", Bounds(4, 4), 0.3, 4)
    fixed = job("fixed", Bounds(1, 1), 0.3, 1, elastic=False)
    assert counts(on([closed(2.0, 1.57)], four, **given)) == {"four": 4}, "others on the node have 0.37"
    assert counts(on([closed(2.0, 1.5)], four, fixed, **given)) == {"four": 4}
    elsewhere = [closed(2.0, 1.2), node(10.0, 10.0, "other")]
    grows = job("grows", Bounds(1, 99), 0.1, 0, pending=1)
    assert counts(on(elsewhere, four, grows, **given)) == {"four": 4, "grows": 97}


def test_a_closed_node_is_no_part_of_a_windows_share_but_for_what_runs_there() -> None:
    """And an amount that a window names is the most, wherever it runs."""
    half = to_windows({"windows": [], "default": {"cluster": "50%"}})
    nodes = [closed(10.0, 4.0), node(10.0, 10.0, "other")]
    runs, grows = job("runs", Bounds(1, 4), 1.0, 4), job("grows", Bounds(1, 99), 1.0, 0, pending=1)
    assert counts(on(nodes, runs, grows, windows=half)) == {"runs": 4, "grows": 5}
    assert counts(on([closed(10.0, 0.0), nodes[1]], grows, windows=half)) == {"grows": 5}
    three = to_windows({"windows": [], "default": {"cluster": {"cpu": 3}}})
    assert counts(on(nodes, runs, windows=three)) == {"runs": 3}


def test_who_was_suspended_for_lost_capacity_resumes_when_it_is_back() -> None:
    """Without a rest: nothing else would use the room."""
    four = job("four", Bounds(4, 4), 0.3, 0, resized_at=NOON - 11)
    assert counts(on([closed(2.0, 0.37)], four)) == {"four": 0}
    assert counts(on([node(2.0, 1.63)], four)) == {"four": 4}


def stranded(job: JobStatus, *lost: int) -> JobStatus:
    """Return a job whose instances at these indexes have lost their places."""
    instances = [msgspec.structs.replace(one, node="", phase="pending") for one in job.instances]
    kept = [new if old.index in lost else old for old, new in zip(job.instances, instances, strict=True)]
    return msgspec.structs.replace(job, instances=tuple(kept))


def test_who_runs_keeps_its_places_though_an_earlier_instance_has_lost_its_own() -> None:
    """Its node takes no more, and no other has room. The later ones would be the first to leave, for nothing."""
    drained = NodeCapacity(name="node", total={"cpu": 5.0}, free={})
    for bounds, resumes in ((Bounds(1, 6), True), (Bounds(4, 9), False)):
        before = stranded(job("job", bounds, 1.0, 6, resumes=resumes), 0)
        found = on([drained], before)
        assert counts(found) == {"job": 6}
        assert reasons(found)["job"].endswith(", beside 1 that no node has room for")


def test_who_lost_a_place_goes_where_there_is_room_or_makes_it_by_those_beyond_its_share() -> None:
    """As ever where its job has too few places, or none is lost before the last one."""
    lost = stranded(job("job", Bounds(1, 6), 1.0, 6), 0)
    assert counts(planned([lost], 6.0)) == {"job": 6}
    little = stranded(job("job", Bounds(1, 2), 0.1, 2), 0)
    assert "beside" not in reasons(on([node(1, 1.0 - 0.9)], little))["job"], "there is not quite 0.1"
    full = [lost, job("other", Bounds(5, 5), 1.0, 5, priority=1)]
    assert counts(planned(full, 10.0)) == {"job": 6, "other": 5}
    assert counts(planned(full, 10.0, max_load=0.8)) == {"job": 4, "other": 5}, "of them 3 run"
    few = stranded(job("job", Bounds(6, 6), 1.0, 6), 0)
    assert counts(planned([few], 5.0)) == {"job": 0}
    assert counts(planned([stranded(job("job", Bounds(1, 6), 1.0, 6), 5)], 5.0)) == {"job": 5}
    pool = stranded(job("job", Bounds(1, 6), 1.0, 6, kind="pool"), 0)
    assert counts(planned([pool], 5.0)) == {"job": 5}


def test_no_more_of_a_job_run_than_its_share_whichever_of_them_lost_its_place() -> None:
    """Those that wait count only where they come before the last one that stays."""
    for lost, target in (((0,), 3), ((1,), 3), ((2,), 2), ((0, 2), 4), ((3,), 2), ((2, 3), 2)):
        before = stranded(job("job", Bounds(1, 6), 1.0, 5), *lost)
        places = 5.0 - len(lost)
        found = counts(planned([before], places, max_load=2 / places))["job"]
        assert found == target, lost
        assert sum(index not in lost for index in range(found)) == 2


def test_clusters_may_have_more_than_one_node_can() -> None:
    """A hundred nodes with two terabytes each, of which no job needs much."""
    there = {"cpu": 4.0, "memory": 3e14}
    found = on([NodeCapacity(name="node", total=there, free=there)], job("job", Bounds(1, 4), 1.0, 0, pending=1))
    assert counts(found) == {"job": 4}


def test_who_was_given_up_has_no_place_to_keep() -> None:
    """A job of four of which one was given up has three, and nobody who lives leaves for it."""
    four = job("job", Bounds(3, 4), 1.0, 4)
    first = msgspec.structs.replace(four.instances[0], phase="failed", given_up=True, node="")
    given_up = msgspec.structs.replace(four, instances=(first, *four.instances[1:]))
    found = planned([given_up], 3.0)
    assert counts(found) == {"job": 3}
    assert reasons(found)["job"].startswith("stays at 3")


def test_who_waits_in_a_queue_is_left_alone() -> None:
    """Whoever admits jobs there decides on it, and what it reserves once it runs is taken."""
    queued = job("queued", Bounds(4, 4), 1.0, 2, pending=2, queue="team")
    found = planned([queued, job("runs", Bounds(1, 9), 1.0, 1)], 8.0)
    assert counts(found) == {"runs": 6}


def test_who_runs_in_a_queue_asks_it_for_one_more_at_a_time() -> None:
    """Once all run that it has, and never for fewer: the queue has the quota, and hears of the growth once."""
    own = {"queue": "team", "resumes": False, "resized_at": NOON - 1}
    runs = job("queued", Bounds(1, 4), 1.0, 2, queue_resizes=True, **own)
    (grows,) = planned([runs], 8.0).changes
    assert (grows.target, grows.reason) == (3, "grows from 2 to 3")
    for left_alone in (
        job("queued", Bounds(1, 4), 1.0, 2, pending=1, queue_resizes=True, **own),
        job("queued", Bounds(1, 2), 1.0, 2, queue_resizes=True, **own),
        job("queued", Bounds(1, 4), 1.0, 2, **own),
    ):
        assert counts(planned([left_alone], 8.0)) == {}
    assert counts(planned([runs], 2.0)) == {}


def test_who_has_grown_and_was_stopped_by_its_queue_asks_for_its_minimum() -> None:
    """The queue may never have quota again for all that it had, or had asked for; once it runs it grows again."""
    own = {"wanted": 3, "queue": "team", "queue_resizes": True, "resumes": False, "resized_at": NOON - 1}
    stopped = job("queued", Bounds(2, 4), 1.0, 0, **own)
    (shrinks,) = planned([stopped, job("runs", Bounds(1, 9), 1.0, 8)], 8.0).changes
    assert (shrinks.name, shrinks.target) == ("queued", 2)
    for left_alone in (
        job("queued", Bounds(3, 4), 1.0, 0, **own),
        job("queued", Bounds(2, 4), 1.0, 0, **{**own, "resized_at": None}),
        job("queued", Bounds(2, 4), 1.0, 1, phase="pending", **own),
    ):
        assert counts(planned([left_alone], 8.0)) == {}


def test_who_runs_in_a_queue_keeps_what_it_has() -> None:
    """Where a window or another job's share would have it shrink, it only does not grow."""
    runs = job("limited", Bounds(1, 4), 1.0, 3, queue="team", queue_resizes=True, resumes=False)
    assert counts(planned([runs], 10.0, windows=WINDOWS)) == {}
    assert counts(planned([runs, job("first", Bounds(1, 4), 1.0, 1, priority=9)], 4.0)) == {"first": 1}


def test_a_pod_that_is_going_takes_nobodys_place() -> None:
    """Of four, one is evicted and its successor has no place yet: what is free is for that one, and for no other."""
    four = job("job", Bounds(4, 4), 1.0, 4, priority=1)
    going = msgspec.structs.replace(
        four, instances=(*four.instances[:3], msgspec.structs.replace(four.instances[3], leaving=True))
    )
    waits = job("waits", Bounds(1, 1), 1.0, 0, resized_at=NOON - 4000)
    assert counts(on([node(4, 1)], going, waits)) == {"job": 4, "waits": 0}


def test_a_pool_has_as_many_as_its_students_need() -> None:
    """Or as its window allows, if that is fewer."""
    teachers = job("teachers", Bounds(1, 8), 1.0, 1, kind="pool", elastic=False)
    needs = {"teachers": Limit(instances=3, reason="its students need 3")}
    found = planned([teachers], 10.0, needs=needs)
    assert reasons(found) == {"teachers": "grows from 1 to 3: its students need 3"}
    three = job("teachers", Bounds(1, 8), 1.0, 3, kind="pool", elastic=False)
    assert reasons(planned([three], 10.0, needs=needs)) == {"teachers": "stays at 3: its students need 3"}
    closed = planned([three], 10.0, needs=needs, windows=WINDOWS)
    assert reasons(closed) == {"teachers": "shrinks from 3 to 1: window 'day' allows 1"}


def test_a_job_with_an_instance_that_cannot_start_does_not_grow() -> None:
    """Another one would not start either; one that no node has room for yet is no such instance."""
    waits = job("a", Bounds(1, 8), 1.0, 1, pending=1)
    assert counts(planned([waits], 10.0)) == {"a": 8}
    why = "instance 1 can't start: ErrImagePull: no such image"
    stuck = msgspec.structs.replace(waits.instances[1], node="node", reason=why)
    failing = msgspec.structs.replace(waits, instances=(waits.instances[0], stuck))
    assert reasons(planned([failing], 10.0)) == {"a": f"stays at 2: {why}"}


def test_who_has_ended_is_left_alone() -> None:
    """And those that shrink come before those that grow."""
    jobs = [
        job("a-small", Bounds(1, 9), 1.0, 1),
        job("b-large", Bounds(1, 9), 1.0, 9),
        job("c-ended", Bounds(1, 9), 1.0, 0, phase="succeeded"),
    ]
    found = planned(jobs, 10.0)
    assert counts(found) == {"a-small": 5, "b-large": 5}
    assert [one.name for one in found.changes] == ["b-large", "a-small"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_load": 0}, "max_load: got 0, allowed is a share above 0, up to 1"),
        ({"lead_s": -1}, "lead_s: got -1, allowed is seconds, 0 to 14400"),
        ({"pause_s": float("nan")}, "pause_s: got nan, allowed is seconds, 0 to 14400"),
    ],
)
def test_what_rules_may_not_say(given: dict[str, Any], says: str) -> None:
    """An error names the field, what was given and what is allowed."""
    with pytest.raises(SpecError) as error:
        RescalingRules(**given)
    assert str(error.value) == says
