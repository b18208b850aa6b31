"""What is particular to jobs as processes of this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
from contract.asking import IGNORES_SIGTERM, WAITS, breaks, ended, eventually, lines, reach, says
from integration.local_jobs import below, job, processes, start_begun, supervisor, wait_until_gone
from msgspec.structs import replace

from edl_runtime.backends.local import LocalBackend
from edl_runtime.backends.local.locks import hold
from edl_runtime.backends.local.retention import KEPT_RUNS, KEPT_RUNS_IN_ALL
from edl_runtime.errors import EX_CONFIG, SubmitError


@pytest.fixture
async def backend(work_dir: Path) -> AsyncIterator[LocalBackend]:
    """A local backend without jobs, and without any process afterwards."""
    made = LocalBackend(work_dir)
    yield made
    for status in await made.list():
        await made.delete(status.name)
    wait_until_gone(work_dir)


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


async def test_a_pool_without_anybody_left_fails(backend: LocalBackend, work_dir: Path) -> None:
    """When the last one that worked leaves by a resize, those that were given up make the pool fail."""
    await backend.submit(job(breaks("0", EX_CONFIG) + WAITS, work_dir, instances=2), token="mine", secrets={})
    await reach(backend, "job", lambda status: status.attainable == 1)
    await backend.resize("job", 1)
    status = await ended(backend)
    assert status.reason == "instance 0 exited with 78, which says that it can never work as configured"
    assert status.last_lines == ("no such model",)


async def test_secrets_are_on_no_disk_and_in_no_argument(backend: LocalBackend, work_dir: Path) -> None:
    """While a job runs and when it has failed, no file of the work folder and no command line has its secret."""

    def content() -> bytes:
        files = b"".join(path.read_bytes() for path in below(work_dir, "**/*") if path.is_file())
        return files + "".join(word for process in processes(work_dir) for word in process.cmdline()).encode()

    code = "import os, time; print(len(os.environ['PASSWORD'])); time.sleep(0.5); raise SystemExit(1)"
    await backend.submit(job(code, work_dir, kind="trainer"), token="token", secrets={"PASSWORD": "open sesame"})
    await says(backend, "11")
    while_running = content()
    await ended(backend)
    assert b"token" in while_running
    assert b"sesame" not in while_running + content()


async def test_the_work_folder_is_the_owners_only(backend: LocalBackend, work_dir: Path) -> None:
    """Nobody else can read logs and statuses or talk to the supervisor."""
    await backend.submit(job(WAITS, work_dir), token="mine", secrets={})
    await says(backend, "up")
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in [work_dir, *below(work_dir, "**/*")]}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


async def test_instances_get_a_clean_environment(
    backend: LocalBackend, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the caller's environment holds in secrets does not reach instances; what programs need does."""
    for name in ("AIRFLOW__CORE__FERNET_KEY", "_AIRFLOW_SECRET", "AIRFLOW_CONN_DB", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    await backend.submit(job(code, work_dir, kind="trainer"), token="mine", secrets={})
    await ended(backend)
    [(_, text)] = await lines(backend)
    environment = msgspec.json.decode(text)
    assert "secret" not in environment.values()
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["PYTHONUNBUFFERED"] == "1"


async def test_instances_start_in_a_folder_of_their_own_or_in_the_specs(
    backend: LocalBackend, work_dir: Path, tmp_path: Path
) -> None:
    """Without `cwd` no two instances share a folder; a folder that is not there is an error at the start."""
    spec = job("import os; print(os.getcwd())", work_dir, kind="trainer", instances=2)
    await backend.submit(spec, token="mine", secrets={})
    await ended(backend)
    assert len({text for _, text in await lines(backend)}) == 2
    await backend.submit(msgspec.structs.replace(spec, cwd=str(tmp_path)), token="mine", secrets={})
    await ended(backend)
    assert {text for _, text in await lines(backend)} == {str(tmp_path)}
    with pytest.raises(SubmitError, match="nowhere"):
        await backend.submit(msgspec.structs.replace(spec, cwd="/nowhere"), token="mine", secrets={})


async def test_a_work_folder_too_long_for_a_socket_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket then lies in a short folder for temporary files, which goes with the job however that ends."""
    short = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    monkeypatch.setenv("TMPDIR", str(short))
    work_dir = tmp_path / ("long" * 25)
    backend = LocalBackend(work_dir)
    for ending in ("delete", "death"):
        await backend.submit(job(WAITS, work_dir), token="mine", secrets={})
        assert (await backend.resize("job", 2)).wanted == 2
        [folder] = below(short)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        if ending == "death":
            supervisor(work_dir).kill()
        await backend.delete("job")
        assert below(short) == []
    wait_until_gone(work_dir)
    shutil.rmtree(short)


async def test_a_start_that_goes_wrong_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    """A work folder that can't be used is an error of the submit."""
    (tmp_path / "file").touch()
    backend = LocalBackend(tmp_path / "file")
    with pytest.raises(SubmitError, match="file"):
        await backend.submit(job(WAITS, tmp_path), token="mine", secrets={})
    assert await backend.list() == []


async def test_a_supervisor_that_cant_come_up_says_why(
    backend: LocalBackend, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor's own last words are in the error, and nothing of it is left."""
    monkeypatch.setattr("edl_runtime.backends.local.launch.base_environment", lambda _: {"PYTHONHOME": "/nowhere"})
    with pytest.raises(SubmitError, match="'job' could not be started"):
        await backend.submit(job(WAITS, work_dir), token="mine", secrets={})
    assert await backend.list() == []


async def test_a_cancelled_submit_finishes_the_start_it_has_begun(backend: LocalBackend, work_dir: Path) -> None:
    """There is no half-started job: whoever comes next adopts a whole one."""
    submitting = asyncio.create_task(backend.submit(job(WAITS, work_dir), token="first", secrets={}))
    await start_begun(work_dir)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert (await backend.get("job")).token == "first"
    assert (await backend.submit(job(WAITS, work_dir), token="second", secrets={})).token == "second"


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


async def test_starting_and_stopping_leave_the_event_loop_free(backend: LocalBackend, work_dir: Path) -> None:
    """A triggerer runs thousands of coroutines in one loop: they go on while a job starts and while it stops."""
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.001)
            beats += 1

    async with asyncio.TaskGroup() as group:
        beating = group.create_task(beat())
        await backend.submit(job(IGNORES_SIGTERM, work_dir, grace_s=0.5), token="mine", secrets={})
        while_starting = beats
        await says(backend, "up")
        beats = 0
        await backend.delete("job")
        while_stopping = beats
        beating.cancel()
    assert while_starting > 20
    assert while_stopping > 20


async def test_capacity_counts_free_memory_now(backend: LocalBackend) -> None:
    """The memory that can be given away is what the machine has available."""
    capacity = await backend.capacity()
    assert capacity.cpus == os.cpu_count()
    assert 0 < capacity.free_memory < psutil.virtual_memory().total
