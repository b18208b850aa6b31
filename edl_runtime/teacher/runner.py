"""What the front hands requests to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from edl_runtime.teacher.answering import Answer, answer
from edl_runtime.teacher.arena import Arena
from edl_runtime.teacher.models import Model

Done = Callable[[Answer], None]


class Runner(Protocol):
    """Answers requests that lie in the arena."""

    def submit(self, slot: int, size: int, json_size: int | None, done: Done) -> None:
        """Answer the request of `size` bytes in `slot` and call `done` on the event loop, at once or later, once."""
        ...

    def drop(self, slot: int) -> None:
        """Spare the request in `slot` if it has not begun: its client has gone. Its `done` is called all the same."""
        ...


class InlineRunner:
    """Runs a model in the process that serves: for a model that answers at once, as tests and benchmarks have."""

    def __init__(self, model: Model, arena: Arena) -> None:
        self._model = model
        self._arena = arena

    def submit(self, slot: int, size: int, json_size: int | None, done: Done) -> None:
        region = self._arena.regions.get(slot)
        shared = None if region is None else region.view
        done(answer(self._model, self._arena.request(slot)[:size], json_size, self._arena.answer(slot), shared))

    def drop(self, slot: int) -> None:
        """Do nothing: what is submitted is answered at once."""
