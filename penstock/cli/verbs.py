"""Verbs that are imported when they are called.

Importing PyTorch takes seconds, and `penstock --help` and `penstock config list` need none of it. So a group knows its
verbs by name, and this file loads the module of the one that is called; a verb that needs PyTorch for some questions
only loads that part in the same way. Only kernels are imported by name as well (`penstock.kernels.backends`); nothing
else in the project imports inside a function.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def load_by_name(module: str, attribute: str) -> Any:
    """What a module calls so; the module is imported now."""
    return vars(import_module(module))[attribute]


@dataclass(frozen=True)
class Verb:
    """Where a verb is.

    Attributes:
        name: what is typed.
        module: dotted name of the module.
        attribute: name there of a `typer.Typer`, or of a function with typer's annotations.
        summary: the line in the list of verbs.
    """

    name: str
    module: str
    attribute: str
    summary: str

    def load(self) -> Any:
        """The command itself; its type is private to typer."""
        target = load_by_name(self.module, self.attribute)
        if not isinstance(target, typer.Typer):
            function, target = target, typer.Typer(add_completion=False)
            target.command(self.name)(function)
        return typer.main.get_command(target)


class _Unloaded(TyperCommand):
    """Stands for a verb in lists; parsing its arguments is handed on to the verb itself."""

    def __init__(self, verb: Verb) -> None:
        super().__init__(name=verb.name, help=verb.summary)
        self._verb = verb

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Load the verb and let it parse."""
        return self._verb.load().make_context(info_name, args, parent, **extra)


def group_of(*verbs: Verb) -> type[TyperGroup]:
    """The class of a group that has these verbs before its own: `typer.Typer(cls=group_of(...))`."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands = {verb.name: _Unloaded(verb) for verb in verbs} | dict(self.commands)

    return LazyGroup
