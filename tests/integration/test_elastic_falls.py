"""Trainers that fall, as Redis counts them for all instances of a job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from edl_runtime.elastic.falls import MOST_FALLS
from edl_runtime.elastic.generation import Outcome, TrainerMember
from edl_runtime.elastic.membership import Membership
from edl_runtime.store.client import connect

if TYPE_CHECKING:
    from redis.asyncio import Redis


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    async with connect(redis_url) as client:
        yield client


async def agent(client: Redis, namespace: str, index: int = 2, boot: str = "a", run: str = "") -> Membership:
    """Return the membership of an agent that is registered."""
    membership = Membership(client, namespace, "training", run=run)
    await membership.beat(TrainerMember(id=f"{index}-{boot}", index=index))
    return membership


async def counts(membership: Membership, steps: list[int], *, generation: int = 0) -> list[int]:
    """Return the count of each of these falls, each at a step of the job."""
    return [await membership.count_fall(generation, step, progress=False) for step in steps]


async def test_falls_without_progress_add_up(client: Redis, namespace: str) -> None:
    """A later step than at any fall before begins a new count."""
    one = await agent(client, namespace)
    assert await counts(one, [100, 100, 100, 100]) == [1, 2, 3, 4]
    assert await counts(one, [101, 50, 101, 101]) == [1, 2, 3, 4]
    assert await one.count_fall(0, 50, progress=True) == 1


async def test_steps_of_others_are_progress(client: Redis, namespace: str) -> None:
    """Whoever falls tells where the job stands: one that never comes to a step does not fail a healthy job."""
    one, other = await agent(client, namespace), await agent(client, namespace, 3)
    assert await counts(one, [100, 101]) == [1, 1]
    assert await counts(other, [101, 102], generation=7) == [2, 1]


async def test_falls_of_several_in_one_generation_are_one(client: Redis, namespace: str) -> None:
    """When a rank of a plain script ends, the others do because of it; and all may be killed before they are in one."""
    agents = [await agent(client, namespace, index) for index in range(10)]
    for number, generation in enumerate((0, 7, 8, 9), 1):
        assert [await counts(each, [9], generation=generation) for each in agents] == [[number]] * 10
    assert number > MOST_FALLS


async def test_one_that_never_gets_into_a_generation_falls_again_each_time(client: Redis, namespace: str) -> None:
    """Its instance has been told of none since the first fell."""
    assert await counts(await agent(client, namespace), [9] * 4, generation=7) == [1, 2, 3, 4]


@pytest.mark.parametrize("ended", [True, False])
async def test_a_new_run_of_the_same_name_begins_with_no_falls(client: Redis, namespace: str, *, ended: bool) -> None:
    """Jobs that are started by hand have no word for their run; how the one before ended is of no matter."""
    before = await agent(client, namespace)
    assert await counts(before, [100] * 4) == [1, 2, 3, 4]
    if ended:
        await before.end(Outcome("failed", "too many falls"))
    await before.leave()
    anew = await agent(client, namespace, boot="b")
    assert await counts(anew, [50, 50]) == [1, 2]
