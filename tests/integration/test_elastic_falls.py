"""Trainers that fall: when they are replaced, and when that is the end of the job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
import pytest

from edl_runtime.elastic.falls import Fall, Verdict, judge
from edl_runtime.elastic.messages import Failed
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.client import connect

if TYPE_CHECKING:
    from redis.asyncio import Redis

ERROR = Fall(
    exit_code=1,
    said=Failed(reason="ValueError: no", final=False),
    killed="",
    elastic=True,
    generation=0,
    was_up=True,
    lived_s=5.0,
)


def fall(**changes: object) -> Fall:
    return msgspec.structs.replace(ERROR, **changes)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    async with connect(redis_url) as client:
        yield client


@pytest.fixture
def settings(namespace: str) -> RuntimeSettings:
    return RuntimeSettings(namespace=namespace, job="training", run="one", instance=2)


async def verdicts(client: Redis, settings: RuntimeSettings, falls: list[tuple[Fall, int]]) -> list[str]:
    """Return what becomes of the job by each of these falls, each at a step: "" for nothing."""
    judged = [await judge(client, settings, each, step=step, stepped=True) for each, step in falls]
    return [verdict.reason if verdict else "" for verdict in judged]


async def test_three_are_replaced_without_progress(client: Redis, settings: RuntimeSettings) -> None:
    """The fourth is one too many; a later step than any before begins a new count, and so does another run."""
    told = "instance 2: ValueError: no; no progress since 3 others were replaced"
    assert await verdicts(client, settings, [(fall(), 100)] * 4) == ["", "", "", told]
    assert await verdicts(client, settings, [(fall(), 101), (fall(), 50), (fall(), 101), (fall(), 101)]) == [
        *[""] * 3,
        told,
    ]
    anew = RuntimeSettings(namespace=settings.namespace, job="training", run="two", instance=2)
    assert await verdicts(client, anew, [(fall(), 50)]) == [""]


async def test_falls_of_several_in_one_generation_are_one(client: Redis, settings: RuntimeSettings) -> None:
    """When a rank of a plain script ends, the others do because of it; and all may be killed before they are in one."""

    async def of_all(generation: int) -> list[str]:
        return [
            reason
            for instance in range(10)
            for reason in await verdicts(
                client, msgspec.structs.replace(settings, instance=instance), [(fall(generation=generation), 9)]
            )
        ]

    for generation in (0, 7, 8):
        assert await of_all(generation) == [""] * 10
    assert all(await of_all(9))


async def test_one_that_never_gets_into_a_generation_is_replaced_no_longer(
    client: Redis, settings: RuntimeSettings
) -> None:
    """Its instance has been told of none since the first fell."""
    assert await verdicts(client, settings, [(fall(generation=7), 9)] * 3) == [""] * 3
    assert (await verdicts(client, settings, [(fall(generation=7), 9)]))[0]


async def test_a_plain_script_that_ran_for_long_has_come_on(client: Redis, settings: RuntimeSettings) -> None:
    """It does not tell of its steps."""
    long_lived = fall(elastic=False, exit_code=-9, lived_s=61.0)
    assert await verdicts(client, settings, [(long_lived, 0)] * 8) == [""] * 8


@pytest.mark.parametrize(
    ("changes", "stepped", "reason", "status"),
    [
        ({"said": Failed(reason="lr: got -1", final=True)}, True, "lr: got -1", 78),
        ({}, False, "ValueError: no", 1),
        ({"said": None, "exit_code": 0}, True, "its script ended before it had gone through all of its data", 1),
    ],
)
async def test_some_falls_are_the_end_at_once(
    client: Redis, settings: RuntimeSettings, changes: dict[str, object], reason: str, status: int, *, stepped: bool
) -> None:
    """Wrong input, an error before anybody did a step, and a rank that goes early: no other would fare better."""
    verdict = await judge(client, settings, fall(**changes), step=0, stepped=stepped)
    assert isinstance(verdict, Verdict)
    assert verdict.reason.startswith(f"instance 2: {reason}")
    assert verdict.status == status


async def test_without_redis_a_trainer_is_replaced(settings: RuntimeSettings) -> None:
    """Nobody can tell how many there were; nothing is ended for that."""
    async with connect("redis://127.0.0.1:1/0") as nobody:
        assert await judge(nobody, settings, fall(exit_code=-9), step=1, stepped=True) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"killed": "it hangs"}, "its trainer was killed, for it hangs"),
        ({"said": None, "exit_code": -9}, "its trainer was ended by signal 9"),
        ({"said": None, "exit_code": 3}, "its trainer exited with 3"),
    ],
)
def test_a_fall_is_told_in_words(changes: dict[str, object], said: str) -> None:
    """The agent's own reason first, then the script's, then what the system knows."""
    assert fall(**changes).reason == said
