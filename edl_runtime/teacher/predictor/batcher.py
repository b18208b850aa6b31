"""Dynamic batching: requests that arrived while the model was busy run together."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from edl_runtime.log import get_logger
from edl_runtime.protocol.infer_messages import InferRequest
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.teacher.metrics import DROPPED
from edl_runtime.teacher.models.model import Model
from edl_runtime.teacher.predictor.execute import (
    EncodedAnswer,
    can_join,
    decode_or_refuse,
    encode_answer,
    encode_refusal,
    joined_inputs,
    needed_outputs,
    run_alone,
    split_outputs,
)
from edl_runtime.teacher.shm.arena import IDLE, READING, RUNNING, Arena

MAX_JOINED_RUN_S = 1.0
"""Longest run of several requests, estimated from the last run: beyond this, joining gains little, and the first
request waits for all others."""

log = get_logger(__name__)


class QueuedRequest(NamedTuple):
    """A waiting request. Those of equal `form` (shapes without the batch axis) can be joined; form None runs alone."""

    slot: int
    request: InferRequest
    rows: int
    form: tuple[tuple[int, ...], ...] | None

    @classmethod
    def of(cls, slot: int, request: InferRequest, signature: ModelSignature) -> QueuedRequest:
        """Its rows are the size of the batch axis, if all inputs agree in that."""
        shapes = [request.inputs[spec.name].shape for spec in signature.inputs]
        sizes = {shape[0] if shape else 0 for shape in shapes}
        rows = max(sizes, default=0)
        alike = len(sizes) == 1 and rows > 0
        return cls(slot, request, rows, tuple(shape[1:] for shape in shapes) if alike else None)


def next_group(waiting: Sequence[QueuedRequest], most_rows: int) -> list[QueuedRequest]:
    """Return the first of `waiting` and the following ones of its form that run with it, in `most_rows` rows at most.

    The group has the first one's rows times a power of two, so that few batch sizes occur: a new size costs Paddle up
    to five runs' time, and it caches ten sizes. Other requests wait for the next run.
    """
    first = waiting[0]
    group, rows, whole = [first], first.rows, 1
    if first.form is None:
        return group
    for one in waiting[1:]:
        if one.form != first.form:
            continue
        rows += one.rows
        if rows > most_rows:
            break
        group.append(one)
        times, rest = divmod(rows, first.rows)
        if not rest and times.bit_count() == 1:
            whole = len(group)
    return group[:whole]


class ModelRun(NamedTuple):
    """A run of the model: its rows, its seconds, and the answers by slot.

    A joined run that failed has no answers; each of its requests is run alone afterwards.
    """

    rows: int
    busy_s: float
    answers: list[tuple[int, EncodedAnswer]]


class DynamicBatcher:
    """Requests in `arena` that wait for `model`. Its length is their number.

    - `max_batch`: most rows of a joined run; 1 turns joining off. When a joined run fails and each of its requests
      succeeds alone, the limit becomes half of its rows: the model can't be joined, or memory was short.
    """

    def __init__(
        self, model: Model, arena: Arena, max_batch: int, clock_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock_s = clock_s
        self._row_s = 0.0  # seconds per row of the last run
        self._model = model
        self._arena = arena
        self._most_rows = max_batch if can_join(model.signature) else 1
        self._unproven = {spec.name for spec in model.signature.outputs if -1 in spec.shape[1:]}
        self._waiting: dict[int, QueuedRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self, slot: int, size: int, json_size: int | None, region: memoryview | None = None
    ) -> EncodedAnswer | None:
        """Queue a request; return the answer of one that is invalid. `region`: the client's shared memory, if any."""
        body = self._arena.request(slot)[:size]
        with self._at(READING, [slot]):
            request = decode_or_refuse(self._model.signature, body, json_size, self._arena.answer(slot), region)
        if isinstance(request, EncodedAnswer):
            return request
        waiting = QueuedRequest.of(slot, request, self._model.signature)
        self._waiting[slot] = waiting._replace(form=None) if self._arena.alone[slot] else waiting
        return None

    @contextmanager
    def _at(self, stage: int, slots: Collection[int]) -> Iterator[None]:
        """Record the stage of the requests in these slots: the server reads it if this process dies meanwhile."""
        for slot in slots:
            self._arena.stages[slot] = stage
        try:
            yield
        finally:
            for slot in slots:
                self._arena.stages[slot] = IDLE

    def drop(self, slot: int) -> EncodedAnswer | None:
        """Remove a request whose client has disconnected; return its answer, None if it was answered before."""
        if self._waiting.pop(slot, None) is None:
            return None
        return encode_refusal(self._arena.answer(slot), DROPPED, "the client disconnected before the request ran")

    def run(self) -> Iterator[ModelRun]:
        """Run the next group; yield each run as soon as its answers are ready."""
        most_rows = min(self._most_rows, int(MAX_JOINED_RUN_S / self._row_s)) if self._row_s else self._most_rows
        group = next_group(list(self._waiting.values()), most_rows)
        for one in group:
            del self._waiting[one.slot]
        if len(group) == 1:
            yield self._run_alone(group[0])
            return
        rows = sum(one.rows for one in group)
        begun_s = self._clock_s()
        slots = [one.slot for one in group]
        try:
            with self._at(RUNNING, slots):
                joined = self._run_joined(group)
        except Exception as error:  # noqa: BLE001 - the model's; runs alone show which request causes it
            cause = f"{type(error).__name__}: {error}"
            yield ModelRun(rows, self._clock_s() - begun_s, [])
        else:
            yield joined
            return
        good = True
        for one in group:
            alone = self._run_alone(one)
            good = good and alone.answers[0][1].status == 200
            yield alone
        if good:
            self._most_rows = max(1, rows // 2)
            log.warning("model.not_joined", model=self._model.signature.name, most_rows=self._most_rows, cause=cause)

    def _run_alone(self, one: QueuedRequest) -> ModelRun:
        begun_s = self._clock_s()
        with self._at(RUNNING, [one.slot]):
            answer = run_alone(self._model, one.request, self._arena.answer(one.slot))
        busy_s = self._clock_s() - begun_s
        if answer.status == 200:
            self._row_s = busy_s / max(1, one.rows)
        return ModelRun(one.rows, busy_s, [(one.slot, answer)])

    def _run_joined(self, group: Sequence[QueuedRequest]) -> ModelRun:
        """Run a group at once. Raises what the model raises, and ValueError for outputs that can't be split.

        Free axes of an output may depend on the number of rows: each such output is compared once with a run alone.
        """
        requests, rows = [one.request for one in group], [one.rows for one in group]
        signature = self._model.signature
        names = needed_outputs(requests)
        begun_s = self._clock_s()
        alone = self._shapes_alone(requests[0], [name for name in names if name in self._unproven])
        outputs = self._model.run(joined_inputs(requests, signature), names)
        busy_s = self._clock_s() - begun_s
        for name, shape in alone.items():
            if outputs[name].shape[1:] != shape[1:]:
                both = f"{list(shape)} for {rows[0]} rows, {list(outputs[name].shape)} for {sum(rows)}"
                raise ValueError(f"output {name!r} has shape {both}")
        self._unproven.difference_update(alone)
        parts = split_outputs({name: outputs[name] for name in names}, rows)
        self._row_s = busy_s / sum(rows)
        answers = [
            (one.slot, encode_answer(signature, one.request, part, self._arena.answer(one.slot)))
            for one, part in zip(group, parts, strict=True)
        ]
        return ModelRun(sum(rows), busy_s, answers)

    def _shapes_alone(self, request: InferRequest, names: list[str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of these outputs for one request alone."""
        if not names:
            return {}
        outputs = self._model.run(joined_inputs([request], self._model.signature), names)
        return {name: outputs[name].shape for name in names}
