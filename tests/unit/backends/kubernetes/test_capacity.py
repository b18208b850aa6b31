"""What the nodes have, and what is left of a namespace's quota."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from edl_runtime.backends.interface import Capacity, InstanceStatus, NodeCapacity
from edl_runtime.backends.kubernetes.capacity import (
    KnownNode,
    closed_nodes,
    combine,
    leaving_pods,
    node_capacities,
    pod_usage,
    quota_capacity,
    read_known_node,
)
from edl_runtime.backends.kubernetes.kept_fields import read_pod
from edl_runtime.backends.kubernetes.pod_status import unix_time
from edl_runtime.pods import amount, requested_amount, reserved_resources

GI = 1 << 30
GPU = "nvidia.com/gpu"


def quota(hard: dict[str, str] | None, used: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {"spec": spec, "status": {"hard": hard, "used": used}}


def node(
    name: str = "a", *, ready: str = "True", since: str | None = None, unschedulable: bool = False, **allocatable: str
) -> dict[str, Any]:
    gpus = {GPU: allocatable.pop("gpus")} if "gpus" in allocatable else {}
    return {
        "metadata": {"name": name},
        "spec": {"unschedulable": True} if unschedulable else {},
        "status": {
            "allocatable": {**allocatable, **gpus},
            "conditions": [
                {"type": "MemoryPressure", "status": "False"},
                {"type": "Ready", "status": ready, "lastTransitionTime": since},
            ],
        },
    }


def kept(node: dict[str, Any]) -> KnownNode:
    """What is kept of a node that the API server sends."""
    return read_known_node(msgspec.json.encode(node))["node"]


def container(cpu: str = "", **more: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {"requests": {"cpu": cpu}} if cpu else {}, **more}


def pod(
    *containers: dict[str, Any], phase: str = "Running", on: str = "a", uid: str = "", job: str = "", **spec: Any
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"uid": uid, "name": uid, "labels": {"edl-airflow/job": job} if job else {}}
    for key, field in (("index", "annotations"), ("deleted", "deletionTimestamp")):
        if (given := spec.pop(key, None)) is not None:
            metadata[field] = {"batch.kubernetes.io/job-completion-index": str(given)} if key == "index" else given
    spec = {"nodeName": on, "containers": list(containers), **spec}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("quantity", "units"),
    [
        ("0", 0), (2, 2), (0.5, 0.5), ("500m", 0.5), ("1500u", 0.0015), ("100n", 1e-7), ("1k", 1000), ("8Ki", 8192),
        ("1.5Gi", 1.5 * GI), ("1G", 1e9), ("1T", 1e12), ("1P", 1e15), ("1E", 1e18), ("1Ei", 2.0**60), ("1Pi", 2.0**50),
        ("1e3", 1000), ("1E3", 1000), ("1e-3", 0.001), ("-1", -1), ("9223372036854775807", 2.0**63),
    ],
)  # fmt: skip
def test_quantities_are_read_as_kubernetes_writes_them(quantity: Any, units: float) -> None:
    """With decimal and binary suffixes, and with exponents."""
    assert amount(quantity) == pytest.approx(units)


def test_nodes_have_what_pods_have_not_asked_for() -> None:
    """Only pods count that are on them, have not ended and stay."""
    nodes = [
        node("b", cpu="3500m", memory="1Gi", pods="110"),
        node("a", cpu="4", memory="8Gi", gpus="2", pods="3", **{"rdma/hca": "4"}),
        {"metadata": {"name": "new"}, "status": {}},
    ]
    pods = [
        pod(container("1"), container("500m")),
        pod(container("1"), on="b", phase="Pending"),
        pod(container("64"), on="elsewhere"),
        pod(container("64"), on=""),
        pod(container("64"), phase="Succeeded"),
        pod(container("64"), phase="Failed"),
        pod(container("2"), uid="leaves"),
        pod(container("2"), uid="deleted", deleted="2026-11-22T09:08:44Z"),
        pod({"resources": {"requests": {"memory": "2Gi", GPU: "1", "rdma/hca": "1"}}}),
    ]
    assert node_capacities(map(kept, nodes), map(pod_usage, pods), {"leaves"}) == (
        NodeCapacity(
            name="a",
            total={"cpu": 4, "memory": 8 * GI, "gpu": 2, "pods": 3, "rdma/hca": 4},
            free={"cpu": 2.5, "memory": 6 * GI, "gpu": 1, "pods": 1, "rdma/hca": 3},
            labels={},
        ),
        NodeCapacity(
            name="b",
            total={"cpu": 3.5, "memory": GI, "pods": 110},
            free={"cpu": 2.5, "memory": GI, "pods": 109},
            labels={},
        ),
        NodeCapacity(name="new", total={}, free={}, labels={}),
    )
    (a, *_) = node_capacities(map(kept, nodes), [pod_usage(pod(container("99")))], set())
    assert a.free["cpu"] == 0
    assert node_capacities([], [], set()) == ()


def test_a_closed_node_has_what_is_there() -> None:
    """Who is there keeps its place, and nobody gets one: not even that of who leaves."""
    pods = [
        pod(container("1500m")),
        pod({"resources": {"requests": {"memory": "1Gi", "rdma/hca": "1"}}}, phase="Pending"),
        pod(container("2"), uid="leaves"),
        pod(container("4"), phase="Succeeded"),
        pod(container("8"), on="b"),
    ]
    (there,) = node_capacities(
        [kept(node(cpu="64", memory="8Gi", gpus="8", pods="110"))], map(pod_usage, pods), {"leaves"}, {"a"}
    )
    assert there.total == {"cpu": 1.5, "memory": GI, "gpu": 0, "pods": 2}
    assert there.free == dict.fromkeys(there.total, 0)
    assert there.closed_total == {"cpu": 64, "memory": 8 * GI, "gpu": 8, "pods": 110}
    assert node_capacities([kept(node(cpu="64"))], [], set(), {"a"})[0].total == {"cpu": 0}


def waits(key: str, seconds: int | None) -> dict[str, Any]:
    """Return a toleration of a node that is not ready, for ever without seconds."""
    until = {} if seconds is None else {"tolerationSeconds": seconds}
    return {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", **until}


@pytest.mark.parametrize(
    ("tolerations", "after_s"),
    [
        ([], 300),
        ([[waits("not-ready", 300), waits("unreachable", 300)]], 300),
        ([[waits("not-ready", 20), waits("unreachable", 20)]], 20),
        ([[waits("not-ready", 20), waits("unreachable", 20)], [waits("unreachable", 900)]], 900),
        ([[waits("unreachable", None), {"key": "", "operator": "Exists"}]], 300),
    ],
)
def test_a_node_away_is_closed_when_kubernetes_evicts_the_pods_there(tolerations: list[Any], after_s: float) -> None:
    """Its kubelet may only be restarted, so until then it keeps all that it has. A cordoned one is closed at once."""
    pods = [read_pod(msgspec.json.encode(pod(container("1"), tolerations=each))) for each in tolerations]
    (away,) = [kept(node(ready="Unknown", since="2026-11-28T09:00:00Z", cpu="4"))]
    since = unix_time("2026-11-28T09:00:00Z")
    assert closed_nodes([away], pods, since + after_s - 1) == set()
    assert closed_nodes([away], pods, since + after_s) == {"a"}
    assert closed_nodes([kept(node(unschedulable=True)), kept(node("b"))], pods, since) == {"a"}


@pytest.mark.parametrize("ready", ["Unknown", "False"])
def test_a_node_that_is_not_ready_takes_no_pods(ready: str) -> None:
    """Also where Kubernetes has not put its taint on it yet."""
    (there,) = node_capacities([kept(node(ready=ready, cpu="4"))], [], set())
    assert there.taints == ({"key": "node.kubernetes.io/not-ready", "value": "", "effect": "NoSchedule"},)


def test_a_node_says_who_may_be_there() -> None:
    """By its labels, and by those taints that keep pods away."""
    labels = {"node-role.kubernetes.io/control-plane": "", "zone": "a"}
    taints = [
        {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"},
        {"key": "old", "value": "yes", "effect": "PreferNoSchedule"},
        {"key": "drained", "value": "now", "effect": "NoExecute", "timeAdded": "2026-11-22T09:08:44Z"},
    ]
    metadata = {"name": "a", "labels": labels}
    (there,) = node_capacities([kept({**node(cpu="4"), "metadata": metadata, "spec": {"taints": taints}})], [], set())
    assert there.labels == labels
    assert there.taints == (
        {"key": "node-role.kubernetes.io/control-plane", "value": "", "effect": "NoSchedule"},
        {"key": "drained", "value": "now", "effect": "NoExecute"},
    )


def owner(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name}, "spec": spec}


def test_who_is_about_to_leave_counts_as_gone() -> None:
    """What is deleted, whosever it is; of our jobs what is beyond the number that was asked for last, or all."""
    pods = [
        pod(uid="foreign"),
        pod(uid="foreign-deleted", deleted="2026-11-22T09:08:44Z"),
        pod(uid="kept", job="shrunk", index=0),
        pod(uid="beyond", job="shrunk", index=1),
        pod(uid="suspended", job="suspended", index=0),
        pod(uid="deleted", job="suspended", index=1, deleted="2026-11-22T09:08:44Z"),
        *(pod(uid=name, job="pool") | {"kind": "Pod"} for name in ("first", "second", "third")),
        pod(uid="empty", job="none"),
        pod(uid="of-deleted", job="going", index=0),
    ]
    deleted = owner("Job", "going", completions=1)
    deleted["metadata"]["deletionTimestamp"] = "2026-11-22T09:08:44Z"
    owners = [
        owner("Job", "shrunk", completions=1),
        owner("Job", "suspended", completions=2, suspend=True),
        owner("Deployment", "pool", replicas=1),
        owner("Deployment", "none", replicas=0),
        deleted,
    ]
    gone = leaving_pods(pods, owners)
    assert gone == {"foreign-deleted", "beyond", "suspended", "deleted", "second", "third", "empty", "of-deleted"}
    assert leaving_pods(pods, []) == {"foreign-deleted", "deleted"}


@pytest.mark.parametrize(
    ("quotas", "total", "left"),
    [
        ([quota({"cpu": "4", "pods": "9"}, {"cpu": "1500m"})], {"cpu": 4, "pods": 9}, {"cpu": 2.5, "pods": 9}),
        ([quota({"requests.cpu": "4"}, {"requests.cpu": "1500m"})], {"cpu": 4}, {"cpu": 2.5}),
        ([quota({"cpu": "1"}, {"cpu": "3"})], {"cpu": 1}, {"cpu": 0}),  # it was made smaller than what was used
        ([quota({"cpu": "2"}, scopes=["NotTerminating", "NotBestEffort"])], {"cpu": 2}, {"cpu": 2}),
        ([], {}, {}),
        ([{}], {}, {}),
        ([{"status": None}], {}, {}),
        ([quota(None)], {}, {}),
        ([quota({"limits.cpu": "1", "requests.storage": "1Gi", "count/jobs.batch": "3", "services": "1"})], {}, {}),
        ([quota({"cpu": "0"}, scopes=["BestEffort"])], {}, {}),
        ([quota({"cpu": "0"}, scopes=["Terminating"])], {}, {}),
        ([quota({"cpu": "0"}, scopeSelector={"matchExpressions": [{"scopeName": "PriorityClass"}]})], {}, {}),
    ],
)
def test_a_quota_leaves_what_is_not_used(quotas: list[Any], total: dict[str, float], left: dict[str, float]) -> None:
    """Of what it limits, by either name for what pods ask for, if it is one for pods that run on, as instances do."""
    assert quota_capacity(quotas, [], set()) == (total, left)


def test_of_several_quotas_the_tightest_counts() -> None:
    """For each resource."""
    quotas = [
        quota({"requests.cpu": "4", "requests.memory": "8Gi"}, {"requests.memory": "1Gi"}),
        quota({"cpu": "2", "limits.memory": "4Gi", f"requests.{GPU}": "8"}, {"cpu": "1", f"requests.{GPU}": "5"}),
        quota({"requests.rdma/hca": "2", "count/pods": "1"}),
    ]
    assert quota_capacity(quotas, [], set()) == (
        {"cpu": 2, "memory": 4 * GI, "gpu": 8, "rdma/hca": 2, "pods": 1},
        {"cpu": 1, "memory": 4 * GI, "gpu": 3, "rdma/hca": 2, "pods": 1},
    )


def test_what_leaves_or_has_no_place_yet_is_given_back_to_a_quota() -> None:
    """It counts these as used; what has ended it does not, and there is never more left than it has."""
    pods = [
        pod(container("1"), uid="stays"),
        pod(container("1"), uid="leaves"),
        pod(container("500m"), uid="waits", on="", phase="Pending"),
        pod(container("8"), uid="ended", on="", phase="Failed"),
    ]
    used = {"cpu": "2500m", "pods": "3"}
    assert quota_capacity([quota({"cpu": "4", "pods": "3"}, used)], pods, {"leaves"})[1] == {"cpu": 3, "pods": 2}
    assert quota_capacity([quota({"cpu": "1"}, {"cpu": "500m"})], pods, {"leaves"})[1] == {"cpu": 1}


def placed(node: str, *, leaving: bool = False) -> InstanceStatus:
    return InstanceStatus(index=0, phase="running", started_at=1.0, node=node, leaving=leaving)


def test_where_no_nodes_may_be_seen_the_quota_is_the_only_one() -> None:
    """All that have a place are there then; else a node's name is its own, and nothing is known without either."""
    by_quota = combine(None, {"cpu": 4}, {"cpu": 1}, "ml")
    whole = NodeCapacity(name="quota of ml", total={"cpu": 4}, free={"cpu": 1})
    assert by_quota == Capacity(nodes=(whole,), quota_total={"cpu": 4}, quota_left={"cpu": 1}, only_node="quota of ml")
    assert (by_quota.place_of(placed("n1")), by_quota.place_of(placed(""))) == ("quota of ml", "")

    nodes = (NodeCapacity(name="n1", total={"cpu": 8}, free={"cpu": 3}),)
    both = combine(nodes, {"cpu": 4}, {"cpu": 1}, "ml")
    assert both == Capacity(nodes=nodes, quota_total={"cpu": 4}, quota_left={"cpu": 1})
    assert (both.place_of(placed("n1")), both.place_of(placed(""))) == ("n1", "")
    assert [each.place_of(placed("n1", leaving=True)) for each in (by_quota, both)] == ["", ""]
    assert combine((), {}, {}, "ml") == Capacity(nodes=())
    assert combine(None, {}, {}, "ml") is None


SIDECAR = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("init", "containers", "overhead", "reserved"),
    [
        ([], [container("1"), container("2"), container()], "", 3),
        ([container("5"), container("4")], [container("1"), container("2")], "", 5),
        ([container("2")], [container("1"), container("2")], "", 3),
        ([container("1", **SIDECAR)], [container("2")], "", 3),
        ([container("1", **SIDECAR), container("5")], [container("2")], "", 6),
        ([container("5"), container("1", **SIDECAR)], [container("2")], "", 5),
        ([container("1", **SIDECAR), container("1", **SIDECAR)], [container("1")], "", 3),
        ([], [container("1")], "250m", 1.25),
    ],
)
def test_a_pod_reserves_the_most_that_it_needs_at_once(
    init: list[Any], containers: list[Any], overhead: str, reserved: float
) -> None:
    """Init containers run one after the other, but those that stay count beside all that follow."""
    more = {"initContainers": init, "overhead": {"cpu": overhead} if overhead else None}
    assert requested_amount(pod(*containers, **more), "cpu") == reserved


def test_what_a_pod_leaves_out_is_nothing() -> None:
    """Missing or null."""
    for resources in ({}, None, {"requests": None}, {"limits": {"memory": "1"}}):
        assert (
            requested_amount({"spec": {"containers": [{"resources": resources}], "initContainers": None}}, "cpu") == 0
        )


def test_a_pod_takes_what_it_asks_for_and_a_place() -> None:
    """Of each resource by the name that a spec has for it. Where only a limit is said, that is what it asks for."""
    of_both = {"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi", GPU: "2"}}}
    pod_usage = pod(
        of_both, {"resources": {"requests": {"rdma/hca": "1", "ephemeral-storage": "0"}}}, overhead={"cpu": 1}
    )
    assert reserved_resources(pod_usage) == {"cpu": 2, "memory": GI, "gpu": 2, "rdma/hca": 1, "pods": 1}
    assert reserved_resources({"spec": {"containers": [container()]}}) == reserved_resources({}) == {"pods": 1}
