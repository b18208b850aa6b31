"""docs/concepts/architecture.md names files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.paths import ROOT

PAGE = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
STEPS = sorted(set(re.findall(r"`([\w/]+\.py): ([\w.]+)`", PAGE)))
ROWS = re.findall(r"^\| (`edl_\w+/.*?) \|(.*)\|$", PAGE, re.MULTILINE)


def functions_of(path: Path) -> set[str]:
    """Return the functions and methods in a file, as `name` and `Class.name`."""
    body = ast.parse(path.read_text()).body
    scopes = [("", body), *((f"{each.name}.", each.body) for each in body if isinstance(each, ast.ClassDef))]
    return {
        f"{prefix}{each.name}"
        for prefix, inside in scopes
        for each in inside
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize(("file", "function"), STEPS)
def test_every_step_of_a_walk_is_there(file: str, function: str) -> None:
    """A step names a file and a function in it."""
    assert function in functions_of(ROOT / file)


@pytest.mark.parametrize(("folders", "named"), ROWS)
def test_every_file_of_the_folder_table_is_there(folders: str, named: str) -> None:
    """A row names folders that exist, and files and folders below the first of them or beside it."""
    first, *others = (ROOT / name for name in re.findall(r"`([\w/]+)/`", folders))
    places = [first, *(first.parent / other.relative_to(ROOT) for other in others)]
    assert [place for place in places if not place.is_dir()] == []
    wanted = re.findall(r"`([\w/]+\.py|\w+/[\w/]*)`", named)
    assert [name for name in wanted if not any((place / name).exists() for place in (*places, first.parent))] == []


def test_every_package_is_in_the_folder_table() -> None:
    """A folder of ours that the table leaves out would be found by nobody."""
    named = " ".join(folders for folders, _ in ROWS)
    packages = [each.name for each in (ROOT / "edl_runtime").iterdir() if (each / "__init__.py").exists()]
    assert [name for name in packages if f"edl_runtime/{name}/" not in named] == []
