"""Converts a manifest's volumes and mounts into `Volume`s and a pod template. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from edl_runtime.errors import SpecError
from edl_runtime.pods import Volume

INSTANCE = "instance"
"""The instance's container in a pod template; see `Pod.template`."""

_PLAIN = frozenset({"name", "mountPath", "readOnly"})
_MOUNT = _PLAIN | {"subPath", "subPathExpr", "mountPropagation", "recursiveReadOnly"}

_At = tuple[str, Any]
"""A field's path, and its value."""


def read_volumes(volumes: _At, mounts: _At, notes: list[str]) -> tuple[list[Volume], dict[str, Any]]:
    """Return the volumes that a `Volume` can express (mounted once, and whole), and a pod template's spec for others.

    Volumes without a mount are left out, with a note.
    """
    sources = _by_name(*volumes)
    mounted = _mounts(*mounts, sources)
    times = Counter(mount["name"] for _, mount in mounted)
    notes += [f"{volumes[0]} has {name!r}, which has no mount and is left out" for name in sources - times.keys()]
    simple: list[Volume] = []
    others: dict[str, str] = {}
    template_mounts: list[dict[str, Any]] = []
    for path, mount in mounted:
        name = mount["name"]
        if times[name] == 1 and mount.keys() <= _PLAIN:
            simple.append(_volume(path, mount, sources[name]))
        else:
            others.setdefault(name, f"manifest-{len(others)}")
            template_mounts.append({**mount, "name": others[name]})
    if not others:
        return simple, {}
    return simple, {
        "volumes": [{"name": known, **sources[name]} for name, known in others.items()],
        "containers": [{"name": INSTANCE, "volumeMounts": template_mounts}],
    }


def _by_name(path: str, given: object) -> dict[str, dict[str, Any]]:
    """Return the sources by volume name."""
    sources: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(_list(path, given)):
        at = f"{path}[{number}]"
        source = dict(_entry(at, entry, "a volume, as in {name: data, persistentVolumeClaim: {claimName: digits}}"))
        name = _name(at, source.pop("name", None))
        if name in sources:
            raise SpecError(f"{at}.name", name, "a unique name for each volume")
        if len(source) > 1 or not all(isinstance(value, dict) for value in source.values()):
            raise SpecError(at, source, "one source, as in persistentVolumeClaim: {claimName: digits}")
        sources[name] = source or {"emptyDir": {}}
    return sources


def _mounts(path: str, given: object, sources: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return each mount's path in the manifest, and the mount."""
    mounts: list[tuple[str, dict[str, Any]]] = []
    seen: set[str] = set()
    for number, entry in enumerate(_list(path, given)):
        at = f"{path}[{number}]"
        mount = _entry(at, entry, "a mount, as in {name: data, mountPath: /data}")
        if unknown := next((name for name in mount if name not in _MOUNT), None):
            raise SpecError(f"{at}.{unknown}", mount[unknown], f"one of the fields {', '.join(sorted(_MOUNT))}")
        if _name(at, mount.get("name")) not in sources:
            raise SpecError(f"{at}.name", mount["name"], f"a volume's: {', '.join(sources) or 'there are none'}")
        where, read_only = mount.get("mountPath"), mount.get("readOnly", False)
        if not isinstance(where, str) or not where.startswith("/") or where in seen:
            raise SpecError(f"{at}.mountPath", where, "an absolute path, unique for each mount")
        if not isinstance(read_only, bool):
            raise SpecError(f"{at}.readOnly", read_only, "true or false")
        seen.add(where)
        mounts.append((at, mount))
    return mounts


def _volume(path: str, mount: dict[str, Any], source: dict[str, Any]) -> Volume:
    where, read_only = mount["mountPath"], mount.get("readOnly", False)
    claim = source.get("persistentVolumeClaim", {})
    try:
        if claim and claim.keys() <= {"claimName", "readOnly"}:
            read_only = read_only or claim.get("readOnly") is True
            return Volume(path=where, claim=claim.get("claimName", ""), read_only=read_only)
        return Volume(path=where, source=source, read_only=read_only)
    except SpecError as error:
        raise SpecError(f"{path}.name", error.given, error.allowed) from None
    except TypeError:
        raise SpecError(f"{path}.name", claim, "a claim by its name: {claimName: digits}") from None


def _list(path: str, given: object) -> list[Any]:
    if not isinstance(given, list):
        raise SpecError(path, given, "a list")
    return given


def _entry(path: str, entry: object, allowed: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise SpecError(path, entry, allowed)
    return {name: value for name, value in entry.items() if value is not None}


def _name(path: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise SpecError(f"{path}.name", name, "a name")
    return name
