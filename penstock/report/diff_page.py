"""One HTML page of two recordings: a step of each above the other on one axis of time, and what changed between them.

The tables are those of `penstock trace diff`; their changes add up to the change of the step.
"""

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from penstock.base.numbers import counted, shortened
from penstock.report.figure import Figure
from penstock.report.frame import card, document, key_figures, table, write_whole
from penstock.report.run_evidence import StepClock, last_step, window_us
from penstock.report.run_timeline import measured_phases
from penstock.report.timeline import timeline_figure
from penstock.trace.analysis import RankAnalysis, TraceAnalysis
from penstock.trace.compare import TITLES, ComparedRow, TraceComparison

ROWS = 40  # of a table; the command prints and writes all
LONGEST = 80  # characters of an operator or a shape


def write_diff_page(
    path: Path,
    names: tuple[str, str],
    answers: Sequence[TraceAnalysis],
    compared: TraceComparison,
    warnings: Sequence[str] = (),
) -> None:
    """Write the page of two analyses of one rank each, A and B. Raises a PicturesError if it cannot be written."""
    a, b = names
    share = f", {compared.change_us / compared.a_us:+.1%}" if compared.a_us else ""
    facts = {"A": f"{compared.a_us / 1e3:,.3f} ms", "B": f"{compared.b_us / 1e3:,.3f} ms"}
    facts["change"] = f"{compared.change_us / 1e3:+,.3f} ms{share}"
    of_steps = "No step is marked: all that was recorded."
    if compared.a_steps:
        of_steps = f"Medians of {compared.a_steps} and {compared.b_steps} steps. "
        of_steps += "A star: every step of one was faster than every step of the other."
    figure = _timelines([answer.ranks[0] for answer in answers])
    tables = []
    for kind, title in TITLES.items():
        if rows := compared.rows_of(kind):
            sum_ms = sum(row.change_us for row in rows) / 1e3
            head = f"{title}: {sum_ms:+,.3f} ms in {counted(len(rows), 'row')}"
            tables.append(_table(head, rows[:ROWS], has_steps=compared.a_steps > 0))
    tables.append(_table("what is no event", compared.closing, has_steps=compared.a_steps > 0))
    body = f"""
<header><h1>{escape(a)} <span class="faint">A, beside B</span> {escape(b)}</h1>
<p class="faint">{of_steps}</p>
{"".join(f"<p>{escape(warning)}</p>" for warning in warnings)}{key_figures(facts)}</header>
<main>{card(figure, is_wide=True)}{"".join(tables)}</main>"""
    write_whole(path, document(f"{a} and {b}", body, [figure]).encode())


def _timelines(ranks: Sequence[RankAnalysis]) -> Figure:
    """The last step of each, from its own start."""
    timelines = []
    for name, rank in zip("AB", ranks, strict=True):
        window = window_us(rank, last_step([rank]))
        clock = StepClock(windows_us={rank.rank: window}, zero_us={rank.rank: window[0]}, words="")
        timelines.append(replace(measured_phases([rank], clock).timeline, name=name))
    figure = timeline_figure("timelines", "A step of each, on the device", timelines)
    return replace(figure, caption=figure.caption.replace("Passes:", "What kernels were for:"))


def _table(title: str, rows: Sequence[ComparedRow], *, has_steps: bool) -> str:
    columns = {"change": "", "A": "", "B": "", "events": "", "phase": "text", "operator": "reason", "shape": "reason"}
    cells = [
        (
            f"{row.change_us / 1e3:+,.3f}{'*' if has_steps and row.is_clear else ''}",
            f"{row.a.time_us / 1e3:,.3f}",
            f"{row.b.time_us / 1e3:,.3f}",
            f"{row.a.events:g}" if row.a.events == row.b.events else f"{row.a.events:g} \u2192 {row.b.events:g}",
            escape(row.key.span),
            escape(shortened(row.key.operator, LONGEST)),
            escape(shortened(row.key.shape, LONGEST)),
        )
        for row in rows
    ]
    head = f'<h2>{escape(title)}</h2><p class="faint">ms</p>'
    return f'<section class="wide">{head}{table(columns, cells)}</section>'
