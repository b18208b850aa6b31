"""A training from one generation to the next: what a step is, and how it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import msgspec
import numpy as np

from edl_runtime.checkpoint.snapshot import Snapshot
from edl_runtime.elastic.ending import Ending, at_script_end
from edl_runtime.elastic.gradients import DeviceGradients, Gradients, HostGradients, any_sparse
from edl_runtime.elastic.groups import Group
from edl_runtime.elastic.guard import Guard
from edl_runtime.elastic.hyper import Scaling, factor_of
from edl_runtime.elastic.messages import Join, Leave, Note, Ready, Stepped, Up
from edl_runtime.elastic.rate import from_slots, to_slots
from edl_runtime.elastic.registered import Registered, copied
from edl_runtime.elastic.saving import Saver
from edl_runtime.elastic.sharing import share, source_of, takers_of
from edl_runtime.elastic.standing import Origin, Standing, arrays_of, from_checkpoint, states_of, values_of
from edl_runtime.elastic.state import PartState, TrainingState
from edl_runtime.elastic.team import Team
from edl_runtime.errors import EarlyEndError, GroupLostError, SpecError, StepError
from edl_runtime.log import get_logger
from edl_runtime.settings import RuntimeSettings

TELL_EVERY_S = 0.3
"""How often the agent hears of steps, but for a generation's first and the very last."""

log = get_logger(__name__)

Schedule = Literal["step", "epoch"] | None

Turn = Literal["goes on", "idles", "follows", "ends", "averages"]
"""What a rank has come to: a step, with a batch or without; a step where its script had no turn in the step before,
after which those of the others may have ended the training or changed what they have registered; the end; a mean."""

TURNS: tuple[Turn, ...] = get_args(Turn)


class Micro(NamedTuple):
    """A batch that the script has: so many samples; whether it is the first and the last of this rank's step."""

    samples: int
    first: bool
    last: bool


class Agreed(NamedTuple):
    """What all ranks are to do together.

    - `samples`: of all ranks' step. `stop`: this generation ends with it.
    - `vector`: the feed's, summed.
    - `rates`: those of the script's optimizers on the first rank that has a batch, NaN without any.
    - `turns`: what each rank has come to. `values`: those of the ranks that have come to a mean.
    """

    samples: int
    stop: bool
    vector: list[int]
    rates: list[float]
    turns: list[Turn]
    values: list[float]


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """How a script wants to be trained; see `Run.wrap`."""

    scaling: Scaling
    warm_up_steps: int
    schedule: Schedule


class Training:
    """The inside of a `Run`, from `wrap` on. Used by the script's main thread only."""

    def __init__(
        self,
        pairs: Sequence[tuple[Any, Any]],
        *,
        registered: Mapping[str, Registered],
        scaler: Any = None,
        team: Team,
        saver: Saver,
        settings: RuntimeSettings,
        habits: Habits,
    ) -> None:
        """Make a usable object of it by `begin`. Raises SpecError."""
        factor_of(habits.scaling, 1)
        self.link = team.link
        self.team = team
        self._registered = registered
        others = {**registered, **({} if scaler is None else {"scaler": Registered("scaler", scaler)})}
        self.standing = Standing(team, TrainingState(pairs, others), run=settings.run)
        parameters = self.standing.state.parameters
        on_cpu = all(parameter.place.is_cpu_place() for parameter in parameters)
        self._gradients: Gradients = (HostGradients if on_cpu else DeviceGradients)(parameters)
        self._saver = saver
        self._ending = Ending(self.standing, team, saver, settings)
        moves = habits.schedule is not None
        self._guard = Guard(pairs, scaler=scaler, moves_schedulers=moves, over=lambda: self._ending.over)
        self.habits = habits
        self._drawn: Micro | None = None
        self._drawn_in = 0  # a generation
        self._begun = False  # the loop over the data
        self._had_no_turn = False  # of its script's, in the step before
        self._undone: dict[str, PartState] | None = None  # what is registered, as before a step that was lost
        self._saves = self._regroups = False  # once the script has done what it does after this step
        self._unpacked_loss: float | None = None  # where gradients stay where they are: one rank, one micro batch
        self._own_samples = 0
        self._told: tuple[int, float] = (0, -math.inf)  # generation and time

    def begin(self) -> None:
        """Get ready, and into the first generation."""
        self.link.say(Ready(live=self.team.live, seen=self._saver.seen()))
        self._regroup()
        self._guard.begin()

    def learning_rate(self) -> float:
        """Return what the next step of the first optimizer takes."""
        return self.standing.state.rates[0].value * self.standing.scale.at(self.standing.steps)

    def draw(self, micro: Micro) -> None:
        """Note that the script gets this batch."""
        if micro.first:
            self.standing.state.draw()
        self._drawn, self._drawn_in = micro, self.team.generation

    def between(self) -> None:
        """Do what is due between two steps: the script has done all that it does after one. Feeds call it before each.

        What it has done after a step that was lost is undone. A checkpoint and newcomers have the rest.
        """
        if not self._begun:
            self._begun = True
            at_script_end(self.link, self.finish)
        self._undo()
        if self._saves:
            self._saves = False
            self._saver.save(partial(self.standing.snapshot, durable=True))
        if self._regroups:
            self._regroups = False
            self._regroup()

    @property
    def over(self) -> bool:
        """Whether there are no more batches: this rank's training has ended, or that which it has joined."""
        return self._ending.over or self.standing.ended

    def check_stepped(self) -> None:
        """Raise StepError if the last batch was not followed by a step, or by the end."""
        if self._drawn is not None and not self.over:
            raise StepError("the script asked for another batch before it called run.step")

    def step(self, loss: Any) -> bool:
        """Add a batch's gradients, and finish the step if it is this rank's last.

        Return False when the batch comes again, since the step was lost.
        """
        micro, parameters = self._drawn, self.standing.state.parameters
        if micro is None:
            raise StepError("run.step was called without a batch of run.data before it")
        if all(parameter.grad is None for parameter in parameters):
            raise StepError("run.step was called, and no parameter has a gradient, or not any more")
        self._drawn = None
        if self._drawn_in != self.team.generation:  # which a mean has lost
            for parameter in parameters:
                parameter.clear_gradient(False)
            return False
        value = math.nan if loss is None else _number("loss", loss)
        if micro.first and micro.last and self.team.group.world_size == 1 and not any_sparse(parameters):
            self._unpacked_loss = value
        else:
            self._gradients.add(micro.samples, value)
        self._own_samples += micro.samples
        return self.finish_step() if micro.last else True

    def mean(self, value: Any) -> float:
        """Return the mean of what all ranks have come to this place with. See `Run.mean`."""
        own = _number("run.mean", value)
        if not self._begun or self.over:
            raise StepError(
                "run.mean was called outside of the loop over the data", "call it in the loop, before the training ends"
            )
        while True:
            self.link.waits_for(self.standing.steps + 1)
            try:
                values = self._agree("averages", value=own).values
            except GroupLostError as error:
                self._lose(error, step=self._drawn is not None or self._own_samples > 0)
                continue
            finally:
                self.link.waits_for(None)
            return math.fsum(values) / len(values)

    @property
    def samples(self) -> int:
        """Samples of all ranks and steps so far."""
        return self.standing.samples

    def finish_step(self) -> bool:
        """Do the step that all ranks do, of what this one has added to it, if anything. Return False if it was lost.

        Without a sample on any rank nothing is applied. Raises StepError.
        """
        self._guard.check()
        own, self._own_samples = self._own_samples, 0
        self.link.waits_for(self.standing.steps + 1)
        try:
            agreed = self._agree(self._turn(own), own)
            if agreed.samples and not self.standing.ended:
                self._align(agreed.turns)
                self._give(agreed.samples)
        except GroupLostError as error:
            self._lose(error, step=True)
            return False
        finally:
            self.link.waits_for(None)
        if self.standing.ended:
            self._gradients.drop()
            self.finish(agreed=True)
            return True
        if agreed.samples:
            self._apply(agreed)
            self._had_no_turn = not own
        elif self.standing.feed is not None:
            self.standing.feed.advance(0, agreed.vector)
        self._regroups |= agreed.stop
        return True

    def finish_early(self) -> None:
        """End here, by the script's wish. After a step that was lost it decides once that is done."""
        if self._undone is None:
            self.finish()

    def finish(self, *, agreed: bool = False) -> None:
        """End here, as all ranks do; nothing happens after the end. Raises EarlyEndError where others train on.

        Nobody is through before rank 0 has written the last checkpoint: if it is lost, another rank does that. It is
        through then itself, whoever else is lost. `agreed`: all have just said that they end.
        """
        self._drawn = None
        if not agreed and not self._ending.over:
            self.between()
        while not self._ending.over:
            try:
                if not agreed:
                    self._wait_to_end()
                if self.team.group.rank == 0:
                    self._ending.save()
                self._wait_to_end()
            except GroupLostError as error:
                agreed = False
                if not self._ending.saved:
                    self.team.lost(error, self.standing.steps)
                    self._regroup()
                    continue
            self._ending.end("done")

    def _wait_to_end(self) -> None:
        self.link.waits_for(self.standing.steps + 1)
        try:
            self._agree("ends")
        finally:
            self.link.waits_for(None)

    def note_metrics(self, values: Mapping[str, Any]) -> None:
        """Keep them for checkpoints; after the end they still go into the result. Raises as `Standing.note`."""
        self.standing.note({name: _number(f"run.metrics({name}=…)", value) for name, value in values.items()})
        if self._ending.over and self.team.group.rank == 0:
            self._ending.write_result()

    def _agree(self, turn: Turn, own: int = 0, value: float | None = None) -> Agreed:
        """Return what all ranks are to do. Raises EarlyEndError if only some of those that could end have.

        If all of them have, the training has `ended` then. A rank whose script had no turn takes part in the means of
        the others, without a value; raises StepError if one whose script had its turn has not come to them.
        """
        while True:
            agreed = self._count(turn, own, value)
            if "averages" not in agreed.turns:
                break
            if "goes on" in agreed.turns:
                self._ending.over = True
                there = [rank for rank, said in enumerate(agreed.turns) if said == "averages"]
                raise StepError(
                    f"run.mean was called after step {self.standing.steps} on ranks {there} only, of "
                    f"{len(agreed.turns)}",
                    "call it on all ranks at the same place, not as in `if run.rank == 0`",
                )
            if turn == "averages":
                return agreed
        if self.standing.feed is not None:
            self.standing.feed.check(agreed.samples, agreed.vector)
        if "ends" in agreed.turns:
            if not {"goes on", "idles"}.isdisjoint(agreed.turns):
                gone = [rank for rank, said in enumerate(agreed.turns) if said == "ends"]
                self._ending.over = True
                raise EarlyEndError(self.standing.steps, gone, len(agreed.turns))
            self.standing.ended = True
        return agreed

    def _count(self, turn: Turn, own: int, value: float | None) -> Agreed:
        """Return what all ranks have come to."""
        group, feed = self.team.group, self.standing.feed
        rank, size = group.rank, group.world_size
        numbers = [*([each.value if own else None for each in self.standing.state.rates]), value]
        parts = [
            [int(self.link.wish(self.team.generation) is not None), own],
            [TURNS.index(turn) if each == rank else 0 for each in range(size)],
            [] if feed is None else feed.vector(rank, size),
            *(to_slots(number, rank, size) for number in numbers),
        ]
        counts = group.count(np.array([each for part in parts for each in part], np.int64))
        ends = np.cumsum([len(part) for part in parts])
        (stop, samples), turns, vector, *slots = (part.tolist() for part in np.split(counts, ends[:-1]))
        *rates, values = map(from_slots, slots)
        firsts = [each[0] if each else math.nan for each in rates]
        return Agreed(samples, bool(stop), vector, firsts, [TURNS[number] for number in turns], values)

    def _turn(self, own: int) -> Turn:
        if self.standing.ended:
            return "ends"
        if self._had_no_turn:
            return "follows"
        return "goes on" if own else "idles"

    def _align(self, turns: Sequence[Turn]) -> None:
        """Bring what is registered to one state, where the scripts of some ranks had no turn in the step before."""
        followers = {rank for rank, turn in enumerate(turns) if turn == "follows"}
        others = [turns.index(turn) for turn in ("goes on", "idles") if turn in turns]
        if not self._registered or not followers or not others:
            return
        group, (source, *_) = self.team.group, others
        takers = sorted(followers | {0} - {source})  # rank 0 passes it on
        if group.rank not in (source, *takers):
            return
        standing = self.standing
        states = self._registered_states() if group.rank == source else {}
        own = Snapshot(
            generation=self.team.generation, step=standing.steps, arrays=arrays_of(states), extra=values_of(states)
        )
        found = share(group, source, takers, own if group.rank == source else None)
        if group.rank != source:
            self._load_registered(states_of(found.arrays, found.extra))

    def _registered_states(self) -> dict[str, PartState]:
        return {name: part.state() for name, part in self._registered.items()}

    def _load_registered(self, states: Mapping[str, PartState]) -> None:
        for name, part in self._registered.items():
            part.load(states[name])

    def _lose(self, error: GroupLostError, *, step: bool) -> None:
        """Be in the next generation. `step`: a step is lost, so that its batch comes again."""
        self.link.waits_for(None)
        self.team.lost(error, self.standing.steps)
        if not step:
            self._regroup()
            return
        self._gradients.drop()
        self._own_samples = 0
        self._had_no_turn = True  # others may have applied it, and ended after it
        with self.standing.state.lost():
            self._regroup()
        self._undone = {name: copied(state) for name, state in self._registered_states().items()}

    def _undo(self) -> None:
        """Have what is registered as it was before what the script did for a step that has not been."""
        undone, self._undone = self._undone, None
        if undone is not None:
            self._load_registered(undone)

    def _give(self, total: int) -> None:
        loss, self._unpacked_loss = self._unpacked_loss, None
        self.standing.mean_loss = self._gradients.give(self.team.group, total) if loss is None else loss

    def _apply(self, agreed: Agreed) -> None:
        standing = self.standing
        feed = standing.feed
        assert feed is not None  # noqa: S101 -- it has drawn the batch
        with standing.state.agreed(agreed.rates, standing.scale.at(standing.steps)):
            self._guard.step()
        epoch = feed.epoch
        feed.advance(agreed.samples, agreed.vector)
        moves = self.habits.schedule == "step" or (self.habits.schedule == "epoch" and feed.epoch > epoch)
        if moves:
            self._guard.move_schedulers()
        standing.steps += 1
        standing.samples += agreed.samples
        self._tell(feed.epoch, feed.total_steps)
        self._saves = self._saver.due(standing.steps) and self.team.group.rank == 0

    def _tell(self, epoch: int, total_steps: int | None) -> None:
        standing, generation, now = self.standing, self.team.generation, time.monotonic()
        is_last = standing.steps == total_steps
        if self._told[0] == generation and now - self._told[1] < TELL_EVERY_S and not is_last:
            return
        self._told = generation, now
        self.link.say(
            Stepped(
                generation=generation,
                step=standing.steps,
                at=time.time(),
                clock_s=now,
                epoch=epoch,
                samples=standing.samples,
                total_steps=total_steps,
                loss=standing.mean_loss if math.isfinite(standing.mean_loss) else None,
            )
        )

    def _regroup(self) -> None:
        step = self.standing.steps if self.standing.begun else None
        leave = self.team.next(step, self._get_ready, self._enter)
        if leave is not None:
            self._leave(leave)

    def _get_ready(self, join: Join) -> None:
        """Have the checkpoint in memory, if there is one to begin with. As Team has it."""
        if join.rank == 0 and not self.standing.begun:
            self._saver.newest()

    def _enter(self, group: Group, join: Join, steps: list[int | None]) -> None:
        """Bring all ranks to the state of the one that is ahead, or to the newest checkpoint's. As Team has it."""
        standing = self.standing
        origin: Origin = "peer"
        source = source_of(steps)
        takers = [] if source is None else takers_of(steps, source)
        if source is not None and group.rank in (source, *takers):
            own = self._own_snapshot() if group.rank == source else None
            snapshot = share(group, source, takers, own)
            is_own = own is not None and own.extra["origin"] != "checkpoint"
            origin = standing.take(snapshot, rank=group.rank, generation=join.generation, is_own=is_own)
        if standing.feed is not None:
            standing.feed.go_to(standing.feed.place(durable=False), join.world_size)
        self._had_no_turn |= not standing.begun and origin == "peer"
        standing.begun = True
        self._guard.note()
        self._follow_size(join)
        self._saver.begin(standing.steps, standing.unsaved_s)
        if group.rank == 0:
            self._saver.prepare(lambda: arrays_of(standing.state.states()))
        self.link.say(Up(generation=join.generation, step=standing.steps, source=origin, live=self.team.live))

    def _own_snapshot(self) -> Snapshot:
        """Return what the others are to have: this state, or where a training begins that nobody has the state of."""
        if self.standing.begun:
            return self.standing.snapshot(unsaved_s=self._saver.unsaved_s())
        found = self._saver.newest()
        if found is None:
            return self.standing.snapshot("start")
        log.info("checkpoint.loaded", url=found.info.url, step=found.snapshot.step)
        self._saver.tell_passed_by(found)
        return from_checkpoint(found.snapshot)

    def _follow_size(self, join: Join) -> None:
        standing, before = self.standing, self.standing.scale
        target = factor_of(self.habits.scaling, join.world_size)
        standing.scale = before.towards(target, standing.steps, self.habits.warm_up_steps)
        if standing.scale != before and join.rank == 0:
            by_and_by = f" in {standing.scale.steps} steps" if standing.scale.steps else ""
            text = (
                f"generation {join.generation}, {join.world_size} instances: from step {standing.steps} on the "
                f"learning rate goes from {before.at(standing.steps):.4g} to {target:.4g} times the script's{by_and_by}"
            )
            self.link.say(Note(text=text))

    def _leave(self, leave: Leave) -> NoReturn:
        log.info("trainer.leaves", reason=leave.reason, step=self.standing.steps)
        if leave.checkpoint and self.standing.begun:
            self._ending.save(leaves=True)
        self._ending.end("left")
        raise SystemExit(0)


def _number(field: str, value: Any) -> float:
    """Return it as a number; a tensor or an array of one value is one. Raises SpecError."""
    item: Callable[[], float] | None = getattr(value, "item", None)
    try:
        return float(value if item is None else item())
    except (TypeError, ValueError, OverflowError):
        raise SpecError(field, value, "a number as float has it, or a tensor of one value") from None
