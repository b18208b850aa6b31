"""A headless Chromium."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import skip_on_a_laptop
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from support.paths import ROOT

log = logging.getLogger(__name__)

SCREENSHOTS = ROOT / "build" / "screenshots"
SLOWEST_MS = 180_000
"""Longest wait for an element: other tests use the same Airflow."""

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

FAILED = 400
ABORTED = "net::ERR_ABORTED"
"""By the page itself, or an answer without a body."""

AXE = Path(__file__).with_name("axe.min.js")
"""axe-core 4.14.1, which finds what keeps people from using a page; its licence lies beside it."""


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """Run a browser; skips the test on a laptop without Chromium."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        skip_on_a_laptop("a browser (chromium) is missing")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=program, args=FLAGS, timeout=SLOWEST_MS) as browser,
    ):
        yield browser


def new_page(context: BrowserContext) -> Page:
    """Return an empty page, whose failed requests and scripts are logged: pytest shows them with a failed test."""
    page = context.new_page()
    page.set_default_timeout(SLOWEST_MS)
    page.on("response", lambda answer: answer.status >= FAILED and log.warning("%s from %s", answer.status, answer.url))
    page.on(
        "requestfailed",
        lambda request: request.failure != ABORTED and log.warning("%s: %s", request.failure, request.url),
    )
    page.on("pageerror", lambda error: log.warning("script failed: %s", error))
    return page


def log_text(page: Page) -> None:
    """Log where a page is, and its text."""
    log.warning("%s shows:\n%s", page.url, page.inner_text("body"))


def faults_of(page: Page) -> list[str]:
    """Return the serious and critical faults that axe-core finds on a page.

    The page's context has `bypass_csp`, as the page lets nothing but its own styles in.
    """
    page.evaluate(AXE.read_text())
    found: dict[str, Any] = page.evaluate("axe.run({resultTypes: ['violations']})")
    return [
        f"{fault['id']}: {fault['nodes'][0]['target']} {fault['nodes'][0]['failureSummary']}"
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical")
    ]
