"""Snapshots to store and compare, and damage to checkpoints."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import msgspec
import numpy as np

from edl_runtime.checkpoint.file_format import MANIFEST, CheckpointInfo, Snapshot
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.specs import Checkpoint


def snapshot_at(step: int, generation: int = 1, size: int = 1000) -> Snapshot:
    """Return a snapshot in which each number identifies its step."""
    number = float(generation * 1000 + step)
    return Snapshot(
        generation=generation,
        step=step,
        arrays={
            "model": {"weight": np.full(size, number, np.float32), "bias": np.full((2, 3), number)},
            "optimizer": {"moment": np.full(size, number, np.float32)},
        },
        extra={"number": number},
        epoch=step // 10,
        metrics={"loss": 1 / (step + 1)},
    )


def is_whole(snapshot: Snapshot) -> bool:
    """Whether all arrays are those of one `snapshot_at`."""
    number = snapshot.generation * 1000 + snapshot.step
    arrays = [array for group in snapshot.arrays.values() for array in group.values()]
    return len(arrays) == 3 and snapshot.extra == {"number": number} and all((each == number).all() for each in arrays)


def stored(folder: Path | str, *steps: int, generation: int = 1, keep_last: int = 100) -> CheckpointStore:
    """Return a store with checkpoints of these steps."""
    store = CheckpointStore(Checkpoint(url=str(folder), keep_last=keep_last))
    for step in steps:
        store.write(snapshot_at(step, generation))
    return store


def store_not_finite(store: CheckpointStore, *steps: int, generation: int = 1) -> list[CheckpointInfo]:
    """Write checkpoints of these steps, of which the weight has NaN, and a buffer and an unknown group infinity."""
    written = []
    for step in steps:
        snapshot = snapshot_at(step, generation)
        snapshot.arrays["model"]["weight"][-1] = math.nan
        snapshot.arrays["model"]["bias"][0] = math.inf
        trained = {"model": ["weight"], "optimizer": ["moment"], "model-2": ["weight"]}
        written.append(store.write(msgspec.structs.replace(snapshot, trained=trained)))
    return written


def steps_of(store: CheckpointStore) -> list[int]:
    """Return the steps of which there are checkpoints, newest first."""
    return [info.manifest.step for info in store.list()]


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def reformat(folder: Path, number: int) -> None:
    """Change the format in a checkpoint's manifest, as a later version would write it."""
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes())["manifest"] | {"format": number}
    encoded = msgspec.json.encode(manifest)
    sealed = {"manifest": msgspec.Raw(encoded), "crc32": zlib.crc32(encoded)}
    (folder / MANIFEST).write_bytes(msgspec.json.encode(sealed))
