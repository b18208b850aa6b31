"""What holds for any two pod templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edl_runtime.backends.kubernetes.pod_template import overlay

SCALARS = st.sampled_from(["x", "y", 0, 1, True, ""])
NAMES = st.sampled_from(["instance", "sidecar", "a", "b"])
PATHS = st.sampled_from(["/tmp", "/data"])


def named(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Lists of things with a name, each name once."""
    things = st.fixed_dictionaries({"name": NAMES}, optional=parts)
    return st.lists(things, max_size=3, unique_by=lambda thing: str(thing["name"]))


MOUNTS = st.lists(
    st.fixed_dictionaries({"mountPath": PATHS, "name": NAMES}),
    max_size=2,
    unique_by=lambda mount: str(mount["mountPath"]),
)
PORTS = st.lists(
    st.fixed_dictionaries(
        {"containerPort": st.sampled_from([80, 90])}, optional={"protocol": st.just("UDP"), "name": NAMES}
    ),
    max_size=3,
    unique_by=lambda port: (port["containerPort"], port.get("protocol")),
)
ENV = named(value=SCALARS) | named(valueFrom=st.dictionaries(NAMES, SCALARS, max_size=2))
WORDS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=3, unique=True)
CONTAINERS = named(image=SCALARS, command=WORDS, args=WORDS, env=ENV, volumeMounts=MOUNTS, ports=PORTS)
TOLERATIONS = st.lists(st.dictionaries(NAMES, SCALARS, max_size=2), max_size=2, unique_by=str)
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "containers": CONTAINERS,
        "initContainers": CONTAINERS,
        "volumes": named(emptyDir=st.just({}), claim=SCALARS),
        "tolerations": TOLERATIONS,
        "restartPolicy": SCALARS,
        "securityContext": st.dictionaries(NAMES, SCALARS, max_size=3),
    },
)
LABELS = st.dictionaries(NAMES, SCALARS, max_size=3)
TEMPLATES = st.fixed_dictionaries(
    {}, optional={"metadata": st.fixed_dictionaries({}, optional={"labels": LABELS}), "spec": SPECS}
)


def leaves(value: Any, path: tuple[object, ...] = ()) -> set[tuple[object, ...]]:
    """Return where all ends of a tree are, things in lists by what tells them apart."""
    if isinstance(value, Mapping) and value:
        return {leaf for key, each in value.items() for leaf in leaves(each, (*path, key))}
    if isinstance(value, list) and value and path[-1] not in ("command", "args"):
        return {leaf for each in value for leaf in leaves(each, (*path, identity(path[-1], each)))}
    return {path}


def identity(part: object, thing: Any) -> object:
    if not isinstance(thing, Mapping):
        return str(thing)
    if part == "tolerations":
        return str(thing)
    if "containerPort" in thing:
        return (thing["containerPort"], thing.get("protocol", "TCP"))
    return thing.get("mountPath") or thing.get("name") or str(thing)


@given(TEMPLATES, TEMPLATES)
def test_a_template_lies_over_another(given_: dict[str, Any], beneath: dict[str, Any]) -> None:
    """It loses nothing; twice is once."""
    laid = overlay(given_, beneath)
    assert leaves(given_) - leaves(laid) <= {leaf for leaf in leaves(given_) if covers(leaf, laid)}
    assert overlay(laid, beneath) == laid
    assert overlay(given_, {}) == overlay({}, given_) == overlay(given_, given_) == given_


def covers(empty: tuple[object, ...], tree: dict[str, Any]) -> bool:
    """Whether something stands where there was an empty mapping or list."""
    return any(leaf[: len(empty)] == empty for leaf in leaves(tree))
