"""The training loop behind `Run`: what a step is, how ranks agree on it, and how it continues in a new generation."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import msgspec
import numpy as np

from edl_runtime.checkpoint.file_format import Snapshot
from edl_runtime.checkpoint.finite import not_finite_since
from edl_runtime.elastic.comm.agent_protocol import (
    GenerationEntered,
    JoinGeneration,
    Leave,
    Note,
    StepDone,
    WorkerReady,
)
from edl_runtime.elastic.comm.process_group import GroupSession, ProcessGroup
from edl_runtime.elastic.errors import EarlyEndError, GroupLostError, NotFiniteError, StepError
from edl_runtime.elastic.training.batch_norm import RunningStatistics
from edl_runtime.elastic.training.checkpointing import CheckpointManager, TrainingEnd
from edl_runtime.elastic.training.learning_rate import Scaling, decode_slots, encode_slots, scaling_factor
from edl_runtime.elastic.training.model_steps import ALL_MODELS, NEXT_BATCH, ModelSteps, check_same, rates_of
from edl_runtime.elastic.training.optimizer_step import (
    DeviceGradients,
    Gradients,
    HostGradients,
    OptimizerGuard,
    StepSums,
    any_sparse,
)
from edl_runtime.elastic.training.script_end import at_script_end
from edl_runtime.elastic.training.state_parts import Part, PartState, RegisteredState, StateParts, frozen_parts
from edl_runtime.elastic.training.train_state import (
    Origin,
    TrainState,
    arrays_of,
    share_state,
    state_receivers,
    states_of,
    takes_part,
    values_of,
)
from edl_runtime.errors import SpecError, counted
from edl_runtime.log import get_logger
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import NotFinite

REPORT_EVERY_S = 0.3
"""How often steps are reported to the agent, except a generation's first and the training's last."""

_ONCE = "call it once, or once for each model that run.wrap was given, as a GAN's: run.step(loss, of=critic)"

NO_CHECKPOINTS = (
    "no checkpoints are kept and the model is on a GPU, so the training starts again from step 0 each time that an "
    "instance joins or leaves; `edl run --checkpoint PLACE`, EDL_CHECKPOINT or elastic.init(PLACE) keeps some"
)

log = get_logger(__name__)

LrSchedule = Literal["step", "samples", "epoch"] | None

RankTurn = Literal["steps", "idles", "follows", "ends", "averages"]
"""What a rank does next: a step with a batch, or without one; a step after one in which its script had no batch, while
the other scripts may have ended the training or changed registered state; the end; a mean."""

TURNS: tuple[RankTurn, ...] = get_args(RankTurn)


class MicroBatch(NamedTuple):
    """A batch that the script gets: its samples; whether it is the first and the last of this rank's step."""

    samples: int
    first: bool
    last: bool


class StepConsensus(NamedTuple):
    """What all ranks do together.

    - `samples`: of all ranks' step. `weight`: of all together; NaN if only some give one. `stop`: this generation ends
      with it. `due`: rank 0 writes a checkpoint after it, because one is due; `asked`: because one was requested.
    - `counts`: the data source's, summed. `turns`: what each rank does next.
    - `rates`: learning rates of the optimizers on the first rank that has a batch, NaN without any.
    - `values`: of the ranks that take part in a mean. `does`: what each does with its batch, None without one.
    """

    samples: int
    weight: float
    stop: bool
    due: bool
    asked: bool
    counts: list[int]
    rates: list[float]
    turns: list[RankTurn]
    values: list[float]
    does: list[int | None]

    @property
    def of(self) -> int:
        """The model that is stepped, or all."""
        return next((each for each in self.does if each is not None), ALL_MODELS)


class TrainingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """See `Run.wrap`."""

    scaling: Scaling
    warm_up_steps: int
    schedule: LrSchedule
    not_finite: NotFinite


class TrainingLoop:
    """Everything behind a `Run`, from `wrap` on. For the script's main thread only."""

    def __init__(
        self,
        pairs: Sequence[tuple[Any, Any]],
        *,
        registered: Mapping[str, RegisteredState],
        scaler: Any = None,
        session: GroupSession,
        checkpoints: CheckpointManager,
        settings: RuntimeSettings,
        options: TrainingOptions,
    ) -> None:
        """`begin` has to follow. Raises SpecError."""
        scaling_factor(options.scaling, 1)
        self.agent = session.agent
        self.session = session
        self._registered = StateParts([], registered)
        others = {**registered, **({} if scaler is None else {"scaler": RegisteredState("scaler", scaler)})}
        self.train_state = TrainState(session, StateParts(pairs, others), run=settings.run)
        self._frozen = frozen_parts(pairs)
        self._script_state = StateParts([], dict[str, Part](registered) | self._frozen)
        self._statistics = RunningStatistics([model for model, _ in pairs])
        parameters = self.train_state.state.parameters
        self._on_cpu = all(parameter.place.is_cpu_place() for parameter in parameters)
        self._model_steps = ModelSteps(self.train_state.state.models, others.get("scaler"))
        kind = HostGradients if self._on_cpu else DeviceGradients
        every = [*(model.parameters for model in self.train_state.state.models), parameters]
        self._gradients: list[Gradients] = [kind(each) for each in every]  # of each model and, last, of all
        self._checkpoints = checkpoints
        self._end = TrainingEnd(self.train_state, session, checkpoints, settings)
        moves = options.schedule is not None
        self._optimizer_guard = OptimizerGuard(
            pairs, scaler=scaler, moves_schedulers=moves, over=lambda: self._end.over
        )
        self.options = options
        self._batch: MicroBatch | None = None  # that the script has and has not stepped, or not with each model
        self._applied: StepConsensus | None = None  # the last step of a batch that is not over
        self._batch_generation = 0
        self._begun = False  # the loop over the data
        self._had_no_batch = False  # in the step before
        self._before_lost_step: dict[str, PartState] | None = None  # what the script keeps and changes itself
        self._checkpoint_due = self._regroup_due = False  # as soon as the script asks for its next batch
        self._unpacked: StepSums | None = None  # with one rank and one micro batch gradients are not copied
        self._scaler_skips = scaler is not None and scaler.is_enable()  # steps with infinite gradients
        self._noted_not_finite = False
        self._own_samples = 0
        self._own_weight = math.nan  # without any
        self._waited_s = 0.0
        self._reported: tuple[int, float] = (0, -math.inf)  # generation and time

    def begin(self) -> None:
        """Enter the first generation."""
        self.session.begin(nccl=not self._on_cpu)
        self.agent.send(WorkerReady(live=self.session.live, seen=self._checkpoints.highest_generation()))
        self._enter_next_generation()
        self._optimizer_guard.begin()
        restarts = self.session.instances > 1 and not self.session.live and not self._checkpoints.kept
        if restarts and self.session.group.rank == 0:
            log.warning("checkpoints.missing", reason=NO_CHECKPOINTS)
            self.agent.send(Note(text=NO_CHECKPOINTS))

    def learning_rate(self) -> float:
        """Return the first optimizer's rate in the next step."""
        return self.train_state.state.rates[0].value * self.train_state.scale.at(self.train_state.steps)

    @property
    def over(self) -> bool:
        """Whether there are no more batches: this rank's training has ended, or the one that it has joined."""
        return self._end.over or self.train_state.ended

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Report, for the agent's watchdog, that this rank waits for the others at the end of its step."""
        self.agent.waits_for(self.train_state.steps + 1)
        begun_at = time.monotonic()
        try:
            yield
        finally:
            self._waited_s += time.monotonic() - begun_at
            self.agent.waits_for(None)

    def note_batch(self, micro: MicroBatch) -> None:
        """Note that the script gets this batch."""
        if micro.first:
            for rate in self.train_state.state.rates:
                rate.note_batch()
        self._batch, self._batch_generation = micro, self.session.generation

    def between_steps(self) -> None:
        """Do what is due between two steps; data sources call it before each.

        The script has finished its work after the last step by then: if that step was lost, its changes to registered
        state and to what is frozen are undone, else a checkpoint and joining ranks get them.
        """
        if not self._begun:
            self._begun = True
            at_script_end(self.agent, self.finish, lambda: self._end.over)
        self._end_open_batch()
        if self._before_lost_step is not None:
            self._script_state.load(self._before_lost_step, "the state before the lost step")
            self._before_lost_step = None
        if self._checkpoint_due:
            self._checkpoint_due = False
            snapshot = partial(self.train_state.snapshot, durable=True)
            self._checkpoints.save(snapshot, generation=self.session.generation)
        if self._regroup_due:
            self._enter_next_generation()

    def check_stepped(self) -> None:
        """End the last batch. Raise StepError if it was not followed by a step, or by the end."""
        self._end_open_batch()
        if self._batch is not None and not self.over:
            raise StepError("the script asked for another batch before it called run.step")

    def _end_open_batch(self) -> None:
        """End a batch of which only some models have made their step; ranks without a batch learn it here.

        Whoever is here has all of it, so it counts from now on.
        """
        if self._applied is None or self.over:
            return
        self._batch = None
        self._end_batch(self._applied)
        try:
            with self._waiting():
                agreed = self._agree("steps", does=NEXT_BATCH)
                self._average_statistics(agreed)
                self._regroup_due |= agreed.stop
        except GroupLostError as error:
            self._recover(error, step=False)

    def step(self, loss: Any, weight: Any, of: Any = None) -> bool:
        """Add a batch's gradients, and finish the step if it is this rank's last. Return False if the step was lost."""
        number = self._model_steps.number_of(of)
        micro = self._batch_to_step(number)
        if micro is None:
            self._clear_gradients()
            return False
        parameters = [each for model in self._model_steps.models(number) for each in model.parameters]
        own = math.nan if weight is None else _checked_weight(weight)
        share = micro.samples if weight is None else own
        if share and all(parameter.grad is None for parameter in parameters):
            raise StepError("run.step was called, and no parameter has a gradient, or not any more")
        if not micro.first and math.isnan(own) != math.isnan(self._own_weight):
            raise StepError("run.step got weight= with some micro batches of a step only", "give it with all, or none")
        self._batch = None
        value, gradients = None if loss is None else _number("loss", loss), self._gradients[number - 1]
        if not share:  # a mean over nothing is not a number
            self._clear_gradients()
        elif micro.first and micro.last and self.session.group.world_size == 1 and not any_sparse(parameters):
            self._unpacked = StepSums(value, self._scaler_skips or gradients.own_finite())
        else:
            gradients.add(share, value)
        self._clear_gradients(but=number)
        self._own_samples += micro.samples
        self._own_weight = own if micro.first else self._own_weight + own
        done = self.finish_step(number) if micro.last else True
        if self._applied is not None:
            self._batch = micro
        return done

    def _batch_to_step(self, number: int) -> MicroBatch | None:
        """Return the script's batch, None if it was lost in a step or a mean before. Raises StepError, SpecError."""
        micro = self._batch
        if micro is None and number and self._before_lost_step is not None:
            return None
        if micro is None and self._begun and not self.over:
            raise StepError("run.step was called a second time for one batch", _ONCE)
        if micro is None:
            raise StepError("run.step was called without a batch of run.data before it")
        if self._batch_generation != self.session.generation:
            self._batch = None
            return None
        self._model_steps.check(number)
        if number and not (micro.first and micro.last):
            raise SpecError("run.step(of=…)", "a micro batch", "whole batches: run.data without micro_batch")
        return micro

    def _clear_gradients(self, but: int | None = None) -> None:
        """Clear those of all models, or of all but these."""
        kept = () if but is None else self._model_steps.models(but)
        for model in self.train_state.state.models:
            if not any(model is each for each in kept):
                for parameter in model.parameters:
                    parameter.clear_gradient(False)

    def mean(self, value: Any) -> float:
        """See `Run.mean`."""
        own = _number("run.mean", value)
        if not self._begun or self.over:
            raise StepError(
                "run.mean was called outside of the loop over the data", "call it in the loop, before the training ends"
            )
        if self._applied is not None:
            raise StepError(
                "run.mean was called after the step of one model, before its batch was over",
                "call it before the batch's first run.step(of=…), or after an epoch's batches",
            )
        while True:
            try:
                with self._waiting():
                    values = self._agree("averages", value=own).values
            except GroupLostError as error:
                self._recover(error, step=self._batch is not None or self._own_samples > 0)
                continue
            return math.fsum(values) / len(values)

    @property
    def samples(self) -> int:
        """Samples of all ranks and steps so far."""
        return self.train_state.samples

    def finish_step(self, number: int = ALL_MODELS) -> bool:
        """Do the step of all ranks, with the gradients that this one has added, if any. Return False if it was lost.

        Without a sample on any rank nothing is applied. A rank without a batch takes part in all steps of the others'.
        `number`: the model of this step, if not all. Raises StepError.
        """
        self._optimizer_guard.check()
        own, self._own_samples = self._own_samples, 0
        try:
            with self._waiting():
                agreed = self._agree(self._turn(own), own, does=number if own else None)
                if math.isnan(agreed.weight):
                    self._end.over = True
                    instead = "give it on all ranks in each step, or none"
                    raise StepError("run.step got weight= on some ranks only", instead)
                self._average_statistics(agreed)
                if agreed.samples and not self.train_state.ended:
                    self._align(agreed.turns)
                    sums, self._unpacked = self._unpacked, None
                    if sums is None and agreed.weight:
                        sums = self._gradients[agreed.of - 1].reduce(self.session.group, agreed.weight)
                    self._check_finite(sums or StepSums(None, finite=True))
        except GroupLostError as error:
            self._recover(error, step=True)
            return False
        if self.train_state.ended:
            self._discard_gradients()
            self.finish(agreed=True)
            return True
        if agreed.samples:
            self._apply(agreed)
            self._had_no_batch = not own
        elif self._applied is not None:
            self._end_batch(self._applied)
        elif self.train_state.data_source is not None:
            self.train_state.data_source.advance(0, agreed.counts)
        self._regroup_due |= agreed.stop
        return own > 0 or self._applied is None or self.finish_step()

    def _average_statistics(self, agreed: StepConsensus) -> None:
        """Average BatchNorm's statistics where joining ranks or a checkpoint get them."""
        if not self.train_state.ended and (agreed.stop or agreed.due or agreed.asked):
            self._statistics.average(self.session.group)

    def _discard_gradients(self) -> None:
        for gradients in self._gradients:
            gradients.discard()

    def finish_early(self) -> None:
        """End here, because the script wants to. After a lost step it decides once that is done again."""
        if self._before_lost_step is None:
            self.finish()

    def finish(self, *, agreed: bool = False) -> None:
        """End here, as all ranks do. Raises EarlyEndError where others train on.

        No rank ends before rank 0 has written the last checkpoint: if rank 0 is lost, another one writes it. A rank
        that has written it ends, whoever is lost. `agreed`: all have just reported that they end.
        """
        self._batch = None
        if not agreed and not self._end.over:
            self.between_steps()
        while not self._end.over:
            try:
                with self._waiting():
                    if not agreed:
                        self._agree("ends")
                    self._statistics.average(self.session.group)
                if self.session.group.rank == 0:
                    self._end.save()
                with self._waiting():
                    self._agree("ends")
            except GroupLostError as error:
                agreed = False
                if not self._end.saved:
                    self.session.abandon(error, self.train_state.steps)
                    self._enter_next_generation()
                    continue
            self._end.end("done")

    def note_metrics(self, values: Mapping[str, Any]) -> None:
        """Keep them for checkpoints; after the end they still go into the result. Raises as `TrainState.note`."""
        self.train_state.note({name: _number(f"run.metrics({name}=…)", value) for name, value in values.items()})
        if self._end.over and self.session.group.rank == 0:
            self._end.write_result()

    def _agree(
        self, turn: RankTurn, own: int = 0, value: float | None = None, does: int | None = None
    ) -> StepConsensus:
        """Return what all ranks do. Raises EarlyEndError if some end and others don't.

        If all end, the training has `ended`. A rank without a batch takes part in the others' means without a value;
        raises StepError if one with a batch does not take part, or steps another model than the others.
        """
        while True:
            agreed = self._exchange(turn, own, value, does)
            if "averages" not in agreed.turns:
                break
            if "steps" in agreed.turns:
                self._end.over = True
                there = [rank for rank, each in enumerate(agreed.turns) if each == "averages"]
                raise StepError(
                    f"run.mean was called after step {self.train_state.steps} on ranks {there} only, of "
                    f"{len(agreed.turns)}",
                    "call it on all ranks at the same place, not as in `if run.rank == 0`",
                )
            if turn == "averages":
                return agreed
        if self.train_state.data_source is not None:
            self.train_state.data_source.check(agreed.samples, agreed.counts)
        try:
            check_same(agreed.does, self.train_state.steps)
        except StepError:
            self._end.over = True
            raise
        if "ends" in agreed.turns:
            if not {"steps", "idles"}.isdisjoint(agreed.turns):
                gone = [rank for rank, each in enumerate(agreed.turns) if each == "ends"]
                self._end.over = True
                raise EarlyEndError(self.train_state.steps, gone, len(agreed.turns))
            self.train_state.ended = True
        return agreed

    def _exchange(self, turn: RankTurn, own: int, value: float | None, own_does: int | None) -> StepConsensus:
        """All-reduce what each rank does next, as counts."""
        group, data_source = self.session.group, self.train_state.data_source
        rank, size = group.rank, group.world_size
        of_batch = [*(each.value for each in self.train_state.state.rates), self._own_weight]
        numbers = [*(each if own else None for each in of_batch), value]
        step = self.train_state.steps + 1
        wishes = [self._checkpoints.due(step), self._checkpoints.is_requested] if rank == 0 else [False, False]
        parts = [
            [self.session.votes_to_stop(), own, *wishes],
            [TURNS.index(turn) if each == rank else 0 for each in range(size)],
            [own_does + 2 if each == rank and own_does is not None else 0 for each in range(size)],
            [] if data_source is None else data_source.counts(rank, size),
            *(encode_slots(number, rank, size) for number in numbers),
        ]
        counts = group.all_reduce_counts(np.array([each for part in parts for each in part], np.int64))
        ends = np.cumsum([len(part) for part in parts])
        parts_summed = [part.tolist() for part in np.split(counts, ends[:-1])]
        (votes, samples, due, asked), turns, noted, summed, *slots = parts_summed
        *rates, weights, values = map(decode_slots, slots)
        firsts = [each[0] if each else math.nan for each in rates]
        return StepConsensus(
            samples=samples,
            weight=total_weight(samples, weights),
            stop=votes >= size,
            due=bool(due),
            asked=bool(asked),
            counts=summed,
            rates=firsts,
            turns=[TURNS[number] for number in turns],
            values=values,
            does=[each - 2 if each else None for each in noted],
        )

    def _check_finite(self, sums: StepSums) -> None:
        """Note the loss, and once if it or gradients are not finite. Raises NotFiniteError where that fails the job.

        All ranks have the same sums, so they raise it in the same step. A scaler's gradients may be infinite: it skips
        such a step.
        """
        train_state, step = self.train_state, self.train_state.steps + 1
        finite = {"loss": sums.loss is None or math.isfinite(sums.loss)}
        if not self._scaler_skips:
            finite["gradients"] = sums.finite
        train_state.mean_loss = math.nan if sums.loss is None else sums.loss
        train_state.not_finite = not_finite_since(train_state.not_finite, finite, step)
        names = [name for name, is_finite in finite.items() if not is_finite]
        if not names:
            return
        fails = self.options.not_finite == "fail"
        if not self._noted_not_finite and self.session.group.rank == 0:
            then = "the job fails" if fails else "training continues, and checkpoints with such weights are marked"
            log.warning("step.not_finite", step=step, names=names, loss=train_state.mean_loss)
            self.agent.send(Note(text=f"NaN or infinity in the {' and the '.join(names)} of step {step}: {then}"))
        self._noted_not_finite = True
        if fails:
            self._end.over = True
            raise NotFiniteError(step, names)

    def _turn(self, own: int) -> RankTurn:
        if self.train_state.ended:
            return "ends"
        if self._had_no_batch and self._applied is None:
            return "follows"
        return "steps" if own else "idles"

    def _align(self, turns: Sequence[RankTurn]) -> None:
        """Copy what scripts change themselves to ranks whose scripts had no batch in the step before."""
        followers = [rank for rank, turn in enumerate(turns) if turn == "follows"]
        if not self._script_state.parts or len(followers) in (0, len(turns)):
            return
        group = self.session.group
        if not takes_part(group, followers):
            return
        states = self._registered.states() | {name: part.changes() for name, part in self._frozen.items()}
        own = Snapshot(
            generation=self.session.generation,
            step=self.train_state.steps,
            arrays=arrays_of(states),
            extra=values_of(states),
        )
        found = share_state(group, followers, own)
        if group.rank in followers:
            self._script_state.load(states_of(found.arrays, found.extra), "the state of another rank")

    def _recover(self, error: GroupLostError, *, step: bool) -> None:
        """Enter the next generation. `step`: a step is lost, so its batch comes again."""
        self.session.abandon(error, self.train_state.steps)
        if not step:
            self._enter_next_generation()
            return
        self._discard_gradients()
        self._applied = None
        self._model_steps.undo()
        self._own_samples = 0
        self._had_no_batch = True  # others may have applied it, and ended after it
        for rate in self.train_state.state.rates:
            rate.undo_step()
        self._enter_next_generation()
        for rate in self.train_state.state.rates:
            rate.await_repeat()
        self._before_lost_step = copy.deepcopy(self._script_state.states())  # the script changes its arrays

    def _apply(self, agreed: StepConsensus) -> None:
        """Step all models or one, and end the batch unless other models may follow."""
        factor = self.train_state.scale.at(self.train_state.steps)
        is_over = self._model_steps.begin(agreed.of, keeps=self.session.group.world_size > 1)
        own = rates_of(self._model_steps.models(agreed.of))
        with contextlib.ExitStack() as stack:
            for rate, number in zip(self.train_state.state.rates, agreed.rates, strict=True):
                if rate in own:
                    stack.enter_context(rate.of_step(number, factor))
            if agreed.weight:
                self._optimizer_guard.step()
        self._applied = agreed
        if is_over:
            self._end_batch(agreed)

    def _end_batch(self, agreed: StepConsensus) -> None:
        """Count a batch, by the last step of it."""
        train_state = self.train_state
        data_source = train_state.data_source
        assert data_source is not None  # noqa: S101 -- the batch is from it
        self._applied = None
        for rate in train_state.state.rates:
            rate.end_batch()
        epoch, of_one = data_source.epoch, data_source.steps_of_one
        data_source.advance(agreed.samples, agreed.counts)
        train_state.samples += agreed.samples
        by_samples, by_epoch = data_source.steps_of_one - of_one, int(data_source.epoch > epoch)
        moves = {None: 0, "step": 1, "samples": by_samples, "epoch": by_epoch}
        models = train_state.state.models if self.options.schedule == "epoch" else self._model_steps.stepped
        for _ in range(moves[self.options.schedule]):
            self._optimizer_guard.move_schedulers(rates_of(models))
        self._model_steps.end_batch()
        train_state.steps += 1
        self._report_step(data_source.epoch, data_source.total_steps)
        if agreed.due:
            self._checkpoints.note_due(train_state.steps)
        self._checkpoint_due = self.session.group.rank == 0 and (agreed.due or agreed.asked)

    def _report_step(self, epoch: int, total_steps: int | None) -> None:
        train_state, generation, now = self.train_state, self.session.generation, time.monotonic()
        is_last = train_state.steps == total_steps
        if self._reported[0] == generation and now - self._reported[1] < REPORT_EVERY_S and not is_last:
            return
        self._reported = generation, now
        self.agent.send(
            StepDone(
                generation=generation,
                step=train_state.steps,
                at=time.time(),
                clock_s=now,
                waited_s=self._waited_s,
                epoch=epoch,
                samples=train_state.samples,
                total_steps=total_steps,
                loss=train_state.mean_loss if math.isfinite(train_state.mean_loss) else None,
                metrics=train_state.metrics,
            )
        )

    def _enter_next_generation(self) -> None:
        self._regroup_due = False
        step = self.train_state.steps if self.train_state.begun else None
        leave = self.session.next_generation(step, self._load_checkpoint, self._enter)
        if leave is not None:
            self._leave(leave)

    def _load_checkpoint(self, join: JoinGeneration) -> None:
        """Read the checkpoint that a training starts from before the ranks connect and wait for each other."""
        if join.rank == 0 and not self.train_state.begun:
            self._checkpoints.newest()

    def _enter(self, group: ProcessGroup, join: JoinGeneration, steps: list[int | None]) -> None:
        """Bring all ranks to the state of the one that is ahead, or to the newest checkpoint's."""
        train_state = self.train_state
        origin: Origin = "peer"
        receivers = state_receivers(steps)
        if takes_part(group, receivers) or not train_state.begun:
            own = None if group.rank in receivers else self._own_snapshot()
            snapshot = share_state(group, receivers, own)
            is_own = own is not None and own.extra["origin"] != "checkpoint"
            origin = train_state.adopt(snapshot, rank=group.rank, generation=join.generation, is_own=is_own)
        if train_state.data_source is not None:
            train_state.data_source.seek(train_state.data_source.position(durable=False), join.world_size)
        self._had_no_batch |= not train_state.begun and origin == "peer"
        train_state.begun = True
        self._optimizer_guard.note()
        for part in self._frozen.values():
            part.note()
        self._follow_size(join)
        self._checkpoints.begin(train_state.steps, train_state.unsaved_s)
        if group.rank == 0:
            self._checkpoints.prepare(train_state.state.layout)
        self.agent.send(
            GenerationEntered(generation=join.generation, step=train_state.steps, source=origin, live=self.session.live)
        )

    def _own_snapshot(self) -> Snapshot:
        """Return what the others get: this rank's state, else the newest checkpoint, else what the script built."""
        if self.train_state.begun:
            return self.train_state.snapshot(unsaved_s=self._checkpoints.unsaved_s())
        found = self._checkpoints.newest()
        if found is None:
            return self.train_state.snapshot("start")
        log.info("checkpoint.loaded", url=found.info.url, step=found.snapshot.step)
        self._checkpoints.report_skipped(found)
        return msgspec.structs.replace(found.snapshot, extra={**found.snapshot.extra, "origin": "checkpoint"})

    def _follow_size(self, join: JoinGeneration) -> None:
        train_state, before = self.train_state, self.train_state.scale
        target = scaling_factor(self.options.scaling, join.world_size)
        train_state.scale = before.towards(target, train_state.steps, self.options.warm_up_steps)
        if train_state.scale != before and join.rank == 0:
            now = train_state.scale.at(train_state.steps)
            gradually = f", and warms up to {target:.4g}" if now < target else ""
            text = (
                f"generation {join.generation}, {counted(join.world_size, 'instance')}: from step {train_state.steps} "
                f"on the learning rate goes from {before.at(train_state.steps):.4g} to {now:.4g} "
                f"times the script's{gradually}"
            )
            self.agent.send(Note(text=text))

    def _leave(self, leave: Leave) -> NoReturn:
        log.info("leave.requested", reason=leave.reason, step=self.train_state.steps)
        if leave.checkpoint and self.train_state.begun:
            self._end.save(leaves=True)
        self._end.end("left")
        raise SystemExit(0)


def total_weight(samples: int, weights: Sequence[float]) -> float:
    """Return by what a step's sums are divided: its samples, or its ranks' weights if they give any.

    `weights`: of the ranks with a batch, NaN for one that gives none. NaN if only some give one.
    """
    return float(samples) if all(map(math.isnan, weights)) else math.fsum(weights)


def _checked_weight(given: Any) -> float:
    weight = _number("run.step(weight=…)", given)
    if not 0 <= weight < math.inf:
        raise SpecError("run.step(weight=…)", given, "a finite number, 0 or more")
    return weight


def _number(field: str, value: Any) -> float:
    """Return a number; a tensor or an array of one value counts as one. Raises SpecError."""
    item: Callable[[], float] | None = getattr(value, "item", None)
    try:
        return float(value if item is None else item())
    except (TypeError, ValueError, OverflowError):
        raise SpecError(field, value, "a number, or a tensor of one value") from None
