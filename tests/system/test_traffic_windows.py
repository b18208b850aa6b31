"""Traffic windows in a real Airflow: a run begins at an edge, and a sensor that is deferred fires there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from edl_airflow.laptop.client import AirflowClient, Run
from edl_airflow.laptop.launcher import Laptop

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DAG_ID = "follows_traffic"
AHEAD = timedelta(seconds=150)
"""How far ahead the edge is: by then the DAG is read and switched on, and its sensor deferred, on two busy cores."""

LASTS = timedelta(minutes=15)
LATE = timedelta(seconds=30)
"""How long after the edge a run may have begun, or a sensor have ended, on two busy cores."""

DAG_FILE = """
from pathlib import Path

from airflow.sdk import DAG, task

from edl_airflow.sensors.traffic import EdlTrafficSensor
from edl_airflow.timetables.traffic_window import TrafficWindowTimetable
from edl_airflow.windows import as_windows, window_now, window_of

WINDOWS = as_windows(Path("follows_traffic.yaml"))

with DAG("follows_traffic", schedule=TrafficWindowTimetable(WINDOWS)):
    EdlTrafficSensor(task_id="wait", windows=Path("follows_traffic.yaml"), window="rush", deferrable=True)

    @task
    def tell(**context):
        return window_now(window_of(WINDOWS, context))

    tell()
"""


@pytest.fixture
def edge(dags: Path, client: AirflowClient) -> Iterator[datetime]:
    """When the window "rush" of a DAG begins that is there from now on; at all other times the default holds."""
    edge = (datetime.now(UTC) + AHEAD + timedelta(minutes=1)).replace(second=0, microsecond=0)
    (dags / "follows_traffic.yaml").write_text(f"""
windows:
  - {{name: rush, start: {edge:%H:%M}, end: {edge + LASTS:%H:%M}, sizes: {{cluster: {{gpu: 2}}}}}}
default: {{}}
""")
    (dags / "follows_traffic.py").write_text(DAG_FILE)
    yield edge
    client._ask("PATCH", f"/api/v2/dags/{DAG_ID}", json={"is_paused": True})


def test_a_run_begins_and_a_sensor_ends_at_the_edge(laptop: Laptop, client: AirflowClient, edge: datetime) -> None:
    """With the window as its interval; until then the default's run, made at once, waits. The UI has it in words."""
    laptop.wait_for_dag(client, DAG_ID)
    dag = client._ask("GET", f"/api/v2/dags/{DAG_ID}")
    times = sorted(f"{moment:%H:%M}" for moment in (edge, edge + LASTS))
    assert dag["timetable_summary"] == f"at {', '.join(times)} UTC: rush (at most 2 gpu), default (all)"
    assert dag["timetable_description"].startswith("A run when each window begins, for as long as it holds. rush: ")

    client.unpause(DAG_ID)
    (before,) = _until(laptop, 90, lambda: client.runs(DAG_ID))
    assert _moments(client, before)[:3] == [edge + LASTS - timedelta(days=1), edge + LASTS - timedelta(days=1), edge]
    _until(laptop, 90, lambda: _task(client, before, "wait")["state"] == "deferred")
    assert datetime.now(UTC) < edge, "too late to see anything happen at the edge"

    left_s = (edge - datetime.now(UTC)).total_seconds()
    rush, _ = _until(laptop, left_s + 60, lambda: runs if len(runs := client.runs(DAG_ID)) == 2 else None)
    after, *interval, began = _moments(client, rush)
    assert (after, interval) == (edge, [edge, edge + LASTS])
    assert edge <= began <= edge + LATE

    for run in (before, rush):
        _until(laptop, 90, lambda run=run: client.state(run) == "success")
    ended = datetime.fromisoformat(_task(client, before, "wait")["end_date"])
    assert edge <= ended <= edge + LATE
    sizes = {"cluster": {"gpu": 2}}
    window = {"window": "rush", "start": edge.isoformat(), "end": (edge + LASTS).isoformat(), "sizes": sizes}
    assert [client.xcom(run, "wait") for run in (before, rush)] == [window, window]
    assert (client.xcom(before, "tell")["window"], client.xcom(rush, "tell")) == ("default", window)

    by_hand = client.trigger(DAG_ID)
    assert _moments(client, by_hand)[1:3] == [None, None]
    _until(laptop, 90, lambda: client.state(by_hand) == "success")
    assert client.xcom(by_hand, "tell") == window


def _moments(client: AirflowClient, run: Run) -> list[datetime | None]:
    """Return when the run was to begin, start and end of its interval, and when it began."""
    found = client._ask("GET", f"/api/v2/dags/{DAG_ID}/dagRuns/{run.run_id}")
    fields = ("run_after", "data_interval_start", "data_interval_end", "start_date")
    return [found[field] and datetime.fromisoformat(found[field]) for field in fields]


def _task(client: AirflowClient, run: Run, task_id: str) -> dict[str, Any]:
    found: dict[str, Any] = client._ask("GET", f"/api/v2/dags/{DAG_ID}/dagRuns/{run.run_id}/taskInstances/{task_id}")
    return found


def _until(laptop: Laptop, within_s: float, condition: Callable[[], Any]) -> Any:
    """Wait for something to be true, and return it."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        laptop.check()
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.2)
    return found
