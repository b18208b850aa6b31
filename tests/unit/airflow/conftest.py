"""Airflow without a database."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.airflow.fakes import FakeClient, FakeTaskInstance


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """A made-up site that every connection leads to."""
    site = FakeClient()

    @asynccontextmanager
    async def open_made_up(_: object, **_more: object) -> AsyncIterator[FakeClient]:
        yield site

    for module in (
        *("operators.autoscale", "operators.base", "operators.resize", "sensors.base", "sensors.traffic"),
        *("triggers.checkpoint", "triggers.task", "triggers.jobs", "orphans"),
    ):
        monkeypatch.setattr(f"edl_airflow.{module}.open_client", open_made_up)
    for module in ("operators.base", "operators.teacher_pool", "triggers.task"):
        monkeypatch.setattr(f"edl_airflow.{module}.backend_for", lambda _: site.backend)
    for check in (
        *("distill.check_checkpoint_folder", "distill.check_model", "distill.check_script"),
        *("teacher_pool.check_model", "train.check_checkpoint_folder", "train.check_script"),
    ):
        monkeypatch.setattr(f"edl_airflow.operators.{check}", lambda *_: None)
    monkeypatch.setattr("edl_airflow.triggers.base.FIRST_EVENT_AFTER_S", 0.0)
    monkeypatch.setattr("edl_airflow.runtime.runner.POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr("edl_airflow.waits.POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr("edl_airflow.runtime.log.FINAL_LINES_WAIT_S", 60.0)
    return site


@pytest.fixture(autouse=True)
def connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection `edl_default`, which leads nowhere."""
    given = {"conn_type": "edl", "host": "127.0.0.1", "port": 1, "password": "secret", "extra": {"namespace": "team"}}
    monkeypatch.setenv("AIRFLOW_CONN_EDL_DEFAULT", json.dumps(given))


@pytest.fixture
def context() -> dict[str, Any]:
    """What Airflow gives to `execute`."""
    given = {"id": "try-1", "dag_id": "nightly", "task_id": "distill", "run_id": "manual__1", "map_index": -1}
    ti = FakeTaskInstance(**given, state="running", xcoms={})
    return {"ti": ti, "run_id": ti.run_id, "params": {"low": 1, "high": 3}}
