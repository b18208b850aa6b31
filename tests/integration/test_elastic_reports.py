"""What an agent tells of its trainer, in a real Redis that does not always answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from edl_runtime.checkpoint import landed
from edl_runtime.elastic.events import read
from edl_runtime.elastic.membership import Membership
from edl_runtime.elastic.messages import Saved
from edl_runtime.elastic.reports import Reports
from edl_runtime.errors import RegistryUnavailableError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.client import connect

JOB = "digits"


def saved(step: int) -> Saved:
    return Saved(generation=1, step=step, epoch=0, url=f"/c/{step}", took_s=0.1, created_at=100.0 + step)


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
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, job=JOB)
    async with connect(redis_url) as client:
        telling = Reports(client, settings, Membership(client, namespace, JOB))
        for step in range(20):
            telling.tell(saved(step))
        await asyncio.gather(*(telling.finish() for _ in range(3)))
        assert [event.step for event in await read(client, namespace, JOB)] == list(range(20))
        assert [one and one.step for _, one in await landed.after(client, namespace, JOB, block_ms=0)] == list(
            range(20)
        )


async def test_a_checkpoint_is_told_once_and_as_of_when_it_was_complete(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is an event, and may start a run of a DAG: whoever got no answer looks before it says so again."""
    settings = RuntimeSettings(redis_url=redis_url, namespace=namespace, job=JOB)
    async with connect(redis_url) as client:
        membership = Membership(client, namespace, JOB)
        monkeypatch.setattr(membership, "announce", without_answers(membership.announce))
        monkeypatch.setattr(landed, "publish", without_answers(landed.publish))
        telling = Reports(client, settings, membership)
        for step in (1, 2):
            telling.tell(saved(step))
        for _ in range(10):
            await telling.finish()
        assert [event.step for event in await read(client, namespace, JOB)] == [1, 2]
        told = [one for _, one in await landed.after(client, namespace, JOB, block_ms=0) if one]
        assert [(one.step, one.at) for one in told] == [(1, 101.0), (2, 102.0)]
