"""`edl events`, as a person runs it, and what an agent tells there of its trainer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edl_runtime.checkpoint import checkpoint_events
from edl_runtime.cli.events import events
from edl_runtime.elastic.agent.reporter import StatusReporter
from edl_runtime.elastic.comm.agent_protocol import CheckpointDelayed, CheckpointSaved
from edl_runtime.elastic.rendezvous.generation import TrainerMember
from edl_runtime.elastic.rendezvous.redis_store import Event, RendezvousStore, follow_events, read_events
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect

TOLD = [
    Event(kind="forming", generation=3, gear="live", members=(0, 2), reason="instance 1 was told to leave"),
    Event(kind="resumed", generation=3, members=(0, 2), pause_s=0.4321, total_s=0.8),
    Event(kind="saved", generation=3, step=120, epoch=2, url="s3://b/run", metrics={"loss": 0.25}),
    Event(kind="ended", generation=3, outcome="done"),
]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that nobody is in is given up soon, and looked at often."""
    monkeypatch.setattr("edl_runtime.cli.events.DESERTED_S", 0.1)
    monkeypatch.setattr("edl_runtime.elastic.rendezvous.redis_store.BLOCK_S", 0.02)
    monkeypatch.setattr("edl_runtime.elastic.rendezvous.group_status.SILENT_S", 0.1)


@pytest.fixture
def environ(redis_url: str, namespace: str) -> dict[str, str]:
    """Where a job named digits has told its events."""

    async def tell() -> None:
        async with connect(redis_url) as client:
            membership = RendezvousStore(client, namespace, "digits")
            for event in TOLD:
                await membership.announce(event)

    asyncio.run(tell())
    return {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace}


def run(environ: dict[str, str], *args: str) -> Result:
    return CliRunner().invoke(events, args, env=environ, catch_exceptions=False)


def test_each_event_has_a_line(environ: dict[str, str]) -> None:
    """With its time, generation and kind, and then what it has to tell."""
    said = run(environ, "digits").stdout.splitlines()
    assert [line.split(maxsplit=2)[2:] for line in said] == [
        ["forming     instances 0 2 · live · instance 1 was told to leave"],
        ["resumed     instances 0 2 · pause 0.43 s · total 0.80 s"],
        ["saved       step 120 · epoch 2 · loss 0.25 · s3://b/run"],
        ["ended       done"],
    ]
    assert {line.split()[1] for line in said} == {"3"}


def test_following_ends_with_the_job(environ: dict[str, str]) -> None:
    """What has been so far comes first."""
    assert len(run(environ, "digits", "--follow").stdout.splitlines()) == len(TOLD)


def test_following_goes_on_with_a_job_that_runs_anew(environ: dict[str, str], redis_url: str, namespace: str) -> None:
    """That an earlier run of that name has ended is none of its end."""

    async def run_anew() -> None:
        async with connect(redis_url) as client:
            await RendezvousStore(client, namespace, "digits").heartbeat(TrainerMember(id="0-a", index=0))

    asyncio.run(run_anew())
    result = run(environ, "digits", "--follow")
    assert "registered  instance 0" in result.stdout
    assert "it has not ended" in result.stderr


def test_following_ends_when_nobody_is_there_any_more(redis_url: str, namespace: str) -> None:
    """The job was stopped, or its instances are dead, and no event says that it has ended."""

    async def register(*, leave: bool) -> None:
        async with connect(redis_url) as client:
            membership = RendezvousStore(client, namespace, "digits")
            await membership.heartbeat(TrainerMember(id="0-a", index=0))
            if leave:
                await membership.leave()

    for leave in (True, False):
        asyncio.run(register(leave=leave))
        result = run({"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace}, "digits", "--follow")
        assert "registered  instance 0" in result.stdout
        assert result.stderr == "edl: no trainers of 'digits' are registered, and it has not ended\n"


async def test_following_goes_on_while_somebody_is_there(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long nothing happens: an agent that has beaten lately is enough."""
    monkeypatch.setattr("edl_runtime.elastic.rendezvous.group_status.SILENT_S", 60.0)
    async with connect(redis_url) as client:
        membership = RendezvousStore(client, namespace, "digits")
        await membership.heartbeat(TrainerMember(id="0-a", index=0))
        following = follow_events(client, namespace, "digits", deserted_s=0.05)
        assert (await anext(following)).kind == "registered"
        coming = asyncio.ensure_future(anext(following))
        assert await asyncio.wait([coming], timeout=0.5) == (set(), {coming})
        await membership.leave()
        assert (await coming).kind == "left"
        with pytest.raises(StopAsyncIteration):
            await anext(following)


def test_following_an_unknown_job_reports_that_and_ends(redis_url: str, namespace: str) -> None:
    """Its name may be wrong, or it begins soon."""
    result = run({"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace}, "digit", "--follow")
    assert result.stderr.splitlines() == [
        "edl: no events of 'digit' within the last day; waiting 0.1 s for a job of that name",
        "edl: no trainers of 'digit' are registered, and it has not ended",
    ]


def test_programs_get_a_json_object_a_line(environ: dict[str, str]) -> None:
    """With all that there is, and nothing that there is not."""
    said = [json.loads(line) for line in run(environ, "digits", "--json").stdout.splitlines()]
    assert [each["kind"] for each in said] == ["forming", "resumed", "saved", "ended"]
    assert said[1].keys() == {"kind", "id", "at", "generation", "members", "pause_s", "total_s"}


def test_a_job_without_events_is_reported(environ: dict[str, str]) -> None:
    """Its name may be wrong, or it was too long ago."""
    result = run(environ, "letters")
    assert (result.stdout, result.exit_code) == ("", 0)
    assert "'letters'" in result.stderr


def test_without_a_redis_there_are_no_events() -> None:
    """Events are nowhere else."""
    with pytest.raises(SpecError, match="EDL_REDIS_URL"):
        run({"EDL_REDIS_URL": ""}, "digits")


def saved(step: int) -> CheckpointSaved:
    return CheckpointSaved(generation=1, step=step, epoch=0, url=f"/c/{step}", took_s=0.1, created_at=100.0 + step)


def without_answers(tell: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[None]]:
    """Return `tell`, each of whose first two calls is carried out, but nobody hears of it."""
    calls = 0

    async def unheard(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        await tell(*arguments)
        if calls <= 2:
            raise RegistryUnavailableError("127.0.0.1:1", "no answer")

    return unheard


async def test_the_last_words_are_told_once_though_others_are_being_told(redis_url: str, namespace: str) -> None:
    """An agent's end does not wait for who tells all the time."""
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, job="digits")
    async with connect(redis_url) as client:
        telling = StatusReporter(client, settings, RendezvousStore(client, namespace, "digits"))
        for step in range(20):
            telling.report(saved(step))
        await asyncio.gather(*(telling.finish() for _ in range(3)))
        assert [event.step for event in await read_events(client, namespace, "digits")] == list(range(20))
        assert [
            one and one.step for _, one in await checkpoint_events.after(client, namespace, "digits", block_ms=0)
        ] == list(range(20))


async def test_who_holds_the_last_weights_says_which_landed_before(redis_url: str, namespace: str) -> None:
    """What the job's next run would go on from, if these were lost."""
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, job="digits", instance=3)
    waits = CheckpointDelayed(step=9, reason="no answer", for_s=600.0)
    async with connect(redis_url) as client:
        telling = StatusReporter(client, settings, RendezvousStore(client, namespace, "digits"))
        for word in (waits, saved(7), waits):
            telling.report(word)
        await telling.finish()
        first, _, second = await read_events(client, namespace, "digits")
    keeps = "the last checkpoint can't be written: no answer; this instance keeps the weights of step 9 and tries again"
    assert (first.kind, first.instance) == ("note", 3)
    assert first.reason == f"{keeps} for 600 s; there is no checkpoint"
    assert second.reason == f"{keeps} for 600 s; the last checkpoint is of step 7, {saved(7).url}"


async def test_a_checkpoint_is_told_once_and_as_of_when_it_was_complete(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is an event, and may start a run of a DAG: whoever got no answer looks before it says so again."""
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, job="digits")
    async with connect(redis_url) as client:
        membership = RendezvousStore(client, namespace, "digits")
        monkeypatch.setattr(membership, "announce", without_answers(membership.announce))
        monkeypatch.setattr(checkpoint_events, "publish", without_answers(checkpoint_events.publish))
        telling = StatusReporter(client, settings, membership)
        for step in (1, 2):
            telling.report(saved(step))
        for _ in range(10):
            await telling.finish()
        assert [event.step for event in await read_events(client, namespace, "digits")] == [1, 2]
        told = [one for _, one in await checkpoint_events.after(client, namespace, "digits", block_ms=0) if one]
        assert [(one.step, one.at) for one in told] == [(1, 101.0), (2, 102.0)]
