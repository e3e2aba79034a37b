"""The verbs of `penstock trace`: `diff A B`, whose changes add up to the whole, and `replay PATH --op NAME`."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.base.errors import TraceError
from penstock.base.numbers import counted, shortened
from penstock.cli.output import check_output, print_next, print_or_write, print_table
from penstock.cli.verbs import Force, Names
from penstock.trace.compare import TITLES, ComparedRow, TraceComparison, compare, named_events
from penstock.trace.events import Trace
from penstock.trace.load import load_ranks
from penstock.trace.recognize import PhaseNames, read_phase_names
from penstock.trace.replay import replay_script

LONGEST_NAME = 60  # characters of an operator or shape


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A file, a folder of ranks, or the folder of a run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What to compare with it.")],
    rank: Annotated[int | None, typer.Option("--rank", help="Which rank of several; else the lowest.")] = None,
    names: Names = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Lines of each table.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print every row as JSON.")] = False,
) -> None:
    """Compare two traces of one rank: matched by span, then by operator and shape; medians over steps."""
    mapped = None if names is None else read_phase_names(names)
    traces = [one_rank(path, rank, names=mapped) for path in (a, b)]
    compared = compare(*map(named_events, traces))
    if as_json:
        print(json.dumps(as_tree(compared)))
    else:
        for warning in warnings_of(traces, compared):
            print(warning)
        _print(compared, top)
        print_next("doctor", b)


def one_rank(path: Path, rank: int | None, *, names: PhaseNames | None = None) -> Trace:
    """The trace of a rank, or of the lowest one. Raises a TraceError if there is no such rank."""
    traces = load_ranks(path, names=names)
    if rank is not None and rank not in traces:
        raise TraceError(f"{path} has no trace of this rank", got=rank, allowed=", ".join(map(str, traces)))
    return traces[next(iter(traces)) if rank is None else rank]


def warnings_of(traces: Sequence[Trace], compared: TraceComparison) -> list[str]:
    """What two traces that are compared should share and do not."""
    origins = zip(*map(_origin, traces), strict=True)
    lines = [f"warning: A is of {a}, B of {b}" for a, b in origins if a != b]
    shaped = [row for row in compared.rows if row.key.shape and "shapes" not in row.key.shape]
    other = [row for row in shaped if " -> " in row.key.shape]  # the largest change first
    if 2 * sum(row.a.time_us for row in other) > sum(row.a.time_us for row in shaped):
        which = f"{other[0].key.operator} {shortened(other[0].key.shape, LONGEST_NAME)}"
        lines.append(f"warning: most operators have other sizes in B (batch, sequence or model), such as {which}")
    return lines


def _origin(trace: Trace) -> tuple[str, str, str]:
    """Device, rank and number of ranks, which two traces should share to be compared."""
    device = "a CPU" if trace.is_host else trace.device_name or "an unknown device"
    return device, f"rank {trace.rank}", "an unknown number of ranks" if trace.world is None else f"{trace.world} ranks"


def as_tree(compared: TraceComparison) -> dict[str, Any]:
    """A comparison as JSON. The `change_us` of all rows add up to the change of the whole, exactly."""
    return {
        "a": {"total_us": compared.a_us, "steps": compared.a_steps, "outside_steps_us": compared.a_outside_us},
        "b": {"total_us": compared.b_us, "steps": compared.b_steps, "outside_steps_us": compared.b_outside_us},
        "change_us": compared.change_us,
        "matched_by_span": compared.by_span,
        "rows": [
            {
                **row.key._asdict(),
                "verdict": row.verdict.value,
                "change_us": row.change_us,
                "clear": row.is_clear,
                "a": asdict(row.a),
                "b": asdict(row.b),
            }
            for row in compared.rows
        ],
    }


def _print(compared: TraceComparison, top: int) -> None:
    per = "in all"
    if compared.a_steps:
        per = f"for a step (medians of {compared.a_steps} and {compared.b_steps})"
    share = f", {compared.change_us / compared.a_us:+.1%}" if compared.a_us else ""
    times = f"A {compared.a_us / 1e3:,.3f} ms, B {compared.b_us / 1e3:,.3f} ms"
    print(f"{times} {per}: {compared.change_us / 1e3:+,.3f} ms{share}")
    if not compared.by_span:
        print("the traces share no phase: matched by operator and shape only")
    steps = compared.a_steps > 0  # a spread is known
    for name, outside_us in (("A", compared.a_outside_us), ("B", compared.b_outside_us)):
        if outside_us:
            print(f"{name}: {outside_us / 1e3:,.3f} ms of events belong to no step and are not compared")
    for kind, title in TITLES.items():
        if rows := compared.rows_of(kind):
            print(f"\n{title}: {sum(row.change_us for row in rows) / 1e3:+,.3f} ms in {counted(len(rows), 'row')}")
            _print_rows(rows[:top], steps)
    print("\nwhat is no event")
    _print_rows(compared.closing, steps)
    if steps:
        print("\n* every step of one trace took less than every step of the other")


def _print_rows(rows: Sequence[ComparedRow], steps: bool) -> None:
    """Print rows; a star marks a change larger than the spread of the steps."""
    print_table(
        ("change us", "A us", "B us", "events", "phase", "operator", "shape"),
        [
            (
                f"{row.change_us:+,.1f}{'*' if steps and row.is_clear else ''}",
                f"{row.a.time_us:,.1f}",
                f"{row.b.time_us:,.1f}",
                f"{row.a.events:g}" if row.a.events == row.b.events else f"{row.a.events:g} -> {row.b.events:g}",
                row.key.span,
                shortened(row.key.operator, LONGEST_NAME),
                shortened(row.key.shape, LONGEST_NAME),
            )
            for row in rows
        ],
        ("events", "phase", "A us", "B us"),
    )


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
