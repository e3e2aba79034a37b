"""One HTML file that shows a plan: tables, figures, and the script that draws them. It opens without a network.

`write_page(plan, Path("plan.html"), more=[scaling_figure(...), curves_figure(...)])` adds figures of what-ifs
(penstock/plan/what_if.py); a question without an answer leaves a gap in its curve.

`write_images` writes figures as PNG or SVG, by a headless Chromium with the code that draws the page. Plotly's own
exporter (kaleido) needs such a browser too, so the browser is called directly: it opens a document that turns its
figures into image data inside the document, and prints the resulting document.
"""

import re
import subprocess
from base64 import b64decode
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape, unescape
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from penstock.base.errors import PicturesError
from penstock.base.numbers import counted, gigabytes, rounded, share_text, time_text
from penstock.plan.asked_layout import differing_fields, field_label
from penstock.plan.layout_names import FOLLOW
from penstock.plan.projection import Plan, Projection, Refusal
from penstock.plan.what_if import SweepPoint
from penstock.report.figure import SERIES, Figure, axis
from penstock.report.frame import as_script, card, document, find_browser, key_figures, table, write_whole
from penstock.report.stacks import SIZES, memory_figure, time_figure
from penstock.report.timeline import activation_shares, planned, timeline_figure
from penstock.train.run_folder import temporary_folder


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]  # None where there is no value, for instance because nothing fits
    notes: Sequence[str] = ()  # shown on hover, one for each point; can be empty


def curves_figure(name: str, title: str, caption: str, curves: Sequence[Curve], *, x: str, y: str) -> Figure:
    """Curves of a sweep: context length, micro-batch, expert parallelism by dispatcher."""
    data = [_line(curve, SERIES[index % len(SERIES)], x, y) for index, curve in enumerate(curves)]
    layout = {
        "xaxis": _x_axis(x, curves),
        "yaxis": axis(y, rangemode="tozero", tickformat=","),  # an axis from 0 shows ratios
        "hovermode": "closest",
        "showlegend": len(curves) > 1,
    }
    return Figure(name=name, title=title, caption=caption, data=data, layout=layout)


def scaling_figure(
    name: str, title: str, caption: str, curves: Sequence[Curve], unit: str = "tokens/s/device"
) -> Figure:
    """Tokens per second of a device over devices, and below it over that at the fewest devices that a run fits on.

    A curve is of `weak` scaling (the batch grows with the devices), of `strong` scaling, or published.
    """
    data: list[dict[str, Any]] = []
    for index, speed in enumerate(curves):
        colour, first = SERIES[index % len(SERIES)], next((y for y in speed.ys if y is not None), 1.0)
        data.append(_line(speed, colour, "devices", unit))
        efficiency = replace(speed, ys=[None if y is None else y / first for y in speed.ys])
        # The name is in the legend once, with the speed.
        data.append(_line(efficiency, colour, "devices", "efficiency", ":.1%") | {"yaxis": "y2", "showlegend": False})
    layout = {
        "xaxis": _x_axis("devices", curves) | {"anchor": "y2"},
        "yaxis": axis(unit, rangemode="tozero", domain=[0.52, 1], tickformat=","),
        "yaxis2": axis("efficiency", rangemode="tozero", domain=[0, 0.42], tickformat=".0%"),
        "hovermode": "closest",
    }
    return Figure(name=name, title=title, caption=caption, data=data, layout=layout, height=460)


def _x_axis(label: str, curves: Sequence[Curve]) -> dict[str, Any]:
    """The lower axis; few points get a tick each."""
    ticks = sorted({float(x) for curve in curves for x in curve.xs})
    few = {"tickvals": ticks, "ticktext": [f"{tick:,.6g}" for tick in ticks]} if len(ticks) <= 12 else {}
    return axis(label, tickformat=",", type="log", **few)


def _line(curve: Curve, colour: str, x: str, y: str, shape: str = ":,.4~g") -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": curve.name,
        "x": list(curve.xs),
        "y": [None if value is None else rounded(value) for value in curve.ys],
        "text": [f"<br>{note}" for note in curve.notes] or [""] * len(curve.xs),
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 7},
        "hovertemplate": f"<b>%{{fullData.name}}</b><br>{x}: %{{x:,}}<br>{y}: %{{y{shape}}}%{{text}}<extra></extra>",
    }


def scaling_pictures(kinds: Mapping[str, Sequence[SweepPoint]], base: Projection) -> list[Figure]:
    """Speed and efficiency over devices, by the points of `strong` and of `weak` scaling; `base` has their layout."""
    curves = [
        Curve(name=kind, xs=[int(point.asked["devices"]) for point in points], ys=list(map(_point_speed, points)))
        for kind, points in kinds.items()
    ]
    caption = f"{base.run.name} on {base.cluster.hardware.name}, {base.layout}. Projected."
    return [scaling_figure("scaling", "Scaling", caption, curves, base.cluster.speed_unit)]


def sweep_pictures(points: Sequence[SweepPoint], base: Projection, *, is_search: bool = False) -> list[Figure]:
    """Speed, and memory of the fullest rank, over the swept value, a curve for each dispatcher; memory by component.

    `points` are from `penstock.plan.what_if.sweep`; values that are not numbers give no curves. `base` is the
    projection that the runs differ from; with `is_search` each point is the fastest layout of its value.
    """
    name = next((name for point in points for name in point.asked if name != "dispatcher"), "")
    bars = _memory_by_component(points, name)
    if not points or not all(point.asked[name].isdecimal() for point in points):
        return bars
    groups: dict[str, list[SweepPoint]] = {}  # by dispatcher
    for point in points:
        curve = "fastest layout" if is_search else point.asked.get("dispatcher", base.layout.dispatcher)
        groups.setdefault(curve, []).append(point)
    label = name.rpartition(".")[2].replace("_", " ")
    layout = "the fastest layout of each" if is_search else f"{base.layout}"
    caption = f"{base.run.name} on {base.cluster.devices:,} x {base.cluster.hardware.name}, {layout}. Projected."
    figures = []
    for what, unit, value_of in (
        ("speed", base.cluster.speed_unit, _point_speed),
        ("memory", "memory of the fullest rank (GB)", _point_memory_gb),
    ):
        curves = [
            Curve(
                name=dispatcher,
                xs=[float(point.asked[name]) for point in group],
                ys=[value_of(point) for point in group],
                notes=[_point_note(point) for point in group],
            )
            for dispatcher, group in groups.items()
        ]
        title = f"{what.capitalize()} over {label}"
        figures.append(curves_figure(f"sweep-{what}", title, caption, curves, x=label, y=unit))
    return figures + bars


def _memory_by_component(points: Sequence[SweepPoint], name: str) -> list[Figure]:
    """A bar for each point with a projection; none if there is no such point."""
    answers = {
        f"{number} \u00b7 {', '.join(point.asked.values())}": point.answer
        for number, point in enumerate(points, start=1)
        if isinstance(point.answer, Projection)
    }
    if not answers:
        return []
    title = f"Memory by component, over {name.rpartition('.')[2].replace('_', ' ')}"
    return [replace(memory_figure([*answers.values()], [*answers]), name="sweep-components", title=title)]


def _point_speed(point: SweepPoint) -> float | None:
    return point.answer.time.tokens_per_second_per_device if isinstance(point.answer, Projection) else None


def _point_memory_gb(point: SweepPoint) -> float | None:
    return point.answer.memory.total / 1e9 if isinstance(point.answer, Projection) else None


def _point_note(point: SweepPoint) -> str:
    run = point.answer
    if not isinstance(run, Projection):
        return run.rule
    return f"step {time_text(run.time.step_seconds)}, {gigabytes(run.memory.total)}{'' if run.fits else ': too much'}"


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


WIDTH_PIXELS = 1000
PATIENCE_SECONDS = 60.0  # time limit for drawing; a timeline of 8,192 passes takes 3 s

_IMAGE = re.compile(
    r'id="(?P<name>[^"]+)"[^>]*? data-image="data:image/(?:png|svg\+xml)(?P<packed>;base64)?,(?P<data>[^"]*)"'
)
_TROUBLE = re.compile(r'data-trouble="(?P<text>[^"]*)"')


def write_images(figures: Sequence[Figure], folder: Path, *, kind: Literal["png", "svg"] = "svg") -> list[Path]:
    """Write each figure to a file of its name, in light colours.

    Raises a PicturesError if there is no browser or no Plotly, or if the browser did not draw.
    """
    browser = find_browser()
    texts = {figure.name: [escape(figure.title), escape(figure.caption)] for figure in figures}
    scale = 2 if kind == "png" else 1  # device pixels per pixel
    export = {"theme": "light", "format": kind, "width": WIDTH_PIXELS, "scale": scale, "words": texts}
    # An empty box for each figure: export.js draws into it and leaves the image in its attribute `data-image`.
    boxes = "".join(f'<div class="figure" id="{escape(figure.name)}"></div>' for figure in figures)
    body = f'{boxes}<script type="application/json" id="export">{as_script(export)}</script>'
    drawn = open_in_browser(browser, document("export", body, figures, script="export.js"))
    images = {  # PNG is in base64, SVG is percent-encoded text
        unescape(match["name"]): (b64decode(match["data"]) if match["packed"] else unquote(match["data"]).encode())
        for match in _IMAGE.finditer(drawn)
    }
    missing = [figure.name for figure in figures if figure.name not in images]
    if missing:
        trouble = _TROUBLE.search(drawn)
        raise PicturesError(
            f"{browser} did not draw {', '.join(missing)}", got=trouble["text"] if trouble else "no answer"
        )
    paths = [folder / f"{figure.name}.{kind}" for figure in figures]
    for figure, path in zip(figures, paths, strict=True):
        write_whole(path, images[figure.name])
    return paths


def write_image(plan: Plan, path: Path, *, more: Sequence[Figure] = ()) -> list[Path]:
    """Write each figure of a plan next to a path: `plan.svg` gives `plan-memory.svg`, `plan-step-time.svg`, ...

    `path` ends in .png or .svg; `more` are further figures. Raises as `write_images`, or if nothing fits.
    """
    figures = [replace(figure, name=f"{path.stem}-{figure.name}") for figure in (*plan_figures(plan), *more)]
    if not figures:
        raise PicturesError(f"no layout of {plan.model} fits, so there is nothing to draw", fix="see --explain refused")
    return write_images(figures, path.parent, kind="png" if path.suffix == ".png" else "svg")


def open_in_browser(browser: str, html: str, *options: str) -> str:
    """The HTML document after its scripts have run. Raises a PicturesError if the browser fails or takes too long."""
    with temporary_folder("pictures") as folder:
        path = folder / "document.html"
        path.write_text(html, encoding="utf-8")
        # No sandbox: the document is ours, and the sandbox needs rights that containers lack.
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
        # Virtual time lets scripts run to their end, up to 20 s on the page's clock, before the document is printed.
        command += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=20000", *options, path.as_uri()]
        try:
            result = subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS, check=True)
        except subprocess.TimeoutExpired as error:
            raise PicturesError(f"{browser} did not finish within {PATIENCE_SECONDS:.0f} s") from error
        except (OSError, subprocess.CalledProcessError) as error:
            raise PicturesError(f"{browser} failed", got=error) from error
    return result.stdout.decode()
