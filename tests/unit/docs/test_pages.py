"""Pages are short, and links that Sphinx doesn't see lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.docs_pages import FENCE, PAGES
from support.paths import ROOT

MOST_LINES = 250
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *ROOT.glob("examples/*/README.md")]


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"(?m)^#+ (.+)$", FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short(page: Path) -> None:
    most = 150 if page.name == "README.md" else MOST_LINES
    assert len(page.read_text().splitlines()) <= most


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_to_headings(page: Path) -> None:
    """Also in README and the examples, which are no part of the site."""
    for path, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        target = page.parent / path if path else page
        if target.suffix == ".md":
            assert anchor in anchors_of(target), f"{path}#{anchor}"
