"""The first screen: every verb on a line, and what goes with all of them in the last."""

from typing import Any

from typer.core import TyperGroup


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
