"""Traffic windows in a real Airflow: a run begins at an edge, and a sensor that is deferred fires there."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from laptop.client import DagRun
from support.airflow.shared import LOOK_EVERY_S, Airflow, beside_others

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
    def tell(**context):
        return to_window_result(window_for_run(WINDOWS, context))

    tell()
"""


@beside_others
def test_a_run_begins_and_a_sensor_ends_at_the_edge(airflow: Airflow) -> None:
    """With the window as its interval; until then the default's run, made at once, waits. The UI has it in words."""
    client = airflow.client
    before, edge = _waits_for_an_edge(airflow)
    dag = client._ask("GET", f"/api/v2/dags/{before.dag_id}")
    times = sorted(f"{moment:%H:%M}" for moment in (edge, edge + LASTS))
    assert dag["timetable_summary"] == f"at {', '.join(times)} UTC: rush (at most 2 gpu), default (all)"
    assert dag["timetable_description"].startswith("A run when each window begins, for as long as it holds. rush: ")
    assert _moments(airflow, before)[:3] == [edge + LASTS - timedelta(days=1), edge + LASTS - timedelta(days=1), edge]

    while datetime.now(UTC) < edge:  # perhaps for longer than anything else may take
        airflow.check()
        time.sleep(LOOK_EVERY_S)
    rush, _ = airflow.until(lambda: len(runs := client.runs(before.dag_id)) == 2 and runs)
    for run in (before, rush):
        airflow.until(lambda run=run: client.state(run) == "success")
    *planned, began = _moments(airflow, rush)
    assert planned == [edge, edge, edge + LASTS]
    assert began
    assert edge <= began
    assert edge <= datetime.fromisoformat(airflow.task(before, "wait")["end_date"])
    sizes = {"cluster": {"gpu": 2}}
    window = {"window": "rush", "start": edge.isoformat(), "end": (edge + LASTS).isoformat(), "sizes": sizes}
    assert [client.xcom(run, "wait") for run in (before, rush)] == [window, window]
    assert (client.xcom(before, "tell")["window"], client.xcom(rush, "tell")) == ("default", window)

    by_hand = client.trigger(before.dag_id)
    assert _moments(airflow, by_hand)[1:3] == [None, None]
    airflow.until(lambda: client.state(by_hand) == "success")
    assert client.xcom(by_hand, "tell") == window
    airflow.pause(before.dag_id)


def _waits_for_an_edge(airflow: Airflow) -> tuple[DagRun, datetime]:
    """Return a run that waits, and until when: on a machine that was too slow for one edge, of a DAG with a later."""
    for minutes in (1, 3, 6):
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
        run = airflow.until(lambda name=name: airflow.client.runs(name))[-1]
        airflow.until(lambda run=run: airflow.task(run, "wait")["state"] in ("deferred", "success"))
        if airflow.task(run, "wait")["state"] == "deferred" and datetime.now(UTC) < edge:
            return run, edge
        airflow.pause(name)
    pytest.fail("no edge was late enough")


def _moments(airflow: Airflow, run: DagRun) -> list[datetime | None]:
    """Return when the run was to begin, start and end of its interval, and when it began."""
    found = airflow.client._ask("GET", f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}")
    fields = ("run_after", "data_interval_start", "data_interval_end", "start_date")
    return [found[field] and datetime.fromisoformat(found[field]) for field in fields]
