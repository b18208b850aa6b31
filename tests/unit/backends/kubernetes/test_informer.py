"""What watches have told, and what they have still to tell."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from edl_runtime.backends.errors import ClusterError
from edl_runtime.backends.kubernetes import informer
from edl_runtime.backends.kubernetes.client import Manifest, Outage, WatchEvent
from edl_runtime.backends.kubernetes.informer import Indexer, Informer
from edl_runtime.backends.kubernetes.node_informer import NodeInformer
from edl_runtime.errors import SpecError, UnexpectedError


def pod(name: str, version: int, job: str = "job", uid: str = "") -> Manifest:
    metadata = {"name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version), "labels": {"job": job}}
    return {"kind": "Pod", "metadata": metadata}


def informer_of(jobs: list[str], pods: list[Manifest], events: list[Manifest]) -> Informer:
    """Return what knows jobs of these names, pods, and events of pods."""
    made = Informer(no_cluster, "default", Outage())
    listed: dict[str, list[Manifest]] = {
        "Job": [{"kind": "Job", "metadata": about(name), "spec": {"completions": 1}} for name in jobs],
        "Pod": pods,
    }
    for seen in made._indexers:
        seen.apply(WatchEvent("LISTED", "1", listed.get(seen.kind, [])))
    made._events_of_pods.apply(WatchEvent("ADDED", "2", events))
    return made


def about(name: str, job: str = "") -> Manifest:
    return {"name": name, "uid": f"uid-{name}", "resourceVersion": "1", "labels": {"edl-airflow/job": job or name}}


def no_cluster() -> Any:
    raise AssertionError


def event(name: str, message: str, **of_pod: str) -> Manifest:
    metadata = {"name": name, "resourceVersion": "2"}
    return {"metadata": metadata, "involvedObject": of_pod, "reason": "FailedMount", "message": message}


def view(*changes: WatchEvent) -> Indexer:
    """Return what is known after these."""
    made = Indexer("Pod", lambda thing: str(thing["metadata"]["labels"]["job"]))
    for change in changes:
        made.apply(change)
    return made


def names(seen: Indexer, job: str = "job") -> list[str]:
    return sorted(thing["metadata"]["name"] for thing in seen.of(job))


def test_objects_are_known_by_what_they_are_about() -> None:
    """All that are listed, those that come, as they are now, and without those that have gone."""
    listed = WatchEvent("LISTED", "5", [pod("a", 1), pod("b", 5), pod("c", 3, "other")])
    seen = view(listed)
    assert (names(seen), names(seen, "other"), sorted(seen.subjects)) == (["a", "b"], ["c"], ["job", "other"])
    seen.apply(WatchEvent("ADDED", "6", [pod("d", 6)]))
    seen.apply(WatchEvent("MODIFIED", "7", [pod("a", 7)]))
    seen.apply(WatchEvent("DELETED", "8", [pod("b", 8)]))
    seen.apply(WatchEvent("DELETED", "9", [pod("c", 9, "other")]))
    assert [(thing["metadata"]["name"], informer.resource_version(thing)) for thing in seen.of("job")] == [
        ("d", 6),
        ("a", 7),
    ]
    assert (names(seen, "other"), list(seen.subjects)) == ([], ["job"])


def test_a_list_replaces_all_that_was_known() -> None:
    """After a watch that has lost its place, what has gone in between is gone."""
    seen = view(
        WatchEvent("LISTED", "5", [pod("a", 1), pod("c", 3, "other")]), WatchEvent("LISTED", "9", [pod("b", 8)])
    )
    assert (names(seen), list(seen.subjects)) == (["b"], ["job"])


def test_an_object_that_is_about_something_else_now_is_known_by_that_alone() -> None:
    """Labels may be changed."""
    seen = view(WatchEvent("LISTED", "5", [pod("a", 1)]), WatchEvent("MODIFIED", "6", [pod("a", 6, "other")]))
    assert (names(seen), names(seen, "other")) == ([], ["a"])


@pytest.mark.parametrize(
    ("listed", "version", "behind"),
    [
        ([pod("a", 4)], 5, False),
        ([pod("a", 4)], 9, False),
        ([pod("a", 7)], 9, True),
        ([pod("a", 4), pod("b", 8)], 9, True),
        ([], 9, True),
        ([], 3, False),
        ([pod("a", 3, uid="an earlier one")], 3, False),
        ([pod("a", 8, uid="the next one")], 9, True),
    ],
    ids=[
        "as it is",
        "as it is, and others have changed",
        "has changed",
        "one more has come",
        "is gone",
        "was not there yet",
        "was another then",
        "is another now",
    ],
)
def test_a_watch_is_behind_until_it_has_told_all_that_was_listed(
    listed: list[Manifest], version: int, *, behind: bool
) -> None:
    """What was listed is compared to what the watch has told, whichever of the two is the newer."""
    seen = view(WatchEvent("LISTED", "5", [pod("a", 4)]))
    assert seen.is_behind("job", listed, version) == behind
    seen.apply(WatchEvent("DELETED", "10", [pod("a", 10)]))
    seen.apply(WatchEvent("ADDED", "11", [pod("b", 11)]))
    assert not seen.is_behind("job", listed, version)


def test_a_watch_is_silent_from_when_it_was_last_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is open it is not, though nothing happens; a list is a sign of life as well."""
    now = 0.0
    monkeypatch.setattr(informer, "clock", lambda: now)
    seen = view()
    now = 3.0
    assert seen.silence_s() == 3.0
    seen.apply(WatchEvent("LISTED", "5"))
    now = 5.0
    assert seen.silence_s() == 2.0
    seen.apply(WatchEvent("OPENED", "5"))
    now = 100.0
    assert seen.silence_s() == 0.0
    seen.apply(WatchEvent("CLOSED", "5"))
    seen.close()
    now = 107.0
    seen.close()
    assert seen.silence_s() == 7.0


async def test_whoever_looks_at_many_jobs_lets_others_have_their_turn() -> None:
    """A triggerer runs hundreds of triggers in one loop."""
    jobs = [f"job-{number:03}" for number in range(8 * informer.BATCH_SIZE)]
    known = informer_of(jobs, [], [])
    known._synced = {name: (f"uid-{name}",) for name in jobs}
    known._api = SimpleNamespace(list=None)  # type: ignore[assignment]
    known._running = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    found = await known.list()
    running.cancel()
    assert [status.name for status in found] == jobs
    assert turns >= 8


@pytest.mark.parametrize(
    ("annotation", "value", "why"),
    [
        ("weight", "banana", "could not convert string to float: 'banana'"),
        ("weight", "nan", "weight: got nan, allowed is a number above 0"),
        ("priority", "9" * 5000, "Exceeds the limit"),
        ("wanted", "1" + "0" * 30, "edl-airflow/wanted: got"),
        ("bounds", "1:99999999", "bounds.max: got 99999999, allowed is 1 to 10,000"),
        ("most-disruptions", "", None),
        ("created-at", "yesterday", "could not convert string to float: 'yesterday'"),
    ],
)
async def test_annotations_of_a_job_that_nobody_understands_are_its_own_trouble(
    annotation: str, value: str, why: str | None
) -> None:
    """Whoever lists all jobs has the others; whoever asks for that one is told."""
    known = informer_of(["good"], [], [])
    known._api = SimpleNamespace(list=no_cluster)  # type: ignore[assignment]
    known._running = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
    annotations = {"edl-airflow/bounds": "1:2", "edl-airflow/token": "own/1", f"edl-airflow/{annotation}": value}
    metadata = {**about("evil"), "annotations": annotations}
    known._jobs.apply(WatchEvent("ADDED", "2", [{"kind": "Job", "metadata": metadata, "spec": {"completions": 2}}]))
    known._pods.apply(WatchEvent("BOOKMARK", "3"))
    evil, good = await known.list()
    assert (evil.name, evil.wanted, evil.token, good.name, good.reason) == ("evil", 2, "own/1", "good", "")
    if why is None:
        assert evil.scaling
        return
    assert why in evil.reason
    assert evil.scaling is None
    with pytest.raises((SpecError, UnexpectedError), match=why.split(",", maxsplit=1)[0]):
        await known.get("evil")


@pytest.mark.parametrize("doubted", [False, True])
async def test_a_status_waits_for_what_a_watch_has_still_to_tell(*, doubted: bool) -> None:
    """When a job says something else of itself than before, and when oneself has done something to it."""

    def as_it_is(phase: str, version: int) -> Manifest:
        metadata = {**about("job-0", "job"), "resourceVersion": str(version)}
        return {"kind": "Pod", "metadata": metadata, "spec": {}, "status": {"phase": phase}}

    async def listed(kind: str, **_: str) -> tuple[list[Manifest], str]:
        return {"Pod": [as_it_is("Succeeded", 5)], "Job": known._jobs.of("job"), "Deployment": []}[kind], "5"

    known = informer_of(["job"], [as_it_is("Running", 1)], [])
    known._api = SimpleNamespace(list=listed)  # type: ignore[assignment]
    known._running = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
    if doubted:
        known.mark_stale("job")
    else:
        ended = {"conditions": [{"type": "Complete", "status": "True"}]}
        job = {"kind": "Job", "metadata": {**about("job"), "resourceVersion": "4"}, "spec": {"completions": 1}}
        known._jobs.apply(WatchEvent("MODIFIED", "4", [{**job, "status": ended}]))
    asking = asyncio.create_task(known.get("job"))
    done, _ = await asyncio.wait([asking], timeout=0.05)
    assert not done
    for indexer in (known._jobs, known._deployments, known._pods):
        indexer.apply(WatchEvent("MODIFIED", "5", [as_it_is("Succeeded", 5)] if indexer is known._pods else []))
    await known._notify()
    assert [one.phase for one in (await asking).instances] == ["succeeded"]
    assert not known._stale


@pytest.mark.parametrize("reported", ["4", "9"])
async def test_a_status_needs_no_request_when_the_pods_are_as_new_as_the_job(reported: str) -> None:
    """Versions of all kinds are of one sequence: what led to the Job's conditions has been reported before."""
    known = informer_of([], [], [])
    known._api = SimpleNamespace(list=no_cluster)  # type: ignore[assignment]
    known._running = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
    ended = {"conditions": [{"type": "Complete", "status": "True"}]}
    job = {"kind": "Job", "metadata": {**about("job"), "resourceVersion": "4"}, "spec": {"completions": 1}}
    known._jobs.apply(WatchEvent("MODIFIED", "4", [{**job, "status": ended}]))
    known._pods.apply(WatchEvent("BOOKMARK", reported))
    assert (await known.get("job")).phase == "succeeded"


async def test_a_status_waits_until_the_watch_has_reported_what_we_changed() -> None:
    """Without a request: the change is an event like any other."""
    known = informer_of(["job"], [], [])
    known._api = SimpleNamespace(list=no_cluster)  # type: ignore[assignment]
    known._running = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
    resized = {"kind": "Job", "metadata": {**about("job"), "resourceVersion": "7"}, "spec": {"completions": 3}}
    known.await_change("job", resized)
    asking = asyncio.create_task(known.get("job"))
    done, _ = await asyncio.wait([asking], timeout=0.05)
    assert not done
    known._jobs.apply(WatchEvent("MODIFIED", "7", [resized]))
    known._pods.apply(WatchEvent("BOOKMARK", "8"))
    await known._notify()
    assert (await asking).wanted == 3


def test_a_cache_without_the_right_to_watch_is_complete_until_it_has_it() -> None:
    """And says so."""
    seen = Indexer("Node", lambda _: "", is_optional=True)
    refused = ClusterError(403, "Forbidden", "nodes is forbidden")
    seen.refuse(refused)
    assert (seen.is_known, seen.refused, list(seen.all), seen.silence_s()) == (True, refused, [], 0.0)
    seen.apply(WatchEvent("LISTED", "5", [pod("a", 1)]))
    assert (seen.refused, len([*seen.all])) == (None, 1)


def test_objects_of_one_name_in_two_namespaces_are_two() -> None:
    """As pods of all namespaces."""
    here, there = pod("a", 1), pod("a", 2)
    here["metadata"]["namespace"], there["metadata"]["namespace"] = "here", "there"
    seen = view(WatchEvent("LISTED", "5", [here, there]))
    assert names(seen) == ["a", "a"]
    seen.apply(WatchEvent("DELETED", "6", [here]))
    assert [one["metadata"]["namespace"] for one in seen.of("job")] == ["there"]


def test_what_delays_a_pod_is_known_by_its_own_events() -> None:
    """Not by those of others, nor by those that are about nothing that has a uid."""
    creating = {"name": "instance", "state": {"waiting": {"reason": "ContainerCreating"}}}
    status = {"phase": "Pending", "containerStatuses": [creating]}
    placed = {"kind": "Pod", "metadata": about("mine", "job"), "spec": {"nodeName": "n1"}, "status": status}
    others = [event("a", "theirs", uid="other"), event("b", "nobody's")]
    assert informer_of(["job"], [placed], others)._status("job").reason == ""
    told = informer_of(["job"], [placed], [event("c", "no such volume", uid="uid-mine"), *others])._status("job")
    assert told.reason == "instance 0 can't start yet: FailedMount: no such volume"


def test_a_status_is_computed_again_when_one_of_the_job_s_objects_has_changed() -> None:
    """Also when a pod has become another job's; those of other jobs leave it as it is."""
    known = informer_of(["job", "other"], [], [])

    def told(kind: str, name: str, job: str, version: int) -> None:
        watched = known._pods if kind == "Pod" else known._jobs
        spec = {"completions": 1} if kind == "Job" else {}
        metadata = {**about(name, job), "resourceVersion": str(version)}
        annotations = {"batch.kubernetes.io/job-completion-index": "0", "edl-airflow/wanted": "1"}
        thing = {"kind": kind, "metadata": {**metadata, "annotations": annotations}, "spec": spec, "status": {}}
        change = WatchEvent("MODIFIED", str(version), [thing])
        known._applied(watched, change, watched.apply(change))

    first = known._status("job")
    told("Pod", "other-0", "other", 2)
    assert known._status("job") is first
    told("Pod", "job-0", "job", 3)
    assert [one.pod for one in known._status("job").instances] == ["job-0"]
    told("Pod", "job-0", "other", 4)
    assert known._status("job").instances == ()


@pytest.mark.parametrize("namespace", ["default", "another"])
@pytest.mark.parametrize("of_job", [True, False])
def test_each_pod_is_reported_by_one_watch(namespace: str, *, of_job: bool) -> None:
    """One of our jobs here, of those elsewhere, or of anybody else: no pod counts twice, and none is missing."""
    watches = [*informer_of([], [], [])._indexers, *NodeInformer(no_cluster, "default", Outage())._indexers]

    def is_selected(watch: Indexer) -> bool:
        is_elsewhere = namespace != "default"
        if watch.kind != "Pod" or (is_elsewhere and not watch.everywhere):
            return False
        selects_jobs = "!edl-airflow/job" not in watch.labels
        return of_job == selects_jobs and (is_elsewhere or "metadata.namespace!=default" not in watch.fields)

    assert sum(map(is_selected, watches)) == 1


def test_what_kueue_says_of_a_job_is_in_its_next_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Workloads are watched from the first job in a queue on; until then no watch of them is missed."""
    now = [1000.0]
    monkeypatch.setattr(informer, "clock", lambda: now[0])
    known = informer_of([], [], [])
    for seen in known._indexers[:-1]:
        seen._is_open = True
    now[0] += 5000.0
    assert (known._is_needed(known._workloads), known._silence_s()) == (False, 0.0)

    def told(kind: str, watched: Indexer, labels: dict[str, str], **parts: Any) -> None:
        thing = {"kind": kind, "metadata": {**about("job"), "labels": labels}, **parts}
        thing["metadata"]["ownerReferences"] = [{"kind": "Job", "name": "job"}]
        change = WatchEvent("ADDED", "2", [thing])
        known._applied(watched, change, watched.apply(change))

    labels = {"edl-airflow/job": "job", "kueue.x-k8s.io/queue-name": "team"}
    told("Job", known._jobs, labels, spec={"completions": 1, "suspend": True})
    assert (known._is_needed(known._workloads), known._silence_s()) == (True, 0.0)
    assert known._status("job").reason == "suspended: it waits in Kueue's queue 'team'"
    waits = {"type": "QuotaReserved", "status": "False", "message": "no quota"}
    told("Workload", known._workloads, {"kueue.x-k8s.io/job-uid": "uid-job"}, status={"conditions": [waits]})
    assert known._status("job").reason == "suspended: it waits in Kueue's queue 'team': no quota"
