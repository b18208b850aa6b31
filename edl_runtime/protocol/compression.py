"""Compressed messages, whose size is known only when they are unpacked."""

from __future__ import annotations

import re
import zlib

from edl_runtime.protocol.errors import ProtocolError

UNPACKED_LIMIT = 64 * 1024 * 1024
"""Most bytes of a message that came compressed: a teacher's event loop unpacks it in about a quarter of a second."""

GZIP, ZLIB = 31, 15
"""Formats, as zlib's `wbits`."""

_ZLIB_HEAD = re.compile(rb"\x78[\x01\x5e\x9c\xda]")


def inflated(content: bytes, wbits: int) -> bytes:
    """Return what is packed in `content`. Raises ProtocolError, for more than `UNPACKED_LIMIT` once it has so many."""
    unpacker = zlib.decompressobj(wbits)
    try:
        unpacked = unpacker.decompress(content, UNPACKED_LIMIT + 1)
    except zlib.error as error:
        raise ProtocolError(f"the compressed message is invalid: {error}") from None
    if len(unpacked) > UNPACKED_LIMIT:
        raise ProtocolError(f"the compressed message has more than {UNPACKED_LIMIT} bytes; send it uncompressed")
    if not unpacker.eof:
        raise ProtocolError("the compressed message ends early")
    return unpacked


def inflated_if_packed(message: bytes) -> bytes:
    """Return a protobuf message that may have come compressed, as gRPC passes it on; raises as `inflated`.

    grpcio keeps the header `grpc-encoding` out of the metadata on both sides: the bytes tell. No message of ours begins
    as gzip, which is no protobuf, or as zlib, which would be a number in field 15.
    """
    if message.startswith(b"\x1f\x8b"):
        return inflated(message, GZIP)
    return inflated(message, ZLIB) if _ZLIB_HEAD.match(message) else message


GRPC_OPTION = ("grpc.per_message_decompression", 0)
"""Makes gRPC pass messages on as they came: by itself it unpacks any size."""
