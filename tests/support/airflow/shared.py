"""The one Airflow of all system tests, in which those that only wait run in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
import pytest
from conftest import skip_on_a_laptop
from laptop.client import AirflowClient, DagRun
from laptop.follow import follow_run
from laptop.launcher import Laptop
from support.airflow.interrupted_runs import Case
from support.airflow.job_hosts import JobHost, LocalHost, PodHost
from support.network.proxy import Proxy

WITHIN_S = 300.0
"""Longest wait for an expected state: all tests share two cores."""

POLL_EVERY_S = 1.0
"""Several tests at a time poll the one API server."""

PARALLEL_TESTS = 6

Test = Callable[..., None]


class Airflow:
    """A running Airflow with the connections `edl_default` and `edl_rescaled` to this machine.

    With a cluster also `edl_near`, and `edl_far` through `proxy`, for pods of the plain image, and `edl_pods` for
    pods of the image with Paddle. `rescaled` is the folder of the jobs of `edl_rescaled`.
    """

    def __init__(
        self, laptop: Laptop, client: AirflowClient, *, rescaled: Path, pods: PodHost | None, proxy: Proxy | None
    ) -> None:
        self.laptop = laptop
        self.client = client
        self.rescaled = rescaled
        self.proxy = proxy
        self._pods = pods
        self._threads = ThreadPoolExecutor(PARALLEL_TESTS, thread_name_prefix="parallel-test")
        self._outcomes: dict[object, Future[None]] = {}
        self._cases: dict[str, Future[Case]] = {}
        self._begins = Lock()  # Airflow's SQLite has one writer at a time
        self._is_over = False

    @property
    def pods(self) -> PodHost:
        if self._pods is None:
            skip_on_a_laptop("no Kubernetes here: see `make test-kubernetes`")
        return self._pods

    def start(self, tests: Sequence[pytest.Item]) -> None:
        """Start the tests that run in parallel, and the deferred runs of the exclusive ones.

        Tests without a `backend` take longest, and start first.
        """
        for item in sorted(tests, key=lambda item: "backend" in getattr(item, "fixturenames", ())):
            if not isinstance(item, pytest.Function) or (item.get_closest_marker("kubernetes") and not self._pods):
                continue
            given = item.callspec.params if hasattr(item, "callspec") else {}
            if test := getattr(item.function, "in_parallel", None):
                self._outcomes[_key(test, given)] = self._threads.submit(test, airflow=self, **given)
            elif (name := getattr(item.function, "exclusive", "")) and given["state"] == "deferred":
                name = _case_name(name, **given)
                self._cases[name] = self._threads.submit(self._started, name)

    def stop(self) -> None:
        """End the tests that still run."""
        self._is_over = True
        self._threads.shutdown(cancel_futures=True)

    def outcome(self, test: Test, given: Mapping[str, Any]) -> None:
        """Wait until a parallel test has ended. Raises what it has raised."""
        if _key(test, given) not in self._outcomes:
            _ = self.pods
        self._outcomes[_key(test, given)].result()

    def wait_for_others(self) -> None:
        """Wait until no parallel test runs."""
        wait([*self._outcomes.values(), *self._cases.values()])

    def case(self, name: str, state: str, backend: str) -> Case:
        """Return the run of a DAG of dags/interrupted.py, which may have started before."""
        full = _case_name(name, state, backend)
        return self._cases[full].result() if full in self._cases else self._case(full)

    def begin(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> DagRun:
        """Unpause a DAG and trigger a run."""
        self.laptop.wait_for_dag(self.client, dag_id)
        with self._begins:
            self.client.unpause(dag_id)
            return self.client.trigger(dag_id, conf)

    def run(self, dag_id: str, conf: Mapping[str, Any], log: Callable[[str], None] = print) -> DagRun:
        """Trigger a run and follow it until it has succeeded."""
        run = self.begin(dag_id, conf)
        follow_run(self.client, run, log, check=self.check, timeout_s=3 * WITHIN_S)
        return run

    def task(self, run: DagRun, task_id: str) -> dict[str, Any]:
        """Return a task of a run, as in Airflow's API."""
        path = f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances/{task_id}"
        found: dict[str, Any] = self.client._ask("GET", path)
        return found

    def shown(self, what: str, **params: str) -> dict[str, Any]:
        """Return an answer of the plugin's page, as "overview", once Airflow is not too busy for one."""

        def answer() -> Any:
            found = self.client._http.get(f"/edl/api/{what}", params=params)
            return found if found.status_code != httpx.codes.SERVICE_UNAVAILABLE else None

        answered = self.wait_until(answer)
        assert answered.status_code == httpx.codes.OK, answered.text
        found: dict[str, Any] = answered.json()
        return found

    def pause(self, dag_id: str) -> None:
        """Pause a DAG."""
        self.client._ask("PATCH", f"/api/v2/dags/{dag_id}", json={"is_paused": True})

    def wait_until_nothing_remains(self, *prefixes: str, host: JobHost | None = None) -> None:
        """Wait until no job or pool with one of the prefixes remains on the host, by default this machine."""
        at = host or LocalHost(self.laptop)
        self.wait_until(lambda: not at.remaining(prefixes), lambda: f"remaining: {at.remaining(prefixes)}")

    def wait_until(
        self, condition: Callable[[], Any], otherwise: Callable[[], str] = lambda: "it did not become true"
    ) -> Any:
        """Wait until a condition is true; return its value."""
        deadline = time.monotonic() + WITHIN_S
        while not (found := condition()):
            self.check()
            assert time.monotonic() < deadline, otherwise()
            time.sleep(POLL_EVERY_S)
        return found

    def check(self) -> None:
        """Raise if the tests are over or Airflow has failed."""
        assert not self._is_over, "the tests are over"
        self.laptop.check()

    def _started(self, name: str) -> Case:
        case = self._case(name)
        case.wait_for_student()
        return case

    def _case(self, name: str) -> Case:
        host = self.pods if name.startswith("pods") else LocalHost(self.laptop)
        folder = self.laptop.home / "interrupted" / name
        folder.mkdir(parents=True)
        folder.chmod(0o777)  # a student in a pod is another user
        run = self.begin(name)
        return Case(folder, run, laptop=self.laptop, client=self.client, host=host, wait_until=self.wait_until)


def in_parallel(test: Test) -> Test:
    """Run a test in a thread once Airflow is up; it has no fixture but `airflow`, and does not disturb others."""

    @wraps(test)
    def waits(airflow: Airflow, **given: Any) -> None:
        airflow.outcome(test, given)

    waits.in_parallel = test  # type: ignore[attr-defined]
    return waits


def exclusive(case: str = "") -> Callable[[Test], Test]:
    """Run a test that breaks Airflow after all parallel ones; its `case`, if any, has started before."""

    def decorate(test: Test) -> Test:
        @wraps(test)
        def waits(airflow: Airflow, **given: Any) -> None:
            if given["backend"] == "pods":
                _ = airflow.pods
            airflow.wait_for_others()
            test(airflow, **given)

        waits.exclusive = case  # type: ignore[attr-defined]
        return waits

    return decorate


def _case_name(name: str, state: str, backend: str) -> str:
    return f"{backend}_{name}_while_{state}"


def _key(test: Test, given: Mapping[str, Any]) -> object:
    return test.__module__, test.__name__, *sorted(given.items())
