"""The DAGs that people start from."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, BaseOperator
from airflow.sdk.exceptions import AirflowSkipException
from airflow.serialization.serialized_objects import DagSerialization
from airflow.utils.types import DagRunType
from support.airflow.fakes import rendered
from support.paths import DAGS

from edl_airflow.timetables.traffic_window import TrafficWindowTimetable
from edl_runtime.autoscale.traffic.schema import read_windows


def _dag(name: str) -> DAG:
    made = runpy.run_path(str(DAGS / f"{name}.py")).values()
    return next(task.dag for task in made if isinstance(task, BaseOperator))


@pytest.mark.parametrize(("low", "high", "grown"), [(1, 3, "3"), (2, 2, "2"), (3, 1, "3")])
def test_the_quickstart_takes_any_values_of_its_form(low: int, high: int, grown: str) -> None:
    """The pool never shrinks, and the report waits for nothing but the student."""
    made = runpy.run_path(str(DAGS / "edl_quickstart_distill.py"))
    params = {name: param.value for name, param in made["PARAMS"].items()}
    context: Any = {
        "params": {**params, "teachers_min": low, "teachers_max": high},
        "dag_run": SimpleNamespace(run_after=datetime(2026, 1, 1, tzinfo=UTC)),
    }
    for task in ("distill", "pool_in_use", "grow_pool"):
        made[task].render_template_fields(context)
    assert made["distill"].teachers == f"{low}:{grown}"
    assert (made["pool_in_use"].at_least, made["grow_pool"].instances) == (str(low), grown)
    assert made["report"].upstream_task_ids == {"distill"}


def test_the_quickstart_runs_only_when_somebody_triggers_it() -> None:
    """Who leaves the demo on to look around finds no training in the night that nobody asked for."""
    assert not _dag("edl_quickstart_distill").timetable.can_be_scheduled


@pytest.mark.parametrize("name", sorted(file.stem for file in DAGS.glob("*.py")))
def test_a_dag_says_what_it_is_and_tries_again(name: str) -> None:
    """People find it by its tags; another try takes over, or stops, what a lost worker has left running."""
    dag = _dag(name)
    often = {"stop_burst": 20}  # nobody sees a teardown that has failed
    assert {task.task_id: task.retries for task in dag.tasks} == {name: often.get(name, 1) for name in dag.task_ids}
    assert all(task.retry_delay.total_seconds() <= 60 for task in dag.tasks)
    assert dag.doc_md
    assert dag.description
    assert "edl" in dag.tags
    assert not dag.catchup
    first, second = (json.dumps(DagSerialization.to_dict(_dag(name)), sort_keys=True) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("low", "high", "most"), [(1, 3, "3"), (3, 1, "3")])
def test_the_nightly_training_takes_any_values_of_its_form(low: int, high: int, most: str) -> None:
    """The three tasks mean the same job, and where checkpoints are is the same every night."""
    made = runpy.run_path(str(DAGS / "edl_nightly_elastic_training.py"))
    params = {name: param.value for name, param in made["PARAMS"].items()}
    places = set()
    for night in (1, 2):
        made = runpy.run_path(str(DAGS / "edl_nightly_elastic_training.py"))
        context: Any = {
            "params": {**params, "trainers_min": low, "trainers_max": high},
            "dag_run": SimpleNamespace(run_after=datetime(2026, 1, night, tzinfo=UTC), run_type="scheduled"),
            "data_interval_end": datetime(2026, 1, night, 7, tzinfo=UTC),
        }
        for task in ("train", "training", "grow"):
            made[task].render_template_fields(context)
        assert made["train"].trainers == f"{low}:{most}"
        assert (made["training"].at_least, made["grow"].instances) == (str(low), most)
        assert not made["grow"].wait, "a rescaling that comes between may give it less"
        assert {made[task].job for task in ("train", "training", "grow")} == {f"nightly-2026010{night}t000000000000"}
        assert made["train"].ends_by == f"2026-01-0{night}T07:00:00+00:00"
        places.add(made["train"].checkpoint.url)
    assert len(places) == 1


@pytest.mark.parametrize(
    ("run_type", "ends_by", "rendered"),
    [
        (DagRunType.SCHEDULED, "", "2026-01-02T07:00:00+00:00"),
        (DagRunType.MANUAL, "", "PT10M"),
        (DagRunType.BACKFILL_JOB, "", "PT10M"),
        (DagRunType.MANUAL, "07:00", "07:00"),
    ],
)
def test_a_nightly_training_by_hand_does_not_last_into_the_night(
    run_type: DagRunType, ends_by: str, rendered: str
) -> None:
    """Unless somebody wants that: nights can't begin while it trains."""
    made = runpy.run_path(str(DAGS / "edl_nightly_elastic_training.py"))
    params = {name: param.value for name, param in made["PARAMS"].items()} | {"ends_by": ends_by}
    run = SimpleNamespace(run_after=datetime(2026, 1, 1, tzinfo=UTC), run_type=run_type)
    context: Any = {"params": params, "dag_run": run}
    if run_type == DagRunType.SCHEDULED:  # a run by hand has no interval
        context["data_interval_end"] = datetime(2026, 1, 2, 7, tzinfo=UTC)
    made["train"].render_template_fields(context)
    assert made["train"].ends_by == rendered


def test_nights_are_the_windows_of_the_file_beside_the_dag() -> None:
    """Each begins and ends with its window, and none is begun in the middle because the DAG was switched on."""
    timetable = _dag("edl_nightly_elastic_training").timetable
    assert isinstance(timetable, TrafficWindowTimetable)
    assert timetable.windows == read_windows((DAGS / "traffic_windows.yaml").read_text())
    assert timetable.summary == "at 22:00 UTC: night (all)"
    assert timetable.run_immediately is False


def test_what_is_set_for_rescaling_holds_for_every_run(context: Any, tmp_path: Path) -> None:
    """It runs at each edge of the windows and every few minutes; a run by hand may be a dry one, and no more."""
    made = runpy.run_path(str(DAGS / "edl_rescale_by_traffic.py"))
    assert made["TIMES"] == ["*/5 * * * *", "0 7 * * *", "0 22 * * *"]
    (task,) = made["rescale"].dag.tasks
    context["params"] = {name: param.value for name, param in made["PARAMS"].items()}
    task = rendered(task, context)
    assert (task.dry_run, task.max_load, task.lead_s) == ("False", 1.0, 300)
    assert task.windows["time_zone"] == "UTC"
    assert set(made["PARAMS"]) == {"dry_run"}
    text = (DAGS / "edl_rescale_by_traffic.py").read_text()
    for name, value in (("EVERY_MINUTES", "15"), ("MAX_LOAD", "0.8"), ("APPROVE_SHRINKS", "True")):
        assert f"\n{name} = {made[name]}\n" in text
        text = text.replace(f"\n{name} = {made[name]}\n", f"\n{name} = {value}\n")
    (tmp_path / "edited.py").write_text(text)
    (tmp_path / "traffic_windows.yaml").write_text((DAGS / "traffic_windows.yaml").read_text())
    edited = runpy.run_path(str(tmp_path / "edited.py"))
    for rescaling in (edited["dry_run"], edited["rescale"]):
        assert (rescaling.max_load, rescaling.lead_s) == (0.8, 900)
    assert edited["TIMES"][0] == "*/15 * * * *"

    assert edited["dry_run"].dry_run is True
    assert edited["rescale"].upstream_task_ids == {"needs_approval", "approve"}
    decide = edited["needs_approval"].function
    grows, shrinks = (
        {"targets": [{"name": "job", "instances": 2, "target": target, "reason": f"gets {target}"}]}
        for target in (3, 1)
    )
    assert decide(grows, {"dry_run": False}) == "rescale"
    assert decide(shrinks, {"dry_run": True}) == "rescale"
    assert decide(shrinks, {"dry_run": False}) == "approve"
    approve = edited["approve"]
    approve.render_template_fields({"ti": SimpleNamespace(xcom_pull=lambda _: shrinks)})
    assert (approve.body, approve.defaults) == ("- job gets 1\n", ["Reject"])


@pytest.mark.parametrize(
    ("conn_id", "dag_id"),
    [("edl_default", "edl_rescale_by_traffic"), ("edl_burst", "edl_rescale_by_traffic_edl_burst")],
)
def test_each_connection_has_a_dag_of_its_own_for_rescaling(conn_id: str, dag_id: str, tmp_path: Path) -> None:
    """One place waits for no other: each has its own runs, at the events of its own jobs."""
    text = (DAGS / "edl_rescale_by_traffic.py").read_text()
    assert "\nCONNECTIONS = [DEFAULT_CONN_ID]\n" in text
    (tmp_path / "edited.py").write_text(text.replace("[DEFAULT_CONN_ID]", f'["{conn_id}"]'))
    (tmp_path / "traffic_windows.yaml").write_text((DAGS / "traffic_windows.yaml").read_text())
    task = runpy.run_path(str(tmp_path / "edited.py"))["rescale"]
    assert (task.dag.dag_id, task.edl_conn_id) == (dag_id, conn_id)
    assert f"`edl_jobs:{conn_id}`" in task.dag.doc_md
    assert f'"edl_jobs:{conn_id}"' in json.dumps(DagSerialization.to_dict(task.dag))


@pytest.mark.parametrize(("shares", "bursts"), [((None, 0.1, 0.5), True), ((0.1,), False)])
def test_a_pool_bursts_once_its_students_wait(
    shares: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch, *, bursts: bool
) -> None:
    """Not before they have reported anything, and not at all if they don't wait in time."""
    waits = runpy.run_path(str(DAGS / "edl_burst_pool.py"))["burst"].dag.get_task("students_wait").python_callable
    given = iter(shares)

    async def demand(pool: str) -> SimpleNamespace:
        assert pool == "pool"
        return SimpleNamespace(waiting=next(given, shares[-1]))

    @asynccontextmanager
    async def open_client(_: object) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(demand=demand)

    hook = SimpleNamespace(edl_connection=lambda: None)
    changes = {"open_client": open_client, "EdlHook": lambda: hook, "LOOKS_EVERY_S": 0.0, "LOOKS_FOR_S": 60.0}
    for name, value in changes.items():
        monkeypatch.setitem(waits.__globals__, name, value)
    if bursts:
        waits("pool")
        assert next(given, None) is None
        return
    monkeypatch.setitem(waits.__globals__, "LOOKS_FOR_S", 0.05)
    with pytest.raises(AirflowSkipException, match="has waited for teachers"):
        waits("pool")


def test_an_evaluation_gets_the_checkpoint_from_the_event_that_led_to_it() -> None:
    """The newest, where several landed before the run began, in whatever order Airflow names them."""
    made = runpy.run_path(str(DAGS / "edl_evaluate_on_checkpoint.py"))
    events = [
        SimpleNamespace(
            timestamp=datetime(2026, 1, 1, 0, step, tzinfo=UTC),
            extra={"from_trigger": True, "payload": {"checkpoint": f"/c/{step}", "metrics": {"a": step}}},
        )
        for step in (2, 1)
    ]
    params = {name: param.value for name, param in made["PARAMS"].items()}
    made["evaluate"].render_template_fields({"triggering_asset_events": {made["CHECKPOINT"]: events}, "params": params})
    assert made["evaluate"].env == {"CHECKPOINT": "/c/2", "METRICS": '{"a": 2}'}
    (watcher,) = made["CHECKPOINT"].watchers
    nightly = runpy.run_path(str(DAGS / "edl_nightly_elastic_training.py"))["train"]
    assert watcher.trigger.stream == f"{nightly.dag.dag_id}/{nightly.task_id}"


@pytest.mark.parametrize("named", ["/c/7", ""])
def test_an_evaluation_by_hand_gets_the_checkpoint_that_the_form_names(named: str) -> None:
    """No event has led to it; without a name its command fails, and says why."""
    made = runpy.run_path(str(DAGS / "edl_evaluate_on_checkpoint.py"))
    made["evaluate"].render_template_fields({"triggering_asset_events": {}, "params": {"checkpoint": named}})
    assert made["evaluate"].env == {"CHECKPOINT": named, "METRICS": "{}"}
    expected = ["bash", "-c", made["evaluate"].bash_command.replace(sys.executable, "true")]
    done = subprocess.run(expected, env=made["evaluate"].env, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is bool(named)
    assert ("the form names none" in done.stderr) is not bool(named)
