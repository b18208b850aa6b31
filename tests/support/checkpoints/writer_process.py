"""A process that writes checkpoints to a place, and tells on its output what is stored.

    python writer_process.py URL FIRST COUNT GENERATION KEEP [LIMIT]
    python writer_process.py URL

With a LIMIT no file may have more bytes: the disk is full there. Without numbers it reads them from its input, a line
for each child that it forks: one that is killed costs a test no start of Python.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from functools import partial

import structlog
from support.checkpoints.snapshots import snapshot_at

from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.checkpoint.writer import CheckpointWriter
from edl_runtime.specs import Checkpoint

SIZE = 200_000
"""Elements of the large arrays, 800 KB each: a checkpoint takes several writes."""


def tell(*words: object) -> None:
    """Write a line to the output, by one call that other processes can't break into."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def write(url: str, *numbers: int) -> None:
    """Write one checkpoint after the other."""
    first, count, generation, keep, *limits = numbers
    for limit in limits:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    writer = CheckpointWriter(
        CheckpointStore(Checkpoint(url=url, keep_last=keep)),
        saved=lambda info, _: tell("saved", info.manifest.step),
        failed=lambda error: tell("failed", error),
    )
    tell("writing")
    for step in range(first, first + count):
        writer.save(partial(snapshot_at, step, generation, SIZE))
        writer.wait()
    writer.close()


def main() -> None:
    """Write as told."""
    url, *numbers = sys.argv[1:]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if numbers:
        write(url, *map(int, numbers))
        return
    for line in sys.stdin:
        child = os.fork()
        if not child:
            write(url, *map(int, line.split()))
            os._exit(0)
        tell("child", child)
        os.waitpid(child, 0)
        tell("ended")


if __name__ == "__main__":
    main()
