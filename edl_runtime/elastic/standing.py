"""Where a training stands: all that a snapshot of it holds."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from edl_runtime.checkpoint.snapshot import Arrays, Snapshot
from edl_runtime.elastic import chance
from edl_runtime.elastic.hyper import Scale
from edl_runtime.elastic.state import PartState, TrainingState
from edl_runtime.elastic.team import Team
from edl_runtime.errors import SpecError
from edl_runtime.result import RESULT_LIMIT

METRICS_LIMIT = RESULT_LIMIT - 1024
"""Bytes of JSON: the rest of a result is for the loss and the checkpoint's place."""

Origin = Literal["peer", "checkpoint", "start"]
"""Where a state came from: another trainer, a checkpoint, or the script that made it."""


class Feed(Protocol):
    """Where a training's data comes from, and how far it is."""

    @property
    def epoch(self) -> int: ...

    @property
    def total_steps(self) -> int | None: ...

    def place(self, *, durable: bool) -> dict[str, Any]:
        """Return how far all ranks together are, as JSON: for a checkpoint if `durable`, else for another trainer."""
        ...

    def go_to(self, place: dict[str, Any], world_size: int) -> None:
        """Go on from such a place, in a group of this size."""
        ...

    def vector(self, rank: int, world_size: int) -> list[int]:
        """Return what this rank adds to a sum over all ranks before each step, so many numbers on each."""
        ...

    def check(self, samples: int, vector: Sequence[int]) -> None:
        """Raise an error if, by that sum, ranks can't do a step of so many samples together; before it is applied."""
        ...

    def advance(self, samples: int, vector: Sequence[int]) -> None:
        """Note that all ranks together have applied so many samples more, and that sum."""
        ...


class _Extra(msgspec.Struct, kw_only=True):
    """What a snapshot holds besides arrays.

    - `values`: what its parts hold besides arrays, by name.
    - `scheduler`, `rate`: those of "optimizer" where older versions wrote it, which had no `values`.
    - `unsaved_s`: how long ago the last checkpoint was due.
    - `ended`: whether there is nothing left to train in this `run` of the job; a later one may go on from a checkpoint.
    """

    origin: Origin
    samples: int
    place: dict[str, Any] | None
    scale: Scale
    chance: dict[str, Any]
    values: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    unsaved_s: float = 0.0
    ended: bool = False
    run: str = ""
    rate: float | None = None


class Standing:
    """How far a training is, and what its model and optimizer hold.

    `begun`: it is the one that all ranks have. `ended`: all ranks have come to the end.
    """

    def __init__(self, team: Team, state: TrainingState, *, run: str) -> None:
        """Begin at no step. `run`: the word of this run of the job, "" if it has none."""
        self.state = state
        self._run = run
        self.begun = False
        self.ended = False
        self.steps = 0
        self.samples = 0
        self.scale = Scale()
        self.metrics: dict[str, float] = {}
        self.mean_loss = math.nan
        self.unsaved_s = 0.0  # as restored
        self.place: dict[str, Any] | None = None  # of the data, as restored
        self._team = team
        self._feed: Feed | None = None

    @property
    def feed(self) -> Feed | None:
        return self._feed

    @feed.setter
    def feed(self, feed: Feed) -> None:
        """Go on in this data from where the training is. Raises as `Feed.go_to`."""
        place = feed.place(durable=False) if self.place is None else self.place
        feed.go_to(place, self._team.group.world_size)
        self._feed = feed

    def snapshot(self, origin: Origin = "peer", *, durable: bool = False, unsaved_s: float = 0.0) -> Snapshot:
        """Return all, for a checkpoint if `durable`; the arrays are views of what the next step changes.

        `unsaved_s`: how long ago the last checkpoint was due.
        """
        place = self.place if self._feed is None else self._feed.place(durable=durable)
        states = self.state.states()
        extra = _Extra(
            origin=origin,
            samples=self.samples,
            place=place,
            values=values_of(states),
            scale=self.scale,
            chance=chance.capture(),
            unsaved_s=unsaved_s,
            ended=self.ended,
            run=self._run,
        )
        return Snapshot(
            generation=self._team.generation,
            step=self.steps,
            arrays=arrays_of(states),
            extra=msgspec.to_builtins(extra),
            world_size=self._team.group.world_size,
            epoch=0 if self._feed is None else self._feed.epoch,
            metrics=self.told_metrics(),
        )

    def take(self, snapshot: Snapshot, *, rank: int, generation: int, is_own: bool) -> Origin:
        """Be where the snapshot is, on this rank; return where that came from. Raises OtherModelError.

        `is_own`: it was taken of this very training, which then only needs random numbers of its own.
        """
        extra = msgspec.convert(snapshot.extra, _Extra)
        if not is_own:
            self._restore(snapshot, extra)
        if self.begun:
            return extra.origin
        if rank > 0:
            chance.seed_rank(self.steps, generation, rank)
        elif extra.origin == "checkpoint":
            with contextlib.suppress(ValueError, TypeError, KeyError):  # of other versions of what draws them
                chance.restore(extra.chance)
        return extra.origin

    def note(self, values: dict[str, float]) -> None:
        """Keep these metrics; what is not finite takes away what was noted under its name before.

        Raises SpecError, and keeps none of them, when all that are noted would be too much for a result.
        """
        metrics = {name: value for name, value in {**self.metrics, **values}.items() if math.isfinite(value)}
        size = len(msgspec.json.encode(metrics))
        if size > METRICS_LIMIT:
            raise SpecError("run.metrics", f"{size} bytes of JSON", f"at most {METRICS_LIMIT}, of all names together")
        self.metrics = metrics

    def told_metrics(self) -> dict[str, float]:
        """Return what is known of the model. "loss" is the last step's, if the script has given that to `run.step`."""
        loss = {"loss": self.mean_loss} if math.isfinite(self.mean_loss) else {}
        return {**self.metrics, **loss}

    def _restore(self, snapshot: Snapshot, extra: _Extra) -> None:
        whose = "the checkpoint" if extra.origin == "checkpoint" else "the other trainers' state"
        values = extra.values
        if values is None:
            values = {"optimizer": {"rate": extra.rate, "scheduler": extra.scheduler}}
        self.state.load(states_of(snapshot.arrays, values), f"{whose} (step {snapshot.step})")
        self.steps, self.samples, self.place, self.scale = snapshot.step, extra.samples, extra.place, extra.scale
        is_of_this_run = extra.origin != "checkpoint" or (bool(self._run) and extra.run == self._run)
        self.unsaved_s, self.ended = extra.unsaved_s, extra.ended and is_of_this_run
        self.metrics = dict(snapshot.metrics)
        self.mean_loss = self.metrics.pop("loss", math.nan)
        if self._feed is not None and extra.place is not None:
            self._feed.go_to(extra.place, self._team.group.world_size)


def arrays_of(states: Mapping[str, PartState]) -> dict[str, Mapping[str, np.ndarray]]:
    """Return the arrays of all parts that have any, by part."""
    return {name: state.arrays for name, state in states.items() if state.arrays}


def values_of(states: Mapping[str, PartState]) -> dict[str, Any]:
    """Return what parts hold besides arrays, by part, as JSON."""
    return {name: state.values for name, state in states.items() if state.values is not None}


def states_of(arrays: Arrays, values: Mapping[str, Any]) -> dict[str, PartState]:
    """Return what `arrays_of` and `values_of` were given, but for parts that hold nothing."""
    return {name: PartState(arrays.get(name, {}), values.get(name)) for name in {**arrays, **values}}


def from_checkpoint(snapshot: Snapshot) -> Snapshot:
    """Return a loaded snapshot, which says where it comes from."""
    return msgspec.structs.replace(snapshot, extra={**snapshot.extra, "origin": "checkpoint"})
