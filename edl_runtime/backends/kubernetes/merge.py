"""How a user's pod template and our own pod become one. Pure.

- Mappings are merged key by key.
- Lists of things that have a name (containers, variables, volumes, ports, secrets) are merged thing by thing, volume
  mounts by their path; the template's come after ours.
- Of other lists the template's entries follow ours; commands and arguments are one value.
- What only one says, holds. What both say must be the same: a template that says otherwise than the spec, or than what
  a backend needs to do its work, is an error that names the place.
- Defaults of ours are no statement: a template replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edl_runtime.errors import SpecError

_KEYS = {"volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort"}
_WHOLE = frozenset({"command", "args"})


def merge(ours: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Return both in one. Raises SpecError where they say different things."""
    merged: dict[str, Any] = _merged(ours, template, "pod.template")
    return merged


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` and what `defaults` say beside it, in mappings as deep as they go."""
    filled = {key: value for key, value in defaults.items() if key not in given}
    for key, value in given.items():
        default = defaults.get(key)
        both = isinstance(value, Mapping) and isinstance(default, Mapping)
        filled[key] = with_defaults(value, default) if both and default is not None else value
    return filled


def _merged(ours: Any, theirs: Any, path: str) -> Any:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return {
            key: _merged(ours[key], theirs[key], f"{path}.{key}")
            if key in ours and key in theirs
            else (ours if key in ours else theirs)[key]
            for key in [*ours, *(key for key in theirs if key not in ours)]
        }
    if isinstance(ours, list) and isinstance(theirs, list) and path.rpartition(".")[2] not in _WHOLE:
        return _joined(ours, theirs, path)
    if ours != theirs:
        raise SpecError(path, theirs, f"{ours!r}, or nothing: that is set already")
    return ours


def _joined(ours: list[Any], theirs: list[Any], path: str) -> list[Any]:
    key = _KEYS.get(path.rpartition(".")[2], "name")
    if not all(isinstance(entry, Mapping) and key in entry for entry in [*ours, *theirs]):
        return [*ours, *(entry for entry in theirs if entry not in ours)]
    named = {entry[key]: entry for entry in ours}
    for entry in theirs:
        name = entry[key]
        named[name] = _merged(named[name], entry, f"{path}[{name!r}]") if name in named else entry
    return list(named.values())
