"""What holds for any pod, any template and any defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edl_runtime.backends.kubernetes.pod_template import merge_templates, overlay, with_defaults
from edl_runtime.errors import SpecError

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
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)
ANY_MAPPINGS = st.dictionaries(NAMES, ANYTHING, max_size=4)


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


def outcome(ours: dict[str, Any], template: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Return both in one, or the place where they contradict each other."""
    try:
        return merge_templates(ours, template), ""
    except SpecError as error:
        return None, error.field


def ends_in(tree: Any, path: str) -> bool:
    """Whether a place that an error names is there: "spec.containers['a'].env['B'].value"."""
    places = [tree]
    for key, number, name in re.findall(r"\.?(\w+)|\[(\d+)\]|\['([^']*)'\]", path):
        if key:
            places = [place[key] for place in places if isinstance(place, Mapping) and key in place]
        else:
            entries = [entry for place in places if isinstance(place, list) for entry in place]
            wanted = int(number) if number else name
            places = [
                entry
                for entry in entries
                if wanted in (entry.get("name"), entry.get("mountPath"), entry.get("containerPort"))
            ]
    return bool(places)


@given(TEMPLATES)
def test_an_empty_template_changes_nothing(ours: dict[str, Any]) -> None:
    """Nor does one that repeats all that is stated; and to an empty pod a template is all there is."""
    assert merge_templates(ours, {}) == merge_templates({}, ours) == merge_templates(ours, ours) == ours


@given(ANY_MAPPINGS)
def test_any_data_may_be_empty_or_said_by_one_only(ours: dict[str, Any]) -> None:
    """Of whatever shape."""
    assert merge_templates(ours, {}) == merge_templates({}, ours) == ours


@given(TEMPLATES, TEMPLATES)
def test_what_either_says_is_in_the_result_or_a_conflict_has_a_place_in_both(
    ours: dict[str, Any], template: dict[str, Any]
) -> None:
    """Nothing is lost, nothing is made up, and an error names what is there."""
    both, conflict = outcome(ours, template)
    if both is None:
        assert conflict.startswith("pod.template.")
        assert ends_in({"pod": {"template": ours}}, conflict)
        assert ends_in({"pod": {"template": template}}, conflict)
        return
    stated, said = leaves(ours), leaves(template)
    empty = {leaf for leaf in stated | said if any(other[: len(leaf)] == leaf != other for other in stated | said)}
    assert leaves(both) == (stated | said) - empty


@given(TEMPLATES, TEMPLATES)
def test_a_template_merged_twice_says_no_more(ours: dict[str, Any], template: dict[str, Any]) -> None:
    """The same template again is a repetition."""
    both, _ = outcome(ours, template)
    if both is None:
        return
    assert merge_templates(both, template) == merge_templates(both, ours) == both


@given(TEMPLATES, TEMPLATES)
def test_a_template_lies_over_another_without_an_error(given_: dict[str, Any], beneath: dict[str, Any]) -> None:
    """It loses nothing; what is beneath changes nothing that agrees with it; twice is once."""
    laid = overlay(given_, beneath)
    assert leaves(given_) - leaves(laid) <= {leaf for leaf in leaves(given_) if covers(leaf, laid)}
    assert overlay(laid, beneath) == laid
    assert overlay(given_, {}) == overlay({}, given_) == overlay(given_, given_) == given_
    both, _ = outcome(given_, laid)
    assert both is not None
    assert leaves(both) == leaves(laid)


def covers(empty: tuple[object, ...], tree: dict[str, Any]) -> bool:
    """Whether something stands where there was an empty mapping or list."""
    return any(leaf[: len(empty)] == empty for leaf in leaves(tree))


@given(ANY_MAPPINGS, ANY_MAPPINGS)
def test_defaults_never_override(given_: dict[str, Any], defaults: dict[str, Any]) -> None:
    """All that is given stays; all keys of the defaults are there; filling twice is filling once."""
    filled = with_defaults(given_, defaults)
    assert kept(given_, filled)
    assert filled.keys() == given_.keys() | defaults.keys()
    assert with_defaults(filled, defaults) == filled
    assert with_defaults(given_, {}) == with_defaults({}, given_) == given_


def kept(given_: Any, filled: Any) -> bool:
    if isinstance(given_, Mapping):
        return isinstance(filled, Mapping) and all(key in filled and kept(given_[key], filled[key]) for key in given_)
    return bool(given_ == filled)
