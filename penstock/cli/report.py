"""`penstock report`: one HTML page of a run, with what it did beside what was planned. It opens without a network.

    penstock report runs/first                   writes runs/first/report.html
    penstock report runs/first --html first.html
    penstock report runs/first --on 8xH200       where neither traces nor starts say what it ran on
    penstock report traces/ --html traces.html   traces of any program; less is known
    penstock report old/ --diff new/ --html d.html   two recordings: a step of each, and what changed

docs/report.md says what is in it. The page is made by penstock/report/run_page.py; here only files are settled.
"""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.base.errors import PenstockError, did_you_mean_path
from penstock.cli.plan_request import check_file
from penstock.cli.trace_verbs import one_rank, warnings_of
from penstock.cli.verbs import Names, On
from penstock.report.run_evidence import gather
from penstock.report.run_page import write_diff_page, write_run_page
from penstock.trace.analysis import analyse_traces
from penstock.trace.compare import compare, named_events
from penstock.trace.recognize import read_phase_names

PAGE, DIFF_PAGE = "report.html", "diff.html"  # names of the pages in the folder of the run

Place = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a run; or traces: a file, a folder of ranks.")
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Where to; else report.html or diff.html in RUN.")
]
Diff = Annotated[Path | None, typer.Option("--diff", metavar="OTHER", help="A page of this recording beside OTHER.")]
NoPlan = Annotated[bool, typer.Option("--no-plan", help="Do not project the run.")]


def report(
    path: Place, html: Html = None, diff: Diff = None, on: On = None, names: Names = None, no_plan: NoPlan = False
) -> None:
    """Write one HTML page of a run: verdict, curves, goodput, memory, timeline, flame, roofline, ranks, experts."""
    if not path.exists():
        raise PenstockError(
            f"there is no {path}", allowed="the folder of a run, or traces", fix=did_you_mean_path(path)
        )
    if html is None and not path.is_dir():
        raise PenstockError(f"{path} is a file, so the page needs a place", fix="--html report.html")
    target = path / (PAGE if diff is None else DIFF_PAGE) if html is None else html
    check_file(target, "--html")  # before anything is read
    if on is not None and no_plan:
        raise PenstockError("--on says what to plan for, and --no-plan plans nothing", fix="leave one of them out")
    mapped = None if names is None else read_phase_names(names)
    if diff is not None and (on is not None or no_plan):
        raise PenstockError("--diff is of recordings alone", fix="leave --on and --no-plan out")
    with Console(stderr=True).status("reading"):  # nothing is drawn without a terminal
        if diff is not None:
            traces = one_rank(path, None, names=mapped), one_rank(diff, None, names=mapped)
            answers = [analyse_traces({trace.rank or 0: trace}) for trace in traces]
            compared = compare(*map(named_events, traces))
            write_diff_page(target, (str(path), str(diff)), answers, compared, warnings_of(traces, compared))
        else:
            write_run_page(gather(path, on=on, plans=not no_plan, names=mapped), target)
    print(f"written to {target}", file=sys.stderr)
    print(f"next:  python -m webbrowser {shlex.quote(str(target))}", file=sys.stderr)
