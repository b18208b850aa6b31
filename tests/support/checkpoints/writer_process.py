"""A process whose children write checkpoints, and tell on its output what is stored: a fork costs no start of Python.

    python -m support.checkpoints.writer_process

Each line of its input starts children at once and waits for all of them. For each child it has six words, "URL FIRST
COUNT GENERATION KEEP LIMIT": no file may have more bytes than a limit above 0, for the disk is full there.
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
    first, count, generation, keep, limit = numbers
    if limit:
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


def fork(url: str, *numbers: str) -> int:
    """Start a child that writes; return its process id."""
    child = os.fork()
    if not child:
        status = 1
        try:
            write(url, *map(int, numbers))
            status = 0
        finally:
            os._exit(status)
    return child


def main() -> None:
    """Write as told."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    for line in sys.stdin:
        words = line.split()
        children = [fork(*words[start : start + 6]) for start in range(0, len(words), 6)]
        tell("children", *children)
        tell("ended", *(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main()
