"""Logs that the page follows: how a stream ends, fails, begins again, and what is kept of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from support.airflow.page import Api, submit
from support.airflow.world import World
from support.teachers.process import PATIENCE_S, wait_until

from edl_airflow.plugin import app, clients, downloads, log_tail
from edl_airflow.plugin.clients import Clients
from edl_airflow.plugin.log_tail import LogFollower, LogFollowers, whole_log
from edl_airflow.plugin.runs import run_of
from edl_runtime.backends.interface import LogLine
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.errors import BackendError

LINES = "import time; print(*map(str, range({count})), sep=chr(10), flush=True); time.sleep(600)"


def writes(count: int) -> tuple[str, ...]:
    return ("python", "-c", LINES.format(count=count))


async def follower_of(followers: LogFollowers, opened: Clients, job: str) -> LogFollower:
    digest = await opened.digest("edl_default")
    async with opened.open(digest) as client:
        return followers.follower(digest, await run_of(client, job))


async def read_until(follower: LogFollower, text: str) -> None:
    while all(line.text != text for line in (await follower.read("")).lines):
        await asyncio.wait([follower.task], timeout=0.05)


@pytest.mark.usefixtures("api")
def test_a_stream_that_nobody_reads_ends_without_another_request(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does its client, with its sockets; the lines are kept no more."""
    monkeypatch.setattr(clients, "IDLE_S", 0.1)
    submit(world, "night", words=writes(3))

    async def follow() -> None:
        opened = Clients()
        followers = LogFollowers(opened)
        follower = await follower_of(followers, opened, "night")
        await read_until(follower, "2")
        monkeypatch.setattr(log_tail, "IDLE_S", 0.5)
        await follower.read("")  # from when on nobody does
        before = asyncio.all_tasks() - {asyncio.current_task()}
        assert len(followers) == 1
        await asyncio.wait(before)
        assert len(followers) == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(follow())


def test_after_a_failure_no_line_is_shown_twice(world: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new stream begins with the last lines again, so they replace those that were shown."""
    submit(world, "night", words=writes(3))
    shown: list[str] = []
    cursor = ""

    def read() -> list[str]:
        nonlocal cursor
        part = api.get(f"log?job=night&cursor={cursor}")
        if part["reset"]:
            shown.clear()
        shown.extend(line["text"] for line in part["lines"])
        cursor = part["cursor"]
        return shown

    breaks = asyncio.Event()
    streams: list[Any] = []
    taken: list[str] = []
    logs = LocalBackend.logs

    async def breaking(self: LocalBackend, name: str, **given: Any) -> AsyncGenerator[LogLine, None]:
        streams.append(self)
        async with aclosing(logs(self, name, **given)) as lines:
            async for line in lines:
                yield line
                taken.append(line.text)
                if line.text == "2" and len(streams) == 1:
                    await breaks.wait()
                    raise BackendError("the connection broke off")

    monkeypatch.setattr(LocalBackend, "logs", breaking)
    wait_until(lambda: read() == ["0", "1", "2"])
    breaks.set()
    wait_until(lambda: read() and taken.count("2") == 2)
    assert read() == ["0", "1", "2"]


def test_a_log_that_has_ended_is_not_read_again(world: World, api: Api) -> None:
    """While its job is there, its cursor holds."""
    submit(world, "night", words=("python", "-c", "print('all')"))
    wait_until(lambda: api.get("log?job=night")["ended"])
    part = api.get("log?job=night")
    assert [line["text"] for line in part["lines"]] == ["all"]
    again = api.get(f"log?job=night&cursor={part['cursor']}")
    assert (again["reset"], again["lines"], again["ended"]) == (False, [], True)


@pytest.mark.usefixtures("api")
def test_all_logs_together_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest loses its oldest lines."""
    submit(world, "long", words=writes(200))
    submit(world, "short", words=writes(20))
    a_line = log_tail.BYTES_BESIDE + 60
    monkeypatch.setattr(log_tail, "MOST_BYTES_OF_ALL", 100 * a_line)

    async def kept() -> list[list[str]]:
        opened = Clients()
        followers = LogFollowers(opened)
        both = [await follower_of(followers, opened, job) for job in ("short", "long")]
        await read_until(both[0], "19")
        await read_until(both[1], "199")
        assert sum(follower.buffer.bytes for follower in both) <= 100 * a_line
        return [[line.text for line in (await follower.read("")).lines] for follower in both]

    short, longest = asyncio.run(kept())
    assert short == [str(number) for number in range(20)]
    assert longest == [str(number) for number in range(200 - len(longest), 200)]
    assert 70 < len(longest) < 90


@pytest.mark.usefixtures("api")
def test_a_log_is_downloaded_in_chunks(world: World) -> None:
    """Not a line at a time; nothing is lost between two."""
    submit(world, "night", words=("python", "-c", LINES.format(count=30_000).replace("time.sleep(600)", "")))

    async def download() -> list[bytes]:
        opened = Clients()
        async with opened.open(await opened.digest("edl_default")) as client:
            run = await run_of(client, "night")
            return [chunk async for chunk in whole_log(client, run, instance=None, text="")]

    wait_until(lambda: world.jobs()["night"] == "succeeded")
    chunks = asyncio.run(download())
    assert b"".join(chunks).decode().splitlines() == [f"[0] {number}" for number in range(30_000)]
    assert len(chunks) < 10


@pytest.mark.parametrize(("bound", "of_another"), [("MOST_DOWNLOADS", 503), ("MOST_DOWNLOADS_OF_USER", 200)])
def test_downloads_beyond_a_few_are_told_to_wait(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch, bound: str, of_another: int
) -> None:
    """And one that has no log has a status, not a file that breaks off; each that ends makes room."""
    monkeypatch.setattr(app, bound, 1)
    submit(world, "night", words=writes(3))
    wait_until(lambda: api.get("log?job=night")["lines"])
    for _ in range(2):
        assert api.ask("/api/log/download?job=night").text == "[0] 0\n[0] 1\n[0] 2\n"
        assert api.ask("/api/log/download?job=nobody").status_code == 403
    logs, asked = LocalBackend.logs, []

    async def asks_too(self: LocalBackend, name: str, **given: Any) -> AsyncGenerator[LogLine, None]:
        async for line in logs(self, name, **given):
            if not asked:
                asked.append(None)
                asked.extend([await api._ask("/api/log/download?job=night", role, "GET") for role in ("viewer", "op")])
            yield line

    monkeypatch.setattr(LocalBackend, "logs", asks_too)
    assert api.ask("/api/log/download?job=night").status_code == 200
    assert [answer.status_code for answer in asked[1:]] == [503, of_another]
    assert "Try again" in json.loads(asked[1].text)["error"]


def test_a_client_that_reads_nothing_keeps_no_place(world: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file ends with a line that says why, should it ever read it; others download meanwhile."""
    monkeypatch.setattr(app, "MOST_DOWNLOADS", 1)
    monkeypatch.setattr(downloads, "PAUSE_S", 0.2)
    submit(world, "night", words=("python", "-c", LINES.format(count=60_000).replace("time.sleep(600)", "")))
    wait_until(lambda: world.jobs()["night"] == "succeeded")
    reads, is_sent = asyncio.Event(), asyncio.Event()
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        """As a server whose buffers are full."""
        if body := message.get("body"):
            sent.append(body)
            is_sent.set()
            await reads.wait()

    async def meet() -> None:
        slow = asyncio.create_task(api.connect("/api/log/download", b"job=night", send))
        await is_sent.wait()
        status = 503
        async with asyncio.timeout(PATIENCE_S):
            while status == 503:
                status = (await api._ask("/api/log/download?job=night", "op", "GET")).status_code
        assert status == 200
        reads.set()
        await slow

    api._runner.run(meet())
    *lines, last = b"".join(sent).decode().splitlines(keepends=True)
    assert last == downloads.BREAKS_OFF
    assert lines[:2] == ["[0] 0\n", "[0] 1\n"]
    assert len(lines) < 60_000
