"""Verbs that are imported when they are called, and help that is printed without importing them.

Importing PyTorch takes seconds, and `penstock --help` and `penstock config list` do not need it. So a group knows its
verbs by name, and this file loads the module of the called verb; a verb that needs PyTorch for some options loads that
part in the same way. Only kernels are imported by name as well (`penstock.kernels.backends`). Before a verb is loaded,
`penstock.cli.signatures` prints its help or refuses its arguments. Arguments and options of several verbs stand here.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.base.garbage import no_collection
from penstock.base.interrupts import imports_end_at_once
from penstock.parallel.launch.environment import LaunchFacts, prepare_environment

Target = Annotated[str, typer.Argument(metavar="TARGET", help="A preset, a TOML file, or a run folder.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Overrides.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Write over a file that is there.")]
On = Annotated[str | None, typer.Option("--on", metavar="NxCHIP", help="What the run is on: 8xH200, or 8xmine.toml.")]
Names = Annotated[
    Path | None, typer.Option("--names", metavar="FILE", help="Phases of kernels by name (docs/trace.md).")
]
Processes = Annotated[
    int | None, typer.Option("--processes", min=1, help="Ranks to start here; without it, one for each GPU.")
]
Checkpoint = Annotated[int | None, typer.Option("--step", help="Which checkpoint; the newest if left out.")]


HELP = "--help"
PROGRAM = "penstock"


def on_one_screen(group: type[TyperGroup]) -> type[TyperGroup]:
    """A class of groups whose help lists only verbs and names of options, so that it fits 24 lines of 80."""

    class OneScreen(group):  # type: ignore[misc, valid-type]
        def format_options(self, ctx: Any, formatter: Any) -> None:
            with formatter.indentation():
                formatter.write_dl([(name, verb.help or "") for name, verb in self.commands.items()])
            names = [max(option.opts, key=len) for option in self.get_params(ctx)]  # long forms
            formatter.write_text(f"Options: {', '.join(names)}.")

    return OneScreen


def load_by_name(module: str, attribute: str) -> Any:
    """Import a module now and return one of its attributes."""
    with imports_end_at_once(), no_collection():
        return vars(import_module(module))[attribute]


@dataclass(frozen=True)
class Verb:
    """A verb: its word on the command line, and its place."""

    name: str
    module: str
    attribute: str  # a `typer.Typer`, or a function with typer's annotations
    summary: str  # the line in the list of verbs
    computes: bool = True  # it multiplies matrices; libraries of other verbs start no threads for that
    is_checked: bool = True  # its arguments, before it is imported; a verb that imports little checks them itself

    def load(self) -> Any:
        """The command itself; its type is private to typer."""
        if not self.computes:
            prepare_environment(LaunchFacts(computes=False))
        target = load_by_name(self.module, self.attribute)
        if not isinstance(target, typer.Typer):  # a function becomes a program of one verb
            function, target = target, typer.Typer(add_completion=False)
            target.command(self.name)(function)
        return _with_plain_help(typer.main.get_command(target))  # not rich's frames


def _with_plain_help(command: Any) -> Any:
    """The command, and all below it, with help without frames, which fits a screen."""
    command.rich_markup_mode = None
    if isinstance(command, TyperGroup):
        for inner in command.commands.values():
            _with_plain_help(inner)
    return command


_ANY_WORDS = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}


class _Unloaded(TyperCommand):
    """Placeholder of a verb in lists; it hands its arguments to the loaded verb."""

    def __init__(self, verb: Verb) -> None:
        super().__init__(name=verb.name, help=verb.summary, add_help_option=False, context_settings=_ANY_WORDS)
        self._verb = verb

    def load(self) -> Any:
        return self._verb.load()

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Load the verb and let it parse; help and completion do not need it."""
        if extra.get("resilient_parsing"):  # completion, which must not wait for PyTorch
            command = load_by_name("penstock.cli.signatures", "described_command")(self._verb.name)
            return command.make_context(info_name, args, parent, **extra)
        if self._verb.is_checked and parent is not None and parent.command_path == PROGRAM:
            load_by_name("penstock.cli.signatures", "check_arguments")(self._verb.name, args, parent)
        if HELP in args:
            extra["help_option_names"] = [HELP]  # `parse_args` below took them away
        return self.load().make_context(info_name, args, parent, **extra)


def group_of(*verbs: Verb) -> type[TyperGroup]:
    """The class of a group that has these verbs before its own: `typer.Typer(cls=group_of(...))`."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands = {verb.name: _Unloaded(verb) for verb in verbs} | dict(self.commands)  # the lazy ones first

        def parse_args(self, ctx: Any, args: list[str]) -> Any:
            # typer checks every value with pydantic, also that of `--help`, which it has for each verb. The import of
            # pydantic takes longer than to answer for a small trace, so the option is there if it is asked for. Where a
            # verb is asked, it has the option itself.
            is_asked = HELP in args and not isinstance(self.commands.get(args[0]), _Unloaded)
            if args and not is_asked and not ctx.resilient_parsing:
                ctx.help_option_names = []
            return super().parse_args(ctx, args)

    return LazyGroup


def group_app(summary: str, *lazy: Verb) -> typer.Typer:
    """A group of verbs, the lazily loaded ones first, that prints its help if no verb is named."""
    app = typer.Typer(cls=group_of(*lazy) if lazy else None, add_completion=False)

    @app.callback(invoke_without_command=True, help=summary)
    def print_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    return app
