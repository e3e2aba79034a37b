"""Proposals of shell completion for values that a verb's description does not list: presets, fields and chips.

typer proposes verbs, options and choices itself, from the description of the verb (penstock/cli/signatures.py), because
importing PyTorch takes too long for a key. Without a proposal the shell offers its files.
"""

import re
from collections.abc import Callable, Iterator

from penstock.cli.verbs import load_by_name
from penstock.config.presets.registry import PRESETS
from penstock.config.run import Run
from penstock.config.schema import NAME, every_field

Word = tuple[str, str]  # a proposed word and its description


def _presets(begun: str) -> Iterator[Word]:
    for name, make in PRESETS.items():
        yield name, " ".join((make.__doc__ or "").split()).partition(". ")[0].rstrip(".")


def _overrides(begun: str) -> Iterator[Word]:
    """Fields, and the values of the field if one is named."""
    path = begun.partition("=")[0]
    for field in every_field(Run):
        if field.sections or NAME in field.path:
            continue
        if field.path == path and "=" in begun:
            yield from ((f"{path}={choice}", "") for choice in field.choices)
        elif "=" not in begun:  # no value of another field is begun
            yield f"{field.path}=", field.doc


def _clusters(begun: str) -> Iterator[Word]:
    number = begun.partition("x")[0] or "8"  # `512xMI` keeps its 512
    return ((f"{number}x{name}", "") for name in load_by_name("penstock.plan.hardware_file", "known_hardware")())


# Proposals by the name of a value in help.
_KNOWN: dict[str, Callable[[str], Iterator[Word]]] = {
    r"TARGET|A|B|A B": _presets,
    r"\[a\.b=c\]\.\.\.": _overrides,
    r"FIELD": lambda begun: ((path, "") for path in dict.fromkeys(field.path for field in every_field(Run))),
    r"NxCHIP": _clusters,
}


def completion_of(value: str) -> Callable[[str], list[Word]]:
    """The function from which typer takes proposals for a value of this name in help; typer leaves out other words."""
    propose = next((propose for pattern, propose in _KNOWN.items() if re.fullmatch(pattern, value)), None)

    def complete(incomplete: str) -> list[Word]:
        return [] if propose is None else list(propose(incomplete))

    return complete
