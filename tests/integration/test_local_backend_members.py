"""How patient a local pool is with instances that keep ending."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from support.backends.jobs import WAITS, breaks, ended, lines, reach
from support.backends.local_processes import job

from edl_runtime.backends.local import LocalBackend


@pytest.mark.slow
async def test_a_pool_that_keeps_breaking_fails(backend: LocalBackend, work_dir: Path) -> None:
    """An instance that ends five times in a row soon after its start is not restarted for ever."""
    await backend.submit(job("raise SystemExit('broken')", work_dir), token="mine", secrets={})
    status = await ended(backend)
    assert status.reason == "instance 0 ended 5 times in a row within 10 s of its start, the last time it exited with 1"
    assert await lines(backend) == [(0, "broken")] * 5


@pytest.mark.slow
async def test_a_pool_of_which_all_keep_breaking_fails(backend: LocalBackend, work_dir: Path) -> None:
    """Instances that only ever end don't keep each other's pool alive."""
    await backend.submit(job("raise SystemExit('broken')", work_dir, instances=3), token="mine", secrets={})
    assert "times in a row within 10 s of its start" in (await ended(backend)).reason


@pytest.mark.slow
async def test_an_instance_that_keeps_breaking_does_not_end_who_works(
    backend: LocalBackend, work_dir: Path, tmp_path: Path
) -> None:
    """It is tried again and again, and the status says what is wrong with it until it has come up after all."""
    mended = tmp_path / "mended"
    code = f"import os\nif not os.path.exists({str(mended)!r}):\n" + textwrap.indent(breaks("1", 1), "  ") + WAITS
    await backend.submit(job(code, work_dir, instances=2), token="mine", secrets={})
    status = await reach(backend, "job", lambda status: any(one.restarts == 5 for one in status.instances))
    assert (status.phase, status.wanted, status.attainable) == ("running", 2, 2)
    assert status.reason == "instance 1 ended 5 times in a row within 10 s of its start, the last time it exited with 1"
    assert status.last_lines[-1] == "no such model"
    mended.touch()
    status = await reach(backend, "job", lambda status: not status.reason)
    assert (status.phase, status.last_lines) == ("running", ())
    assert await lines(backend, instance=0) == [(0, "up")]
