"""What one predictor has to do, and how it does it: requests that came while it was busy run as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from edl_runtime.log import get_logger
from edl_runtime.protocol.requests import InferRequest
from edl_runtime.teacher.answering import Answer, read, refuse, run_alone, write
from edl_runtime.teacher.arena import IDLE, READS, RUNS, Arena
from edl_runtime.teacher.joining import (
    Waiting,
    can_join,
    joined_inputs,
    needed_outputs,
    next_group,
    split_outputs,
)
from edl_runtime.teacher.metrics import DROPPED
from edl_runtime.teacher.models import Model

JOINED_S = 1.0
"""How long a run of several requests may take, as far as the last run tells: beyond, joining gains next to nothing, and
the first of them waits for all."""

log = get_logger(__name__)


class Run(NamedTuple):
    """A run of the model: its rows, the seconds it took, and what it answers to those in which slots.

    A joined run that failed answers nobody; each of its requests has a run of its own behind it.
    """

    rows: int
    busy_s: float
    answers: list[tuple[int, Answer]]


class Work:
    """Requests in `arena` that wait for `model`. Its length is their number.

    - `max_batch`: most rows of a run of several requests; 1 for none. When a run of several fails, and none of them
      does alone, it is half that run's rows from then on: the model can't be joined, or was short of memory.
    """

    def __init__(
        self, model: Model, arena: Arena, max_batch: int, clock_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock_s = clock_s
        self._row_s = 0.0  # what the last run took for one row
        self._model = model
        self._arena = arena
        self._most_rows = max_batch if can_join(model.signature) else 1
        self._unproven = {spec.name for spec in model.signature.outputs if -1 in spec.shape[1:]}
        self._waiting: dict[int, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, slot: int, size: int, json_size: int | None, region: memoryview | None = None) -> Answer | None:
        """Let a request wait for its turn; return the answer of one that can't be served.

        `region` is the memory that its client shares, if it does.
        """
        body = self._arena.request(slot)[:size]
        with self._at(READS, [slot]):
            request = read(self._model.signature, body, json_size, self._arena.answer(slot), region)
        if isinstance(request, Answer):
            return request
        waiting = Waiting.of(slot, request, self._model.signature)
        self._waiting[slot] = waiting._replace(form=None) if self._arena.alone[slot] else waiting
        return None

    @contextmanager
    def _at(self, stage: int, slots: Collection[int]) -> Iterator[None]:
        """Note what is done with the requests in these slots: the front reads it if this process dies meanwhile."""
        for slot in slots:
            self._arena.stages[slot] = stage
        try:
            yield
        finally:
            for slot in slots:
                self._arena.stages[slot] = IDLE

    def drop(self, slot: int) -> Answer | None:
        """Forget a request that nobody waits for; return what there is to say of it, None if it has been answered."""
        if self._waiting.pop(slot, None) is None:
            return None
        return refuse(self._arena.answer(slot), DROPPED, "its client had gone before it ran")

    def run(self) -> Iterator[Run]:
        """Run those whose turn it is; yield each run as soon as its answers are there."""
        most_rows = min(self._most_rows, int(JOINED_S / self._row_s)) if self._row_s else self._most_rows
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
            with self._at(RUNS, slots):
                joined = self._run_joined(group)
        except Exception as error:  # noqa: BLE001 - the model's, maybe about one of them: it is told in its answer
            cause = f"{type(error).__name__}: {error}"
            yield Run(rows, self._clock_s() - begun_s, [])
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

    def _run_alone(self, one: Waiting) -> Run:
        begun_s = self._clock_s()
        with self._at(RUNS, [one.slot]):
            answer = run_alone(self._model, one.request, self._arena.answer(one.slot))
        busy_s = self._clock_s() - begun_s
        if answer.status == 200:
            self._row_s = busy_s / max(1, one.rows)
        return Run(one.rows, busy_s, [(one.slot, answer)])

    def _run_joined(self, group: Sequence[Waiting]) -> Run:
        """Raise whatever the model does, and ValueError for outputs that can't be taken apart.

        An output's free axes may depend on how many rows run, which only a comparison tells: for each there is one.
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
            (one.slot, write(signature, one.request, part, self._arena.answer(one.slot)))
            for one, part in zip(group, parts, strict=True)
        ]
        return Run(sum(rows), busy_s, answers)

    def _shapes_alone(self, request: InferRequest, names: list[str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of these outputs for one request alone."""
        if not names:
            return {}
        outputs = self._model.run(joined_inputs([request], self._model.signature), names)
        return {name: outputs[name].shape for name in names}
