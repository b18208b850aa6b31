"""`edl monitor`, beside a backend that fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from edl_runtime.backends.interface import Capacity
from edl_runtime.cli import monitor
from edl_runtime.monitor.snapshot import build_snapshot
from edl_runtime.settings import RuntimeSettings


async def test_a_snapshot_that_fails_is_told_and_the_next_one_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by an error that nobody expects: whoever looks at all jobs goes on."""
    tries: list[int] = []

    async def take_snapshot(*_: object) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise KeyError("labels")
        os.kill(os.getpid(), signal.SIGTERM)
        return build_snapshot([], Capacity(nodes=()), None, {}, 5.0)

    monkeypatch.setattr(monitor, "take_snapshot", take_snapshot)
    await monitor._watch(RuntimeSettings(work_dir=str(tmp_path)), 0.01, None, as_json=True)
    shown = capsys.readouterr()
    assert "edl: this snapshot can't be handled: KeyError: 'labels'" in shown.err
    assert len(tries) >= 2
