"""The process that runs the model: `python -m edl_runtime.teacher.predictor.process TASK`.

Requests and answers lie in the shared arena; records on a socket say where. Between two runs of the model, all records
that have arrived are read, so that they can be batched. The predictor ends with its server: when the socket closes
between two runs, or when the lifeline closes at any time. It ignores SIGTERM and SIGINT: the server decides when the
last request is answered.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence

import msgspec

from edl_runtime.teacher.errors import ModelError
from edl_runtime.teacher.models.loading import load_model
from edl_runtime.teacher.models.model import ModelOptions
from edl_runtime.teacher.predictor.batcher import DynamicBatcher
from edl_runtime.teacher.predictor.execute import EncodedAnswer, with_extensions
from edl_runtime.teacher.shm.arena import Arena
from edl_runtime.teacher.shm.regions import RegionReceiver

Record = tuple[int, int, int, int]

RECORD = struct.Struct("=4q")
"""To the predictor: slot, size of the body, size of its JSON (-1: all), number of the client's region (0: none).

From the predictor: slot, status, size of the JSON (-1: all), size of the body. The first record is no answer: the
answer's area holds the signature (status 200) or a `LoadFailure`. Each request gets exactly one answer.
"""

PING = -1
"""In place of a slot: the predictor returns the record unchanged, between two runs."""

DROP = -2
"""In place of a slot, which comes second: the client has disconnected. The request is not run if it has not begun."""

FORGET = -3
"""In place of a slot; the region whose number comes second is not used any more."""

RAN = -4
"""In place of a slot, from the predictor: the model has run; rows and nanoseconds follow."""

_MOST_RECORDS = 64  # read at one time


class PredictorChannel:
    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._partial = b""

    def receive(self, *, wait: bool) -> list[Record] | None:
        """Return the records that have arrived; with `wait`, at least a part of one. None when the server has gone."""
        try:
            data = self._socket.recv(_MOST_RECORDS * RECORD.size, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            return None
        records, self._partial = unpack(self._partial + data)
        return records

    def send(self, records: Sequence[Record]) -> None:
        self._socket.sendall(b"".join(RECORD.pack(*record) for record in records))


def unpack(data: bytes) -> tuple[list[Record], bytes]:
    """Return the complete records in `data`, and the rest."""
    whole = len(data) - len(data) % RECORD.size
    return list(RECORD.iter_unpack(data[:whole])), data[whole:]


class PredictorTask(msgspec.Struct, frozen=True, kw_only=True):
    """A predictor's argument. It announces itself in slot `number`; descriptors are inherited."""

    model: ModelOptions
    number: int
    arena: int
    area_size: int
    slots: int
    channel: int
    region_socket: int
    lifeline: int


class LoadFailure(msgspec.Struct, frozen=True):
    """A ModelError, as sent from the predictor to the server."""

    model: str
    reason: str


def main() -> None:
    """Load the model, announce its signature, answer requests until the server has gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = msgspec.json.decode(sys.argv[1], type=PredictorTask)
    threading.Thread(target=_exit_with_server, args=(task.lifeline,), daemon=True).start()
    arena = Arena(task.arena, task.area_size, task.slots)
    with socket.socket(fileno=task.channel) as connected, socket.socket(fileno=task.region_socket) as region_socket:
        channel, receiver = PredictorChannel(connected), RegionReceiver(region_socket)
        try:
            model = load_model(task.model)
        except ModelError as error:
            _announce(channel, arena, task.number, 500, LoadFailure(error.model, error.reason))
            sys.exit(1)
        _announce(channel, arena, task.number, 200, with_extensions(model.signature, joins=task.model.max_batch > 1))
        batcher = DynamicBatcher(model, arena, task.model.max_batch)
        while (records := channel.receive(wait=not batcher)) is not None:
            replies = [reply for record in records if (reply := _handle(batcher, receiver, record))]
            if replies:
                channel.send(replies)
            if batcher:
                for run in batcher.run():
                    answers = [_record(slot, answer) for slot, answer in run.answers]
                    channel.send([(RAN, run.rows, int(1e9 * run.busy_s), 0), *answers])


def _handle(batcher: DynamicBatcher, receiver: RegionReceiver, record: Record) -> Record | None:
    """Process one record; return the reply to send now, if any."""
    slot, size, json_size, region = record
    if slot == PING:
        return record
    if slot == FORGET:
        receiver.forget(size)
        return None
    if slot == DROP:
        slot = size
        answer = batcher.drop(slot)
    else:
        answer = batcher.add(slot, size, None if json_size < 0 else json_size, receiver.view(region))
    return None if answer is None else _record(slot, answer)


def _record(slot: int, answer: EncodedAnswer) -> Record:
    return slot, answer.status, -1 if answer.json_size is None else answer.json_size, answer.size


def _announce(channel: PredictorChannel, arena: Arena, slot: int, status: int, what: msgspec.Struct) -> None:
    body = msgspec.json.encode(what)
    arena.answer(slot)[: len(body)] = body
    channel.send([(slot, status, -1, len(body))])


def _exit_with_server(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: it returns when the server has ended
    os._exit(1)


if __name__ == "__main__":
    main()
