"""Jobs that the cluster, or we, refuse: what is said, and that nothing is created."""

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
    "/pods": ("list", "patch", "delete"),
    "/events": READS,
    "/secrets": ("create", "patch"),
    "/configmaps": ("patch",),
}
"""What submitting a job takes, and what resizing and deleting it will."""

IN_DEEP = {
    "trainer": (
        *(f"batch/jobs {verb}" for verb in ("create", "get", "patch", "delete", "watch")),
        *("/configmaps patch", "/events list", "/secrets patch"),
    ),
    "pool": (
        *(f"apps/deployments {verb}" for verb in ("create", "get", "patch", "delete", "watch")),
        *("/pods patch", "/pods delete", "/secrets create"),
    ),
}
"""Rights that a job of a kind lacks in `make test-deep` only."""


POD = {"spec": {"containers": [{"name": "theirs", "image": "theirs"}], "restartPolicy": "Never"}}
"""Of a Job that is somebody else's."""


async def refused(backend: KubernetesBackend, cluster: Cluster, kind: Any, error: type[Exception], **pod: Any) -> str:
    """Return what is said of a job that is refused; nothing of it is there."""
    spec = msgspec.structs.replace(job(WAITS, kind=kind), pod=Pod(**pod))
    with pytest.raises(error) as raised:
        await backend.submit(spec, token="mine", secrets={"PASSWORD": "open sesame"})
    assert await cluster.there() == []
    assert "sesame" not in str(raised.value)
    return str(raised.value)


async def weak(cluster: Cluster, folder: Path, rights: Mapping[str, Sequence[str]]) -> KubernetesBackend:
    """Return a backend that may do no more than `rights`."""
    file = kubeconfig_with(
        cluster, folder / "weak", token=await token_of(cluster, {what: may for what, may in rights.items() if may})
    )
    return KubernetesBackend(
        connect_by_kubeconfig(file), namespace=cluster.namespace, defaults=Pod(image=cluster.image)
    )


async def test_a_template_that_is_no_pods_is_refused(cluster: Cluster) -> None:
    """The cluster judges what we don't know, and names the field."""
    template = {"spec": {"restartPolicy": "Always", "dnsPolicy": "Sometimes"}}
    said = await refused(cluster.backend(), cluster, "pool", SubmitError, template=template)
    assert 'spec.template.spec.dnsPolicy: Unsupported value: "Sometimes"' in said


@pytest.mark.parametrize(
    ("kind", "plural", "theirs"),
    [
        ("trainer", "api/v1/secrets", {"metadata": {"name": "job-env"}, "stringData": {"KEY": "theirs"}}),
        ("pool", "apis/policy/v1/poddisruptionbudgets", {"metadata": {"name": "job"}, "spec": {"minAvailable": 1}}),
        ("trainer", "api/v1/configmaps", {"metadata": {"name": "job-log"}, "data": {"lines": "theirs"}}),
        ("trainer", "apis/batch/v1/jobs", {"metadata": {"name": "job"}, "spec": {"suspend": True, "template": POD}}),
    ],
)
async def test_what_is_somebody_elses_is_named_and_left_alone(
    cluster: Cluster, kind: Any, plural: str, theirs: dict[str, Any]
) -> None:
    """Any object may well have the name that one of the job's would have."""
    group, _, resource = plural.rpartition("/")
    path = f"/{group}/namespaces/{cluster.namespace}/{resource}"
    name = theirs["metadata"]["name"]
    await cluster.ask("DELETE", f"{path}/{name}")  # the log of an earlier test's job, say
    made = await cluster.ask("POST", path, theirs)
    try:
        said = await refused(cluster.backend(), cluster, kind, SubmitError)
        assert f"the {made['kind']} {name!r} exists and is not ours; give the job another name" in said
        now = await cluster.ask("GET", f"{path}/{name}")
        assert now.get("data") == made.get("data")
        assert now["metadata"]["uid"] == made["metadata"]["uid"]
        assert names.JOB not in now["metadata"].get("labels", {})
    finally:
        await cluster.ask("DELETE", f"{path}/{name}")


@pytest.mark.deep
async def test_what_has_become_somebody_elses_is_left_alone(cluster: Cluster) -> None:
    """A job that is submitted again finds its Secret replaced by another of that name."""
    backend, path = cluster.backend(), f"/api/v1/namespaces/{cluster.namespace}/secrets"
    await backend.submit(job(WAITS), token="mine", secrets={"WORD": "ours"})
    await cluster.ask("DELETE", f"{path}/job-env")
    await cluster.ask("POST", path, {"metadata": {"name": "job-env"}, "stringData": {"KEY": "theirs"}})
    with pytest.raises(SubmitError, match="the Secret 'job-env' exists and is not ours"):
        await backend.submit(job(WAITS), token="mine", secrets={"WORD": "ours"})
    assert (await cluster.ask("GET", f"{path}/job-env"))["data"].keys() == {"KEY"}
    await cluster.ask("DELETE", f"{path}/job-env")
    await backend.submit(job(WAITS), token="mine", secrets={"WORD": "ours"})
    assert (await cluster.ask("GET", f"{path}/job-env"))["data"].keys() == {"WORD"}
    assert await backend.delete("job")
    assert await cluster.still_there() == []


async def test_a_namespace_that_is_not_there_is_named(cluster: Cluster) -> None:
    """It is not made in passing, either."""
    backend = KubernetesBackend(cluster.connect, namespace="edl-not-there", defaults=Pod(image=cluster.image))
    assert 'namespaces "edl-not-there" not found' in await refused(backend, cluster, "trainer", SubmitError)
    with pytest.raises(UnknownJobError):
        await backend.get("job")
    assert await backend.list() == []
    assert (await cluster.ask("GET", "/api/v1/namespaces/edl-not-there"))["reason"] == "NotFound"


@pytest.mark.deep
async def test_who_may_do_nothing_is_told_what_is_missing(cluster: Cluster, tmp_path: Path) -> None:
    """Verb, resource and namespace are named, and where the rights are listed."""
    backend = await weak(cluster, tmp_path, {})
    said = await refused(backend, cluster, "trainer", ClusterError)
    assert 'cannot list resource "' in said
    assert f'in the namespace "{cluster.namespace}"' in said
    assert "deploy/role.yaml grants all that is needed" in said
    for asking in (backend.get("job"), backend.list(), backend.delete("job"), backend.resize("job", 1)):
        with pytest.raises(ClusterError, match='cannot list resource "'):
            await asking


async def test_a_token_that_is_none_is_told(cluster: Cluster, tmp_path: Path) -> None:
    """Credentials that have expired are told from rights that are missing."""
    file = kubeconfig_with(cluster, tmp_path / "expired", token="expired")
    backend = KubernetesBackend(
        connect_by_kubeconfig(file), namespace=cluster.namespace, defaults=Pod(image=cluster.image)
    )
    said = await refused(backend, cluster, "trainer", ClusterError)
    assert said.endswith("the credentials of the cluster are wrong or have expired")


@pytest.mark.parametrize(
    ("kind", "resource", "verb"),
    [
        ("trainer", "/pods", "list"),
        ("pool", "policy/poddisruptionbudgets", "patch"),
        *(
            pytest.param(kind, *lacks.split(), marks=pytest.mark.deep)
            for kind, all_lacks in IN_DEEP.items()
            for lacks in all_lacks
        ),
    ],
)
async def test_who_may_do_half_of_it_leaves_nothing_half_done(
    cluster: Cluster, tmp_path: Path, kind: Any, resource: str, verb: str
) -> None:
    """All that a job takes is asked for before the first of it is created; the missing verb is named."""
    rights = {**RIGHTS, resource: [one for one in RIGHTS[resource] if one != verb]}
    said = await refused(await weak(cluster, tmp_path, rights), cluster, kind, SubmitError)
    assert f'cannot {verb} resource "{resource.rpartition("/")[2]}"' in said


@pytest.mark.deep
@pytest.mark.parametrize("follow", [False, True])
async def test_who_may_read_no_logs_is_told(cluster: Cluster, tmp_path: Path, *, follow: bool) -> None:
    """An error that names the missing verb, in place of a log that seems empty."""
    strong, backend = cluster.backend(), await weak(cluster, tmp_path, {**RIGHTS, "/pods": READS})
    await strong.submit(job(WAITS), token="mine", secrets={})
    await wait_for_line(strong, "up")
    with pytest.raises(ClusterError, match='cannot get resource "pods/log"'):
        async with asyncio.timeout(30):
            assert [line async for line in backend.logs("job", follow=follow)] == []
    assert await strong.delete("job")
    assert await cluster.still_there() == []


@pytest.mark.deep
async def test_those_rights_are_enough_to_submit(cluster: Cluster, tmp_path: Path) -> None:
    """So each of the refusals above is for the one right that is missing."""
    for kind in ("trainer", "pool"):
        submitted = await (await weak(cluster, tmp_path, RIGHTS)).submit(
            job(WAITS, kind=kind, name=kind), token="mine", secrets={"PASSWORD": "open sesame"}
        )
        assert submitted.wanted == 1
        assert await cluster.backend().delete(kind)
    assert await cluster.still_there() == []
