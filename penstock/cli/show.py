"""`penstock config show`: a run in full, and what the model that it describes weighs and costs."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from penstock.base.errors import PenstockError
from penstock.base.numbers import count_text, flops_text
from penstock.cli.config import Json, Target
from penstock.config.load import dump_toml, load_run
from penstock.config.run import Run
from penstock.config.size import Count, size_of


def show(
    target: Target,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Overrides.")] = None,
    as_json: Json = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print the file alone, without the counts below it.")] = False,
) -> None:
    """Print a run in full, with its parameters and FLOPs per token. The output is a TOML file that can be trained."""
    if as_json and as_toml:
        raise PenstockError("--json and --toml are two forms of one answer", fix="leave one of them out")
    run = load_run(target, overrides or ())
    if as_toml:
        print(dump_toml(run), end="")
        return
    counted = size_of(run.model, run.training.sequence_length)
    if as_json:
        print(json.dumps({"run": run.model_dump(), "count": asdict(counted)}, indent=2))
    else:
        print(f"{dump_toml(run)}\n{_count_lines(run, counted)}")


def _count_lines(run: Run, counted: Count) -> str:
    """Comments in TOML, so that the output as a whole is a file."""
    length = run.training.sequence_length
    lines = [f"parameters  {count_text(counted.parameters)}"]
    if counted.mtp_parameters:
        lines += [f"prediction  {count_text(counted.mtp_parameters)} more, for multi-token prediction"]
    lines += [
        f"active      {count_text(counted.active_parameters)} parameters for each token",
        f"training    {flops_text(counted.flops_per_token)} for each token, at sequence length {length}",
    ]
    return "\n".join(f"# {line}" for line in lines)
