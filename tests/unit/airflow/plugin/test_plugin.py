"""How Airflow finds the page."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edl_airflow.links import page_url
from edl_airflow.plugin import EdlPlugin


def test_the_page_is_in_the_navigation_and_a_tab_of_runs_and_tasks() -> None:
    """Each with a route of its own, and with what Airflow fills in."""
    views = {view["destination"]: view for view in EdlPlugin.external_views}
    assert views.keys() == {"nav", "dag_run", "task_instance"}
    assert len({view["url_route"] for view in views.values()}) == 3
    assert views["nav"]["href"] == "/edl/"
    assert views["dag_run"]["href"] == "/edl/?dag_id={DAG_ID}&run_id={RUN_ID}"
    task = "/edl/?dag_id={DAG_ID}&run_id={RUN_ID}&task_id={TASK_ID}&map_index={MAP_INDEX}"
    assert views["task_instance"]["href"] == task


@pytest.mark.parametrize(
    ("base_url", "expected"),
    [
        ("", "/edl/?conn=c&job=j"),
        ("http://localhost:8080", "/edl/?conn=c&job=j"),
        ("https://example.org/team/airflow/", "/team/airflow/edl/?conn=c&job=j"),
    ],
)
def test_its_address_is_a_path_below_that_of_airflow(
    base_url: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever name, and through whichever proxy, the user has reached Airflow."""
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", base_url)
    assert page_url(conn="c", job="j") == expected


@pytest.mark.slow
def test_a_process_that_serves_no_page_does_not_import_it() -> None:
    """Schedulers and workers load plugins, too."""
    heavy = "{'edl_airflow.plugin.app', 'edl_airflow.plugin.live', 'redis', 'kubernetes_asyncio'}"
    script = f"import edl_airflow.plugin, sys; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.splitlines()[-1] == "[]"
