"""What stands in a pod template, of which all else may be odd: the cluster judges that. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edl_runtime.backends.kubernetes import names


def at(thing: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return the mapping that is there, empty for anything else."""
    for part in path:
        found = thing.get(part)
        thing = found if isinstance(found, Mapping) else {}
    return thing


def things(thing: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    """Return the mappings of the list that is there, none for anything else."""
    found = thing.get(part)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def instance_of(template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the instance's container, empty if there is none."""
    containers = things(at(template, "spec"), "containers")
    return next((one for one in containers if one.get("name") == names.CONTAINER), {})
