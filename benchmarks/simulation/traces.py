"""Input of the simulator: jobs and web traffic, from CSV or generated from a seed."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from edl_runtime.autoscale.policy.model import Speedup
from edl_runtime.autoscale.traffic.forecast import DAY_S, Sample
from edl_runtime.errors import SpecError
from edl_runtime.specs import Bounds

T = TypeVar("T", bound=msgspec.Struct)

GPUS = 32
"""GPUs of the cluster that web and training share."""

ENDS_S = 216_000
"""How long an experiment lasts. It begins at 0, at midnight before a Monday."""

_SLOT_S = 600
_BETWEEN_S = 2_330.0
_LAST_S = 134_000.0
_BOUNDS = {(1, 2): 10, (1, 4): 16, (1, 8): 12, (2, 4): 15, (2, 8): 21, (2, 16): 9, (4, 8): 4, (4, 16): 12}


class TraceJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job: its submission, bounds (an instance has one GPU) and work.

    `work` is in goodput-seconds: the seconds that one instance takes. Raises SpecError unless it is above 0 and
    the job is submitted at 0 or later.
    """

    name: str
    submitted_s: float
    bounds: Bounds
    work: float
    speedup: Speedup

    def __post_init__(self) -> None:
        if not 0 <= self.submitted_s < math.inf:
            raise SpecError(f"{self.name}: submitted_s", self.submitted_s, "seconds since the start, 0 or more")
        if not 0 < self.work < math.inf:
            raise SpecError(f"{self.name}: work", self.work, "goodput-seconds above 0")


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs by submission, and the GPUs that the web needs: each sample holds until the next."""

    name: str
    jobs: tuple[TraceJob, ...]
    web: tuple[Sample, ...]


_Number = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]  # no NaN, and none that is infinite


class _JobRow(msgspec.Struct):
    id: str
    submitted_s: _Number
    min: int
    max: int
    work: _Number
    a: _Number
    phi: float


class _WebRow(msgspec.Struct):
    time_s: _Number
    gpus: _Number


def read_trace(folder: Path) -> Trace:
    """Read `jobs.csv` (id, submitted_s, min, max, work, a, phi) and `web.csv` (time_s, gpus), in any order of lines.

    An id is any text. Raises SpecError.
    """
    jobs = [
        TraceJob(
            name=f"job-{row.id.strip()}",
            submitted_s=row.submitted_s,
            bounds=Bounds(row.min, row.max),
            work=row.work,
            speedup=Speedup(a=row.a, phi=row.phi),
        )
        for row in _rows(folder / "jobs.csv", _JobRow)
    ]
    web = [Sample(at_s=row.time_s, needed=row.gpus) for row in _rows(folder / "web.csv", _WebRow)]
    if min((sample.at_s for sample in web), default=math.inf) > 0:
        raise SpecError(str(folder / "web.csv"), "no sample at time 0 or before", "one of the start, and a week before")
    return Trace(
        name=folder.name,
        jobs=tuple(sorted(jobs, key=lambda job: job.submitted_s)),
        web=tuple(sorted(web, key=lambda sample: sample.at_s)),
    )


def _rows(path: Path, kind: type[T]) -> list[T]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return msgspec.convert(list(csv.DictReader(file)), list[kind], strict=False)  # type: ignore[valid-type]
    except (OSError, ValueError, csv.Error) as error:
        columns = ", ".join(kind.__struct_fields__)
        raise SpecError("trace", str(path), f"a CSV file with the columns {columns} ({error})") from None


def make_trace(seed: int) -> Trace:
    """Generate a trace of the setting in `benchmarks/traces`, the same for the same seed.

    About 57 jobs in 37 hours; a web tier with peaks at 12:30 and 20:30, a fifth less at the weekend, 8 % noise and, in
    one of fifty samples, a burst of 20 to 50 %.
    """
    chance = random.Random(seed)
    web = tuple(Sample(at_s=float(at_s), needed=_web(at_s, chance)) for at_s in range(-7 * DAY_S, ENDS_S, _SLOT_S))
    times: list[float] = []
    while (at_s := (times[-1] if times else 0) + chance.expovariate(1 / _BETWEEN_S)) < _LAST_S:
        times.append(round(at_s))
    return Trace(name=f"seed {seed}", jobs=tuple(_job(number, at, chance) for number, at in enumerate(times)), web=web)


def _web(at_s: int, chance: random.Random) -> float:
    hour = at_s % DAY_S / 3600
    needed = 5 + 9 * _peak(hour, 12.5, 1.6) + 12 * _peak(hour, 20.5, 1.3)
    if at_s // DAY_S % 7 >= 5:
        needed *= 0.8
    burst = chance.uniform(1.2, 1.5) if chance.random() < 0.02 else 1.0
    return round(needed * chance.uniform(0.92, 1.08) * burst, 3)


def _peak(hour: float, at: float, width: float) -> float:
    return math.exp(-((hour - at) ** 2) / (2 * width**2))


def _job(number: int, at_s: float, chance: random.Random) -> TraceJob:
    least, most = chance.choices([*_BOUNDS], [*_BOUNDS.values()])[0]
    centre = 9.1 + 1.1 * math.log(least) + 0.15 * math.log(most / least)
    return TraceJob(
        name=f"job-{number}",
        submitted_s=at_s,
        bounds=Bounds(least, most),
        work=round(chance.lognormvariate(centre, 0.95)),
        speedup=Speedup(a=round(chance.uniform(0.01, 0.06), 4), phi=chance.choice([4.0, 16.0, 64.0])),
    )
