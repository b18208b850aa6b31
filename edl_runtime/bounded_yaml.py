"""YAML whose aliases can't make much of little: a few lines may stand for billions of values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yaml import SafeLoader

MOST_VALUES = 10_000
"""Values in a text, each alias counted as all that it stands for. PyYAML takes about a second to read so many."""


def bounded_loader() -> type[SafeLoader]:
    """Return a loader for `yaml.load` that raises yaml.composer.ComposerError beyond `MOST_VALUES` values."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Counts values while it reads, before any merge (`<<`) copies them."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self._values = 0
            self._anchored: dict[str, int] = {}  # values below each anchor

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            anchor: str = getattr(event, "anchor", None) or ""
            before = self._values
            self._values += self._anchored.get(anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
            if self._values > MOST_VALUES:
                problem = f"more than {MOST_VALUES} values, aliases written out"
                raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
            node = super().compose_node(parent, index)
            if anchor and not isinstance(event, yaml.AliasEvent):
                self._anchored[anchor] = self._values - before
            return node

    return Loader
