"""One HTML file that shows a plan: tables, pictures, and the script that draws them. It opens without a network.

    write_page(plan, Path("plan.html"))
    write_page(plan, Path("plan.html"), more=[scaling_figure(...), curves_figure(...)])

The file holds style (assets/page.css), pictures as JSON, Plotly compressed and assets/page.js, which draws the pictures
in the colours that the reader's system asks for. Nothing in it is fetched, and nothing is sent.
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from penstock.base.errors import PicturesError
from penstock.plan.projection import Plan, Projection
from penstock.report.figure import THEMES, Figure, gigabytes, plotly_json, time_text
from penstock.report.plotly_script import packed_plotly
from penstock.report.stacks import memory_figure, time_figure
from penstock.report.tables import candidates_table, refusals_table
from penstock.report.timeline import Shares, planned, timeline_figure

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
            stages = f"{schedule.ranks} ranks x {schedule.stages_per_rank}"
            title = f"Pipeline of layout {place}: {schedule.name}, {stages}, {schedule.micro_batches} micro-batches"
            figures.append(timeline_figure(f"timeline-{place}", title, [planned(schedule, playback, _shares(one))]))
    return figures


def _shares(projection: Projection) -> Shares:
    """What stages hold of a micro-batch, in GB."""
    return Shares(activation=tuple(kept / 1e9 for kept in projection.time.kept_bytes), unit="GB")


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
    # Pictures stand in two columns; refusals fill the place that an odd number leaves.
    refused = '<section class="wide">' if len(narrow) % 2 == 0 else "<section>"
    fit = sum(one.fits for one in plan.candidates)
    where = f"{plan.cluster.devices:,} x {plan.cluster.hardware.name}"
    shown = f"{len(plan.candidates):,} shown" if fit else "none of those shown fits"
    body = f"""
<header>
<h1>{escape(plan.model)} <span class="faint">on {escape(where)}</span></h1>
<p class="faint">{plan.considered:,} layouts looked at, {shown}. Projected, not measured.</p>
{_key_figures(plan.candidates[0]) if plan.candidates else ""}
</header>
<main>
<section class="wide"><h2>Candidates</h2>{_scrolling(candidates_table(plan)) if plan.candidates else _NOTHING}</section>
{"".join(_section(figure) for figure in [*narrow[:2], *wide, *narrow[2:]])}
{refused}<h2>Refused</h2>{_scrolling(refusals_table(plan.refused))}</section>
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


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        PicturesError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        raise PicturesError("the file cannot be written", got=f"{path}: {error.strerror}") from error


def document(title: str, body: str, figures: Sequence[Figure], script: str = "page.js") -> str:
    """A whole HTML document with its style, pictures and scripts.

    Args:
        title: of the window.
        body: HTML, in which a picture has an element `<div class="figure" id=NAME>`.
        figures: pictures; names differ.
        script: file of assets that draws them.

    Raises:
        PicturesError: Plotly is not installed.
    """
    names = [figure.name for figure in figures]
    assert len(set(names)) == len(names), f"pictures have the same name: {names}"
    pictures = {"themes": THEMES, "figures": {figure.name: plotly_json(figure) for figure in figures}}
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{asset("page.css")}</style>
<body>
{body}
<script type="application/json" id="pictures">{as_script(pictures)}</script>
<script type="text/plain" id="plotly">{packed_plotly()}</script>
<script>
{asset("draw.js")}{asset(script)}</script>
</body>
</html>
"""


def as_script(value: Mapping[str, Any]) -> str:
    """A value as JSON that can stand in a script element."""
    # In JSON `<` stands only within texts, where its escape means the same; `</script>` would end the element.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


@cache
def asset(name: str) -> str:
    """A file of assets/."""
    return (files("penstock.report") / "assets" / name).read_text(encoding="utf-8")


def _scrolling(table: str) -> str:
    return f'<div class="scroll">{table}</div>'


def _section(figure: Figure) -> str:
    """A picture with its words."""
    width = ' class="wide"' if figure.is_wide else ""
    hint = " Drag to zoom, double-click to see all again." if figure.is_wide else ""
    return f"""<section{width}>{_SAVE}<h2>{escape(figure.title)}</h2><p class="faint">{escape(figure.caption)}{hint}</p>
<div class="figure" id="{escape(figure.name)}" style="min-height:{figure.height}px"></div></section>
"""


_SAVE = '<div class="save"><button value="svg">SVG</button> <button value="png">PNG</button></div>'


def _key_figures(best: Projection) -> str:
    """What is read first of the first candidate."""
    time = best.time
    facts = {
        "fastest" if best.fits else "asked for": str(best.layout),
        "step": time_text(time.step_seconds),
        "tokens/s/device": f"{time.tokens_per_second_per_device:,.0f}",
        "MFU": f"{time.model_flops_utilization:.1%}",
        "bubble": f"{time.bubble:.1%}",
        "memory": f"{gigabytes(best.memory.total)} of {gigabytes(best.capacity_bytes)}",
    }
    over = "" if best.fits else ' class="over"'
    cells = (
        f"<div><dt>{name}</dt><dd{over if name == 'memory' else ''}>{escape(text)}</dd></div>"
        for name, text in facts.items()
    )
    return f"<dl>{''.join(cells)}</dl>"
