"""The Lua scripts keep the house's rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import edl_runtime.store
from edl_runtime.store import keys

FOLDER = Path(edl_runtime.store.__file__).parent
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.lua"))


def head_and_body(name: str) -> tuple[str, str]:
    """Return a script's comment at the top, and the rest."""
    lines = (FOLDER / name).read_text().splitlines()
    body = next(number for number, line in enumerate(lines) if not line.startswith("--"))
    return "\n".join(lines[:body]), "\n".join(lines[body:])


def used_keys(name: str) -> set[str]:
    """Return the keys that a script touches by itself."""
    return set(re.findall(r"KEYS\[\d+\]", head_and_body(name)[1]))


def shared_by_family(name: str) -> str:
    """Return the name of the script that is put in front of this one."""
    family, one_of_many, _ = name.removeprefix("_").removesuffix(".lua").partition("_")
    return f"_{family}.lua" if one_of_many or name.startswith("_") else "_purge.lua"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_names_its_keys_at_its_head(name: str) -> None:
    """A reader learns each key's type and content before the first line that uses it."""
    shared = shared_by_family(name)
    used = used_keys(name) | (used_keys(shared) if shared in SCRIPTS else set())
    named = re.findall(r"(KEYS\[\d+\]) \w+ +(?:sorted |)\w+", head_and_body(name)[0])
    assert used == set(named)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_never_searches_the_keyspace(name: str) -> None:
    """KEYS and SCAN would read every key of everybody."""
    assert not re.search(r"redis\.call\('(KEYS|SCAN)'", (FOLDER / name).read_text(), re.IGNORECASE)


def test_the_keys_of_a_service_share_a_slot() -> None:
    """Redis Cluster runs a script only if all its keys have one hash tag."""
    service = keys.Service("team", "digits", "students")
    tags = {re.findall(r"\{(.*?)\}", key)[0] for key in keys.of_service(service)}
    assert tags == {"team/digits"}
