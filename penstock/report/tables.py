"""Tables of a page, as HTML: the candidates of a plan, and what was refused and why."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from penstock.plan.asked_layout import FOLLOW, differing_fields, field_label
from penstock.plan.projection import Plan, Projection, Refusal
from penstock.report.figure import share_text, time_text
from penstock.report.frame import scrolling
from penstock.report.stacks import SIZES

REFUSALS_SHOWN = 12
"""More are folded away."""


def candidates_table(plan: Plan) -> str:
    """The candidates, fastest first: a column for each field in which they differ, and a line of what all have.

    Args:
        plan: with at least one candidate.
    """
    told = differing_fields(plan.candidates)
    is_text = {name: not all(text.isdecimal() for text in texts) for name, texts in told.items()}
    heads = ["<th></th>", *(f"<th{_kind(is_text[name])}>{escape(field_label(name))}</th>" for name in told)]
    results = ("memory", "step", plan.cluster.speed_unit, "MFU", "bubble", "exposed communication")
    heads += [f"<th>{name}</th>" for name in results]
    rows = []
    for place, one in enumerate(plan.candidates):
        cells = [f"<td>{place + 1}</td>"]
        cells += [f"<td{_kind(is_text[name])}>{escape(texts[place])}</td>" for name, texts in told.items()]
        rows.append(f"<tr>{''.join([*cells, *_results(one)])}</tr>")
    table = f'<table class="candidates"><thead><tr>{"".join(heads)}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'{scrolling(table)}<p class="faint">{escape(_shared_text(plan.candidates, told))}</p>'


def _kind(is_text: bool) -> str:
    return " class=text" if is_text else ""


def _shared_text(candidates: Sequence[Projection], told: Container[str]) -> str:
    """What all candidates have, without sizes of 1."""
    shared = {name: value for name, value in asdict(candidates[0].layout).items() if name not in told}
    words = [
        f"{field_label(name)} {value}"
        for name, value in shared.items()
        if not (name in SIZES and value == 1) and name not in FOLLOW
    ]
    ranks = f"DP {shared['dp']}" if "dp" in shared else ""
    return f"{'All' if len(candidates) > 1 else 'With'}: {', '.join(filter(None, [*words, ranks]))}."


def _results(one: Projection) -> list[str]:
    """The cells of what is projected."""
    time = one.time
    return [
        _memory_cell(one),
        f"<td>{time_text(time.step_seconds)}</td>",
        f"<td><b>{time.tokens_per_second_per_device:,.0f}</b></td>",
        f"<td>{share_text(time.model_flops_utilization)}</td>",
        f"<td>{share_text(time.bubble)}</td>",
        f"<td>{time_text(time.exposed_communication_seconds)}</td>",
    ]


def _memory_cell(one: Projection) -> str:
    """Memory of the fullest rank, with a bar of what it takes of the device."""
    share = min(one.memory.total / one.capacity_bytes, 1.0)
    state = "fits" if one.fits else "over"
    title = f"{one.memory.total / one.capacity_bytes:.1%} of {one.capacity_bytes / 1e9:.0f} GB"
    bar = f'<i class="bar {state}"><i style="width:{share:.1%}"></i></i>'
    return f'<td class="memory" title="{title}">{bar}<span>{one.memory.total / 1e9:.1f} GB</span></td>'


def refusals_table(refusals: Sequence[Refusal]) -> str:
    """What is not among the candidates; those that stand for most layouts first, the rest folded away."""
    ordered = sorted(refusals, key=lambda one: -one.count)
    shown, folded = ordered[:REFUSALS_SHOWN], ordered[REFUSALS_SHOWN:]
    more = ""
    if folded:
        layouts = sum(one.count for one in folded)
        summary = f"<summary>{len(folded)} more, of {layouts:,} layouts</summary>"
        more = f"<details>{summary}{scrolling(_refusals(folded))}</details>"
    return scrolling(_refusals(shown)) + more


def _refusals(refusals: Sequence[Refusal]) -> str:
    rows = "".join(
        f"<tr><td>{one.count:,}</td><td class=text><code>{escape(one.rule)}</code></td>"
        f"<td class=text>{escape(_layout_text(one.layout))}</td><td class=reason>{escape(one.reason)}</td></tr>"
        for one in refusals
    )
    heads = "<th>layouts</th><th class=text>rule</th><th class=text>such as</th><th class=text>why</th>"
    return f'<table class="refusals"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'


def _layout_text(layout: Mapping[str, Any]) -> str:
    """What was settled of a refused layout: sizes above 1, then words."""
    sizes = [f"{name.upper()}{layout[name]}" for name in SIZES if layout.get(name) not in (None, 1)]
    words = [str(layout[name]) for name in ("schedule", "dispatcher") if layout.get(name) not in (None, "none")]
    if layout.get("micro_batch") is not None:
        words.append(f"mb {layout['micro_batch']}")
    if layout.get("recompute") not in (None, "none"):
        words.append(f"recompute {layout['recompute']}")
    return ", ".join(part for part in (" ".join(sizes), *words) if part)
