"""On which nodes a job's instances may be."""

from __future__ import annotations

from typing import Any

import pytest

from edl_runtime.backends.interface import NodeCapacity, Scaling
from edl_runtime.backends.placement import may_run_on
from edl_runtime.specs import Bounds

GPU = {"key": "gpu", "value": "h200", "effect": "NoSchedule"}
DRAINED = {"key": "drained", "value": "", "effect": "NoExecute"}


def can(
    node_selector: dict[str, str] | None = None,
    tolerations: tuple[dict[str, Any], ...] = (),
    labels: dict[str, str] | None = None,
    taints: tuple[dict[str, str], ...] = (),
    node_terms: tuple[dict[str, Any], ...] | None = None,
) -> bool:
    scaling = Scaling(
        bounds=Bounds(1, 2),
        resources={"cpu": 1.0},
        node_selector=node_selector or {},
        tolerations=tolerations,
        node_terms=node_terms,
    )
    return may_run_on(scaling, NodeCapacity(name="n", total={}, free={}, labels=labels, taints=taints))


@pytest.mark.parametrize(
    ("selector", "labels", "may"),
    [
        ({}, {}, True),
        ({}, {"pool": "a"}, True),
        ({"pool": "a"}, {"pool": "a", "zone": "1"}, True),
        ({"pool": "a", "zone": "1"}, {"pool": "a", "zone": "1"}, True),
        ({"pool": "a", "zone": "1"}, {"pool": "a"}, False),
        ({"pool": "a"}, {"pool": "b"}, False),
        ({"pool": "a"}, {}, False),
        ({"pool": ""}, {}, False),
        ({"pool": ""}, {"pool": ""}, True),
        ({"pool": "a"}, None, True),
    ],
)
def test_a_node_has_all_labels_that_are_selected(
    selector: dict[str, str], labels: dict[str, str] | None, *, may: bool
) -> None:
    """Where a node has no labels at all, as a quota, nothing is known against it."""
    assert can(node_selector=selector, labels=labels) is may


def says(operator: str, *values: str, key: str = "gpu") -> dict[str, Any]:
    return {"key": key, "operator": operator, **({"values": list(values)} if values else {})}


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        (says("In", "a100", "h200"), True),
        (says("In", "a100"), False),
        (says("In", "a100", key="other"), False),
        (says("NotIn", "a100"), True),
        (says("NotIn", "h200"), False),
        (says("NotIn", "h200", key="other"), True),
        (says("Exists"), True),
        (says("Exists", key="other"), False),
        (says("DoesNotExist", key="other"), True),
        (says("DoesNotExist"), False),
        (says("Gt", "79", key="gib"), True),
        (says("Gt", "141", key="gib"), False),
        (says("Lt", "142", key="gib"), True),
        (says("Lt", "141", key="gib"), False),
        (says("Gt", "1", key="other"), False),
        (says("Lt", "1"), False),
        (says("Near", "h200"), False),
    ],
)
def test_an_affinity_asks_for_labels(expression: dict[str, Any], *, holds: bool) -> None:
    """Where a node has no labels at all, as a quota, nothing is known against it."""
    term = {"matchExpressions": [expression]}
    assert can(labels={"gpu": "h200", "gib": "141"}, node_terms=(term,)) is holds
    assert can(labels=None, node_terms=(term,))


def test_one_of_the_terms_has_to_hold_and_all_that_it_says() -> None:
    """One that says nothing is of no node, and so is an affinity without terms; what is selected has to be beside."""
    labels = {"gpu": "h200", "zone": "1"}
    here, there, by_name = (
        {"matchExpressions": [says("Exists"), says("In", "1", key="zone")]},
        {"matchExpressions": [says("Exists"), says("In", "2", key="zone")]},
        {"matchFields": [says("In", "n", key="metadata.name")]},
    )
    for terms, may in (((here,), True), ((there,), False), ((there, here), True), (({},), False), ((), False)):
        assert can(labels=labels, node_terms=terms) is may
    assert can(labels=labels, node_terms=(by_name,))
    assert not can(labels=labels, node_terms=({"matchFields": [says("In", "m", key="metadata.name")]},))
    assert not can(labels=labels, node_terms=({**by_name, **there},))
    assert not can({"zone": "2"}, labels=labels, node_terms=(here,))


@pytest.mark.parametrize(
    ("toleration", "may"),
    [
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "gpu", "operator": "Equal", "value": "h200"}, True),
        ({"key": "gpu", "operator": "Equal", "value": "a100"}, False),
        ({"key": "gpu", "value": "h200"}, True),
        ({"key": "gpu", "value": "h200", "effect": ""}, True),
        ({"key": "gpu", "operator": None, "value": "h200", "effect": None}, True),
        ({"key": "gpu", "value": "h200", "effect": "NoExecute"}, False),
        ({"key": "gpu", "value": "h200", "effect": "PreferNoSchedule"}, False),
        ({"key": "gpu"}, False),
        ({"key": "gpu", "operator": "Gt", "value": "h200"}, False),
        ({"operator": "Exists"}, True),
        ({"key": "", "operator": "Exists", "effect": ""}, True),
        ({"operator": "Exists", "effect": "NoSchedule"}, True),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_a_toleration_is_for_taints_of_its_key_value_and_effect(toleration: dict[str, Any], *, may: bool) -> None:
    """As far as it says any of them; only one that asks whether the taint exists leaves out its value."""
    assert can(tolerations=(toleration,), taints=(GPU,)) is may


def test_a_taint_without_a_value_is_equal_to_none() -> None:
    """Missing or empty."""
    for value in ({}, {"value": ""}, {"value": None}):
        assert can(tolerations=({"key": "drained", **value},), taints=(DRAINED,))
        assert can(tolerations=({"key": "drained", **value},), taints=({"key": "drained", "effect": "NoSchedule"},))


def test_all_taints_have_to_be_tolerated() -> None:
    """Each by any of the tolerations, and the labels have to be there beside."""
    gpu, drained = {"key": "gpu", "operator": "Exists"}, {"key": "drained", "operator": "Exists"}
    assert can()
    assert can(tolerations=(gpu,))
    assert not can(taints=(GPU,))
    assert not can(tolerations=(gpu,), taints=(GPU, DRAINED))
    assert can(tolerations=(drained, gpu), taints=(GPU, DRAINED))
    assert can(tolerations=({"operator": "Exists"},), taints=(GPU, DRAINED))
    assert not can({"pool": "a"}, ({"operator": "Exists"},), {"pool": "b"}, (GPU,))
