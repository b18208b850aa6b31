"""The lists of the reference, which are made from the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import generated
import msgspec
import pytest
from support.paths import ROOT

from edl_runtime.cli import SUMMARIES
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings


def test_each_list_has_its_place_on_a_page() -> None:
    """A list that no page shows, and a marker without a list, are mistakes."""
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert sorted(generated.MARKER.findall(pages)) == sorted(generated.LISTS)


@pytest.mark.parametrize("make", generated.LISTS.values(), ids=generated.LISTS)
def test_a_list_describes_each_of_its_entries(make: Callable[[], str]) -> None:
    """Each row of a table has as many cells as its head, and says something beside the name."""
    tables = [part for part in make().split("\n\n") if part.startswith("| ")]
    for head, _, *rows in ([re.split(r" \| ", line) for line in part.split("\n")] for part in tables):
        assert [row for row in rows if len(row) != len(head) or not any(row[1:])] == []
    assert tables or make in (generated.events, generated.examples)


def test_all_settings_and_commands_are_listed() -> None:
    variables = generated.variables()
    assert [
        each.name for each in msgspec.structs.fields(RuntimeSettings) if f"`EDL_{each.name.upper()}`" not in variables
    ] == []
    commands = generated.commands()
    assert [name for name in SUMMARIES if f"## edl {name}\n" not in commands] == []
    assert "### edl checkpoints verify\n" in commands


def test_an_error_is_shown_with_the_names_of_what_it_fills_in() -> None:
    assert generated._text_of(SpecError) == "FIELD: got 'GIVEN', allowed is ALLOWED"
    assert "no healthy teacher of 'POOL' after WAITED_S s" in generated.errors()


def test_each_error_with_a_text_of_its_own_is_shown_with_it() -> None:
    """Also one that takes a time, a holder of a folder, or nothing."""
    found = [error for errors in generated._errors().values() for error in errors]
    own = [error for error in found if inspect.isfunction(error.__str__) and error not in generated.WITHOUT_TEXT]
    assert len(own) > 60
    assert [error.__name__ for error in own if not generated._text_of(error)] == []


def test_each_kind_of_key_is_written_out() -> None:
    """None is listed that the code does not make, and the key of a folder shows no digest of an example."""
    content, _, written = generated.redis_keys().partition("## How they are written")
    assert re.search(r":tasks:state`", written)
    assert not re.search(r"[0-9a-f]{32}", written)
    parts = {re.sub(r"[^a-z]", "", key) for key in re.findall(r"`edl:\{[^}]*\}:([^`]+)`", written)}
    named = [
        re.sub(r"^(?:group|checkpoint folder)|[^a-z]", "", row) for row in re.findall(r"(?m)^\| ([^|]+) \|", content)
    ]
    assert [name for name in named[2:] if not any(name[:6] in part for part in parts)] == []


def test_a_setting_without_a_meaning_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever adds one has to describe it, or the site is not built."""
    monkeypatch.setattr(RuntimeSettings, "__doc__", "- `redis_url` (EDL_REDIS_URL): a URL.")
    with pytest.raises(KeyError, match="redis_for_pods"):
        generated.variables()
