"""A training from one generation to the next: what a step is, what is kept of it, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import msgspec
import numpy as np
import structlog

from edl_runtime.checkpoint.snapshot import Snapshot
from edl_runtime.elastic import chance
from edl_runtime.elastic.gradients import DeviceGradients, Gradients, HostGradients
from edl_runtime.elastic.groups import Group, choose_backend
from edl_runtime.elastic.hyper import Scale, Scaling, factor_of, scaled
from edl_runtime.elastic.link import Link
from edl_runtime.elastic.messages import Failed, Finished, Join, Leave, Note, Ready, Stepped, Up
from edl_runtime.elastic.saving import Saver
from edl_runtime.elastic.sharing import share, source_of
from edl_runtime.elastic.state import TrainingState
from edl_runtime.elastic.team import Team
from edl_runtime.errors import EarlyEndError, GroupLostError, StepError
from edl_runtime.result import write_result
from edl_runtime.settings import RuntimeSettings

TELL_EVERY_S = 0.3
"""How often the agent hears of steps, but for the first of a generation."""

LINGER_S = 0.2
"""How long the sockets stay open after the last step: who is slower may not have read all that it needs from them."""

log = structlog.get_logger(__name__)

Origin = Literal["peer", "checkpoint", "start"]


class Micro(NamedTuple):
    """A batch that the script has: so many samples; whether it is the first and the last of this rank's step."""

    samples: int
    first: bool
    last: bool


class Feed(Protocol):
    """Where a training's data comes from, and how far it is."""

    @property
    def epoch(self) -> int: ...

    @property
    def total_steps(self) -> int | None: ...

    def place(self) -> dict[str, Any]:
        """Return how far all ranks together are, as JSON."""
        ...

    def go_to(self, place: dict[str, Any], world_size: int) -> None:
        """Go on from such a place, in a group of this size."""
        ...

    def advance(self, samples: int) -> None:
        """Note that all ranks together have applied so many samples more."""
        ...


class Extra(msgspec.Struct, kw_only=True):
    """What a snapshot holds besides arrays."""

    origin: Origin
    samples: int
    place: dict[str, Any] | None
    scheduler: dict[str, Any] | None
    scale: Scale
    chance: dict[str, Any]


class Training:
    """The inside of a `Run`. Used by the script's main thread only."""

    def __init__(self, link: Link, settings: RuntimeSettings, saver: Saver) -> None:
        self.link = link
        self.team = Team(link, choose_backend(_gpus()))
        self.saver = saver
        self.metrics: dict[str, float] = {}
        self.feed: Feed | None = None
        self.place: dict[str, Any] | None = None  # of the data, as it was restored
        self.steps = 0
        self.samples = 0
        self.mean_loss = math.nan
        self._settings = settings
        self._has_state = False
        self._state: TrainingState
        self._gradients: Gradients
        self._optimizer: Any
        self._scaling: Scaling
        self._warm_up_steps: int
        self._schedule: Literal["step", "epoch"] | None
        self._scale = Scale()
        self._drawn: Micro | None = None
        self._plain: tuple[int, float] | None = None  # samples and loss, where gradients stay where they are
        self._own_samples = 0
        self._told: tuple[int, float] = (0, -math.inf)  # generation and time
        self._over = False
        self._result_url = ""

    @property
    def wrapped(self) -> bool:
        return self._has_state

    def wrap(
        self,
        model: Any,
        optimizer: Any,
        *,
        scaling: Scaling,
        warm_up_steps: int,
        schedule: Literal["step", "epoch"] | None,
    ) -> None:
        """Get ready, and into the first generation."""
        import paddle

        paddle.disable_signal_handler()  # it would answer SIGTERM by an error of its own
        self.link.take_signals()
        factor_of(scaling, 1)
        self._state = TrainingState(model, optimizer)
        on_cpu = all(parameter.place.is_cpu_place() for parameter in self._state.parameters)
        self._gradients = (HostGradients if on_cpu else DeviceGradients)(self._state.parameters)
        self._optimizer = optimizer
        self._scaling, self._warm_up_steps, self._schedule = scaling, warm_up_steps, schedule
        self.link.say(Ready(live=self.team.live, seen=self.saver.seen()))
        self._regroup()

    def learning_rate(self) -> float:
        """Return what the next step takes."""
        return float(self._optimizer.get_lr()) * self._scale.at(self.steps)

    def draw(self, micro: Micro) -> None:
        """Note that the script gets this batch."""
        self._drawn = micro

    def check_stepped(self) -> None:
        """Raise StepError if the last batch was not followed by a step."""
        if self._drawn is not None:
            raise StepError("the script asked for another batch before it called run.step")

    def step(self, loss: Any) -> None:
        micro = self._drawn
        if micro is None:
            raise StepError("run.step was called without a batch of run.data before it")
        self._drawn = None
        if all(parameter.grad is None for parameter in self._state.parameters):
            raise StepError("no parameter has a gradient")
        value = math.nan if loss is None else _number(loss)
        if micro.first and micro.last and self.team.group.world_size == 1:
            self._plain = micro.samples, value
        else:
            self._gradients.add(micro.samples, value)
        self._own_samples += micro.samples
        if micro.last:
            self.finish_step()

    def finish_step(self) -> None:
        """Do the step that all ranks do, of what this one has added to it, if anything."""
        own, self._own_samples = self._own_samples, 0
        self.link.waits_for(self.steps + 1)
        try:
            total, stop = self._agree(own)
            self._give(total)
        except GroupLostError as error:
            self.link.waits_for(None)
            self._gradients.drop()
            self.team.lost(error)
            self._regroup()
            return
        self.link.waits_for(None)
        self._apply(total)
        if stop:
            self._regroup()

    def finish(self) -> None:
        """End, since all that there is has been trained."""
        self._end("done", checkpoint=True)

    def left_early(self) -> None:
        """Note that the script has left its loop; when it ends, and not by an error, see whether all ranks have."""
        if not self._over:
            atexit.register(self._end_early)

    def note_metrics(self, values: Mapping[str, float]) -> None:
        self.metrics.update(values)
        if self._over and self.team.group.rank == 0:
            self._write_result()

    # One step

    def _agree(self, own: int, *, ended: bool = False) -> tuple[int, bool]:
        """Return the samples of all ranks' step, and whether it is the last of this generation."""
        group = self.team.group
        counts = np.zeros(2 + group.world_size, np.int64)
        counts[0] = self.link.wish(self.team.generation) is not None
        counts[1] = own
        counts[2 + group.rank] = ended
        counts = group.count(counts)
        if counts[2:].any() and not counts[2:].all():
            gone = [rank for rank, has in enumerate(counts[2:]) if has]
            self._over = True
            raise EarlyEndError(self.steps, gone, group.world_size)
        return int(counts[1]), bool(counts[0])

    def _give(self, total: int) -> None:
        if self._plain is not None:
            _, self.mean_loss = self._plain
            self._plain = None
        else:
            self.mean_loss = self._gradients.give(self.team.group, total)

    def _apply(self, total: int) -> None:
        feed = self.feed
        assert feed is not None  # noqa: S101 -- it has drawn the batch
        with scaled(self._optimizer, self._scale.at(self.steps)):
            self._optimizer.step()
        self._optimizer.clear_grad()
        epoch = feed.epoch
        feed.advance(total)
        if self._state.scheduler is not None and (
            self._schedule == "step" or (self._schedule == "epoch" and feed.epoch > epoch)
        ):
            self._state.scheduler.step()
        self.steps += 1
        self.samples += total
        self._tell()
        if self.team.group.rank == 0:
            self.saver.save_if_due(self.steps, self._snapshot)

    def _tell(self) -> None:
        generation, now = self.team.generation, time.monotonic()
        feed = self.feed
        assert feed is not None  # noqa: S101 -- as above
        is_last = self.steps == feed.total_steps
        if self._told[0] == generation and now - self._told[1] < TELL_EVERY_S and not is_last:
            return
        self._told = generation, now
        self.link.say(
            Stepped(
                generation=generation,
                step=self.steps,
                at=time.time(),
                epoch=feed.epoch,
                samples=self.samples,
                total_steps=feed.total_steps,
                loss=self.mean_loss if math.isfinite(self.mean_loss) else None,
                learning_rate=self.learning_rate(),
            )
        )

    # Generations

    def _regroup(self) -> None:
        leave = self.team.next(self.steps if self._has_state else None, self._enter)
        if leave is not None:
            self._leave(leave)

    def _enter(self, group: Group, join: Join, steps: list[int | None]) -> None:
        """Bring all ranks to the state of the one that is ahead, or to the newest checkpoint's. As Team has it."""
        origin: Origin = "peer"
        source = source_of(steps)
        if source is not None:
            snapshot = None
            if group.rank == source:
                snapshot = self._snapshot() if self._has_state else self._first_snapshot()
            snapshot = share(group, source, snapshot)
            extra = msgspec.convert(snapshot.extra, Extra)
            origin = extra.origin
            if group.rank != source or origin == "checkpoint":
                self._restore(snapshot, extra)
            self._draw_anew(group.rank, join.generation, extra)
        elif self.feed is not None:
            self.feed.go_to(self.feed.place(), join.world_size)
        self._has_state = True
        self._follow_size(group, join)
        if group.rank == 0:
            self.saver.begin(self.steps, self._snapshot)
        self.link.say(Up(generation=join.generation, step=self.steps, source=origin, live=self.team.live))

    def _first_snapshot(self) -> Snapshot:
        """Return where a training begins that nobody has the state of: the newest checkpoint, or the script's model."""
        found = self.saver.newest()
        if found is None:
            return self._snapshot("start")
        info, snapshot = found
        log.info("checkpoint.loaded", url=info.url, step=snapshot.step)
        return msgspec.structs.replace(snapshot, extra={**snapshot.extra, "origin": "checkpoint"})

    def _snapshot(self, origin: Origin = "peer") -> Snapshot:
        extra = Extra(
            origin=origin,
            samples=self.samples,
            place=self.place if self.feed is None else self.feed.place(),
            scheduler=None if self._state.scheduler is None else self._state.scheduler.state_dict(),
            scale=self._scale,
            chance=chance.capture(),
        )
        return Snapshot(
            generation=self.team.generation,
            step=self.steps,
            arrays=self._state.arrays(),
            extra=msgspec.to_builtins(extra),
            world_size=self.team.group.world_size,
            epoch=0 if self.feed is None else self.feed.epoch,
            metrics=self._told_metrics(),
        )

    def _restore(self, snapshot: Snapshot, extra: Extra) -> None:
        self._state.load(snapshot.arrays, f"the {extra.origin}'s state of step {snapshot.step}")
        self.steps, self.samples, self.place, self._scale = snapshot.step, extra.samples, extra.place, extra.scale
        self.metrics = dict(snapshot.metrics)
        if self._state.scheduler is not None and extra.scheduler is not None:
            self._state.scheduler.set_state_dict(extra.scheduler)
        if self.feed is not None and extra.place is not None:
            self.feed.go_to(extra.place, self.team.group.world_size)

    def _draw_anew(self, rank: int, generation: int, extra: Extra) -> None:
        """Have other random numbers on each rank: rank 0 goes on with those of a checkpoint."""
        if self._has_state:
            return
        if rank > 0:
            chance.seed_rank(self.steps, generation, rank)
        elif extra.origin == "checkpoint":
            with contextlib.suppress(ValueError, TypeError, KeyError):  # of other versions of what draws them
                chance.restore(extra.chance)

    def _follow_size(self, group: Group, join: Join) -> None:
        before = self._scale
        target = factor_of(self._scaling, join.world_size)
        self._scale = before.towards(target, self.steps, self._warm_up_steps)
        if self._scale != before and group.rank == 0:
            self.link.say(
                Note(
                    text=f"generation {join.generation}: {join.world_size} instances, from step {self.steps} on the "
                    f"learning rate goes from {before.target:g} to {target:g} times the script's"
                    + (f" in {self._scale.steps} steps" if self._scale.steps else "")
                )
            )

    # The end

    def _leave(self, leave: Leave) -> NoReturn:
        log.info("trainer.leaves", reason=leave.reason, step=self.steps)
        self._end("left", checkpoint=leave.checkpoint and self._has_state)
        raise SystemExit(0)

    def _end(self, why: Literal["done", "left"], *, checkpoint: bool) -> None:
        self._over = True
        group = self.team.group
        if checkpoint and group.rank == 0:
            self._result_url = self.saver.save_now(self._snapshot)
            self._write_result()
        if group.world_size > 1:
            time.sleep(LINGER_S)
        group.close()
        self.saver.close()
        self.link.say(Finished(step=self.steps, why=why))

    def _end_early(self) -> None:
        if self._over or self.link.failed or getattr(sys, "last_value", None) is not None:
            return
        while True:
            try:
                self._agree(0, ended=True)
            except GroupLostError as error:
                self.team.lost(error)
                self._regroup()
            except EarlyEndError as error:
                self.link.say(Failed(reason=str(error), final=True))
                log.warning("script.left_early", reason=str(error))
                os._exit(1)
            else:
                self.finish()
                return

    def _write_result(self) -> None:
        write_result(checkpoint=self._result_url, metrics=self._told_metrics(), settings=self._settings)

    def _told_metrics(self) -> dict[str, float]:
        loss = {"loss": self.mean_loss} if math.isfinite(self.mean_loss) else {}
        return {**loss, **self.metrics}


def _number(loss: Any) -> float:
    item: Callable[[], float] | None = getattr(loss, "item", None)
    return float(loss if item is None else item())


def _gpus() -> int:
    """Return how many GPUs this process may use; imports Paddle only where a script has."""
    paddle = sys.modules.get("paddle")
    return int(paddle.device.cuda.device_count()) if paddle is not None and paddle.is_compiled_with_cuda() else 0
