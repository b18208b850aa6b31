"""Several tries of a task, and several tasks: who owns what, who takes what over, what is left."""

from __future__ import annotations

import asyncio

from support.airflow.world import World, defer, distill, fired, follow_until_started, registered, resume, trigger_of


def test_clearing_a_deferred_task_spares_the_next_try(world: World) -> None:
    """Airflow runs try 2's execute before try 1's on_kill: try 2 has the student by then, the same process."""
    with registered(world, "digits", "a:1"):
        first = defer(distill(world, "waits", deferrable=True), world.context("try-1"))

        asyncio.run(follow_until_started(world, first))
        context = world.context("try-2")
        second = defer(distill(world, "waits", deferrable=True), context)
        asyncio.run(trigger_of(first).on_kill())
        assert set(world.jobs().values()) == {"running"}
        world.go()
        event = asyncio.run(fired(trigger_of(second)))
        result = resume(distill(world, "waits"), context, second, event)
    assert result["metrics"] == {"accuracy": 0.5}
    assert len(world.starts()) == 1
    assert world.jobs() == {}
