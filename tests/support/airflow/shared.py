"""The one Airflow of all system tests, in which those that do nothing but wait go on side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from conftest import skip_on_a_laptop
from laptop.client import AirflowClient, DagRun
from laptop.follow import follow_run
from laptop.launcher import Laptop
from support.airflow.interrupted_runs import Case
from support.airflow.places import Place, Pods, ThisMachine
from support.network.proxy import Proxy

WITHIN_S = 300.0
"""How long anything may take before it counts as hanging: all tests share two cores."""

LOOK_EVERY_S = 1.0
"""Several tests at a time ask the one API server."""

AT_A_TIME = 6

Test = Callable[..., None]


class Airflow:
    """A running Airflow with the connections `edl_default` and `edl_rescaled` to this machine.

    Where there is a cluster it has `edl_near`, and `edl_far` through `proxy`, for pods of the plain image; `edl_pods`
    for those of the image with Paddle, if there is one. `rescaled` is the folder of the jobs of `edl_rescaled`.
    """

    def __init__(
        self, laptop: Laptop, client: AirflowClient, *, rescaled: Path, pods: Pods | None, proxy: Proxy | None
    ) -> None:
        self.laptop = laptop
        self.client = client
        self.rescaled = rescaled
        self.proxy = proxy
        self._pods = pods
        self._threads = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="side-by-side")
        self._outcomes: dict[object, Future[None]] = {}
        self._cases: dict[str, Future[Case]] = {}
        self._begins = Lock()  # Airflow's SQLite has one writer at a time
        self._is_over = False

    @property
    def pods(self) -> Pods:
        if self._pods is None:
            skip_on_a_laptop("no Kubernetes here: see `make test-kubernetes`")
        return self._pods

    def start(self, tests: Sequence[pytest.Item]) -> None:
        """Let all go on that may go on beside others, and begin the deferred runs of those that may not.

        Those without a `place` last longest, and begin first.
        """
        for item in sorted(tests, key=lambda item: "place" in getattr(item, "fixturenames", ())):
            if not isinstance(item, pytest.Function) or (item.get_closest_marker("kubernetes") and not self._pods):
                continue
            given = item.callspec.params if hasattr(item, "callspec") else {}
            if beside := getattr(item.function, "beside_others", None):
                self._outcomes[_key(beside, given)] = self._threads.submit(beside, airflow=self, **given)
            elif (name := getattr(item.function, "alone", "")) and given["state"] == "deferred":
                name = _case_name(name, **given)
                self._cases[name] = self._threads.submit(self._started, name)

    def stop(self) -> None:
        """End the tests that still go on."""
        self._is_over = True
        self._threads.shutdown(cancel_futures=True)

    def outcome(self, test: Test, given: Mapping[str, Any]) -> None:
        """Wait until a test that goes on beside others is over. Raises what it has raised."""
        if _key(test, given) not in self._outcomes:
            _ = self.pods
        self._outcomes[_key(test, given)].result()

    def wait_for_others(self) -> None:
        """Return when no test goes on beside this one."""
        wait([*self._outcomes.values(), *self._cases.values()])

    def case(self, name: str, state: str, place: str) -> Case:
        """Return the run of a DAG of dags/interrupted.py, which may have begun before."""
        full = _case_name(name, state, place)
        return self._cases[full].result() if full in self._cases else self._case(full)

    def begin(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> DagRun:
        """Switch a DAG on and trigger a run."""
        self.laptop.wait_for_dag(self.client, dag_id)
        with self._begins:
            self.client.unpause(dag_id)
            return self.client.trigger(dag_id, conf)

    def run(self, dag_id: str, conf: Mapping[str, Any], say: Callable[[str], None] = print) -> DagRun:
        """Trigger a run and follow it until it has succeeded."""
        run = self.begin(dag_id, conf)
        follow_run(self.client, run, say, check=self.check, timeout_s=3 * WITHIN_S)
        return run

    def task(self, run: DagRun, task_id: str) -> dict[str, Any]:
        """Return what Airflow's API says of a task."""
        path = f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances/{task_id}"
        found: dict[str, Any] = self.client._ask("GET", path)
        return found

    def pause(self, dag_id: str) -> None:
        """Let no more runs start."""
        self.client._ask("PATCH", f"/api/v2/dags/{dag_id}", json={"is_paused": True})

    def nothing_is_left(self, *marks: str, place: Place | None = None) -> None:
        """Wait until there is nothing more of jobs and pools whose names begin so, on this machine or elsewhere."""
        at = place or ThisMachine(self.laptop)
        self.until(lambda: not at.left(marks), lambda: f"there are {at.left(marks)}")

    def until(self, condition: Callable[[], Any], otherwise: Callable[[], str] = lambda: "nothing came of it") -> Any:
        """Wait for something to be true, and return it."""
        deadline = time.monotonic() + WITHIN_S
        while not (found := condition()):
            self.check()
            assert time.monotonic() < deadline, otherwise()
            time.sleep(LOOK_EVERY_S)
        return found

    def check(self) -> None:
        """Raise if there is no point in going on."""
        assert not self._is_over, "the other tests are over"
        self.laptop.check()

    def _started(self, name: str) -> Case:
        case = self._case(name)
        case.student()
        return case

    def _case(self, name: str) -> Case:
        place = self.pods if name.startswith("pods") else ThisMachine(self.laptop)
        folder = self.laptop.home / "interrupted" / name
        folder.mkdir(parents=True)
        folder.chmod(0o777)  # a student in a pod is another user
        run = self.begin(name)
        return Case(folder, run, laptop=self.laptop, client=self.client, place=place, until=self.until)


def beside_others(test: Test) -> Test:
    """Let a test go on, in a thread, from when Airflow is up; it has no fixture but `airflow`, and is quiet."""

    @wraps(test)
    def waits(airflow: Airflow, **given: Any) -> None:
        airflow.outcome(test, given)

    waits.beside_others = test  # type: ignore[attr-defined]
    return waits


def alone(case: str) -> Callable[[Test], Test]:
    """Let a test that hurts Airflow begin when all that go on beside others are over; its `case` has begun before."""

    def waiting(test: Test) -> Test:
        @wraps(test)
        def waits(airflow: Airflow, **given: Any) -> None:
            if given["place"] == "pods":
                _ = airflow.pods
            airflow.wait_for_others()
            test(airflow, **given)

        waits.alone = case  # type: ignore[attr-defined]
        return waits

    return waiting


def _case_name(name: str, state: str, place: str) -> str:
    return f"{place}_{name}_while_{state}"


def _key(test: Test, given: Mapping[str, Any]) -> object:
    return test.__module__, test.__name__, *sorted(given.items())
