"""Lets autodoc read our docstrings, which are Markdown's subset: code in single backticks, and indented code.

In text, what reStructuredText would take for marks means itself: `_`, `*` and `|`.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

MARKS = re.compile(r"([*|]|_(?!\w))")


def translate(*given: Any) -> None:
    """Write the lines of a docstring, the last argument, as reStructuredText, in place."""
    lines: list[str] = given[-1]
    paragraphs = "\n".join(lines).strip("\n").split("\n\n")
    shown = "\n\n".join(code(each) if is_code(each) else text(each) for each in paragraphs)
    lines[:] = [*shown.split("\n"), ""]


def is_code(paragraph: str) -> bool:
    return all(line.startswith("    ") or not line for line in paragraph.split("\n"))


def code(paragraph: str) -> str:
    return f".. code-block:: python\n\n{paragraph}"


def text(paragraph: str) -> str:
    pieces = re.split(r"(`[^`]*`)", paragraph)
    pieces[::2] = [MARKS.sub(r"\\\1", piece) for piece in pieces[::2]]
    pieces[1::2] = [f"`{' '.join(piece.split())}`" for piece in pieces[1::2]]
    return "".join(pieces)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", translate)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
