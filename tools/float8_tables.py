"""Tables of docs/float8.md, from results of the benchmarks that it names. As `tools.kernel_tables`."""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

from tools.kernel_tables import origin

Result = dict[str, Any]


def curves(result: Result, what: str = "recipe of dense products and experts", beside: str = "none") -> str:
    """The last losses of every case, beside those of the first, in words: `what` the cases are, and the first is."""
    numbers = result["numbers"]
    first = numbers["cases"][0]
    sizes = f"{numbers['steps']:,} steps, {first['tokens'] / 1e6:.1f} M tokens"
    lines = [
        f"`{result['command']}`, commit `{result['commit']}`: {sizes}{_seeds(numbers['cases'])}.",
        "",
        f"| {what} | loss of the last steps | beside {beside} | held-out loss | beside {beside} |",
        "|---|---:|---:|---:|---:|",
    ]
    for case in numbers["cases"]:
        held_out = case["held_out_loss"]
        none = "none in 8 bits" if beside == "none" else beside
        name = none if case["case"] == "none" else f"`{case['case']}`"
        # Results of one run a case say nothing of seeds, and of held-out text only the loss.
        share = case["held_out_difference"] if "seeds" in case else held_out / first["held_out_loss"] - 1
        lines.append(
            f"| {name} | {case['last_loss']:.4f} | {_difference(case['difference'], case.get('difference_error'))} "
            f"| {_figure(held_out, '.4f')} | {_difference(share, case.get('held_out_error'))} |"
        )
    return "\n".join(lines)


def _seeds(cases: list[dict[str, Any]]) -> str:
    """Behind the size of the runs: how many seeds a case has, where one has several."""
    counts = {case["case"]: len(case.get("seeds", ["one"])) for case in cases}
    if max(counts.values()) == 1:
        return ""
    same = len(set(counts.values())) == 1
    each = str(counts[cases[0]["case"]]) if same else ", ".join(f"{count} (`{name}`)" for name, count in counts.items())
    return f", seeds a case: {each}; differences are means over seeds +- their standard error"


def _difference(share: float | None, error: float | None) -> str:
    # The first case is nothing beside itself for every seed.
    return _figure(share, "+.2%") + (f" +- {error:.2%}" if error else "")


def launches(result: Result) -> str:
    """TFLOP/s of bare grouped products, for each launch that was tried, beside ours in 16 bits."""
    rows = result["numbers"]["rows"]
    tried = [name for name in rows[0]["tflops"] if name not in ("bf16", "bare")]
    tried += [name for row in rows for name in row["tflops"] if name not in ("bf16", "bare", *tried)]
    names = ["bf16", *dict.fromkeys(tried)]
    lines = [
        f"{origin(result)} TFLOP/s; the operands are already in 8 bits.",
        "",
        "| layer | product | " + " | ".join("16 bits" if name == "bf16" else f"`{name}`" for name in names) + " |",
        "|---|---|" + "---:|" * len(names),
    ]
    for row in rows:
        cells = (f"{row['tflops'][name]:.0f}" if name in row["tflops"] else "" for name in names)
        lines.append(f"| {row['layer']} | {row['pass']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


PASSES = ("forward", "input gradient", "weight gradient")
WAYS = {"bf16": "16 bits", "bare": "8 bits, bare", "quantized": "with quantization", "torch": "torch, bare"}
ALL_WAYS = WAYS | {"torch, row-wise": "torch, row-wise, bare", "torchao": "torchao, bare"}


def products(result: Result) -> str:
    """TFLOP/s of each layer's three products, and how many times as fast as in 16 bits they are together."""
    return _products(result, WAYS)


def products_of_all(result: Result) -> str:
    """The same beside every library that was there."""
    return _products(result, ALL_WAYS)


def _products(result: Result, names: Mapping[str, str]) -> str:
    rows, summary = result["numbers"]["rows"], result["numbers"]["summary"]
    ways = [way for way in names if any(way in row["tflops"] for row in rows)]
    lines = [
        f"{origin(result)} TFLOP/s forward, of the gradient of the input, of the gradient of the weight.",
        "",
        "| layer | " + " | ".join(names[way] for way in ways) + " | bare, over 16 bits | with quantization |",
        "|---|" + "---:|" * (len(ways) + 2),
    ]
    for layer in dict.fromkeys(row["layer"] for row in rows):
        of_pass = {row["pass"]: row["tflops"] for row in rows if row["layer"] == layer}
        cells = [", ".join(_figure(of_pass[name].get(way)) for name in PASSES) for way in ways]
        cells += [f"{summary[layer][way]:.2f}" for way in ("bare", "quantized")]
        lines.append(f"| {layer} | " + " | ".join(cells) + " |")
    return "\n".join(lines + _uncaptured(rows))


def _uncaptured(rows: list[dict[str, Any]]) -> list[str]:
    """A line below a table that names what no graph holds, so that its launches count too."""
    ways = sorted({ALL_WAYS.get(way, way) for row in rows for way in row.get("not_captured", {})})
    return ["", f"Launched from Python and not replayed by a graph: {', '.join(ways)}."] if ways else []


def _figure(value: float | None, form: str = ".0f") -> str:
    return "-" if value is None else f"{value:{form}}"


def networks(result: Result) -> str:
    """Milliseconds of whole networks by each way, and how many times as fast as in 16 bits."""
    rows, copies = result["numbers"]["rows"], result["numbers"]["copies"]
    ways = list(dict.fromkeys(way for row in rows for way in row["both_ms"]))
    plain = ways[0]
    names = [plain, *(f"`{way.partition(',')[0]}`{''.join(way.partition(',')[1:])}" for way in ways[1:])]
    lines = [
        f"{origin(result)} Milliseconds of forward + backward, TFLOP/s of both, and in bold the speed over {plain}.",
        "",
        "| network | " + " | ".join(names) + " |",
        "|---|" + "---:|" * len(ways),
    ]
    for row in rows:
        cells = (_both_passes(row, way, is_plain=way == plain) for way in ways)
        lines.append(f"| {row['network']} | " + " | ".join(cells) + " |")
    took = ", ".join(f"{one['ms']:.2f} ms ({one['experts']})" for one in copies)
    note = ["", f"Not included: the experts' weights are quantized once per optimizer step, in {took}."] if took else []
    return "\n".join([*lines, *note, *_uncaptured(rows)])


def _both_passes(row: dict[str, Any], way: str, *, is_plain: bool) -> str:
    if way not in row["both_ms"]:
        return "-"
    speed = "" if is_plain else f", **{row['speed'][way]:.2f}**"
    return f"{row['forward_ms'][way]:.2f} + {row['backward_ms'][way]:.2f}, {row['tflops'][way]:.0f}{speed}"


def network_errors(result: Result) -> str:
    """Signal over noise of the networks' outputs and gradients, against float32."""
    rows = result["numbers"]["rows"]
    # Rows that came in 8 bits are what the network makes of those in 16.
    ways = list(dict.fromkeys(way for row in rows for way in row["decibels"] if "," not in way))
    lines = [
        f"{origin(result)} dB against float32: output, gradient of the input, of each matrix.",
        "",
        "| network | " + " | ".join(ways) + " |",
        "|---|" + "---:|" * len(ways),
    ]
    for row in rows:
        cells = (", ".join(f"{value:.1f}" for value in row["decibels"][way].values()) for way in ways)
        lines.append(f"| {row['network']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def quantization(result: Result) -> str:
    """Bandwidth of what quantizes alone."""
    lines = [
        f"{origin(result)}",
        "",
        "| model | kernel | MB | us | TB/s | over a copy |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in result["numbers"]["rows"]:
        moved, us = row["bytes"], row["us"]
        lines.append(
            f"| {row['model']} | {row['case']} | {moved / 1e6:.0f} | {us:.0f} | {moved / us / 1e6:.2f} "
            f"| {row['share_of_copy']:.0%} |"
        )
    return "\n".join(lines)


def power(result: Result) -> str:
    """Clock and power of steady steps; the first and the last ones are half of something else."""
    numbers = result["numbers"]
    lines = [
        f"{origin(result)} `{numbers['target']} {' '.join(numbers['overrides'])}`, medians of steps 4 to "
        f"{result['environment']['steps'] - 2}.",
        "",
        "| | tokens/s | clock, MHz | at most | power, W | at most |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for case in numbers["cases"]:
        steady = case["steps"][2:-2]  # the first that is told is step 2
        told = {name: median(step[name] for step in steady) for name in steady[0]}
        lines.append(
            f"| {case['case']} | {told['tokens_per_second']:,.0f} | {told['clock_mhz']:,.0f} "
            f"| {case['most_clock_mhz']:,.0f} | {told['power_watts']:,.0f} | {case['most_power_watts']:,.0f} |"
        )
    return "\n".join(lines)


TABLES: dict[str, Callable[[Result], str]] = {
    "float8-curves": curves,
    "muon-curves": partial(curves, what="optimizer", beside="AdamW"),
    "optimizer-curves": partial(curves, what="state of the optimizer", beside="float32"),
    "float8-launches": launches,
    "float8-products": products,
    "float8-products-of-all": products_of_all,
    "float8-ffn": networks,
    "float8-ffn-errors": network_errors,
    "float8-quantize": quantization,
    "float8-power": power,
}
"""By the name that a document calls them."""
