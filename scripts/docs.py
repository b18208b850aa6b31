"""Builds the site: `make docs`. Each version has its folder in build/docs, so a folder that is kept has all of them.

A warning is an error: a dead link, a name that doesn't exist, a page that no other leads to. DOCS_ROOT is the path of
that folder on the server that shows it, "/" by default.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

import edl_runtime

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "docs"


def version_key(folder: Path) -> list[int]:
    return [int(part) for part in folder.name.split(".") if part.isdecimal()]


def write_switcher(folder: Path, root: str) -> None:
    """Write the list of versions that pages show, and a start page that leads to the newest."""
    versions = sorted((page.parent for page in folder.glob("*/index.html")), key=version_key, reverse=True)
    listed = [
        {"version": each.name, "url": f"{root}{each.name}/", "preferred": each == versions[0]} for each in versions
    ]
    (folder / "switcher.json").write_text(json.dumps(listed, indent=2))
    newest = f"{versions[0].name}/index.html"
    (folder / "index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={newest}">\n')


def build(folder: Path) -> None:
    """Build this version's pages below `folder`; exit with Sphinx's status if there is a warning."""
    gc.disable()  # a fifth of the time: nearly all that Sphinx makes is kept to the end
    built = folder / edl_runtime.__version__
    shutil.rmtree(built, ignore_errors=True)
    doctrees = folder.parent / "doctrees"
    status = build_main(["-q", "-W", "--keep-going", "-n", "-d", str(doctrees), str(ROOT / "docs"), str(built)])
    if status:
        sys.exit(status)
    write_switcher(folder, os.environ.get("DOCS_ROOT", "/"))


if __name__ == "__main__":
    build(FOLDER)
    print("the site is in build/docs; python -m http.server --directory build/docs shows it")  # noqa: T201
