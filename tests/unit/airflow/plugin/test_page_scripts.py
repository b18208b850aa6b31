"""The page's scripts, in a real browser."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Page
from support.browser.chromium import new_page, running_chromium
from support.paths import ROOT

STATIC = ROOT / "edl_airflow" / "plugin" / "static"

ETAG = '"same"'
POLL = b"""
import { Poll } from "/poll.js";
const seen = [];
new Poll({
  url: () => "/answer",
  everyMs: 20,
  changed: (answer) => {
    seen.push("shown");
    document.title = seen.join(", ");
    if (seen.length === 1) throw new Error("not yet");
  },
  failed: (error) => error && seen.push(error.message),
});
"""

CAPTION = b"""
import { captionOf } from "/timeline.js";
const marks = ["ended", "resize", "ended", "failure"].map((kind) => ({ kind }));
document.title = captionOf({ series: [{ ahead: [] }], marks }, 1);
"""


class Answers(BaseHTTPRequestHandler):
    """Serves a script, and an answer that never changes."""

    script: bytes

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        if name == "answer" and self.headers["If-None-Match"] == ETAG:
            self._answer(304, b"", "")
        elif name == "answer":
            self._answer(200, b"{}", "application/json")
        elif name == "script.js":
            self._answer(200, self.script, "text/javascript")
        elif name.endswith(".js"):
            self._answer(200, (STATIC / name).read_bytes(), "text/javascript")
        else:
            self._answer(200, b'<script type="module" src="/script.js"></script>', "text/html")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("ETag", ETAG)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def page_of(script: bytes) -> Iterator[Page]:
    """Yield a page that runs the script."""
    handler = type("Serving", (Answers,), {"script": script})
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        running_chromium() as browser,
        browser.new_context() as context,
    ):
        threading.Thread(target=server.serve_forever).start()
        page = new_page(context)
        try:
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            yield page
        finally:
            page.close()
            server.shutdown()


@pytest.mark.browser
@pytest.mark.slow
def test_an_answer_that_could_not_be_shown_is_asked_for_again() -> None:
    """Not only for what has changed since: of an ended job nothing changes any more."""
    with page_of(POLL) as page:
        page.wait_for_function("document.title === 'shown, not yet, shown'")


@pytest.mark.browser
@pytest.mark.slow
def test_the_caption_of_the_timeline_counts_its_marks_in_words() -> None:
    """A job that has ended is no "ended", of which there would be "endeds"."""
    with page_of(CAPTION) as page:
        page.wait_for_function("document.title")
        assert "with 1 resize, 1 failure, 2 ended jobs." in page.title()
