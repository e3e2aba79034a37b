"""Tables for people: drawn on a terminal, aligned plain text everywhere else.

Plain text has no width: every column is there, however long the lines become. A terminal has one; which columns it gets
is decided in table_drawn.py, which is imported when a terminal is there: it takes longer than to print all tables of a
small trace.
"""

import sys
from collections.abc import Sequence

from penstock.cli.verbs import load_by_name


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], least: Sequence[str] = ()) -> None:
    """Print rows under their columns' names to stdout.

    Args:
        columns: names.
        rows: a cell for each column.
        least: columns that a narrow terminal misses least, the first of them first; after them the last ones go. The
            first column always stays.
    """
    if sys.stdout.isatty():
        load_by_name("penstock.cli.table_drawn", "draw_table")(columns, rows, least)
        return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
