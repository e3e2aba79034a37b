"""docs/commands.md and penstock/cli/commands.json: every verb as it describes itself, for readers and for shells.

Both are made from the commands that typer makes of the verbs' functions, so they say what `--help` says. Examples are
the indented command lines in the docstring of a verb's module.
"""

import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from penstock.cli.main import VERBS
from tools.pages import page

_KINDS = {"str": "TEXT", "int": "N", "float": "X", "path": "PATH"}


def commands_page() -> str:
    """docs/commands.md."""
    parts = list[str]()
    for verb in VERBS:
        examples = _examples(inspect.getdoc(import_module(verb.module)) or "")
        for words, command in _walk(verb.name, verb.load()):
            parts += [_section(words, command, examples)]
            examples = []
    return page("commands", verbs="\n".join(parts).rstrip("\n"))


def commands_json() -> str:
    """penstock/cli/commands.json."""
    table = {verb.name: {"summary": verb.summary, **_entry(verb.load())} for verb in VERBS}
    text = json.dumps(table, indent=1)
    # A line for each parameter: tables without a table inside.
    return re.sub(r"\{[^{}]*\}", lambda found: json.dumps(json.loads(found[0])), text) + "\n"


def _walk(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A command and the verbs below it, in their order."""
    yield words, command
    for name, inner in _inner(command):
        yield from _walk(f"{words} {name}", inner)


def _inner(command: Any) -> Iterator[tuple[str, Any]]:
    for name, inner in vars(command).get("commands", {}).items():
        if not inner.hidden:
            yield name, inner.load() if hasattr(inner, "load") else inner


def _entry(command: Any) -> dict[str, Any]:
    listed = vars(command).get("commands", {})  # as the list of verbs has them
    verbs = {
        name: {"summary": listed[name].help or "", "short": listed[name].short_help, **_entry(inner)}
        for name, inner in _inner(command)
    }
    return {
        "help": command.help or "",
        "parameters": [_described(parameter) for parameter in command.params],
        "verbs": verbs,
    }


_NAMES = {Path: "path", list[Path]: "list[path]"}


def _described(parameter: Any) -> dict[str, Any]:
    """A parameter as penstock/cli/signatures.py reads it; what has its usual value is left out."""
    kind = parameter.type_descriptor.annotation
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    name = _NAMES.get(kind) or (kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind))
    default = str(parameter.default) if isinstance(parameter.default, Path) else parameter.default
    more = {
        "choices": list(choices), "metavar": parameter.metavar, "help": parameter.help, "min": parameter.min,
        "max": parameter.max, "required": parameter.required, "default": default, "hidden": parameter.hidden,
    }  # fmt: skip
    described = {"name": parameter.name, "opts": parameter.opts, "type": "str" if choices else name}
    shown = {} if parameter.hidden else {"value": _value(parameter)}
    return (
        described
        | shown
        | {key: value for key, value in more.items() if value or (value in (0, 0.0) and value is not False)}
    )


def _parameters(command: Any) -> tuple[list[Any], list[Any]]:
    """Arguments and options that people may use."""
    shown = [parameter for parameter in command.params if not parameter.hidden]
    return [one for one in shown if not _is_option(one)], [one for one in shown if _is_option(one)]


def _is_option(parameter: Any) -> bool:
    return bool(parameter.opts[0].startswith("-"))


def _name(option: Any) -> str:
    return str(max(option.opts, key=len))


def _value(parameter: Any) -> str:
    """What help calls the value of a parameter; empty for a switch."""
    if _is_option(parameter) and parameter.is_flag:
        return ""
    if parameter.metavar:
        return str(parameter.metavar)
    if not _is_option(parameter):
        return str(parameter.name.upper())
    shown, _ = parameter.get_help_record(typer.Context(TyperCommand(name=parameter.name)))
    kind = re.search(r"<(.+)>", shown)[1]  # type: ignore[index]
    return f"<{kind}>" if "|" in kind else _KINDS.get(kind.split()[0], kind.split()[0].upper())


def _summary(command: Any) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split())


def _examples(docstring: str) -> list[str]:
    return [line.strip() for line in docstring.splitlines() if re.match(r" {4}(penstock|torchrun) ", line)]


def _section(words: str, command: Any, examples: list[str]) -> str:
    arguments, options = _parameters(command)
    usage = " ".join(
        [f"penstock {words}", *map(_usage, [one for one in options if one.required]), *map(_usage, arguments)]
    )
    usage += " [OPTION]..." if any(not one.required for one in options) else ""
    usage += " VERB" if vars(command).get("commands") else ""
    lines = [f"## penstock {words}", "", "```text", usage, "```", "", *_paragraphs(command.help or "")]
    if examples:
        lines += ["```text", *examples, "```", ""]
    rows = [(_value(one), one.help or "") for one in arguments]
    rows += [(f"{_name(one)} {_value(one)}".rstrip(), f"{one.help or ''}{_default(one)}") for one in options]
    if rows:
        cells = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
        lines += ["| argument, option | meaning |", "| --- | --- |"]
        lines += [*(f"| `{name}` | {meaning} |" for name, meaning in cells), ""]
    return "\n".join(lines)


def _paragraphs(text: str) -> list[str]:
    return [line for part in text.split("\n\n") for line in (" ".join(part.split()), "") if part.strip()]


def _usage(parameter: Any) -> str:
    if _is_option(parameter):
        return f"{_name(parameter)} {_value(parameter)}"
    value = _value(parameter)
    return value if parameter.required or value.startswith("[") else f"[{value}]"


def _default(option: Any) -> str:
    """The default of an option, if it is a value."""
    is_said = option.default not in (None, "", ()) and not option.is_flag
    return f" Default: {option.default}." if is_said else ""
