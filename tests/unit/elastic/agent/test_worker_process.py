"""Worker processes: real ones, most of whose scripts do without Paddle."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.teachers.process import is_gone, wait_until

from edl_runtime.elastic.agent.entrypoint import Entrypoint, parse_entrypoint
from edl_runtime.elastic.agent.reconciler import StartWorker
from edl_runtime.elastic.agent.standby import sees_gpu
from edl_runtime.elastic.agent.workers import (
    WorkerExited,
    WorkerProcess,
    WorkerSupervisor,
    WorkerUpdate,
    quiet_environment,
)
from edl_runtime.elastic.comm.agent_protocol import Heartbeat, ScriptFailed, StandbyLoaded, StartScript, WorkerMessage

WITHIN_S = 150.0
"""Some import Paddle, which takes the processor for seconds."""

FAMILY = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
pathlib.Path("pids.partial").write_text(f"{os.getpid()} {child.pid}")
os.rename("pids.partial", "pids")
time.sleep(600)
"""


UNSHARE = ("unshare", "--user", "--map-root-user")
CAN_UNSHARE = shutil.which("unshare") is not None and not subprocess.run([*UNSHARE, "true"], check=False).returncode


class Updates:
    """The updates of a worker, without heartbeats."""

    def __init__(self) -> None:
        self.all: list[WorkerUpdate] = []
        self._news = asyncio.Event()

    def add(self, _worker: WorkerProcess, update: WorkerUpdate) -> None:
        if not isinstance(update, Heartbeat):
            self.all.append(update)
            self._news.set()

    async def wait_for(self, kind: type[WorkerMessage | WorkerExited]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not any(isinstance(each, kind) for each in self.all):
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def worker(script: Entrypoint, *, nice: bool = False) -> AsyncIterator[tuple[WorkerProcess, Updates]]:
    """Start a worker; it is killed at the end of the block."""
    process, updates = await WorkerProcess.begin(script, os.environ, nice=nice), Updates()
    monitoring = asyncio.create_task(process.monitor(updates.add))
    try:
        yield process, updates
    finally:
        process.kill()
        await monitoring


def script_of(source: str, tmp_path: Path, *arguments: str) -> Entrypoint:
    file = tmp_path / "train.py"
    file.write_text(source)
    return parse_entrypoint([str(file), *arguments])


async def test_a_loaded_worker_runs_its_script_on_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The script sees what any script sees: its name, arguments and folder, and its environment."""
    (tmp_path / "beside.py").write_text("HERE = True")
    source = """
import numpy, os, sys, beside
print(__name__, sys.argv[1:], os.environ["COLOUR"], beside.HERE, os.getpriority(os.PRIO_PROCESS, 0))
sys.exit(3)
"""
    async with worker(script_of(source, tmp_path, "--lr", "1"), nice=True) as (process, updates):
        await updates.wait_for(StandbyLoaded)
        assert updates.all == [StandbyLoaded()]
        process.send(StartScript(environ={"COLOUR": "blue"}))
        await updates.wait_for(WorkerExited)
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    assert capfd.readouterr().out == f"__main__ ['--lr', '1'] blue True {niceness}\n"
    assert updates.all[1:] == [ScriptFailed(reason="exited: 3", final=False), WorkerExited(3)]


@pytest.mark.skipif(sys.platform != "linux", reason="only there a thread has a niceness of its own")
async def test_a_loaded_worker_runs_at_the_niceness_of_its_agent(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where that is near the maximum, so that its priority could be lowered by less."""
    niceness = max(10, os.getpriority(os.PRIO_PROCESS, 0))

    async def run_one() -> None:
        source = "import numpy, os; print(os.getpriority(os.PRIO_PROCESS, 0))"
        async with worker(script_of(source, tmp_path), nice=True) as (process, updates):
            await updates.wait_for(StandbyLoaded)
            process.send(StartScript(environ={}))
            await updates.wait_for(WorkerExited)

    def be_its_agent() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)  # of this thread, which can't take it back
        asyncio.run(run_one())

    await asyncio.to_thread(be_its_agent)
    assert capfd.readouterr().out == f"{niceness}\n"


@pytest.mark.skipif(not CAN_UNSHARE, reason="this machine allows no user namespaces")
async def test_a_loaded_worker_runs_as_root_of_a_rootless_container(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it has all capabilities, and still may not take back that it has lowered its priority."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {" ".join(UNSHARE)} {sys.executable} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    source = "import numpy, os; print(os.getpriority(os.PRIO_PROCESS, 0))"
    async with worker(script_of(source, tmp_path), nice=True) as (process, updates):
        await updates.wait_for(StandbyLoaded)
        process.send(StartScript(environ={}))
        await updates.wait_for(WorkerExited)
    assert capfd.readouterr().out == f"{os.getpriority(os.PRIO_PROCESS, 0)}\n"
    assert updates.all[1:] == [WorkerExited(0)]


async def test_an_error_is_reported_and_printed_from_the_scripts_first_line_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The log has the traceback of any script; wrong input is final."""
    source = "from edl_runtime.errors import SpecError\nraise SpecError('lr', -1, 'more than 0')"
    async with worker(script_of(source, tmp_path)) as (process, updates):
        process.send(StartScript(environ={}))
        await updates.wait_for(WorkerExited)
    last = "edl_runtime.errors.SpecError: lr: got -1, allowed is more than 0"
    assert updates.all[1:] == [ScriptFailed(reason=last, final=True), WorkerExited(1)]
    shown = capfd.readouterr().err.splitlines()
    assert shown[0] == "Traceback (most recent call last):"
    assert "train.py" in shown[1]
    assert shown[-1] == last


FORGETS = """
import paddle
from edl_runtime import elastic

model = paddle.nn.Linear(2, 1)
optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
model(paddle.ones([1, 2])).sum().backward()
optimizer.step()
"""


@pytest.mark.slow
async def test_a_script_without_init_fails_at_its_first_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """So before a second instance trains the same; the error says what to do."""
    async with worker(script_of(FORGETS, tmp_path)) as (process, updates):
        await updates.wait_for(StandbyLoaded)
        process.send(StartScript(environ={}))
        await updates.wait_for(WorkerExited)
    failed = updates.all[1]
    assert isinstance(failed, ScriptFailed)
    assert failed.final
    assert "imports edl_runtime.elastic and never calls elastic.init" in failed.reason
    assert "optimizer.step()" in capfd.readouterr().err


async def test_a_program_replaces_the_standby(capfd: pytest.CaptureFixture[str]) -> None:
    """Any program can be a worker, but has no socket to the agent."""
    command = ["sh", "-c", "echo $COLOUR ${EDL_AGENT_FD-unset}; exit 4"]
    async with worker(parse_entrypoint(command)) as (process, updates):
        await updates.wait_for(StandbyLoaded)
        process.send(StartScript(environ={"COLOUR": "blue"}))
        await updates.wait_for(WorkerExited)
    assert (capfd.readouterr().out, updates.all[-1]) == ("blue\n", WorkerExited(4))


async def test_a_program_that_can_not_be_run_is_reported_in_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By an exit status that says that no restart helps."""
    program = tmp_path / "program"
    program.write_text("no format that is known")
    program.chmod(0o700)
    async with worker(parse_entrypoint([str(program)])) as (process, updates):
        await updates.wait_for(StandbyLoaded)
        process.send(StartScript(environ={}))
        await updates.wait_for(WorkerExited)
    reason = f"{program} can't be run: Exec format error"
    assert updates.all[1:] == [ScriptFailed(reason=reason, final=True), WorkerExited(78)]
    assert capfd.readouterr().err == f"edl: {reason}\n"


async def test_killing_a_worker_ends_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data loaders and other helpers, too."""
    monkeypatch.chdir(tmp_path)
    async with worker(script_of(FAMILY, tmp_path)) as (process, updates):
        process.send(StartScript(environ={}))
        await asyncio.to_thread(wait_until, (tmp_path / "pids").exists)
        child = psutil.Process(int((tmp_path / "pids").read_text().split()[1]))
        process.kill()
        await updates.wait_for(WorkerExited)
    assert updates.all[-1] == WorkerExited(-signal.SIGKILL)
    wait_until(lambda: is_gone(child))


def standing_still(tmp_path: Path) -> Entrypoint:
    """Return a script whose interpreter is one that does nothing, whatever its agent tells it."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o700)
    return Entrypoint(command=(str(python), "train.py"), file="train.py")


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    """At whatever it waits for."""
    script, before = standing_still(tmp_path), set(psutil.Process().children())
    for turns in range(100):
        beginning = asyncio.create_task(WorkerProcess.begin(script, os.environ))
        for _ in range(turns):
            await asyncio.sleep(0)
        if beginning.done():
            break
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
        wait_until(lambda: all(map(is_gone, set(psutil.Process().children()) - before)))
    process = await beginning
    process.kill()
    await process.monitor(lambda *_: None)
    assert turns > 2, "it has begun at once"


async def test_no_process_outlives_a_supervisor_that_ends_as_it_begins(tmp_path: Path) -> None:
    """Before anything has watched over it."""
    begun: list[WorkerProcess] = []

    async def fail() -> None:
        async with asyncio.TaskGroup() as tasks:
            workers = WorkerSupervisor(
                standing_still(tmp_path), "0-a", os.environ, gpu=False, tasks=tasks, on_update=lambda _: None
            )
            await workers.execute(StartWorker())
            assert workers._worker
            begun.append(workers._worker)
            raise ValueError("no")

    with pytest.raises(ExceptionGroup):
        await fail()
    async with asyncio.timeout(WITHIN_S):
        assert await begun[0]._process.wait() == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a parent's death")
async def test_no_worker_outlives_its_agent(tmp_path: Path) -> None:
    """Also when the agent is killed."""
    script = tmp_path / "train.py"
    script.write_text(FAMILY.replace('subprocess.Popen(["sleep", "600"])', "type('None', (), {'pid': 0})"))
    code = """
import asyncio, os, sys
from edl_runtime.elastic.agent.entrypoint import parse_entrypoint
from edl_runtime.elastic.agent.workers import WorkerProcess
from edl_runtime.elastic.comm.agent_protocol import StartScript
async def main():
    trainer = await WorkerProcess.begin(parse_entrypoint([sys.argv[1]]), os.environ)
    trainer.send(StartScript(environ={}))
    await trainer.monitor(lambda *_: None)
asyncio.run(main())
"""
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(script), cwd=tmp_path)
    try:
        await asyncio.to_thread(wait_until, (tmp_path / "pids").exists)
        process = psutil.Process(int((tmp_path / "pids").read_text().split()[0]))
    finally:
        agent.kill()
        await agent.wait()
    wait_until(lambda: is_gone(process))


def test_paddle_is_quiet_unless_the_user_sets_its_log() -> None:
    """A user who sets what it logs, or which warnings are shown, gets that."""
    script = Entrypoint(command=("python", "train.py"), file="train.py")
    assert quiet_environment({}, script) == {"GLOG_minloglevel": "1", "PYTHONWARNINGS": "ignore:No ccache found"}
    assert quiet_environment({"GLOG_v": "4", "PYTHONWARNINGS": ""}, script) == {"GLOG_v": "4", "PYTHONWARNINGS": ""}
    strict = Entrypoint(command=("python", "-W", "error", "train.py"), file="train.py", options=("-W", "error"))
    assert quiet_environment({}, strict) == {"GLOG_minloglevel": "1"}


@pytest.mark.parametrize(("devices", "found"), [(0, False), (2, True)])
def test_a_process_with_paddle_reports_whether_that_sees_a_gpu(
    monkeypatch: pytest.MonkeyPatch, devices: int, *, found: bool
) -> None:
    """One without Paddle can't tell."""
    paddle = SimpleNamespace(device=SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: devices)))
    monkeypatch.setitem(sys.modules, "paddle", paddle)
    assert sees_gpu() is found
    monkeypatch.delitem(sys.modules, "paddle")
    assert sees_gpu() is None
