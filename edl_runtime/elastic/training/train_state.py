"""A training's state: captured as a snapshot, restored, and broadcast to ranks that lack it. With random numbers."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from edl_runtime.checkpoint.file_format import Arrays, Snapshot
from edl_runtime.elastic.comm.process_group import GroupSession, ProcessGroup
from edl_runtime.elastic.training.learning_rate import RateScale
from edl_runtime.elastic.training.state_parts import PartState, StateParts
from edl_runtime.errors import SpecError
from edl_runtime.result import RESULT_LIMIT

METRICS_LIMIT = RESULT_LIMIT - 1024
"""Bytes of JSON: the rest of a result is for the loss and the checkpoint's place."""

Origin = Literal["peer", "checkpoint", "start"]
"""Where a state came from: another trainer, a checkpoint, or the script that made it."""


class DataSource(Protocol):
    """Where a training's data comes from, and how far it is."""

    @property
    def epoch(self) -> int: ...

    @property
    def total_steps(self) -> int | None: ...

    def place(self, *, durable: bool) -> dict[str, Any]:
        """Return how far all ranks together are, as JSON: for a checkpoint if `durable`, else for another trainer."""
        ...

    def seek(self, place: dict[str, Any], world_size: int) -> None:
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
    scale: RateScale
    chance: dict[str, Any]
    values: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    unsaved_s: float = 0.0
    ended: bool = False
    run: str = ""
    rate: float | None = None


class TrainState:
    """How far a training is, and what its model and optimizer hold.

    `begun`: it is the one that all ranks have. `ended`: all ranks have come to the end.
    """

    def __init__(self, session: GroupSession, state: StateParts, *, run: str) -> None:
        """Begin at no step. `run`: the word of this run of the job, "" if it has none."""
        self.state = state
        self._run = run
        self.begun = False
        self.ended = False
        self.steps = 0
        self.samples = 0
        self.scale = RateScale()
        self.metrics: dict[str, float] = {}
        self.mean_loss = math.nan
        self.unsaved_s = 0.0  # as restored
        self.place: dict[str, Any] | None = None  # of the data, as restored
        self._session = session
        self._data_source: DataSource | None = None

    @property
    def data_source(self) -> DataSource | None:
        return self._data_source

    @data_source.setter
    def data_source(self, data_source: DataSource) -> None:
        """Go on in this data from where the training is. Raises as `Feed.go_to`."""
        place = data_source.place(durable=False) if self.place is None else self.place
        data_source.seek(place, self._session.group.world_size)
        self._data_source = data_source

    def snapshot(self, origin: Origin = "peer", *, durable: bool = False, unsaved_s: float = 0.0) -> Snapshot:
        """Return all, for a checkpoint if `durable`; the arrays are views of what the next step changes.

        `unsaved_s`: how long ago the last checkpoint was due.
        """
        place = self.place if self._data_source is None else self._data_source.place(durable=durable)
        states = self.state.states()
        extra = _Extra(
            origin=origin,
            samples=self.samples,
            place=place,
            values=values_of(states),
            scale=self.scale,
            chance=capture_rng(),
            unsaved_s=unsaved_s,
            ended=self.ended,
            run=self._run,
        )
        return Snapshot(
            generation=self._session.generation,
            step=self.steps,
            arrays=arrays_of(states),
            extra=msgspec.to_builtins(extra),
            world_size=self._session.group.world_size,
            epoch=0 if self._data_source is None else self._data_source.epoch,
            metrics=self.reported_metrics(),
        )

    def adopt(self, snapshot: Snapshot, *, rank: int, generation: int, is_own: bool) -> Origin:
        """Be where the snapshot is, on this rank; return where that came from. Raises OtherModelError.

        `is_own`: it was taken of this very training, which then only needs random numbers of its own.
        """
        extra = msgspec.convert(snapshot.extra, _Extra)
        if not is_own:
            self._restore(snapshot, extra)
        if self.begun:
            return extra.origin
        if rank > 0:
            seed_rank(self.steps, generation, rank)
        elif extra.origin == "checkpoint":
            with contextlib.suppress(ValueError, TypeError, KeyError):  # of other versions of what draws them
                restore_rng(extra.chance)
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

    def reported_metrics(self) -> dict[str, float]:
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
        if self._data_source is not None and extra.place is not None:
            self._data_source.seek(extra.place, self._session.group.world_size)


def arrays_of(states: Mapping[str, PartState]) -> dict[str, Mapping[str, np.ndarray]]:
    """Return the arrays of all parts that have any, by part."""
    return {name: state.arrays for name, state in states.items() if state.arrays}


def values_of(states: Mapping[str, PartState]) -> dict[str, Any]:
    """Return what parts hold besides arrays, by part, as JSON."""
    return {name: state.values for name, state in states.items() if state.values is not None}


def states_of(arrays: Arrays, values: Mapping[str, Any]) -> dict[str, PartState]:
    """Return what `arrays_of` and `values_of` were given, but for parts that hold nothing."""
    return {name: PartState(arrays.get(name, {}), values.get(name)) for name in {**arrays, **values}}


def mark_from_checkpoint(snapshot: Snapshot) -> Snapshot:
    """Return a loaded snapshot, which says where it comes from."""
    return msgspec.structs.replace(snapshot, extra={**snapshot.extra, "origin": "checkpoint"})


# The state of a training from the rank that has it to those that have not.

SMALL_BYTES = 1 << 20
"""Bytes: arrays below travel together, for each message has its price."""


class _Array(msgspec.Struct, frozen=True):
    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


class _Head(msgspec.Struct, frozen=True):
    snapshot: Snapshot  # without its arrays
    arrays: list[_Array]


def state_source(steps: Sequence[int | None]) -> int | None:
    """Return the first rank of those whose state the others take; None when all have the same already.

    Survivors of a lost rank differ by a step at most; who is ahead has applied what the others have not.
    """
    live = [step for step in steps if step is not None]
    if not live:
        return 0
    return None if len(set(steps)) == 1 else steps.index(max(live))


def state_receivers(steps: Sequence[int | None], source: int) -> list[int]:
    """Return the ranks that have another state than the source, by rank."""
    return [rank for rank, step in enumerate(steps) if rank != source and (step is None or step != steps[source])]


def broadcast_state(group: ProcessGroup, source: int, receivers: Sequence[int], snapshot: Snapshot | None) -> Snapshot:
    """Return the source's snapshot on it and on each taker: the source gives it. Raises GroupLostError."""
    if group.rank == source:
        assert snapshot is not None  # noqa: S101 -- the source has it
        if receivers:
            _send_state(group, source, receivers, snapshot)
        return snapshot
    return _receive_state(group, source, receivers)


def _send_state(group: ProcessGroup, source: int, receivers: Sequence[int], snapshot: Snapshot) -> None:
    arrays = [
        _Array(kind, name, array.dtype.str, array.shape)
        for kind, held in snapshot.arrays.items()
        for name, array in held.items()
    ]
    content = msgspec.json.encode(_Head(msgspec.structs.replace(snapshot, arrays={}), arrays))
    head = np.frombuffer(content, np.uint8)
    group.broadcast(np.array([len(head)], np.int64).view(np.uint8), source, receivers)
    group.broadcast(head, source, receivers)
    for batch in _batches(arrays):
        parts = [_as_bytes(snapshot.arrays[each.group][each.name]) for each in batch]
        group.broadcast(parts[0] if len(parts) == 1 else np.concatenate(parts), source, receivers)


def _receive_state(group: ProcessGroup, source: int, receivers: Sequence[int]) -> Snapshot:
    size = np.zeros(1, np.int64)
    group.broadcast(size.view(np.uint8), source, receivers)
    content = np.empty(int(size[0]), np.uint8)
    group.broadcast(content, source, receivers)
    head = msgspec.json.decode(content.tobytes(), type=_Head)
    found: dict[str, dict[str, np.ndarray]] = {each.group: {} for each in head.arrays}
    for empty in (each for each in head.arrays if not each.nbytes):
        found[empty.group][empty.name] = np.empty(empty.shape, empty.dtype)
    for batch in _batches(head.arrays):
        room = np.empty(sum(each.nbytes for each in batch), np.uint8)
        group.broadcast(room, source, receivers)
        start = 0
        for each in batch:
            part = room[start : start + each.nbytes]
            found[each.group][each.name] = part.view(each.dtype).reshape(each.shape)
            start += each.nbytes
    return msgspec.structs.replace(head.snapshot, arrays=found)


def _batches(arrays: Sequence[_Array]) -> Iterator[list[_Array]]:
    """Yield what travels in one message: a large array, or small ones together."""
    small: list[_Array] = []
    for each in arrays:
        if not each.nbytes:
            continue
        if each.nbytes >= SMALL_BYTES:
            yield [each]
            continue
        small.append(each)
        if sum(one.nbytes for one in small) >= SMALL_BYTES:
            yield small
            small = []
    if small:
        yield small


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# The random numbers of a training: kept in checkpoints, and other ones on each rank.


def capture_rng() -> dict[str, Any]:
    """Return the states of Paddle's, numpy's and Python's generators, as JSON."""
    import paddle

    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 -- what scripts draw from
    return {
        "paddle": [
            [*state.__getstate__()[:3], bytes(state.__getstate__()[3]).decode()] for state in _rng_states(paddle)
        ],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "python": random.getstate(),
    }


def restore_rng(captured: dict[str, Any]) -> None:
    """Go on drawing where `capture` was called. Raises ValueError or TypeError for what is no such state."""
    import paddle

    states: list[Any] = []
    for found, (*numbers, text) in zip(_rng_states(paddle), captured["paddle"], strict=False):
        kind_of_state: Any = type(found)
        state = kind_of_state.__new__(kind_of_state)
        state.__setstate__((*numbers, list(text.encode())))
        states.append(state)
    if len(states) == len(_rng_states(paddle)):  # else it ran on another number of devices
        paddle.set_rng_state(states)
    kind, keys, *rest = captured["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    version, internal, gauss = captured["python"]
    random.setstate((version, tuple(internal), gauss))


def seed_rank(base: int, generation: int, rank: int) -> None:
    """Begin anew on a rank that has joined: with numbers that no other rank draws, the same whenever it is repeated."""
    import paddle

    (seed,) = np.random.SeedSequence((base, generation, rank)).generate_state(1)
    paddle.seed(int(seed))
    np.random.seed(int(seed))  # noqa: NPY002
    random.seed(int(seed))


def _rng_states(paddle: Any) -> list[Any]:
    states: list[Any] = paddle.get_rng_state()
    return states
