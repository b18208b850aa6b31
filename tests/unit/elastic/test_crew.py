"""An instance's trainer and its standby: real processes, whose scripts do without Paddle."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from edl_runtime.elastic.crew import Crew
from edl_runtime.elastic.gears import Begin, Kill, Phase, Run
from edl_runtime.elastic.generation import Generation
from edl_runtime.elastic.script import Script, read_script

WITHIN_S = 20.0

ME = "0-me"
GENERATION = Generation(
    number=4,
    members=(ME,),
    store="127.0.0.1:7000",
    endpoints=("127.0.0.1:7001",),
    gear="warm",
    reason="",
    proposed_by=ME,
    proposed_at=0.0,
)


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
