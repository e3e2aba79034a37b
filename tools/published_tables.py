"""The tables of docs/plan-published.md: what others published of runs and plans, and what our plan says of the same."""

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]
Row = dict[str, Any]

GB = 1e9
MODELS = {"moe-1t": "MoE-1T", "moe-2t": "MoE-2T"}
BEYOND = 0.30
"""Errors that have a reason."""


def errors(result: Result) -> str:
    """Errors of the halves and of kinds of chips."""
    lines = [
        f"{_projected(result)} Error: projected over published tokens/s/GPU, minus 1.",
        "",
        "| runs | chips | number | median | largest | beyond 30 % |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, one in result["numbers"]["errors"].items():
        share = [f"{100 * one[which]:.1f} %" for which in ("median", "largest")]
        chips = "all" if name in ("all", "fitted", "held out") else ", ".join(one["chips"])
        label = name if chips == "all" else "in one node" if name.endswith("one node") else "over nodes"
        lines.append(f"| {label} | {chips} | {one['rows']} | {' | '.join(share)} | {one['beyond']} |")
    return "\n".join(lines)


def runs(result: Result) -> str:
    """Every published speed beside the projected one."""
    lines = [
        "| run | chips | tokens/s/GPU | projected | ratio | memory, GB | |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in result["numbers"]["rows"]:
        ratio = f"{row['ratio']:.2f}"
        notes = [row["source"], "fitted" if row["is_fitted"] else "held out"]
        notes += [] if row["fits"] else ["does not fit"]
        lines.append(
            f"| `{row['id']}` | {row['devices']:,} {row['chip']} | {row['published']:,.0f} | {row['projected']:,.0f} | "
            f"{f'**{ratio}**' if abs(row['ratio'] - 1) > BEYOND else ratio} | {row['memory'] / GB:.0f} | "
            f"{', '.join(notes)} |"
        )
    return "\n".join(lines)


def sources(result: Result) -> str:
    """Where the speeds were published."""
    return "\n".join(f"- {name}: {where}" for name, where in result["numbers"]["sources"].items())


def reasons(result: Result) -> str:
    """Why some are off by more, or do not fit."""
    rows = result["numbers"]["rows"]
    lines = [f"- `{row['id']}`, {row['ratio']:.2f}: {row['reason']}." for row in rows if row["reason"]]
    kept: dict[str, list[str]] = {}
    for row in rows:
        if not row["fits"]:
            kept.setdefault(row["memory_reason"], []).append(f"`{row['id']}`")
    return "\n".join([*lines, *(f"- {', '.join(names)}: {reason}." for reason, names in kept.items())])


def commands(result: Result) -> str:
    """The command of every row."""
    lines = ["```text"]
    for row in result["numbers"]["rows"]:
        lines += [f"# {row['id']}", row["command"]]
    return "\n".join([*lines, "```"])


def charts(result: Result) -> str:
    """Activations with one and two context-parallel ranks."""
    lines = [
        _projected(result),
        "",
        "| model | CP | published | projected | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in result["numbers"]["charts"]:
        sizes = f"{row['published'] / GB:.0f} GB | {_gb(row['activations'])} GB"
        lines.append(f"| {MODELS[row['model']]} | {row['context']} | {sizes} | {row['ratio']:.3f} |")
    return "\n".join(lines)


def fits(result: Result) -> str:
    """Whether layouts fit, and what is published of them."""
    lines = ["| model, chip | layout | published | projected |", "|---|---|---|---|"]
    for row in result["numbers"]["fits"]:
        told = f"{_gb(row['memory'])} of {_gb(row['capacity'])} GB"
        lines.append(
            f"| {MODELS[row['model']]}, {row['chip']} | {row['layout']} | {_fits(row['published'])} | "
            f"{_fits(row['fits'])}, {told} |"
        )
    return "\n".join(lines)


def ways_in(result: Result) -> str:
    """What brings our own run of the larger model into the smaller chip."""
    names = ("as it is", "optimizer on the host", "FSDP")
    lines = ["| PP24 EP16 CP2, all-to-all | fits | memory | tokens/s/GPU |", "|---|---|---:|---:|"]
    for name, row in zip(names, result["numbers"]["ways_in"], strict=True):
        lines.append(f"| {name} | {_fits(row['fits'])} | {_gb(row['memory'])} GB | {row['speed']:.0f} |")
    return "\n".join(lines)


def bubbles(result: Result) -> str:
    """Shares of the passes that ranks wait."""
    lines = [
        "| stages a rank | measured | formula | projected | with 1,024 words |",
        "|---:|---:|---:|---:|---:|",
    ]
    for row in result["numbers"]["bubbles"]:
        shares = (row[name] for name in ("published", "formula", "projected", "small_vocabulary"))
        lines.append(f"| {row['stages']} | {' | '.join(f'{100 * one:.1f} %' for one in shares)} |")
    return "\n".join(lines)


def dispatch(result: Result) -> str:
    """Throughput by expert ranks and way to send."""
    rows = result["numbers"]["dispatch"]
    lines = [
        f"{_projected(result)} Tokens/s/GPU of MoE-2T on 1,024 MI300X, and share of EP 8.",
        "",
        "| EP | all-to-all | de-duplicated, even routing | de-duplicated, in turn | over all-to-all |",
        "|---:|---:|---:|---:|---:|",
    ]
    first: tuple[float, ...] = ()
    for rank in dict.fromkeys(row["expert"] for row in rows):
        plain, once = (row for row in rows if row["expert"] == rank)
        name = "tokens_per_second_per_device"
        speeds = (plain[name], once[name], once["in_turn"])
        first = first or speeds
        cells = " | ".join(f"{one:.0f} ({one / of:.0%})" for one, of in zip(speeds, first, strict=True))
        lines.append(f"| {rank} | {cells} | {speeds[1] / speeds[0]:.2f}, {speeds[2] / speeds[0]:.2f} |")
    return "\n".join(lines)


def scaling(result: Result) -> str:
    """Efficiency by devices, for several batches."""
    rows = result["numbers"]["scaling"]
    devices = list(dict.fromkeys(row["devices"] for row in rows))
    low, high = rows[0]["published"]
    lines = [
        f"{_projected(result)} Published at {devices[-1]:,}: {low:.0%} to {high:.0%}.",
        "",
        f"| rows of a step on a data-parallel rank | {' | '.join(f'{one:,} MI325X' for one in devices)} |",
        f"|---:|{'---:|' * len(devices)}",
    ]
    for each in dict.fromkeys(row["rows_a_rank"] for row in rows):
        found = [row for row in rows if row["rows_a_rank"] == each]
        cells = (f"{row['tokens_per_second_per_device']:,.0f} tokens/s/GPU, {row['efficiency']:.1%}" for row in found)
        lines.append(f"| {each} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _projected(result: Result) -> str:
    return f"Projected at commit `{result['commit']}`."


def _gb(size: float) -> str:
    return f"{size / GB:.1f}"


def _fits(fits: bool) -> str:
    return "fits" if fits else "does not fit"


TABLES: dict[str, Callable[[Result], str]] = {
    "published-errors": errors,
    "published-runs": runs,
    "published-sources": sources,
    "published-reasons": reasons,
    "published-commands": commands,
    "published-charts": charts,
    "published-fits": fits,
    "published-ways-in": ways_in,
    "published-bubbles": bubbles,
    "published-dispatch": dispatch,
    "published-scaling": scaling,
}
