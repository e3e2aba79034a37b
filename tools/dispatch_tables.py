"""The tables of what it takes to bring tokens to their experts and back. As `tools.kernel_tables`."""

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]


def dispatch_speed(result: Result) -> str:
    """Microseconds and useful bandwidth of every way, and how much faster ours is than all-to-all."""
    lines = [
        origin(result) + ". Microseconds of the slowest rank, and useful bytes that leave a rank over the time.",
        "",
        "| shape | tokens of a rank | routing | way | dispatch | combine | useful GB/s | over all-to-all |",
        "|---|---:|---|---|---:|---:|---:|---:|",
    ]
    rows = result["numbers"]["speed"]
    base = {_case(row): row for row in rows if row["way"] == "all_to_all" and not _in_8_bits(row)}
    for row in rows:
        other, way = base[_case(row)], row["way"] + (", 8 bits out" if _in_8_bits(row) else "")
        ratios = (f"{other[f'{half}_us'] / row[f'{half}_us']:.1f}" for half in ("dispatch", "combine"))
        lines.append(
            f"| {row['shape']} | {row['tokens']:,} | {row['routing']} | {way} | {row['dispatch_us']:,.0f} us | "
            f"{row['combine_us']:,.0f} us | {row['dispatch_GB/s']:.0f}, {row['combine_GB/s']:.0f} | "
            f"{', '.join(ratios)} |"
        )
    return "\n".join(lines)


def dispatch_launches(result: Result) -> str:
    """One launch at a time changed, against those that are the default."""
    lines = [
        origin(result) + ". 8,192 tokens of a rank, from a graph, one thing changed.",
        "",
        "| shape | changed | dispatch | combine |",
        "|---|---|---:|---:|",
    ]
    for row in result["numbers"]["launches"]:
        times = f"{row['dispatch_us']:,.0f} us | {row['combine_us']:,.0f} us"
        lines.append(f"| {row['shape']} | {row['changed']} | {times} |")
    return "\n".join(lines)


def moe_layer(result: Result) -> str:
    """Dispatch, experts and combine together."""
    lines = [
        origin(result) + ". FLOPs of the experts' products of the mean rank over the time of the slowest.",
        "",
        "| shape | routing | way | forward | TFLOP/s | backward | TFLOP/s |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in result["numbers"]["layers"]:
        lines.append(
            f"| {row['shape']} | {row['routing']} | {row['way']} | {row['forward_us']:,.0f} us | "
            f"{row['forward_TFLOP/s']:.0f} | {row['backward_us']:,.0f} us | {row['backward_TFLOP/s']:.0f} |"
        )
    return "\n".join(lines)


def host_waits(result: Result) -> str:
    """Waits of the host in one step, by stage."""
    environment = result["environment"]
    lines = [
        f"{origin(result)}; `{' '.join(environment['fixed'])}`, {environment['micro_batches']} micro-batches.",
        "",
        "| dispatch, stage, kernels | waits of a step | of each MoE layer and micro-batch | loss | gradient norm |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, row in result["numbers"].items():
        lines.append(
            f"| {name} | {row['waits']} | {row['of_a_layer_and_micro_batch']:g} | {row['loss']:.4f} | "
            f"{row['gradient_norm']:.3f} |"
        )
    return "\n".join(lines)


def balanced_plan(result: Result) -> str:
    """Projected steps by recorded loads with and without balance, and their share of the speed of forced balance."""
    head = "| on | loads | fullest rank | replicas | waiting for them | step | of forced balance |"
    lines = [
        f"Projected, commit `{result['commit']}`. Columns have none, bounded and exact, or the last two of them.",
        *("", head, "|---|---|---:|---:|---:|---:|---:|"),
    ]
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["numbers"]["steps"]:
        if row["dispatch.balance"] != "forced":
            cases.setdefault((row["on"], row["loads"]), []).append(row)
    for (place, loads), rows in cases.items():
        columns = [
            ", ".join(f"{row['fullest']:.2f}" for row in rows),
            ", ".join(f"{row['replicas']:.1f}" for row in rows[1:]),
            ", ".join(f"{1e3 * row['exposed_seconds']:.1f}" for row in rows[1:]) + " ms",
            ", ".join(f"{1e3 * row['step_seconds']:,.0f}" for row in rows) + " ms",
            ", ".join(f"{row['of_forced']:.1%}" for row in rows),
        ]
        lines.append(f"| {place} | {loads} | {' | '.join(columns)} |")
    return "\n".join(lines)


def balanced_steps(result: Result) -> str:
    """Measured steps without balance, with it and with forced balance; beside each what the plan projects."""
    numbers = result["numbers"]
    lines = [
        f"{origin(result)}, natural routing but where forced.",
        "",
        "| bits | `dispatch.balance` | tokens/s/GPU | of forced balance | fullest rank | memory | plan |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for bits in ("bf16", "8 bits"):
        forced = numbers.get(f"step {bits}, forced", {}).get("tokens_per_second_per_device")
        for way in ("none", "bounded", "tight", "exact", "forced"):
            row = numbers.get(f"step {bits}, {way}")
            if row is None:
                continue
            speed = row["tokens_per_second_per_device"]
            projected = numbers["plan"]["projected"][f"step {bits}, {way}"]["tokens_per_second_per_device"]
            fullest = row["balance_load_after"] or (1.0 if way == "forced" else row["balance_load_before"])
            columns = [
                f"{speed:,.0f}",
                "" if forced is None else f"{speed / forced:.1%}",
                "" if fullest is None else f"{fullest:.2f}",
                f"{row['peak_memory_bytes'] / 1e9:.1f} GB",
                f"{projected / speed - 1:+.1%}",
            ]
            name = "bounded, 2 %" if way == "tight" else way
            lines.append(f"| {bits} | {name} | {' | '.join(columns)} |")
    return "\n".join(lines)


def balanced_layer(result: Result) -> str:
    """One layer with and without balance, by workload."""
    lines = [
        "| workload | fullest rank | none | bounded | exact | replicas |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["numbers"]["layer"]["rows"]:
        cases.setdefault(row["workload"], {})[row["way"]] = row
    for name, ways in cases.items():
        times = " | ".join(f"{ways[way]['ms']:.2f} ms" for way in ("none", "bounded", "exact"))
        replicas = f"{ways['bounded']['replicas']}, {ways['exact']['replicas']}"
        lines.append(f"| {name} | {ways['none']['fullest_over_even']:.2f} | {times} | {replicas} |")
    return "\n".join(lines)


def origin(result: Result) -> str:
    """Where and when it was measured."""
    environment = result["environment"]
    where = f"{environment['ranks']} x {environment['device']} (torch {environment['torch']})"
    return f"Measured on {where}, commit `{result['commit']}`"


def _in_8_bits(row: dict[str, Any]) -> bool:
    """Results from before there were 8 bits do not say."""
    return row.get("payload", "bf16") == "float8"


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["shape"], row["tokens"], row["routing"]


TABLES: dict[str, Callable[[Result], str]] = {
    "balanced-steps": balanced_steps,
    "balanced-layer": balanced_layer,
    "dispatch-speed": dispatch_speed,
    "dispatch-launches": dispatch_launches,
    "moe-layer": moe_layer,
    "host-waits": host_waits,
    "balanced-plan": balanced_plan,
}
