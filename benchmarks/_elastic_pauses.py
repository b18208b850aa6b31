"""Pauses of a training at changes of its instances, and checks of its steps.

Generation numbers increase. One is *complete* when all of its ranks have finished a step in it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

BEFORE_S = 5.0
"""Steps while a new instance loads are compared with those of this time before."""

FEWEST_STEPS = 3


class Step(msgspec.Struct, frozen=True):
    """One rank's step, logged when it was applied, at Unix time `at`, by a process of `host`."""

    at: float
    instance: int
    pid: int
    generation: int
    rank: int
    world_size: int
    step: int
    host: str = ""

    @property
    def process(self) -> tuple[str, int]:
        return self.host, self.pid


class Log:
    """The steps that all trainers of a job log to files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._decoder = msgspec.json.Decoder(Step)
        self._steps: list[Step] = []

    def steps(self) -> list[Step]:
        """Return all so far, by time."""
        for file in self._folder.glob("steps-*.jsonl"):
            with file.open("rb") as lines:
                lines.seek(self._read.get(file, 0))
                whole = lines.read().rpartition(b"\n")[0]
            if whole:
                self._read[file] = self._read.get(file, 0) + len(whole) + 1
                self._steps += self._decoder.decode_lines(whole)
        self._steps.sort(key=lambda step: step.at)
        return self._steps


class Resumed(msgspec.Struct, frozen=True):
    """A generation that was complete at `at` and began after `step`; its instances by rank."""

    generation: int
    at: float
    step: int
    instances: tuple[int, ...]


def resumed(steps: Sequence[Step], after: int = 0) -> list[Resumed]:
    """Return the complete generations with numbers above `after`, oldest first."""
    return [
        Resumed(
            generation,
            max(step.at for step in firsts.values()),
            min(step.step for step in firsts.values()) - 1,
            tuple(firsts[rank].instance for rank in sorted(firsts)),
        )
        for generation, firsts in sorted(_firsts(steps).items())
        if generation > after and len(firsts) == next(iter(firsts.values())).world_size
    ]


def pause_s(steps: Sequence[Step], before: int, after: Resumed) -> float:
    """Return the time from the last step of any rank, in generations up to `before`, until `after` was complete."""
    return after.at - max(step.at for step in steps if step.generation <= before)


def repeated(steps: Sequence[Step], after: Resumed, victim: tuple[str, int] | None) -> int:
    """Return how many steps that survivors had done before `after` are done again in it.

    `victim`: the killed process, if any. Steps that only it had done do not count.
    """
    return (
        max(step.step for step in steps if step.generation < after.generation and step.process != victim) - after.step
    )


def faults(steps: Sequence[Step], since: int) -> list[str]:
    """Describe where ranks of generations from `since` on began at different steps, or skipped or repeated one."""
    found = []
    for generation, firsts in _firsts(steps).items():
        begins = {step.step for step in firsts.values()}
        if generation >= since and len(begins) > 1:
            found.append(f"the ranks of generation {generation} began at steps {sorted(begins)}")
    for (generation, rank), own in _by_rank(steps):
        wrong = [after for before, after in itertools.pairwise(own) if after != before + 1]
        if generation >= since and wrong:
            found.append(f"rank {rank} of generation {generation} did not come to steps {wrong} one by one")
    return found


def slowdown(steps: Sequence[Step], generation: int, since: float) -> float | None:
    """Return the ratio of median step times of a generation: from Unix time `since` on, and before.

    None when there are too few steps.
    """
    ends = [step.at for step in steps if step.generation == generation and step.rank == 0]
    took = [(begin, end - begin) for begin, end in itertools.pairwise(ends)]
    before = [took_s for begin, took_s in took if since - BEFORE_S <= begin < since]
    later = [took_s for begin, took_s in took if begin >= since]
    if min(len(before), len(later)) < FEWEST_STEPS:
        return None
    return statistics.median(later) / statistics.median(before)


def _firsts(steps: Sequence[Step]) -> dict[int, dict[int, Step]]:
    """Return the first step of each rank, by generation."""
    firsts: dict[int, dict[int, Step]] = {}
    for step in steps:
        firsts.setdefault(step.generation, {}).setdefault(step.rank, step)
    return firsts


def _by_rank(steps: Sequence[Step]) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Yield the step numbers of each generation and rank, in order."""
    grouped: dict[tuple[int, int], list[int]] = {}
    for step in steps:
        grouped.setdefault((step.generation, step.rank), []).append(step.step)
    yield from grouped.items()
