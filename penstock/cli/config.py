"""`penstock config`: look at configurations without running anything.

`show` counts parameters and so needs the model code and PyTorch; it has its own module, which only it loads.
"""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli.next import print_next
from penstock.cli.table import print_table
from penstock.cli.verbs import Verb, group_of
from penstock.cli.warnings import warn_of_unfilled
from penstock.config.explain import explain as explain_field
from penstock.config.explain import json_schema, reference_markdown
from penstock.config.load import load_run
from penstock.config.presets.registry import PRESETS
from penstock.config.run import Run
from penstock.config.schema import differences

Target = Annotated[str, typer.Argument(metavar="TARGET", help="A preset, a TOML file, or a run folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_SHOW = Verb("show", "penstock.cli.show", "show", "Print a run in full, with its parameters and FLOPs per token.")

app = typer.Typer(cls=group_of(_SHOW), add_completion=False)


@app.callback(invoke_without_command=True)
def config(context: typer.Context) -> None:
    """List, show, explain, compare and check configurations."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("list")
def list_presets(as_json: Json = False) -> None:
    """List the presets. Any of them can be cut to its first N layers: deepseek-v2-lite-8l."""
    rows = {name: (_sizes(make()), " ".join((make.__doc__ or "").split())) for name, make in PRESETS.items()}
    if as_json:
        print(json.dumps([{"name": name, "description": doc} for name, (_, doc) in rows.items()], indent=2))
    else:
        print_table(
            ("preset", "layers", "experts", "what"), [(name, *sizes, doc) for name, (sizes, doc) in rows.items()]
        )


def _sizes(run: Run) -> tuple[str, str]:
    """Layers, and experts as `6 of 64`."""
    moe = run.model.moe
    return f"{run.model.layers}", "none" if moe is None else f"{moe.top_k} of {moe.experts}"


@app.command()
def explain(field: Annotated[str, typer.Argument(help="Full path, such as model.moe.top_k, or model.moe.")]) -> None:
    """Say what a field means, what it may be, which presets set it, and which rules it must obey."""
    print(explain_field(field))


@app.command()
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help="A preset, a TOML file, or a run folder.")],
    right: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    as_json: Json = False,
) -> None:
    """Show the fields in which two runs differ."""
    found = differences(load_run(left), load_run(right))
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    elif not found:
        print(f"{left} and {right} are the same")
    else:
        print_table(("field", left, right), [(one.field, one.left or "-", one.right or "-") for one in found])


@app.command()
def validate(
    file: Target,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Overrides.")] = None,
) -> None:
    """Check a file, and say whether it could be trained."""
    run = load_run(file, overrides or ())
    warn_of_unfilled(run)
    print(f"{file} is valid: run {run.name}, {run.training.steps} steps of {run.tokens_per_step} tokens")
    print_next("train", file, *(overrides or ()))


@app.command()
def schema() -> None:
    """Print the JSON schema of a run, for editors and other tools."""
    print(json.dumps(json_schema(), indent=2))


@app.command()
def reference() -> None:
    """Print the reference of all fields as Markdown: docs/config.md."""
    print(reference_markdown(), end="")
