"""Tables of a page, as HTML: the candidates of a plan, and what was refused and why."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from penstock.plan.projection import Plan, Projection, Refusal
from penstock.report.figure import time_text
from penstock.report.stacks import SIZES

REFUSALS_SHOWN = 12
"""More are folded away."""

CANDIDATE_COLUMNS = (
    "", "PP", "VPP", "EP", "ETP", "CP", "TP", "DP", "schedule", "mb", "recompute", "dispatcher", "memory", "step",
    "tokens/s/device", "MFU", "bubble", "exposed",
)  # fmt: skip


def candidates_table(plan: Plan) -> str:
    """The candidates, fastest first."""
    rows = [_candidate(place, one) for place, one in enumerate(plan.candidates, start=1)]
    texts = {"schedule", "recompute", "dispatcher"}
    heads = "".join(f"<th{' class=text' if name in texts else ''}>{escape(name)}</th>" for name in CANDIDATE_COLUMNS)
    return f'<table class="candidates"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _candidate(place: int, one: Projection) -> str:
    """A row."""
    layout, time = one.layout, one.time
    sizes = [layout.pp, layout.vpp, layout.ep, layout.etp, layout.cp, layout.tp, layout.dp]
    cells = [f"<td>{place}</td>"]
    cells += [f"<td{' class=one' if size == 1 else ''}>{size}</td>" for size in sizes]
    cells += [f"<td class=text>{escape(layout.schedule)}</td>", f"<td>{layout.micro_batch}</td>"]
    cells += [f"<td class=text>{escape(layout.recompute)}</td>", f"<td class=text>{escape(layout.dispatcher)}</td>"]
    cells += [_memory_cell(one), f"<td>{time_text(time.step_seconds)}</td>"]
    cells.append(f"<td><b>{time.tokens_per_second_per_device:,.0f}</b></td>")
    cells += [f"<td>{time.model_flops_utilization:.1%}</td>", f"<td>{time.bubble:.1%}</td>"]
    cells.append(f"<td>{time_text(time.exposed_communication_seconds)}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _memory_cell(one: Projection) -> str:
    """Memory of the fullest rank, with a bar of what it takes of the device."""
    share = min(one.memory.total / one.capacity_bytes, 1.0)
    state = "fits" if one.fits else "over"
    title = f"{one.memory.total / one.capacity_bytes:.1%} of {one.capacity_bytes / 1e9:.0f} GB"
    bar = f'<i class="bar {state}"><i style="width:{share:.1%}"></i></i>'
    return f'<td class="memory" title="{title}">{bar}<span>{one.memory.total / 1e9:.1f} GB</span></td>'


def refusals_table(refusals: Sequence[Refusal]) -> str:
    """What is not among the candidates; those that stand for most layouts first, the rest folded away."""
    if not refusals:
        return '<p class="faint">Nothing was refused.</p>'
    ordered = sorted(refusals, key=lambda one: -one.count)
    shown, folded = ordered[:REFUSALS_SHOWN], ordered[REFUSALS_SHOWN:]
    more = ""
    if folded:
        layouts = sum(one.count for one in folded)
        more = f"<details><summary>{len(folded)} more, of {layouts:,} layouts</summary>{_refusals(folded)}</details>"
    return _refusals(shown) + more


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
