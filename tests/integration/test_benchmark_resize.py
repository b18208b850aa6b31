"""benchmarks/resize.py, and its computation of pauses from logged steps."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.elastic.resize_results import check_resumed
from support.paths import BENCHMARKS


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `_elastic_pauses`."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("_elastic_pauses")


def stepped(
    pauses: ModuleType, generation: int, numbers: Iterable[int], *, began: float, instances: tuple[int, ...] = (0, 1)
) -> list[Any]:
    """Return steps of all ranks, of 0.1 s each; each rank is 10 ms later than the one before."""
    return [
        pauses.Step(
            at=began + 0.1 * count + 0.01 * rank,
            instance=instance,
            pid=100 + instance,
            generation=generation,
            rank=rank,
            world_size=len(instances),
            step=number,
        )
        for count, number in enumerate(numbers)
        for rank, instance in enumerate(instances)
    ]


def test_a_pause_ends_when_all_ranks_have_stepped(pauses: ModuleType) -> None:
    """It runs from the last step of any rank to the first of the last one."""
    steps = stepped(pauses, 1, [1, 2, 3], began=0.0) + stepped(pauses, 2, [4, 5], began=1.0, instances=(0, 1, 2))
    (after,) = pauses.resumed(steps, after=1)
    assert (after.instances, after.step) == ((0, 1, 2), 3)
    assert pauses.pause_s(steps, 1, after) == pytest.approx(1.02 - 0.21)
    assert pauses.repeated(steps, after, None) == 0
    assert pauses.faults(steps, 1) == []
    assert pauses.resumed([step for step in stepped(pauses, 2, [1, 2], began=0.0) if step.rank == 0]) == []


def test_repeated_skipped_and_diverging_steps_are_found(pauses: ModuleType) -> None:
    """Each fault names the generation, and the rank of a repeated or skipped step."""
    twice = stepped(pauses, 3, [1, 2, 2, 3], began=0.0)
    assert pauses.faults(twice, 1) == [
        f"rank {rank} of generation 3 did not come to steps [2] one by one" for rank in (0, 1)
    ]
    left_out = stepped(pauses, 3, [1, 2, 4], began=0.0)
    assert len(pauses.faults(left_out, 1)) == 2
    assert pauses.faults(left_out, 4) == []
    apart = [step for step in stepped(pauses, 3, [1, 2], began=0.0) if (step.rank, step.step) != (1, 1)]
    assert pauses.faults(apart, 1) == ["the ranks of generation 3 began at steps [1, 2]"]


def test_steps_that_only_a_killed_trainer_did_are_not_repeated(pauses: ModuleType) -> None:
    """Processes of two pods may have the same process id; the survivors are a step behind."""

    def step(number: int, rank: int, generation: int = 1, world_size: int = 2) -> Any:
        process = {"instance": rank, "pid": 7, "host": f"pod-{rank}", "rank": rank}
        return pauses.Step(at=float(number), generation=generation, world_size=world_size, step=number, **process)

    steps = [step(1, 0), step(2, 0), step(1, 1), step(2, 1), step(3, 1), step(3, 0, generation=2, world_size=1)]
    (after,) = pauses.resumed(steps, after=1)
    assert pauses.repeated(steps, after, victim=("pod-1", 7)) == 0
    assert pauses.repeated(steps, after, victim=("pod-0", 7)) == 1
    assert pauses.repeated(steps, after, victim=None) == 1


def test_the_slowdown_compares_steps_while_an_instance_loads_with_those_before(pauses: ModuleType) -> None:
    """Of the generation before the new instance joins; None with too few steps."""
    steps = stepped(pauses, 1, range(1, 11), began=0.0)
    slower = [
        pauses.Step(at=0.9 + 0.3 * count, instance=0, pid=1, generation=1, rank=0, world_size=1, step=10 + count)
        for count in range(1, 6)
    ]
    assert pauses.slowdown(steps + slower, 1, since=0.85) == pytest.approx(3.0)
    assert pauses.slowdown(steps, 1, since=0.85) is None


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_benchmark_measures_resizes_of_processes(tmp_path: Path) -> None:
    """Training resumes after each, live, from the same step; the times are not checked."""
    command = [sys.executable, str(BENCHMARKS / "resize.py"), "--quick", "--json", "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    check_resumed(found)
    assert done.returncode == bool(found["missed"])
