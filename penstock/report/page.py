"""One HTML file that shows a plan: tables, pictures, and the script that draws them. It opens without a network.

    write_page(plan, Path("plan.html"))
    write_page(plan, Path("plan.html"), more=[scaling_figure(...), curves_figure(...)])

What makes it one file stands in penstock/report/frame.py.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from penstock.plan.projection import Plan
from penstock.report.figure import Figure, counted, gigabytes, share_text, time_text
from penstock.report.frame import card, document, key_figures, write_whole
from penstock.report.stacks import memory_figure, time_figure
from penstock.report.tables import candidates_table, refusals_table
from penstock.report.timeline import planned, shares_of, timeline_figure

BARS = 12
"""Layouts of a picture at most."""

TIMELINES = 1
"""Pipelines that are drawn unless more are asked for: each adds up to 1 MB."""


def plan_figures(plan: Plan, timelines: int = TIMELINES) -> list[Figure]:
    """The pictures that every plan has: memory, step time, and the pipeline of the fastest candidates.

    Args:
        plan: what was found; without candidates there is nothing to draw.
        timelines: how many candidates' pipelines.
    """
    if not plan.candidates:
        return []
    shown = plan.candidates[:BARS]
    figures = [memory_figure(shown), time_figure(shown)]
    for place, one in enumerate(shown[:timelines], start=1):
        schedule, playback = one.time.schedule, one.time.playback
        if schedule is not None and playback is not None:
            stages = f"{schedule.ranks} ranks x {counted(schedule.stages_per_rank, 'stage')}"
            parts = "1 micro-batch" if schedule.micro_batches == 1 else f"{schedule.micro_batches:,} micro-batches"
            title = f"Pipeline of layout {place}: {schedule.name}, {stages}, {parts}"
            figures.append(timeline_figure(f"timeline-{place}", title, [planned(schedule, playback, shares_of(one))]))
    return figures


def page(plan: Plan, *, more: Sequence[Figure] = (), timelines: int = TIMELINES) -> str:
    """The page of a plan.

    Args:
        plan: what was found.
        more: pictures behind the plan's own: curves of what-ifs, projections beside measurements.
        timelines: candidates whose pipelines are drawn.

    Raises:
        PicturesError: Plotly is not installed.
    """
    figures = [*plan_figures(plan, timelines), *more]
    wide, narrow = [one for one in figures if one.is_wide], [one for one in figures if not one.is_wide]
    fit = sum(one.fits for one in plan.candidates)
    where = f"{plan.cluster.devices:,} x {plan.cluster.hardware.name}"
    shown = f"{len(plan.candidates):,} shown" if fit else "none of those shown fits"
    found = candidates_table(plan) if plan.candidates else _NOTHING
    # Pictures stand in two columns; refusals fill the place that an odd number leaves.
    width = ' class="wide"' if len(narrow) % 2 == 0 else ""
    refused = f"<section{width}><h2>Refused</h2>{refusals_table(plan.refused)}</section>" if plan.refused else ""
    alone = {narrow[-1].name} if len(narrow) % 2 and not refused else set()
    body = f"""
<header>
<h1>{escape(plan.model)} <span class="faint">on {escape(where)}</span></h1>
<p class="faint">{counted(plan.considered, "layout")} looked at, {shown}. Projected, not measured.</p>
{_key_figures(plan) if plan.candidates else ""}
</header>
<main>
<section class="wide"><h2>Candidates</h2>{found}</section>
{"".join(card(one, is_wide=one.name in alone) for one in [*narrow[:2], *wide, *narrow[2:]])}
{refused}
</main>"""
    return document(f"{plan.model} on {where}", body, figures)


_NOTHING = "<p>No layout fits. The table of refusals says what is in the way.</p>"


def write_page(plan: Plan, path: Path, *, more: Sequence[Figure] = (), timelines: int = TIMELINES) -> None:
    """Write the page of a plan. See `page`.

    Args:
        plan: what was found.
        path: of the file; one that is there is replaced.
        more: see `page`.
        timelines: see `page`.

    Raises:
        PicturesError: Plotly is not installed, or the file cannot be written.
    """
    write_whole(path, page(plan, more=more, timelines=timelines).encode())


def _key_figures(plan: Plan) -> str:
    """What is read first of the first candidate."""
    best = plan.candidates[0]
    time = best.time
    is_search = plan.considered > len(plan.candidates)
    facts = {
        "fastest" if best.fits and is_search else "asked for": str(best.layout),
        "time": f"{time_text(time.step_seconds)} per step",
        "speed": f"{time.tokens_per_second_per_device:,.0f} {plan.cluster.speed_unit}",
        "MFU": share_text(time.model_flops_utilization),
        "bubble": share_text(time.bubble),
        "memory": f"{gigabytes(best.memory.total)} of {gigabytes(best.capacity_bytes)}",
    }
    return key_figures(facts, over="" if best.fits else "memory")
