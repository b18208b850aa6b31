"""Reading the logs of instances."""

from __future__ import annotations

import asyncio

import pytest
from support.backends.jobs import WAITS, WITHIN_S, ended, job, lines

from edl_runtime.backends.interface import Backend

COUNTS = "import os\nfor n in range(5): print(os.environ['EDL_INSTANCE'], n)"


async def test_logs_of_all_instances_or_of_one_are_returned(backend: Backend) -> None:
    """Each line comes with its instance, in the order it was written; a tail is the end of each log."""
    await backend.submit(job(COUNTS, kind="trainer", instances=2), token="mine", secrets={})
    await ended(backend)
    everything = await lines(backend)
    assert sorted(everything) == [(index, f"{index} {n}") for index in range(2) for n in range(5)]
    assert await lines(backend, instance=1) == [(1, f"1 {n}") for n in range(5)]
    assert sorted(await lines(backend, tail=2)) == [(0, "0 3"), (0, "0 4"), (1, "1 3"), (1, "1 4")]
    assert len(await lines(backend, tail=100)) == 10
    assert await lines(backend, tail=0) == []


async def test_logs_contain_standard_error_and_invalid_utf_8(backend: Backend) -> None:
    """No line is lost or raises an error, a last line without a newline included.

    What goes to standard error may come before or after what goes to standard output.
    """
    code = "import os; os.write(2, b'an error\\n'); os.write(1, b'\\xff broken\\n'); os.write(1, b'unfinished')"
    await backend.submit(job(code, kind="trainer"), token="mine", secrets={})
    await ended(backend)
    written = [(0, "an error"), (0, "unfinished"), (0, "\N{REPLACEMENT CHARACTER} broken")]
    assert sorted(await lines(backend)) == written


@pytest.mark.on_pods
async def test_following_a_log_shows_later_instances_and_ends_with_the_job(backend: Backend) -> None:
    """The stream contains lines of an instance that was added by a resize, and ends when the job is deleted."""
    await backend.submit(job(WAITS), token="mine", secrets={})
    seen: list[tuple[int, str]] = []
    later = asyncio.Event()

    async def follow() -> None:
        async for line in backend.logs("job", follow=True):
            seen.append((line.instance, line.text))
            if line.instance == 1:
                later.set()
            elif len(seen) == 1:
                await backend.resize("job", 2)

    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
        group.create_task(follow())
        await later.wait()
        await backend.delete("job")
    assert seen == [(0, "up"), (1, "up")]


@pytest.mark.on_pods
async def test_logs_of_an_ended_job_are_kept_when_it_is_deleted(backend: Backend) -> None:
    """Of all its instances, also when it is deleted at once."""
    await backend.submit(job(COUNTS, kind="trainer", instances=3), token="mine", secrets={})
    await ended(backend)
    await backend.delete("job")
    assert await lines(backend) == [(index, f"{index} {n}") for index in range(3) for n in range(5)]
