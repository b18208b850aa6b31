"""The trigger that goes on with a task's work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from airflow.triggers.base import TriggerEvent

from edl_airflow.client import backend_for, open_client
from edl_airflow.connection import EdlConnection
from edl_airflow.runtime import runner
from edl_airflow.runtime.spec import TaskOutcome, TaskSpec
from edl_airflow.triggers.base import EdlTrigger
from edl_runtime.backends.errors import ClusterUnavailableError

ENDED_BY_A_PERSON = "__airflow_user_action__"
"""With what Airflow cancels a trigger whose task a person has cleared or marked."""

STOP_AGAIN_S = 30.0
"""Seconds between two tries to stop jobs in a cluster that is away, each of which takes minutes."""

_stopping: set[asyncio.Task[None]] = set()
"""What is being stopped; an event loop alone does not keep its tasks."""


class EdlTaskTrigger(EdlTrigger):
    """Goes on with a `TaskSpec` that an operator has started. Its one event: the `TaskOutcome`, and the `spec` again.

    When a person ends the task, `on_kill` stops the work, unless a later try has taken it over; for that it needs no
    connection. A triggerer that restarts goes on where the last one was.

    :param spec: the `TaskSpec`, as plain data without secrets
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spec = msgspec.convert(spec, TaskSpec)
        self.conn_id = self.spec.conn_id
        self.about = self.spec.name
        self._stopping: asyncio.Task[None] | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "edl_airflow.triggers.task.EdlTaskTrigger", {"spec": msgspec.to_builtins(self.spec)}

    async def follow(self, edl_connection: EdlConnection) -> TaskOutcome:
        """Do the rest of the work, where it was begun."""
        async with open_client(msgspec.structs.replace(edl_connection, place=self.spec.place)) as client:
            return await runner.run(self.spec, client, self.log.info)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """As its parent's. When a person ends the task, what it has begun is being stopped before this ends.

        Airflow cancels a trigger again each second until it has ended, and calls `on_kill` only if none of that hits it
        between the first time and the call, as happens on a busy machine.
        """
        try:
            async with aclosing(super().run()) as events:  # type: ignore[type-var]  # its parent's is a generator, too
                async for event in events:
                    yield event
        except asyncio.CancelledError as cancelled:
            if ENDED_BY_A_PERSON in cancelled.args:
                self._begin_to_stop()
            raise

    async def on_kill(self) -> None:
        """Stop everything that carries this try's token.

        Airflow waits for that for half a minute. Whoever waits longer, as for a cluster that is away, goes on alone
        while this triggerer runs. What fails otherwise is logged: by then, nobody may be there to raise it to.
        """
        await asyncio.shield(self._begin_to_stop())

    def _begin_to_stop(self) -> asyncio.Task[None]:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
            _stopping.add(self._stopping)
            self._stopping.add_done_callback(_stopping.discard)
        return self._stopping

    async def _stop(self) -> None:
        jobs, told = ", ".join(map(repr, self.spec.jobs)), False
        try:
            backend = await asyncio.to_thread(backend_for, self.spec.place)
            while True:
                try:
                    return await runner.stop(self.spec, backend)
                except ClusterUnavailableError as error:
                    if not told:
                        self.log.warning(
                            "Not stopped yet, and tried again until the cluster answers: %s: %s", jobs, error
                        )
                        told = True
                    await asyncio.sleep(STOP_AGAIN_S)
        except Exception:
            self.log.exception("Perhaps not stopped: %s. `edl jobs` shows what is left, `edl stop NAME` ends it", jobs)
