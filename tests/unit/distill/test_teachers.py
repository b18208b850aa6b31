"""Naming teachers."""

from __future__ import annotations

import msgspec
import pytest
from support.teachers.fakes import SIGNATURE

from edl_runtime.distill.feeds import Plan
from edl_runtime.distill.teachers import Discovered, Fixed, teachers_from
from edl_runtime.errors import SpecError
from edl_runtime.protocol.oip import Normalise, TopK
from edl_runtime.settings import RuntimeSettings


def test_fixed_teachers_are_read_from_text() -> None:
    """Blanks and repeats don't count."""
    assert Fixed.parse("a:1, b:2,,a:1") == Fixed(("a:1", "b:2"))


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:b", "a:0", "a:65536", "http://a:1", "a:1,https://b:2"])
def test_what_is_no_address_is_refused(text: str) -> None:
    """The error names what was given; a URL would look like a host that is not there, which students wait for."""
    with pytest.raises(SpecError, match=r"teachers\.addresses: got .*allowed is .*host:port"):
        Fixed.parse(text)


@pytest.mark.parametrize(("pool", "at_most"), [("", None), ("Pool", None), ("pool", 0), ("pool", True)])
def test_a_wrong_wish_is_refused(pool: str, at_most: int | None) -> None:
    """A pool has a name, and at least one teacher is wanted."""
    with pytest.raises(SpecError, match=r"teachers\."):
        Discovered(pool, at_most)


def test_fixed_teachers_win_over_a_pool() -> None:
    """EDL_TEACHERS, then EDL_POOL; with neither the error says both."""
    assert teachers_from(RuntimeSettings(teachers="a:1", pool="p")) == Fixed(("a:1",))
    assert teachers_from(RuntimeSettings(pool="p")) == Discovered("p")
    with pytest.raises(SpecError, match="EDL_TEACHERS or EDL_POOL"):
        teachers_from(RuntimeSettings())


@pytest.mark.parametrize(
    ("outputs", "normalise", "text"),
    [
        ([TopK("double", 2)], {}, r"outputs: got TopK\(name='double', k=2\).*model 'teacher'.* have no top_k"),
        (["double"], {"x": Normalise(1, 1)}, "normalise: got 'x'.*model 'teacher'.* have no normalise"),
    ],
)
def test_a_wish_that_teachers_cant_do_is_named(
    outputs: list[str | TopK], normalise: dict[str, Normalise], text: str
) -> None:
    """With the model that lacks it."""
    signature = msgspec.structs.replace(SIGNATURE, name="teacher", extensions=())
    with pytest.raises(SpecError, match=text):
        Plan.of(["x"], outputs, normalise, signature)
