"""How much a text of YAML may stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml

from edl_runtime.autoscale.traffic.schema import read_windows
from edl_runtime.compat.manifest_yaml import read_manifests
from edl_runtime.errors import SpecError
from edl_runtime.parsing import MAX_YAML_DEPTH, bounded_yaml_loader
from edl_runtime.pods import Pod

CHAIN = "\n".join(["- &a0 [x]", *(f"- &a{n} [*a{n - 1}]" for n in range(1, MAX_YAML_DEPTH))])
"""No value is written deep, and the last one is deep."""

TOO_DEEP = {
    "brackets": "a: " + "[" * 3000 + "]" * 3000,
    "keys": "\n".join(" " * n + "a:" for n in range(1500)),
    "aliases": CHAIN,
    "its own part": "a: &a [*a]",
}
DOORS = [lambda text: Pod(template=text), read_manifests, read_windows]


@pytest.mark.parametrize("read", DOORS, ids=["pod", "manifest", "windows"])
@pytest.mark.parametrize("text", TOO_DEEP.values(), ids=TOO_DEEP)
def test_what_is_nested_too_deep_is_refused(text: str, read: Callable[[str], object]) -> None:
    """Wherever a text comes in, and soon: the reader goes no deeper than it has to."""
    with pytest.raises(SpecError, match=f"more than {MAX_YAML_DEPTH} levels of values, aliases written out") as caught:
        read(text)
    assert "line " in str(caught.value)


@pytest.mark.parametrize("text", ["[" * MAX_YAML_DEPTH + "x" + "]" * MAX_YAML_DEPTH, CHAIN.rsplit("\n", 1)[0]])
def test_the_deepest_that_is_read(text: str) -> None:
    """One level less than too many, written out or not."""
    assert yaml.load(text, bounded_yaml_loader())


def test_levels_are_counted_anew_beside_each_other() -> None:
    """Many shallow values are no deep one, nor is one that an alias names many times."""
    text = "\n".join(["- &a [[x]]", *(["- [*a, [*a]]"] * 2 * MAX_YAML_DEPTH)])
    assert yaml.load(text, bounded_yaml_loader())[-1] == [[["x"]], [[["x"]]]]


@pytest.mark.parametrize("read", DOORS, ids=["pod", "manifest", "windows"])
def test_a_number_of_base_60_is_refused_with_a_message(read: Callable[[str], object]) -> None:
    """PyYAML makes a whole number of it that Python writes out for nobody."""
    with pytest.raises(SpecError) as caught:
        read("a: " + "1:" * 3000 + "1")
    assert len(str(caught.value)) < 1000
