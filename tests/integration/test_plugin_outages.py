"""What is away or hangs: the page says so at once, to all viewers, and without a log full of it."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from support.airflow.page import Api, overview, submit
from support.airflow.world import World
from support.teachers.process import wait_until

from edl_airflow.plugin import past

VIEWERS = 8


def test_all_who_wait_for_the_timeline_of_a_redis_that_hangs_get_one_answer(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once for all of them, not once more for each behind the other."""
    asked: list[str] = []
    read_points = past.read_points

    async def counted(client: Any, namespace: str, **more: Any) -> Any:
        asked.append(namespace)
        return await read_points(client, namespace, **more)

    monkeypatch.setattr(past, "read_points", counted)
    monkeypatch.setattr("edl_runtime.store.redis_client.ANSWER_TIMEOUT_S", 0.3)
    submit(world, "night", "nightly")
    with socket.create_server(("127.0.0.1", 0), backlog=VIEWERS * 8) as silent:  # takes connections and says nothing
        world.connect_to(f"redis://:secret@127.0.0.1:{silent.getsockname()[1]}")
        overview(api, "no answer in time")
        answers = api.ask_at_once("/api/timeline", VIEWERS)
    assert {answer.status_code for answer in answers} == {503}
    assert len(asked) == 1
    world.connect_to(world.redis_url)
    wait_until(lambda: api.ask("/api/timeline").status_code == 200)
