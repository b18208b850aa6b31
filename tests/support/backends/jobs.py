"""Jobs that the tests of backends submit, and helpers that wait for their states and logs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from edl_runtime.backends.interface import Backend, JobStatus
from edl_runtime.specs import Bounds, JobKind, JobSpec

WAITS = "import time; print('up'); time.sleep(600)"
"""A program that prints "up" and ends at the first SIGTERM."""

EXITS_GRACEFULLY = """
import signal, sys, time
def leave(*_):
    time.sleep(0.2)
    print("goodbye")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up")
time.sleep(600)
"""
"""A program that prints "goodbye" at SIGTERM and ends a moment later; GRACE_S is enough for it on a busy machine."""

GRACE_S = 60.0

IGNORES_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
"""A program that only SIGKILL ends."""


def exits_without_slot(folder: Path, message: str = "no such model") -> str:
    """Return the start of a program that exits with 78 unless it finds a slot in `folder`; see `add_slots`."""
    return f"""
import os, pathlib, sys, time
for slot in pathlib.Path({str(folder)!r}).glob("free-*"):
    try:
        slot.rename(slot.with_name(f"taken-{{slot.name}}"))
        break
    except FileNotFoundError:
        continue
else:
    print({message!r})
    sys.exit(78)
"""


def add_slots(folder: Path, count: int) -> None:
    """Let `count` more programs find a slot."""
    for number in range(count):
        (folder / f"free-{time.monotonic_ns()}-{number}").touch()


def exits_at(instance: str, exit_code: int) -> str:
    """Return the first lines of a program that prints an error and exits when it runs as this instance."""
    return f"""
import os, sys
if os.environ["EDL_INSTANCE"] == {instance!r}:
    print("no such model")
    sys.exit({exit_code})
"""


WITHIN_S = 200.0
"""Longest wait for an expected state."""


def job(
    code: str,
    *,
    name: str = "job",
    kind: JobKind = "pool",
    instances: int = 1,
    elastic: bool = False,
    env: Mapping[str, str] | None = None,
    grace_s: float = 5.0,
) -> JobSpec:
    """Return the spec of a job of up to four instances that run `code`."""
    return JobSpec(
        name=name,
        kind=kind,
        command=("python", "-c", code),
        bounds=Bounds(1, 4),
        instances=instances,
        elastic=elastic,
        env=dict(env or {}),
        grace_s=grace_s,
    )


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, within_s: float = WITHIN_S) -> None:
    """Wait until `condition` is true. Raises AssertionError that names `what` after `within_s`."""
    try:
        async with asyncio.timeout(within_s):
            while not await condition():  # noqa: ASYNC110 - another process makes it so
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {within_s:.0f} s") from None


async def reach(
    backend: Backend, name: str, condition: Callable[[JobStatus], bool], within_s: float = WITHIN_S
) -> JobStatus:
    """Return the first status of the job that meets the condition."""
    status = await backend.get(name)

    async def look() -> bool:
        nonlocal status
        status = await backend.get(name)
        return condition(status)

    await eventually(look, f"status of {name!r}, last seen as {status}", within_s)
    return status


async def ended(backend: Backend, name: str = "job", within_s: float = WITHIN_S) -> JobStatus:
    return await reach(backend, name, lambda status: status.has_ended, within_s)


async def lines(
    backend: Backend, name: str = "job", *, instance: int | None = None, tail: int | None = None
) -> list[tuple[int, str]]:
    return [(line.instance, line.text) async for line in backend.logs(name, instance=instance, tail=tail)]


@asynccontextmanager
async def followed(backend: Backend, name: str = "job") -> AsyncIterator[list[tuple[int, str]]]:
    """Follow the job's log in the block: a list that grows with it, sorted by instance."""
    seen: list[tuple[int, str]] = []
    first = asyncio.Event()

    async def follow() -> None:
        async for line in backend.logs(name, follow=True):
            seen.append((line.instance, line.text))
            seen.sort(key=lambda each: each[0])
            first.set()

    task = asyncio.create_task(follow())
    try:
        async with asyncio.timeout(WITHIN_S):
            await first.wait()
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def wait_for_line(backend: Backend, text: str, *, name: str = "job", instances: int = 1) -> None:
    """Wait until `instances` instances have written the line `text`."""

    async def look() -> bool:
        return len({index for index, line in await lines(backend, name) if line == text}) >= instances

    await eventually(look, f"{text!r} in the logs of {instances} of {name!r}")
