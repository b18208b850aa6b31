"""An instance's trainer and its standby: real processes, whose scripts do without Paddle."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from support.elastic.generations import generation

from edl_runtime.elastic.crew import Crew
from edl_runtime.elastic.gears import Begin, Kill, Phase, Run, Spare, Tell, Terminate
from edl_runtime.elastic.messages import Leave
from edl_runtime.elastic.script import Script, read_script

WITHIN_S = 100.0
"""Some import Paddle, which takes the processor for seconds."""

ME = "0-me"
GENERATION = generation(4, [ME], store="127.0.0.1:7000", endpoints=("127.0.0.1:7001",), gear="warm")

BESIDE = """
import os, pathlib, time
from edl_runtime.elastic.link import connect
from edl_runtime.elastic.messages import Elastic, Ready

def await_file(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)

def main():
    await_file("call-init")
    before = os.environ["RANK"]
    link = connect(os.environ)
    print(before, os.environ.get("RANK"), flush=True)
    link.say(Elastic())
    await_file("be-ready")
    link.say(Ready(live=True, seen=3))
    time.sleep(600)
"""
"""What a script does that calls `elastic.init` and `run.wrap` in a module of its own."""


@asynccontextmanager
async def crew_of(script: Script) -> AsyncIterator[Crew]:
    """Yield a crew without processes; those that it has then are ended with the block."""
    async with asyncio.TaskGroup() as tasks:
        crew = Crew(script, ME, os.environ, "gloo", tasks=tasks, heard=lambda _: None)
        try:
            yield crew
        finally:
            crew.dismiss()


async def eventually(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


async def comes_to(crew: Crew, phase: Phase) -> None:
    await eventually(lambda: crew.mine.phase == phase)


async def train(crew: Crew) -> None:
    """Begin a trainer and run its script, as one that knows nothing of generations."""
    await crew.carry_out(Begin())
    await comes_to(crew, "loaded")
    await crew.carry_out(Run(GENERATION))


def script_of(source: str, folder: Path) -> Script:
    script = folder / "train.py"
    script.write_text(source)
    return read_script([str(script)])


def indirect(folder: Path) -> Script:
    """Return a script that is elastic, though nothing in its own file says so."""
    (folder / "beside.py").write_text(BESIDE)
    return script_of("import beside\nbeside.main()", folder)


async def test_a_trainer_that_computes_uses_processor_time(tmp_path: Path) -> None:
    """Without a trainer there is none to use it."""
    async with crew_of(script_of("while True:\n    pass", tmp_path)) as crew:
        assert crew.cpu_s == 0.0
        await train(crew)
        before_s = crew.cpu_s
        await eventually(lambda: crew.cpu_s > before_s + 0.1)
        await crew.carry_out(Kill("it has computed enough"))
        await comes_to(crew, "absent")
        assert crew.cpu_s == 0.0


HEEDS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path("saved").touch()))
pathlib.Path("begun").touch()
time.sleep(600)
"""


async def test_a_plain_script_may_save_before_its_generation_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked to end by SIGTERM, as any program knows it."""
    monkeypatch.chdir(tmp_path)
    async with crew_of(script_of(HEEDS, tmp_path)) as crew:
        await train(crew)
        await eventually((tmp_path / "begun").exists)
        await crew.carry_out(Terminate())
        assert crew.mine.phase == "leaving"
        await comes_to(crew, "absent")
        assert (tmp_path / "saved").exists()


@pytest.mark.slow
async def test_a_script_may_turn_out_to_join_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was taken for up in the generation that it was started for, and is in none before it has joined one."""
    monkeypatch.chdir(tmp_path)
    async with crew_of(indirect(tmp_path)) as crew:
        await train(crew)
        assert (crew.elastic, crew.mine.phase, crew.mine.told, crew.mine.up) == (False, "member", 4, 4)
        await crew.carry_out(Spare())
        (tmp_path / "call-init").touch()
        await comes_to(crew, "starting")
        assert crew.elastic
        assert (crew.mine.told, crew.mine.up, crew.mine.spare) == (4, 0, "absent")
        (tmp_path / "be-ready").touch()
        await comes_to(crew, "ready")
        assert (crew.live, crew.seen) == (True, 3)
        assert "0 None\n" in capfd.readouterr().out

        await crew.carry_out(Kill("a test", planned=False))
        await comes_to(crew, "absent")
        (fall,) = crew.take_falls()
        assert (fall.elastic, fall.was_up) == (True, False)
        await crew.carry_out(Begin())
        await comes_to(crew, "loaded")  # at first the system may not know the command yet
        loads = psutil.Process(crew.pid).cmdline()
        assert loads[loads.index("--load") + 1] == "paddle,edl_runtime.elastic.run"


async def test_a_script_that_has_not_said_so_yet_falls_as_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as up in the generation that it was started for."""
    monkeypatch.chdir(tmp_path)
    async with crew_of(indirect(tmp_path)) as crew:
        await train(crew)
        await crew.carry_out(Kill("a test", planned=False))
        await comes_to(crew, "absent")
        (fall,) = crew.take_falls()
        assert (fall.elastic, fall.was_up, fall.generation, fall.exit_code) == (False, True, 4, -signal.SIGKILL)


async def test_a_script_is_elastic_when_that_of_another_instance_is(tmp_path: Path) -> None:
    """Before it has begun it loads and starts as such; nothing is done twice."""
    async with crew_of(indirect(tmp_path)) as crew:
        crew.take_for_elastic()
        crew.take_for_elastic()
        assert (crew.elastic, crew.mine.phase) == (True, "absent")
        await crew.carry_out(Begin())
        await crew.carry_out(Run())
        assert crew.mine.phase == "starting"


WRITES = """
import os, time
from edl_runtime.elastic.link import connect
from edl_runtime.elastic.messages import Elastic, Ready

link = connect(os.environ)
link.say(Elastic())
link.say(Ready(live=True))
while True:
    link.moved()
    time.sleep(0.01)
"""


@pytest.mark.slow
async def test_a_trainer_that_writes_its_checkpoint_is_not_late(tmp_path: Path) -> None:
    """How long it takes to leave counts from the last part that it has written."""
    async with crew_of(script_of(WRITES, tmp_path)) as crew:
        await crew.carry_out(Begin())
        await comes_to(crew, "loaded")
        await crew.carry_out(Run())
        await comes_to(crew, "ready")
        await crew.carry_out(Tell(Leave(reason="a test", checkpoint=True)))
        told_at = crew.mine.since
        await eventually(lambda: crew.mine.since > told_at)
        assert crew.mine.phase == "leaving"
