"""`penstock trace`: where the time of a step went, from what a profiler has recorded.

    penstock trace rank0.json.gz                one file, of any program that PyTorch's profiler has recorded
    penstock trace traces/                      a folder with a file for each rank
    penstock trace runs/first --step 12         what a run of ours has recorded, one step of it
    penstock trace runs/first --json            the same for programs
    penstock trace traces/ --csv sheets         the same for spreadsheets, a file for each table
    penstock trace traces/ --names mine.toml    with phases for kernels that only their author knows
    penstock trace diff A B                     what became faster and slower
    penstock trace replay PATH --op NAME        a script that runs one operator again

A first word that is no verb is a path; a file with the name of a verb is `./diff`. This file parses the command line;
penstock/trace/analysis.py computes the tables, and penstock/cli/trace_print.py prints them. None of them imports
PyTorch, so the answer for a small file takes less time than the import would.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.base.errors import TraceError, did_you_mean
from penstock.cli.output import print_next
from penstock.cli.trace_print import print_answer
from penstock.cli.verbs import Json, Names, Verb, group_of, load_by_name
from penstock.trace.analysis import analyse_files, analysis_json, write_sheets
from penstock.trace.recognize import read_phase_names

READ, READ_ALL = "PATH", "PATHS"  # names of the verb if none is typed: the second if only paths and flags follow
JSON, LAYERS = "--json", "--layers"
RUN_FILE = "config.toml"  # in the folder of a run; `penstock.config.load` has it too, but its import takes long

VERBS = (
    Verb("diff", "penstock.cli.trace_verbs", "diff", "What became faster and slower from one trace to another."),
    Verb("replay", "penstock.cli.trace_verbs", "replay", "Write a script that runs one operator of a trace again."),
)

Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Files (.json, .json.gz), a folder of ranks, or a run.")
]
Rank = Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Only the tables of this rank.")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="Only this step, by its number.")]
Layers = Annotated[bool, typer.Option(LAYERS, help="Phases by layer.")]
Csv = Annotated[
    Path | None, typer.Option("--csv", metavar="DIR", help="Write each table as a CSV file into a new folder.")
]

_Verbs: Any = group_of(*VERBS)


class _PathsOrVerb(_Verbs):
    """A group that takes a first word that is not a verb as a path."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Insert the verb."""
        if args and args[0] in self.commands:
            return super().parse_args(ctx, args)
        if args and not Path(args[0]).exists() and (fix := did_you_mean(args[0], [verb.name for verb in VERBS])):
            raise TraceError(f"there is no {args[0]}, and no verb of this name", fix=fix)
        options = {word for word in args if word.startswith("-")}
        # typer checks values of options with pydantic, whose import takes as long as to answer for a small trace. So a
        # call with flags only has a verb without such options.
        is_plain = options <= {JSON, LAYERS} and len(options) < len(args)
        return super().parse_args(ctx, [READ_ALL if is_plain else READ, *args])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Leave an inserted verb out of the usage line."""
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name in (READ, READ_ALL) else name, command, rest  # usage says `penstock trace PATH...`


app = typer.Typer(cls=_PathsOrVerb, add_completion=False)


@app.callback()
def trace() -> None:
    """Show where the time of a step went."""


@app.command(READ, hidden=True)
def read(
    paths: Paths,
    as_json: Json = False,
    rank: Rank = None,
    step: Step = None,
    layers: Layers = False,
    names: Names = None,
    csv: Csv = None,
) -> None:
    """Show where the time of a step went.

    Two more verbs: penstock trace diff A B, and penstock trace replay PATH --op NAME.
    """
    mapped = None if names is None else read_phase_names(names)
    try:
        answer = analyse_files(paths, step=step, rank=rank, names=mapped)
    except TraceError as error:
        if "holds no trace" in error.what and (paths[0] / RUN_FILE).is_file():
            # By name, because it imports pydantic.
            command = load_by_name("penstock.tune.doctor.run_facts", "recording_command")(paths[0])
            raise TraceError(error.what, fix=f"record some steps: {command}") from error
        raise
    if csv is not None:
        write_sheets(answer, csv)
        print(f"wrote {csv}", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(analysis_json(answer), allow_nan=False))
    elif csv is None:
        print_answer(answer, by_layer=layers)
        print_next("doctor", *paths)


@app.command(READ_ALL, hidden=True, context_settings={"allow_extra_args": True})
def read_all(context: typer.Context, as_json: Json = False, layers: Layers = False) -> None:
    """The same for a call with flags only."""
    read([Path(word) for word in context.args], as_json=as_json, layers=layers)
