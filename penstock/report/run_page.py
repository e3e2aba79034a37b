"""One HTML file that shows a run: what it did, what was planned, what stands in its way. It opens without a network.

    write_run_page(gather(Path("runs/first")), Path("runs/first/report.html"))

Ten parts, each from a file beside this one. A part without evidence is left out; the last card says what is missing,
and how to record it. What is too much for a page is thinned, and says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from penstock.report.figure import Figure
from penstock.report.frame import card, document, key_figures, write_whole
from penstock.report.run_curves import gradient_figure, loss_figure, speed_figure, step_figure
from penstock.report.run_evidence import RunEvidence, sentence
from penstock.report.run_experts import expert_pictures
from penstock.report.run_flame import flame_figure
from penstock.report.run_memory import memory_figure, memory_over_time
from penstock.report.run_ranks import rank_pictures
from penstock.report.run_roofline import roofline_figure
from penstock.report.run_tables import (
    config_html,
    environment_html,
    host_html,
    reasons,
    summary,
    verdict_html,
    where_text,
)
from penstock.report.run_timeline import timeline_pictures


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the page.

    Attributes:
        name: its anchor.
        title: its heading.
        figures: pictures.
        cards: HTML of other cards: title and content.
        missing: lines on what is not there.
    """

    name: str
    title: str
    figures: Sequence[Figure] = ()
    cards: Sequence[tuple[str, str]] = ()
    missing: Sequence[str] = ()


def parts_of(evidence: RunEvidence) -> list[Part]:
    """All parts, in their order."""
    return [make(evidence) for make in PARTS]


def _verdict(evidence: RunEvidence) -> Part:
    verdict = evidence.verdict
    cards = [("The doctor's verdict", verdict_html(verdict, evidence.judged))] if verdict is not None else []
    missing = [sentence(evidence.lacks.verdict)] if verdict is None else []
    if evidence.judged.host is not None:
        cards.append(("What the CPU did", host_html(evidence.judged.host)))
    return Part(name="verdict", title="Verdict", cards=cards, missing=missing)


def _loss(evidence: RunEvidence) -> Part:
    figures = [loss_figure(evidence.lines), gradient_figure(evidence.lines, evidence.run)]
    return _of_metrics(evidence, "loss", "Loss", figures)


def _speed(evidence: RunEvidence) -> Part:
    figures = [
        speed_figure(evidence.lines, evidence.projection, evidence.speed_unit),
        step_figure(evidence.lines, evidence.projection),
    ]
    return _of_metrics(evidence, "speed", "Speed", figures)


def _of_metrics(evidence: RunEvidence, name: str, title: str, figures: Sequence[Figure | None]) -> Part:
    found = [one for one in figures if one is not None]
    lack = sentence(evidence.lacks.steps or "the metrics say nothing of it")
    return Part(name=name, title=title, figures=found, missing=() if found else (lack,))


def _memory(evidence: RunEvidence) -> Part:
    bars, curve = memory_figure(evidence), memory_over_time(evidence)
    missing = []
    if evidence.projection is None:
        missing.append(sentence(evidence.lacks.plan))
    if curve is None:
        missing.append(_no_memory(evidence))
    found = [one for one in (bars, curve) if one is not None]
    return Part(name="memory", title="Memory", figures=found, missing=missing)


def _no_memory(evidence: RunEvidence) -> str:
    if evidence.is_host:
        return "Memory over a step is recorded of GPUs only."
    if not evidence.ranks:
        return sentence(evidence.lacks.trace)
    return "Memory over a step is not in the traces: record it with profile.memory=true."


def _timeline(evidence: RunEvidence) -> Part:
    figures, missing = timeline_pictures(evidence)
    return Part(name="timeline", title="Timeline", figures=figures, missing=missing)


def _flame(evidence: RunEvidence) -> Part:
    return _of_trace(evidence, "flame", "Flame", flame_figure(evidence))


def _roofline(evidence: RunEvidence) -> Part:
    if evidence.is_host:
        lack = "No roofline: the peaks of a CPU are not known, and its operators take part of their time in each other."
        return Part(name="roofline", title="Roofline", missing=(lack,))
    return _of_trace(evidence, "roofline", "Roofline", roofline_figure(evidence))


def _of_trace(evidence: RunEvidence, name: str, title: str, figure: Figure | None) -> Part:
    lack = sentence(evidence.lacks.trace or "no operator in the traces has shapes, so its work is not known")
    found = [figure] if figure is not None else []
    return Part(name=name, title=title, figures=found, missing=() if found else (lack,))


def _ranks(evidence: RunEvidence) -> Part:
    figures, missing = rank_pictures(evidence)
    return Part(name="ranks", title="Rank to rank", figures=figures, missing=missing)


def _experts(evidence: RunEvidence) -> Part:
    figures, missing = expert_pictures(evidence)
    return Part(name="experts", title="Experts", figures=figures, missing=missing)


def _setting(evidence: RunEvidence) -> Part:
    config = config_html(evidence.run) if evidence.run is not None else ""
    cards = [("Configuration", config), ("Environment", environment_html(evidence))]
    missing = []
    if not config:
        missing.append("The configuration is not known: no trace carries it.")
    if not evidence.starts:
        missing.append("No start is recorded (starts.jsonl), so neither the command nor versions are known.")
    shown = [(title, html) for title, html in cards if html]
    return Part(name="setting", title="Configuration and environment", cards=shown, missing=missing)


PARTS: tuple[Callable[[RunEvidence], Part], ...] = (
    _verdict, _loss, _speed, _memory, _timeline, _flame, _roofline, _ranks, _experts, _setting,
)  # fmt: skip


def _not_shown(parts: Sequence[Part]) -> Part:
    """What the parts lack, each reason once, with the parts that it holds for."""
    titles: dict[str, list[str]] = {}
    for part in parts:
        for line in filter(None, part.missing):
            titles.setdefault(line, []).append(part.title)
    rows = {line: ", ".join(dict.fromkeys(names)) for line, names in titles.items()}
    cards = [("What is missing, and why", reasons(rows))] if rows else []
    return Part(name="missing", title="Not shown", cards=cards)


def run_page(evidence: RunEvidence) -> str:
    """The page of a run.

    Args:
        evidence: of it.

    Raises:
        PicturesError: Plotly is not installed.
    """
    made = parts_of(evidence)
    parts = [part for part in (*made, _not_shown(made)) if part.figures or part.cards]
    where = where_text(evidence)
    links = "".join(f'<a href="#part-{part.name}">{escape(part.title)}</a>' for part in parts)
    heading = f'{escape(evidence.name)} <span class="faint">{f"on {escape(where)}" if where else ""}</span>'
    body = f"""
<header>
<h1>{heading}</h1>
{key_figures(summary(evidence))}
<nav>{links}</nav>
</header>
<main>{"".join(map(part_html, parts))}</main>"""
    return document(evidence.name, body, [figure for part in parts for figure in part.figures])


def write_run_page(evidence: RunEvidence, path: Path) -> None:
    """Write the page of a run.

    Args:
        evidence: of it.
        path: of the file; one that is there is replaced.

    Raises:
        PicturesError: Plotly is not installed, or the file cannot be written.
    """
    write_whole(path, run_page(evidence).encode())


def part_html(part: Part) -> str:
    """Heading, pictures and cards. A picture or card that stands alone takes the whole width."""
    narrow = [figure for figure in part.figures if not figure.is_wide]
    figures = "".join(card(figure, is_wide=figure.is_wide or len(narrow) == 1) for figure in part.figures)
    width = ' class="wide"' if len(part.cards) == 1 else ""
    cards = "".join(f"<section{width}><h2>{escape(title)}</h2>{html}</section>" for title, html in part.cards)
    return f'<h2 class="part" id="part-{part.name}">{escape(part.title)}</h2>{figures}{cards}'
