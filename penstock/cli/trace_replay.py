"""`penstock trace replay PATH --op NAME`: write a script that runs one operator of a trace again."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from penstock.base.errors import TraceError
from penstock.cli.options import Force
from penstock.cli.output import check_output, print_or_write
from penstock.cli.trace_diff import one_rank
from penstock.trace.replay import replay_script


def replay(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file, a folder of ranks, or the folder of a run.")],
    op: Annotated[str, typer.Option("--op", help="An operator, or a part of a kernel's name.")],
    shape: Annotated[
        str | None, typer.Option("--shape", help="Sizes, as `888x2880 2880x640`; else those that took most time.")
    ] = None,
    counts: Annotated[
        str | None,
        typer.Option("--counts", metavar="N,N,...", help="Rows of each expert; else as the trace has them, or even."),
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Which rank of several; else the lowest.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; else the script is printed.")] = None,
    force: Force = False,
) -> None:
    """Write a script that runs one call of a trace again, with its sizes, strides and dtypes, and times it."""
    if out is not None:
        check_output(out, "--out", force=force)
    try:
        given = None if counts is None else tuple(int(part) for part in counts.split(","))
    except ValueError:
        raise TraceError("--counts takes whole numbers", got=counts, allowed="3,0,5") from None
    trace = one_rank(path, rank)
    print_or_write(replay_script(trace, op, shape=shape, counts=given), out)
    if out is not None:
        print(f"next:  python {shlex.quote(str(out))}")
