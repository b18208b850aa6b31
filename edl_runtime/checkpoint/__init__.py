"""Checkpoints: what a training is carried by when its trainers come and go.

`CheckpointStore` writes, finds, loads and prunes them at one place, `CheckpointWriter` writes beside a running
training, `Schedule` tells when. A `Snapshot` is what goes in and comes out.
"""

from __future__ import annotations

from edl_runtime.checkpoint.manifest import CheckpointInfo, Manifest
from edl_runtime.checkpoint.schedule import Schedule
from edl_runtime.checkpoint.snapshot import Arrays, Snapshot
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.checkpoint.writer import CheckpointWriter

__all__ = ["Arrays", "CheckpointInfo", "CheckpointStore", "CheckpointWriter", "Manifest", "Schedule", "Snapshot"]
