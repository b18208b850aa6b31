"""The triggers of deferred tasks: one continues a task's work, one waits for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, Self

import msgspec
from airflow.triggers.base import TriggerEvent

from edl_airflow.backends import backend_for
from edl_airflow.client import open_client
from edl_airflow.hooks.edl import EdlConnection
from edl_airflow.orphans import task_states
from edl_airflow.runtime import runner
from edl_airflow.runtime.decisions import unneeded_jobs
from edl_airflow.runtime.spec import TaskOutcome, TaskSpec
from edl_airflow.triggers.base import EdlTrigger, type_error_if_unreadable
from edl_airflow.waits import Condition, condition_kind, kind_of, wait_for
from edl_runtime.backends.errors import ClusterUnavailableError

ENDED_BY_A_PERSON = "__airflow_user_action__"
"""Message of the cancellation when a person has cleared or marked the task."""

STOP_AGAIN_S = 30.0
"""Seconds between two tries to stop jobs in a cluster that is away; each try takes minutes."""

STORED_LOOKS, STORED_AGAIN_S = 60, 5.0
"""How often, and every how many seconds, it is looked whether Airflow has stored the event of a trigger."""

_stopping: set[asyncio.Task[None]] = set()
"""Strong references: an event loop keeps only weak ones to its tasks."""


class EdlTaskTrigger(EdlTrigger):
    """Continues a `TaskSpec` that an operator has started. Its one event: the `TaskOutcome`, and the `spec`.

    When a person ends the task, `on_kill` stops the work, unless a later try has adopted it; that needs no connection.
    When the work has ended, jobs that the task needs no more are stopped here: it may go on much later, as in a DAG
    that is paused. A triggerer that restarts continues where the last one was.

    :param spec: the `TaskSpec`, as plain data without secrets
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        with type_error_if_unreadable():
            self.spec = msgspec.convert(spec, TaskSpec)
        self.conn_id = self.spec.conn_id
        self.about = self.spec.name
        self._stopping: asyncio.Task[None] | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "edl_airflow.triggers.task.EdlTaskTrigger", {"spec": msgspec.to_builtins(self.spec)}

    async def follow(self, edl_connection: EdlConnection) -> TaskOutcome:
        """Do the rest of the work, on the backend where it was started."""
        async with open_client(msgspec.structs.replace(edl_connection, place=self.spec.place)) as client:
            return await runner.run(self.spec, client, self.log.info)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow it; then begin to stop what the task needs no more, in this triggerer's background.

        When a person ends the task, begin to stop the work here, already before `on_kill`: Airflow cancels a
        trigger each second until it has ended, and on a busy machine a second cancellation may come before the call of
        `on_kill`, which is then left out.
        """
        try:
            async with aclosing(super().run()) as events:  # type: ignore[type-var]  # it is a generator
                async for event in events:
                    yield event
                    if unneeded := unneeded_jobs(self.spec, event.payload["ended"]):
                        self._begin_to_stop(unneeded, when_stored=True)
        except asyncio.CancelledError as cancelled:
            if ENDED_BY_A_PERSON in cancelled.args:
                self._begin_to_stop(self.spec.jobs)
            raise

    async def on_kill(self) -> None:
        """Stop everything that carries this try's token.

        Airflow waits half a minute. What takes longer, as for a cluster that is away, continues in this triggerer's
        background. Failures are logged, because nothing may be left to raise them to.
        """
        await asyncio.shield(self._begin_to_stop(self.spec.jobs))

    def _begin_to_stop(self, jobs: tuple[str, ...], *, when_stored: bool = False) -> asyncio.Task[None]:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(jobs, when_stored=when_stored))
            _stopping.add(self._stopping)
            self._stopping.add_done_callback(_stopping.discard)
        return self._stopping

    async def _stop(self, jobs: tuple[str, ...], *, when_stored: bool) -> None:
        names, logged = ", ".join(map(repr, jobs)), False
        if when_stored:
            await self._wait_until_stored()
        try:
            backend = await asyncio.to_thread(backend_for, self.spec.place)
            while True:
                try:
                    return await runner.stop(self.spec, backend, jobs)
                except ClusterUnavailableError as error:
                    if not logged:
                        self.log.warning("Could not stop %s yet; retrying until the cluster answers: %s", names, error)
                        logged = True
                    await asyncio.sleep(STOP_AGAIN_S)
        except Exception:
            self.log.exception("Could not confirm that %s stopped. See `edl jobs`; `edl stop NAME` stops a job", names)

    async def _wait_until_stored(self) -> None:
        """Wait until Airflow has stored the event: a triggerer that ends before it has fires one by what is left then.

        Ends after some minutes in any case: the task may have been deferred again, by a later try.
        """
        origin = self.spec.origin
        for _ in range(STORED_LOOKS):
            await asyncio.sleep(STORED_AGAIN_S)
            with suppress(Exception):  # Airflow is away
                if origin is None or (await asyncio.to_thread(task_states, [origin]))[origin] != "deferred":
                    return


class EdlConditionTrigger(EdlTrigger):
    """Fires one event when a wait has ended: its `TaskOutcome`, and the `condition`.

    For a traffic window it sleeps until the current window ends, checks the clock each minute, and needs no connection.

    :param kind: the condition's class, as `waits.kind_of` names it
    :param condition: its fields, as plain data
    """

    def __init__(self, kind: str, condition: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        with type_error_if_unreadable():
            self.condition = msgspec.convert(condition, condition_kind(kind))
        self.conn_id = self.condition.conn_id
        self.about = self.condition.about

    @classmethod
    def of(cls, condition: Condition[Any]) -> Self:
        return cls(kind_of(condition), msgspec.to_builtins(condition))

    def serialize(self) -> tuple[str, dict[str, Any]]:
        condition = msgspec.to_builtins(self.condition, order="deterministic")
        kind = kind_of(self.condition)
        return "edl_airflow.triggers.task.EdlConditionTrigger", {"kind": kind, "condition": condition}

    async def outcome(self) -> TaskOutcome:
        if self.condition.needs_client:
            return await super().outcome()
        return await wait_for(self.condition, None, self.log.info)

    async def follow(self, edl_connection: EdlConnection) -> TaskOutcome:
        """Wait for it."""
        async with open_client(edl_connection) as client:
            return await wait_for(self.condition, client, self.log.info)
