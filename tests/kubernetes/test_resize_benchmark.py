"""benchmarks/resize.py with pods."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster.cluster import Cluster
from support.elastic.resize_results import check_resumed
from support.paths import BENCHMARKS

BENCHMARK = BENCHMARKS / "resize.py"


@pytest.mark.kubernetes
@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("paddle_image")
def test_the_benchmark_measures_resizes_of_pods(cluster: Cluster, tmp_path: Path) -> None:
    """Training continues after each, live, from the same step; the times are not checked."""
    flags = ["--pods", "--kubeconfig", cluster.kubeconfig, "--quick", "--json", "--keep", str(tmp_path)]
    command = [sys.executable, str(BENCHMARK), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["where"] == "pods"
    check_resumed(found)


def test_the_benchmark_names_a_missing_cluster() -> None:
    """With exit status 2."""
    command = [sys.executable, str(BENCHMARK), "--pods", "--kubeconfig", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "KUBECONFIG names /nowhere, which is not there" in done.stderr
