"""Messages that come compressed."""

from __future__ import annotations

import gzip
import zlib

import pytest

from edl_runtime.protocol import compression
from edl_runtime.protocol.compression import GZIP, ZLIB, inflated, inflated_if_packed
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.oip_grpc import MESSAGES


@pytest.mark.parametrize(("pack", "wbits"), [(gzip.compress, GZIP), (zlib.compress, ZLIB)])
def test_what_was_packed_comes_back_up_to_the_limit(
    pack: type[bytes], wbits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "UNPACKED_LIMIT", 1_000_000)
    packed = pack(bytes(1_000_000))
    assert inflated(packed, wbits) == bytes(1_000_000)
    with pytest.raises(ProtocolError, match="more than 1000000 bytes"):
        inflated(pack(bytes(1_000_001)), wbits)
    with pytest.raises(ProtocolError, match="ends early"):
        inflated(packed[:-1], wbits)
    with pytest.raises(ProtocolError, match="invalid"):
        inflated(b"no such thing", wbits)


def test_a_message_that_is_not_packed_is_left_alone() -> None:
    message = MESSAGES["ModelInferRequest"](model_name="x" * 120).SerializeToString()
    assert inflated_if_packed(message) is message
    assert inflated_if_packed(b"") == b""
    for packed in (gzip.compress(message), *(zlib.compress(message, level) for level in (1, 5, 6, 9))):
        assert inflated_if_packed(packed) == message
