"""Stands in for Paddle Serving's client, of which no wheel loads on a current system. For Python 3.7.

It sends the raw bytes of its inputs, and reads those of the answers; see `_edl_teacher.py`.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import numpy as np

LOGITS = 10
HEADER = struct.Struct("!IQ")

feeds: dict[str, list[int]] = {}
"""Names of the inputs with the shapes of a row; a real client reads them from its configuration."""


class Client:
    """The methods that the original's reader calls."""

    def load_client_config(self, path: str) -> None:  # noqa: ARG002 - the file is empty
        self.feed_shapes_ = feeds

    def get_feed_names(self) -> list[str]:
        return list(feeds)

    def connect(self, addresses: list[str]) -> None:
        host, port = addresses[0].split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def predict(self, feed: list[dict[str, Any]], fetch: list[str]) -> dict[str, Any]:
        arrays = [array for row in feed for array in row.values()]
        self._socket.sendall(HEADER.pack(len(feed), sum(array.nbytes for array in arrays)))
        left = [memoryview(array).cast("B") for array in arrays]
        while left:
            sent = self._socket.sendmsg(left[:1024])
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]
        answer = bytearray(4 * LOGITS * len(feed))
        if self._socket.recv_into(answer, len(answer), socket.MSG_WAITALL) != len(answer):
            raise OSError("the teacher has gone")
        return {fetch[0]: np.frombuffer(answer, np.float32).reshape(len(feed), LOGITS)}

    def release(self) -> None:
        self._socket.close()
