"""The tables of docs/plan-published.md: what others published of plans and runs, and what our plan says of the same."""

from collections.abc import Callable, Iterator
from typing import Any

Result = dict[str, Any]
Row = dict[str, Any]

GB = 1e9
MODELS = {"moe-1t": "MoE-1T", "moe-2t": "MoE-2T"}


def saved(result: Result) -> str:
    """Activations that a second context-parallel rank saves."""
    lines = [
        f"{_projected(result)} PP 24, EP 8, VPP 4; GB of the first pipeline rank.",
        "",
        "| model | counted as | CP 1 | CP 2 | saved | published |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in result["numbers"]["saved"]:
        one, two = row["activations"]
        lines.append(
            f"| {MODELS[row['model']]} | {row['variant']} | {_gb(one)} | {_gb(two)} | **{_gb(row['saved'])}** | "
            f"{row['published'] / GB:.0f} |"
        )
    return "\n".join(lines)


def kept(result: Result) -> str:
    """What a layer keeps of a token, ours beside what meets the published figures."""
    numbers = result["numbers"]
    theirs = numbers["published_kept"]
    variants = list(dict.fromkeys(row["variant"] for row in numbers["kept"]))
    parts = list(dict.fromkeys(part for row in numbers["kept"] for part in row["numbers"]))
    lines = [
        f"| model, numbers of 2 bytes | {' | '.join(variants)} | meets the published figures |",
        f"|---|{'---:|' * (len(variants) + 1)}",
    ]
    for model, name in MODELS.items():
        found = {row["variant"]: row["numbers"] for row in numbers["kept"] if row["model"] == model}
        columns = [*(found[variant] for variant in variants), theirs[model]]
        lines += [
            f"| {name}, {part} | {' | '.join(f'{column.get(part, 0):,}' for column in columns)} |" for part in parts
        ]
        lines.append(f"| {name}, all | {' | '.join(f'{sum(column.values()):,}' for column in columns)} |")
    return "\n".join(lines)


def memory(result: Result) -> str:
    """All bytes of the fullest rank, by layout."""
    numbers = result["numbers"]
    variants = list(dict.fromkeys(row["variant"] for row in numbers["memory"]))
    sizes = {(row["model"], row["layout"], row["variant"]): row for row in numbers["memory"]}
    lines = [
        f"{_projected(result)} GB, activations in brackets.",
        "",
        f"| model, layout | {' | '.join(variants)} | by their arithmetic |",
        f"|---|{'---:|' * (len(variants) + 1)}",
    ]
    for row in numbers["published_memory"]:
        key = row["model"], row["layout"]
        cells = [_total(sizes[(*key, variant)]) for variant in variants]
        lines.append(f"| {MODELS[key[0]]} {key[1]} | {' | '.join(cells)} | {_total(row)} |")
    return "\n".join(lines)


def fits(result: Result) -> str:
    """Whether the published choice fits, and what does."""
    lines = [
        "| model, chip (usable GB) | published choice | counted as | fits | with bf16 gradients | all that fit |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["numbers"]["fits"]:
        lines.append(
            f"| {MODELS[row['model']]}, {row['chip']} ({_gb(row['usable'])}) | {row['published_choice']} | "
            f"{row['variant']} | {_room(row['room'])} | {_room(row['room_with_bf16_gradients'])} | "
            f"{', '.join(row['fits']) or 'none'} |"
        )
    return "\n".join(lines)


def ways_in(result: Result) -> str:
    """What brings the larger model into the smaller chip."""
    lines = ["| MoE-2T on MI300X | | fits | memory, overhead counted | tokens/s/GPU |", "|---|---|---|---:|---:|"]
    for row in result["numbers"]["ways_in"]:
        lines.append(
            f"| {row['layout']} | {row['variant']} | {'yes' if row['fits'] else 'no'} | {_gb(row['memory'])} GB | "
            f"{row['tokens_per_second_per_device']:.0f} |"
        )
    return "\n".join(lines)


def speed(result: Result) -> str:
    """Projected tokens per second of every layout; the fastest that fits is bold."""
    rows = result["numbers"]["speed"]
    columns = list(dict.fromkeys((row["chip"], row["variant"]) for row in rows))
    lines = [
        f"{_projected(result)} Tokens/s/GPU; in brackets what does not fit; bold the fastest that fits.",
        "",
        f"| model, layout | {' | '.join(', '.join(column) for column in columns)} |",
        f"|---|{'---:|' * len(columns)}",
    ]
    for model, name in MODELS.items():
        best = {id(_fastest([row for row in _of(rows, model) if _column(row) == column])) for column in columns}
        for layout in dict.fromkeys(row["layout"] for row in _of(rows, model)):
            found = {_column(row): row for row in _of(rows, model) if row["layout"] == layout}
            cells = " | ".join(_speed(found[column], id(found[column]) in best) for column in columns)
            lines.append(f"| {name} {layout} | {cells} |")
    return "\n".join(lines)


def sent(result: Result) -> str:
    """What leaves a node, and how long one way takes."""
    lines = [
        "| EP | routing | rows leaving the node | tokens leaving it | all-to-all | ours, de-duplicated | DeepEP |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["numbers"]["sent"]:
        seconds = row["seconds"]
        ours = next(value for name, value in seconds.items() if name in ("symmetric", "hierarchical"))
        times = " | ".join(f"{1e3 * one:.1f} ms" for one in (seconds["all-to-all"], ours, seconds["deep-ep"]))
        lines.append(
            f"| {row['expert']} | {'in turn' if row['in_turn'] else 'even'} | {row['rows_leaving_node']:.2f} | "
            f"{row['tokens_leaving_node']:.2f} | {times} |"
        )
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
    return f"Projected at commit `{result['commit']}`, even routing."


def _gb(size: float) -> str:
    return f"{size / GB:.1f}"


def _total(row: Row) -> str:
    return f"{_gb(row['total'])} ({_gb(row['activations'])})"


def _room(room: float) -> str:
    return f"yes, {_gb(room)} left" if room >= 0 else f"no, by {_gb(-room)}"


def _of(rows: list[Row], model: str) -> Iterator[Row]:
    return (row for row in rows if row["model"] == model)


def _column(row: Row) -> tuple[str, str]:
    return row["chip"], row["variant"]


def _fastest(rows: list[Row]) -> Row | None:
    return max((row for row in rows if row["fits"]), key=lambda row: row["tokens_per_second_per_device"], default=None)


def _speed(row: Row, is_best: bool) -> str:
    text = f"{row['tokens_per_second_per_device']:.0f}"
    return f"**{text}**" if is_best else text if row["fits"] else f"({text})"


TABLES: dict[str, Callable[[Result], str]] = {
    "published-saved": saved,
    "published-kept": kept,
    "published-memory": memory,
    "published-fits": fits,
    "published-ways-in": ways_in,
    "published-speed": speed,
    "published-sent": sent,
    "published-dispatch": dispatch,
    "published-scaling": scaling,
}
