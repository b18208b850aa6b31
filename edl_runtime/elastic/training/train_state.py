"""A training's state, random numbers included: captured as a snapshot, restored, and broadcast to ranks without it."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from edl_runtime.checkpoint.file_format import Arrays, Snapshot, parse_safetensors, safetensors_chunks
from edl_runtime.checkpoint.finite import not_finite_since
from edl_runtime.elastic.comm.process_group import GroupSession, ProcessGroup
from edl_runtime.elastic.training.learning_rate import RateScale
from edl_runtime.elastic.training.state_parts import PartState, StateParts
from edl_runtime.errors import SpecError
from edl_runtime.log import get_logger
from edl_runtime.result import RESULT_LIMIT

METRICS_LIMIT = RESULT_LIMIT - 1024
"""Bytes of JSON: the rest of a result is for the loss and the checkpoint's URL."""

log = get_logger(__name__)

Origin = Literal["peer", "checkpoint", "start"]
"""Where a state came from: another worker, a checkpoint, or the script that built it."""


class DataSource(Protocol):
    """Where a training's data comes from, and how far it is."""

    @property
    def epoch(self) -> int: ...

    @property
    def total_steps(self) -> int | None:
        """All steps, None if unknown, as where they depend on the number of ranks."""
        ...

    @property
    def steps_of_one(self) -> int:
        """How many steps one rank would have made of what all have applied."""
        ...

    def position(self, *, durable: bool) -> dict[str, Any]:
        """Return how far all ranks together are, as JSON: for a checkpoint if `durable`, else for another worker."""
        ...

    def seek(self, position: dict[str, Any], world_size: int) -> None:
        """Continue from such a position, in a group of this size."""
        ...

    def counts(self, rank: int, world_size: int) -> list[int]:
        """Return what this rank adds to a sum over all ranks before each step."""
        ...

    def check(self, samples: int, counts: Sequence[int]) -> None:
        """Raise an error if, by these sums, ranks can't do a step of so many samples together."""
        ...

    def advance(self, samples: int, counts: Sequence[int]) -> None:
        """Note that all ranks together have applied so many more samples."""
        ...


class _Extra(msgspec.Struct, kw_only=True):
    """What a snapshot holds besides arrays.

    - `position`: of the data. `rng`: random number generators. `values`: what its parts hold besides arrays, by name.
    - `unsaved_s`: how long ago the last checkpoint was due. `not_finite`: as `TrainState.not_finite`.
    - `ended`: nothing is left to train in this `run` of the job; a later one may continue from the checkpoint.
    """

    origin: Origin
    samples: int
    position: dict[str, Any] | None
    scale: RateScale
    rng: dict[str, Any]
    values: dict[str, Any]
    unsaved_s: float = 0.0
    ended: bool = False
    run: str = ""
    not_finite: dict[str, int] = {}


class TrainState:
    """How far a training is, and what its model and optimizer hold.

    - `begun`: all ranks have it. `ended`: all ranks have come to the end. `run`: the id of this run of the job, or "".
    - `not_finite`: since which step the loss, the gradients and metrics are NaN or infinite, of those that are.
    """

    def __init__(self, session: GroupSession, state: StateParts, *, run: str) -> None:
        self.state = state
        self._run = run
        self.begun = False
        self.ended = False
        self.steps = 0
        self.samples = 0
        self.scale = RateScale()
        self.metrics: dict[str, float] = {}
        self.not_finite: dict[str, int] = {}
        self.mean_loss = math.nan
        self.unsaved_s = 0.0  # as restored
        self.position: dict[str, Any] | None = None  # of the data, as restored
        self._session = session
        self.data_source: DataSource | None = None

    def begin_data(self, data_source: DataSource) -> None:
        """Continue in this data from where the training is. Raises as `DataSource.seek`."""
        position = data_source.position(durable=False) if self.position is None else self.position
        data_source.seek(position, self._session.group.world_size)
        self.data_source = data_source

    def snapshot(self, origin: Origin = "peer", *, durable: bool = False, unsaved_s: float = 0.0) -> Snapshot:
        """Return the whole state, for a checkpoint if `durable`; the next step changes its arrays.

        `unsaved_s`: how long ago the last checkpoint was due.
        """
        position = self.position if self.data_source is None else self.data_source.position(durable=durable)
        states = self.state.states()
        extra = _Extra(
            origin=origin,
            samples=self.samples,
            position=position,
            values=values_of(states),
            scale=self.scale,
            rng=capture_rng(),
            unsaved_s=unsaved_s,
            ended=self.ended,
            run=self._run,
            not_finite=self.not_finite,
        )
        return Snapshot(
            generation=self._session.generation,
            step=self.steps,
            arrays=arrays_of(states),
            extra=msgspec.to_builtins(extra),
            world_size=self._session.group.world_size,
            epoch=0 if self.data_source is None else self.data_source.epoch,
            metrics=self.reported_metrics(),
            trained=self.state.trained() if durable else {},
        )

    def adopt(self, snapshot: Snapshot, *, rank: int, generation: int, is_own: bool) -> Origin:
        """Restore the snapshot on this rank and return its origin. Raises OtherModelError.

        `is_own`: it was taken of this training, which then only needs random numbers of its own.
        """
        extra = msgspec.convert(snapshot.extra, _Extra)
        if not is_own:
            self._restore(snapshot, extra)
        if self.begun:
            return extra.origin
        if rank > 0:
            seed_rank(self.steps, generation, rank)
        elif extra.origin == "checkpoint":
            with contextlib.suppress(ValueError, TypeError, KeyError):  # written by another version of Paddle or numpy
                restore_rng(extra.rng)
        return extra.origin

    def note(self, values: dict[str, float]) -> None:
        """Keep these metrics; a value that is not finite removes the one noted before, and is noted as such.

        Raises SpecError, and keeps none of them, when all together are too large for a result.
        """
        metrics = {name: value for name, value in {**self.metrics, **values}.items() if math.isfinite(value)}
        finite = {name: math.isfinite(value) for name, value in values.items()}
        not_finite = not_finite_since(self.not_finite, finite, self.steps)
        size = len(msgspec.json.encode([metrics, not_finite]))
        if size > METRICS_LIMIT:
            raise SpecError("run.metrics", f"{size} bytes of JSON", f"at most {METRICS_LIMIT}, of all names together")
        if new := not_finite.keys() - self.not_finite.keys():
            log.warning("metric.not_finite", names=sorted(new), step=self.steps)
        self.metrics, self.not_finite = metrics, not_finite

    def reported_metrics(self) -> dict[str, float]:
        """Return all metrics. "loss" is the last step's, if the script gives it to `run.step`."""
        loss = {"loss": self.mean_loss} if math.isfinite(self.mean_loss) else {}
        return {**self.metrics, **loss}

    def _restore(self, snapshot: Snapshot, extra: _Extra) -> None:
        whose = "the checkpoint" if extra.origin == "checkpoint" else "the other workers' state"
        self.state.load(states_of(snapshot.arrays, extra.values), f"{whose} (step {snapshot.step})")
        self.steps, self.samples, self.position, self.scale = snapshot.step, extra.samples, extra.position, extra.scale
        is_of_this_run = extra.origin != "checkpoint" or (bool(self._run) and extra.run == self._run)
        self.unsaved_s, self.ended = extra.unsaved_s, extra.ended and is_of_this_run
        self.metrics = dict(snapshot.metrics)
        self.mean_loss = self.metrics.pop("loss", math.nan)
        self.not_finite = dict(extra.not_finite)
        if self.data_source is not None and extra.position is not None:
            self.data_source.seek(extra.position, self._session.group.world_size)


def arrays_of(states: Mapping[str, PartState]) -> dict[str, Mapping[str, np.ndarray]]:
    """Return the arrays of all parts that have any."""
    return {name: state.arrays for name, state in states.items() if state.arrays}


def values_of(states: Mapping[str, PartState]) -> dict[str, Any]:
    """Return the other values of all parts that have any, as JSON."""
    return {name: state.values for name, state in states.items() if state.values is not None}


def states_of(arrays: Arrays, values: Mapping[str, Any]) -> dict[str, PartState]:
    """Return what `arrays_of` and `values_of` were given, without empty parts."""
    return {name: PartState(arrays.get(name, {}), values.get(name)) for name in {**arrays, **values}}


# Broadcast

SMALL_BYTES = 1 << 20
"""Arrays below are sent together: each message costs a round trip."""


class _Head(msgspec.Struct, frozen=True):
    """The first message: the snapshot without its arrays, and the bytes of each further message by group of arrays."""

    snapshot: Snapshot
    messages: dict[str, list[int]]


def state_receivers(steps: Sequence[int | None]) -> list[int]:
    """Return the ranks that need another state than their own; if none has any, all but rank 0.

    Survivors of a lost rank differ by a step at most: those ahead have applied what the others have not.
    """
    ahead = max((step for step in steps if step is not None), default=None)
    if ahead is None:
        return list(range(1, len(steps)))
    return [rank for rank, step in enumerate(steps) if step != ahead]


def share_state(group: ProcessGroup, receivers: Collection[int], snapshot: Snapshot | None) -> Snapshot:
    """Return the snapshot of the nearest rank before that is no receiver: on others their own. Raises GroupLostError.

    Each receiver gets it from the rank before it and gives it to the one after it, if that receives, too. So none sends
    it twice, however many receive it; where the ranks that have it lie apart, several send at once.
    """
    sends = (group.rank + 1) % group.world_size in receivers
    if group.rank in receivers:
        return _receive_state(group, sends=sends)
    assert snapshot is not None  # noqa: S101 -- it has one
    if sends:
        _send_state(group, snapshot)
    return snapshot


def takes_part(group: ProcessGroup, receivers: Collection[int]) -> bool:
    """Whether this rank receives a state, or sends one."""
    return group.rank in receivers or (group.rank + 1) % group.world_size in receivers


def _send_state(group: ProcessGroup, snapshot: Snapshot) -> None:
    messages = {name: list(_messages(safetensors_chunks(arrays))) for name, arrays in snapshot.arrays.items()}
    sizes = {name: [sum(map(len, message)) for message in each] for name, each in messages.items()}
    head = np.frombuffer(msgspec.json.encode(_Head(msgspec.structs.replace(snapshot, arrays={}), sizes)), np.uint8)
    group.pass_on(np.array([len(head)], np.int64).view(np.uint8), receives=False, sends=True)
    group.pass_on(head, receives=False, sends=True)
    for message in chain.from_iterable(messages.values()):
        values = message[0] if len(message) == 1 else np.concatenate(message)
        group.pass_on(values, receives=False, sends=True)


def _receive_state(group: ProcessGroup, *, sends: bool) -> Snapshot:
    size = np.zeros(1, np.int64)
    group.pass_on(size.view(np.uint8), receives=True, sends=sends)
    content = np.empty(int(size[0]), np.uint8)
    group.pass_on(content, receives=True, sends=sends)
    head = msgspec.json.decode(content.tobytes(), type=_Head)
    arrays = {}
    for name, sizes in head.messages.items():
        room = np.empty(sum(sizes), np.uint8)  # one for each group, so that its arrays are aligned
        group.pass_on(room, receives=True, sends=sends)
        arrays[name] = parse_safetensors(room)
    return msgspec.structs.replace(head.snapshot, arrays=arrays)


def _messages(chunks: Iterable[memoryview]) -> Iterator[list[np.ndarray]]:
    """Yield what is sent in one message: a large chunk, or small ones together."""
    small: list[np.ndarray] = []
    for each in chunks:
        chunk = np.asarray(each)
        if len(chunk) >= SMALL_BYTES and small:
            yield small
            small = []
        small.append(chunk)
        if sum(map(len, small)) >= SMALL_BYTES:
            yield small
            small = []
    if small:
        yield small


# Random numbers


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
    """Restore what `capture_rng` returned. Raises ValueError or TypeError for anything else."""
    import paddle

    states: list[Any] = []
    for found, (*numbers, text) in zip(_rng_states(paddle), captured["paddle"], strict=False):
        kind_of_state: Any = type(found)
        state = kind_of_state.__new__(kind_of_state)
        state.__setstate__((*numbers, list(text.encode())))
        states.append(state)
    if len(states) == len(_rng_states(paddle)):  # else it was captured with another number of devices
        paddle.set_rng_state(states)
    kind, keys, *rest = captured["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    version, internal, gauss = captured["python"]
    random.setstate((version, tuple(internal), gauss))


def seed_rank(base: int, generation: int, rank: int) -> None:
    """Seed a rank that has joined: other numbers than any other rank's, the same whenever this is repeated."""
    import paddle

    (seed,) = np.random.SeedSequence((base, generation, rank)).generate_state(1)
    paddle.seed(int(seed))
    np.random.seed(int(seed))  # noqa: NPY002
    random.seed(int(seed))


def _rng_states(paddle: Any) -> list[Any]:
    states: list[Any] = paddle.get_rng_state()
    return states
