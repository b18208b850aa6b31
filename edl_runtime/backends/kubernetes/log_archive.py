"""Keeps the end of deleted jobs' logs in ConfigMaps, because a cluster deletes a pod's log with the pod."""

from __future__ import annotations

import asyncio
import base64
import gzip
import time
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from edl_runtime.backends.errors import ConflictError
from edl_runtime.backends.interface import LogLine
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.client import KubernetesClient
from edl_runtime.errors import BackendError
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.settings import KEPT_LOGS

MAX_LINES = 2000
"""Lines of each instance that are kept."""

MAX_BYTES = 512 * 1024
"""Compressed size of a job's log: a ConfigMap holds 1 MiB."""

MAX_UNPACKED_BYTES = 32 * MAX_BYTES
"""Size of a job's log before it is compressed; more is not tried, as it seldom fits and takes seconds, nor unpacked."""

_DELETED = "edl-airflow/deleted-at"
_RUN = "edl-airflow/log-of-uid"
_LENGTH = "edl-airflow/log-length"
_OWNER = "edl-airflow/log-owner"

_decoder = JsonDecoder(list[LogLine])  # made at import: msgspec crashes when several threads are the first to decode
log = get_logger(__name__)


class ArchivedLog(NamedTuple):
    """The end of a deleted job's log, and the job's owner, see `token_owner`."""

    lines: list[LogLine]
    owner: str


def archive_manifest(job: str) -> dict[str, Any]:
    """Return the ConfigMap for a job's log, without the log."""
    labels = {names.MANAGED_BY: names.MANAGER, names.LOG_OF: job}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": names.archive_name(job), "labels": labels}}


async def archive_log(
    api: KubernetesClient, job: str, lines: Sequence[LogLine], *, run: str, owner: str = "", most: int = KEPT_LOGS
) -> None:
    """Keep the end of a job's log, replace that of an earlier job of its name, and delete those above `most`.

    A job that has written nothing leaves no log, or an empty one in place of that of an earlier job. `run`: the uid of
    the job; `owner`: its owner. If several clients delete the same job, the longest log is kept. A ConfigMap of that
    name that is not ours is left alone, and the log is not kept.
    """
    manifest = archive_manifest(job)
    annotations = {_DELETED: repr(time.time()), _RUN: run, _LENGTH: str(len(lines)), _OWNER: owner}
    kept = {
        **manifest,
        "metadata": {**manifest["metadata"], "annotations": annotations},
        "binaryData": {"lines": await asyncio.to_thread(_pack, lines)},
    }
    while True:
        there = await api.get("ConfigMap", names.archive_name(job))
        if there is not None and not _is_log_of(there, job):
            log.warning("log.archive_failed", job=job, cause=f"the ConfigMap {names.archive_name(job)} is not ours")
            return
        if (0 if there is None else _length(there, run)) >= len(lines):
            return
        try:
            if there is None:
                await api.create(kept)
            else:
                await api.apply(kept, over=there["metadata"])
        except ConflictError:  # another client was faster
            continue
        break
    logs, _ = await api.list("ConfigMap", labels=names.LOG_OF)
    logs.sort(key=lambda one: float(_annotations(one).get(_DELETED, 0)), reverse=True)
    for old in logs[most:]:
        await api.delete(old)


async def read_archived_log(api: KubernetesClient, job: str) -> ArchivedLog | None:
    """Return the log of a deleted job, None if there is none. Raises BackendError for one that we have not written."""
    name = names.archive_name(job)
    kept = await api.get("ConfigMap", name)
    if kept is None or not _is_log_of(kept, job):
        return None
    try:
        lines = await asyncio.to_thread(_unpack, kept.get("binaryData", {}).get("lines", ""))
    except (ValueError, zlib.error) as error:
        raise BackendError(f"the log of {job!r} in the ConfigMap {name} can't be read: {error}") from None
    return ArchivedLog(lines, _annotations(kept).get(_OWNER, ""))


def _is_log_of(config_map: Mapping[str, Any], job: str) -> bool:
    return bool((config_map["metadata"].get("labels") or {}).get(names.LOG_OF) == job)


def _length(config_map: Mapping[str, Any], run: str) -> int:
    """Return the length of that run's log before it was cut, -1 for another run."""
    annotations = _annotations(config_map)
    return int(annotations.get(_LENGTH, 0)) if annotations.get(_RUN) == run else -1


def _annotations(config_map: Mapping[str, Any]) -> Mapping[str, str]:
    return config_map["metadata"].get("annotations") or {}


def _pack(lines: Sequence[LogLine]) -> str:
    """Compress the last lines of each instance, as many of each as fit. Takes long: call it in a thread."""
    of_each: dict[int, list[LogLine]] = defaultdict(list)
    for line in lines:
        of_each[line.instance].append(line)
    most = min(MAX_LINES, max(map(len, of_each.values()), default=0))
    while True:
        kept = [line for _, of_one in sorted(of_each.items()) for line in (of_one[-most:] if most else [])]
        if sum(len(line.text) for line in kept) <= MAX_UNPACKED_BYTES:
            content = msgspec.json.encode(kept)
            packed = gzip.compress(content) if len(content) <= MAX_UNPACKED_BYTES else b""
            if 0 < len(packed) <= MAX_BYTES:
                return base64.b64encode(packed).decode()
        most = most * 3 // 4


def _unpack(packed: str) -> list[LogLine]:
    """Return the lines. Raises ValueError and zlib.error for what is damaged, or larger than `_pack` makes it."""
    unpacker = zlib.decompressobj(wbits=31)  # gzip
    content = unpacker.decompress(base64.b64decode(packed), MAX_UNPACKED_BYTES + 1)
    if len(content) > MAX_UNPACKED_BYTES:
        raise ValueError(f"it has more than {MAX_UNPACKED_BYTES >> 20} MiB")
    if not unpacker.eof:
        raise ValueError("it ends early")
    return _decoder.decode(content)
