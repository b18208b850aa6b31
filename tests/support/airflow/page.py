"""The page's API in a process of its own, behind Airflow's own authentication and database."""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import uuid
import warnings
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Send
from support.airflow.world import World
from support.teachers.process import wait_until

from edl_airflow.identity import owner
from edl_airflow.plugin import EdlPlugin
from edl_runtime.progress import Progress, publish_progress
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store.redis_client import connect

with warnings.catch_warnings():  # of a test client that Airflow's own imports drag in
    warnings.simplefilter("ignore")
    import airflow.models
    from airflow import settings
    from airflow.api_fastapi import app as airflow_app
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
    from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from airflow.models.base import Base
    from airflow.models.log import Log
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from sqlalchemy import create_engine, insert, select
    from sqlalchemy.orm import scoped_session, sessionmaker

    from edl_airflow.plugin import viewers
    from edl_airflow.plugin.access import ALL_DAGS
    from edl_airflow.plugin.airflow_state import TaskKey

TASK = TaskKey(dag_id="nightly", run_id="manual__1", task_id="train")
TRY = "019ad111-0000-7000-8000-00000000000a"
WAITS = ("python", "-c", "import time; print('it runs', flush=True); time.sleep(600)")


class Roles(SimpleAuthManager):
    """Lets users read the DAGs that are `readable` (None: those that have no name yet), without what is `hidden`.

    As in FAB, a question about no DAG is one about any.
    """

    readable: Container[str | None] = ("nightly", None)
    hidden: Container[DagAccessEntity | None] = ()

    def is_authorized_dag(self, *, access_entity: Any = None, details: Any = None, **given: Any) -> bool:
        asked = details and details.id
        is_readable = not asked or (None if asked == ALL_DAGS else asked) in self.readable
        may = is_readable and access_entity not in self.hidden
        return may and super().is_authorized_dag(access_entity=access_entity, details=details, **given)


class Api:
    """Asks the plugin's app as users of these roles, in one event loop."""

    def __init__(self, manager: Roles) -> None:
        self._manager = manager
        self._runner = asyncio.Runner()

    def ask(self, path: str, role: str = "viewer", method: str = "GET", **more: Any) -> httpx.Response:
        return self._runner.run(self._ask(path, role, method, **more))

    def ask_at_once(self, path: str, times: int) -> list[httpx.Response]:
        """Ask as so many viewers at a time."""

        async def ask() -> list[httpx.Response]:
            return await asyncio.gather(*(self._ask(path, "viewer", "GET") for _ in range(times)))

        return self._runner.run(ask())

    def get(self, path: str, role: str = "viewer") -> Any:
        answer = self.ask(f"/api/{path}", role)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return answer.json()

    def act(self, action: str, role: str, **body: Any) -> httpx.Response:
        return self.ask(f"/api/actions/{action}", role, "POST", json=body, headers={"X-EDL-Request": "1"})

    def close(self) -> None:
        """End all that the app does in the background; what goes on after that is a defect."""
        loop = self._runner.get_loop()
        self._runner.close()
        assert not (left := asyncio.all_tasks(loop)), left

    async def connect(self, path: str, query: bytes, send: Send) -> None:
        """Ask as a viewer whose client takes messages as `send` does."""
        (mounted,) = EdlPlugin.fastapi_apps
        scope = {"type": "http", "method": "GET", "path": path, "query_string": query, "root_path": "", "app": None}
        headers = [(name.lower().encode(), value.encode()) for name, value in self._login("viewer").items()]
        await mounted["app"]({**scope, "headers": headers}, asyncio.Event().wait, send)

    def _login(self, role: str) -> dict[str, str]:
        user = SimpleAuthManagerUser(username=f"the {role}", role=role)
        return {"Authorization": f"Bearer {self._manager.generate_jwt(user)}"}

    async def _ask(self, path: str, role: str, method: str, **more: Any) -> httpx.Response:
        (mounted,) = EdlPlugin.fastapi_apps
        headers = dict(more.pop("headers", {}))
        if role:
            headers |= self._login(role)
        transport = httpx.ASGITransport(app=mounted["app"])
        async with httpx.AsyncClient(transport=transport, base_url="http://airflow.example") as client:
            return await client.request(method, path, headers=headers, **more)


def made_database(folder: Path) -> Any:
    """Airflow's tables, empty."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.iter_modules(airflow.models.__path__, "airflow.models."):
            importlib.import_module(module.name)
    engine = create_engine(f"sqlite:///{folder}/airflow.db")
    Base.metadata.create_all(engine)
    return scoped_session(sessionmaker(engine, expire_on_commit=False))


def running_api(world: World, database: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """The plugin's API with an Airflow whose database is empty; jobs that are left are removed."""
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "s" * 64)
    monkeypatch.setattr(settings, "Session", database)
    monkeypatch.setattr(airflow_app._AuthManagerState, "instance", manager := Roles())  # type: ignore[no-untyped-call]
    monkeypatch.setattr("edl_airflow.plugin.access.CACHED_S", 0.0)
    monkeypatch.setattr(viewers, "SCOPE_HOLDS_S", 0.0)
    monkeypatch.setattr("edl_airflow.plugin.live.READ_EVERY_S", 0.1)
    monkeypatch.setattr("edl_airflow.plugin.live.REST", 0.0)
    api = Api(manager)
    yield api
    api.close()
    with create_session() as session:
        for model in (Log, TaskInstance, XComModel):
            session.query(model).delete()
    for name in world.jobs():
        asyncio.run(world.backend.delete(name))


def submit(world: World, name: str, dag: str = "", *, words: tuple[str, ...] = WAITS, **more: Any) -> None:
    """Start a job or pool; as `dag`'s task with the try TRY, or as nobody's."""
    given: dict[str, Any] = {"kind": "trainer", "command": words, "bounds": Bounds(1, 1), "instances": 1, **more}
    token = f"{owner(TaskKey(**{**_fields(TASK), 'dag_id': dag}))}/{TRY}" if dag else "edl-submit-1/0"
    asyncio.run(world.backend.submit(JobSpec(name=name, **given), token=token, secrets={}))


def _fields(task: TaskKey) -> dict[str, Any]:
    return {name: getattr(task, name) for name in task.__struct_fields__}


def add_task(task: TaskKey = TASK, state: str = "deferred") -> None:
    """Let Airflow know a task instance, whose try is TRY."""
    values = {"id": uuid.UUID(TRY), "state": state, "pool": "default_pool", "pool_slots": 1, "try_number": 1}
    with create_session() as session:
        session.execute(insert(TaskInstance).values(**_fields(task), **values))


def add_link(url: str, key: str = "_link_TrainersLink", task: TaskKey = TASK) -> None:
    """Let a task instance have a link in the UI, as its operator adds it."""
    with create_session() as session:
        session.execute(insert(XComModel).values(**_fields(task), dag_run_id=1, key=key, value=url))


def report(world: World, job: str, **more: Any) -> None:
    async def publish() -> None:
        status = await world.backend.get(job)
        given: dict[str, Any] = {"step": 7, "updated_at": status.created_at + 1, **more}
        async with connect(world.redis_url) as client:
            await publish_progress(client, world.namespace, job, Progress(**given))

    asyncio.run(publish())


def overview(api: Api, until: str, where: str = "") -> Any:
    """Ask for the overview until it has this text."""
    found: list[Any] = []

    def has() -> bool:
        found[:] = [api.get(f"overview{where}")]
        return until in json.dumps(found[0])

    wait_until(has)
    return found[0]


def audit() -> list[tuple[str, str, str | None, str]]:
    with create_session() as session:
        rows = session.scalars(select(Log).order_by(Log.id)).all()
        return [(row.event, row.owner or "", row.dag_id, json.loads(row.extra or "{}")["outcome"]) for row in rows]
