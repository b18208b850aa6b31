"""A training from one generation to the next: what a step is, and how it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec
import numpy as np
import structlog

from edl_runtime.checkpoint.snapshot import Snapshot
from edl_runtime.elastic.ending import Ending, at_script_end
from edl_runtime.elastic.gradients import DeviceGradients, Gradients, HostGradients
from edl_runtime.elastic.groups import Group
from edl_runtime.elastic.hyper import Scaling, factor_of, scaled
from edl_runtime.elastic.messages import Join, Leave, Note, Ready, Stepped, Up
from edl_runtime.elastic.saving import Saver
from edl_runtime.elastic.sharing import share, source_of, takers_of
from edl_runtime.elastic.standing import Origin, Standing, from_checkpoint
from edl_runtime.elastic.state import TrainingState
from edl_runtime.elastic.team import Team
from edl_runtime.errors import EarlyEndError, GroupLostError, StepError
from edl_runtime.settings import RuntimeSettings

TELL_EVERY_S = 0.3
"""How often the agent hears of steps, but for a generation's first and the very last."""

log = structlog.get_logger(__name__)

Schedule = Literal["step", "epoch"] | None


class Micro(NamedTuple):
    """A batch that the script has: so many samples; whether it is the first and the last of this rank's step."""

    samples: int
    first: bool
    last: bool


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """How a script wants to be trained; see `Run.wrap`."""

    scaling: Scaling
    warm_up_steps: int
    schedule: Schedule


class Training:
    """The inside of a `Run`, from `wrap` on. Used by the script's main thread only."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        team: Team,
        saver: Saver,
        settings: RuntimeSettings,
        habits: Habits,
    ) -> None:
        """Make a usable object of it by `begin`. Raises SpecError."""
        factor_of(habits.scaling, 1)
        self.link = team.link
        self.team = team
        self.standing = Standing(team, TrainingState(model, optimizer))
        parameters = self.standing.state.parameters
        on_cpu = all(parameter.place.is_cpu_place() for parameter in parameters)
        self._gradients: Gradients = (HostGradients if on_cpu else DeviceGradients)(parameters)
        self._saver = saver
        self._ending = Ending(self.standing, team, saver, settings)
        self._optimizer = optimizer
        self.habits = habits
        self._drawn: Micro | None = None
        self._begun = False  # the loop over the data
        self._unpacked_loss: float | None = None  # where gradients stay where they are: one rank, one micro batch
        self._own_samples = 0
        self._told: tuple[int, float] = (0, -math.inf)  # generation and time

    def begin(self) -> None:
        """Get ready, and into the first generation."""
        self.link.say(Ready(live=self.team.live, seen=self._saver.seen()))
        self._regroup()

    def learning_rate(self) -> float:
        """Return what the next step takes."""
        return float(self._optimizer.get_lr()) * self.standing.scale.at(self.standing.steps)

    def draw(self, micro: Micro) -> None:
        """Note that the script gets this batch."""
        if not self._begun:
            self._begun = True
            at_script_end(self.link, self.finish_early)
        self._drawn = micro

    def check_stepped(self) -> None:
        """Raise StepError if the last batch was not followed by a step, or by the end."""
        if self._ending.over:
            raise StepError("the script asked for another batch after it called run.finish")
        if self._drawn is not None:
            raise StepError("the script asked for another batch before it called run.step")

    def step(self, loss: Any) -> None:
        """Add a batch's gradients, and finish the step if it is this rank's last."""
        micro = self._drawn
        if micro is None:
            raise StepError("run.step was called without a batch of run.data before it")
        if all(parameter.grad is None for parameter in self.standing.state.parameters):
            raise StepError("run.step was called, and no parameter has a gradient")
        self._drawn = None
        value = math.nan if loss is None else _number(loss)
        if micro.first and micro.last and self.team.group.world_size == 1:
            self._unpacked_loss = value
        else:
            self._gradients.add(micro.samples, value)
        self._own_samples += micro.samples
        if micro.last:
            self.finish_step()

    @property
    def samples(self) -> int:
        """Samples of all ranks and steps so far."""
        return self.standing.samples

    def finish_step(self, *, empty: bool = False) -> None:
        """Do the step that all ranks do, of what this one has added to it, if anything.

        Without a sample on any rank nothing is applied. `empty`: this is known to be so.
        """
        own, self._own_samples = self._own_samples, 0
        self.link.waits_for(self.standing.steps + 1)
        try:
            total, stop, vector = self._agree(own)
            if total:
                self._give(total)
        except GroupLostError as error:
            self.link.waits_for(None)
            self._gradients.drop()
            self.team.lost(error, self.standing.steps)
            self._regroup()
            return
        self.link.waits_for(None)
        if total:
            self._apply(total, vector)
        elif self.standing.feed is not None and not empty:
            self.standing.feed.advance(0, vector)
        if stop:
            self._regroup()

    def finish(self) -> None:
        """End, since all that there is has been trained."""
        self._ending.end("done", checkpoint=self.team.group.rank == 0)

    def finish_early(self) -> None:
        """End here, as all ranks do; nothing happens after the end. Raises EarlyEndError where others train on."""
        while not self._ending.over:
            try:
                self._agree(0, ended=True)
            except GroupLostError as error:
                self.team.lost(error, self.standing.steps)
                self._regroup()
            else:
                self.finish()

    def note_metrics(self, values: dict[str, float]) -> None:
        """Keep them for checkpoints; after the end they still go into the result. Raises as `Standing.note`."""
        self.standing.note(values)
        if self._ending.over and self.team.group.rank == 0:
            self._ending.write_result()

    def _agree(self, own: int, *, ended: bool = False) -> tuple[int, bool, list[int]]:
        """Return the samples of all ranks' step, whether it is the last of this generation, and the feed's vector."""
        group, feed = self.team.group, self.standing.feed
        vector = [] if feed is None else feed.vector(group.rank, group.world_size)
        end = 2 + group.world_size
        counts = np.array([0] * end + vector, np.int64)
        counts[0] = self.link.wish(self.team.generation) is not None
        counts[1] = own
        counts[2 + group.rank] = ended
        counts = group.count(counts)
        if counts[2:end].any() and not counts[2:end].all():
            gone = [rank for rank, has in enumerate(counts[2:end]) if has]
            self._ending.over = True
            raise EarlyEndError(self.standing.steps, gone, group.world_size)
        return int(counts[1]), bool(counts[0]), counts[end:].tolist()

    def _give(self, total: int) -> None:
        loss, self._unpacked_loss = self._unpacked_loss, None
        self.standing.mean_loss = self._gradients.give(self.team.group, total) if loss is None else loss

    def _apply(self, total: int, vector: list[int]) -> None:
        standing = self.standing
        feed = standing.feed
        assert feed is not None  # noqa: S101 -- it has drawn the batch
        with scaled(self._optimizer, standing.scale.at(standing.steps)):
            self._optimizer.step()
        self._optimizer.clear_grad()
        epoch = feed.epoch
        feed.advance(total, vector)
        moves = self.habits.schedule == "step" or (self.habits.schedule == "epoch" and feed.epoch > epoch)
        if standing.state.scheduler is not None and moves:
            standing.state.scheduler.step()
        standing.steps += 1
        standing.samples += total
        self._tell(feed.epoch, feed.total_steps)
        if self._saver.due(standing.steps) and self.team.group.rank == 0:
            self._saver.save(partial(standing.snapshot, durable=True))

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
        standing.begun = True
        self._follow_size(join)
        self._saver.begin(standing.steps, standing.unsaved_s)
        if group.rank == 0:
            self._saver.prepare(standing.state.arrays)
        self.link.say(Up(generation=join.generation, step=standing.steps, source=origin, live=self.team.live))

    def _own_snapshot(self) -> Snapshot:
        """Return what the others are to have: this state, or where a training begins that nobody has the state of."""
        if self.standing.begun:
            return self.standing.snapshot(unsaved_s=self._saver.unsaved_s())
        found = self._saver.newest()
        if found is None:
            return self.standing.snapshot("start")
        info, snapshot = found
        log.info("checkpoint.loaded", url=info.url, step=snapshot.step)
        return from_checkpoint(snapshot)

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
        self._ending.end("left", checkpoint=leave.checkpoint and self.standing.begun)
        raise SystemExit(0)


def _number(loss: Any) -> float:
    item: Callable[[], float] | None = getattr(loss, "item", None)
    return float(loss if item is None else item())
