"""The process that runs the model, beside the front that serves: `python -m edl_runtime.teacher.predictor TASK`.

Requests and answers lie in the shared arena; what goes through the channel are records of four numbers that say
where. The predictor ends with its front: when the channel closes between two requests, when the lifeline closes at
any time. It ignores SIGTERM and SIGINT, for the front decides when the last request has been answered.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading

import msgspec

from edl_runtime.errors import ModelError
from edl_runtime.teacher.answering import answer
from edl_runtime.teacher.arena import Arena
from edl_runtime.teacher.models import ModelOptions, load_model

RECORD = struct.Struct("=4q")
"""To the predictor: slot, size of the body, size of its JSON (-1: all), 0.

From the predictor: slot, status, size of the JSON (-1: all), size of the body. The first one answers no request: with
status 200 the signature, else a `Failure` lies in its answer's area.
"""

PING = -1
"""In place of a slot: the predictor sends such a record back as it is, in its turn."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a predictor is started for. `number` is the slot that it announces itself in; descriptors are inherited."""

    model: ModelOptions
    number: int
    arena: int
    area_size: int
    slots: int
    channel: int
    lifeline: int


class Failure(msgspec.Struct, frozen=True):
    """A ModelError on its way from the predictor to the front."""

    model: str
    reason: str


def main() -> None:
    """Load the model, say so, answer requests in order until the front is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = msgspec.json.decode(sys.argv[1], type=Task)
    threading.Thread(target=_end_with_the_front, args=(task.lifeline,), daemon=True).start()
    arena = Arena(task.arena, task.area_size, task.slots)
    with socket.socket(fileno=task.channel) as channel:
        try:
            model = load_model(task.model)
        except ModelError as error:
            _announce(channel, arena, task.number, 500, Failure(error.model, error.reason))
            sys.exit(1)
        _announce(channel, arena, task.number, 200, model.signature)
        while record := channel.recv(RECORD.size, socket.MSG_WAITALL):
            slot, size, json_size, _ = RECORD.unpack(record)
            if slot == PING:
                channel.sendall(record)
                continue
            body = arena.request(slot)[:size]
            done = answer(model, body, None if json_size < 0 else json_size, arena.answer(slot))
            channel.sendall(RECORD.pack(slot, done.status, -1 if done.json_size is None else done.json_size, done.size))


def _announce(channel: socket.socket, arena: Arena, slot: int, status: int, what: msgspec.Struct) -> None:
    body = msgspec.json.encode(what)
    arena.answer(slot)[: len(body)] = body
    channel.sendall(RECORD.pack(slot, status, -1, len(body)))


def _end_with_the_front(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: it ends when the front does
    os._exit(1)


if __name__ == "__main__":
    main()
