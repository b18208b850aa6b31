"""Learning rates that scripts set in their loops, where trainers come, go and die: real processes, real sockets."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.elastic.fake_agent import join, leave, open_gate, read_json_lines, trainers
from support.paths import TRAINING_SCRIPTS

from edl_runtime.elastic.api import schedule_steps
from edl_runtime.elastic.comm.agent_protocol import GenerationEntered, GenerationLost, StepDone, WorkerFinished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = TRAINING_SCRIPTS / "rate_script.py"
EARLY, LATE, STEPS = 8, 20, 36
"""Gates, of so many steps."""

DECAY, AFTER = 0.9, 0.99
"""What the script multiplies its rate by before each step and after it."""


def rates_of(out: Path) -> dict[int, list[float]]:
    """Return by which rates each step was done, on all ranks."""
    rates: dict[int, list[float]] = defaultdict(list)
    for said in read_json_lines(out.glob("rates-*.jsonl")):
        rates[said["step"]].append(said["rate"])
    return dict(sorted(rates.items()))


def weights_of(out: Path) -> list[dict[str, np.ndarray]]:
    """Return what each that has come to the end has trained."""
    found = []
    for file in out.glob("weights-*.npz"):
        with np.load(file) as kept:
            found.append(dict(kept))
    return found


def assert_as_wanted(out: Path, *, after: float = AFTER) -> None:
    """Check by which rate each step was done, which is that of a training that nothing disturbs."""
    rates = rates_of(out)
    assert list(rates) == list(range(1, STEPS + 1))
    for step, found in rates.items():
        assert found == pytest.approx([0.1 * DECAY**step * after ** (step - 1)] * len(found)), step


def test_ranks_that_set_other_rates_train_one_model(tmp_path: Path) -> None:
    """What counts is the rate of the first; the optimizer's clip is of the gradient of all."""
    with trainers(tmp_path, 2, script=SCRIPT, how="local") as both:
        join(both, 1)
        assert [trainer.wait() for trainer in both] == [0, 0]
    rates = rates_of(tmp_path)
    assert len(rates) == STEPS
    assert all(len(each) == 2 and each[0] == each[1] for each in rates.values())
    assert len({each[0] for each in rates.values()}) > 1
    first, second = weights_of(tmp_path)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])


def test_a_step_that_is_lost_lowers_no_rate(tmp_path: Path) -> None:
    """What the script does for each batch is done once for the step, also where that was done twice."""
    alone = tmp_path / "alone"
    with trainers(alone, 1, script=SCRIPT, decay=DECAY, after=AFTER) as (only,):
        join([only], 1)
        assert only.wait() == 0
    assert_as_wanted(alone)
    options: dict[str, Any] = {"gates": [EARLY, LATE], "decay": DECAY, "after": AFTER}
    with trainers(tmp_path, 3, script=SCRIPT, **options) as [first, second, third]:
        join([first, second, third], 1)
        second.await_message(StepDone)
        first.process.kill()
        open_gate(tmp_path, EARLY)
        for trainer in (second, third):
            assert trainer.await_message(GenerationLost).generation == 1
        join([third, second], 2)
        third.await_message(StepDone, lambda word: word.generation == 2)
        second.process.kill()
        open_gate(tmp_path, LATE)
        assert third.await_message(GenerationLost).generation == 2
        join([third], 3)
        assert third.await_message(WorkerFinished).why == "done"
        assert third.wait() == 0
    assert_as_wanted(tmp_path)
    ((found,), (undisturbed,)) = (weights_of(tmp_path), weights_of(alone))
    for name, value in undisturbed.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


def test_newcomers_go_on_with_the_rate_that_the_others_have(tmp_path: Path) -> None:
    """Also where those who have set it leave, and where all begin anew from a checkpoint."""
    options: dict[str, Any] = {"gates": [EARLY, LATE], "how": "scheduler", "decay": DECAY}
    options["environ"] = {"EDL_CHECKPOINT": str(tmp_path / "kept")}
    with trainers(tmp_path, 3, script=SCRIPT, **options) as [first, second, last]:
        join([first], 1)
        first.await_message(StepDone)
        join([first, second], 2)
        open_gate(tmp_path, EARLY)
        assert second.await_message(GenerationEntered).source == "peer"
        second.await_message(StepDone)
        leave(first)
        leave(second, checkpoint=True)
        open_gate(tmp_path, LATE)
        step = second.await_message(WorkerFinished).step
        join([last], 3)
        assert last.await_message(GenerationEntered) == GenerationEntered(
            generation=3, step=step, source="checkpoint", live=True
        )
        assert last.wait() == 0
    assert_as_wanted(tmp_path, after=1.0)


@pytest.mark.parametrize("batch", [{"instance_batch": 2}, {"global_batch": 8}])
def test_a_schedule_by_samples_ends_with_the_data(tmp_path: Path, batch: dict[str, int]) -> None:
    """It makes the steps of one instance, whether one trains, or three, or two after a lost step."""
    options: dict[str, Any] = {"gates": [EARLY, LATE], "how": "scheduler", "decay": DECAY}
    with trainers(tmp_path, 3, script=SCRIPT, schedule="samples", batch=batch, **options) as [first, second, third]:
        join([first], 1)
        first.await_message(StepDone)
        join([first, second, third], 2)
        open_gate(tmp_path, EARLY)
        third.await_message(StepDone)
        second.process.kill()
        open_gate(tmp_path, LATE)
        for trainer in (first, third):
            assert trainer.await_message(GenerationLost).generation == 2
        join([first, third], 3)
        assert [trainer.wait() for trainer in (first, third)] == [0, 0]
    rates = rates_of(tmp_path)
    of_one = schedule_steps(24, *batch.values(), epochs=12)
    assert of_one == {"instance_batch": 144, "global_batch": STEPS}[next(iter(batch))]
    last = max(rates)
    assert LATE < last < 144
    assert rates[last] == pytest.approx([0.1 * DECAY**of_one] * len(rates[last]))
