"""`edl events`, as a person runs it."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner, Result

from edl_runtime.cli.events import events
from edl_runtime.elastic.events import Event
from edl_runtime.elastic.membership import Membership
from edl_runtime.errors import SpecError
from edl_runtime.store.client import connect

TOLD = [
    Event(kind="forming", generation=3, gear="live", members=(0, 2), reason="instance 1 was told to leave"),
    Event(kind="resumed", generation=3, members=(0, 2), pause_s=0.4321, total_s=0.8),
    Event(kind="saved", generation=3, step=120, epoch=2, url="s3://b/run", metrics={"loss": 0.25}),
    Event(kind="ended", generation=3, outcome="done"),
]


@pytest.fixture
def environ(redis_url: str, namespace: str) -> dict[str, str]:
    """Where a job named digits has told its events."""

    async def tell() -> None:
        async with connect(redis_url) as client:
            membership = Membership(client, namespace, "digits")
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


def test_programs_get_a_json_object_a_line(environ: dict[str, str]) -> None:
    """With all that there is, and nothing that there is not."""
    said = [json.loads(line) for line in run(environ, "digits", "--json").stdout.splitlines()]
    assert [each["kind"] for each in said] == ["forming", "resumed", "saved", "ended"]
    assert said[1].keys() == {"kind", "id", "at", "generation", "members", "pause_s", "total_s"}


def test_a_job_without_events_is_told_of(environ: dict[str, str]) -> None:
    """Its name may be wrong, or it was too long ago."""
    result = run(environ, "letters")
    assert (result.stdout, result.exit_code) == ("", 0)
    assert "'letters'" in result.stderr


def test_it_takes_a_redis() -> None:
    """Events are nowhere else."""
    with pytest.raises(SpecError, match="EDL_REDIS_URL"):
        run({"EDL_REDIS_URL": ""}, "digits")
