"""Reads batches with teachers' answers for `hops.py`, and says from when to when calls count."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from _reading import Case, reading

FOLDER = Path(os.environ["EDL_HOPS"])
WARM, MEASURED = 30, 5

(FOLDER / "only").write_text(str(os.getpid()))
with reading(Case(data="img28", batches=WARM + 5 * MEASURED)) as read:
    batches = iter(read.distilled)
    for phase, count in ((b"\0", WARM), (b"\1", MEASURED), (b"\0", None)):
        with (FOLDER / "phase").open("r+b") as opened:
            opened.write(phase)
        for _ in itertools.islice(batches, count):
            pass
