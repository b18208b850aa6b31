"""The DAGs that people start from."""

from __future__ import annotations

import runpy
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

DAGS = Path(__file__).parents[3] / "dags"


@pytest.mark.parametrize("name", ["edl_quickstart_distill", "edl_distill_steps"])
def test_a_lost_worker_is_followed_by_another_try(name: str) -> None:
    """Which takes over, or stops, what the lost one has left running."""
    tasks = runpy.run_path(str(DAGS / f"{name}.py"))["distill"].dag.tasks
    assert {task.retries for task in tasks} == {1}
    assert all(task.retry_delay.total_seconds() <= 60 for task in tasks)


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
