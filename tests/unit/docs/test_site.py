"""The site, as `make docs` builds it: dead links, missing anchors and names that don't exist end the build."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Page
from support.browser.chromium import faults_of, new_page, running_chromium
from support.paths import ROOT

import edl_runtime

BUILD = "import sys, pathlib; sys.path.insert(0, 'scripts'); import docs; docs.build(pathlib.Path(sys.argv[1]))"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "docs"
    (folder / "0.0.9").mkdir(parents=True)
    (folder / "0.0.9" / "index.html").write_text("an older version")
    done = subprocess.run([sys.executable, "-c", BUILD, folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Write nothing: only what is missing is of interest, and the browser says that."""


@pytest.fixture
def page(site: Path) -> Iterator[Page]:
    """This version's start page in a browser, from a server of the folder with both versions."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with running_chromium() as browser:
                page = new_page(browser.new_context(bypass_csp=True))
                page.goto(f"http://127.0.0.1:{server.server_port}/{edl_runtime.__version__}/index.html")
                yield page
        finally:
            server.shutdown()


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(900)
def test_a_reader_finds_pages_before_decisions_and_the_other_version(page: Page) -> None:
    """By the keyboard alone; nothing that the page needs is missing, nor what a screen reader needs."""
    missing: list[str] = []
    page.on("response", lambda response: missing.append(response.url) if response.status >= 400 else None)
    page.reload()
    page.locator(".version-switcher__menu a", has_text="0.0.9").first.wait_for(state="attached")
    themes = "label-content-name-mismatch"  # its buttons are named otherwise than they are labelled
    assert [fault for fault in faults_of(page) if not fault.startswith(themes)] == []
    page.keyboard.press("Control+k")
    page.keyboard.type("token")
    page.keyboard.press("Enter")
    page.get_by_text("Search finished").wait_for()
    links = [link.get_attribute("href") or "" for link in page.locator("#search-results ul.search > li > a").all()]
    decisions = ["/adr/" in link or link.startswith("adr/") for link in links]
    assert decisions == sorted(decisions)
    assert any(decisions)
    assert missing == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_needs_no_other_host(site: Path) -> None:
    """Scripts, styles and fonts are in the folder."""
    pages = list((site / edl_runtime.__version__).rglob("*.html"))
    assert len(pages) > 50
    loaded = re.compile(
        r'<(?:script|img)[^>]*src="(?:https?:)?//|<link[^>]*rel="(?:stylesheet|preload)"[^>]*href="(?:https?:)?//'
    )
    assert [page for page in pages if loaded.search(page.read_text())] == []
    styles = (site / edl_runtime.__version__ / "_static").rglob("*.css")
    assert [style for style in styles if re.search(r"(?:@import|url\()\s*[\"']?https?:", style.read_text())] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_has_search_dark_mode_and_the_other_versions(site: Path) -> None:
    """The search knows the names of our classes; the newest version is the start page."""
    own = site / edl_runtime.__version__
    page = (own / "index.html").read_text()
    assert "theme-switch" in page
    assert "version-switcher" in page
    terms = (own / "searchindex.js").read_text()
    assert "EdlCheckpointSensor" in terms
    versions = json.loads((site / "switcher.json").read_text())
    assert [each["version"] for each in versions] == [edl_runtime.__version__, "0.0.9"]
    assert f"url={edl_runtime.__version__}/index.html" in (site / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_files_that_pages_link_to_are_pages(site: Path) -> None:
    """The repository needs no public address."""
    page = (site / edl_runtime.__version__ / "repository" / "tests" / "faults" / "test_teachers.py.html").read_text()
    assert "highlight" in page
    for target in re.findall(
        r'href="((?:\.\./)+repository/[^"#]+)"',
        (site / edl_runtime.__version__ / "concepts" / "distillation.html").read_text(),
    ):
        assert (site / edl_runtime.__version__ / "concepts" / target).is_file(), target
