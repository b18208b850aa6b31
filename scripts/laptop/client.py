"""A small client of Airflow's REST API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec
import stamina

from edl_runtime.errors import EdlError

TIMEOUT_S = 90.0
LOCKED_S = 60.0


@dataclass(eq=False, repr=False)
class ApiError(EdlError):
    """Raised when Airflow refuses a request."""

    method: str
    path: str
    status: int
    reason: str

    def __str__(self) -> str:
        return f"Airflow answered {self.method} {self.path} with {self.status}: {self.reason}"


class DagRun(msgspec.Struct, frozen=True):
    """A run of a DAG."""

    dag_id: str
    run_id: str


class TaskInstance(msgspec.Struct, frozen=True):
    """A task instance of a run. `state` is "none" before it is scheduled."""

    task_id: str
    state: str
    try_number: int


class AirflowClient:
    """Talks to one API server as one user. A context manager, which closes its connections.

    Requests that find Airflow's SQLite locked have changed nothing and are retried for a minute: the API server writes
    its audit log in its event loop, where it may block the request that holds the lock. Raises httpx.TransportError
    while the server is not reachable, ApiError for refused requests.
    """

    def __init__(self, url: str, user: str, password: str) -> None:
        self._login = {"username": user, "password": password}
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def log_in(self) -> None:
        """Get a token, valid for a day; every other method needs it."""
        token = self._ask("POST", "/auth/token", json=self._login)["access_token"]
        self._http.headers["Authorization"] = f"Bearer {token}"

    def dag(self, dag_id: str) -> dict[str, Any] | None:
        """Return the DAG's details, None before its file was parsed."""
        try:
            dag: dict[str, Any] = self._ask("GET", f"/api/v2/dags/{dag_id}")
        except ApiError as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise
        return dag

    def import_errors(self) -> list[str]:
        """Return the import errors of DAG files."""
        return [error["stack_trace"] for error in self._ask("GET", "/api/v2/importErrors")["import_errors"]]

    def unpause(self, dag_id: str) -> None:
        """Let the DAG's runs start."""
        self._ask("PATCH", f"/api/v2/dags/{dag_id}", json={"is_paused": False})

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> DagRun:
        """Start a run with these values for the DAG's Params."""
        body = {"logical_date": None, "conf": dict(conf or {})}
        return DagRun(dag_id, self._ask("POST", f"/api/v2/dags/{dag_id}/dagRuns", json=body)["dag_run_id"])

    def runs(self, dag_id: str, states: Sequence[str] = ()) -> list[DagRun]:
        """Return the DAG's runs, the newest first; only those in one of `states`, if given."""
        wanted = {"order_by": "-run_after", "state": list(states)}
        found = self._ask("GET", f"/api/v2/dags/{dag_id}/dagRuns", params=wanted)["dag_runs"]
        return [DagRun(dag_id, run["dag_run_id"]) for run in found]

    def fail(self, run: DagRun) -> None:
        """Mark the run as failed, which ends its tasks."""
        self._ask("PATCH", _path(run), json={"state": "failed"})

    def state(self, run: DagRun) -> str:
        """Return the run's state: queued, running, success or failed."""
        return str(self._ask("GET", _path(run))["state"])

    def tasks(self, run: DagRun) -> list[TaskInstance]:
        """Return the run's task instances."""
        found = self._ask("GET", f"{_path(run)}/taskInstances")["task_instances"]
        return [TaskInstance(task["task_id"], task["state"] or "none", task["try_number"]) for task in found]

    def xcom(self, run: DagRun, task_id: str) -> Any:
        """Return the task's result."""
        path = f"{_path(run)}/taskInstances/{task_id}/xcomEntries/return_value"
        return self._ask("GET", path, params={"stringify": "false"})["value"]

    def links(self, run: DagRun, task_id: str) -> dict[str, str | None]:
        """Return the URLs of the task's links, by name."""
        links: dict[str, str | None] = self._ask("GET", f"{_path(run)}/taskInstances/{task_id}/links")["extra_links"]
        return links

    def log(self, run: DagRun, task: TaskInstance) -> list[str]:
        """Return the lines of the log of the task's last try."""
        path = f"{_path(run)}/taskInstances/{task.task_id}/logs/{task.try_number}"
        return list(_lines(self._ask("GET", path, params={"full_content": "true"})["content"]))

    def _ask(self, method: str, path: str, **given: Any) -> Any:
        for attempt in stamina.retry_context(on=_found_it_locked, attempts=None, timeout=LOCKED_S):
            with attempt:
                answer = self._http.request(method, path, headers={"Accept": "application/json"}, **given)
                if answer.is_error:
                    raise ApiError(method, path, answer.status_code, answer.text)
        return answer.json()


def _found_it_locked(error: Exception) -> bool:
    """Whether Airflow's database failed, which for SQLite means that it was locked."""
    is_internal = isinstance(error, ApiError) and error.status == httpx.codes.INTERNAL_SERVER_ERROR
    return is_internal and "Database error" in str(error)


def _path(run: DagRun) -> str:
    return f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}"


def _lines(content: list[dict[str, Any] | str]) -> Iterator[str]:
    for entry in content:
        if isinstance(entry, str):
            yield entry
            continue
        yield str(entry.get("event", ""))
        for error in entry.get("error_detail") or []:
            yield f"{error['exc_type']}: {error['exc_value']}"
