"""A process that writes checkpoints one after the other, and reports each."""

from __future__ import annotations

import resource
import signal
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from support.checkpoints.snapshots import snapshot_at

from edl_runtime.checkpoint.background_writer import CheckpointWriter
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.specs import Checkpoint

SIZE = 200_000
"""Elements of the large arrays, 800 KB each: a checkpoint takes several writes."""


def write(
    reports: Connection, folder: Path, steps: range, *, generation: int = 1, keep: int = 2, limit: int = 0
) -> None:
    """Write checkpoints of these steps. No file may have more bytes than a limit above 0: the disk is full there."""
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    writer = CheckpointWriter(
        CheckpointStore(Checkpoint(url=str(folder), keep_last=keep)),
        saved=lambda info, _: reports.send(f"saved {info.manifest.step}"),
        notify=lambda text: reports.send(text) if "could not be written" in text else None,
    )
    reports.send("writing")
    for step in steps:
        writer.save(partial(snapshot_at, step, generation, SIZE))
        writer.wait()
    writer.close()
