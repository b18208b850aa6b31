"""An instance's worker and its standby: real processes, whose scripts do without Paddle."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from support.elastic.generations import generation

from edl_runtime.elastic.agent import workers
from edl_runtime.elastic.agent.entrypoint import Entrypoint, parse_entrypoint
from edl_runtime.elastic.agent.failures import WorkerFailure
from edl_runtime.elastic.agent.reconciler import (
    KillWorker,
    RunScript,
    SendMessage,
    StartStandby,
    StartWorker,
    TerminateWorker,
    WorkerPhase,
)
from edl_runtime.elastic.agent.watchdog import ProcessSample
from edl_runtime.elastic.agent.workers import WorkerSupervisor
from edl_runtime.elastic.comm.agent_protocol import FailureCause, Leave, ScriptFailed

WITHIN_S = 100.0
"""Some import Paddle, which takes the processor for seconds."""

ME = "0-me"
GENERATION = generation(4, [ME], store="127.0.0.1:7000", endpoints=("127.0.0.1:7001",), gear="warm")

BESIDE = """
import os, pathlib, time
from edl_runtime.elastic.comm.agent_protocol import InitCalled, WorkerReady, connect_to_agent

def await_file(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)

def main():
    await_file("call-init")
    before = os.environ["RANK"]
    client = connect_to_agent(os.environ)
    print(before, os.environ.get("RANK"), flush=True)
    client.send(InitCalled())
    await_file("be-ready")
    client.send(WorkerReady(live=True, seen=3))
    time.sleep(600)
"""
"""What a script runs that calls `elastic.init` and `run.wrap` in another module."""


@asynccontextmanager
async def supervisor_of(script: Entrypoint, *, gpu: bool = False) -> AsyncIterator[WorkerSupervisor]:
    """Yield a supervisor without processes; those that it starts are ended with the block."""
    async with asyncio.TaskGroup() as tasks:
        supervisor = WorkerSupervisor(script, ME, os.environ, gpu=gpu, tasks=tasks, on_update=lambda _: None)
        try:
            yield supervisor
        finally:
            supervisor.dismiss()


async def eventually(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


async def reaches(supervisor: WorkerSupervisor, phase: WorkerPhase) -> None:
    await eventually(lambda: supervisor.state.phase == phase)


async def train(supervisor: WorkerSupervisor) -> None:
    """Start a worker and run its script, as a plain one."""
    await supervisor.execute(StartWorker())
    await reaches(supervisor, "loaded")
    await supervisor.execute(RunScript(GENERATION))


def script_of(source: str, folder: Path) -> Entrypoint:
    script = folder / "train.py"
    script.write_text(source)
    return parse_entrypoint([str(script)])


def indirect(folder: Path) -> Entrypoint:
    """Return an elastic script whose own file does not show it."""
    (folder / "beside.py").write_text(BESIDE)
    return script_of("import beside\nbeside.main()", folder)


async def test_a_worker_that_computes_uses_processor_time(tmp_path: Path) -> None:
    """Without a worker there is no process."""
    async with supervisor_of(script_of("while True:\n    pass", tmp_path)) as supervisor:
        assert supervisor.sample() == ProcessSample()
        await train(supervisor)
        before = supervisor.sample()
        await eventually(lambda: supervisor.sample().cpu_s > before.cpu_s + 0.1)
        await supervisor.execute(KillWorker("it has computed enough"))
        await reaches(supervisor, "absent")
        assert supervisor.sample() == ProcessSample()


async def test_a_stopped_worker_that_ran_in_between_is_seen_to_have_run(tmp_path: Path) -> None:
    """It may use no processor time that the system counts, and be found stopped each time."""
    async with supervisor_of(script_of("import time\ntime.sleep(600)", tmp_path)) as supervisor:
        await train(supervisor)
        assert supervisor._worker
        process = psutil.Process(supervisor._worker.pid)
        process.suspend()
        await eventually(lambda: supervisor.sample().status == "stopped")
        stopped = supervisor.sample()
        assert supervisor.sample() == stopped
        process.resume()
        await eventually(lambda: supervisor.sample().status != "stopped")
        process.suspend()
        await eventually(lambda: supervisor.sample().status == "stopped")
        assert supervisor.sample().switches > stopped.switches


async def test_a_worker_killed_for_want_of_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts what it kills for that."""
    kills = iter([7, 8])
    monkeypatch.setattr(workers, "oom_kills", lambda: next(kills))
    async with supervisor_of(script_of("import os; os.kill(os.getpid(), 9)", tmp_path)) as supervisor:
        await train(supervisor)
        await reaches(supervisor, "absent")
        [failure] = supervisor.take_updates()
    assert isinstance(failure, WorkerFailure)
    assert failure.out_of_memory


@pytest.mark.slow
async def test_a_script_sums_by_what_its_paddle_has_and_not_its_machine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A Paddle without CUDA, beside a GPU; without Paddle, what the machine has counts."""
    for modules, backend in (("os", "nccl"), ("os, paddle", "gloo")):
        source = f"import {modules}\nprint('sums by', os.environ['PADDLE_DISTRI_BACKEND'], flush=True)"
        async with supervisor_of(script_of(source, tmp_path), gpu=True) as supervisor:
            await train(supervisor)
            await reaches(supervisor, "absent")
        assert f"sums by {backend}\n" in capfd.readouterr().out


HEEDS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path("saved").touch()))
pathlib.Path("begun").touch()
time.sleep(600)
"""


async def test_a_plain_script_may_save_before_its_generation_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets SIGTERM, as any program does."""
    monkeypatch.chdir(tmp_path)
    async with supervisor_of(script_of(HEEDS, tmp_path)) as supervisor:
        await train(supervisor)
        await eventually((tmp_path / "begun").exists)
        await supervisor.execute(TerminateWorker())
        assert supervisor.state.phase == "leaving"
        await reaches(supervisor, "absent")
        assert (tmp_path / "saved").exists()


ENDS_AS_IT_IS_TOLD_TO_LEAVE = """
import os
from edl_runtime.elastic.comm.agent_protocol import connect_to_agent
from edl_runtime.elastic.errors import NoGroupError

def main():
    connect_to_agent(os.environ).wait_for_directive(4)
    raise {error}
"""


@pytest.mark.parametrize(("error", "counts"), [("NoGroupError('no')", True), ("ConnectionError('no')", False)])
async def test_a_worker_that_can_t_be_in_a_group_fails_whatever_it_was_told(
    tmp_path: Path, error: str, *, counts: bool
) -> None:
    """Another rank's end may be seen first, and lead to a generation without this one; its other errors follow then."""
    (tmp_path / "beside.py").write_text(ENDS_AS_IT_IS_TOLD_TO_LEAVE.format(error=error))
    async with supervisor_of(script_of("import beside\nbeside.main()", tmp_path)) as supervisor:
        await train(supervisor)
        await supervisor.execute(SendMessage(Leave(reason="the others continue without it", checkpoint=False)))
        await reaches(supervisor, "absent")
        assert supervisor.has_failure is counts
        failures = [update for update in supervisor.take_updates() if isinstance(update, WorkerFailure)]
        assert [failure.grouped for failure in failures] == [True] * counts
        assert not supervisor.has_failure


@pytest.mark.slow
async def test_a_script_may_turn_out_to_be_elastic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It counted as up in the generation that it was started for, and is in none before it has joined one."""
    monkeypatch.chdir(tmp_path)
    async with supervisor_of(indirect(tmp_path)) as supervisor:
        await train(supervisor)
        assert (
            supervisor.state.elastic,
            supervisor.state.phase,
            supervisor.state.assigned,
            supervisor.state.up,
        ) == (
            False,
            "member",
            4,
            4,
        )
        await supervisor.execute(StartStandby())
        (tmp_path / "call-init").touch()
        await reaches(supervisor, "starting")
        assert supervisor.state.elastic
        assert (supervisor.state.assigned, supervisor.state.up, supervisor.state.standby) == (
            4,
            0,
            "absent",
        )
        (tmp_path / "be-ready").touch()
        await reaches(supervisor, "ready")
        assert (supervisor.state.live, supervisor.state.seen) == (True, 3)
        assert "0 None\n" in capfd.readouterr().out

        await supervisor.execute(KillWorker("a test", planned=False))
        await reaches(supervisor, "absent")
        (failure,) = supervisor.take_updates()
        assert (failure.elastic, failure.was_up) == (True, False)
        await supervisor.execute(StartWorker())
        await reaches(supervisor, "loaded")  # at first the system may not know the command yet
        loads = psutil.Process(supervisor._worker.pid).cmdline()
        assert loads[loads.index("--load") + 1] == "paddle,edl_runtime.elastic.api"


async def test_a_script_that_has_not_called_init_fails_as_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as up in the generation that it was started for."""
    monkeypatch.chdir(tmp_path)
    async with supervisor_of(indirect(tmp_path)) as supervisor:
        await train(supervisor)
        await supervisor.execute(KillWorker("a test", planned=False))
        await reaches(supervisor, "absent")
        (failure,) = supervisor.take_updates()
        assert (failure.elastic, failure.was_up, failure.generation, failure.exit_code) == (
            False,
            True,
            4,
            -signal.SIGKILL,
        )


async def test_a_script_is_elastic_when_that_of_another_instance_is(tmp_path: Path) -> None:
    """It is then loaded and started as such; a second call does nothing."""
    async with supervisor_of(indirect(tmp_path)) as supervisor:
        supervisor.mark_elastic()
        supervisor.mark_elastic()
        assert (supervisor.state.elastic, supervisor.state.phase) == (True, "absent")
        await supervisor.execute(StartWorker())
        await supervisor.execute(RunScript())
        assert supervisor.state.phase == "starting"


WRITES = """
import os, time
from edl_runtime.elastic.comm.agent_protocol import InitCalled, WorkerReady, connect_to_agent

client = connect_to_agent(os.environ)
client.send(InitCalled())
client.send(WorkerReady(live=True))
while True:
    client.note_progress()
    time.sleep(0.01)
"""


UNSAVED = """
import os, pathlib, time
from edl_runtime.elastic.comm.agent_protocol import CheckpointDelayed, CheckpointSaved, connect_to_agent

client = connect_to_agent(os.environ)
client.send(CheckpointDelayed(step=9, reason="no space left in /kept", for_s=600.0))
while not pathlib.Path("room").exists():
    time.sleep(0.01)
client.send(CheckpointSaved(generation=1, step=9, epoch=0, url="/kept/9", took_s=0.1, created_at=1.0))
time.sleep(600)
"""


@pytest.mark.slow
async def test_why_a_checkpoint_is_not_written_is_known_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with supervisor_of(script_of(UNSAVED, tmp_path)) as supervisor:
        await supervisor.execute(StartWorker())
        await reaches(supervisor, "loaded")
        await supervisor.execute(RunScript())
        await eventually(lambda: supervisor.state.unsaved == "no space left in /kept")
        (tmp_path / "room").touch()
        await eventually(lambda: not supervisor.state.unsaved)


@pytest.mark.slow
async def test_a_worker_that_writes_its_checkpoint_is_not_late(tmp_path: Path) -> None:
    """The time to leave counts from the last piece that it has written."""
    async with supervisor_of(script_of(WRITES, tmp_path)) as supervisor:
        await supervisor.execute(StartWorker())
        await reaches(supervisor, "loaded")
        await supervisor.execute(RunScript())
        await reaches(supervisor, "ready")
        await supervisor.execute(SendMessage(Leave(reason="a test", checkpoint=True)))
        sent_at = supervisor.state.since
        await eventually(lambda: supervisor.state.since > sent_at)
        assert supervisor.state.phase == "leaving"


@pytest.mark.parametrize(("cause", "unwritten"), [("group", False), ("", True)])
async def test_one_that_could_not_form_a_group_had_no_checkpoint_to_write(
    tmp_path: Path, cause: FailureCause, *, unwritten: bool
) -> None:
    """It failed before it was told to leave, as another was lost by the same failure: it may train on without that."""
    async with supervisor_of(script_of("", tmp_path)) as supervisor:
        leaving = {"phase": "leaving", "elastic": True, "keeps": True, "up": 2, "assigned": 2}
        supervisor.state = msgspec.structs.replace(supervisor.state, **leaving)
        supervisor._writes = True
        supervisor._failure_report = ScriptFailed(reason="NCCL error(5)", final=True, cause=cause)
        supervisor._end(1)
        (failure,) = [update for update in supervisor._updates if isinstance(update, WorkerFailure)]
        assert failure.unwritten is unwritten
        assert failure.grouped is not unwritten
