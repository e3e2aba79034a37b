"""Tables for people: drawn on a terminal, aligned plain text everywhere else."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their columns' names to stdout."""
    if sys.stdout.isatty():
        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        Console(markup=False, highlight=False).print(table)
        return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
