"""Airflow's questions to a person, as its supervisor and its API server keep and answer them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import CreateHITLDetailPayload, HITLDetailRequestResult, ToSupervisor


class ShownQuestions:
    """What the API server shows of what tasks ask: of a task instance the first question, whatever it asks later.

    `asked` is all that they have asked, also what is not shown.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, Any]] = []
        self._shown: dict[UUID, CreateHITLDetailPayload] = {}
        monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", self, raising=False)

    def send(self, msg: ToSupervisor) -> HITLDetailRequestResult | None:
        """Answer questions as the supervisor does; whatever else it is told, as what is secret, has no answer."""
        if not isinstance(msg, CreateHITLDetailPayload):
            return None
        self.asked.append(msg.model_dump())
        return HITLDetailRequestResult.from_api_response(self._shown.setdefault(msg.ti_id, msg))
