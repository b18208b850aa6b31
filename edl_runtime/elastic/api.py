"""What a training script calls: `init` and `Run`."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, overload

from edl_runtime.checkpoint.folder_lease import hold_until_exit
from edl_runtime.checkpoint.storage import storage_at
from edl_runtime.elastic.comm.agent_protocol import AgentClient, InitCalled, Note, connect_to_agent
from edl_runtime.elastic.comm.process_group import GroupSession
from edl_runtime.elastic.data.indexed import (
    BatchOptions,
    Collate,
    DatasetCursor,
    IndexedData,
    count_steps,
    default_collate,
)
from edl_runtime.elastic.data.sharded import ReadShard, ShardedData
from edl_runtime.elastic.training.checkpointing import CheckpointManager
from edl_runtime.elastic.training.learning_rate import Scaling
from edl_runtime.elastic.training.loop import LrSchedule, TrainingLoop, TrainingOptions
from edl_runtime.elastic.training.state_parts import RegisteredState, check_registered_name
from edl_runtime.errors import SpecError
from edl_runtime.log import get_logger
from edl_runtime.settings import RuntimeSettings
from edl_runtime.shards.ledger import BlockingLedger, ShardPlan
from edl_runtime.specs import Checkpoint, NotFinite, check_not_finite

Model = TypeVar("Model")
Optimizer = TypeVar("Optimizer")
Kept = TypeVar("Kept")
Pair = tuple[Any, Any]
"""A model and its optimizer."""

log = get_logger(__name__)


class Dataset(Protocol):
    """Has items by index, as paddle.io.Dataset, a list or an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class WrapOptions(TypedDict, total=False):
    """See `Run.wrap`."""

    scaler: Any
    scaling: Scaling
    warm_up_steps: int
    schedule: LrSchedule
    not_finite: NotFinite | None


def init(
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None, *, settings: RuntimeSettings | None = None
) -> Run:
    """Return this script's run, alone or as one of several instances under an agent.

    - `checkpoint`: where checkpoints are kept; by default EDL_CHECKPOINT and the other settings, if set.
    - `settings`: by default from the environment.

    Other instances are contacted in `Run.wrap`, not here. Raises SpecError, CheckpointStoreError when checkpoints can't
    be written there, and CheckpointHeldError when another running job keeps its own there.
    """
    settings = settings or RuntimeSettings.from_env(os.environ)
    spec = settings.checkpoint_spec() if checkpoint is None else _checkpoint(checkpoint)
    agent = connect_to_agent(os.environ)
    url = storage_at(spec.url).url if spec else ""
    agent.send(InitCalled(checkpoint=url))
    checkpoints = CheckpointManager(spec, agent)
    if agent.standalone and url:
        hold_until_exit(settings, url)
    return Run(agent, checkpoints, settings)


def schedule_steps(samples: int, batch: int, *, epochs: int = 1) -> int:
    """Return how many steps a scheduler makes in a training, to build it before `run.wrap`.

    - `samples`: the dataset's length. `epochs`: as in `run.data`.
    - `batch`: its `instance_batch`, with `run.wrap(schedule="samples")`, or its `global_batch`. The number of
      instances changes nothing.

    Raises SpecError for what is no whole number above 0.
    """
    return count_steps(_whole("samples", samples, 1), _whole("batch", batch, 1), _whole("epochs", epochs, 1))


class Run:
    """An elastic training. Made by `init`.

        run = elastic.init()
        model, optimizer = run.wrap(model, optimizer)
        for batch in run.data(dataset, global_batch=256, epochs=3):
            loss = model(batch).loss
            loss.backward()
            run.step(loss=loss)

    When its instance has to leave, the script ends by SystemExit where it asks for its next batch. Under an agent
    SIGTERM and SIGINT are ignored; without one, SIGTERM means: finish the step, write a checkpoint, exit with 0.
    """

    def __init__(self, agent: AgentClient, checkpoints: CheckpointManager, settings: RuntimeSettings) -> None:
        self._session = GroupSession(agent, settings.host)
        self._agent = agent
        self._checkpoints = checkpoints
        self._settings = settings
        self._wrapped: TrainingLoop | None = None
        self._registered: dict[str, RegisteredState] = {}

    @property
    def rank(self) -> int:
        """This instance's rank, from 0. May change after each step."""
        return self._session.group.rank

    @property
    def world_size(self) -> int:
        """How many instances train now. May change after each step."""
        return self._session.group.world_size

    @property
    def generation(self) -> int:
        """The number of the current membership, which grows with each change; 0 before `wrap`."""
        return self._session.generation

    @property
    def step_number(self) -> int:
        """Steps of the model so far, those of earlier runs and other instances included."""
        return self._training("run.step_number").train_state.steps

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0, so how many are over; with `run.shards` this rank's own."""
        data_source = self._training("run.epoch").train_state.data_source
        if data_source is None:
            raise SpecError("run.epoch", "a use before run.data", "run.data or run.shards first")
        return data_source.epoch

    @property
    def mean_loss(self) -> float:
        """The last step's loss, the same on each rank: the mean over all samples, or by weight; NaN if not given."""
        return self._training("run.mean_loss").train_state.mean_loss

    @property
    def learning_rate(self) -> float:
        """The scaled rate of the next step; the first optimizer's if there are several."""
        return self._training("run.learning_rate").learning_rate()

    def register(self, name: str, target: Kept) -> Kept:
        """Keep more state than the model in checkpoints, and send it to joining instances; return `target`.

        Call it before `wrap`, which restores the state. `target` is

        - a dict of plain values, such as `{"best": 0.0, "misses": 0}`, which the script changes in place: None,
          booleans, numbers, text, numpy arrays, Paddle tensors except parameters, and lists, tuples and dicts of these;
          or
        - an object whose `state_dict` returns such a dict and whose `set_state_dict`, or `load_state_dict`, takes it.

        It has to be the same on all ranks. Change it between `run.step`, the last one of a batch, and the next batch:
        changes after a lost step are undone, because its batch comes again; changes before would then be made twice.
        `name`: of a-z, 0-9, '_' and '-'.

        Raises SpecError for a name that is taken, and for unsupported values. `wrap` raises OtherModelError where a
        checkpoint has other names than the script registers.
        """
        if self._wrapped is not None:
            raise SpecError("run.register", f"{name!r} after run.wrap", "a call before run.wrap, which restores it")
        if name in self._registered:
            raise SpecError("run.register(name)", name, "a name that is not registered yet")
        check_registered_name(name)
        self._registered[name] = RegisteredState(name, target)
        return target

    @overload
    def wrap(self, model: Model, optimizer: Optimizer, **options: Unpack[WrapOptions]) -> tuple[Model, Optimizer]: ...

    @overload
    def wrap(
        self, model: Pair, optimizer: Pair, third: Pair, /, *more: Pair, **options: Unpack[WrapOptions]
    ) -> tuple[Pair, ...]: ...

    def wrap(
        self,
        model: Any,
        optimizer: Any,
        *more: Pair,
        scaler: Any = None,
        scaling: Scaling = "fixed",
        warm_up_steps: int = 0,
        schedule: LrSchedule = "step",
        not_finite: NotFinite | None = None,
    ) -> tuple[Any, ...]:
        """Connect with the other instances, bring all to the same state, and return the same objects.

        That state is the other instances', else the newest checkpoint's, else the one that the script has built. It
        includes registered state and the learning rate. The script may change the rate later; all ranks use that of the
        first rank that has a batch, and changes between a batch and its `run.step` are undone if the step is lost.

        From here to the end only `run.step` may change parameters: otherwise it raises StepError, and so do the steps
        of all optimizers, wrapped or not. Clip gradients by the optimizer's `grad_clip`, which sees those of the whole
        batch.

        Several models are wrapped as pairs, each with its optimizer: `run.wrap((generator, one), (critic, other))`.
        Each `run.step` then steps every optimizer whose parameters have gradients; or one model, by `of=critic`.

        - `model`, `optimizer`: a paddle.nn.Layer and its optimizer, each complete, without paddle.DataParallel.
        - `scaler`: the paddle.amp.GradScaler of the losses, if any. `run.step` unscales, skips a step that overflows,
          and updates it.
        - `scaling`: how the learning rate follows the number of instances; by default it does not. To what no step has
          had yet it grows over `warm_up_steps`; it falls, and comes back to what was reached, at once.
        - `schedule`: when `run.step` steps an optimizer's LRScheduler: at each "step"; as often as one instance would
          have, by the "samples" that all have trained, so that it ends with the data at any number of instances (see
          `elastic.schedule_steps`); at each "epoch"'s end; or, for None, never: then the script may, in its loop.
        - `not_finite`: what happens when the loss or gradients of a step are NaN or infinite. "warn": an event and a
          warning, once, and training continues. "fail": all ranks raise NotFiniteError, which fails the job, before the
          step is applied. By default EDL_NOT_FINITE, which is "warn" if not set. With a `scaler` that is on, only the
          loss counts.

        Raises OtherModelError for a checkpoint of another model, NoWholeCheckpointError when all checkpoints are
        damaged, UnknownFormatError for one of another version, NoGroupError where it can't sum gradients with the
        others, SpecError for what can't be trained so.
        """
        import paddle

        if self._wrapped is not None:
            raise SpecError("run.wrap", "a second call", "one a run, of all models: run.wrap((a, one), (b, two))")
        if warm_up_steps < 0:
            raise SpecError("warm_up_steps", warm_up_steps, "0 or more")
        if schedule not in {"step", "samples", "epoch", None}:
            raise SpecError("schedule", schedule, "'step', 'samples', 'epoch' or None")
        if scaler is not None and not isinstance(scaler, paddle.amp.GradScaler):
            raise SpecError("scaler", type(scaler).__name__, "a paddle.amp.GradScaler")
        wrapped = (model, optimizer, *more)
        pairs = wrapped if more or isinstance(model, tuple) else [wrapped]
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            given = [type(each).__name__ for each in wrapped]
            raise SpecError("run.wrap", given, "a model and its optimizer, or several such pairs: (model, optimizer)")
        paddle.disable_signal_handler()  # else it turns SIGTERM into an error
        self._agent.handle_signals()
        options = TrainingOptions(
            scaling=scaling,
            warm_up_steps=warm_up_steps,
            schedule=schedule,
            not_finite=check_not_finite("not_finite", not_finite or self._settings.not_finite),
        )
        training = TrainingLoop(
            pairs,
            registered=self._registered,
            scaler=scaler,
            session=self._session,
            checkpoints=self._checkpoints,
            settings=self._settings,
            options=options,
        )
        self._wrapped = training
        training.begin()
        return wrapped

    def data(
        self,
        dataset: Dataset,
        *,
        global_batch: int | None = None,
        instance_batch: int | None = None,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        micro_batch: int | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> IndexedData:
        """Return this rank's remaining batches of all epochs, as an iterable; call `run.step` for each.

        - `dataset`: has a length and items by index, the same on each instance. For iterable datasets use `shards`.
        - `global_batch`: samples of a step, of all ranks together. The order of samples and the loss are then the same
          with any number of instances, so an event warns of `wrap(scaling=…)`, which is for `instance_batch`: samples
          of a step on each rank.
        - `epochs`: how often all samples are trained. `shuffle`: another order in each, which `seed` decides.
        - `micro_batch`: most samples of a batch that the script gets; gradients are accumulated. Not with
          `run.step(of=…)`.
        - `num_workers`, `collate_fn`: as in paddle.io.DataLoader.

        Raises SpecError, also for a global batch below the most instances that the job may have, and
        DatasetChangedError if the training began with another number of samples.
        """
        training = self._training("run.data")
        if training.train_state.data_source is not None:
            raise SpecError("run.data", "a second call", "one loop over the data a run")
        length = _checked_length(dataset)
        size = _checked_batch(global_batch, instance_batch, self._session.instances)
        batching = BatchOptions(
            global_batch=None if global_batch is None else size,
            instance_batch=None if instance_batch is None else size,
            micro_batch=None if micro_batch is None else _whole("micro_batch", micro_batch, 1),
            num_workers=_whole("num_workers", num_workers, 0),
            collate_fn=collate_fn,
        )
        start = DatasetCursor(
            length=length,
            global_batch=size,
            epochs=_whole("epochs", epochs, 1),
            seed=_whole("seed", seed, 0),
            shuffle=shuffle,
        )
        if global_batch is not None and training.options.scaling != "fixed" and self.rank == 0:
            log.warning("scaling.without_growth", global_batch=size)
            text = (
                f"run.wrap(scaling={training.options.scaling!r}) changes the learning rate with the instances, "
                "and with run.data(global_batch=…) the batch does not change: use instance_batch, or scaling='fixed'"
            )
            self._agent.send(Note(text=text))
        data = IndexedData(training, dataset, batching, start)
        training.train_state.begin_data(data)
        return data

    def shards(
        self,
        read: ReadShard,
        names: Sequence[str] | None = None,
        *,
        batch_size: int,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = False,
        failure_limit: int = 3,
        collate_fn: Collate | None = None,
    ) -> ShardedData:
        """Return this rank's batches of the shards that it leases, as an iterable; call `run.step` for each.

        For data too large to index, streams, and instances of different speed. Each record counts exactly once an
        epoch; which records a step has depends on the instances' speed.

        - `read`: returns the records of a shard, always the same in the same order.
        - `names`: the shards, the same list on each instance; None for a stream, to which others add shards.
        - `batch_size`: most records of a batch. No batch has records of two shards.
        - `epochs`: how often all shards are read. `shuffle`: another order in each, which `seed` decides.
        - `failure_limit`: a shard that can't be read so often is set aside. `collate_fn`: as in paddle.io.DataLoader.

        Raises SpecError, also without Redis or a job's name, and ShardsChangedError if the training began with other
        shards.
        """
        training = self._training("run.shards")
        if training.train_state.data_source is not None:
            raise SpecError("run.shards", "a second call", "one loop over the data a run")
        batch_size = _whole("batch_size", batch_size, 1)
        settings = self._settings
        if not settings.redis_url or not settings.job:
            allowed = "EDL_REDIS_URL and EDL_JOB: shards are leased there"
            raise SpecError("run.shards", "no Redis or no job's name", allowed)
        if training.options.schedule == "epoch":
            allowed = "'step', 'samples' or None with shards: ranks are not in one epoch all the time"
            raise SpecError("schedule", "epoch", allowed)
        ledger = BlockingLedger(
            settings.redis_url,
            settings.namespace,
            settings.job,
            worker=self._session.name,
            shards=names,
            plan=ShardPlan(epochs=epochs, seed=seed, shuffle=shuffle, failure_limit=failure_limit),
        )
        collate_fn = collate_fn or default_collate
        data = ShardedData(training, ledger, read, batch_size=batch_size, epochs=epochs, collate_fn=collate_fn)
        training.train_state.begin_data(data)
        return data

    def step(self, loss: Any = None, *, weight: Any = None, of: Any = None) -> bool:
        """Train on the batch, after `loss.backward()`: sum gradients over ranks, step the optimizers, clear gradients.

        With micro batches only the last of a step does all this. Returns False if the step was lost with another rank:
        its batch comes again, and changes to registered state until then are undone.

        - `loss`: the mean over the batch's samples, or over what `weight` counts.
        - `of`: one of several models that were given to `wrap`. Only its gradients count, those left in others are
          dropped, and only its optimizer and scheduler step. Each model is stepped once a batch at most, on all ranks
          the same ones in the same order. The batch counts as one step, once all models were stepped, or the script
          asks for the next batch: until then `run.step_number` stays, and if another rank is lost, all of it is undone
          and comes again.
        - `weight`: how much this mean counts beside those of other ranks and micro batches, as the tokens that it is
          over: `run.step(ce.sum() / mask.sum(), weight=mask.sum())`. By default its samples. All ranks give it, in each
          step, or none. 0 leaves the loss and its gradients out.

        What is due then happens when the script asks for its next batch: a checkpoint, a new generation, or SystemExit
        when the instance has to leave. Raises StepError, also when parameters were changed outside of it,
        EarlyEndError, NotFiniteError where `wrap(not_finite="fail")` asks for it and, for a weight that is no finite
        number of 0 or more, SpecError.
        """
        return self._training("run.step").step(loss, weight, of)

    def mean(self, value: Any) -> float:
        """Return the mean of `value`, a number, over all ranks, the same on each, so that they decide alike.

        All ranks call it at the same place in the loop over the data; a rank without a batch there does not count.
        After an epoch's batches, in the loop over `data.epochs()`, all count. Raises StepError where some do not call
        it, before the first batch, after the end, and between a batch's `run.step(of=…)` and the batch's end.
        """
        return self._training("run.mean").mean(value)

    def finish(self) -> None:
        """End the training after this step, before its data ends, and write the last checkpoint.

        For a script that stops early: all ranks call it after the same step, by what all know, such as `run.mean_loss`,
        `run.mean` or registered state, and before they evaluate; a rank without a batch in that step ends with the
        others. After a lost step it does nothing. A script that leaves its loop without it ends the training when the
        script ends; if an instance joins or leaves before, what came after the last checkpoint is lost and trained
        again.

        Ends the script by SystemExit instead when the instance has to leave. Raises EarlyEndError, CheckpointError.
        """
        self._training("run.finish").finish_early()

    def metrics(self, **values: float) -> dict[str, float]:
        """Set metrics of the next checkpoints and the job's result; return all metrics.

        They include those of the checkpoint, or of the other instances, that the training continues from. NaN and
        infinity, which JSON can't hold, remove a metric; the log warns, and the result's `not_finite` has its name and
        since which step. "loss" is the last step's, if `step` gets it. Raises SpecError for what is no number, and when
        they are too large for a result.
        """
        training = self._training("run.metrics")
        training.note_metrics(values)
        return training.train_state.reported_metrics()

    def _training(self, what: str) -> TrainingLoop:
        if self._wrapped is None:
            raise SpecError(what, "a use before run.wrap", "run.wrap(model, optimizer) first")
        return self._wrapped


def _checkpoint(given: Checkpoint | str | os.PathLike[str]) -> Checkpoint:
    if isinstance(given, str | os.PathLike):
        return Checkpoint(url=os.fspath(given))
    if not isinstance(given, Checkpoint):
        raise SpecError("elastic.init(checkpoint)", given, "a path, a URL such as s3://bucket/job, or a Checkpoint")
    return given


def _checked_batch(global_batch: int | None, instance_batch: int | None, instances: int) -> int:
    if (global_batch is None) == (instance_batch is None):
        raise SpecError("run.data", (global_batch, instance_batch), "either global_batch or instance_batch")
    if instance_batch is not None:
        return _whole("instance_batch", instance_batch, 1)
    return _whole("global_batch", global_batch, instances, ", for so many instances may share it")


def _checked_length(dataset: Any) -> int:
    """Return how many samples there are. Raises SpecError without a length or access by index."""
    from paddle.io import IterableDataset

    allowed = "a length and items by index, as in a list or a paddle.io.Dataset; for others there is run.shards"
    if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__"):
        raise SpecError("dataset", type(dataset).__name__, allowed)
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        raise SpecError("dataset", type(dataset).__name__, allowed) from None
    return _whole("len(dataset)", length, 1)


def _whole(field: str, given: Any, least: int, why: str = "") -> int:
    """Return a whole number, which may be numpy's, as an int. Raises SpecError."""
    try:
        number = operator.index(given)
    except TypeError:
        number = least - 1
    if number < least or isinstance(given, bool):
        raise SpecError(field, given, f"a whole number, {least} or more{why}")
    return number
