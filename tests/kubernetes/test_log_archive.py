"""Logs of deleted jobs, kept in a real cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from edl_runtime.backends.interface import LogLine
from edl_runtime.backends.kubernetes import log_archive, names
from edl_runtime.backends.kubernetes.client import KubernetesClient

if TYPE_CHECKING:
    from support.cluster.cluster import Cluster

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

LINES = [LogLine(0, "one"), LogLine(1, "two")]


@pytest.fixture
async def api(cluster: Cluster) -> AsyncIterator[KubernetesClient]:
    """The namespace's, without what other tests have left to be read."""
    async with cluster.connect() as client:
        opened = KubernetesClient(client, cluster.namespace)
        await _forget_all(opened)
        yield opened
        await _forget_all(opened)


async def _forget_all(api: KubernetesClient) -> None:
    for config_map in (await api.list("ConfigMap"))[0]:
        await api.delete(config_map)


def config_map(name: str, **labels: str) -> dict[str, Any]:
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"lines": "mine"}}


async def test_of_several_who_delete_a_job_who_has_read_most_keeps_its_log(api: KubernetesClient) -> None:
    """Whoever comes last: some may have found no pods to read. The next job of the name replaces it."""
    assert await log_archive.read_archived_log(api, "job") is None
    for lines in (LINES[:1], LINES, [], LINES[1:]):
        await log_archive.archive_log(api, "job", lines, run="one")
    assert await log_archive.read_archived_log(api, "job") == (LINES, "")
    for run in ("two", "three", "four"):
        await asyncio.gather(
            *(log_archive.archive_log(api, "job", lines, run=run) for lines in ([], LINES, [], LINES[:1], []))
        )
        assert await log_archive.read_archived_log(api, "job") == (LINES, "")
    await log_archive.archive_log(api, "job", LINES[:1], run="five")
    assert await log_archive.read_archived_log(api, "job") == (LINES[:1], "")


@pytest.mark.deep
async def test_what_is_somebody_elses_is_left_alone(api: KubernetesClient) -> None:
    """A ConfigMap may well have the name that ours would have; it is neither a log nor to be overwritten."""
    await api.create(config_map("job-log"))
    await log_archive.archive_log(api, "job", LINES, run="one")
    assert await log_archive.read_archived_log(api, "job") is None
    found = await api.get("ConfigMap", "job-log")
    assert found is not None
    assert (found["data"], "binaryData" in found) == ({"lines": "mine"}, False)


@pytest.mark.deep
async def test_the_oldest_are_forgotten(api: KubernetesClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without a time before all others."""
    monkeypatch.setattr(log_archive, "MAX_JOBS", 2)
    await api.create(config_map("odd-log", **{names.LOG_OF: "odd"}))
    for job in ("a", "b", "c"):
        await log_archive.archive_log(api, job, LINES, run="one")
    kept, _ = await api.list("ConfigMap", labels=names.LOG_OF)
    assert {one["metadata"]["name"] for one in kept} == {"b-log", "c-log"}
