"""JSON that somebody else has written: another process, another version, or a stranger."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

import msgspec

Content = TypeVar("Content")

Text = str | bytes | bytearray | memoryview


class Decoder(Generic[Content]):
    """Decodes JSON of one kind, as a `msgspec.json.Decoder` does, and raises nothing but `msgspec.DecodeError`.

    msgspec's own raises UnicodeDecodeError for text that is not UTF-8, and RecursionError for what is nested too deep,
    even in a field that is not read.
    """

    @overload
    def __init__(self: Decoder[Content], kind: type[Content]) -> None: ...
    @overload
    def __init__(self: Decoder[Any], kind: Any) -> None: ...
    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.json.Decoder[Content] = msgspec.json.Decoder(kind)

    def decode(self, content: Text) -> Content:
        """Return the content. Raises msgspec.DecodeError, whatever is given."""
        try:
            return self._decoder.decode(content)
        except msgspec.DecodeError:
            raise
        except (ValueError, RecursionError) as error:
            raise msgspec.DecodeError(f"JSON is malformed: {error}") from None
