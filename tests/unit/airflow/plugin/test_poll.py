"""How the page's script asks the API again and again, in a real browser."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.browser.chromium import new_page, running_chromium
from support.paths import ROOT

STATIC = ROOT / "edl_airflow" / "plugin" / "static"

ETAG = '"same"'
SCRIPT = b"""
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


class Answers(BaseHTTPRequestHandler):
    """Serves the script, and an answer that never changes."""

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        if name == "answer" and self.headers["If-None-Match"] == ETAG:
            self._answer(304, b"", "")
        elif name == "answer":
            self._answer(200, b"{}", "application/json")
        elif name == "script.js":
            self._answer(200, SCRIPT, "text/javascript")
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


@pytest.mark.browser
@pytest.mark.slow
def test_an_answer_that_could_not_be_shown_is_asked_for_again() -> None:
    """Not only for what has changed since: of an ended job nothing changes any more."""
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server,
        running_chromium() as browser,
        browser.new_context() as context,
    ):
        threading.Thread(target=server.serve_forever).start()
        page = new_page(context)
        try:
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            page.wait_for_function("document.title === 'shown, not yet, shown'")
        finally:
            page.close()
            server.shutdown()
