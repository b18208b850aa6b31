"""`edl monitor` while a backend comes and goes."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.autoscale.views import job

from edl_runtime.backends.base import Capacity, JobStatus
from edl_runtime.backends.local import LocalBackend
from edl_runtime.cli import places
from edl_runtime.cli.flags import seconds
from edl_runtime.cli.monitor import monitor
from edl_runtime.errors import BackendError, ClusterUnavailableError, SpecError

AWAY = ClusterUnavailableError("https://cluster:6443", "it is silent")


class ComesAndGoes(LocalBackend):
    """Tells jobs, or is away, as listed; then it asks the command to end."""

    def __init__(self, work_dir: Path, told: list[bool]) -> None:
        super().__init__(work_dir)
        self._told = iter(told)

    async def list(self) -> list[JobStatus]:
        is_there = next(self._told, None)
        if is_there is None:
            os.kill(os.getpid(), signal.SIGTERM)
        if not is_there:
            raise AWAY
        return [job("example", 2)]

    async def capacity(self) -> Capacity:
        raise BackendError("nodes may not be seen")


def test_a_backend_that_is_away_is_waited_for(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong or unknown is said once for each outage, and there is a line for each look that found something."""
    backend = ComesAndGoes(work_dir, [True, False, False, False, True, False])

    @asynccontextmanager
    async def following(_: object) -> AsyncIterator[LocalBackend]:
        yield backend

    monkeypatch.setattr(places, "following", following)
    ran = CliRunner(env={"EDL_REDIS_URL": ""}).invoke(monitor, ["--every", "0.1"])
    assert ran.exit_code == 0, ran.exception
    assert [line.split("\t")[:3] for line in ran.stdout.splitlines()[1:]] == [["1", "0", "example:2"]] * 2
    complaints = [line for line in ran.stderr.splitlines() if "EDL_REDIS_URL" not in line]
    assert complaints == ["edl: what nodes have is unknown: nodes may not be seen", f"edl: {AWAY}"] * 2


@pytest.mark.parametrize(("text", "expected"), [("30s", 30), ("90m", 5400), ("1.5h", 5400), ("7d", 604800)])
def test_a_time_has_a_unit(text: str, expected: float) -> None:
    """Seconds, minutes, hours or days."""
    assert seconds("--history", text) == expected


@pytest.mark.parametrize("text", ["", "6", "h", "-1h", "6 h", "0s", "1w", "nan", "1h30m"])
def test_what_is_no_time_is_an_error(text: str) -> None:
    """It names the flag, what was given and what is allowed."""
    with pytest.raises(SpecError, match=r"--history: got .* allowed is a time above 0, as in 30s"):
        seconds("--history", text)
