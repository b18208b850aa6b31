"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below their headings, each column as wide as it needs: names are there to be copied whole."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    console.width = Console(width=2**16).measure(table).maximum
    console.print(table)
