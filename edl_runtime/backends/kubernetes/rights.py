"""The rights that a job needs from its submission to its deletion. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from edl_runtime.specs import JobKind

Right = tuple[str, str, str]
"""An API group, a resource and a verb, as in ("batch", "jobs", "patch")."""


def needed_rights(kind: JobKind, *, keeps_log: bool = True) -> Iterator[Right]:
    """Yield what a job of this kind needs, but for its own creation, which is rehearsed.

    `keeps_log`: the end of its log is kept when it is deleted. Without the other rights of deploy/role.yaml jobs run
    all the same.
    """
    own, other = ("apps/deployments", "batch/jobs") if kind == "pool" else ("batch/jobs", "apps/deployments")
    yield from _rights(own, "get", "list", "watch", "patch", "delete")
    yield from _rights(other, "get", "list", "watch")  # a name is a job's of either kind
    yield from _rights("/pods", "list", "watch", "patch", *(("delete",) if kind == "pool" else ()))
    yield from _rights("/pods/log", "get")
    yield from _rights("/events", "list", "watch")
    yield from _rights("/secrets", "create", "patch")
    if keeps_log:
        yield from _rights("/configmaps", "get", "list", "create", "patch", "delete")
    if kind == "pool":
        yield from _rights("policy/poddisruptionbudgets", "create", "patch")


def missing_rights(needed: Iterable[Right], rules: Iterable[Mapping[str, Any]]) -> list[Right]:
    """Return those of the needed rights that none of an account's rules grants for objects of any name."""
    general = [rule for rule in rules if not rule.get("resourceNames")]
    return [right for right in needed if not any(_grants(rule, right) for rule in general)]


def _rights(what: str, *verbs: str) -> Iterator[Right]:
    group, _, resource = what.partition("/")
    return ((group, resource, verb) for verb in verbs)


def _grants(rule: Mapping[str, Any], right: Right) -> bool:
    fields = zip(("apiGroups", "resources", "verbs"), right, strict=True)
    return all({"*", one}.intersection(rule.get(field) or ()) for field, one in fields)
