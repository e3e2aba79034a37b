"""A table with lines around its cells, for a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def draw_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Draw rows under their columns' names to stdout; brackets are text, not markup."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)
