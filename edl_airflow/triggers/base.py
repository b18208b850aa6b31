"""What all triggers share: they follow something to its end and fire one event, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import stamina
import structlog
from airflow.triggers.base import BaseTrigger, TriggerEvent

from edl_airflow.connection import EdlConnection
from edl_airflow.failures import is_transient, is_user_error
from edl_airflow.hooks.edl import EdlHook
from edl_airflow.runtime.spec import TaskOutcome

FIRST_EVENT_AFTER_S = 5.0
"""Seconds before a first event: the scheduler may still be busy with the half of the task that has deferred."""

LOOK_UP_FOR_S = 300.0
"""Seconds for which the connection is looked up again while Airflow's API server is away."""

LOOK_UP_AGAIN_S = 30.0
"""Seconds after which a watcher looks a connection up again that is missing or wrong."""

log = structlog.get_logger(__name__)


class EdlTrigger(BaseTrigger):
    """Fires one event: a `TaskOutcome`, and the trigger's own arguments beside it.

    (What a task keeps for itself when it defers is lost in `dag.test()`, so the event carries what is needed next.)
    Every failure is an event too, so that the operator can stop what was started.
    """

    conn_id: str
    about: str
    """The name of the job or pool that is followed."""

    async def follow(self, edl_connection: EdlConnection) -> TaskOutcome:
        """Follow it to its end."""
        raise NotImplementedError

    async def outcome(self) -> TaskOutcome:
        """Look up where it is, and follow it to its end."""
        return await self.follow(await load_connection(self.conn_id))

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

    async def _any_outcome(self) -> TaskOutcome:
        try:
            return await self.outcome()
        except Exception as error:  # a trigger that raises leaves no chance to stop what was started
            self.log.exception("%r can't be followed any more", self.about)
            reason = f"{type(error).__name__}: {error}"
            return TaskOutcome(
                ended="failed",
                name=self.about,
                reason=reason,
                permanent=is_user_error(error),
                transient=is_transient(error),
            )


async def load_connection(conn_id: str) -> EdlConnection:
    """Look a connection up, for minutes while that can't be done; raise at once what is the user's mistake."""

    def may_pass(error: Exception) -> bool:
        return not is_user_error(error)

    async for attempt in stamina.retry_context(on=may_pass, attempts=None, timeout=LOOK_UP_FOR_S):
        with attempt:
            return await EdlHook(conn_id).aedl_connection()
    raise AssertionError  # the last attempt raises


async def load_connection_eventually(conn_id: str) -> EdlConnection:
    """Look a connection up until that can be done: Airflow starts a watcher that raises again at once, without end.

    What is wrong is logged once, and again when that changes.
    """
    said = ""
    while True:
        try:
            return await load_connection(conn_id)
        except Exception as error:  # noqa: BLE001 (nothing that is wrong with it is for ever)
            wrong = f"{type(error).__name__}: {error}"
            if wrong != said:
                log.warning("connection.unusable", conn_id=conn_id, cause=wrong, again_s=LOOK_UP_AGAIN_S)
            said = wrong
        await asyncio.sleep(LOOK_UP_AGAIN_S)
