"""TLS between teachers, students, Redis and discovery in pods, by the steps of docs/how-to/tls.md."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.backends.jobs import ended, eventually, lines
from support.cluster.cluster import REDIS_IMAGE, Cluster
from support.cluster.manifests import container, create, manifests, path_of, ready_pod, secret
from support.network.certificates import Authority, CertificateFiles
from support.paths import DEPLOY, SUPPORT, TESTS

from edl_airflow.operators.job_specs import pool_job_spec, trainer_job_spec
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.pods import Pod, Volume
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, JobSpec, TeacherSpec, TrainerSpec

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

PASSWORD, TOKEN, DISCOVERY_TOKEN = "5ecae7", "70c3a", "d15c0"
POOL = "pool"
WITHIN_S = 120.0

SCRIPTS = Volume(path=str(TESTS), source={"hostPath": {"path": str(TESTS)}}, read_only=True)
SERVES_TLS = {"EDL_TLS_CERT": "/tls/tls.crt", "EDL_TLS_KEY": "/tls/tls.key", "SSL_CERT_FILE": "/tls/ca.crt"}


def teachers_name(home: Cluster) -> str:
    """Return the name in the certificate of all teachers; it need not resolve."""
    return f"edl-teachers.{home.namespace}.svc"


def tls_secret(name: str, authority: Authority, shown: CertificateFiles) -> dict[str, Any]:
    """Return a Secret as cert-manager makes it."""
    files = {"tls.crt": shown.cert, "tls.key": shown.key, "ca.crt": authority.ca}
    return secret(name, **{key: file.read_text() for key, file in files.items()})


@pytest.fixture
async def secured(home: Cluster, tmp_path: Path) -> None:
    """The steps of the page: Secrets, and Redis and discovery from deploy/ with the patches of deploy/tls/."""
    authority, wrong = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    redis, discovery = (f"{name}.{home.namespace}.svc" for name in ("edl-redis", "edl-discovery"))
    await create(
        home,
        secret("edl-redis", password=PASSWORD),
        secret("edl-discovery", token=DISCOVERY_TOKEN),
        secret("edl-ca", **{"ca.crt": authority.ca.read_text()}),
        secret("wrong-ca", **{"ca.crt": wrong.ca.read_text()}),
        tls_secret("edl-redis-tls", authority, authority.sign(redis)),
        tls_secret("edl-discovery-tls", authority, authority.sign(discovery)),
        tls_secret("edl-teachers-tls", authority, authority.sign(teachers_name(home))),
    )
    await start_patched(home, "redis.yaml", REDIS_IMAGE)
    await start_patched(home, "discovery.yaml", home.image)
    for name in ("edl-redis", "edl-discovery"):
        await ready_pod(home, f"app.kubernetes.io/name={name}")


async def start_patched(home: Cluster, file: str, image: str) -> None:
    """Create the objects of a file in deploy/ and apply the patch of deploy/tls/."""
    objects = manifests(file, home.namespace)
    (workload,) = [one for one in objects if one["kind"] in {"StatefulSet", "Deployment"}]
    container(objects)["image"] = image
    workload["spec"]["replicas"] = 0
    if workload["spec"].pop("volumeClaimTemplates", None):  # not every cluster has a provisioner
        workload["spec"]["template"]["spec"]["volumes"] = [{"name": "data", "emptyDir": {}}]
    await create(home, *objects)
    patch = yaml.safe_load((DEPLOY / "tls" / file).read_text().replace(".edl.svc", f".{home.namespace}.svc"))
    patch["spec"]["replicas"] = 1
    path = path_of(home, workload["kind"], workload["metadata"]["name"])
    await home.request("PATCH", path, patch, content="application/strategic-merge-patch+json")


@pytest.fixture
async def backend(home: Cluster, secured: None) -> AsyncIterator[KubernetesBackend]:  # noqa: ARG001 - it comes first
    made = home.backend()
    yield made
    for status in await made.list():
        await made.delete(status.name)


def student(home: Cluster, name: str, *command: str, **more: str) -> JobSpec:
    """Return a student as on the page, with the authority's certificate and the teachers' name in it."""
    settings = RuntimeSettings(
        namespace="default",
        job=name,
        pool=POOL,
        teacher_ca="/tls/ca.crt",
        teacher_tls_name=teachers_name(home),
        teacher_wait_s=WITHIN_S,
    )
    volumes = [Volume(path="/tls", source={"secret": {"secretName": "edl-ca"}}, read_only=True), SCRIPTS]
    volumes.append(Volume(path="/wrong", source={"secret": {"secretName": "wrong-ca"}}, read_only=True))
    env = {"SSL_CERT_FILE": "/tls/ca.crt", **more}
    trainer = TrainerSpec(command=("python", *command), env=env, pod=Pod(volumes=volumes))
    return trainer_job_spec(trainer, None, settings=settings, folder=None)


async def test_pods_accept_only_tls_by_the_right_authority(home: Cluster, backend: KubernetesBackend) -> None:
    """Students read by the registry and by discovery; clients without TLS or of another authority fail."""
    redis = f"rediss://:{PASSWORD}@edl-redis.{home.namespace}.svc:6379/0"
    discovery = f"https://edl-discovery.{home.namespace}.svc:8000"
    pod = Pod(volumes=[Volume(path="/tls", source={"secret": {"secretName": "edl-teachers-tls"}}), SCRIPTS])
    teacher = TeacherSpec(model="support.models:arithmetic", pod=pod, env=SERVES_TLS)
    pool = pool_job_spec(POOL, teacher, Bounds(1, 2), namespace="default", folder=TESTS)
    both = {"EDL_REDIS_URL": redis, "EDL_TEACHER_TOKEN": TOKEN}
    await backend.submit(pool, token="mine", secrets=both)

    async def ready() -> bool:
        """Whether the kubelet's probe over TLS succeeds."""
        pods = await home.request("GET", f"{path_of(home, 'Pod')}?labelSelector=edl-airflow/job={POOL}")
        states = [one["ready"] for pod in pods["items"] for one in pod["status"].get("containerStatuses", ())]
        return states == [True]

    await eventually(ready, "a teacher that is ready", WITHIN_S)

    script = str(SUPPORT / "students" / "tiny_student.py")
    by_registry = student(home, "by-registry", script)
    by_discovery = student(home, "by-discovery", script, EDL_DISCOVERY_URL=discovery)
    wrong_clients = student(
        home, "wrong-clients", str(SUPPORT / "network" / "tls_clients.py"), POOL, EDL_DISCOVERY_URL=discovery
    )
    await backend.submit(by_registry, token="mine", secrets=both)
    by_token = {"EDL_DISCOVERY_TOKEN": DISCOVERY_TOKEN, "EDL_TEACHER_TOKEN": TOKEN}
    await backend.submit(by_discovery, token="mine", secrets=by_token)
    await backend.submit(wrong_clients, token="mine", secrets=both)
    for name in ("by-registry", "by-discovery"):
        status = await ended(backend, name, WITHIN_S)
        assert status.phase == "succeeded", "\n".join(status.last_lines)
        assert status.result is not None
        assert status.result["metrics"]["accuracy"] > 0.99

    status = await ended(backend, "wrong-clients", WITHIN_S)
    assert status.phase == "succeeded", "\n".join(status.last_lines)
    (outcomes,) = [json.loads(line) for _, line in await lines(backend, "wrong-clients") if line.startswith("{")]
    assert outcomes.pop("right settings") == "True"
    expected = {
        "HTTP to a teacher": "closed",
        "student without TLS": "closed the connection",
        "student of another authority": "EDL_TEACHER_CA trusts for",
        "teacher of another name": "'edl-redis'",
        "HTTP to discovery": "closed",
        "Redis without TLS": "RegistryUnavailableError",
        "Redis by another authority": "certificate verify failed",
    }
    assert {name: text in outcomes[name] for name, text in expected.items()} == dict.fromkeys(outcomes, True), outcomes
