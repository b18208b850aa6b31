"""TrainingJobs by kubectl, and controllers of them as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from support.cluster.cluster import Cluster, RedisService
from support.paths import DEPLOY, SUPPORT, TESTS

CRD = DEPLOY / "trainingjob-crd.yaml"

SCRIPT = """
import os, pathlib, signal, sys, time
own = os.environ["EDL_JOB"] + "-" + os.environ["EDL_INSTANCE"]
def leave(*_):
    pathlib.Path("/out/checkpoint-" + own).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
pathlib.Path("/out/up-" + own).touch()
time.sleep(600)
"""
"""A trainer that makes a file up-JOB-INSTANCE in /out, and when it is stopped a last checkpoint-JOB-INSTANCE."""

WITHIN_S = 200.0


def kubectl(cluster: Cluster, *words: str, text: str = "") -> str:
    """Run kubectl in the cluster's namespace, and return its output. `text`: its standard input."""
    environ = {**os.environ, "KUBECONFIG": cluster.kubeconfig}
    command = ["kubectl", "-n", cluster.namespace, *words]
    done = subprocess.run(command, env=environ, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def manifest(cluster: Cluster, name: str, out: Path, *, least: int = 1, most: int = 4, **trainer: Any) -> str:
    """Return the YAML of a TrainingJob that runs `SCRIPT`, with the folder `out` of the node as /out."""
    out.chmod(0o777)
    spec = {
        "image": cluster.image,
        "fault_tolerant": True,
        "volumes": [{"name": "out", "hostPath": {"path": str(out)}}],
        "VolumeMounts": [{"name": "out", "mountPath": "/out"}],
        "trainer": {
            "entrypoint": 'python -c "$SCRIPT"',
            "min-instance": least,
            "max-instance": most,
            "envs": {"SCRIPT": SCRIPT},
            "resources": {"requests": {"cpu": "20m"}},
            **trainer,
        },
    }
    return yaml.safe_dump(
        {"apiVersion": "paddlepaddle.org/v1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}
    )


def training_job(cluster: Cluster, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kubectl(cluster, "get", "trainingjob", name, "-o", "json"))
    return found


def reach(
    cluster: Cluster, name: str, condition: Callable[[dict[str, Any]], bool], within_s: float = WITHIN_S
) -> dict[str, Any]:
    """Return the TrainingJob's status once it meets the condition."""
    deadline = time.monotonic() + within_s
    while not condition(status := training_job(cluster, name).get("status", {})):
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
    return status


def wait_for_files(folder: Path, *files: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while missing := {*files} - {file.name for file in folder.iterdir()}:
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)


def runs(instances: int) -> Callable[[dict[str, Any]], bool]:
    return lambda status: (status.get("phase"), status.get("instances")) == ("running", instances)


def events(cluster: Cluster, name: str) -> dict[str, str]:
    """Return the messages of the TrainingJob's events, by reason; the newest of each."""
    found = json.loads(kubectl(cluster, "get", "events", "-o", "json"))["items"]
    found.sort(key=lambda one: str(one["metadata"]["creationTimestamp"]))
    about = {"kind": "TrainingJob", "name": name}
    return {one["reason"]: one["message"] for one in found if about.items() <= one["involvedObject"].items()}


@contextmanager
def trainingjobs_served(cluster: Cluster) -> Iterator[None]:
    """Have the resource definition in the cluster; after the block no TrainingJob is left in the namespace.

    The definition stays: tests that run beside this one, in other namespaces, use it.
    """
    kubectl(cluster, "apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    kubectl(cluster, "wait", "--for=condition=Established", "crd/trainingjobs.paddlepaddle.org", "--timeout=60s")
    try:
        yield
    finally:
        forget_trainingjobs(cluster)


def forget_trainingjobs(cluster: Cluster) -> None:
    """Delete all TrainingJobs of the namespace without a controller."""
    for name in kubectl(cluster, "get", "trainingjobs", "-o", "name").split():
        kubectl(cluster, "patch", name, "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
    kubectl(cluster, "delete", "trainingjobs", "--all")


def environ(cluster: Cluster, redis: RedisService, **more: str) -> dict[str, str]:
    return cluster.environ(
        EDL_REDIS_URL=redis.url, EDL_REDIS_FOR_PODS=redis.address_in_cluster, PYTHONPATH=str(TESTS), **more
    )


@contextmanager
def controller(
    cluster: Cluster, redis: RedisService, *words: str, namespace: str = "default"
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `edl controller` with these arguments; SIGTERM ends it, with status 0."""
    command = [sys.executable, "-P", "-m", "edl_runtime.cli", "controller", *words]
    with subprocess.Popen(command, env=environ(cluster, redis, EDL_NAMESPACE=namespace)) as process:
        try:
            yield process
        finally:
            process.terminate()
            assert process.wait(60) == 0


def quick_controller(cluster: Cluster, redis: RedisService) -> subprocess.Popen[bytes]:
    """Start the controller of `controller_process.py`."""
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / "cluster" / "controller_process.py")], env=environ(cluster, redis)
    )
