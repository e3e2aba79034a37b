"""A table with lines around its cells, for a terminal of any width.

A number is never cut or broken over lines. On a narrow terminal, columns of text are wrapped at words first; then whole
columns are left out, and a line below the table names them.
"""

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

# Columns of the terminal for the frame's left line, and for each cell's spaces with the line at its right.
FRAME, PADDING = 1, 3
LONGEST_WORD = 24  # a longer word, such as a kernel's name, may be broken unless it is a number
READABLE = 16  # columns of text at least before a whole column is left out

_SIGNS = r"[-+~<>=(\[]*"
_FIGURE = re.compile(rf"{_SIGNS}\d\S*( \S{{1,9}})?")  # a number, and its unit: `26.8 GB`, `-1,204.5 ms`, `12.3%`
_NUMBER = re.compile(rf"{_SIGNS}\d\S*")


def draw_table(columns: Sequence[str], rows: Sequence[Sequence[str]], least: Sequence[str]) -> None:
    """Draw rows under their columns' names to stdout, without those of `least` that do not fit. Brackets are text."""
    console = Console(markup=False, highlight=False)
    cells = [tuple(column) for column in zip(columns, *rows, strict=True)]  # by column, with its name first
    kept = _kept(cells, least, console.width)
    widths = _widths([cells[index] for index in kept], console.width)
    table = Table()
    for index, width in zip(kept, widths, strict=True):
        table.add_column(columns[index], width=width, overflow="fold")
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    # One column always stays; where it is wider than the terminal, that breaks its lines, and nothing is lost.
    console.width = max(console.width, _drawn(widths))
    console.print(table)
    if left_out := [name or "notes" for index, name in enumerate(columns) if index not in kept]:
        how = "a wider terminal shows them, and so does `| cat`"
        print(f"{len(left_out)} of {len(columns)} columns left out ({', '.join(left_out)}): {how}")


def _kept(cells: Sequence[Sequence[str]], least: Sequence[str], width: int) -> list[int]:
    """Places of the columns that fit at their narrowest width: the first column, then by importance."""
    places = range(1, len(cells))
    missed_least = [index for name in least for index in places if cells[index][0] == name]
    missed_most = [index for index in places if index not in missed_least]  # from left to right
    narrowest = [_narrowest(column) for column in cells]
    kept = [0]
    for index in (*missed_most, *reversed(missed_least)):
        if _drawn([narrowest[number] for number in (*kept, index)]) <= width:
            kept.append(index)
    return sorted(kept)


def _widths(cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Width of each column: its natural width, or an even share of the rest, never below its narrowest."""
    widths = [_narrowest(column) for column in cells]
    spare = width - _drawn(widths)  # columns of the terminal to give away
    natural = [max(cell_len(line) for cell in column for line in cell.splitlines() or [""]) for column in cells]
    wishes = {index: natural[index] - widths[index] for index in range(len(cells))}
    # The smallest wishes first: what they leave is shared by the others.
    for number, index in enumerate(sorted(wishes, key=lambda index: wishes[index])):
        more = min(wishes[index], max(spare, 0) // (len(wishes) - number))
        widths[index] += more
        spare -= more
    return widths


def _drawn(widths: Sequence[int]) -> int:
    """Terminal columns that a table takes."""
    return FRAME + sum(width + PADDING for width in widths)


def _narrowest(column: Sequence[str]) -> int:
    """Width at which every number is whole, with its unit, and text is readable."""
    return max(map(_narrowest_of_cell, column))


def _narrowest_of_cell(cell: str) -> int:
    if _FIGURE.fullmatch(cell):
        return cell_len(cell)
    widths = [cell_len(word) if _NUMBER.match(word) else min(cell_len(word), LONGEST_WORD) for word in cell.split()]
    return max([*widths, min(cell_len(cell), READABLE)])
