"""Our DAGs in a real Airflow with a connection to a cluster."""

from __future__ import annotations

import os

import pytest
from conftest import skip_on_a_laptop
from support.airflow.shared import Airflow, in_parallel
from support.cluster.cluster import PADDLE_IMAGE
from system.test_nights import grown_night

pytestmark = [pytest.mark.kubernetes, pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1500)]


def _needs_paddle() -> None:
    if not os.environ.get(PADDLE_IMAGE):
        skip_on_a_laptop(f"{PADDLE_IMAGE} names no image with Paddle that the cluster has; see deploy/Dockerfile")


@in_parallel
def test_the_quickstart_distils_in_pods(airflow: Airflow) -> None:
    """Teachers and student use the Redis behind a Service; no object remains in the cluster."""
    _needs_paddle()
    run = airflow.run("edl_quickstart_distill_on_pods", {"epochs": 4, "teachers_max": 2})
    result = airflow.client.xcom(run, "distill")
    assert len(result["answered"]) >= 1
    assert all(not address.startswith("127.") for address in result["answered"])
    assert (airflow.laptop.airflow_home / "on_pods" / "mnist_distill" / "runs").exists()
    airflow.wait_until_nothing_remains(result["job"], result["pool"], host=airflow.pods)


@in_parallel
def test_the_nightly_dag_trains_and_grows_in_pods(airflow: Airflow) -> None:
    """It ends in time, with a checkpoint on the volume."""
    _needs_paddle()
    _, night = grown_night(airflow, "edl_nightly_elastic_training_on_pods", [])
    airflow.wait_until_nothing_remains(night["job"], host=airflow.pods)
