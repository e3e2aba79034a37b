"""One HTML file that shows a plan: tables, figures, and the script that draws them. It opens without a network.

`write_page(plan, Path("plan.html"), more=[scaling_figure(...), curves_figure(...)])` adds figures of what-ifs.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from penstock.base.numbers import counted, gigabytes, share_text, time_text
from penstock.plan.asked_layout import differing_fields, field_label
from penstock.plan.layout_names import FOLLOW
from penstock.plan.projection import Plan, Projection, Refusal
from penstock.report.figure import Figure
from penstock.report.frame import card, document, key_figures, table, write_whole
from penstock.report.stacks import SIZES, memory_figure, time_figure
from penstock.report.timeline import activation_shares, planned, timeline_figure

BARS = 12  # largest number of layouts in a figure


def plan_figures(plan: Plan) -> list[Figure]:
    """The figures of every plan with candidates: memory, step time, and the pipeline of the fastest candidate."""
    if not plan.candidates:
        return []
    shown, fastest = plan.candidates[:BARS], plan.candidates[0]
    figures = [memory_figure(shown), time_figure(shown)]
    schedule, playback = fastest.time.schedule, fastest.time.playback
    if schedule is not None and playback is not None:  # one pipeline only: it can add 1 MB
        stages = f"{schedule.ranks} ranks x {counted(schedule.stages_per_rank, 'stage')}"
        parts = "1 micro-batch" if schedule.micro_batches == 1 else f"{schedule.micro_batches:,} micro-batches"
        title = f"Pipeline of layout 1: {schedule.name}, {stages}, {parts}"
        figures.append(timeline_figure("timeline-1", title, [planned(schedule, playback, activation_shares(fastest))]))
    return figures


def page(plan: Plan, *, more: Sequence[Figure] = (), grounds: Sequence[str] = ()) -> str:
    """The page of a plan; `more` are further figures (curves of what-ifs), `grounds` its assumptions, a line each."""
    figures = [*plan_figures(plan), *more]
    wide, narrow = (
        [figure for figure in figures if figure.is_wide],
        [figure for figure in figures if not figure.is_wide],
    )
    fit = sum(candidate.fits for candidate in plan.candidates)
    where = f"{plan.cluster.devices:,} x {plan.cluster.hardware.name}"
    shown = f"{len(plan.candidates):,} shown" if fit else "none of those shown fits"
    nothing = "<p>No layout fits. The table of refusals says what is in the way.</p>"
    candidates = candidates_table(plan) if plan.candidates else nothing
    # Figures are in two columns; refusals fill the gap of an odd number.
    width = ' class="wide"' if len(narrow) % 2 == 0 else ""
    refused = f"<section{width}><h2>Refused</h2>{refusals_table(plan.refused)}</section>" if plan.refused else ""
    alone = {narrow[-1].name} if len(narrow) % 2 and not refused else set()  # it takes both columns
    lines = "".join(f"<li>{escape(line)}</li>" for line in grounds)
    rests = f'<section class="wide"><h2>What it rests on</h2><ul>{lines}</ul></section>' if lines else ""
    body = f"""
<header>
<h1>{escape(plan.model)} <span class="faint">on {escape(where)}</span></h1>
<p class="faint">{counted(plan.considered, "layout")} looked at, {shown}. Projected, not measured.</p>
{_key_figures(plan) if plan.candidates else ""}
</header>
<main>
<section class="wide"><h2>Candidates</h2>{candidates}</section>
{"".join(card(figure, is_wide=figure.name in alone) for figure in [*narrow[:2], *wide, *narrow[2:]])}
{refused}
{rests}
</main>"""
    return document(f"{plan.model} on {where}", body, figures)


def write_page(plan: Plan, path: Path, *, more: Sequence[Figure] = (), grounds: Sequence[str] = ()) -> None:
    """Write the page of a plan, see `page`, in place of an existing file."""
    write_whole(path, page(plan, more=more, grounds=grounds).encode())


def _key_figures(plan: Plan) -> str:
    best = plan.candidates[0]
    time = best.time
    is_search = plan.considered > len(plan.candidates)  # else the layouts were asked for
    facts = {
        "fastest" if best.fits and is_search else "asked for": str(best.layout),
        "time": f"{time_text(time.step_seconds)} per step",
        "speed": f"{time.tokens_per_second_per_device:,.0f} {plan.cluster.speed_unit}",
        "MFU": share_text(time.model_flops_utilization),
        "bubble": share_text(time.bubble),
        "memory": f"{gigabytes(best.memory.total)} of {gigabytes(best.capacity_bytes)}",
    }
    return key_figures(facts, over="" if best.fits else "memory")


# --------------------------------------------------------------------------------------------------------------- tables

REFUSALS_SHOWN = 12  # further refusals are folded away


def candidates_table(plan: Plan) -> str:
    """The candidates, fastest first: a column for each field in which they differ, and a line of common fields."""
    differing = differing_fields(plan.candidates)
    # Columns of words are aligned to the left, those of numbers to the right.
    columns = {"": ""} | {
        escape(field_label(name)): "" if all(text.isdecimal() for text in texts) else "text"
        for name, texts in differing.items()
    }
    columns |= {"memory": "memory"}
    columns |= dict.fromkeys(("step", plan.cluster.speed_unit, "MFU", "bubble", "exposed communication"), "")
    rows = [
        (f"{index + 1}", *(escape(texts[index]) for texts in differing.values()), *_results(candidate))
        for index, candidate in enumerate(plan.candidates)
    ]
    shared = f'<p class="faint">{escape(_shared_text(plan.candidates, differing))}</p>'
    return table(columns, rows, name="candidates") + shared


def _shared_text(candidates: Sequence[Projection], differing: Container[str]) -> str:
    """The common fields of all candidates, without sizes of 1."""
    shared = {name: value for name, value in asdict(candidates[0].layout).items() if name not in differing}
    settings = [
        f"{field_label(name)} {value}"
        for name, value in shared.items()
        if not (name in SIZES and value == 1) and name not in FOLLOW
    ]
    ranks = f"DP {shared['dp']}" if "dp" in shared else ""
    return f"{'All' if len(candidates) > 1 else 'With'}: {', '.join(part for part in [*settings, ranks] if part)}."


def _results(projection: Projection) -> list[str]:
    time = projection.time
    # Memory of the fullest rank, with a bar of its share of the device.
    share = min(projection.memory.total / projection.capacity_bytes, 1.0)
    state = "fits" if projection.fits else "over"
    title = f"{projection.memory.total / projection.capacity_bytes:.1%} of {projection.capacity_bytes / 1e9:.0f} GB"
    bar = f'<i class="bar {state}"><i style="width:{share:.1%}"></i></i>'
    return [
        f'{bar}<span title="{title}">{projection.memory.total / 1e9:.1f} GB</span>',
        time_text(time.step_seconds),
        f"<b>{time.tokens_per_second_per_device:,.0f}</b>",
        share_text(time.model_flops_utilization),
        share_text(time.bubble),
        time_text(time.exposed_communication_seconds),
    ]


def refusals_table(refusals: Sequence[Refusal]) -> str:
    """Refused layouts; refusals that cover the most layouts first, the rest folded away."""
    ordered = sorted(refusals, key=lambda refusal: -refusal.count)
    columns = {"layouts": "", "rule": "text", "such as": "text", "why": "reason"}
    rows = [
        (f"{row.count:,}", f"<code>{escape(row.rule)}</code>", escape(_layout_text(row.layout)), escape(row.reason))
        for row in ordered
    ]
    shown = table(columns, rows[:REFUSALS_SHOWN], name="refusals")
    if len(rows) <= REFUSALS_SHOWN:
        return shown
    layouts = sum(refusal.count for refusal in ordered[REFUSALS_SHOWN:])
    summary = f"<summary>{len(rows) - REFUSALS_SHOWN} more, of {layouts:,} layouts</summary>"
    return f"{shown}<details>{summary}{table(columns, rows[REFUSALS_SHOWN:], name='refusals')}</details>"


def _layout_text(layout: Mapping[str, Any]) -> str:
    """The settled fields of a refused layout: sizes above 1, then words."""
    sizes = [f"{name.upper()}{layout[name]}" for name in SIZES if layout.get(name) not in (None, 1)]
    settings = [str(layout[name]) for name in ("schedule", "dispatcher") if layout.get(name) not in (None, "none")]
    if layout.get("micro_batch") is not None:
        settings.append(f"mb {layout['micro_batch']}")
    if layout.get("recompute") not in (None, "none"):
        settings.append(f"recompute {layout['recompute']}")
    return ", ".join(part for part in (" ".join(sizes), *settings) if part)
