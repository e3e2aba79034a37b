"""Output of verbs: tables, warnings, the proposed next command, and checks of files that a user asks for.

A table is drawn on a terminal (`penstock.cli.table`, loaded only then, because its import takes longer than to print
all tables of a small trace) and is aligned plain text elsewhere, with every column however long the lines become.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.base.errors import ConfigError, PenstockError
from penstock.base.files import write_whole
from penstock.base.numbers import printable
from penstock.cli.verbs import load_by_name


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], least: Sequence[str] = ()) -> None:
    """Print rows under their columns' names to stdout.

    A narrow terminal drops the columns `least` first, in this order, then the last ones. The first column stays.
    """
    rows = [[printable(cell) for cell in row] for row in rows]  # traces and files may hold control characters
    if sys.stdout.isatty():
        load_by_name("penstock.cli.table", "draw_table")(columns, rows, least)
        return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def check_output(path: Path | None, option: str, *, force: bool, makes_folder: bool = False) -> None:
    """Refuse a folder, a file that is there (without `force`), or one in no folder, before anything is computed."""
    if path is None:
        return
    if path.is_dir():
        raise PenstockError(f"{option}: {path} is a folder", fix="name a file in it")
    if path.is_file() and not force:
        raise PenstockError(f"{option}: {path} is there already", fix="another name, or --force to write over it")
    if not makes_folder and not path.absolute().parent.is_dir():
        raise PenstockError(f"{option}: there is no folder {path.parent}", fix="make it first")


def write_file(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises a PenstockError if it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise PenstockError(f"cannot write {path}", got=error.strerror) from error


def print_or_write(text: str, path: Path | None) -> None:
    if path is None:
        print(text, end="")
    else:
        write_file(path, text)
        print(f"wrote {path}")


def next_line(*arguments: object) -> str:
    """The line that proposes a command, its words quoted for a shell."""
    return f"next:  {shlex.join(['penstock', *map(str, arguments)])}"


def print_next(*arguments: object, to_stderr: bool = False) -> None:
    """Print the proposed next command; to stderr if a program may read standard output."""
    print(next_line(*arguments), file=sys.stderr if to_stderr else sys.stdout)


def warn(message: str) -> None:
    print(f"warning: {' '.join(message.split())}", file=sys.stderr)  # stdout is for answers


def budget_seconds(text: str) -> float:
    """Seconds of a `--budget`, such as 90s, 20m or 2h."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.replace(".", "", 1).isdecimal() or float(number) <= 0:
        raise ConfigError("--budget is no time", got=text, allowed="90s, 20m or 2h")
    return float(number) * units[unit]
