"""Requests of other protocols' servers, inside a teacher's process."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.teachers.serving import HeldRunner

from edl_runtime.protocol.errors import InferenceError
from edl_runtime.teacher.http.server import HttpServer
from edl_runtime.teacher.local_requests import LocalRequests, _Waiter
from edl_runtime.teacher.models.callable import CallableModel
from edl_runtime.teacher.models.model import ModelOptions
from edl_runtime.teacher.shm.arena import Arena

X = np.arange(6, dtype=np.uint8).reshape(2, 3)


def teacher(slots: int = 2, limit: int = 1 << 16) -> tuple[HttpServer, LocalRequests, list[Any]]:
    """Return a server of the model `echo`, its requests, and those that its model holds."""
    arena = Arena.create(limit, slots=slots)
    model = CallableModel(ModelOptions(model="support.models:echo"))
    runner = HeldRunner(model, arena)
    server = HttpServer(model.signature, runner, arena)
    return server, LocalRequests(server), runner.held


async def begun(held: list[Any], count: int) -> None:
    async with asyncio.timeout(60):
        while len(held) < count:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)


async def test_the_ports_of_a_teacher_share_one_room_for_bodies() -> None:
    """What one port's callers hold is not there for those of the others, whatever their protocol."""
    server, requests, _ = teacher()
    ports = [requests, LocalRequests(server)]  # as of gRPC and of Paddle Serving
    assert all(port.memory is server.side_memory for port in ports)


async def test_requests_wait_for_slots_and_free_them() -> None:
    server, requests, held = teacher(slots=2)
    asked = [asyncio.create_task(requests.infer({"x": X + number}, [])) for number in range(3)]
    await begun(held, 2)
    assert server.slots.in_flight == 3
    for number in range(3):
        await begun(held, number + 1)
        held[number]()
        assert np.array_equal((await asked[number])["x"], X + number)
    assert server.slots.in_flight == 0


@pytest.mark.parametrize("waits", [False, True], ids=["runs", "waits for a slot"])
async def test_a_request_that_is_cancelled_leaves_its_slot_free(waits: bool) -> None:  # noqa: FBT001 - parametrized
    """Not before the model is done with it."""
    server, requests, held = teacher(slots=1)
    running = asyncio.create_task(requests.infer({"x": X}, []))
    await begun(held, 1)
    cancelled = running
    if waits:
        cancelled = asyncio.create_task(requests.infer({"x": X}, []))
        await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.sleep(0)
    assert server.slots.in_flight == 1
    held[0]()
    await asyncio.wait([running, cancelled])
    assert cancelled.cancelled()
    assert server.slots.in_flight == 0


async def test_a_slot_is_free_that_comes_in_the_turn_in_which_its_request_is_cancelled() -> None:
    """The request is still in the queue then, and another client gives back the slot."""
    server, requests, held = teacher(slots=1)
    other = _Waiter(server.slots)
    server.slots.take(other)
    cancelled = asyncio.create_task(requests.infer({"x": X}, []))
    await asyncio.sleep(0)
    cancelled.cancel()
    server.slots.give_back(other.slot.result(), 0, 0)
    await asyncio.wait([cancelled])
    assert cancelled.cancelled()
    assert server.slots.in_flight == 0
    asked = asyncio.create_task(requests.infer({"x": X}, []))
    await begun(held, 1)
    held[0]()
    assert np.array_equal((await asked)["x"], X)


async def test_a_request_may_be_cancelled_twice() -> None:
    """As by its client, and by the server that ends; the model may still use the slot."""
    server, requests, held = teacher(slots=1)
    cancelled = asyncio.create_task(requests.infer({"x": X}, []))
    await begun(held, 1)
    for _ in range(2):
        cancelled.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([cancelled])
    assert server.slots.in_flight == 1
    held[0]()
    await asyncio.sleep(0)
    assert server.slots.in_flight == 0


async def test_what_is_refused_says_why() -> None:
    server, requests, held = teacher(limit=4096)
    asked = asyncio.create_task(requests.infer({"x": X.astype(np.int64)}, []))
    await begun(held, 1)
    held[0]()
    with pytest.raises(InferenceError, match="INT64") as refused:
        await asked
    assert (refused.value.status, refused.value.retryable) == (400, False)
    with pytest.raises(InferenceError, match="allowed are 4096"):
        await requests.infer({"x": np.zeros((1, 5000), np.uint8)}, [])
    server.draining = True
    with pytest.raises(InferenceError, match="shutting down"):
        await requests.infer({"x": X}, [])
    assert server.slots.in_flight == 0
