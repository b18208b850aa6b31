"""The site, as `make docs` builds it: dead links, missing anchors and names that don't exist end the build."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
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
