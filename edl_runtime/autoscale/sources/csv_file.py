"""What the web needs, from a CSV file that may grow."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Iterator
from pathlib import Path

from edl_runtime.autoscale.profile import Sample
from edl_runtime.autoscale.sources.base import Record, sift
from edl_runtime.autoscale.sources.spec import CsvFile
from edl_runtime.errors import SpecError

COLUMNS = ("time", "needed")


class CsvSource:
    """Reads the file anew each time, in a thread: a month of minutes is a megabyte."""

    def __init__(self, spec: CsvFile) -> None:
        self._path = Path(spec.path).expanduser()

    async def samples(self, since_s: float, until_s: float) -> list[Sample]:
        """Return what was needed; see `Source`. Lines that can't be read are skipped, and their number logged."""
        return await asyncio.to_thread(self._samples, since_s, until_s)

    def _samples(self, since_s: float, until_s: float) -> list[Sample]:
        return sift(f"the file {self._path}", self._records(), since_s, until_s)

    def _records(self) -> Iterator[Record]:
        lines = self._text().splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # it is being written
            del lines[-1]
        rows = csv.DictReader(lines, restval="")
        names = [name.strip() for name in rows.fieldnames or ()]
        if not lines:
            return
        if missing := [column for column in COLUMNS if column not in names]:
            allowed = (
                f"a CSV file with the columns {' and '.join(COLUMNS)}; its first line is {lines[0].strip()[:80]!r}"
            )
            raise SpecError("traffic.csv.path", str(self._path), f"{allowed}, without {' and '.join(missing)}")
        rows.fieldnames = names
        try:
            for row in rows:
                yield f"line {rows.line_num}", row["time"], row["needed"]
        except csv.Error as error:
            allowed = f"a CSV file; line {rows.line_num + 1} is none ({error})"
            raise SpecError("traffic.csv.path", str(self._path), allowed) from None

    def _text(self) -> str:
        try:
            if self._path.exists() and not self._path.is_file():  # a pipe would keep us waiting
                raise SpecError("traffic.csv.path", str(self._path), "a file")
            with self._path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
                return file.read()
        except OSError as error:
            cause = error.strerror or type(error).__name__
            raise SpecError("traffic.csv.path", str(self._path), f"a CSV file that can be read ({cause})") from None
