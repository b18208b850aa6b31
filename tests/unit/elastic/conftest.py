"""What the unit tests of elastic trainings share."""

from __future__ import annotations

import pytest


@pytest.fixture
def nothing_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that a test leaves early is not this process's end, and refuses no optimizers of other tests."""
    monkeypatch.setattr("edl_runtime.elastic.training.optimizer_step._hooks", [])
    monkeypatch.setattr("edl_runtime.elastic.training.loop.at_script_end", lambda *_: None)
