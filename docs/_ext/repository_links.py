"""Links from pages to files outside of docs/, which on the site lead to a page with that file's text.

Pages link to files as GitHub shows them, by relative paths. The site is complete without a network and without a host
for the repository: each file that is linked becomes a page below `repository/`.

A page that is nothing but an `include` of a README stands for it: it shows the README, with links as they are meant
there, and links to the README or its folder lead to the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util.osutil import relative_uri

ROOT = Path(__file__).parents[2]
SCHEME = "repository:"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
INCLUDE = re.compile(r"```\{include\} (\S+/README\.md)\n```\n")
PICTURES = {".png", ".svg", ".gif"}
MOST_BYTES = 200_000


def readme_of(page: Path) -> Path | None:
    """Return the README that a page stands for."""
    included = INCLUDE.fullmatch(page.read_text())
    return Path(normpath(page.parent / included[1])) if included else None


def leave_docs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Write links to files and folders that are no pages as `repository:PATH`."""
    page = Path(app.env.doc2path(docname))
    pages = {readme: each for each in (app.srcdir / "examples").glob("*.md") if (readme := readme_of(each))}
    shown = readme_of(page) or page
    if shown != page:
        source[0] = shown.read_text()
        app.env.note_dependency(str(shown), docname=docname)

    def rewritten(link: re.Match[str]) -> str:
        target = Path(normpath(shown.parent / link[1]))
        target = pages.get(target) or pages.get(target / "README.md") or target
        is_page = target.suffix == ".md" and target.is_relative_to(app.srcdir)
        if is_page or target.suffix in PICTURES:
            return relpath(target, page.parent) + (link[2] or "")
        return SCHEME + str(target.relative_to(ROOT)) if target.exists() else link[0]

    source[0] = LINK.sub(rewritten, source[0])


def find_pages(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Let `repository:PATH` lead to the page with the file, and remember that it is wanted."""
    for node in doctree.findall(nodes.reference):
        uri = node.get("refuri", "")
        if uri.startswith(SCHEME):
            path = uri.removeprefix(SCHEME)
            wanted(app).add(path)
            node["refuri"] = relative_uri(
                app.builder.get_target_uri(docname), app.builder.get_target_uri(page_of(path))
            )


def wanted(app: Sphinx) -> set[str]:
    """Return the paths of all files that pages link to."""
    if not hasattr(app.env, "repository_files"):
        app.env.repository_files = set()
    paths: set[str] = app.env.repository_files
    return paths


def page_of(path: str) -> str:
    return f"repository/{path}"


def write_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a page for each file that a page links to; a folder's lists what is in it."""
    for path in sorted(wanted(app)):
        file = ROOT / path
        body = folder_body(file) if file.is_dir() else file_body(app, file)
        yield page_of(path), {"title": path, "body": f"<h1>{path}</h1>{body}", "parents": []}, "page.html"


def folder_body(folder: Path) -> str:
    names = sorted(f"{each.name}{'/' * each.is_dir()}" for each in folder.iterdir() if each.name[0] not in "._")
    return f"<ul>{''.join(f'<li><code>{name}</code></li>' for name in names)}</ul>"


def file_body(app: Sphinx, file: Path) -> str:
    try:
        lexer = get_lexer_for_filename(file.name).aliases[0]
    except ClassNotFound:
        lexer = "text"
    text = file.read_bytes()[:MOST_BYTES].decode(errors="replace")
    highlighted: str = app.builder.highlighter.highlight_block(text, lexer)  # type: ignore[attr-defined]
    return highlighted


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", leave_docs)
    app.connect("doctree-resolved", find_pages)
    app.connect("html-collect-pages", write_pages)
    return {"parallel_read_safe": False, "parallel_write_safe": False}
