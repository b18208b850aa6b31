"""The process that runs the model, beside the front that serves: `python -m edl_runtime.teacher.predictor TASK`.

Requests and answers lie in the shared arena; the channel says where. What has come while the model ran is read between
two runs, so that it may run as one. The predictor ends with its front: when the channel closes between two runs, when
the lifeline closes at any time. It ignores SIGTERM and SIGINT, for the front decides when the last request has been
answered.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

import msgspec

from edl_runtime.errors import ModelError
from edl_runtime.teacher.answering import Answer, extended
from edl_runtime.teacher.arena import Arena
from edl_runtime.teacher.channel import DROP, FORGET, PING, RAN, Channel, Record
from edl_runtime.teacher.lending import Borrower
from edl_runtime.teacher.models import ModelOptions, load_model
from edl_runtime.teacher.work import Work


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a predictor is started for. `number` is the slot that it announces itself in; descriptors are inherited."""

    model: ModelOptions
    number: int
    arena: int
    area_size: int
    slots: int
    channel: int
    lending: int
    lifeline: int


class Failure(msgspec.Struct, frozen=True):
    """A ModelError on its way from the predictor to the front."""

    model: str
    reason: str


def main() -> None:
    """Load the model, say so, answer requests until the front is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = msgspec.json.decode(sys.argv[1], type=Task)
    threading.Thread(target=_end_with_the_front, args=(task.lifeline,), daemon=True).start()
    arena = Arena(task.arena, task.area_size, task.slots)
    with socket.socket(fileno=task.channel) as connected, socket.socket(fileno=task.lending) as lending:
        channel, borrower = Channel(connected), Borrower(lending)
        try:
            model = load_model(task.model)
        except ModelError as error:
            _announce(channel, arena, task.number, 500, Failure(error.model, error.reason))
            sys.exit(1)
        _announce(channel, arena, task.number, 200, extended(model.signature, joins=task.model.max_batch > 1))
        work = Work(model, arena, task.model.max_batch)
        while (records := channel.receive(wait=not work)) is not None:
            said = [reply for record in records if (reply := _take(work, borrower, record))]
            if said:
                channel.send(said)
            if work:
                for run in work.run():
                    answers = [_record(slot, answer) for slot, answer in run.answers]
                    channel.send([(RAN, run.rows, int(1e9 * run.busy_s), 0), *answers])


def _take(work: Work, borrower: Borrower, record: Record) -> Record | None:
    """Do what a record asks for; return what there is to say at once."""
    slot, size, json_size, region = record
    if slot == PING:
        return record
    if slot == FORGET:
        borrower.forget(size)
        return None
    if slot == DROP:
        slot = size
        answer = work.drop(slot)
    else:
        answer = work.add(slot, size, None if json_size < 0 else json_size, borrower.view(region))
    return None if answer is None else _record(slot, answer)


def _record(slot: int, answer: Answer) -> Record:
    return slot, answer.status, -1 if answer.json_size is None else answer.json_size, answer.size


def _announce(channel: Channel, arena: Arena, slot: int, status: int, what: msgspec.Struct) -> None:
    body = msgspec.json.encode(what)
    arena.answer(slot)[: len(body)] = body
    channel.send([(slot, status, -1, len(body))])


def _end_with_the_front(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: it ends when the front does
    os._exit(1)


if __name__ == "__main__":
    main()
