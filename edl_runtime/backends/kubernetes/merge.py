"""How a user's pod template and our own pod become one. Pure.

- Mappings are merged key by key.
- Lists of things that have a name (containers, variables, volumes, ports, secrets) are merged thing by thing, volume
  mounts by their path, ports by number and protocol; the template's come after ours.
- A variable is a value or comes from somewhere, a volume has one source: saying the other is a contradiction, too.
- Of other lists the template's entries follow ours; commands and arguments are one value.
- What only one says, holds. What both say must be the same: a template that says otherwise than the spec, or than what
  a backend needs to do its work, is an error that names the place.
- Defaults are no statement: a template replaces ours, and a job's template what its connection says of all pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edl_runtime.errors import SpecError

_KEYS = {"volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort"}
_OF_ONE_KIND = frozenset({"env", "volumes"})
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
    part = path.rpartition(".")[2]
    key = _KEYS.get(part, "name")
    if not all(isinstance(entry, Mapping) and isinstance(entry.get(key), str | int) for entry in [*ours, *theirs]):
        return [*ours, *(entry for entry in theirs if entry not in ours)]
    named = {_identity(entry, key): entry for entry in ours}
    for entry in theirs:
        name = _identity(entry, key)
        if name not in named:
            named[name] = entry
            continue
        place = f"{path}[{entry[key]!r}]"
        if part in _OF_ONE_KIND:
            _check_kind(named[name], entry, place)
        named[name] = _merged(named[name], entry, place)
    return list(named.values())


def _identity(entry: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    return (entry[key], entry.get("protocol", "TCP")) if key == "containerPort" else (entry[key],)


def _check_kind(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> None:
    kinds = [sorted(entry.keys() - {"name"}) for entry in (ours, theirs)]
    if all(kinds) and kinds[0] != kinds[1]:
        raise SpecError(path, " and ".join(kinds[1]), f"{' and '.join(kinds[0])}, or nothing: that is set already")
