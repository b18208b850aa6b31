"""What is kept of local jobs' runs, and for how long."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace
from support.backends.jobs import WAITS, ended, eventually, says
from support.backends.local_processes import below, job

from edl_runtime.backends.local import LocalBackend
from edl_runtime.backends.local.locks import hold
from edl_runtime.backends.local.retention import KEPT_RUNS, KEPT_RUNS_IN_ALL


async def test_the_newest_runs_keep_their_logs(backend: LocalBackend, work_dir: Path) -> None:
    """Logs of old runs are dropped, so that a job run each night does not fill the disk."""
    for run in range(KEPT_RUNS + 2):
        spec = job(f"print({run}); raise SystemExit(1)", work_dir, kind="trainer")
        await backend.submit(spec, token="mine", secrets={})
        await ended(backend)

    async def pruned() -> bool:
        return len(below(work_dir / "runs" / "job")) == KEPT_RUNS

    await eventually(pruned, "only the newest runs kept")
    kept = below(work_dir / "runs" / "job")
    assert [(run / "0.log").read_text().strip() for run in kept] == ["2", "3", "4", "5", "6"]


async def test_names_that_come_once_dont_fill_the_disk(backend: LocalBackend, work_dir: Path) -> None:
    """Of all jobs that are gone the newest runs are kept; no lock of theirs is, and who is there keeps its run."""
    await backend.submit(replace(job(WAITS, work_dir), name="older"), token="mine", secrets={})
    for number in range(KEPT_RUNS_IN_ALL + 2):
        (work_dir / "runs" / f"night-{number:03}" / f"2020{number:04}").mkdir(parents=True)
        (work_dir / "locks" / f"night-{number:03}").touch()
    (work_dir / "runs" / "busy" / "1999").mkdir(parents=True)
    async with hold(work_dir / "locks" / "busy"):
        await backend.submit(job(WAITS, work_dir), token="mine", secrets={})

        async def pruned() -> bool:
            return [lock.name for lock in below(work_dir / "locks")] == ["busy", "job", "older"]

        await eventually(pruned, "locks of no use are gone")
    names = {run.parent.name for run in below(work_dir, "runs/*/*")}
    assert names == {"busy", "job", "older"} | {f"night-{number:03}" for number in range(2, KEPT_RUNS_IN_ALL + 2)}
    assert below(work_dir / "runs", "night-000") == []
    await says(backend, "up", name="older")


async def test_what_an_instance_wrote_beside_it_outlives_the_job(backend: LocalBackend, work_dir: Path) -> None:
    """A checkpoint given by a relative path can be read after the delete, for as long as the logs can."""
    code = """
from pathlib import Path
from edl_runtime.result import write_result
Path("model").write_text("trained")
write_result(checkpoint=str(Path("model").absolute()))
"""
    await backend.submit(job(code, work_dir, kind="trainer"), token="mine", secrets={})
    result = (await ended(backend)).result
    await backend.delete("job")
    assert result is not None
    [model] = below(work_dir, "runs/job/*/work/0/model")
    assert (str(model), model.read_text()) == (result["checkpoint"], "trained")
