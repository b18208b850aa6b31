"""Requests to the teacher's model from inside its process, for the servers of other protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from edl_runtime.protocol.errors import InferenceError
from edl_runtime.protocol.infer_messages import decode_response, encode_request
from edl_runtime.protocol.tensor_stream import bytes_of
from edl_runtime.protocol.tensors import Array
from edl_runtime.teacher.http.admission import SideMemory, SlotQueue
from edl_runtime.teacher.http.server import HttpServer
from edl_runtime.teacher.predictor.execute import EncodedAnswer


class LocalRequests:
    """Runs requests as those over HTTP are: they share slots, predictors, limits and draining."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self.address = "this teacher"

    @property
    def memory(self) -> SideMemory:
        return self._server.side_memory

    @property
    def draining(self) -> bool:
        return self._server.draining

    async def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Return the model's `outputs` (empty: all) for `inputs`.

        Raises ProtocolError for inputs that can't be sent, InferenceError for a request that is refused or fails.
        """
        server = self._server
        if server.draining:
            raise InferenceError(self.address, 503, "it is shutting down; use another one", retryable=True)
        request = encode_request(inputs, outputs)
        if request.size > server.arena.area_size:
            reason = f"the request has {request.size} bytes, allowed are {server.arena.area_size}"
            raise InferenceError(self.address, 413, reason, retryable=False)
        waiter = _Waiter(server.slots)
        server.slots.take(waiter)
        try:
            slot = await waiter.slot
        except asyncio.CancelledError:
            if waiter.slot.done() and not waiter.slot.cancelled():
                server.slots.give_back(waiter.slot.result(), 0, 0)
            else:
                server.slots.leave(waiter)
            raise
        answered: asyncio.Future[EncodedAnswer] | None = None
        answer_size = 0

        def free_slot(_: object = None) -> None:
            server.slots.give_back(slot, request.size, answer_size)

        try:
            area = server.arena.request(slot)
            area[: len(request.header)] = request.header
            end = len(request.header)
            for buffer in request.buffers:
                area[end : end + buffer.nbytes] = bytes_of(buffer)
                end += buffer.nbytes
            answered = asyncio.get_running_loop().create_future()
            server.runner.submit(slot, request.size, len(request.header), answered.set_result)
            answer = await asyncio.shield(answered)
            answer_size = answer.size
            return self._decoded(answer, server.arena.answer(slot)[: answer.size])
        finally:
            if answered is None or answered.done():
                free_slot()
            else:  # it was cancelled, and a predictor uses the slot until it has answered
                answered.add_done_callback(free_slot)
                server.runner.drop(slot)

    def _decoded(self, answer: EncodedAnswer, body: memoryview) -> dict[str, Array]:
        if answer.status != 200:
            reason = msgspec.json.decode(body, type=_Refusal).error
            raise InferenceError(self.address, answer.status, reason, retryable=answer.status >= 500)
        start = len(body) if answer.json_size is None else answer.json_size
        arrays, unfilled = decode_response(body[:start], len(body) - start)
        for array in unfilled:
            bytes_of(array)[:] = body[start : start + array.nbytes]
            start += array.nbytes
        return arrays


class _Refusal(msgspec.Struct):
    error: str


class _Waiter:
    """Waits for a slot."""

    def __init__(self, slots: SlotQueue) -> None:
        self._slots = slots
        self.slot: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def begin_body(self, slot: int) -> None:
        if self.slot.cancelled():  # in this turn of the event loop, so that it was still in the queue
            self._slots.give_back(slot, 0, 0)
        else:
            self.slot.set_result(slot)
