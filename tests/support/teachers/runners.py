"""Runners that run the model in the HTTP server's process."""

from __future__ import annotations

from edl_runtime.teacher.models.model import Model
from edl_runtime.teacher.predictor.execute import EncodedAnswer, decode_or_refuse, run_alone
from edl_runtime.teacher.predictor.pool import Done
from edl_runtime.teacher.shm.arena import Arena


def answer_request(
    model: Model, body: memoryview, json_size: int | None, into: memoryview, region: memoryview | None = None
) -> EncodedAnswer:
    """Answer one request into the area `into`."""
    request = decode_or_refuse(model.signature, body, json_size, into, region)
    return request if isinstance(request, EncodedAnswer) else run_alone(model, request, into)


class InlineRunner:
    """Answers each request at once."""

    def __init__(self, model: Model, arena: Arena) -> None:
        self._model = model
        self._arena = arena

    def submit(self, slot: int, size: int, json_size: int | None, done: Done) -> None:
        region = self._arena.regions.get(slot)
        shared = None if region is None else region.view
        done(answer_request(self._model, self._arena.request(slot)[:size], json_size, self._arena.answer(slot), shared))

    def drop(self, slot: int) -> None:
        """Do nothing: the request has been answered."""
