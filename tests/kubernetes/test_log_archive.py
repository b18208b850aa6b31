"""Logs of deleted jobs, archived in a real cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from edl_runtime.backends.interface import LogLine
from edl_runtime.backends.kubernetes import log_archive
from edl_runtime.backends.kubernetes.client import KubernetesClient

if TYPE_CHECKING:
    from support.cluster.cluster import Cluster

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

LINES = [LogLine(0, "one"), LogLine(1, "two")]


@pytest.fixture
async def api(cluster: Cluster) -> AsyncIterator[KubernetesClient]:
    """A client of the namespace, without archived logs of other tests."""
    async with cluster.connect() as client:
        opened = KubernetesClient(client, cluster.namespace)
        await _delete_all(opened)
        yield opened
        await _delete_all(opened)


async def _delete_all(api: KubernetesClient) -> None:
    for config_map in (await api.list("ConfigMap"))[0]:
        await api.delete(config_map)


async def test_the_longest_of_several_archived_logs_is_kept(api: KubernetesClient) -> None:
    """In any order: a deleter may have found no pods any more. The next job of the name replaces it."""
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
