"""The logs of jobs that were deleted: the cluster forgets a pod's log with the pod, so the end of it is kept."""

from __future__ import annotations

import base64
import gzip
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from edl_runtime.backends.errors import ConflictError
from edl_runtime.backends.interface import LogLine
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.client import KubernetesClient
from edl_runtime.log import get_logger

MAX_LINES = 2000
"""Of each instance, the last."""

MAX_BYTES = 512 * 1024
"""Of a job, packed: a ConfigMap holds 1 MiB."""

MAX_JOBS = 20
"""In a namespace, those that were deleted last."""

_DELETED = "edl-airflow/deleted-at"
_RUN = "edl-airflow/log-of-uid"
_LENGTH = "edl-airflow/log-length"
_OWNER = "edl-airflow/log-owner"

log = get_logger(__name__)


class ArchivedLog(NamedTuple):
    """The end of a deleted job's log, and whose the job was; see `token_owner`."""

    lines: list[LogLine]
    owner: str


def archive_manifest(job: str) -> dict[str, Any]:
    """Return the ConfigMap that holds a job's log, as yet without it."""
    labels = {names.MANAGED_BY: names.MANAGER, names.LOG_OF: job}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": names.archive_name(job), "labels": labels}}


async def archive_log(api: KubernetesClient, job: str, lines: Sequence[LogLine], *, run: str, owner: str = "") -> None:
    """Keep the end of a job's log, in place of that of an earlier job of its name, and forget the oldest.

    `run`: which job of that name it is; `owner`: whose. Of several who have deleted the same one, who has read the
    most keeps it. Where a ConfigMap of somebody else has the name, that one is left alone, and the log is not kept.
    """
    place = archive_manifest(job)
    annotations = {_DELETED: repr(time.time()), _RUN: run, _LENGTH: str(len(lines)), _OWNER: owner}
    kept = {
        **place,
        "metadata": {**place["metadata"], "annotations": annotations},
        "binaryData": {"lines": base64.b64encode(_pack(lines)).decode()},
    }
    while True:
        there = await api.get("ConfigMap", names.archive_name(job))
        if there is not None and not _is_log_of(there, job):
            log.warning("log.not_kept", job=job, cause=f"the ConfigMap {names.archive_name(job)} is not ours")
            return
        if there is not None and _length(there, run) >= len(lines):
            return
        try:
            if there is None:
                await api.create(kept)
            else:
                await api.apply(kept, over=there["metadata"])
        except ConflictError:  # somebody else was faster
            continue
        break
    logs, _ = await api.list("ConfigMap", labels=names.LOG_OF)
    logs.sort(key=_deleted_at, reverse=True)
    for old in logs[MAX_JOBS:]:
        await api.delete(old)


async def read_archived_log(api: KubernetesClient, job: str) -> ArchivedLog | None:
    """Return what was kept of a job that has been deleted, None if there was none."""
    kept = await api.get("ConfigMap", names.archive_name(job))
    if kept is None or not _is_log_of(kept, job):
        return None
    packed = base64.b64decode(kept.get("binaryData", {}).get("lines", ""))
    lines = msgspec.json.decode(gzip.decompress(packed), type=list[LogLine])
    return ArchivedLog(lines, _annotations(kept).get(_OWNER, ""))


def _is_log_of(config_map: Mapping[str, Any], job: str) -> bool:
    return bool((config_map["metadata"].get("labels") or {}).get(names.LOG_OF) == job)


def _deleted_at(config_map: Mapping[str, Any]) -> float:
    return float(_annotations(config_map).get(_DELETED, 0))


def _length(config_map: Mapping[str, Any], run: str) -> int:
    """Return how many lines were kept or left out of that run's log; -1 for another's."""
    annotations = _annotations(config_map)
    return int(annotations.get(_LENGTH, 0)) if annotations.get(_RUN) == run else -1


def _annotations(config_map: Mapping[str, Any]) -> Mapping[str, str]:
    return config_map["metadata"].get("annotations") or {}


def _pack(lines: Sequence[LogLine]) -> bytes:
    """Return the last lines of each instance, as many of each as there is room for."""
    of_each: dict[int, list[LogLine]] = defaultdict(list)
    for line in lines:
        of_each[line.instance].append(line)
    most = min(MAX_LINES, max(map(len, of_each.values()), default=0))
    while True:
        kept = [
            line for _, of_one in sorted(of_each.items()) for line in of_one[len(of_one) - min(most, len(of_one)) :]
        ]
        packed = gzip.compress(msgspec.json.encode(kept))
        if len(packed) <= MAX_BYTES or not most:
            return packed
        most = most * 3 // 4
