"""YAML of which little can't make much: a few lines of aliases may stand for billions of values, or for endless ones.

What is nested thousands deep would end in a RecursionError, here or where it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yaml import SafeLoader

MOST_VALUES = 10_000
"""Values in a text, each alias counted as all that it stands for. PyYAML takes about a second to read so many."""

MOST_DEPTH = 50
"""Levels of values within values, each alias counted as all that it stands for."""


def bounded_loader(most_values: int = MOST_VALUES) -> type[SafeLoader]:
    """Return a loader for `yaml.load` and `yaml.compose` that raises yaml.composer.ComposerError for too much.

    That is more than `most_values` values, or than `MOST_DEPTH` levels, and a value that is its own part.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Measures values while it reads, before any merge (`<<`) copies them."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self._values = 0
            self._depth = -1  # of the value that is read: a document's is 0
            self._deepest = 0
            self._anchored: dict[str, tuple[int, int]] = {}  # values and levels of what each stands for

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            anchor: str = getattr(event, "anchor", None) or ""
            before, outer = self._values, self._deepest
            self._depth += 1
            values, levels = 1, 0
            if isinstance(event, yaml.AliasEvent):
                values, levels = self._anchored.get(anchor, (1, 0))
            else:
                self._anchored[anchor] = 1, MOST_DEPTH + 1  # until it is read: what is its own part has no end
            self._values += values
            self._deepest = self._depth + levels
            if self._values > most_values:
                raise _too_much(f"more than {most_values} values", event)
            if self._deepest > MOST_DEPTH:
                raise _too_much(f"more than {MOST_DEPTH} levels of values", event)
            node = super().compose_node(parent, index)
            if not isinstance(event, yaml.AliasEvent):
                self._anchored[anchor] = self._values - before, self._deepest - self._depth
            self._deepest = max(outer, self._deepest)
            self._depth -= 1
            return node

    def _too_much(problem: str, event: Any) -> Exception:
        return yaml.composer.ComposerError(None, None, f"{problem}, aliases written out", event.start_mark)

    return Loader
