"""One pool in two places: a student reads from both, as the second comes and goes.

    python two_places.py --picture places.svg

Each place is a work folder with its own backend, as a cluster would be; EDL_REDIS_URL names the Redis that both share.
Prints how many requests each place has answered, by phase. The picture needs edl-airflow[plot].
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edl_runtime.backends.interface import Backend
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.distill import Discovered, DistillReader
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store.redis_client import connect

POOL = "burst"
PHASES = ("home", "both", "home again")
EVERY_S = 0.5


class Point(NamedTuple):
    """How many requests each place has answered so far, `at` seconds after the beginning."""

    at: float
    home: int
    burst: int


class Student:
    """Reads batches from the pool until it is told to stop."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self.stopping = threading.Event()
        self.reader = DistillReader(
            self._batches, inputs=["x"], outputs=["y"], teachers=Discovered(POOL), settings=settings
        )

    def read(self) -> int:
        """Return the number of batches. Raises ValueError for an answer to something else, or none."""
        count = 0
        with self.reader:
            for x, y in self.reader:
                count += 1
                if not (np.array_equal(x, np.full((8, 4), count)) and np.array_equal(y, 2 * x)):
                    raise ValueError(f"batch {count}: got {x[0, 0]:g} with the answer {y[0, 0]:g}")
        return count

    def _batches(self) -> Iterator[tuple[np.ndarray]]:
        number = 0
        while not self.stopping.is_set():
            number += 1
            yield (np.full((8, 4), number, np.float32),)


def pool(teachers: int, namespace: str) -> JobSpec:
    """Return the pool's job in one place. Its name is the pool's, in all of them."""
    command = ("python", "-P", "-m", "edl_runtime.cli", "teacher", "--model", "slow_teacher:answer", "--pool", POOL)
    return JobSpec(
        name=POOL,
        kind="pool",
        command=(*command, "--max-batch", "8"),
        bounds=Bounds(teachers, teachers),
        instances=teachers,
        env=RuntimeSettings(namespace=namespace, job=POOL).to_env(),
        cwd=str(Path(__file__).resolve().parent),
        serves_http=True,
    )


async def registered(settings: RuntimeSettings, count: int) -> set[str]:
    """Return the addresses of the pool's teachers, once there are so many."""
    async with connect(settings.redis_url) as client:
        directory = Directory(client, settings.namespace)
        while len(members := await directory.members(POOL)) != count:  # noqa: ASYNC110 - other processes register
            await asyncio.sleep(0.1)
        return {member.address for member in members}


async def watch(student: Student, home: set[str], points: list[Point], began: float, for_s: float) -> None:
    """Note the answers of both places for so long."""
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        answered: Mapping[str, int] = student.reader.stats().answered
        of_home = sum(count for address, count in answered.items() if address in home)
        points.append(Point(time.monotonic() - began, of_home, sum(answered.values()) - of_home))
        await asyncio.sleep(EVERY_S)


async def run(folder: Path, settings: RuntimeSettings, phase_s: float) -> dict[str, list[Point]]:
    """Run the pool at home, in both places, and at home again; return what was answered, by phase."""
    places: list[Backend] = [LocalBackend(folder / name) for name in ("home", "burst")]
    home, burst = places
    found: dict[str, list[Point]] = {phase: [] for phase in PHASES}
    secrets, began = {"EDL_REDIS_URL": settings.redis_url}, time.monotonic()
    student = Student(settings)
    try:
        await home.submit(pool(1, settings.namespace), token="", secrets=secrets)
        at_home = await registered(settings, 1)
        reading = asyncio.create_task(asyncio.to_thread(student.read))
        await watch(student, at_home, found["home"], began, phase_s)
        await burst.submit(pool(2, settings.namespace), token="", secrets=secrets)
        await registered(settings, 3)
        await watch(student, at_home, found["both"], began, phase_s)
        await burst.delete(POOL)
        await watch(student, at_home, found["home again"], began, phase_s)
        student.stopping.set()
        await reading
    finally:
        student.stopping.set()
        await asyncio.gather(*(place.delete(POOL) for place in places))
    return found


def draw(points: list[Point], picture: Path) -> None:
    """Draw the answers a second of each place, one above the other."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "edl"
    figure, axes = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
    pairs = [(one, other) for one, other in zip(points, points[4:], strict=False) if other.at > one.at]
    rates = [
        [(getattr(other, place) - getattr(one, place)) / (other.at - one.at) for one, other in pairs]
        for place in ("home", "burst")
    ]
    axes.stackplot(
        [other.at for _, other in pairs], rates, labels=["first place", "second place"], colors=["#4a6fa5", "#8c5e2a"]
    )
    axes.set_xlabel("seconds")
    axes.set_ylabel("answers a second")
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> None:
    """Run it, and print and draw what comes out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--phase-s", type=float, default=10.0, help="seconds of each of the three phases")
    parser.add_argument("--picture", type=Path, help="an .svg or .png")
    options = parser.parse_args()
    settings = RuntimeSettings.from_env(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run(Path(folder), settings, options.phase_s))
    before = Point(0.0, 0, 0)
    for phase, points in found.items():
        last = points[-1]
        print(f"{phase:<11} first place {last.home - before.home:>5}, second {last.burst - before.burst:>5} answers")
        before = last
    if options.picture:
        draw([point for points in found.values() for point in points], options.picture)


if __name__ == "__main__":
    main()
