"""How a user's pod template and our own pod become one. Pure.

- Mappings are merged key by key.
- Lists of things that have a name (containers, variables, volumes, ports, secrets) are merged thing by thing, volume
  mounts by their path, ports by number and protocol; the template's come after ours.
- A variable is a value or comes from somewhere, a volume has one source: saying the other is a contradiction, too.
- Of other lists the template's entries follow ours; commands and arguments are one value.
- What only one says, holds. What both say must be the same: a template that says otherwise than the spec, or than what
  a backend needs to do its work, is an error that names the place.
- Defaults are no statement: a template replaces ours.

What a connection says of all pods is no error either: it gives way to what a job says, be that in fields or in a
template. `lay_over` does so for a connection's template, with things told apart as above. Of the pod, its containers,
labels and the like that is key by key, of resources each by its name. Of any other thing, as a variable, a mount or a
probe, both hold where they agree, and what the job says where they don't. Commands, arguments and affinities of one
sort are the job's alone, if it has any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edl_runtime.backends.kubernetes.templates import at, things
from edl_runtime.errors import SpecError

_ACCOUNTS = frozenset({"serviceAccount", "serviceAccountName"})
_KEYS = {"volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort"}
_OF_ONE_KIND = frozenset({"env", "volumes"})
_WHOLE = frozenset({"command", "args"})
_PLACEMENT = frozenset({"nodeAffinity", "podAffinity", "podAntiAffinity", "topologySpreadConstraints"})
_CONTAINERS = frozenset({"containers", "initContainers"})
_BY_KEY = _CONTAINERS | {
    *("template", "metadata", "spec", "labels", "annotations"),
    *("nodeSelector", "affinity", "securityContext"),
}


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


def lay_over(given: Mapping[str, Any], beneath: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template and what another says beside it: where they say different things, what is given holds.

    A volume beneath that nothing sees any more is not there.
    """
    laid: dict[str, Any] = _laid(given, beneath, "template")
    hidden = _seen(beneath) - _seen(laid) - _names(given)
    if not hidden & _names(laid):
        return laid
    volumes = [volume for volume in things(laid["spec"], "volumes") if str(volume.get("name")) not in hidden]
    return {**laid, "spec": {**laid["spec"], "volumes": volumes}}


def _seen(template: Mapping[str, Any]) -> set[str]:
    """Return the names of the volumes that containers see."""
    spec = at(template, "spec")
    containers = [container for part in sorted(_CONTAINERS) for container in things(spec, part)]
    return {
        str(seen.get("name"))
        for one in containers
        for part in ("volumeMounts", "volumeDevices")
        for seen in things(one, part)
    }


def _names(template: Mapping[str, Any]) -> set[str]:
    return {str(volume.get("name")) for volume in things(at(template, "spec"), "volumes")}


def _laid(given: Any, beneath: Any, part: str) -> Any:
    if part in _WHOLE | _PLACEMENT:
        return given
    if isinstance(given, Mapping) and isinstance(beneath, Mapping):
        if part == "resources":
            return _laid_resources(given, beneath)
        if part in _BY_KEY:
            hidden = given.keys() | (_ACCOUNTS if given.keys() & _ACCOUNTS else set())
            open_ = {key: value for key, value in beneath.items() if key not in hidden}
            both = {key: _laid(value, beneath[key], key) for key, value in given.items() if key in beneath}
            return {**open_, **given, **both}
    if isinstance(given, list) and isinstance(beneath, list):
        return _stacked(given, beneath, part)
    try:
        return _merged_thing(beneath, given, part, part)
    except SpecError:
        return given


def _laid_resources(given: Mapping[str, Any], beneath: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, of each resource what is given or else what is beneath: a request of one has no limit of another."""
    said = {name for amounts in given.values() if isinstance(amounts, Mapping) for name in amounts}
    left = {
        part: {name: much for name, much in amounts.items() if name not in said}
        if isinstance(amounts, Mapping)
        else amounts
        for part, amounts in beneath.items()
    }
    return with_defaults(given, {part: amounts for part, amounts in left.items() if amounts})


def _stacked(given: list[Any], beneath: list[Any], part: str) -> list[Any]:
    key = _key_of(part, [*beneath, *given])
    if key is None:
        return [*beneath, *(entry for entry in given if entry not in beneath)]
    others = {_identity(entry, key): entry for entry in beneath}
    laid = [
        _laid(entry, others.pop(name), part) if (name := _identity(entry, key)) in others else entry for entry in given
    ]
    return [*others.values(), *laid]


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


def _merged_thing(ours: Any, theirs: Any, path: str, part: str) -> Any:
    if part in _OF_ONE_KIND and isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        _check_kind(ours, theirs, path)
    return _merged(ours, theirs, path)


def _joined(ours: list[Any], theirs: list[Any], path: str) -> list[Any]:
    part = path.rpartition(".")[2]
    key = _key_of(part, [*ours, *theirs])
    if key is None:
        return [*ours, *(entry for entry in theirs if entry not in ours)]
    named = {_identity(entry, key): entry for entry in ours}
    for entry in theirs:
        name = _identity(entry, key)
        known = name in named
        named[name] = _merged_thing(named[name], entry, f"{path}[{entry[key]!r}]", part) if known else entry
    return list(named.values())


def _key_of(part: str, entries: list[Any]) -> str | None:
    """Return what the things of a list are told apart by, None if that isn't said of all of them."""
    key = _KEYS.get(part, "name")
    told = all(isinstance(entry, Mapping) and isinstance(entry.get(key), str | int) for entry in entries)
    return key if told else None


def _identity(entry: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    if key == "mountPath":
        return (str(entry[key]).rstrip("/"),)
    return (entry[key], entry.get("protocol", "TCP")) if key == "containerPort" else (entry[key],)


def _check_kind(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> None:
    kinds = [sorted(entry.keys() - {"name"}) for entry in (ours, theirs)]
    if all(kinds) and kinds[0] != kinds[1]:
        raise SpecError(path, " and ".join(kinds[1]), f"{' and '.join(kinds[0])}, or nothing: that is set already")
