"""Shell completion without loading the verb.

Importing PyTorch takes seconds, which is too long for a key. So verbs, options and arguments are read from
commands.json, which `make docs` writes from the verbs themselves, and only presets, fields and chips are looked up,
in modules that load quickly. Without a proposal the shell offers its files.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.cli.signatures import described_verbs
from penstock.cli.verbs import load_by_name
from penstock.config.presets.registry import PRESETS
from penstock.config.run import Run
from penstock.config.schema import NAME, every_field

Word = tuple[str, str]  # a proposed word and its description


def proposals(verb: str, given_words: Sequence[str], begun: str) -> list[Word]:
    """Proposals for the last word of a command line, of which `begun` is there, behind other words of the verb."""
    node, option, given, arguments = described_verbs()[verb], "", set(), 0
    values_left = 0  # words that the option before still takes
    for word in given_words:
        if values_left:
            values_left -= 1
        elif word in node["verbs"] and not arguments:
            node = node["verbs"][word]
        elif word.startswith("-"):
            option, equals, _ = word.partition("=")
            given.add(option)
            values_left = 0 if equals else len(_options(node).get(option, {"value": ""})["value"].split())
        else:
            arguments += 1
    if values_left:
        choices = _values(_options(node)[option]["value"], begun)
    elif begun.startswith("-"):
        choices = ((name, row["help"]) for name, row in _options(node).items() if name not in given)  # each option once
    else:
        choices = _of_argument(node, arguments, begun)
    return [(word, text) for word, text in choices if word.startswith(begun)]


def _options(node: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Options that people may use, by their long form."""
    shown: dict[str, Mapping[str, Any]] = {
        max(parameter["opts"], key=len): parameter
        for parameter in node["parameters"]
        if parameter["opts"][0].startswith("-") and not parameter.get("hidden")
    }
    return {**shown, "--help": {"value": "", "help": "Show this message and exit."}}


def _of_argument(node: Mapping[str, Any], index: int, begun: str) -> Iterator[Word]:
    """Verbs below this one, and values of the argument at this place; the last argument may repeat."""
    if index == 0:
        yield from ((name, inner["summary"]) for name, inner in node["verbs"].items())
    names = [parameter["value"] for parameter in node["parameters"] if not parameter["opts"][0].startswith("-")]
    if index < len(names) or (names and names[-1].endswith("...")):
        yield from _values(names[min(index, len(names) - 1)], begun)  # the last argument takes all further words


def _values(name: str, begun: str) -> Iterator[Word]:
    if "|" in name:  # choices, as `<bf16|fp32>`
        return ((choice, "") for choice in name.strip("<>").split("|"))
    return next((make(begun) for pattern, make in _KNOWN.items() if re.fullmatch(pattern, name)), iter(()))


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
