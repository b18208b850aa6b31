"""What is particular to jobs as processes of this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from pathlib import Path

import msgspec
import psutil
import pytest
from support.backends.jobs import IGNORES_SIGTERM, WAITS, ended, lines, says
from support.backends.local_processes import below, job, processes, start_begun, supervisor, wait_until_gone

from edl_runtime.backends.local import LocalBackend
from edl_runtime.errors import SubmitError


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


async def test_capacity_is_the_machine_beside_what_instances_reserve(backend: LocalBackend, work_dir: Path) -> None:
    """A core each where nothing is said; whoever was told to leave counts as gone, though it takes its time."""
    (empty,) = (await backend.capacity()).nodes
    cores = os.cpu_count()
    assert cores
    assert (empty.total["cpu"], empty.total["memory"]) == (cores, psutil.virtual_memory().total)
    assert empty.free == empty.total
    await backend.submit(job(IGNORES_SIGTERM, work_dir, instances=2, grace_s=2.0), token="mine", secrets={})
    await says(backend, "up", instances=2)
    (node,) = (await backend.capacity()).nodes
    assert node.free == {**empty.free, "cpu": max(0, cores - 2)}
    leaving = await backend.resize("job", 0)
    assert [(one.node, one.leaving) for one in leaving.instances] == [(node.name, True)] * 2
    (node,) = (await backend.capacity()).nodes
    assert node.free == empty.free
