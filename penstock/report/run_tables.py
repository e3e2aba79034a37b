"""The words of a run's page: what is read first, the doctor's verdict, configuration and environment."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from penstock.config.fit import grid_of
from penstock.config.load import dump_toml
from penstock.config.run import Run
from penstock.report.figure import bytes_text, counted, share_text, three_digits, time_text
from penstock.report.frame import scrolling
from penstock.report.run_curves import usual_of
from penstock.report.run_evidence import RunEvidence, sentence
from penstock.trace.host_table import HostRow, HostTable
from penstock.tune.doctor.diagnosis import Diagnosis, EvidenceLine, ms_text, spent_text
from penstock.tune.doctor.evidence import Evidence

FACTS = 12
"""Lines of evidence that are shown; the rest is folded away."""


def summary(evidence: RunEvidence) -> dict[str, str]:
    """Key figures by name; what is not known is left out."""
    lines = evidence.lines
    facts: dict[str, str] = {}
    if lines:
        last = lines[-1]
        steps = evidence.run.training.steps if evidence.run is not None else None
        facts["done"] = f"{last['step']:,} of {counted(steps, 'step')}" if steps else counted(last["step"], "step")
        facts["seen"] = f"{count_text(last['tokens_seen'])} tokens"
        facts["loss"] = f"{last['loss']:.4f} nats/token"
        held_out = [line for line in lines if "evaluation_loss" in line]
        if held_out:
            facts["held out"] = f"{held_out[-1]['evaluation_loss']:.4f} nats/token"
    facts |= _speeds(evidence)
    if evidence.facts.peak_bytes is not None:
        facts["peak memory"] = bytes_text(evidence.facts.peak_bytes)
    if evidence.verdict is not None:
        facts["wall"] = evidence.verdict.bottleneck
    return facts


def _speeds(evidence: RunEvidence) -> dict[str, str]:
    """Of the usual step."""
    texts: dict[str, tuple[str, Callable[[float], str]]] = {
        "tokens_per_second_per_device": ("speed", lambda speed: f"{three_digits(speed)} {evidence.speed_unit}"),
        "step_seconds": ("time", lambda seconds: f"{time_text(seconds)} per step"),
        "model_flops_utilization": ("MFU", share_text),
    }
    usual = {field: usual_of(evidence.lines, field) for field in texts}
    return {name: text(value) for field, (name, text) in texts.items() if (value := usual[field]) is not None}


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
    """Sizes above 1."""
    grid = grid_of(run, world)
    sizes = {"PP": grid.pipeline, "EP": grid.expert, "TP": grid.tensor, "CP": grid.context, "DP": grid.data}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


def count_text(number: float) -> str:
    """A count: `15.7 B`, `2.71 M`, `512`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"


def verdict_html(verdict: Diagnosis, judged: Evidence) -> str:
    """The sentence, the remedies, the evidence, and what could not be looked at.

    Args:
        verdict: of the doctor.
        judged: of what.
    """
    notes = "".join(f"<p>{escape(sentence(note))}</p>" for note in verdict.notes)
    words = f'<p class="faint">{sentence(spent_text(verdict, judged))}</p>' if judged.ranks else ""
    remedies = _remedies(verdict) if verdict.remedies else "<p>No change that is known wins more than noise.</p>"
    shown, folded = verdict.lines[:FACTS], verdict.lines[FACTS:]
    more = f"<details><summary>{len(folded)} more</summary>{_facts(folded)}</details>" if folded else ""
    lacking = "".join(f"<li>{escape(line)}</li>" for line in verdict.missing)
    return f"""<p class="verdict"><b class="wall {verdict.bottleneck}">{escape(verdict.bottleneck)}</b>
{escape(verdict.sentence.partition(": ")[2])}</p>
{notes}{words}
<h3>Remedies</h3>{remedies}
{f"<h3>Evidence</h3>{_facts(shown)}{more}" if shown else ""}
{f'<h3>Not looked at</h3><ul class="faint">{lacking}</ul>' if lacking else ""}"""


def _remedies(verdict: Diagnosis) -> str:
    rows = "".join(
        f"<tr><td>{f'-{bytes_text(one.gain_bytes)}' if one.gain_bytes else f'{ms_text(one.gain_us)} ms'}</td>"
        f"<td>{share_text(verdict.times.share(one.gain_us))}</td><td class=text><code>{escape(one.change)}</code></td>"
        f"<td class=reason>{escape(one.what)}</td><td class=text><code>{escape(one.rule)}</code></td></tr>"
        for one in verdict.remedies
    )
    texts = "".join(f"<th class=text>{name}</th>" for name in ("change", "what", "rule"))
    heads = f"<th>at most, per step</th><th>of the step</th>{texts}"
    note = '<p class="faint">Gains do not add up: several changes may take away the same time.</p>'
    return scrolling(f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>") + note


def _facts(facts: Sequence[EvidenceLine]) -> str:
    columns = {
        "per step": ["" if fact.time_us is None else f"{ms_text(fact.time_us)} ms" for fact in facts],
        "of the step": ["" if fact.share is None else share_text(fact.share) for fact in facts],
        "memory": ["" if fact.size is None else bytes_text(fact.size) for fact in facts],
    }
    shown = {name: texts for name, texts in columns.items() if any(texts)}
    rows = "".join(
        f"<tr><td class=text>{escape(fact.bottleneck)}</td><td class=reason>{escape(fact.what)}</td>"
        f"{''.join(f'<td>{texts[place]}</td>' for texts in shown.values())}</tr>"
        for place, fact in enumerate(facts)
    )
    heads = "<th class=text>wall</th><th class=text>what</th>" + "".join(f"<th>{name}</th>" for name in shown)
    return scrolling(f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>")


def host_html(table: HostTable) -> str:
    """What a CPU did per step: operators and phases by their own time.

    Args:
        table: of the first rank.
    """
    outside = f"{ms_text(table.outside_us)} ms ({table.outside:.1%}) outside of operators (Python, waiting)"
    tables = "".join(
        f"<h3>{title}</h3>{_host_rows(rows)}"
        for title, rows in (
            ("Operators, by their own time", table.operators),
            ("Phases, by the same time", table.phases),
        )
    )
    return f'<p class="faint">{ms_text(table.step_us)} ms {table.span}, of which {outside}.</p>{tables}'


def _host_rows(rows: Sequence[HostRow]) -> str:
    lines = "".join(
        f"<tr><td class=text>{escape(f'{row.name} {row.pass_}'.strip())}</td><td>{row.calls:,.0f}</td>"
        f"<td>{ms_text(row.own_us)} ms</td><td>{row.share:.1%}</td></tr>"
        for row in rows[:FACTS]
    )
    heads = "<th class=text>name</th><th>calls per step</th><th>per step</th><th>of the step</th>"
    return scrolling(f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>")


def config_html(run: Run) -> str:
    """The whole configuration, folded away under what is most asked for."""
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
    return f"{pairs(facts)}<details><summary>config.toml, every field</summary><pre>{toml}</pre></details>"


def environment_html(evidence: RunEvidence) -> str:
    """Where and how the run was started, each time; empty if nothing is known of it."""
    known = {**_of_traces(evidence), "recorded": counted(len(evidence.lines), "step") if evidence.lines else ""}
    if not evidence.starts:
        return pairs({name: text for name, text in known.items() if text}) if any(known.values()) else ""
    shown = evidence.starts[-1]
    facts = {name.replace("_", " "): _text(value) for name, value in shown.items() if value is not None}
    facts |= known
    earlier = "".join(f"<li>{escape(_line(one))}</li>" for one in evidence.starts[:-1])
    before = (
        f"<details><summary>{counted(len(evidence.starts) - 1, 'earlier start')}</summary><ul>{earlier}</ul></details>"
    )
    return pairs({name: text for name, text in facts.items() if text}) + (before if earlier else "")


def _of_traces(evidence: RunEvidence) -> dict[str, str]:
    """What the traces say of the machine."""
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


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _line(start: Mapping[str, Any]) -> str:
    return f"{start.get('time', '')}: {start.get('command', '')} ({start.get('device', '')})"


def pairs(facts: Mapping[str, str]) -> str:
    """Names and values, under each other."""
    rows = "".join(
        f"<tr><th class=text>{escape(name)}</th><td class=reason>{escape(text)}</td></tr>"
        for name, text in facts.items()
    )
    return scrolling(f'<table class="pairs"><tbody>{rows}</tbody></table>')


def reasons(parts: Mapping[str, str]) -> str:
    """Reasons why something is not shown, each behind the parts that it holds for.

    Args:
        parts: by reason.
    """
    rows = "".join(
        f"<tr><th class=text>{escape(names)}</th><td class=reason>{escape(line)}</td></tr>"
        for line, names in parts.items()
    )
    return scrolling(f'<table class="pairs"><tbody>{rows}</tbody></table>')
