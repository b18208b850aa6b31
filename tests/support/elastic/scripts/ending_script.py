"""elastic_script with gates at its end: `ending_script.py OUT`.

The first trainer that writes the last checkpoint touches "writing" and waits for "gate-write". After the training
instance 0 waits for "gate-end".
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import elastic_script

from edl_runtime.elastic.training.checkpointing import CheckpointManager


def wait_for(gate: Path) -> None:
    while not gate.exists():
        time.sleep(0.01)


def hold_up_the_first(out: Path) -> None:
    """Let the first writer of the last checkpoint wait."""
    save_now = CheckpointManager.save_now

    def held_up(*arguments: Any) -> Any:
        with contextlib.suppress(FileExistsError):
            (out / "writing").touch(exist_ok=False)
            wait_for(out / "gate-write")
        return save_now(*arguments)

    CheckpointManager.save_now = held_up  # type: ignore[method-assign]


if __name__ == "__main__":
    hold_up_the_first(Path(sys.argv[1]))
    elastic_script.main(Path(sys.argv[1]))
    if os.environ["EDL_INSTANCE"] == "0":
        wait_for(Path(sys.argv[1]) / "gate-end")
