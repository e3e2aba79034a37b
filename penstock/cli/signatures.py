"""Verbs as commands.json describes them: they print help, refuse arguments and complete without importing the verb.

Importing PyTorch takes seconds, and a misspelled option should not. `make docs` writes the parameters of every verb
into commands.json (tools/commands_page.py); here typer makes commands of them, which parse, refuse and print help as
the verb itself does. A test compares the two. Values that say what to train or to plan for are read as well, because
presets, files, fields and clusters are known without PyTorch.

For completion typer proposes verbs, options and choices from the same description; `completion_of` adds the values that
it does not list: presets, fields and chips. Without a proposal the shell offers its files.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from penstock.base.errors import ConfigError
from penstock.cli.verbs import HELP, load_by_name
from penstock.config.load import huggingface_config_in, load_run
from penstock.config.presets.registry import PRESETS
from penstock.config.run import Run
from penstock.config.schema import NAME, every_field
from penstock.config.versions import fields_of_other_name
from penstock.plan.hardware_file import known_hardware, parse_cluster

OVERRIDES = "[a.b=c]..."
COMMANDS = Path(__file__).with_name("commands.json")

_TYPES: Mapping[str, Any] = {
    "str": str, "int": int, "float": float, "bool": bool, "path": Path, "list[str]": list[str],
    "list[path]": list[Path], "tuple[str, str]": tuple[str, str],
}  # fmt: skip


# What to write instead of an option that was removed, by verb and option.
REMOVED_OPTIONS: Mapping[tuple[str, str], str] = {
    ("init", "--yes"): "leave it out: nothing is asked",
    ("init", "--on"): "plan for another machine with penstock plan MODEL --on NxCHIP --write FILE.toml",
    ("init", "--tokens"): "write training.steps=N: a step has the tokens that the file says",
}


@cache
def described_verbs() -> Mapping[str, Mapping[str, Any]]:
    """The contents of commands.json: by verb its help, parameters and verbs below it."""
    described: dict[str, dict[str, Any]] = json.loads(COMMANDS.read_text(encoding="utf-8"))
    return described


def check_arguments(verb: str, arguments: Sequence[str], parent: Any) -> None:
    """Refuse arguments that the verb would refuse, and print help that is asked for (`typer.Exit`).

    Raises a typer.TyperException for an option, argument or value that is none of the verb's, a ConfigError where there
    is no such preset, file, field or value of a field, and a HardwareError where there is no such cluster.
    """
    node, command = described_verbs()[verb], described_command(verb)
    # The program has no `--help` where a verb is called (`penstock.cli.verbs`), and contexts take after it.
    try:
        context = command.make_context(verb, list(arguments), parent=parent, help_option_names=[HELP])
        while node["verbs"]:
            rest = [*context._protected_args, *context.args]
            if not rest:
                print(context.get_help())
                raise typer.Exit
            name, command, rest = context.command.resolve_command(context, rest)
            node = node["verbs"][name]
            context = command.make_context(name, rest, parent=context, help_option_names=[HELP])
    except typer.TyperException as error:
        option = vars(error).get("option_name")  # of an option that there is not
        if option and (instead := REMOVED_OPTIONS.get((verb, option))):
            raise ConfigError(f"{option} was removed", fix=instead) from error
        takes_overrides = any(parameter.get("metavar") == OVERRIDES for parameter in node["parameters"])
        if option and takes_overrides and (fields := _fields_meant(option)):
            fix = " or ".join(f"{field}=..." for field in fields)
            raise ConfigError(f"there is no option {option}", fix=f"write {fix}") from error
        raise
    _check_values(verb, node, context.params)


def described_command(verb: str) -> Any:
    """A verb that parses, completes and prints help as the real one does."""
    return _command(verb, described_verbs()[verb])


def _command(name: str, node: Mapping[str, Any]) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    if not node["verbs"]:
        app.command(name, help=node["help"])(_function(node["parameters"]))
        return typer.main.get_command(app)
    app.callback(invoke_without_command=True, help=node["help"])(lambda: None)
    group = typer.main.get_command(app)
    vars(group)["commands"] = {inner: _InnerVerb(inner, below) for inner, below in node["verbs"].items()}
    return group


class _InnerVerb(TyperCommand):
    """A verb of a group, which is made when it is called."""

    def __init__(self, name: str, node: Mapping[str, Any]) -> None:
        super().__init__(name=name, help=node["summary"], short_help=node["short"], rich_markup_mode=None)
        self._node = node

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return _command(info_name or "", self._node).make_context(info_name, args, parent=parent, **extra)


def _function(parameters: Sequence[Mapping[str, Any]]) -> Any:
    def verb(**values: Any) -> None:
        pass

    annotations = {parameter["name"]: _annotation(parameter) for parameter in parameters}
    verb.__annotations__ = annotations
    # typer reads names, annotations and defaults.
    verb.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(
                parameter["name"],
                Parameter.KEYWORD_ONLY,
                annotation=annotations[parameter["name"]],
                default=Parameter.empty if parameter.get("required") else parameter.get("default"),
            )
            for parameter in parameters
        ]
    )
    return verb


def _annotation(parameter: Mapping[str, Any]) -> Any:
    choices = parameter.get("choices")
    kind = Literal[tuple(choices)] if choices else _TYPES[parameter["type"]]  # pyrefly: ignore[invalid-literal]
    if not parameter.get("required") and parameter.get("default") is None:
        kind = kind | None
    options = {key: parameter[key] for key in ("metavar", "help", "min", "max", "hidden") if key in parameter}
    if not choices:  # typer proposes these itself
        options["autocompletion"] = completion_of(parameter.get("value", ""))
    if parameter["opts"][0].startswith("-"):
        return Annotated[kind, typer.Option(*parameter["opts"], **options)]
    return Annotated[kind, typer.Argument(**options)]


def _fields_meant(option: str) -> tuple[str, ...]:
    """Fields that an option of another trainer means, or whose last name it is."""
    name = option.lstrip("-").replace("-", "_")
    paths = dict.fromkeys(field.path for field in every_field(Run) if not field.sections)
    return fields_of_other_name(option) or tuple(path for path in paths if name in (path, path.rpartition(".")[2]))


def _check_values(verb: str, node: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Read the run and the cluster that the arguments name."""
    by_metavar = {parameter.get("metavar", ""): values.get(parameter["name"]) for parameter in node["parameters"]}
    overrides, cluster = (by_metavar.get(name) for name in (OVERRIDES, "NxCHIP"))
    target = by_metavar.get("TARGET", by_metavar.get("[TARGET]"))  # in brackets where it may be left out
    if verb == "plan":
        load_by_name("penstock.cli.plan_request", "request_of")(values)
    elif isinstance(cluster, str) and cluster != "here":
        parse_cluster(cluster)
    # The target may be left out before overrides, and reading a model's config.json needs PyTorch.
    if isinstance(target, str) and "=" not in target and not (verb == "plan" and huggingface_config_in(target)):
        # What is asked for beside the target may complete the run; its rules are left to the verb then.
        _check_run(target, overrides or (), is_whole=verb not in ("plan", "init") and not values.get("keep"))


def _check_run(target: str, overrides: Sequence[str], *, is_whole: bool) -> None:
    """Read the run, except from a pipe, which can be read once, or from a folder, which may be that of weights."""
    path = Path(target)
    if (path.is_file() or not path.exists()) and not any(path.is_relative_to(folder) for folder in ("/dev", "/proc")):
        load_run(target, overrides, is_whole=is_whole)


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
    return ((f"{number}x{name}", "") for name in known_hardware())


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
