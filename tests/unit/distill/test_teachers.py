"""Naming teachers."""

from __future__ import annotations

import pytest

from edl_runtime.distill.teachers import Discovered, Fixed, teachers_from
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings


def test_fixed_teachers_are_read_from_text() -> None:
    """Blanks and repeats don't count."""
    assert Fixed.parse("a:1, b:2,,a:1") == Fixed(("a:1", "b:2"))


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:b", "a:0", "a:65536"])
def test_what_is_no_address_is_refused(text: str) -> None:
    """The error names what was given."""
    with pytest.raises(SpecError, match=r"teachers\.addresses"):
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
