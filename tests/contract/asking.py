"""What the contract's tests ask backends for, and how they wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from edl_runtime.backends.base import Backend, JobStatus
from edl_runtime.specs import Bounds, JobKind, JobSpec

WAITS = "import time; print('up'); time.sleep(600)"
"""A program that says that it is up and goes with the first SIGTERM."""

SAYS_GOODBYE = """
import signal, sys, time
def leave(*_):
    time.sleep(0.2)
    print("goodbye")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up")
time.sleep(600)
"""
"""A program that needs a moment to leave."""

IGNORES_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
"""A program that has to be killed."""


def breaks(instance: str, exit_code: int) -> str:
    """Return the head of a program that says what is missing and ends at once when it is that instance."""
    return f"""
import os, sys
if os.environ["EDL_INSTANCE"] == {instance!r}:
    print("no such model")
    sys.exit({exit_code})
"""


WITHIN_S = 30.0
"""Longest wait for anything that has to happen."""


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


async def eventually(look: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until `look` finds it so."""
    try:
        async with asyncio.timeout(WITHIN_S):
            while not await look():  # noqa: ASYNC110 - another process makes it so
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {WITHIN_S:.0f} s") from None


async def reach(backend: Backend, name: str, so: Callable[[JobStatus], bool]) -> JobStatus:
    """Return the first status of the job that is `so`."""
    status = await backend.get(name)

    async def look() -> bool:
        nonlocal status
        status = await backend.get(name)
        return so(status)

    await eventually(look, f"status of {name!r}, last seen as {status}")
    return status


async def ended(backend: Backend, name: str = "job") -> JobStatus:
    return await reach(backend, name, lambda status: status.phase != "running")


async def lines(
    backend: Backend, name: str = "job", *, instance: int | None = None, tail: int | None = None
) -> list[tuple[int, str]]:
    return [(line.instance, line.text) async for line in backend.logs(name, instance=instance, tail=tail)]


async def says(backend: Backend, text: str, *, name: str = "job", instances: int = 1) -> None:
    """Wait until that many instances have written `text`."""

    async def look() -> bool:
        return len({index for index, line in await lines(backend, name) if line == text}) >= instances

    await eventually(look, f"{text!r} in the logs of {instances} of {name!r}")
