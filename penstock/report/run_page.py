"""One HTML file that shows a run: its metrics, its plan, its traces and its bottleneck. It opens without a network.

    write_run_page(gather(Path("runs/first")), Path("runs/first/report.html"))

The page has eleven sections. A section without evidence is left out; the last card lists what is missing, and how to
record it. Data that are too large for a page are thinned, and the caption says so.

`write_diff_page` shows two recordings: a step of each above the other on one axis of time, and the tables of
`penstock trace diff`, whose changes add up to the change of the step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from penstock.base.numbers import bytes_text, count_text, counted, share_text, shortened, three_digits, time_text
from penstock.base.origin import UNKNOWN, version_text
from penstock.config.fit import grid_of
from penstock.config.load import dump_toml
from penstock.config.run import Run
from penstock.report.figure import Figure
from penstock.report.frame import card, document, key_figures, scrolling, table, write_whole
from penstock.report.run_evidence import RunEvidence, StepClock, last_step, sentence, window_us
from penstock.report.run_metrics import (
    goodput_figure,
    gradient_figure,
    loss_figure,
    memory_figure,
    memory_over_time,
    speed_figure,
    step_figure,
    usual_of,
)
from penstock.report.run_timeline import measured_phases, timeline_pictures
from penstock.report.run_traces import expert_pictures, flame_figure, rank_pictures, roofline_figure
from penstock.report.timeline import timeline_figure
from penstock.trace.analysis import RankAnalysis, TraceAnalysis
from penstock.trace.compare import TITLES, ComparedRow, TraceComparison
from penstock.train.goodput import goodput
from penstock.tune.doctor.diagnosis import Diagnosis, EvidenceLine, ms_text, spent_text
from penstock.tune.doctor.evidence import Evidence


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """A section of the page: figures, other cards (title, HTML), and lines about missing evidence."""

    name: str
    title: str
    figures: Sequence[Figure] = ()
    cards: Sequence[tuple[str, str]] = ()
    missing: Sequence[str] = ()


def sections_of(evidence: RunEvidence) -> list[PageSection]:
    lines, planned = evidence.lines, evidence.projection
    loss = [loss_figure(lines), gradient_figure(lines, evidence.run)]
    speed = [speed_figure(lines, planned, evidence.speed_unit), step_figure(lines, planned)]
    no_metric = evidence.lacks.steps or "the metrics say nothing of it"
    no_work = evidence.lacks.trace or "no operator in the traces has shapes, so its work is not known"
    roofline = None if evidence.is_host else roofline_figure(evidence)
    if evidence.is_host:
        no_work = (
            "No roofline: the peaks of a CPU are not known, and its operators take part of their time in each other."
        )
    timeline, no_timeline = timeline_pictures(evidence)
    ranks, no_ranks = rank_pictures(evidence)
    experts, no_experts = expert_pictures(evidence)
    verdict = evidence.verdict
    cards = [("The doctor's verdict", verdict_html(verdict, evidence.judged))] if verdict is not None else []
    missing = [sentence(evidence.lacks.verdict)] if verdict is None else []
    if evidence.is_host and evidence.answer is not None:
        cards.append(("What the CPU did", host_html(evidence.answer)))
    return [
        PageSection(name="verdict", title="Verdict", cards=cards, missing=missing),
        _drawn("loss", "Loss", loss, no_metric),
        _drawn("speed", "Speed", speed, no_metric),
        _drawn(
            "goodput", "Goodput", [goodput_figure(evidence)], evidence.lacks.steps or "the run kept no goodput.jsonl"
        ),
        _memory(evidence),
        PageSection(name="timeline", title="Timeline", figures=timeline, cards=_path(evidence), missing=no_timeline),
        _drawn("flame", "Flame", [flame_figure(evidence)], evidence.lacks.trace),
        _drawn("roofline", "Roofline", [roofline], no_work),
        PageSection(name="ranks", title="Rank to rank", figures=ranks, missing=no_ranks),
        PageSection(name="experts", title="Experts", figures=experts, missing=no_experts),
        _setting(evidence),
    ]


def _drawn(name: str, title: str, figures: Sequence[Figure | None], lack: str) -> PageSection:
    """The section of some figures, or the reason why there is none."""
    available = [figure for figure in figures if figure is not None]
    return PageSection(name=name, title=title, figures=available, missing=() if available else (sentence(lack),))


def _path(evidence: RunEvidence) -> list[tuple[str, str]]:
    if evidence.answer is None or not evidence.answer.path.segments:
        return []
    path = evidence.answer.path
    kinds = ", ".join(f"{kind} {share_text(us / path.total_us)}" for kind, us in path.by_kind().items())
    rows = [
        (f"{row.rank}", escape(row.kind), escape(row.name), f"{ms_text(row.total_us)} ms", share_text(row.share))
        for row in path.rows()[:FACTS]
    ]
    head = {"rank": "", "on the path": "text", "what": "reason", "time": "", "of the path": ""}
    text = f"The chain of work that determines the end of {path.step or 'the recording'}: {kinds}."
    return [("Critical path", f'<p class="faint">{escape(text)}</p>{table(head, rows)}')]


def _memory(evidence: RunEvidence) -> PageSection:
    bars, curve = memory_figure(evidence), memory_over_time(evidence)
    missing = []
    if evidence.projection is None:
        missing.append(sentence(evidence.lacks.plan))
    if curve is None and evidence.is_host:
        missing.append("Memory over a step is recorded of GPUs only.")
    elif curve is None and not evidence.ranks:
        missing.append(sentence(evidence.lacks.trace))
    elif curve is None:
        missing.append("Memory over a step is not in the traces: record it with profile.memory=true.")
    figures = [figure for figure in (bars, curve) if figure is not None]
    return PageSection(name="memory", title="Memory", figures=figures, missing=missing)


def _setting(evidence: RunEvidence) -> PageSection:
    config = config_html(evidence.run) if evidence.run is not None else ""
    cards = [("Configuration", config), ("Environment", environment_html(evidence))]
    missing = []
    if not config:
        missing.append("The configuration is not known: no trace carries it.")
    if not evidence.starts:
        missing.append("No start is recorded (starts.jsonl), so neither the command nor versions are known.")
    shown = [(title, html) for title, html in cards if html]
    return PageSection(name="setting", title="Configuration and environment", cards=shown, missing=missing)


def _not_shown(parts: Sequence[PageSection]) -> PageSection:
    """The reasons why evidence is missing, each once, with the sections that it applies to."""
    titles: dict[str, list[str]] = {}  # by reason
    for part in parts:
        for line in filter(None, part.missing):
            titles.setdefault(line, []).append(part.title)
    rows = [(", ".join(dict.fromkeys(names)), line) for line, names in titles.items()]  # a title can lack two figures
    cards = [("What is missing, and why", pairs(rows))] if rows else []
    return PageSection(name="missing", title="Not shown", cards=cards)


def run_page(evidence: RunEvidence) -> str:
    made = sections_of(evidence)
    parts = [part for part in (*made, _not_shown(made)) if part.figures or part.cards]  # no empty section
    where = where_text(evidence)
    links = "".join(f'<a href="#part-{part.name}">{escape(part.title)}</a>' for part in parts)
    heading = f'{escape(evidence.name)} <span class="faint">{f"on {escape(where)}" if where else ""}</span>'
    started = f'<p class="faint">{escape(text)}</p>\n' if (text := start_text(evidence)) else ""
    body = f"""
<header>
<h1>{heading}</h1>
{started}{key_figures(summary(evidence))}
<nav>{links}</nav>
</header>
<main>{"".join(map(section_html, parts))}</main>"""
    return document(evidence.name, body, [figure for part in parts for figure in part.figures])


def write_run_page(evidence: RunEvidence, path: Path) -> None:
    """Write the page of a run in place of an existing file."""
    write_whole(path, run_page(evidence).encode())


def section_html(part: PageSection) -> str:
    """Heading, figures and cards. A single figure or card takes the whole width."""
    narrow = [figure for figure in part.figures if not figure.is_wide]  # half of the page's width
    figures = "".join(card(figure, is_wide=figure.is_wide or len(narrow) == 1) for figure in part.figures)
    width = ' class="wide"' if len(part.cards) == 1 else ""
    cards = "".join(f"<section{width}><h2>{escape(title)}</h2>{html}</section>" for title, html in part.cards)
    return f'<h2 class="part" id="part-{part.name}">{escape(part.title)}</h2>{figures}{cards}'


# ----------------------------------------------------------------------------------------------------------- run tables

FACTS = 12  # lines of evidence, and rows of a CPU's operators, that are shown; the rest of the evidence is folded away


def summary(evidence: RunEvidence) -> dict[str, str]:
    """Key figures by name; unknown ones are left out."""
    lines = evidence.lines
    facts: dict[str, str] = {}
    if lines:
        last = lines[-1]
        steps = evidence.run.training.steps if evidence.run is not None else None
        facts["done"] = f"{last['step']:,} of {counted(steps, 'step')}" if steps else counted(last["step"], "step")
        if "tokens_seen" in last:
            facts["seen"] = f"{count_text(last['tokens_seen'])} tokens"
        if isinstance(last.get("loss"), int | float):
            facts["loss"] = f"{last['loss']:.4f} nats/token"
        held_out = [line for line in lines if isinstance(line.get("evaluation_loss"), int | float)]
        if held_out:
            facts["held out"] = f"{held_out[-1]['evaluation_loss']:.4f} nats/token"
    # Key figures of the usual step: field of a line of metrics, name on the page, and text.
    texts: dict[str, tuple[str, Callable[[float], str]]] = {
        "tokens_per_second_per_device": ("speed", lambda speed: f"{three_digits(speed)} {evidence.speed_unit}"),
        "step_seconds": ("time", lambda seconds: f"{time_text(seconds)} per step"),
        "model_flops_utilization": ("MFU", share_text),
    }
    usual = {field: usual_of(evidence.lines, field) for field in texts}
    facts |= {name: text(value) for field, (name, text) in texts.items() if (value := usual[field]) is not None}
    if (share := goodput(evidence.wall_seconds)) is not None:
        facts["goodput"] = share_text(share)
    if evidence.facts.peak_bytes is not None:
        facts["peak memory"] = bytes_text(evidence.facts.peak_bytes)
    if evidence.verdict is not None:
        facts["wall"] = evidence.verdict.bottleneck
    return facts


def start_text(evidence: RunEvidence) -> str:
    """Command, date, version and commit of the run's last start; empty if no start is recorded."""
    if not evidence.starts:
        return ""
    start = {name: str(value) for name, value in evidence.starts[-1].items()}
    parts = [start.get("command", ""), start.get("time", "").replace("T", " ").replace("+00:00", " UTC")]
    if "penstock" in start:
        parts.append(version_text(start["penstock"], start.get("commit", UNKNOWN)))
    return " | ".join(filter(None, parts))


def where_text(evidence: RunEvidence) -> str:
    """Ranks, device and layout, as far as they are known."""
    facts, run = evidence.facts, evidence.run
    ranks = facts.world or len(evidence.ranks) or None
    device = facts.device or ("CPU" if evidence.is_host else None)
    where = device or ""
    if ranks:
        where = f"{ranks:,} x {device}" if device else f"{ranks:,} ranks"
    layout = _layout_text(run, facts.world) if run is not None and facts.world else ""
    return f"{where}, {layout}" if layout else where


def _layout_text(run: Run, world: int) -> str:
    grid = grid_of(run, world)
    sizes = {"PP": grid.pipeline, "EP": grid.expert, "TP": grid.tensor, "CP": grid.context, "DP": grid.data}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


def verdict_html(verdict: Diagnosis, judged: Evidence) -> str:
    """The doctor's sentence, remedies and evidence, and what could not be examined."""
    notes = "".join(f"<p>{escape(sentence(note))}</p>" for note in verdict.notes)
    text = f'<p class="faint">{sentence(spent_text(verdict, judged))}</p>' if judged.ranks else ""
    remedies = _remedies(verdict) if verdict.remedies else "<p>No change that is known wins more than noise.</p>"
    shown, folded = verdict.lines[:FACTS], verdict.lines[FACTS:]
    more = f"<details><summary>{len(folded)} more</summary>{_facts(folded)}</details>" if folded else ""
    lacking = "".join(f"<li>{escape(line)}</li>" for line in verdict.missing)
    return f"""<p class="verdict"><b class="wall {verdict.bottleneck}">{escape(verdict.bottleneck)}</b>
{escape(verdict.sentence.partition(": ")[2])}</p>
{notes}{text}
<h3>Remedies</h3>{remedies}
{f"<h3>Evidence</h3>{_facts(shown)}{more}" if shown else ""}
{f'<h3>Not looked at</h3><ul class="faint">{lacking}</ul>' if lacking else ""}"""


def _remedies(verdict: Diagnosis) -> str:
    rows = [
        (
            f"-{bytes_text(remedy.gain_bytes)}" if remedy.gain_bytes else f"{ms_text(remedy.gain_us)} ms",
            share_text(verdict.times.share(remedy.gain_us)),
            f"<code>{escape(remedy.change)}</code>",
            escape(remedy.what),
            f"<code>{escape(remedy.rule)}</code>",
        )
        for remedy in verdict.remedies
    ]
    columns = {"at most, per step": "", "of the step": "", "change": "text", "what": "reason", "rule": "text"}
    note = '<p class="faint">Gains do not add up: several changes may take away the same time.</p>'
    return table(columns, rows) + note


def _facts(facts: Sequence[EvidenceLine]) -> str:
    columns = {
        "per step": ["" if fact.time_us is None else f"{ms_text(fact.time_us)} ms" for fact in facts],
        "of the step": ["" if fact.share is None else share_text(fact.share) for fact in facts],
        "memory": ["" if fact.size is None else bytes_text(fact.size) for fact in facts],
    }
    shown = {name: texts for name, texts in columns.items() if any(texts)}  # empty columns are left out
    rows = [
        (escape(fact.bottleneck), escape(fact.what), *(texts[index] for texts in shown.values()))
        for index, fact in enumerate(facts)
    ]
    return table({"wall": "text", "what": "reason"} | dict.fromkeys(shown, ""), rows)


def host_html(answer: TraceAnalysis) -> str:
    """The operators of a CPU by own time, as means of a step of the first rank."""
    first, per = answer.ranks[0], answer.per_step
    rows = [
        (
            escape(row.name),
            f"{row.count * per:,.0f}",
            f"{ms_text(row.own_us * per)} ms",
            share_text(row.own_us / first.spent.total_us),
        )
        for row in first.operators[:FACTS]
    ]
    outside = f"{ms_text(first.spent.idle_us * per)} ms a step are outside of operators and transfers"
    columns = {"operator": "text", "calls a step": "", "by itself": "", "of the step": ""}
    return f'<p class="faint">{outside} (Python, waiting).</p>{table(columns, rows)}'


def config_html(run: Run) -> str:
    """The most important settings, with the whole configuration folded away."""
    training, parallel, moe = run.training, run.parallel, run.model.moe
    model = f"{run.model.family}, {run.model.layers} layers, hidden {run.model.hidden_size:,}"
    if moe is not None:
        model += f", {moe.experts} experts, {moe.top_k} for a token"
    batch = f"{training.global_batch:,} rows of {training.sequence_length:,} tokens, {training.micro_batch} at once"
    ranks = ", ".join(f"{name} {size}" for name, size in parallel if isinstance(size, int) and size > 1)
    facts = {
        "model": model,
        "batch": batch,
        "precision": training.precision,
        "parallel": ranks or "data parallel only",
        "data": run.data.source,
        "recompute": ", ".join(run.recompute.modules) or "nothing",
        "graphs": run.graphs.capture,
        "dispatch": f"{run.dispatch.method}, sync-free {run.dispatch.sync_free}, overlap {run.dispatch.overlap}",
    }
    toml = escape(dump_toml(run))
    return f"{pairs(facts.items())}<details><summary>config.toml, every field</summary><pre>{toml}</pre></details>"


def environment_html(evidence: RunEvidence) -> str:
    """The machine and the command of each start; empty if nothing is known."""
    known = {**_of_traces(evidence), "recorded": counted(len(evidence.lines), "step") if evidence.lines else ""}
    if not evidence.starts:
        return pairs(known.items()) if any(known.values()) else ""
    *earlier, last = evidence.starts
    facts = {
        name.replace("_", " "): (f"{value:,}" if isinstance(value, int) else str(value))
        for name, value in last.items()
        if value is not None
    }
    lines = [f"{start.get('time', '')}: {start.get('command', '')} ({start.get('device', '')})" for start in earlier]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    summary = f"<summary>{counted(len(earlier), 'earlier start')}</summary>"
    return pairs((facts | known).items()) + (f"<details>{summary}<ul>{items}</ul></details>" if earlier else "")


def _of_traces(evidence: RunEvidence) -> dict[str, str]:
    if not evidence.ranks:
        return {}
    trace = evidence.ranks[0].trace
    versions = [f"{name} {trace.header[key]}" for key, name in _VERSIONS.items() if key in trace.header]
    return {
        "device of the traces": trace.device_name or ("CPU" if evidence.is_host else ""),
        "backend": str(trace.distributed.get("backend", "")),
        "driver and runtime": ", ".join(versions),
        "traced": f"{counted(len(evidence.ranks), 'rank')}, {counted(len(evidence.ranks[0].steps), 'step')}",
    }


_VERSIONS = {
    "cuda_runtime_version": "CUDA runtime",
    "cuda_driver_version": "CUDA driver",
    "hip_runtime_version": "HIP runtime",
    "hip_driver_version": "HIP driver",
}


def pairs(facts: Iterable[tuple[str, str]]) -> str:
    """A table of names and values; empty values are left out."""
    rows = "".join(
        f"<tr><th class=text>{escape(name)}</th><td class=reason>{escape(text)}</td></tr>"
        for name, text in facts
        if text
    )
    return scrolling(f'<table class="pairs"><tbody>{rows}</tbody></table>')


DIFF_ROWS = 40  # of a table; the command prints and writes all
LONGEST_TEXT = 80  # characters of an operator or a shape


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
    figure = _step_timelines([answer.ranks[0] for answer in answers])
    tables = []
    for kind, title in TITLES.items():
        if rows := compared.rows_of(kind):
            sum_ms = sum(row.change_us for row in rows) / 1e3
            head = f"{title}: {sum_ms:+,.3f} ms in {counted(len(rows), 'row')}"
            tables.append(_changes_table(head, rows[:DIFF_ROWS], has_steps=compared.a_steps > 0))
    tables.append(_changes_table("what is no event", compared.closing, has_steps=compared.a_steps > 0))
    body = f"""
<header><h1>{escape(a)} <span class="faint">A, beside B</span> {escape(b)}</h1>
<p class="faint">{of_steps}</p>
{"".join(f"<p>{escape(warning)}</p>" for warning in warnings)}{key_figures(facts)}</header>
<main>{card(figure, is_wide=True)}{"".join(tables)}</main>"""
    write_whole(path, document(f"{a} and {b}", body, [figure]).encode())


def _step_timelines(ranks: Sequence[RankAnalysis]) -> Figure:
    """The last step of each, from its own start."""
    timelines = []
    for name, rank in zip("AB", ranks, strict=True):
        window = window_us(rank, last_step([rank]))
        clock = StepClock(windows_us={rank.rank: window}, zero_us={rank.rank: window[0]}, words="")
        timelines.append(replace(measured_phases([rank], clock).timeline, name=name))
    figure = timeline_figure("timelines", "A step of each, on the device", timelines)
    return replace(figure, caption=figure.caption.replace("Passes:", "What kernels were for:"))


def _changes_table(title: str, rows: Sequence[ComparedRow], *, has_steps: bool) -> str:
    columns = {"change": "", "A": "", "B": "", "events": "", "phase": "text", "operator": "reason", "shape": "reason"}
    cells = [
        (
            f"{row.change_us / 1e3:+,.3f}{'*' if has_steps and row.is_clear else ''}",
            f"{row.a.time_us / 1e3:,.3f}",
            f"{row.b.time_us / 1e3:,.3f}",
            f"{row.a.events:g}" if row.a.events == row.b.events else f"{row.a.events:g} \u2192 {row.b.events:g}",
            escape(row.key.span),
            escape(shortened(row.key.operator, LONGEST_TEXT)),
            escape(shortened(row.key.shape, LONGEST_TEXT)),
        )
        for row in rows
    ]
    head = f'<h2>{escape(title)}</h2><p class="faint">ms</p>'
    return f'<section class="wide">{head}{table(columns, cells)}</section>'
