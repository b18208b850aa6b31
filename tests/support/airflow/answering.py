"""What a task or a trigger asks of Airflow, answered from a database."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from airflow import settings
from airflow.models.variable import Variable
from airflow.sdk.api.client import Client
from airflow.sdk.api.datamodels._generated import VariableResponse
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import ErrorResponse, GetTaskStates, GetVariable, PutVariable, VariableResult
from airflow.sdk.execution_time.request_handlers import handle_get_task_states
from airflow.sdk.execution_time.supervisor import in_process_api_server
from airflow.utils.session import create_session
from sqlalchemy import select


class AnsweringSupervisor:
    """Answers as the supervisor of a task or a triggerer: states by Airflow's own API.

    `away`: kinds of requests that it does not answer; `asked`: those of all requests.
    """

    def __init__(self) -> None:
        transport = in_process_api_server().transport  # type: ignore[no-untyped-call]
        self._client = Client(base_url=None, token="", dry_run=True, transport=transport)
        self._client.base_url = "http://in-process.invalid./"  # type: ignore[assignment]
        self.away: tuple[type, ...] = ()
        self.asked: list[type] = []

    def send(self, msg: Any) -> Any:
        self.asked.append(type(msg))
        if isinstance(msg, self.away):
            raise ConnectionError("the API server is away")
        match msg:
            case GetTaskStates():
                return handle_get_task_states(self._client, msg)[0]
            case GetVariable():
                return _variable(msg.key)
            case PutVariable():
                with create_session() as session:
                    session.add(Variable(key=msg.key, val=msg.value, description=msg.description))
                return None
        raise NotImplementedError(msg)

    async def asend(self, msg: Any) -> Any:
        return await asyncio.to_thread(self.send, msg)


def answering(database: Any, monkeypatch: pytest.MonkeyPatch) -> AnsweringSupervisor:
    """Let this process be that of a task or a triggerer of an Airflow with this database."""
    monkeypatch.setattr(settings, "Session", database)
    monkeypatch.setattr(settings, "NonScopedSession", database.session_factory)
    supervisor = AnsweringSupervisor()
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", supervisor, raising=False)
    return supervisor


def _variable(key: str) -> Any:
    """Look a Variable up, not by Airflow's API: that would ask this process's supervisor again."""
    with create_session() as session:
        found = session.scalar(select(Variable).where(Variable.key == key))
    if found is None:
        return ErrorResponse()
    return VariableResult.from_variable_response(VariableResponse(key=key, value=found.val))
