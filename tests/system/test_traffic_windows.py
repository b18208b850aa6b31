"""Traffic windows in a real Airflow: a run starts at a window's edge, and a deferred sensor fires there."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from laptop.client import DagRun
from support.airflow.shared import POLL_EVERY_S, Airflow, in_parallel

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

LASTS = timedelta(minutes=15)

DAG_FILE = """
from pathlib import Path

from airflow.sdk import DAG, task

from edl_airflow.sensors.traffic import EdlTrafficSensor
from edl_airflow.timetables.traffic_window import TrafficWindowTimetable
from edl_airflow.traffic_windows import load_windows, to_window_result, window_for_run

FILE = Path("{name}.yaml")
WINDOWS = load_windows(FILE)

with DAG("{name}", schedule=TrafficWindowTimetable(WINDOWS)):
    EdlTrafficSensor(task_id="wait", windows=FILE, window="rush", deferrable=True)

    @task
    def window(**context):
        return to_window_result(window_for_run(WINDOWS, context))

    window()
"""


@in_parallel
def test_a_run_starts_and_a_sensor_fires_at_the_edge_of_a_window(airflow: Airflow) -> None:
    """With the window as its data interval; until then the run of the default window waits. The UI lists both."""
    client = airflow.client
    before, edge = _run_before_an_edge(airflow)
    dag = client._ask("GET", f"/api/v2/dags/{before.dag_id}")
    times = sorted(f"{moment:%H:%M}" for moment in (edge, edge + LASTS))
    assert dag["timetable_summary"] == f"at {', '.join(times)} UTC: rush (at most 2 gpu), default (all)"
    assert dag["timetable_description"].startswith("A run when each window begins, for as long as it holds. rush: ")
    assert _moments(airflow, before)[:3] == [edge + LASTS - timedelta(days=1), edge + LASTS - timedelta(days=1), edge]

    while datetime.now(UTC) < edge:  # may take longer than `wait_until` allows
        airflow.check()
        time.sleep(POLL_EVERY_S)
    rush, _ = airflow.wait_until(lambda: len(runs := client.runs(before.dag_id)) == 2 and runs)
    for run in (before, rush):
        airflow.wait_until(lambda run=run: client.state(run) == "success")
    *planned, began = _moments(airflow, rush)
    assert planned == [edge, edge, edge + LASTS]
    assert began
    assert edge <= began
    assert edge <= datetime.fromisoformat(airflow.task(before, "wait")["end_date"])
    sizes = {"cluster": {"gpu": 2}}
    window = {"window": "rush", "start": edge.isoformat(), "end": (edge + LASTS).isoformat(), "sizes": sizes}
    assert [client.xcom(run, "wait") for run in (before, rush)] == [window, window]
    assert (client.xcom(before, "window")["window"], client.xcom(rush, "window")) == ("default", window)

    by_hand = client.trigger(before.dag_id)
    assert _moments(airflow, by_hand)[1:3] == [None, None]
    airflow.wait_until(lambda: client.state(by_hand) == "success")
    assert client.xcom(by_hand, "window") == window
    airflow.pause(before.dag_id)


def _run_before_an_edge(airflow: Airflow) -> tuple[DagRun, datetime]:
    """Return a waiting run and its edge; on a machine too slow for one edge, of a DAG with a later edge."""
    for minutes in (1, 3, 6, 12):
        name = f"follows_traffic_{minutes}"
        edge = (datetime.now(UTC) + timedelta(minutes=minutes + 1)).replace(second=0, microsecond=0)
        (airflow.laptop.dags / f"{name}.yaml").write_text(f"""
windows:
  - {{name: rush, start: {edge:%H:%M}, end: {edge + LASTS:%H:%M}, sizes: {{cluster: {{gpu: 2}}}}}}
default: {{}}
""")
        (airflow.laptop.dags / f"{name}.py").write_text(DAG_FILE.format(name=name))
        airflow.laptop.wait_for_dag(airflow.client, name)
        airflow.client.unpause(name)
        run = airflow.wait_until(lambda name=name: airflow.client.runs(name))[-1]
        airflow.wait_until(lambda run=run: airflow.task(run, "wait")["state"] in ("deferred", "success"))
        if airflow.task(run, "wait")["state"] == "deferred" and datetime.now(UTC) < edge:
            return run, edge
        airflow.pause(name)
    pytest.fail("no edge was late enough")


def _moments(airflow: Airflow, run: DagRun) -> list[datetime | None]:
    """Return the run's `run_after`, start and end of its data interval, and start date."""
    found = airflow.client._ask("GET", f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}")
    fields = ("run_after", "data_interval_start", "data_interval_end", "start_date")
    return [found[field] and datetime.fromisoformat(found[field]) for field in fields]
