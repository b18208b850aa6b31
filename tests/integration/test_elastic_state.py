"""What scripts register and what they wrap beside one model, where trainers come, go and die: real processes, gloo."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.elastic.fake_agent import Trainer, join, leave, open_gate, read_json_lines, trainers
from support.paths import TRAINING_SCRIPTS
from support.teachers.process import wait_until

from edl_runtime.checkpoint.file_format import parse_safetensors
from edl_runtime.elastic.comm.agent_protocol import (
    CheckpointSaved,
    GenerationEntered,
    GenerationLost,
    SaveCheckpoint,
    WorkerFinished,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


deep = partial(pytest.param, marks=pytest.mark.deep)

Told = tuple[dict[str, Any], dict[str, np.ndarray]]


def ended(out: Path) -> list[Told]:
    """Return the report and the arrays of each worker that has finished."""
    found = []
    for file in sorted(out.glob("ended-*.npz")):
        with np.load(file) as kept:
            found.append((json.loads(file.with_suffix(".json").read_text()), dict(kept)))
    return found


def await_at(out: Path, step: int | str, *trainers: Trainer) -> None:
    """Wait until these are in front of a step, having done all that they do after the one before."""
    wait_until(lambda: all((out / f"at-{step}-{each.process.pid}").exists() for each in trainers), 150)


def trained_alone(script: Path, out: Path, **options: Any) -> Told:
    """Return what one instance tells that nothing disturbs."""
    with trainers(out, 1, script=script, **options) as (only,):
        join([only], 1)
        assert only.wait() == 0
    (report,) = ended(out)
    return report


def assert_same(found: Told, wanted: Told) -> None:
    report, arrays = found
    assert report.keys() == wanted[0].keys()
    for name, value in wanted[0].items():
        assert report[name] == pytest.approx(value, rel=1e-4), name
    assert arrays.keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        np.testing.assert_allclose(arrays[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_what_a_script_registers_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    """Averaged weights and a counter that ends the training: with joins, a leave, a lost step and a restart."""
    script = TRAINING_SCRIPTS / "state_script.py"
    undisturbed = trained_alone(script, tmp_path / "alone")
    report = undisturbed[0]
    assert report["epoch"] < 40
    assert report["updates"] == report["steps"] == report["step"] == 4 * report["epoch"]

    out = tmp_path / "out"
    gates = [3, 6, 11, 14, 20]
    environ = {"EDL_CHECKPOINT": str(tmp_path / "kept")}
    with trainers(out, 5, script=script, gates=gates, environ=environ) as [first, second, third, *later]:
        join([first], 1)
        await_at(out, 3, first)
        join([first, second, third], 2)
        open_gate(out, 3)
        await_at(out, 6, first, second, third)
        second.process.kill()  # the others lose the step, after which their scripts do what they do after each
        open_gate(out, 6)
        for trainer in (first, third):
            assert trainer.await_message(GenerationLost).generation == 2
        join([first, third], 3)
        await_at(out, 11, first, third)
        leave(first)
        join([third], 4)
        open_gate(out, 11)
        assert first.await_message(WorkerFinished).why == "left"
        await_at(out, 14, third)
        leave(third, checkpoint=True)
        open_gate(out, 14)
        step = third.await_message(WorkerFinished).step
        fourth, fifth = later
        join([fourth], 5)
        assert fourth.await_message(GenerationEntered) == GenerationEntered(
            generation=5, step=step, source="checkpoint", live=True
        )
        await_at(out, 20, fourth)
        join([fourth, fifth], 6)
        open_gate(out, 20)
        assert [trainer.await_message(WorkerFinished).why for trainer in later] == ["done", "done"]
        assert [trainer.wait() for trainer in later] == [0, 0]
    both = ended(out)
    assert len(both) == 2
    for found in both:
        assert_same(found, undisturbed)


def statistics_of(out: Path) -> dict[int | str, list[tuple[list[float], list[float]]]]:
    """Return, by step, what each rank's running statistics were before and after it, the ranks in order."""
    found: dict[int | str, list[tuple[int, list[float], list[float]]]] = {}
    for line in read_json_lines(out.glob("statistics-*.jsonl")):
        before, after = (np.concatenate(line[when]).tolist() for when in ("before", "after"))
        found.setdefault(line["step"], []).append((line["rank"], before, after))
    return {step: [(before, after) for _, before, after in sorted(each)] for step, each in found.items()}


@pytest.mark.parametrize("norm", ["BatchNorm1D", "BatchNorm"])
def test_running_statistics_are_averaged_where_a_state_is_taken(tmp_path: Path, norm: str) -> None:
    """At checkpoints, by steps and requested, where one joins or leaves, and at the end; in other steps they differ."""
    out = tmp_path / "out"
    environ = {"EDL_CHECKPOINT": str(tmp_path / "kept"), "EDL_CHECKPOINT_EVERY_STEPS": "5"}
    script = TRAINING_SCRIPTS / "norm_script.py"
    with trainers(out, 3, script=script, gates=[3, 7, 10], norm=norm, environ=environ) as [first, second, third]:
        join([first, second], 1)
        await_at(out, 3, first, second)
        first.tell(SaveCheckpoint(request=1, asked_in=1))
        second.tell(SaveCheckpoint(request=1, asked_in=1))  # which only rank 0 heeds
        open_gate(out, 3)
        asked = first.await_message(CheckpointSaved, lambda saved: saved.request == 1).step
        await_at(out, 7, first, second)
        join([first, second, third], 2)
        open_gate(out, 7)
        await_at(out, 10, first, second, third)
        open_gate(out, 10)
        assert [trainer.wait() for trainer in (first, second, third)] == [0, 0, 0]
    steps = statistics_of(out)
    joined = next(step for step in range(7, 11) if len(steps[step + 1]) == 3)
    for step, ranks in steps.items():
        befores, afters = zip(*ranks, strict=True)
        assert len(ranks) == 1 + len({tuple(each) for each in befores[1:]}), step  # ranks see other batches
        if step in {asked, 5, joined, 10, "end"}:
            mean = np.mean(befores if step != "end" else [after for _, after in steps[12]], axis=0)
            np.testing.assert_allclose(afters, [mean] * len(ranks), rtol=1e-5, err_msg=str(step))
        else:
            assert afters == befores, step
    for folder in (tmp_path / "kept").glob("step-*"):
        step = int(folder.name.split("-")[1])
        kept = parse_safetensors(np.fromfile(folder / "model.safetensors", np.uint8))
        wanted = steps["end" if step == 12 else step][0][1]
        np.testing.assert_array_equal(np.concatenate([kept["1._mean"], kept["1._variance"]]), np.float32(wanted))


def test_a_rank_that_is_lost_while_statistics_are_averaged_costs_a_step(tmp_path: Path) -> None:
    """As anywhere else in a step: its batch comes again, once."""
    out = tmp_path / "out"
    environ = {"EDL_CHECKPOINT": str(tmp_path / "kept"), "EDL_CHECKPOINT_EVERY_STEPS": "5"}
    with trainers(out, 2, script=TRAINING_SCRIPTS / "norm_script.py", dies_at=5, environ=environ) as [first, second]:
        join([first, second], 1)
        lost = first.await_message(GenerationLost)
        assert (lost.generation, lost.step) == (1, 4)
        assert second.wait() == -signal.SIGKILL
        join([first], 2)
        assert first.wait() == 0
    ranks = {step: len(found) for step, found in statistics_of(out).items()}
    assert ranks == {step: 2 if step < 5 else 1 for step in range(1, 13)} | {"end": 1}


def test_a_rank_without_a_batch_ends_with_the_others_where_statistics_are_averaged(tmp_path: Path) -> None:
    """They end early, after a step in which it had none, and a checkpoint is due in each step."""
    out = tmp_path / "out"
    environ = {"EDL_CHECKPOINT": str(tmp_path / "kept"), "EDL_CHECKPOINT_EVERY_S": "1e-6"}
    options = {"steps": 2, "rest": 2, "epochs": 2, "finish_at": 3}
    with trainers(out, 3, script=TRAINING_SCRIPTS / "norm_script.py", environ=environ, **options) as all_three:
        join(all_three, 1)
        assert [trainer.await_message(WorkerFinished).step for trainer in all_three] == [3, 3, 3]
        assert [trainer.wait() for trainer in all_three] == [0, 0, 0]
        assert not any(trainer.received(GenerationLost) for trainer in all_three)
    ended = [after for _, after in statistics_of(out)["end"]]
    assert ended[1:] == ended[:1] * 2


def test_two_models_with_their_optimizers_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    """A generator and its critic: where one joins and the other leaves, and from a checkpoint, which has both."""
    script = TRAINING_SCRIPTS / "gan_script.py"
    undisturbed = trained_alone(script, tmp_path / "alone")

    out = tmp_path / "out"
    environ = {"EDL_CHECKPOINT": str(tmp_path / "kept")}
    with trainers(out, 4, script=script, gates=[4, 12, 18], environ=environ) as [first, second, third, fourth]:
        join([first], 1)
        await_at(out, 4, first)
        join([first, second], 2)
        open_gate(out, 4)
        await_at(out, 12, first, second)
        leave(first)
        join([second], 3)
        open_gate(out, 12)
        assert first.await_message(WorkerFinished).why == "left"
        await_at(out, 18, second)
        leave(second, checkpoint=True)
        open_gate(out, 18)
        assert second.await_message(WorkerFinished).why == "left"
        (kept,) = (tmp_path / "kept").glob("step-*")
        assert {file.stem for file in kept.glob("*.safetensors")} == {"model", "optimizer", "model-2", "optimizer-2"}
        join([third, fourth], 4)
        assert [trainer.wait() for trainer in (third, fourth)] == [0, 0]
    both = ended(out)
    assert len(both) == 2
    for found in both:
        assert_same(found, undisturbed)


def trained_by_several(script: Path, out: Path, **options: Any) -> list[Told]:
    """Return what both tell that are left of three, which one had begun alone; the killed one's step was lost."""
    with trainers(out, 3, script=script, gates=[4, 12], **options) as [first, second, third]:
        join([first], 1)
        await_at(out, 4, first)
        join([first, second, third], 2)
        open_gate(out, 4)
        await_at(out, 12, first, second, third)
        second.process.kill()
        open_gate(out, 12)
        for trainer in (first, third):
            assert trainer.await_message(GenerationLost).generation == 2
        join([first, third], 3)
        assert [trainer.wait() for trainer in (first, third)] == [0, 0]
    both = ended(out)
    assert len(both) == 2
    return both


@pytest.mark.parametrize("options", [{"at_once": True}, {"every": 3}])
def test_a_gan_that_loses_a_step_is_that_of_an_undisturbed_run(tmp_path: Path, options: dict[str, Any]) -> None:
    """In both ways of docs/how-to/losses-and-rates.md: both models step at once, or one after the other."""
    script = TRAINING_SCRIPTS / "gan_script.py"
    undisturbed = trained_alone(script, tmp_path / "alone", **options)
    for found in trained_by_several(script, tmp_path / "out", **options):
        assert_same(found, undisturbed)


def lost_by_three(script: Path, out: Path, at: str, killed: int, **options: Any) -> list[Told]:
    """Return what both tell that are left of three, which one had begun alone; one was lost where it was `killed`."""
    dies = options.get("root_dies")
    with trainers(out, 3, script=script, gates=[4, at], **options) as all_three:
        join(all_three[:1], 1)
        await_at(out, 4, all_three[0])
        join(all_three, 2)
        open_gate(out, 4)
        await_at(out, at, all_three[0])
        if dies is None:
            all_three[killed].process.kill()
        open_gate(out, at)
        left = [trainer for number, trainer in enumerate(all_three) if number != killed]
        for trainer in left:
            assert trainer.await_message(GenerationLost).generation == 2
        join(left, 3)
        assert [trainer.wait() for trainer in left] == [0, 0]
    both = ended(out)
    assert len(both) == 2
    return both


@pytest.mark.parametrize(
    ("options", "at", "killed"),
    [
        ({}, "12-second", 1),
        ({"generator_first": True}, "12-second", 2),
        ({"every": 3}, "12-second", 0),
        ({"samples": 41}, "12-second", 0),  # the only one with a batch
        deep({"samples": 41}, "12-second", 1),  # one without a batch
        # rank 0, in front of a message to the last rank: counts, sums, counts of the next step or of the batch's end
        ({"root_dies": ["12-second", 1]}, "12-second", 0),
        deep({"root_dies": ["12-second", 0]}, "12-second", 0),
        ({"root_dies": ["13", 1], "every": 3}, "13", 0),  # of a batch for the critic only
        ({"root_dies": ["13", 2], "every": 3}, "13", 0),
        deep({"root_dies": ["12", 1], "every": 5, "samples": 41}, "12", 0),
        deep({"root_dies": ["12", 2], "every": 5, "samples": 41}, "12", 0),
    ],
)
def test_a_batch_of_two_models_steps_counts_once_wherever_a_rank_is_lost(
    tmp_path: Path, options: dict[str, Any], at: str, killed: int
) -> None:
    """The first model's step is undone, and the batch comes again, unless another rank has all of it."""
    script = TRAINING_SCRIPTS / "gan_script.py"
    alone = {name: value for name, value in options.items() if name != "root_dies"}
    undisturbed = trained_alone(script, tmp_path / "alone", **alone)
    for report, arrays in lost_by_three(script, tmp_path / "out", at, killed, **options):
        # a rank without a batch gets what the others' scripts do after it in the next step, if they are in that
        own = undisturbed[0] if "samples" in options else report
        assert_same((own, arrays), undisturbed)


def test_ranks_without_a_batch_average_statistics_with_those_that_end_one(tmp_path: Path) -> None:
    """A batch for the critic only ends as its ranks ask for the next one; a checkpoint is due in each step."""
    environ = {"EDL_CHECKPOINT": str(tmp_path / "kept"), "EDL_CHECKPOINT_EVERY_S": "1e-6"}
    options = {"samples": 42, "every": 5, "epochs": 4, "norm": True}
    with trainers(
        tmp_path / "out", 3, script=TRAINING_SCRIPTS / "gan_script.py", environ=environ, **options
    ) as all_three:
        join(all_three, 1)
        assert [trainer.await_message(WorkerFinished).step for trainer in all_three] == [24, 24, 24]
        assert [trainer.wait() for trainer in all_three] == [0, 0, 0]
        assert not any(trainer.received(GenerationLost) for trainer in all_three)


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_mean_over_tokens_is_that_of_an_undisturbed_run_with_its_weight(
    tmp_path: Path, micro_batch: int | None
) -> None:
    """Also where a rank has no token, whose loss is not a number. Without the weight it is another model."""
    script = TRAINING_SCRIPTS / "token_script.py"
    undisturbed = trained_alone(script, tmp_path / "alone")
    for found in trained_by_several(script, tmp_path / "weighted", micro_batch=micro_batch):
        assert_same(found, undisturbed)
    if micro_batch is None:
        (_, found), _ = trained_by_several(script, tmp_path / "unweighted", weighted=False)
        assert max(np.abs(found[name] - value).max() for name, value in undisturbed[1].items()) > 0.01
