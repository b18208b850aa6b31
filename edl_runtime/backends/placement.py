"""Which nodes a job's instances may run on, by Kubernetes' rules. Pure.

https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from edl_runtime.backends.interface import NodeCapacity, Scaling

_NAME = "metadata.name"
"""The only field that `matchFields` may name."""


def may_run_on(scaling: Scaling, node: NodeCapacity) -> bool:
    """Whether new instances of a job may run on a node, whatever is free there.

    Checks node selector, required node affinity and taints; not preferences, nor affinity between pods. Labels that are
    None match anything.
    """
    return _is_selected(scaling, node) and tolerates(scaling.tolerations, node.taints)


def tolerates(tolerations: Collection[Mapping[str, Any]], taints: Iterable[Mapping[str, str]]) -> bool:
    """Whether each of the taints, which keep pods away, matches one of the tolerations."""
    return all(any(_tolerates(each, taint) for each in tolerations) for taint in taints)


def _is_selected(scaling: Scaling, node: NodeCapacity) -> bool:
    labels = node.labels
    if labels is None:
        return True
    is_selected = all(labels.get(name) == value for name, value in scaling.node_selector.items())
    terms = scaling.node_terms
    return is_selected and (terms is None or any(_holds(term, node.name, labels) for term in terms))


def _holds(term: Mapping[str, Any], name: str, labels: Mapping[str, str]) -> bool:
    """Whether a node matches a node selector term; an empty term matches none."""
    of_labels, of_fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    return bool(of_labels or of_fields) and (
        all(_fits(each, labels) for each in of_labels) and all(_fits(each, {_NAME: name}) for each in of_fields)
    )


def _fits(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    found, values = labels.get(expression["key"]), expression.get("values") or ()
    fits = _OPERATORS.get(expression["operator"])
    return fits is not None and fits(found, values)


def _compared(found: str | None, values: Sequence[str]) -> int:
    """Return the difference between a label and the value; 0 if either is no whole number."""
    try:
        return int(found or "") - int(values[0])
    except (ValueError, IndexError):
        return 0


_OPERATORS: Mapping[str, Callable[[str | None, Sequence[str]], bool]] = {
    "In": lambda found, values: found in values,
    "NotIn": lambda found, values: found not in values,
    "Exists": lambda found, _: found is not None,
    "DoesNotExist": lambda found, _: found is None,
    "Gt": lambda found, values: _compared(found, values) > 0,
    "Lt": lambda found, values: _compared(found, values) < 0,
}


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, str]) -> bool:
    """Whether a toleration matches a taint. Without a key, or an effect, it matches any."""
    if any(toleration.get(part) not in (None, "", taint.get(part)) for part in ("key", "effect")):
        return False
    operator = toleration.get("operator") or "Equal"
    is_equal = (toleration.get("value") or "") == taint.get("value", "")
    return operator == "Exists" or (operator == "Equal" and is_equal)
