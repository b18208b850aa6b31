"""What all triggers share: they follow something to its end and fire one event, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import stamina
import structlog
from airflow.triggers.base import BaseTrigger, TriggerEvent

from edl_airflow.failures import is_passing, is_users_mistake
from edl_airflow.hooks.edl import EdlHook, Surroundings
from edl_airflow.work import Outcome

FIRST_EVENT_AFTER_S = 5.0
"""Seconds before a first event: the scheduler may still be busy with the half of the task that has deferred."""

LOOK_UP_FOR_S = 300.0
"""Seconds for which the connection is looked up again while Airflow's API server is away."""

LOOK_UP_AGAIN_S = 30.0
"""Seconds after which a watcher looks a connection up again that is missing or wrong."""

log = structlog.get_logger(__name__)


class EdlTrigger(BaseTrigger):
    """Fires one event: an `Outcome`, and the trigger's own arguments beside it.

    (What a task keeps for itself when it defers is lost in `dag.test()`, so the event carries what is needed next.)
    Every failure is an event too, so that the operator can stop what was started.
    """

    conn_id: str
    about: str
    """The name of the job or pool that is followed."""

    async def follow(self, surroundings: Surroundings) -> Outcome:
        """Follow it to its end."""
        raise NotImplementedError

    async def outcome(self) -> Outcome:
        """Look up where it is, and follow it to its end."""
        return await self.follow(await looked_up(self.conn_id))

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow it; by the time of the event, all sockets are closed.

        A cancellation is raised as it came: what Airflow says with it may get lost on the way through what is awaited.
        """
        quiet = asyncio.create_task(asyncio.sleep(FIRST_EVENT_AFTER_S))
        following = asyncio.create_task(self._any_outcome())
        try:
            await asyncio.wait([following])
            outcome = following.result()
            await quiet
        finally:
            quiet.cancel()
            following.cancel()
            await asyncio.wait([following])
        yield TriggerEvent({**msgspec.to_builtins(outcome), **self.serialize()[1]})  # type: ignore[no-untyped-call]

    async def _any_outcome(self) -> Outcome:
        try:
            return await self.outcome()
        except Exception as error:  # a trigger that raises leaves no chance to stop what was started
            self.log.exception("%r can't be followed any more", self.about)
            reason = f"{type(error).__name__}: {error}"
            return Outcome(
                ended="failed",
                name=self.about,
                reason=reason,
                permanent=is_users_mistake(error),
                passing=is_passing(error),
            )


async def looked_up(conn_id: str) -> Surroundings:
    """Look a connection up, for minutes while that can't be done; raise at once what is the user's mistake."""

    def may_pass(error: Exception) -> bool:
        return not is_users_mistake(error)

    async for attempt in stamina.retry_context(on=may_pass, attempts=None, timeout=LOOK_UP_FOR_S):
        with attempt:
            return await EdlHook(conn_id).asurroundings()
    raise AssertionError  # the last attempt raises


async def looked_up_at_last(conn_id: str) -> Surroundings:
    """Look a connection up until that can be done: Airflow starts a watcher that raises again at once, without end.

    What is wrong is logged once, and again when that changes.
    """
    said = ""
    while True:
        try:
            return await looked_up(conn_id)
        except Exception as error:  # noqa: BLE001 (nothing that is wrong with it is for ever)
            wrong = f"{type(error).__name__}: {error}"
            if wrong != said:
                log.warning("connection.unusable", conn_id=conn_id, cause=wrong, again_s=LOOK_UP_AGAIN_S)
            said = wrong
        await asyncio.sleep(LOOK_UP_AGAIN_S)
