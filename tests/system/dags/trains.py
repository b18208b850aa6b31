"""A student that reads from its teachers until `FOLDER/go` exists."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edl_runtime.distill import DistillReader
from edl_runtime.result import write_result

BATCH = np.ones((4, 2), np.float32)
BETWEEN_BATCHES_S = 0.2


def main() -> None:
    """Write the student's id to `FOLDER/started` after the first answer, and the result at the end.

    The id is the variable STUDENT, or the process id.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--exit-status", type=int, default=0, help="exit status of the first student")
    parser.add_argument("--saves-for-s", type=float, default=0, help="seconds from SIGTERM until `saved` is written")
    args = parser.parse_args()

    def save(*_: object) -> None:
        time.sleep(args.saves_for_s)
        (args.folder / "saved").touch()
        os._exit(1)

    signal.signal(signal.SIGTERM, save)
    student = os.environ.get("STUDENT", str(os.getpid()))
    answered = 0
    with DistillReader(lambda: batches(args.folder), inputs=["x"], outputs=["y"]) as reader:
        for x, y in reader:
            assert np.array_equal(y, 2 * x)
            answered += 1
            if answered == 1:
                with (args.folder / "started").open("a") as started:
                    print(student, file=started)
    if args.exit_status and len((args.folder / "started").read_text().split()) == 1:
        sys.stderr.write("loss is not a number\n")
        sys.exit(args.exit_status)
    write_result(metrics={"student": student, "batches": answered})


def batches(folder: Path) -> Iterator[tuple[np.ndarray]]:
    yield (BATCH,)
    while not (folder / "go").exists():
        time.sleep(BETWEEN_BATCHES_S)
        yield (BATCH,)


if __name__ == "__main__":
    main()
