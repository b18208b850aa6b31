"""Names of jobs and tokens of tries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edl_airflow.identity import job_name, owner, pool_name, try_token
from edl_runtime.backends.base import owner_of
from edl_runtime.specs import check_name


def _ti(**changes: Any) -> Any:
    given = {"id": "0190-a", "dag_id": "nightly", "task_id": "distill", "run_id": "manual__1", "map_index": -1}
    return SimpleNamespace(**{**given, **changes})


def test_the_name_is_the_same_for_every_try_and_the_token_is_not() -> None:
    """A retry finds the job of the try before, and a kill of that one does not hit it."""
    first, second = _ti(id="0190-a"), _ti(id="0190-b")
    assert job_name(first) == job_name(second)
    assert try_token(first) != try_token(second)


def test_a_token_names_its_task_instance() -> None:
    """All tries of one own the same; two mapped ones, or two runs, do not."""
    assert owner_of(try_token(_ti(id="0190-a"))) == owner_of(try_token(_ti(id="0190-b"))) == owner(_ti())
    assert owner(_ti(map_index=0)) != owner(_ti(map_index=1))
    assert owner(_ti()) != owner(_ti(run_id="manual__2"))


@pytest.mark.parametrize(
    "change", [{"dag_id": "weekly"}, {"task_id": "train"}, {"run_id": "manual__2"}, {"map_index": 0}, {"map_index": 1}]
)
def test_another_task_instance_has_another_name(change: dict[str, Any]) -> None:
    """Each part of the identity counts."""
    assert job_name(_ti(**change)) != job_name(_ti())


@pytest.mark.parametrize(
    ("dag_id", "task_id"), [("a.b", "c_d"), ("D" * 200, "t" * 200), ("ünï", "蒸馏"), ("__", "--"), ("a-", "-b")]
)
def test_any_airflow_name_makes_a_valid_one(dag_id: str, task_id: str) -> None:
    """Names that Airflow allows and DNS does not become labels of at most 52 letters."""
    ti = _ti(dag_id=dag_id, task_id=task_id)
    check_name("job", job_name(ti))
    check_name("pool", pool_name(ti))


def test_the_pool_of_a_task_is_not_its_job() -> None:
    """Jobs and pools share one space of names."""
    assert pool_name(_ti()) != job_name(_ti())


def test_the_name_can_be_read() -> None:
    """People find their job in a list by its DAG and task."""
    assert job_name(_ti()).startswith("nightly-distill-")
