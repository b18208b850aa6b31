"""Base of the triggers that follow something to its end and fire one event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import msgspec
import stamina
import structlog
from airflow.triggers.base import BaseTrigger, TriggerEvent

from edl_airflow.failures import is_transient, is_user_error
from edl_airflow.hooks.edl import EdlConnection, EdlHook
from edl_airflow.orphans import watching
from edl_airflow.runtime.spec import TaskOutcome

FIRST_EVENT_AFTER_S = 5.0
"""Seconds before the first event: the scheduler may still be handling the deferral."""

LOOK_UP_FOR_S = 300.0
"""Seconds for which the lookup of a connection is retried while Airflow's API server is away."""

LOOK_UP_AGAIN_S = 30.0
"""Seconds between two lookups of a connection that is missing or wrong, by an asset's trigger."""

log = structlog.get_logger(__name__)


class EdlTrigger(BaseTrigger):
    """Fires one event: a `TaskOutcome`, and the trigger's own arguments.

    The arguments are there because `dag.test()` loses what a task stores when it defers. Failures are events, too, so
    that the operator can stop what it has started.
    """

    conn_id: str
    about: str
    """The name of the job or pool."""

    async def follow(self, edl_connection: EdlConnection) -> TaskOutcome:
        """Follow it to its end."""
        raise NotImplementedError

    async def outcome(self) -> TaskOutcome:
        """Look up the connection, and follow it to its end, with an eye on the other jobs there."""
        edl_connection = await load_connection(self.conn_id)
        async with watching(edl_connection):
            return await self.follow(edl_connection)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow it, and close all sockets before the event.

        It runs in its own task, so that a cancellation is raised here with Airflow's message in it; nested awaits may
        lose the message.
        """
        first_event = asyncio.create_task(asyncio.sleep(FIRST_EVENT_AFTER_S))
        following = asyncio.create_task(self._any_outcome())
        try:
            await asyncio.wait([following])
            outcome = following.result()
            await first_event
        finally:
            first_event.cancel()
            following.cancel()
            await asyncio.wait([following])
        yield TriggerEvent({**msgspec.to_builtins(outcome), **self.serialize()[1]})  # type: ignore[no-untyped-call]

    async def _any_outcome(self) -> TaskOutcome:
        try:
            return await self.outcome()
        except Exception as error:  # if this raised, nothing would stop what was started
            self.log.exception("Lost track of %r", self.about)
            reason = f"{type(error).__name__}: {error}"
            return TaskOutcome(
                ended="failed",
                name=self.about,
                reason=reason,
                permanent=is_user_error(error),
                transient=is_transient(error),
            )


@contextmanager
def type_error_if_unreadable() -> Iterator[None]:
    """Raise TypeError for arguments that can't be read, as those that another version has stored.

    For constructors: Airflow fails the one trigger for a TypeError; any other error ends the triggerer.
    """
    try:
        yield
    except Exception as error:
        raise TypeError(f"the trigger's stored arguments can't be read: {error}") from error


async def load_connection(conn_id: str) -> EdlConnection:
    """Look a connection up, with retries for minutes; raise user errors at once."""

    def may_pass(error: Exception) -> bool:
        return not is_user_error(error)

    async for attempt in stamina.retry_context(on=may_pass, attempts=None, timeout=LOOK_UP_FOR_S):
        with attempt:
            return await EdlHook(conn_id).aedl_connection()
    raise AssertionError  # the last attempt raises


async def load_connection_eventually(conn_id: str) -> EdlConnection:
    """Look a connection up until it works, as Airflow restarts an asset's trigger that raises at once, without end.

    Logs the cause once, and again when it changes.
    """
    logged = ""
    while True:
        try:
            return await load_connection(conn_id)
        except Exception as error:  # noqa: BLE001 (a user may mend it)
            cause = f"{type(error).__name__}: {error}"
            if cause != logged:
                log.warning("connection.unusable", conn_id=conn_id, cause=cause, again_s=LOOK_UP_AGAIN_S)
            logged = cause
        await asyncio.sleep(LOOK_UP_AGAIN_S)
