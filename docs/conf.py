"""Sphinx builds the site from this folder: `make docs`. ADR 28 says why it is Sphinx."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]

os.environ["AIRFLOW_HOME"] = str(DOCS.parent / "build" / "airflow")  # which importing Airflow writes to

import edl_runtime  # noqa: E402 - of this checkout

project = "edl-airflow"
version = release = edl_runtime.__version__
copyright = "the authors of edl-airflow"  # noqa: A001 - Sphinx's name for it

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "generated", "repository_links"]
exclude_patterns = ["_ext"]
nitpicky = True
nitpick_ignore_regex = [(r"py:(class|obj|data|exc)", ".*")]  # types in signatures, of which many are not our users'
default_role = "code"

autodoc_default_options = {"member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 80

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence"]
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "repository"]

html_theme = "pydata_sphinx_theme"
html_title = f"edl-airflow {release}"
html_favicon = "../edl_airflow/plugin/static/icon.svg"
html_search_scorer = str(DOCS / "_static" / "scorer.js")
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "check_switcher": False,  # it is beside the versions, and made after them
    "navbar_align": "left",
    "navbar_end": ["version-switcher", "theme-switcher"],
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": True,
    "switcher": {
        "json_url": os.environ.get("DOCS_ROOT", "/") + "switcher.json",
        "version_match": release,
    },
}
