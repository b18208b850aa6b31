"""Parsers of untrusted JSON and YAML, which raise only their own errors. YAML is bounded in size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import msgspec

if TYPE_CHECKING:
    from yaml import SafeLoader

Content = TypeVar("Content")

Text = str | bytes | bytearray | memoryview


class JsonDecoder(Generic[Content]):
    """A `msgspec.json.Decoder` that raises only `msgspec.DecodeError`.

    msgspec's own also raises UnicodeDecodeError for text that is not UTF-8, and RecursionError for deeply nested
    values, even in fields that are not read.
    """

    @overload
    def __init__(self: JsonDecoder[Content], kind: type[Content]) -> None: ...
    @overload
    def __init__(self: JsonDecoder[Any], kind: Any) -> None: ...
    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.json.Decoder[Content] = msgspec.json.Decoder(kind)

    def decode(self, content: Text) -> Content:
        """Return the content. Raises msgspec.DecodeError."""
        try:
            return self._decoder.decode(content)
        except msgspec.DecodeError:
            raise
        except (ValueError, RecursionError) as error:
            raise msgspec.DecodeError(f"JSON is malformed: {error}") from None


# A few lines of YAML aliases can expand to billions of values, or to infinitely many.

MAX_YAML_VALUES = 10_000
"""Most values in a text, aliases expanded. PyYAML takes about a second to read so many."""

MAX_YAML_DEPTH = 50
"""Most levels of nested values, aliases expanded."""


def bounded_yaml_loader(most_values: int = MAX_YAML_VALUES) -> type[SafeLoader]:
    """Return a loader for `yaml.load` and `yaml.compose` with limits.

    Raises yaml.composer.ComposerError for more than `most_values` values, more than `MAX_YAML_DEPTH` levels, or a value
    that contains itself.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Counts values while it reads, before a merge (`<<`) copies them."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self._values = 0
            self._depth = -1  # of the current value; 0 for the document
            self._deepest = 0
            self._anchored: dict[str, tuple[int, int]] = {}  # the values and levels of each anchor

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            anchor: str = getattr(event, "anchor", None) or ""
            before, outer = self._values, self._deepest
            self._depth += 1
            values, levels = 1, 0
            if isinstance(event, yaml.AliasEvent):
                values, levels = self._anchored.get(anchor, (1, 0))
            else:
                self._anchored[anchor] = (
                    1,
                    MAX_YAML_DEPTH + 1,
                )  # until it is complete, so that a value that contains itself is too deep
            self._values += values
            self._deepest = self._depth + levels
            if self._values > most_values:
                raise _too_much(f"more than {most_values} values", event)
            if self._deepest > MAX_YAML_DEPTH:
                raise _too_much(f"more than {MAX_YAML_DEPTH} levels of values", event)
            node = super().compose_node(parent, index)
            if not isinstance(event, yaml.AliasEvent):
                self._anchored[anchor] = self._values - before, self._deepest - self._depth
            self._deepest = max(outer, self._deepest)
            self._depth -= 1
            return node

    def _too_much(problem: str, event: Any) -> Exception:
        return yaml.composer.ComposerError(None, None, f"{problem}, aliases written out", event.start_mark)

    return Loader
