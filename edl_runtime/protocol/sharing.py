"""Whether a student's connection shares memory with its teacher, and which."""

from __future__ import annotations

import os

import msgspec

from edl_runtime.log import get_logger
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.region import EXTENSION, MOST_BYTES, START, Region
from edl_runtime.protocol.stream import Stream

LEAST_BYTES = 256 * 1024
"""Smaller requests go through the socket, which costs them no more (measured: equal at 128 to 256 KB)."""

log = get_logger(__name__)


class Sharing:
    """One connection's region: none until it pays, another one when a request is larger or the stream a new one."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._offered = False
        self._region: Region | None = None
        self._stream: Stream | None = None

    def learn(self, signature: ModelSignature) -> ModelSignature:
        """Take note of whether the teacher shares memory; return what is left, which is the model's."""
        offered = EXTENSION in signature.extensions
        self._offered = offered and hasattr(os, "memfd_create")
        if not offered:
            return signature
        extensions = tuple(one for one in signature.extensions if one != EXTENSION)
        return msgspec.structs.replace(signature, extensions=extensions)

    def pays(self, size: int) -> bool:
        """Whether the inputs of a request of `size` bytes should lie in shared memory, if that can be had."""
        return self._offered and LEAST_BYTES <= size <= MOST_BYTES - START

    def registered(self, stream: Stream, size: int) -> Region | None:
        """Return the region that the teacher knows by `stream`, if it has room for `size` bytes."""
        has_room = self._region is not None and self._stream is stream and self._region.room >= size
        return self._region if has_room else None

    def create(self, stream: Stream, size: int) -> Region | None:
        """Return a region to register by `stream`; None, and no further try, if the machine is no place for one."""
        self.forget()
        if not stream.is_local:
            self._offered = False
            return None
        try:
            self._region, self._stream = Region(size), stream
        except OSError as error:
            self.give_up(error)
        return self._region

    def give_up(self, cause: Exception | str) -> None:
        """Use the socket from now on."""
        log.info("teacher.memory_not_shared", teacher=self._address, cause=str(cause))
        self._offered = False
        self.forget()

    def forget(self) -> None:
        """Let go of the region, which is freed as soon as no request under way uses it."""
        self._region = self._stream = None
