"""A run without an agent: what it trains, what it keeps and what it refuses."""

from __future__ import annotations

import json
import math
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints.snapshots import flip
from support.elastic.fake_gpu import ON_GPU
from support.elastic.local_run import SAMPLES, RecordingClient, arrays_of, begin, model_and_optimizer, paddle, train

from edl_runtime import elastic
from edl_runtime.checkpoint.background_writer import CheckpointWriter
from edl_runtime.checkpoint.errors import CheckpointStoreError, NoWholeCheckpointError
from edl_runtime.checkpoint.file_format import MANIFEST, Arrays, Snapshot
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.distill import DistillReader, Fixed
from edl_runtime.elastic.api import Run
from edl_runtime.elastic.comm.agent_protocol import (
    CheckpointDelayed,
    CheckpointSaved,
    GenerationEntered,
    JoinGeneration,
    Note,
    SaveCheckpoint,
    WorkerFinished,
    WorkerReady,
)
from edl_runtime.elastic.errors import OtherModelError, StepError
from edl_runtime.elastic.training.checkpointing import CheckpointManager
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.shards.errors import DatasetChangedError
from edl_runtime.specs import Checkpoint

pytestmark = pytest.mark.usefixtures("nothing_at_exit")


def notes(link: RecordingClient) -> list[str]:
    return [word.text for word in link.sent if isinstance(word, Note)]


BATCHES: dict[str, Any] = {"global_batch": 4, "epochs": 2}


def test_two_trainings_in_one_folder_are_reported(tmp_path: Path) -> None:
    """The one of the earlier generation says that there is another, and ends with a checkpoint that is there."""
    (first, link), (second, others) = begin(tmp_path, every_steps=1), begin(tmp_path, every_steps=1)
    model, _ = first.wrap(*model_and_optimizer())
    data = first.data(SAMPLES, **BATCHES)
    train(first, model, data, steps=2)  # the first one's checkpoint is written when the second batch is asked for
    first._checkpoints.close()
    other, _ = second.wrap(*model_and_optimizer())
    train(second, other, second.data(SAMPLES, **BATCHES))
    train(first, model, data)
    (note,) = notes(link)
    assert "another training writes there" in note
    assert not [word for word in others.sent if isinstance(word, Note)]
    last = [word for word in link.sent if isinstance(word, CheckpointSaved)][-1]
    assert (last.step, Path(last.url).is_dir()) == (6, True)


def test_a_training_reports_a_later_step_of_an_earlier_generation(tmp_path: Path) -> None:
    """As after two at one place: the later generation counts, and its steps are fewer."""
    (first, _), (second, _) = begin(tmp_path, every_steps=1), begin(tmp_path, every_steps=1)
    model, _ = first.wrap(*model_and_optimizer())
    data = first.data(SAMPLES, **BATCHES)
    train(first, model, data, steps=2)
    first._checkpoints.close()
    other, _ = second.wrap(*model_and_optimizer())
    train(second, other, second.data(SAMPLES, **BATCHES), steps=2)
    second._checkpoints.close()
    train(first, model, data)
    third, link = begin(tmp_path)
    third.wrap(*model_and_optimizer())
    (note,) = notes(link)
    assert f"training continues from step {third.step_number} though {tmp_path}/" in note
    assert "is of step 6: it is of an earlier generation" in note


def test_a_script_without_an_agent_holds_the_place_of_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the path that the agent of another would tell; without checkpoints there is none."""
    monkeypatch.chdir(tmp_path)
    held: list[str] = []
    monkeypatch.setattr("edl_runtime.elastic.api.hold_until_exit", lambda _, url: held.append(url))
    for path in ("kept/", Path("kept"), Checkpoint(url="kept")):
        elastic.init(path, settings=RuntimeSettings())
    elastic.init(settings=RuntimeSettings())
    assert held == [str(tmp_path / "kept")] * 3


@pytest.mark.parametrize("given", [3, False, b"kept", ""])
def test_what_names_no_place_of_checkpoints_is_refused(given: Any) -> None:
    """And is not taken for the absence of one."""
    with pytest.raises(SpecError, match="checkpoint"):
        elastic.init(given, settings=RuntimeSettings())


def test_micro_batches_train_as_the_whole_batch_does() -> None:
    """Their gradients are added up, each by its samples."""
    trained = []
    for micro_batch in (None, 3, 1):
        run, _ = begin()
        model, _ = run.wrap(*model_and_optimizer())
        seen = train(run, model, run.data(SAMPLES, **BATCHES, micro_batch=micro_batch))
        assert max(map(len, seen)) == (micro_batch or 4)
        assert run.step_number == 6
        trained.append((arrays_of(model), run.mean_loss))
    for weights, loss in trained[1:]:
        assert loss == pytest.approx(trained[0][1], rel=1e-5)
        for name, value in trained[0][0].items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-5, atol=1e-6)


def test_a_later_run_continues_with_the_same_result(tmp_path: Path) -> None:
    """Model, optimizer, schedule, data and random numbers come from the checkpoint, also into layers made otherwise."""

    def schedule() -> Any:
        return paddle.optimizer.lr.ExponentialDecay(0.1, 0.8)

    run, _ = begin()
    undisturbed, _ = run.wrap(*model_and_optimizer(rate=schedule()))
    wanted = train(run, undisturbed, run.data(SAMPLES, **BATCHES))

    run, link = begin(tmp_path)
    model, _ = run.wrap(*model_and_optimizer(rate=schedule()))
    link.sent.clear()
    seen = []
    batches = iter(run.data(SAMPLES, **BATCHES))
    for is_last in (False, True):
        inputs, numbers = next(batches)
        seen.append(numbers.tolist())
        loss = model(inputs).mean()
        loss.backward()
        if not is_last:
            run.step(loss=loss)
    run.metrics(accuracy=0.5, spread=0.1)
    run.metrics(spread=math.nan, gap=math.inf)
    drawn = paddle.get_rng_state()[0].__getstate__()
    link.stop()
    run.step(loss=loss)
    with pytest.raises(SystemExit) as ending:
        next(batches)
    assert ending.value.code == 0
    saved = next(word for word in link.sent if isinstance(word, CheckpointSaved))
    assert saved.step == 2
    assert saved.metrics.keys() - {"loss"} == {"accuracy"}
    assert saved.metrics["accuracy"] == 0.5
    assert link.sent[-1] == WorkerFinished(step=2, why="left")

    run, link = begin(tmp_path, result=tmp_path / "result.json")
    model, optimizer = run.wrap(*model_and_optimizer(order=-1, rate=schedule()))
    assert link.sent[-1] == GenerationEntered(generation=2, step=2, source="checkpoint", live=True)
    assert paddle.get_rng_state()[0].__getstate__() == drawn
    assert optimizer.get_lr() == pytest.approx(0.1 * 0.8**2)
    seen += train(run, model, run.data(SAMPLES, **BATCHES))
    assert seen == wanted
    for name, value in arrays_of(undisturbed).items():
        np.testing.assert_allclose(model.state_dict()[name].numpy(), value, rtol=1e-5)
    run.metrics(accuracy=0.9)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["metrics"]["accuracy"] == 0.9
    assert Path(result["checkpoint"]).is_dir()


def test_a_later_run_reports_that_all_epochs_are_trained(tmp_path: Path) -> None:
    """Once, also by epochs; it trains nothing. The run before says nothing at its end."""
    for number, by_epochs in enumerate((False, False, True)):
        run, link = begin(tmp_path)
        model, _ = run.wrap(*model_and_optimizer())
        data = run.data(SAMPLES, **BATCHES)
        seen = [batch for _, batches in data.epochs() for batch in batches] if by_epochs else train(run, model, data)
        assert bool(seen) is (number == 0)
        told = [text.partition(";")[0] for text in notes(link)]
        assert told == ["all 2 epochs are trained already"][:number]


def test_a_training_that_was_stopped_early_continues_for_an_epoch_and_stops_again(tmp_path: Path) -> None:
    """As docs/how-to/elastic-training.md says of its example: the counter is in the last checkpoint."""
    for epochs in ([0, 1, 2], [3], [4]):
        run, _ = begin(tmp_path)
        stopping = run.register("stopping", {"misses": 0})
        model, _ = run.wrap(*model_and_optimizer())
        seen = []
        for epoch, batches in run.data(SAMPLES, global_batch=4, epochs=9).epochs():
            train(run, model, batches)
            seen.append(epoch)
            stopping["misses"] += 1
            if stopping["misses"] >= 3:
                run.finish()
        assert seen == epochs


def test_checkpoints_are_written_when_they_are_due(tmp_path: Path) -> None:
    """Each is reported with its step; the last is the end's."""
    run, link = begin(tmp_path, every_steps=2)
    model, _ = run.wrap(*model_and_optimizer())
    train(run, model, run.data(SAMPLES, **BATCHES), after=run._checkpoints._writer.wait)
    assert [word.step for word in link.sent if isinstance(word, CheckpointSaved)] == [2, 4, 6]


def away(place: Path) -> None:
    """Have a store refuse whatever comes, until it is `back`."""
    place.rename(place.with_name("away"))
    place.write_text("in the way")


def back(place: Path) -> None:
    place.unlink()
    place.with_name("away").rename(place)


@pytest.mark.parametrize("why", ["done", "left"])
def test_the_last_weights_wait_for_a_store_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """All is trained, or this instance was notes to leave: it says so once, and writes them when the store is back."""
    monkeypatch.setattr("edl_runtime.elastic.training.checkpointing.FIRST_PAUSE_S", 0.001)
    place = tmp_path / "place"
    run, link = begin(place, grace_s=2400.0)
    model, _ = run.wrap(*model_and_optimizer())
    data, moves = run.data(SAMPLES, **BATCHES), []

    def moved() -> None:
        moves.append(len(link.sent))
        if len(moves) == 3:
            back(place)

    train(run, model, data, steps=5)
    away(place)
    link.sent.clear()
    monkeypatch.setattr(link, "note_progress", moved)
    if why == "left":
        link.stop()
    with pytest.raises(SystemExit) if why == "left" else nullcontext():
        train(run, model, data)
    unsaved, saved, finished = (
        word for word in link.sent if isinstance(word, CheckpointDelayed | CheckpointSaved | WorkerFinished | Note)
    )
    assert isinstance(unsaved, CheckpointDelayed)
    assert (unsaved.step, unsaved.for_s) == (6, 600.0 if why == "done" else 1200.0)
    assert str(place) in unsaved.reason
    assert isinstance(saved, CheckpointSaved)
    assert saved.step == 6
    assert finished == WorkerFinished(step=6, why=why)
    assert len(moves) == 3, "who waits for this rank knows each time that it is at it"


def test_a_store_that_stays_away_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ten minutes; the agent tells the job why."""
    monkeypatch.setattr("edl_runtime.elastic.training.checkpointing.LAST_CHECKPOINT_WAIT_S", 0.0)
    run, link = begin(tmp_path / "place")
    model, _ = run.wrap(*model_and_optimizer())
    data = run.data(SAMPLES, **BATCHES)
    train(run, model, data, steps=5)
    away(tmp_path / "place")
    with pytest.raises(CheckpointStoreError):
        train(run, model, data)
    assert not [word for word in link.sent if isinstance(word, CheckpointDelayed | Note | WorkerFinished)]


def test_who_takes_over_counts_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """It is notes with the state how long ago that was; what was begun is not begun again."""
    saver = CheckpointManager(Checkpoint(url=str(tmp_path), every_s=3600), RecordingClient())
    saver.begin(5, unsaved_s=1800)
    assert not saver.due(6)
    assert 1800 <= saver.unsaved_s() < 3600
    other = CheckpointManager(Checkpoint(url=str(tmp_path), every_s=3600), RecordingClient())
    other.begin(5, unsaved_s=3600)
    other.begin(5, unsaved_s=0)
    assert other.due(6)
    other.note_due(6)
    assert not other.due(7)


def test_a_script_may_finish_early(tmp_path: Path) -> None:
    """The last checkpoint is written then, what is noted later is in the result, and there is no further batch."""
    run, link = begin(tmp_path, result=tmp_path / "result.json")
    model, _ = run.wrap(*model_and_optimizer())
    batches = iter(run.data(SAMPLES, **BATCHES))
    train(run, model, batches, steps=2)
    for _ in range(2):
        run.finish()
    assert link.sent[-1] == WorkerFinished(step=2, why="done")
    assert [word.step for word in link.sent if isinstance(word, CheckpointSaved)] == [2]
    run.metrics(accuracy=0.9)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["metrics"]["accuracy"] == 0.9
    assert Path(result["checkpoint"]).is_dir()
    assert list(batches) == []


def test_an_early_end_is_one_for_the_whole_run_of_the_job(tmp_path: Path) -> None:
    """Whoever begins from its last checkpoint has nothing to train, until the job is run again."""

    def batches_in(word: str) -> tuple[Run, Any]:
        link = RecordingClient()
        settings = RuntimeSettings(run=word)
        run = Run(link, CheckpointManager(Checkpoint(url=str(tmp_path)), link), settings)
        run.wrap(*model_and_optimizer())
        return run, iter(run.data(SAMPLES, **BATCHES))

    run, batches = batches_in("tonight")
    next(batches)
    run.finish()
    assert list(batches_in("tonight")[1]) == []
    again, batches = batches_in("tomorrow")
    assert len(next(batches)) == 2
    again.finish()


def test_a_rank_reports_that_it_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one that hangs there is found, as in a step; the rank that writes the checkpoint waits for none."""
    run, link = begin()
    run.wrap(*model_and_optimizer())
    next(iter(run.data(SAMPLES, **BATCHES)))
    seen: list[Any] = []
    count = run._session.group.all_reduce_counts
    monkeypatch.setattr(link, "waits_for", seen.append)
    monkeypatch.setattr(
        run._session.group, "all_reduce_counts", lambda counts: (seen.append("count"), count(counts))[1]
    )
    monkeypatch.setattr(CheckpointManager, "save_now", lambda *_: seen.append("save") or "")
    run.finish()
    assert seen == [1, "count", None, "save", 1, "count", None]


def test_ranks_stop_once_all_have_been_told_of_the_next_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was told first trains on: it would wait for the others' agents."""
    run, _ = begin()
    run.wrap(*model_and_optimizer())
    next(iter(run.data(SAMPLES, **BATCHES)))
    session = run._session
    monkeypatch.setattr(session.group, "world_size", 2)
    monkeypatch.setattr(session, "votes_to_stop", lambda: 1)
    for of_the_other, stop in ((0, False), (1, True)):
        votes = np.array([of_the_other])
        monkeypatch.setattr(
            session.group, "all_reduce_counts", lambda own, votes=votes: own + np.pad(votes, (0, len(own) - 1))
        )
        assert run._wrapped._exchange("steps", 1, None, None).stop is stop


def test_more_metrics_than_a_result_holds_are_refused() -> None:
    """When they are noted, and not when all is trained; those from before stay."""
    run, _ = begin()
    model, _ = run.wrap(*model_and_optimizer())
    run.metrics(accuracy=0.5)
    with pytest.raises(SpecError, match=r"run\.metrics: got .* bytes of JSON"):
        run.metrics(**{f"the accuracy of class {number}": 0.1 for number in range(200)})
    train(run, model, run.data(SAMPLES, **BATCHES))
    assert run._wrapped is not None
    assert run._wrapped.train_state.metrics == {"accuracy": 0.5}


@pytest.mark.parametrize("value", ["high", 10**400, [0.5], paddle.ones([2])], ids=["text", "huge", "list", "tensor"])
def test_a_metric_that_is_no_number_is_refused(value: Any) -> None:
    """With its name; a tensor of one value is a number."""
    run, _ = begin()
    run.wrap(*model_and_optimizer())
    with pytest.raises(SpecError, match=r"run\.metrics\(accuracy=…\): got "):
        run.metrics(accuracy=value)
    assert run.metrics(accuracy=paddle.to_tensor([0.5])) == {"accuracy": 0.5}


@pytest.mark.parametrize("on_gpu", [True, False])
def test_parameters_on_a_gpu_are_trained_by_nccl(monkeypatch: pytest.MonkeyPatch, *, on_gpu: bool) -> None:
    """So no generation is entered live. A model on the CPU has sockets, also where Paddle sees GPUs."""
    monkeypatch.setattr("paddle.device.is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr("paddle.device.cuda.device_count", lambda: 1)
    if on_gpu:
        monkeypatch.setattr("paddle.base.framework.EagerParamBase.place", ON_GPU)
    run, client = begin()
    model, _ = run.wrap(*model_and_optimizer())
    train(run, model, run.data(SAMPLES, **BATCHES), steps=1)
    assert [word.live for word in client.sent if isinstance(word, WorkerReady)] == [not on_gpu]


@pytest.mark.parametrize(
    ("on_gpu", "keeps", "instances", "told"),
    [(True, False, 4, 1), (True, True, 4, 0), (False, False, 4, 0), (True, False, 1, 0)],
)
def test_a_resize_that_would_start_again_from_step_0_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, on_gpu: bool, keeps: bool, instances: int, told: int
) -> None:
    """On GPUs all processes end, so only checkpoints have the state. A job of one instance is not resized."""
    if on_gpu:
        monkeypatch.setattr("paddle.base.framework.EagerParamBase.place", ON_GPU)
    run, client = begin(tmp_path if keeps else None)
    first = JoinGeneration(generation=1, rank=0, world_size=1, store="", instances=instances)
    monkeypatch.setattr(client, "directive", lambda generation: None if generation else first)
    run.wrap(*model_and_optimizer())
    notes = [word.text for word in client.sent if isinstance(word, Note)]
    assert len(notes) == told
    assert all("starts again from step 0" in note for note in notes)


def test_the_learning_rate_follows_the_number_of_instances() -> None:
    """By a function of the user's; what changes is noted."""
    run, link = begin()
    model, optimizer = run.wrap(*model_and_optimizer(), scaling=lambda instances: 0.5 * instances)
    train(run, model, run.data(SAMPLES, instance_batch=4), steps=1)
    assert run.learning_rate == 0.05
    assert optimizer.get_lr() == 0.1
    assert notes(link) == [
        "generation 1, 1 instance: from step 0 on the learning rate goes from 1 to 0.5 times the script's"
    ]


@pytest.mark.parametrize(
    ("scaling", "batch", "warned"),
    [("linear", "global_batch", True), ("linear", "instance_batch", False), ("fixed", "global_batch", False)],
)
def test_a_rate_that_follows_instances_while_the_batch_does_not_is_warned_of(
    scaling: Any, batch: str, *, warned: bool
) -> None:
    """In an event, on one rank."""
    run, link = begin()
    run.wrap(*model_and_optimizer(), scaling=scaling)
    run.data(SAMPLES, **{batch: 4})
    assert [("scaling='linear'" in text and "use instance_batch" in text) for text in notes(link)] == [True] * warned


def test_a_reader_that_ends_early_is_an_error() -> None:
    """What makes batches of the local ones has to make as many."""
    run, _ = begin()
    model, _ = run.wrap(*model_and_optimizer())
    with pytest.raises(StepError, match="ended before the epoch"):
        train(run, model, run.data(SAMPLES, **BATCHES).through([]))


def test_a_reader_that_reads_into_the_next_epoch_is_refused() -> None:
    """It would ask for batches of a group that may be another when they are due."""
    run, _ = begin()
    run.wrap(*model_and_optimizer())
    data = run.data(SAMPLES, **BATCHES)
    with (
        DistillReader(data.local, inputs=["x", None], outputs=["y"], teachers=Fixed(("a:1",)), epochs=2) as reader,
        pytest.raises(SpecError, match=r"DistillReader\(epochs=…\): got 2, .*None with data\.through"),
    ):
        data.through(reader)


def test_a_missing_step_is_an_error_at_the_second_batch() -> None:
    """Else the model would be trained on nothing for hours."""
    run, _ = begin()
    model, _ = run.wrap(*model_and_optimizer())
    with pytest.raises(StepError, match=r"asked for another batch before it called run\.step"):
        train(run, model, run.data(SAMPLES, **BATCHES), step=False)
    assert run.step_number == 0


def test_a_step_needs_a_batch_and_gradients() -> None:
    """A second step on the same batch, as in a GAN's loop from elsewhere, and one without backward say what to do."""
    run, _ = begin()
    model, _ = run.wrap(*model_and_optimizer())
    batches = iter(run.data(SAMPLES, **BATCHES))
    with pytest.raises(StepError, match="without a batch"):
        run.step()
    inputs, _ = next(batches)
    with pytest.raises(StepError, match="no parameter has a gradient"):
        run.step()
    model(inputs).mean().backward()
    run.step()
    model(inputs).mean().backward()
    with pytest.raises(StepError, match=r"a second time for one batch; .* each model .* run\.step\(loss, of=critic\)"):
        run.step()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """The error has names and shapes of both; the optimizer stays as it is, so a script may go on without."""
    run, _ = begin(tmp_path)
    model, _ = run.wrap(*model_and_optimizer(width=3))
    train(run, model, run.data(SAMPLES, **BATCHES))
    model, optimizer = model_and_optimizer(width=5)
    with pytest.raises(OtherModelError) as refused:
        begin(tmp_path)[0].wrap(model, optimizer)
    optimizer.step()
    assert "model 'first.weight': float32 (2, 5) here, float32 (2, 3) there" in refused.value.differences
    assert "optimizer 'second.weight/moment1': float32 (5, 1) here, float32 (3, 1) there" in refused.value.differences


def test_a_training_does_not_start_over_if_its_checkpoints_are_damaged(tmp_path: Path) -> None:
    """The error says so, and leaves them as they are."""
    run, _ = begin(tmp_path)
    model, _ = run.wrap(*model_and_optimizer())
    train(run, model, run.data(SAMPLES, **BATCHES))
    for file in tmp_path.glob("step-*/model.safetensors"):
        os.truncate(file, 9)
    kept = sorted(tmp_path.rglob("*"))
    with pytest.raises(NoWholeCheckpointError) as refused:
        begin(tmp_path)[0].wrap(*model_and_optimizer())
    assert f"no checkpoint at {tmp_path} is intact, 1 damaged" in str(refused.value)
    assert f"`edl checkpoints verify {tmp_path}`; restore the missing files" in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == kept


def test_a_training_reports_that_it_skips_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Among its events: how far, and what is wrong with which."""
    run, _ = begin(tmp_path, every_steps=2)
    model, _ = run.wrap(*model_and_optimizer())
    train(run, model, run.data(SAMPLES, **BATCHES), after=run._checkpoints._writer.wait)
    (newest,) = tmp_path.glob("step-000000006-*")
    flip(newest / MANIFEST, at=40)
    run, link = begin(tmp_path)
    model, _ = run.wrap(*model_and_optimizer())
    train(run, model, run.data(SAMPLES, **BATCHES))
    (note,) = notes(link)
    assert note.startswith(
        f"training goes back to step 4: checkpoint {newest} is damaged: {MANIFEST}: check sum differs"
    )


def test_other_data_than_a_checkpoint_s_is_refused(tmp_path: Path) -> None:
    """Another length, or another order, would train samples twice or never."""
    run, _ = begin(tmp_path)
    model, _ = run.wrap(*model_and_optimizer())
    train(run, model, run.data(SAMPLES, **BATCHES))
    later = begin(tmp_path)[0]
    model, _ = later.wrap(*model_and_optimizer())
    with pytest.raises(DatasetChangedError, match="has 9 samples, and had 10"):
        later.data(SAMPLES[:9], **BATCHES)
    with pytest.raises(SpecError, match="with which this training began"):
        later.data(SAMPLES, **BATCHES, seed=7)
    assert len(train(later, model, later.data(SAMPLES, global_batch=5, epochs=3))) == 2


class _Stream(paddle.io.IterableDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (_Stream(), "dataset: got '_Stream', allowed is a length and items by index, .*run.shards"),
        (paddle.io.DataLoader(SAMPLES, batch_size=2), "dataset: got 'DataLoader'"),
        ((sample for sample in SAMPLES), "dataset: got 'generator'"),
        (np.array(7), "dataset: got 'ndarray'"),
        ([], r"len\(dataset\): got 0, allowed is a whole number, 1 or more"),
    ],
)
def test_data_that_can_not_be_had_by_index_is_refused(dataset: Any, message: str) -> None:
    """With what it is, what it has to be, and what there is for other data."""
    run, _ = begin()
    run.wrap(*model_and_optimizer())
    with pytest.raises(SpecError, match=message):
        run.data(dataset, global_batch=4)


def test_numbers_of_numpy_s_are_taken_for_python_s(tmp_path: Path) -> None:
    """Checkpoints hold them as JSON."""
    run, _ = begin(tmp_path)
    model, _ = run.wrap(*model_and_optimizer())
    four, two = np.int64(4), np.int64(2)
    assert len(train(run, model, run.data(SAMPLES, global_batch=four, epochs=two, seed=two, micro_batch=four))) == 6
    assert len(list(tmp_path.glob("step-000000006-*"))) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_a_type_that_checkpoints_can_not_hold_is_refused_at_the_start(tmp_path: Path, *, kept: bool) -> None:
    """With the parameter's name, and not at the end of a training of hours; where none are kept any will do."""
    run, _ = begin(tmp_path if kept else None)
    model, optimizer = model_and_optimizer()
    model.register_buffer("phases", paddle.ones([2], dtype="complex128"))
    if kept:
        with pytest.raises(SpecError, match="checkpoint's 'phases': got 'complex128', allowed is float64, "):
            run.wrap(model, optimizer)
    else:
        run.wrap(model, optimizer)


def test_memory_for_checkpoints_is_allocated_without_a_copy_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arrays are of the state's shapes, and have no values."""
    held: list[Arrays] = []
    monkeypatch.setattr(CheckpointWriter, "prepare", lambda _, arrays: held.append(arrays))
    run, _ = begin(tmp_path)
    model, _ = run.wrap(*model_and_optimizer())
    (layout,) = held
    assert {name: each.shape for name, each in layout["model"].items()} == {
        name: value.shape for name, value in arrays_of(model).items()
    }
    assert not any(any(each.strides) for group in layout.values() for each in group.values())


def test_the_reported_loss_is_that_of_the_step(tmp_path: Path) -> None:
    """Whatever a script has noted under that name some steps before; noted, it is notes by those that give none."""
    for gives in (True, False):
        run, link = begin(tmp_path / str(gives), every_steps=1)
        model, _ = run.wrap(*model_and_optimizer())
        for inputs, _ in run.data(SAMPLES, **BATCHES):
            loss = model(inputs).mean()
            loss.backward()
            run.metrics(loss=1234.5)
            run.step(loss=loss if gives else None)
            own = run.mean_loss
        last = [word for word in link.sent if isinstance(word, CheckpointSaved)][-1]
        assert last.metrics == {"loss": own if gives else 1234.5}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "either global_batch or instance_batch"),
        ({"global_batch": 4, "instance_batch": 4}, "either global_batch or instance_batch"),
        ({"global_batch": 0}, "1 or more, for so many instances may share it"),
        ({"instance_batch": 0}, "instance_batch: got 0"),
        ({"global_batch": 4, "micro_batch": 0}, "micro_batch: got 0"),
        ({"global_batch": 4, "epochs": 0}, "epochs: got 0"),
        ({"global_batch": 256.0}, r"global_batch: got 256\.0, allowed is a whole number, 1 or more, for so many"),
        ({"global_batch": "256"}, "global_batch: got '256'"),
        ({"instance_batch": True}, "instance_batch: got True"),
        ({"global_batch": 4, "micro_batch": 1.5}, r"micro_batch: got 1\.5, allowed is a whole number"),
        ({"global_batch": 4, "epochs": None}, "epochs: got None"),
        ({"global_batch": 4, "seed": -1}, "seed: got -1"),
        ({"global_batch": 4, "num_workers": "2"}, "num_workers: got '2', allowed is a whole number, 0 or more"),
    ],
)
def test_batches_that_can_t_be_are_refused(given: dict[str, Any], message: str) -> None:
    """The error names the argument."""
    run, _ = begin()
    run.wrap(*model_and_optimizer())
    with pytest.raises(SpecError, match=message):
        run.data(SAMPLES, **given)


@pytest.mark.filterwarnings("ignore::paddle.utils.deprecated.VisibleDeprecationWarning")
def test_what_can_t_be_wrapped_is_refused() -> None:
    """No other model, no stranger's parameters, no schedule that needs a loss, no second time."""
    run, _ = begin()
    with pytest.raises(SpecError, match=r"before run\.wrap"):
        run.data(SAMPLES, **BATCHES)
    model, optimizer = model_and_optimizer()
    stranger = paddle.nn.Linear(1, 1)
    plateau = paddle.optimizer.lr.ReduceOnPlateau(0.1)
    for bad_model, bad_optimizer, message in (
        (stranger.weight, optimizer, "a paddle.nn.Layer"),
        (model, "sgd", "an optimizer of paddle.optimizer"),
        (model, paddle.optimizer.LBFGS(parameters=model.parameters()), "LBFGS"),
        (model, paddle.incubate.optimizer.LBFGS(parameters=model.parameters()), "LBFGS"),
        (model, paddle.incubate.LookAhead(optimizer), "LookAhead'?, allowed is the Adam that it holds, alone"),
        (model, paddle.incubate.ModelAverage(0.15, parameters=model.parameters()), r"ModelAverage.*run\.register"),
        (stranger, optimizer, "parameters of the model only"),
        (model, paddle.optimizer.SGD(plateau, parameters=model.parameters()), "ReduceOnPlateau"),
    ):
        with pytest.raises(SpecError, match=message):
            run.wrap(bad_model, bad_optimizer)
    for bad, message in (
        ({"scaling": "cubic"}, "'fixed', 'linear', 'sqrt'"),
        ({"scaling": lambda _: -1.0}, "a number above 0"),
        ({"warm_up_steps": -1}, "0 or more"),
        ({"schedule": "day"}, "'step', 'samples', 'epoch' or None"),
    ):
        with pytest.raises(SpecError, match=message):
            run.wrap(model, optimizer, **bad)
    run.wrap(model, optimizer)
    with pytest.raises(SpecError, match="a second call"):
        run.wrap(model, optimizer)
    run.data(SAMPLES, **BATCHES)
    with pytest.raises(SpecError, match="one loop over the data a run"):
        run.data(SAMPLES, **BATCHES)


@pytest.mark.parametrize("lazy", [False, True])
def test_an_embedding_with_sparse_gradients_trains_as_with_several_ranks(*, lazy: bool) -> None:
    """Alone, too, its gradients are whole: else a model would depend on how many train it."""
    trained = []
    for sparse in (True, False):
        paddle.seed(3)
        model = paddle.nn.Sequential(paddle.nn.Embedding(10, 2, sparse=sparse), paddle.nn.Linear(2, 1))
        optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters(), lazy_mode=lazy)
        run, _ = begin()
        if lazy and sparse:
            with pytest.raises(SpecError, match="lazy_mode=True"):
                run.wrap(model, optimizer)
            return
        run.wrap(model, optimizer)
        for _, numbers in run.data(SAMPLES, **BATCHES):
            model(numbers).mean().backward()
            run.step()
        trained.append(arrays_of(model))
    for name, value in trained[0].items():
        np.testing.assert_allclose(value, trained[1][name], rtol=1e-6)


def test_a_path_that_can_t_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """And not at the first checkpoint, hours later."""
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointStoreError, match="file"):
        elastic.init(str(tmp_path / "file" / "kept"), settings=RuntimeSettings())


def saved_in(link: RecordingClient) -> list[tuple[int, int]]:
    """Return step and request of each checkpoint that was reported."""
    return [(message.step, message.request) for message in link.sent if isinstance(message, CheckpointSaved)]


def test_a_requested_checkpoint_is_written_after_the_step(tmp_path: Path) -> None:
    """One for each request, and those that come before it begins share it; the last checkpoint answers, too."""
    run, link = begin(tmp_path)
    model, _ = run.wrap(*model_and_optimizer())
    batches = iter(run.data(SAMPLES, **BATCHES))
    train(run, model, batches, steps=2)
    for number in (11, 12):
        link.asked = SaveCheckpoint(request=number, asked_in=1)
    train(run, model, batches, steps=2)
    link.asked = SaveCheckpoint(request=13, asked_in=1)
    run.finish()
    assert saved_in(link) == [(3, 12), (4, 13)]
    assert [info.manifest.request for info in CheckpointStore(Checkpoint(url=str(tmp_path))).list()] == [13, 12]


def test_a_request_is_answered_by_the_checkpoint_of_who_was_lost(tmp_path: Path) -> None:
    """It had written it and not reported it: the next worker reports it; where there is none, it writes one."""
    lost = RecordingClient()
    lost.asked = SaveCheckpoint(request=11, asked_in=1)
    snapshot = Snapshot(generation=1, step=5, arrays={})
    CheckpointManager(Checkpoint(url=str(tmp_path)), lost).save_now(lambda: snapshot)
    link = RecordingClient()
    manager = CheckpointManager(Checkpoint(url=str(tmp_path)), link)
    later = Snapshot(generation=2, step=7, arrays={})
    for request in (11, 12):
        link.asked = SaveCheckpoint(request=request, asked_in=1)
        assert manager.is_requested
        manager.save(lambda: later, generation=2)
        manager.close()
        assert not manager.is_requested
    assert saved_in(link) == [(5, 11), (7, 12)]


def test_a_request_waits_for_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not skipped, as one that is due by the schedule would be."""
    written, write = threading.Event(), CheckpointStore.write
    monkeypatch.setattr(CheckpointStore, "write", lambda *args: (written.wait(60), write(*args))[1])
    link = RecordingClient()
    manager = CheckpointManager(Checkpoint(url=str(tmp_path)), link)
    manager.save(lambda: Snapshot(generation=1, step=5, arrays={}), generation=1)
    link.asked = SaveCheckpoint(request=11, asked_in=1)
    assert not manager.is_requested
    written.set()
    manager.close()
    assert manager.is_requested
    manager.save(lambda: Snapshot(generation=1, step=6, arrays={}), generation=1)
    manager.close()
    assert saved_in(link) == [(5, 0), (6, 11)]


def test_a_request_whose_checkpoint_can_not_be_reported_is_answered(tmp_path: Path) -> None:
    """With why: messages are UTF-8, and the name of this folder is not."""
    link = RecordingClient()
    manager = CheckpointManager(Checkpoint(url=str(tmp_path / os.fsdecode(b"\xff"))), link)
    link.asked = SaveCheckpoint(request=11, asked_in=1)
    manager.save(lambda: Snapshot(generation=1, step=5, arrays={}), generation=1)
    manager.close()
    (note,) = link.sent
    assert isinstance(note, Note)
    assert note.request == 11
    assert "UnicodeEncodeError" in note.text


def test_a_request_that_can_not_be_answered_is_reported(tmp_path: Path) -> None:
    """With why, so that nobody waits for it; the next request is tried again."""
    link = RecordingClient()
    manager = CheckpointManager(Checkpoint(url=str(tmp_path / "place")), link)
    away(tmp_path / "place")
    link.asked = SaveCheckpoint(request=11, asked_in=1)
    manager.save(lambda: Snapshot(generation=1, step=5, arrays={}), generation=1)
    manager.close()
    (note,) = link.sent
    assert isinstance(note, Note)
    assert note.request == 11
    assert str(tmp_path) in note.text
    assert not manager.is_requested
