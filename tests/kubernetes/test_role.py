"""deploy/role.yaml grants exactly the verbs that the backend uses."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest
from support.backends.jobs import (
    WAITS,
    add_slots,
    eventually,
    exits_without_slot,
    followed,
    job,
    lines,
    reach,
    wait_for_line,
)
from support.cluster.cluster import Cluster
from support.cluster.manifests import create, created, manifests
from support.cluster.pod_faults import limited_by_role
from support.cluster.recorder import CREATIONS, OPTIONAL, Recorder, Verb, of_kueue, only, verbs_of

from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.backends.kubernetes.rights import needed_rights
from edl_runtime.errors import BackendError
from edl_runtime.pods import Pod
from edl_runtime.settings import KEPT_LOGS
from edl_runtime.specs import JobKind

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


@pytest.fixture
async def limited(home: Cluster, tmp_path: Path) -> Cluster:
    """The same namespace with the token of role.yaml's service account."""
    return await limited_by_role(home, tmp_path)


async def all_open(backend: KubernetesBackend) -> None:
    """Wait until all watches are open that a followed backend may have: it lists first and watches then."""
    ((informer, nodes, *_),) = backend._followed.made.values()

    async def are_open() -> bool:
        indexers = [*informer._indexers, *nodes._indexers]
        return all(indexer._is_open or indexer.refused for indexer in indexers if indexer.is_known)

    await eventually(are_open, "watches that are open")


async def run_pool(backend: KubernetesBackend, folder: Path) -> None:
    """Run a pool through all that pools do."""
    gives_up = exits_without_slot(folder) + WAITS
    add_slots(folder, 1)
    await backend.submit(job(gives_up, name="pool", instances=2), token="mine", secrets={"KEY": "x"})
    await wait_for_line(backend, "up", name="pool")
    adopting = job(gives_up, name="pool", instances=2)
    await backend.submit(adopting, token="mine, again", secrets={"KEY": "y"})
    await reach(backend, "pool", lambda status: any(one.given_up for one in status.instances))
    await backend.resize("pool", 3)
    add_slots(folder, 9)
    await wait_for_line(backend, "up", name="pool", instances=3)
    await backend.resize("pool", 1)
    await reads_and_ends(backend, "pool")


async def run_trainer(backend: KubernetesBackend, _: Path) -> None:
    """Run an elastic trainer job through all that jobs do."""
    trainer = job(WAITS, name="trainer", kind="trainer", instances=1, elastic=True)
    await backend.submit(trainer, token="mine", secrets={})
    await wait_for_line(backend, "up", name="trainer")
    await backend.resize("trainer", 2)
    await wait_for_line(backend, "up", name="trainer", instances=2)

    await backend.resize("trainer", 0)
    await reach(backend, "trainer", lambda status: not status.instances)
    await backend.resize("trainer", 2)
    await wait_for_line(backend, "up", name="trainer", instances=2)
    async with backend._api() as api:
        (pod, *_), _ = await api.list("Pod", labels=names.selector("trainer"))
        assert await api.evict(pod)
    evicted = pod["metadata"]["name"]
    await reach(backend, "trainer", lambda status: evicted not in {one.pod for one in status.instances})
    await wait_for_line(backend, "up", name="trainer", instances=2)

    async with backend.following() as watched:
        assert (await watched.get("trainer")).wanted == 2
        with pytest.raises(BackendError, match=r"no ResourceQuota.*deploy/cluster-role\.yaml"):
            await watched.capacity()
        await all_open(backend)

    refused = msgspec.structs.replace(trainer, name="refused", pod=Pod(priority_class="unheard-of"))
    await backend.submit(refused, token="mine", secrets={})
    await reach(backend, "refused", lambda status: "unheard-of" in status.reason)
    assert await backend.delete("refused")

    await reads_and_ends(backend, "trainer")
    await backend.submit(trainer, token="mine", secrets={})
    await wait_for_line(backend, "up", name="trainer")
    assert await backend.delete("trainer")  # its log replaces that of the one before


async def reads_and_ends(backend: KubernetesBackend, name: str) -> None:
    """Read all that there is of the only job, and delete it."""
    assert [status.name for status in await backend.list()] == [name]
    async with followed(backend, name) as seen:
        assert seen[0][1] == "up"  # of any instance
    with pytest.raises(BackendError, match=r"no ResourceQuota.*deploy/cluster-role\.yaml"):
        await backend.capacity()
    assert await backend.delete(name)
    assert (await lines(backend, name))[0] == (0, "up")


async def test_the_role_grants_exactly_the_verbs_that_are_used(home: Cluster, limited: Cluster, tmp_path: Path) -> None:
    """Jobs run with the role alone; the verbs they use are those of the role, and those that a submit rehearses."""
    for number in range(KEPT_LOGS):  # so that the next archived log is one too many
        label = {names.LOG_OF: f"old-{number}"}
        metadata = {"name": f"old-{number}-log", "labels": label, "annotations": {"edl-airflow/deleted-at": "1.0"}}
        await create(home, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    shared = tmp_path / "shared"
    shared.mkdir()
    used: set[Verb] = set()
    connect, runs = limited.connect, {"pool": run_pool, "trainer": run_trainer}
    for kind in get_args(JobKind):
        recorder = Recorder(connect, home)
        limited.connect = recorder.open
        await runs[kind](limited.backend(shared), shared)
        assert sorted(recorder.used - CREATIONS - OPTIONAL - set(needed_rights(kind))) == []
        used |= recorder.used
    granted = verbs_of(only("Role", manifests("role.yaml", home.namespace)))
    assert sorted(used) == sorted(granted - of_kueue(granted))


@pytest.mark.deep
async def test_capacity_is_that_of_the_quota_until_nodes_may_be_read(home: Cluster, limited: Cluster) -> None:
    """Without cluster-role.yaml only the quota is known; with it the nodes, too."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
    await create(home, {**quota, "spec": {"hard": {"requests.cpu": "10m"}}})
    recorder = Recorder(limited.connect, home)
    limited.connect = recorder.open
    backend = limited.backend()

    async def quota_counts() -> bool:
        try:
            return bool((await backend.capacity()).nodes)
        except BackendError:  # the quota has no status yet
            return False

    await eventually(quota_counts, "the quota in the capacity")
    alone = await backend.capacity()
    (whole,) = alone.nodes
    assert (alone.quota_total, alone.quota_left) == (whole.total, whole.free) == ({"cpu": 0.01}, {"cpu": 0.01})
    assert whole.name == alone.only_node == f"quota of {home.namespace}"

    objects = manifests("cluster-role.yaml", home.namespace)
    for one in objects:  # all namespaces share these names
        one["metadata"]["name"] += f"-{home.namespace}"
    only("ClusterRoleBinding", objects)["roleRef"]["name"] = only("ClusterRole", objects)["metadata"]["name"]

    async def nodes_count() -> bool:
        return not (await backend.capacity()).only_node

    async with created(home, *objects):
        await eventually(nodes_count, "the nodes in the capacity")
        both = await backend.capacity()
        async with backend.following() as watched:
            assert [node.name for node in (await watched.capacity()).nodes] == [node.name for node in both.nodes]
            await all_open(backend)
    assert both.quota_left == {"cpu": 0.01}
    for node in both.nodes:
        assert 0 < node.free["memory"] <= node.total["memory"] < 1 << 50
        assert 0 < node.free["pods"] < node.total["pods"]
    assert sorted(recorder.outside) == sorted(verbs_of(only("ClusterRole", objects)))
