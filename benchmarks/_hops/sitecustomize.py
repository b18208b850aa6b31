"""Notes which functions of this project run, in each process that has this folder on its PYTHONPATH.

EDL_HOPS names a folder: the first byte of its file `phase` says what is being measured, zero for nothing. Each process
appends a line a function and phase, at the first call, to a file of its own there.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


def note_calls(folder: Path) -> None:
    with (folder / "phase").open("rb") as opened:
        phase = mmap.mmap(opened.fileno(), 1, access=mmap.ACCESS_READ)
    seen: set[tuple[int, CodeType]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code, now = frame.f_code, phase[0]
        if event != "call" or not now or (now, code) in seen:
            return
        seen.add((now, code))
        is_import = not code.co_flags & 1 or (frame.f_back and frame.f_back.f_code.co_name == "<module>")
        for package in ("edl_runtime", "edl_airflow"):
            _, found, inside = code.co_filename.rpartition(f"{os.sep}{package}{os.sep}")
            if found and not is_import:
                # opened each time: a job's supervisor is forked and closes what it inherits
                notes = os.open(folder / f"calls-{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
                os.write(notes, f"{now} {package}/{inside} {code.co_qualname}\n".encode())
                os.close(notes)

    threading.setprofile(note)
    sys.setprofile(note)


if "EDL_HOPS" in os.environ:
    note_calls(Path(os.environ["EDL_HOPS"]))
