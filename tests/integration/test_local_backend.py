"""What is particular to jobs as processes of this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from support.backends.jobs import WAITS, WITHIN_S, ended, eventually, lines, wait_for_line
from support.backends.local_processes import below, job, processes, supervisor, wait_until_gone

from edl_runtime.backends.errors import SubmitError
from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.local.backend import LocalBackend, SupervisorStart, launch_supervisor
from edl_runtime.backends.local.job_folders import MAX_RUNS_OF_JOB, MAX_RUNS_OF_REMOVED_JOBS
from edl_runtime.errors import BackendError
from edl_runtime.locks import hold
from edl_runtime.specs import JobKind, JobSpec

WAITS_FOR = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up")
while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)
raise SystemExit(1)
"""


def until_it_is_there(file: Path, work_dir: Path, *, kind: JobKind = "pool", instances: int = 1) -> JobSpec:
    """Return a job that ignores SIGTERM and fails once there is a file."""
    spec = job(WAITS_FOR, work_dir, kind=kind, instances=instances, grace_s=WITHIN_S)
    return msgspec.structs.replace(spec, command=(*spec.command, str(file)))


async def test_secrets_are_on_no_disk_and_in_no_argument(backend: LocalBackend, work_dir: Path, tmp_path: Path) -> None:
    """While a job runs and when it has failed, no file of the work folder and no command line has its secret."""

    def content() -> bytes:
        found = []
        for path in below(work_dir, "**/*"):
            with suppress(FileNotFoundError):  # a status is being replaced by the next
                found += [path.read_bytes()] if path.is_file() else []
        return b"".join(found)

    go = tmp_path / "go"
    secrets = {"PASSWORD": "open sesame"}
    await backend.submit(until_it_is_there(go, work_dir, kind="trainer"), token="token", secrets=secrets)
    await wait_for_line(backend, "up")
    (of_instance,) = [one for one in processes(work_dir) if str(go) in one.cmdline() and not one.children()]
    assert of_instance.environ()["PASSWORD"] == "open sesame"
    arguments = [word for process in processes(work_dir) for word in process.cmdline()]
    while_running = content()
    go.touch()
    await ended(backend)
    assert "sesame" not in " ".join(arguments)
    assert b"token" in while_running
    assert b"sesame" not in while_running + content()


async def test_the_work_folder_is_the_owners_only(backend: LocalBackend, work_dir: Path) -> None:
    """Nobody else can read logs and statuses or talk to the supervisor."""
    await backend.submit(job(WAITS, work_dir), token="mine", secrets={})
    await wait_for_line(backend, "up")
    modes = {}
    for path in [work_dir, *below(work_dir, "**/*")]:
        with suppress(FileNotFoundError):  # a status is being replaced by the next
            modes[path] = stat.S_IMODE(path.lstat().st_mode)
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


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


async def test_a_supervisor_that_cant_be_reached_is_a_backend_error(backend: LocalBackend, work_dir: Path) -> None:
    """It names the cause, and the job can be stopped all the same."""
    await backend.submit(job(WAITS, work_dir), token="mine", secrets={})
    (work_dir / "jobs" / "job" / "address").write_text("/tmp/" + "long" * 50)
    with pytest.raises(BackendError, match=r"supervisor of 'job' can't be reached: AF_UNIX path too long; end it with"):
        await backend.resize("job", 2)
    assert await backend.delete("job")
    wait_until_gone(work_dir)


async def test_many_changes_at_once_are_all_made(backend: LocalBackend, work_dir: Path) -> None:
    """Also those that come while the supervisor is busy: none is refused for their number."""
    await backend.submit(job(WAITS, work_dir), token="mine", secrets={})
    supervisor(work_dir).suspend()
    resizes = [asyncio.create_task(backend.resize("job", 1 + number % 4)) for number in range(300)]
    await asyncio.wait(resizes, timeout=1)
    supervisor(work_dir).resume()
    sizes = [status.wanted for status in await asyncio.gather(*resizes)]
    assert sizes == [1 + number % 4 for number in range(300)]
    await backend.delete("job")


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
    monkeypatch.setattr(
        "edl_runtime.backends.local.backend.inherited_environment", lambda _: {"PYTHONHOME": "/nowhere"}
    )
    with pytest.raises(SubmitError, match="'job' could not be started"):
        await backend.submit(job(WAITS, work_dir), token="mine", secrets={})
    assert await backend.list() == []


@pytest.fixture
def held_launch(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Starts of jobs set the first of these events and wait for the second, in whatever thread they are."""
    begun, go = threading.Event(), threading.Event()

    def held(start: SupervisorStart) -> JobStatus:
        begun.set()
        assert go.wait(WITHIN_S)
        return launch_supervisor(start)

    monkeypatch.setattr("edl_runtime.backends.local.backend.launch_supervisor", held)
    return begun, go


async def test_a_cancelled_submit_finishes_the_start_it_has_begun(
    backend: LocalBackend, work_dir: Path, held_launch: tuple[threading.Event, threading.Event]
) -> None:
    """There is no half-started job: whoever comes next adopts a whole one."""
    begun, go = held_launch
    submitting = asyncio.create_task(backend.submit(job(WAITS, work_dir), token="first", secrets={}))
    assert await asyncio.to_thread(begun.wait, WITHIN_S)
    submitting.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert (await backend.get("job")).token == "first"
    assert (await backend.submit(job(WAITS, work_dir), token="second", secrets={})).token == "second"


async def test_starting_and_stopping_leave_the_event_loop_free(
    backend: LocalBackend, work_dir: Path, tmp_path: Path, held_launch: tuple[threading.Event, threading.Event]
) -> None:
    """A triggerer runs thousands of coroutines in one loop: they go on while a job starts and while it stops."""

    async def others_run() -> None:
        for _ in range(20):
            await asyncio.sleep(0.001)

    begun, go = held_launch
    submitting = asyncio.create_task(
        backend.submit(until_it_is_there(tmp_path / "go", work_dir), token="t", secrets={})
    )
    assert await asyncio.to_thread(begun.wait, WITHIN_S)
    await others_run()
    go.set()
    await submitting
    await wait_for_line(backend, "up")
    deleting = asyncio.create_task(backend.delete("job"))
    await others_run()
    assert not deleting.done()
    (tmp_path / "go").touch()
    assert await deleting


async def test_capacity_is_the_machine_beside_what_instances_reserve(
    backend: LocalBackend, work_dir: Path, tmp_path: Path
) -> None:
    """A core each where nothing is said; whoever was told to leave counts as gone, though it takes its time."""
    (empty,) = (await backend.capacity()).nodes
    cores = os.cpu_count()
    assert cores
    assert (empty.total["cpu"], empty.total["memory"]) == (cores, psutil.virtual_memory().total)
    assert empty.free == empty.total
    await backend.submit(until_it_is_there(tmp_path / "go", work_dir, instances=2), token="mine", secrets={})
    await wait_for_line(backend, "up", instances=2)
    (node,) = (await backend.capacity()).nodes
    assert node.free == {**empty.free, "cpu": max(0, cores - 2)}
    leaving = await backend.resize("job", 0)
    assert [(one.node, one.leaving) for one in leaving.instances] == [(node.name, True)] * 2
    (node,) = (await backend.capacity()).nodes
    assert node.free == empty.free
    (tmp_path / "go").touch()


async def test_the_newest_runs_keep_their_logs(backend: LocalBackend, work_dir: Path) -> None:
    """Logs of old runs are dropped, so that a job run each night does not fill the disk."""
    for run in range(MAX_RUNS_OF_JOB + 1):
        old = work_dir / "runs" / "job" / f"2020{run:04}"
        old.mkdir(parents=True)
        (old / "0.log").write_text(f"{run}\n")
    await backend.submit(job("print('new'); raise SystemExit(1)", work_dir, kind="trainer"), token="mine", secrets={})
    await ended(backend)

    async def pruned() -> bool:
        return len(below(work_dir / "runs" / "job")) == MAX_RUNS_OF_JOB

    await eventually(pruned, "only the newest runs kept")
    kept = below(work_dir / "runs" / "job")
    assert [(run / "0.log").read_text().strip() for run in kept] == ["2", "3", "4", "5", "new"]


async def test_names_that_come_once_dont_fill_the_disk(backend: LocalBackend, work_dir: Path) -> None:
    """Of all jobs that are gone the newest runs are kept; no lock of theirs is, and who is there keeps its run."""
    await backend.submit(msgspec.structs.replace(job(WAITS, work_dir), name="older"), token="mine", secrets={})
    for number in range(MAX_RUNS_OF_REMOVED_JOBS + 2):
        (work_dir / "runs" / f"night-{number:03}" / f"2020{number:04}").mkdir(parents=True)
        (work_dir / "locks" / f"night-{number:03}").touch()
    (work_dir / "runs" / "busy" / "1999").mkdir(parents=True)
    async with hold(work_dir / "locks" / "busy"):
        await backend.submit(job(WAITS, work_dir), token="mine", secrets={})

        async def pruned() -> bool:
            return [lock.name for lock in below(work_dir / "locks")] == ["busy", "job", "older"]

        await eventually(pruned, "locks of no use are gone")
    names = {run.parent.name for run in below(work_dir, "runs/*/*")}
    assert names == {"busy", "job", "older"} | {
        f"night-{number:03}" for number in range(2, MAX_RUNS_OF_REMOVED_JOBS + 2)
    }
    assert below(work_dir / "runs", "night-000") == []
    await wait_for_line(backend, "up", name="older")


def test_a_work_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """As a fault of the backend, not as if there were no jobs."""
    (tmp_path / "jobs").symlink_to(tmp_path / "jobs")
    with pytest.raises(BackendError, match=rf"{tmp_path} can't be read: Too many levels"):
        asyncio.run(LocalBackend(tmp_path).list())


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
