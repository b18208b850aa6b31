"""Copies of our DAGs with the suffix "_on_pods" and a connection to a cluster."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import airflow.sdk
from airflow.sdk import DAG

OURS = Path(__file__).resolve().parents[3] / "dags"
HOME = f"{os.environ.get('AIRFLOW_HOME', '')}/on_pods"


def on_pods(dag_id: str, default_args: dict[str, Any], **given: Any) -> DAG:
    """Make the DAG with another name and connection."""
    return DAG(f"{dag_id}_on_pods", default_args={**default_args, "edl_conn_id": "edl_pods"}, **given)  # noqa: AIR002 -- theirs


with mock.patch.object(airflow.sdk, "DAG", on_pods), mock.patch.dict(os.environ, AIRFLOW_HOME=HOME):
    for name in ("edl_quickstart_distill", "edl_nightly_elastic_training"):
        runpy.run_path(str(OURS / f"{name}.py"))
