"""What front and predictor say to each other: records of four numbers. Requests and answers lie in the arena."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

Record = tuple[int, int, int, int]

RECORD = struct.Struct("=4q")
"""To the predictor: slot, size of the body, size of its JSON (-1: all), region that its client shares (0: none).

From the predictor: slot, status, size of the JSON (-1: all), size of the body. The first one answers no request: with
status 200 the signature, else a `Failure` lies in its answer's area. A request has one answer, whatever happens.
"""

PING = -1
"""In place of a slot: the predictor sends such a record back as it is, when it has nothing to run."""

DROP = -2
"""In place of a slot, which comes second: nobody waits for its answer any more. If it has not begun, it never runs."""

FORGET = -3
"""In place of a slot; the region that comes second is not needed any more."""

RAN = -4
"""In place of a slot, from the predictor: the model has run for so many rows and so many nanoseconds."""

_MOST_RECORDS = 64  # read at one time


class Channel:
    """The predictor's end of the channel."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._partial = b""

    def receive(self, *, wait: bool) -> list[Record] | None:
        """Return what has come, in order; with `wait`, at least one. None when the front has gone."""
        try:
            data = self._socket.recv(_MOST_RECORDS * RECORD.size, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            return None
        records, self._partial = unpack(self._partial + data)
        return records

    def send(self, records: Sequence[Record]) -> None:
        """Say all of this at once."""
        self._socket.sendall(b"".join(RECORD.pack(*record) for record in records))


def unpack(data: bytes) -> tuple[list[Record], bytes]:
    """Return the whole records in `data`, and the rest."""
    whole = len(data) - len(data) % RECORD.size
    return list(RECORD.iter_unpack(data[:whole])), data[whole:]
