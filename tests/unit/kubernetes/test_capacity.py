"""What is left of a namespace's quota and of the nodes."""

from __future__ import annotations

from typing import Any

import pytest

from edl_runtime.backends.base import Capacity
from edl_runtime.backends.kubernetes.capacity import UNLIMITED, amount, of_nodes, of_quotas, requested, tightest

GI = 1 << 30
GPU = "nvidia.com/gpu"


def quota(hard: dict[str, str] | None, used: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {"spec": spec, "status": {"hard": hard, "used": used}}


def node(name: str = "a", *, ready: str = "True", unschedulable: bool = False, **allocatable: str) -> dict[str, Any]:
    gpus = {GPU: allocatable.pop("gpus")} if "gpus" in allocatable else {}
    return {
        "metadata": {"name": name},
        "spec": {"unschedulable": True} if unschedulable else {},
        "status": {
            "allocatable": {**allocatable, **gpus},
            "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}],
        },
    }


def container(cpu: str = "", **more: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {"requests": {"cpu": cpu}} if cpu else {}, **more}


def pod(*containers: dict[str, Any], phase: str = "Running", on: str = "a", **spec: Any) -> dict[str, Any]:
    return {"spec": {"nodeName": on, "containers": list(containers), **spec}, "status": {"phase": phase}}


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


@pytest.mark.parametrize("quantity", ["", "Gi", "1gb", "1GiB", "one", None])
def test_what_is_no_quantity_is_an_error(quantity: Any) -> None:
    """Nothing is guessed."""
    with pytest.raises((ValueError, KeyError)):
        amount(quantity)


@pytest.mark.parametrize("name", ["cpu", "requests.cpu"])
def test_a_quota_leaves_what_is_not_used(name: str) -> None:
    """Under either of the names that it has for what pods ask for; of what it doesn't limit there is no end."""
    left = of_quotas([quota({name: "4", "pods": "9"}, {name: "1500m"})])
    assert left == Capacity(cpus=2.5, free_memory=UNLIMITED.free_memory, gpus=UNLIMITED.gpus)


def test_of_several_quotas_the_tightest_counts() -> None:
    """For each resource."""
    quotas = [
        quota({"requests.cpu": "4", "requests.memory": "8Gi"}, {"requests.memory": "1Gi"}),
        quota({"cpu": "2", "limits.memory": "4Gi", f"requests.{GPU}": "8"}, {"cpu": "1", f"requests.{GPU}": "5"}),
    ]
    assert of_quotas(quotas) == Capacity(cpus=1, free_memory=4 * GI, gpus=3)


def test_a_quota_that_is_exceeded_leaves_nothing() -> None:
    """It may have been made smaller than what was used."""
    assert of_quotas([quota({"cpu": "1"}, {"cpu": "3"})]) == Capacity(
        cpus=0, free_memory=UNLIMITED.free_memory, gpus=UNLIMITED.gpus
    )


@pytest.mark.parametrize(
    "quotas",
    [
        [],
        [{}],
        [{"status": None}],
        [quota(None)],
        [quota({"pods": "5", "limits.cpu": "1", "requests.storage": "1Gi", "count/jobs.batch": "3"})],
        [quota({"cpu": "0"}, scopes=["BestEffort"])],
        [quota({"cpu": "0"}, scopes=["Terminating"])],
        [quota({"cpu": "0"}, scopeSelector={"matchExpressions": [{"scopeName": "PriorityClass"}]})],
    ],
)
def test_without_a_quota_for_what_instances_ask_for_nothing_is_limited(quotas: list[dict[str, Any]]) -> None:
    """Nor by one that is for other pods."""
    assert of_quotas(quotas) is None


def test_a_quota_for_pods_that_run_on_counts() -> None:
    """That is what instances are."""
    left = of_quotas([quota({"cpu": "2"}, scopes=["NotTerminating", "NotBestEffort"])])
    assert left is not None
    assert left.cpus == 2


def test_nodes_have_what_pods_have_not_asked_for() -> None:
    """Only those that take pods count, and only pods that are on them and run, or are about to."""
    nodes = [
        node("a", cpu="4", memory="8Gi", gpus="2"),
        node("b", cpu="3500m", memory="1Gi"),
        node("cordoned", cpu="64", unschedulable=True),
        node("lost", cpu="64", ready="Unknown"),
        {"metadata": {"name": "new"}, "status": {}},
    ]
    pods = [
        pod(container("1"), container("500m")),
        pod(container("1"), on="b", phase="Pending"),
        pod(container("64"), on="cordoned"),
        pod(container("64"), on=""),
        pod(container("64"), phase="Succeeded"),
        pod(container("64"), phase="Failed"),
        pod({"resources": {"requests": {"memory": "2Gi", GPU: "1"}}}),
    ]
    assert of_nodes(nodes, pods) == Capacity(cpus=5, free_memory=7 * GI, gpus=1)
    assert of_nodes(nodes, [pod(container("99"))]).cpus == 0
    assert of_nodes([], []) == Capacity(cpus=0, free_memory=0, gpus=0)


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
    assert requested(pod(*containers, **more), "cpu") == reserved


def test_what_a_pod_leaves_out_is_nothing() -> None:
    """Missing or null."""
    for resources in ({}, None, {"requests": None}, {"limits": {"cpu": "1"}}):
        assert requested({"spec": {"containers": [{"resources": resources}], "initContainers": None}}, "cpu") == 0


def test_the_tightest_is_the_least_of_each() -> None:
    """One that is not known does not limit."""
    one, other = Capacity(cpus=1, free_memory=4, gpus=2), Capacity(cpus=2, free_memory=3, gpus=2)
    assert tightest(one, other) == Capacity(cpus=1, free_memory=3, gpus=2)
    assert (tightest(one, None), tightest(None, one), tightest(None, None)) == (one, one, None)
