"""Python in README and docs is checked by mypy, all of it in one run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.docs_pages import PAGES, blocks
from support.paths import ROOT

OF_THE_PUBLIC_API = {
    alias.asname or alias.name: node.module
    for node in ast.parse((ROOT / "tests/typing/api.py").read_text()).body
    if isinstance(node, ast.ImportFrom) and node.module != "__future__"
    for alias in node.names
}
"""Names that a part of a script or DAG may use without their imports, and where they are from."""

LENIENT = """\
# mypy: disable-error-code="name-defined,no-redef,has-type,import-not-found,import-untyped,var-annotated,attr-defined"
# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics, no-warn-unreachable, no-strict-optional
"""
"""A page's names that stand for the reader's own, as `model`, are of any type."""


def module_of(block: str) -> str:
    """Return a block as a module, with the imports that it leaves out."""
    code = textwrap.dedent(block).replace(", ...)", ", **{})")
    tree = ast.parse(code)
    bound = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    missing = sorted(({name.id for name in names} - bound) & OF_THE_PUBLIC_API.keys())
    imports = [f"from {OF_THE_PUBLIC_API[name]} import {name}" for name in missing]
    return "\n".join([LENIENT, *imports, code])


def written(folder: Path) -> Iterator[tuple[str, str]]:
    """Write each block as a module; yield its file's name and where it stands."""
    for page in PAGES:
        for number, (line, _, block) in enumerate(blocks(page, "python")):
            name = re.sub(r"\W", "_", f"{page.relative_to(ROOT).with_suffix('')}_{number}") + ".py"
            (folder / name).write_text(module_of(block))
            yield name, f"{page.relative_to(ROOT)}:{line}"


@pytest.mark.slow
def test_blocks_are_valid_and_call_what_there_is_with_arguments_that_it_takes(tmp_path: Path) -> None:
    where = dict(written(tmp_path))
    assert len(where) > 20
    checked = [sys.executable, "-m", "mypy", "--no-error-summary", *(str(tmp_path / name) for name in where)]
    done = subprocess.run(checked, cwd=ROOT, capture_output=True, text=True, check=False)
    shown = done.stdout
    for name, place in where.items():
        shown = shown.replace(str(tmp_path / name), place)
    assert done.returncode == 0, f"{shown}{done.stderr}"
