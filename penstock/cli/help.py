"""Help without waiting for the verb: what its screen says was written down, and the first screen fits 24 lines of 80.

A verb imports what it works with, PyTorch above all, which takes seconds. commands.json, which `make docs` writes from
the verbs themselves, holds the screen of every verb as `--help` of the loaded verb prints it on 80 columns; tests hold
the two together. On a narrower terminal the verb is loaded and prints its own.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

COMMANDS = Path(__file__).with_name("commands.json")
COLUMNS = 80
"""Of the terminal that the screens were written for; typer uses no more."""

MARGIN = 2
"""Columns that typer leaves free."""

HELP = "--help"


def screen_asked_for(verb: str, words: Sequence[str]) -> str | None:
    """The screen of a verb, or of one below it, if the words behind the verb ask for help and it was written down.

    Args:
        verb: of `penstock`.
        words: what comes behind it.
    """
    if HELP not in words or shutil.get_terminal_size((COLUMNS, 24)).columns < COLUMNS:
        return None
    node: dict[str, Any] | None = json.loads(COMMANDS.read_text(encoding="utf-8")).get(verb)
    values_left, arguments = 0, 0
    for word in words:
        if node is None or word == "--":
            return None
        if values_left:
            values_left -= 1
        elif word == HELP:
            return str(node["screen"])
        elif word.startswith("-"):
            option, equals, _ = word.partition("=")
            if option not in node["options"]:
                return None  # The verb says that there is no such option.
            values_left = 0 if equals else len(node["options"][option]["value"].split())
        elif node["verbs"] and not arguments:
            node = node["verbs"].get(word)
        else:
            arguments += 1
    return None


def on_one_screen(group: type[TyperGroup]) -> type[TyperGroup]:
    """A class of groups whose help has no more than its verbs and the names of its options: it fits 24 lines of 80.

    Args:
        group: the class that knows the verbs.
    """

    class OneScreen(group):  # type: ignore[misc, valid-type]
        def format_options(self, ctx: Any, formatter: Any) -> None:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_dl([(name, verb.help or "") for name, verb in self.commands.items()])
            names = [max(option.opts, key=len) for option in self.get_params(ctx)]
            formatter.write_paragraph()
            formatter.write_text(f"Options: {', '.join(names)}.")

    return OneScreen
