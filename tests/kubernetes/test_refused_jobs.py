"""Jobs that the cluster or the backend refuses: the error, and that nothing is created."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.backends.jobs import WAITS, job, wait_for_line
from support.cluster.cluster import Cluster
from support.cluster.pod_faults import kubeconfig_with, token_of

from edl_runtime.backends.errors import ClusterError, SubmitError, UnknownJobError
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.backends.kubernetes.kubeconfig import connect_by_kubeconfig
from edl_runtime.pods import Pod

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

READS = ("get", "list", "watch")
RIGHTS: Mapping[str, Sequence[str]] = {
    "batch/jobs": (*READS, "create", "patch", "delete"),
    "apps/deployments": (*READS, "create", "patch", "delete"),
    "policy/poddisruptionbudgets": ("create", "patch"),
    "/pods": ("list", "watch", "patch", "delete"),
    "/pods/log": ("get",),
    "/events": READS,
    "/secrets": ("create", "patch"),
    "/configmaps": ("get", "list", "create", "patch", "delete"),
}
"""Rights for submitting, resizing and deleting jobs."""

IN_DEEP = {
    "trainer": (
        *(f"batch/jobs {verb}" for verb in ("create", "patch", "delete", "watch")),
        *(f"/configmaps {verb}" for verb in ("get", "list", "create", "patch", "delete")),
        *("/events list", "/events watch", "/secrets patch", "/pods watch", "/pods patch", "/pods/log get"),
        "apps/deployments list",
    ),
    "pool": (
        *(f"apps/deployments {verb}" for verb in ("create", "patch", "delete", "watch")),
        *("/pods patch", "/pods delete", "/secrets create"),
    ),
}
"""Rights whose absence is only tested by `make test-deep`, by kind of job."""


POD = {"spec": {"containers": [{"name": "theirs", "image": "theirs"}], "restartPolicy": "Never"}}
"""The template of a Job that is not ours."""


async def refused(backend: KubernetesBackend, cluster: Cluster, kind: Any, error: type[Exception], **pod: Any) -> str:
    """Submit a job that must be refused; return the error's text. No object of it is created."""
    spec = msgspec.structs.replace(job(WAITS, kind=kind), pod=Pod(**pod))
    with pytest.raises(error) as raised:
        await backend.submit(spec, token="mine", secrets={"PASSWORD": "open sesame"})
    assert await cluster.objects() == []
    assert "sesame" not in str(raised.value)
    return str(raised.value)


async def limited_backend(cluster: Cluster, folder: Path, rights: Mapping[str, Sequence[str]]) -> KubernetesBackend:
    """Return a backend with these rights only."""
    file = kubeconfig_with(
        cluster, folder / "weak", token=await token_of(cluster, {what: may for what, may in rights.items() if may})
    )
    return KubernetesBackend(
        connect_by_kubeconfig(file), namespace=cluster.namespace, defaults=Pod(image=cluster.image)
    )


async def test_a_template_with_an_invalid_field_is_refused(cluster: Cluster) -> None:
    """By the cluster, whose error names the field."""
    template = {"spec": {"restartPolicy": "Always", "dnsPolicy": "Sometimes"}}
    message = await refused(cluster.backend(), cluster, "pool", SubmitError, template=template)
    assert 'spec.template.spec.dnsPolicy: Unsupported value: "Sometimes"' in message


@pytest.mark.parametrize(
    ("kind", "plural", "theirs"),
    [
        ("trainer", "api/v1/secrets", {"metadata": {"name": "job-env"}, "stringData": {"KEY": "theirs"}}),
        ("pool", "apis/policy/v1/poddisruptionbudgets", {"metadata": {"name": "job"}, "spec": {"minAvailable": 1}}),
        ("trainer", "api/v1/configmaps", {"metadata": {"name": "job-log"}, "data": {"lines": "theirs"}}),
        ("trainer", "apis/batch/v1/jobs", {"metadata": {"name": "job"}, "spec": {"suspend": True, "template": POD}}),
    ],
)
async def test_an_object_of_another_owner_is_named_and_not_changed(
    cluster: Cluster, kind: Any, plural: str, theirs: dict[str, Any]
) -> None:
    """When it has the name of one of the job's objects."""
    group, _, resource = plural.rpartition("/")
    path = f"/{group}/namespaces/{cluster.namespace}/{resource}"
    name = theirs["metadata"]["name"]
    await cluster.request("DELETE", f"{path}/{name}")  # it may be the log of an earlier test's job
    made = await cluster.request("POST", path, theirs)
    try:
        message = await refused(cluster.backend(), cluster, kind, SubmitError)
        assert f"the {made['kind']} {name!r} exists and is not ours; give the job another name" in message
        now = await cluster.request("GET", f"{path}/{name}")
        assert now.get("data") == made.get("data")
        assert now["metadata"]["uid"] == made["metadata"]["uid"]
        assert names.JOB not in now["metadata"].get("labels", {})
    finally:
        await cluster.request("DELETE", f"{path}/{name}")


@pytest.mark.deep
async def test_a_replaced_secret_of_a_job_is_not_changed(cluster: Cluster) -> None:
    """A job that is submitted again finds another owner's Secret in the place of its own."""
    backend, path = cluster.backend(), f"/api/v1/namespaces/{cluster.namespace}/secrets"
    await backend.submit(job(WAITS), token="mine", secrets={"TOKEN": "ours"})
    await cluster.request("DELETE", f"{path}/job-env")
    await cluster.request("POST", path, {"metadata": {"name": "job-env"}, "stringData": {"KEY": "theirs"}})
    with pytest.raises(SubmitError, match="the Secret 'job-env' exists and is not ours"):
        await backend.submit(job(WAITS), token="mine", secrets={"TOKEN": "ours"})
    assert (await cluster.request("GET", f"{path}/job-env"))["data"].keys() == {"KEY"}
    await cluster.request("DELETE", f"{path}/job-env")
    await backend.submit(job(WAITS), token="mine", secrets={"TOKEN": "ours"})
    assert (await cluster.request("GET", f"{path}/job-env"))["data"].keys() == {"TOKEN"}
    assert await backend.delete("job")
    assert await cluster.remaining_objects() == []


async def test_a_missing_namespace_is_named(cluster: Cluster) -> None:
    """And not created."""
    backend = KubernetesBackend(cluster.connect, namespace="edl-not-there", defaults=Pod(image=cluster.image))
    assert 'namespaces "edl-not-there" not found' in await refused(backend, cluster, "trainer", SubmitError)
    with pytest.raises(UnknownJobError):
        await backend.get("job")
    assert await backend.list() == []
    assert (await cluster.request("GET", "/api/v1/namespaces/edl-not-there"))["reason"] == "NotFound"


@pytest.mark.deep
async def test_a_user_without_rights_gets_errors_that_name_the_missing_ones(cluster: Cluster, tmp_path: Path) -> None:
    """With verb, resource and namespace, and the manifest that grants them."""
    backend = await limited_backend(cluster, tmp_path, {})
    message = await refused(backend, cluster, "trainer", ClusterError)
    assert 'cannot get resource "' in message
    assert f'in the namespace "{cluster.namespace}"' in message
    assert "deploy/role.yaml grants all that is needed" in message
    for request in (backend.get("job"), backend.list(), backend.delete("job"), backend.resize("job", 1)):
        with pytest.raises(ClusterError, match=r'cannot (get|list) resource "'):
            await request


async def test_an_expired_token_is_reported(cluster: Cluster, tmp_path: Path) -> None:
    """With another error than missing rights."""
    file = kubeconfig_with(cluster, tmp_path / "expired", token="expired")
    backend = KubernetesBackend(
        connect_by_kubeconfig(file), namespace=cluster.namespace, defaults=Pod(image=cluster.image)
    )
    message = await refused(backend, cluster, "trainer", ClusterError)
    assert message.endswith("the credentials of the cluster are wrong or have expired")


@pytest.mark.parametrize(
    ("kind", "resource", "verb"),
    [
        ("trainer", "/pods", "list"),
        ("pool", "policy/poddisruptionbudgets", "patch"),
        *(
            pytest.param(kind, *missing.split(), marks=pytest.mark.deep)
            for kind, rights in IN_DEEP.items()
            for missing in rights
        ),
    ],
)
async def test_a_user_with_some_of_the_rights_creates_nothing(
    cluster: Cluster, tmp_path: Path, kind: Any, resource: str, verb: str
) -> None:
    """All rights are checked before the first object is created; the error names the missing verb."""
    rights = {**RIGHTS, resource: [one for one in RIGHTS[resource] if one != verb]}
    message = await refused(await limited_backend(cluster, tmp_path, rights), cluster, kind, SubmitError)
    assert f'cannot {verb} resource "{resource.partition("/")[2]}"' in message


@pytest.mark.deep
@pytest.mark.parametrize("follow", [False, True])
async def test_a_user_without_the_right_to_logs_gets_an_error(
    cluster: Cluster, tmp_path: Path, *, follow: bool
) -> None:
    """Which names the missing verb, instead of an empty log."""
    admin, backend = cluster.backend(), await limited_backend(cluster, tmp_path, {**RIGHTS, "/pods/log": ()})
    await admin.submit(job(WAITS), token="mine", secrets={})
    await wait_for_line(admin, "up")
    with pytest.raises(ClusterError, match='cannot get resource "pods/log"'):
        async with asyncio.timeout(30):
            assert [line async for line in backend.logs("job", follow=follow)] == []
    assert await admin.delete("job")
    assert await cluster.remaining_objects() == []


@pytest.mark.deep
async def test_the_tested_rights_are_enough_to_submit(cluster: Cluster, tmp_path: Path) -> None:
    """So each refusal above is for the one missing right."""
    for kind in ("trainer", "pool"):
        submitted = await (await limited_backend(cluster, tmp_path, RIGHTS)).submit(
            job(WAITS, kind=kind, name=kind), token="mine", secrets={"PASSWORD": "open sesame"}
        )
        assert submitted.wanted == 1
        assert await cluster.backend().delete(kind)
    assert await cluster.remaining_objects() == []
