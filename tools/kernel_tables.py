"""Tables about kernels, 8-bit products and dispatch, as far as tables.toml cannot say them.

Each function takes a whole result and gives Markdown. What the project promised stands here as numbers (`BAR_...`), and
whether it was met is worked out from the measurement, so that a new one changes the verdict as well.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from statistics import geometric_mean, median
from typing import Any

from tools.tables import Result, origin, shown, table

BAR_OVER_BMM = 1.00
BAR_OVER_GROUPED_MM = 1.05
BAR_LEAST_OVER_GROUPED_MM = 0.93
BAR_GATHER = 0.97
BAR_BLOCK_SPEED = 1.5
BAR_BLOCK_KEPT = 0.5
BAR_LOSS_TIME = 1.05
BAR_LOSS_GIB = 2.0
BAR_COPY = 0.80

MEAN = "geometric mean"
COMPILED = "torch.compile, full logits"
PASSES = ("forward", "input gradient", "weight gradient")
WAYS = {"bf16": "16 bits", "bare": "8 bits, bare", "quantized": "with quantization", "torch": "torch, bare"}


def one_gpu(result: Result) -> str:
    """Origin of a result whose benchmark used one GPU, however many the machine has."""
    environment = {name: value for name, value in result["environment"].items() if name not in ("ranks", "devices")}
    return origin(result | {"environment": environment}) + "."


def grouped_gemm_bars(result: Result) -> str:
    """Ratios of the grouped GEMM beside what was promised."""
    ratios = result["numbers"]["grouped_gemm"]["summary"]
    balanced, skewed = ratios["balanced, over grouped_mm"], ratios["skewed, over grouped_mm"]
    least = min(balanced["least"], skewed["least"])
    rows = [
        f"balanced, over cuBLAS bmm | {_against(ratios['balanced, over bmm'], BAR_OVER_BMM)}",
        f"balanced, over `grouped_mm` | {_against(balanced, BAR_OVER_GROUPED_MM)}",
        f"skewed, over `grouped_mm` | {_against(skewed, BAR_OVER_GROUPED_MM)}",
        f"any single case, over `grouped_mm` |  | {least:.3f} | least >= {BAR_LEAST_OVER_GROUPED_MM:.2f} | "
        f"{_verdict(least >= BAR_LEAST_OVER_GROUPED_MM)}",
    ]
    for name in ("forward", "weight gradient"):
        ratio = ratios[f"{name}, gather fused over plain"]
        rows.append(
            f"{name} with row gather, over the product without | {_against(ratio, BAR_GATHER, every_case=True)}"
        )
    rows += [f"{name} | {ratio[MEAN]:.3f} | {ratio['least']:.3f} |  | " for name, ratio in _without_bar(ratios)]
    tile_us = [extra["milliseconds"]["tile table"] * 1e3 for extra in result["numbers"]["grouped_gemm"]["extras"]]
    return (
        table("speed of ours | geometric mean: | least case: | bar | verdict", rows)
        + "\n\nThe times of ours exclude the tile table, which a layer's six products share; making it takes "
        f"{min(tile_us):.1f} to {max(tile_us):.1f} us."
    )


def _against(ratio: Result, bar: float, every_case: bool = False) -> str:
    """Mean, least, bar and verdict; a bar for every case is met when the least case meets it."""
    mean, least = ratio[MEAN], ratio["least"]
    verdict = _verdict(mean >= bar)
    if every_case and least < bar <= mean:
        verdict = "met in the mean, **missed** by the least case"
    return f"{mean:.3f} | {least:.3f} | >= {bar:.2f} | {verdict}"


def _without_bar(ratios: Result) -> Iterator[tuple[str, Result]]:
    """Further figures that a reader wants to know."""
    for name, others in ratios["by product"].items():
        yield f"{name} alone, balanced, over cuBLAS bmm", others["bmm"]
    for name in ("forward", "weight gradient"):
        yield f"{name} with row gather, over a copy and the product", ratios[f"{name}, gather fused over apart"]
    name = "weight gradient, sum fused over apart"
    yield "weight gradient with float32 sum, over the product and `add_`", ratios[name]


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def grouped_gemm_products(result: Result) -> str:
    """TFLOP/s of each product on each share of a model, balanced and skewed side by side."""
    pairs: dict[tuple[str, str], dict[bool, Result]] = {}
    for row in result["numbers"]["grouped_gemm"]["tflops"]:
        pairs.setdefault((row["case"].rpartition(", ")[0], row["product"]), {})[row["balanced"]] = row
    rows = []
    for (case, name), pair in pairs.items():
        even, uneven = pair[True], pair[False]
        cells = [f"{even[way]:.0f}" for way in ("ours", "grouped_mm", "bmm", "mm")]
        cells += [f"{even['ours'] / even[way]:.2f}" for way in ("bmm", "grouped_mm")]
        cells += [f"{uneven[way]:.0f}" for way in ("ours", "grouped_mm", "mm")]
        rows.append(f"{case} | {name} | {' | '.join(cells)} | {uneven['ours'] / uneven['grouped_mm']:.2f}")
    return table(
        "case | product | ours: | `grouped_mm`: | bmm: | mm: | / bmm: | / `grouped_mm`: | skewed: ours: | "
        "`grouped_mm`: | mm: | / `grouped_mm`:",
        rows,
    )


def expert_block(result: Result) -> str:
    """Times and memory of the expert block, even and skewed loads, and the verdict."""
    parts = [result["numbers"][name] for name in ("expert_block", "expert_block_skewed")]
    rows = []
    for part in parts:
        load = f"skewed, {part['shape']['skew']:g}" if part["shape"]["skew"] else "balanced"
        for name, block in part["blocks"].items():
            rows.append(
                f"{load} | {name} | {block['forward_ms']:.2f} | {block['backward_ms']:.2f} | {block['ms']:.2f} | "
                f"{block['kept_mib']:,.0f} | {block['peak_mib']:,.0f} | {block['ours_times_as_fast']:.2f} | "
                f"{block['ours_keeps']:.2f}"
            )
    head = "load | block | forward ms: | backward ms: | both ms: | kept MiB: | peak MiB: | ours, speed: | ours, kept:"
    return "\n".join([table(head, rows), "", *map(_block_verdict, parts)])


def _block_verdict(part: Result) -> str:
    """Ours against the fastest and the most frugal of torch's ways."""
    blocks, ours = part["blocks"], part["blocks"]["ours"]
    torch_ways = [name for name in blocks if name.startswith("torch")]
    fastest = min(torch_ways, key=lambda name: blocks[name]["ms"])
    speed = blocks[fastest]["ms"] / ours["ms"]
    kept = ours["kept_mib"] / min(blocks[name]["kept_mib"] for name in torch_ways)
    peak = ours["peak_mib"] / min(blocks[name]["peak_mib"] for name in torch_ways)
    return (
        f"* {'Skewed' if part['shape']['skew'] else 'Balanced'}: {speed:.2f} times as fast as the fastest torch way"
        f" ({fastest}), bar >= {BAR_BLOCK_SPEED:.1f}: {_verdict(speed >= BAR_BLOCK_SPEED)}; {kept:.2f} of the bytes"
        f" that the most frugal keeps, bar <= {BAR_BLOCK_KEPT:.1f}: {_verdict(kept <= BAR_BLOCK_KEPT)}. The peak, for"
        f" which there is no bar, is {peak:.2f} of torch's lowest."
    )


def linear_cross_entropy(result: Result) -> str:
    """Times and memory of output projection and loss, and the verdict."""
    candidates = result["numbers"]["linear_cross_entropy"]["candidates"]
    rows = (
        f"{name} | {way['ms']:.2f} | {way['time_of_compiled']:.3f} | {way['peak_gib']:.2f} | {way['loss']:.3f}"
        for name, way in candidates.items()
    )
    ours = candidates["ours"]
    ratio, gib = ours["time_of_compiled"], ours["peak_gib"]
    lines = [
        table("way | ms: | of compiled: | peak GiB: | loss:", rows),
        "",
        f"* Time of ours over the compiled version: {ratio:.3f}, bar <= {BAR_LOSS_TIME:.2f}: "
        f"{_verdict(ratio <= BAR_LOSS_TIME)}.",
        f"* Peak of ours: {gib:.2f} GiB, bar <= {BAR_LOSS_GIB:.1f} GiB: {_verdict(gib <= BAR_LOSS_GIB)}.",
    ]
    liger = {name: way for name, way in candidates.items() if name.startswith("Liger")}
    wide = {name: way for name, way in liger.items() if name.endswith("float32 sum")}
    for kind, some in (("of any kind", liger), ("that sums the head's gradient in float32, as ours does", wide)):
        if some:
            name = min(some, key=lambda name: some[name]["ms"])
            best = some[name]
            lines.append(
                f"* The fastest Liger {kind} ({name.removeprefix('Liger, ')}): {best['ms']:.2f} ms and "
                f"{best['peak_gib']:.2f} GiB; ours takes {ours['ms'] / best['ms']:.3f} of its time and "
                f"{gib / best['peak_gib']:.2f} of its peak."
            )
    return "\n".join(lines)


def pointwise(result: Result) -> str:
    """Times of the operators that move bytes, and which of them are below the bar."""
    measured = result["numbers"]["pointwise"]
    rows = []
    below: dict[str, list[str]] = {}
    for row in measured["rows"]:
        rows.append(
            f"{row['tokens']:,} | {row['model']} | {row['operator']} | {row['pass']} | {row['bytes'] / 1e6:,.1f} | "
            f"{row['us']:,.1f} | {row['share_of_copy']:.2f} | {row['share_of_neg']:.2f} | "
            f"{shown(row['eager_us'], ',.0f')}"
        )
        if row["share_of_copy"] < BAR_COPY:
            where = f"{row['model']}, {row['tokens']:,}: {row['share_of_copy']:.3f}"
            below.setdefault(f"{row['operator']} {row['pass']}", []).append(where)
    met = len(rows) - sum(map(len, below.values()))
    lines = [
        f"A large copy moves {measured['copy_bytes_per_s'] / 1e12:.2f} TB/s, read and written. Bar: {BAR_COPY:.2f} of"
        " it.",
        "",
        table(
            "tokens: | model | operator | pass | MB: | us: | of copy: | of negation: | definition us:",
            rows,
        ),
        "",
        f"Met by {met} of {len(rows)} rows" + ("; **missed** by:\n" if below else "."),
        *(f"* {operator} ({'; '.join(where)})" for operator, where in below.items()),
    ]
    return "\n".join(lines)


def rings(result: Result) -> str:
    """TFLOP/s of one product after the other by Triton's kernel, by each launch of Hopper's own and by cuBLAS."""
    checks = [name for name in dict.fromkeys(result["numbers"]["checks"]) if name not in ("triton", "mm")]
    rows = []
    for row in result["numbers"]["rows"]:
        cells = (f"{row['tflops'][name]:.0f}" for name in ("triton", *checks, "mm"))
        rows.append(f"{row['case']} | {' | '.join(cells)}")
    heads = ("case", "Triton:", *(f"`{name}`:" for name in checks), "mm:")
    return f"{one_gpu(result)}\n\n{table(' | '.join(heads), rows)}"


def rings_over_triton(result: Result) -> str:
    """The same over Triton's kernel, in the mean of all cases with even and with uneven loads."""
    ratios: dict[tuple[str, str], dict[bool, list[float]]] = {}
    for row in result["numbers"]["rows"]:
        for name in (*result["numbers"]["checks"], "mm"):
            pair = ratios.setdefault((row.get("product", "weight_gradient"), name), {True: [], False: []})
            pair[row["balanced"]].append(row["tflops"][name] / row["tflops"]["triton"])
    rows = []
    for (gemm, name), pair in ratios.items():
        means = (f"{geometric_mean(pair[even]):.3f} ({min(pair[even]):.3f})" for even in (True, False))
        launch = name if name == "mm" else f"`{name}`"
        rows.append(f"{gemm.replace('_', ' ')} | {launch} | {' | '.join(means)}")
    made = table("product | launch | balanced, over Triton (least): | skewed (least):", rows)
    return f"{one_gpu(result)}\n\n{made}"


def attention(result: Result) -> str:
    """Milliseconds and TFLOP/s of cuDNN's attention, and of ours or of flash-attn-4."""
    version = result["environment"].get("flash_attn_4")
    rival, title = ("hopper", "ours") if version is None else ("flash-4", "flash-4")
    package = "" if version is None else f" flash-attn-4 {version}."
    rows = []
    for name, ways in result["numbers"]["times"].items():
        if rival in ways:
            backward = ways["cudnn"]["backward_ms"] / ways[rival]["backward_ms"]
            cells = f"{_both_passes(ways['cudnn'])} | {_both_passes(ways[rival])}"
            rows.append(f"{name} | {cells} | {backward:.2f} | {ways[rival]['speed_of_first']:.2f}")
    return f"{one_gpu(result)}{package} Milliseconds forward and backward, TFLOP/s of either.\n\n" + table(
        f"shape | cuDNN: | {title}: | backward: | both:", rows
    )


def attention_masked(result: Result) -> str:
    """Milliseconds of attention over documents, windows and chunks, and memory, beside the faster of torch's paths."""
    rows = []
    for name, ways in result["numbers"]["times"].items():
        ours = ways["triton"]
        faster = max((way for way in ways if way != "triton"), key=lambda way: ways[way]["speed_of_torch"])
        torchs = f"{faster}: {_both_passes(ways[faster])}, {ways[faster]['peak_gb']:.2f} GB"
        rows.append(
            f"{name} | {torchs} | {_both_passes(ours)}, {ours['peak_gb']:.2f} GB | {ours['speed_of_torch']:.2f}"
        )
    return (
        f"{one_gpu(result)} Milliseconds forward and backward, TFLOP/s of either over the pairs that are seen, memory."
        "\n\n" + table("case | torch's faster path: | ours: | speed:", rows)
    )


def _both_passes(way: dict[str, float]) -> str:
    return (
        f"{way['forward_ms']:.2f} + {way['backward_ms']:.2f}, {way['forward_tflops']:.0f} and "
        f"{way['backward_tflops']:.0f}"
    )


def optimizer_step(result: Result) -> str:
    """The update of each format in its usual launch, beside PyTorch's of float32 state."""
    numbers = result["numbers"]
    theirs, rows = numbers["torch_us"], numbers["updates"]

    def line(name: str, has_remainders: bool, bytes_: float, us: float) -> str:
        share = bytes_ / us * 1e6 / numbers["copy_bytes_per_s"]
        remainders = "yes" if has_remainders else "no"
        return f"{name} | {remainders} | {bytes_ / 1e9:.1f} GB | {us:,.0f} | {us / theirs:.2f} | {share:.0%}"

    ours = (line(row["moments"], row["remainders"], row["bytes"], row["launches"]["8 blocks, 4 warps"]) for row in rows)
    head = "moments | remainders | bytes that must move: | microseconds: | beside PyTorch's: | of a copy's rate:"
    made = table(head, [line("fp32, by PyTorch", False, rows[0]["bytes"], theirs), *ours])
    return f"{one_gpu(result)}\n\n{made}"


def curves(result: Result, what: str = "recipe of dense products and experts", beside: str = "none") -> str:
    """The last losses of every case, beside those of the first, in words: `what` the cases are, and the first is."""
    numbers = result["numbers"]
    first = numbers["cases"][0]
    rows = []
    for case in numbers["cases"]:
        held_out = case["held_out_loss"]
        name = f"`{case['case']}`"
        if case["case"] == "none":
            name = "none in 8 bits" if beside == "none" else beside
        # Results of one run a case say nothing of seeds, and of held-out text only the loss.
        share = case["held_out_difference"] if "seeds" in case else held_out / first["held_out_loss"] - 1
        rows.append(
            f"{name} | {case['last_loss']:.4f} | {_difference(case['difference'], case.get('difference_error'))} | "
            f"{shown(held_out, '.4f') or '-'} | {_difference(share, case.get('held_out_error'))}"
        )
    return (
        f"`{result['command']}`, commit `{result['commit']}`: {numbers['steps']:,} steps, "
        f"{first['tokens'] / 1e6:.1f} M tokens{_seeds(numbers['cases'])}.\n\n"
        + table(f"{what} | loss of the last steps: | beside {beside}: | held-out loss: | beside {beside}:", rows)
    )


def _seeds(cases: list[Result]) -> str:
    """Behind the size of the runs: how many seeds a case has, where one has several."""
    counts = {case["case"]: len(case.get("seeds", ["one"])) for case in cases}
    if max(counts.values()) == 1:
        return ""
    same = len(set(counts.values())) == 1
    each = str(counts[cases[0]["case"]]) if same else ", ".join(f"{count} (`{name}`)" for name, count in counts.items())
    return f", seeds a case: {each}; differences are means over seeds +- their standard error"


def _difference(share: float | None, error: float | None) -> str:
    # The first case is nothing beside itself for every seed.
    return (shown(share, "+.2%") or "-") + (f" +- {error:.2%}" if error else "")


def float8_launches(result: Result) -> str:
    """TFLOP/s of bare grouped products, for each launch that was tried, beside ours in 16 bits."""
    rows = result["numbers"]["rows"]
    tried = [name for name in dict.fromkeys(name for row in rows for name in row["tflops"]) if name not in WAYS]
    made = []
    for row in rows:
        cells = (shown(row["tflops"].get(name), ".0f") for name in ("bf16", *tried))
        made.append(f"{row['layer']} | {row['pass']} | {' | '.join(cells)}")
    head = " | ".join(("layer", "product", "16 bits:", *(f"`{name}`:" for name in tried)))
    return f"{one_gpu(result)} TFLOP/s; the operands are already in 8 bits.\n\n{table(head, made)}"


def float8_products(result: Result) -> str:
    """TFLOP/s of each layer's three products, and how many times as fast as in 16 bits they are together."""
    rows, summary = result["numbers"]["rows"], result["numbers"]["summary"]
    ways = [way for way in WAYS if any(way in row["tflops"] for row in rows)]
    made = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        of_pass = {row["pass"]: row["tflops"] for row in rows if row["layer"] == layer}
        cells = [", ".join(shown(of_pass[name].get(way), ".0f") or "-" for name in PASSES) for way in ways]
        cells += [f"{summary[layer][way]:.2f}" for way in ("bare", "quantized")]
        made.append(f"{layer} | {' | '.join(cells)}")
    head = f"layer | {' | '.join(f'{WAYS[way]}:' for way in ways)} | bare, over 16 bits: | with quantization:"
    return (
        f"{one_gpu(result)} TFLOP/s forward, of the gradient of the input, of the gradient of the weight.\n\n"
        + table(head, made)
        + _uncaptured(rows)
    )


def _uncaptured(rows: list[Result]) -> str:
    """A line below a table that names what no graph holds, so that its launches count too."""
    ways = sorted({WAYS.get(way, way) for row in rows for way in row.get("not_captured", {})})
    return f"\n\nLaunched from Python and not replayed by a graph: {', '.join(ways)}." if ways else ""


def float8_ffn(result: Result) -> str:
    """Milliseconds of whole networks by each way, and how many times as fast as in 16 bits."""
    rows, copies = result["numbers"]["rows"], result["numbers"]["copies"]
    plain, *others = dict.fromkeys(way for row in rows for way in row["both_ms"])

    def cell(row: Result, way: str) -> str:
        if way not in row["both_ms"]:
            return "-"
        speed = "" if way == plain else f", **{row['speed'][way]:.2f}**"
        return f"{row['forward_ms'][way]:.2f} + {row['backward_ms'][way]:.2f}, {row['tflops'][way]:.0f}{speed}"

    made = [f"{row['network']} | {' | '.join(cell(row, way) for way in (plain, *others))}" for row in rows]
    names = (f"`{way.partition(',')[0]}`{''.join(way.partition(',')[1:])}:" for way in others)
    took = ", ".join(f"{copy['ms']:.2f} ms ({copy['experts']})" for copy in copies)
    note = f"\n\nNot included: the experts' weights are quantized once per optimizer step, in {took}." if took else ""
    return (
        f"{one_gpu(result)} Milliseconds of forward + backward, TFLOP/s of both, and in bold the speed over {plain}."
        "\n\n" + table(" | ".join(("network", f"{plain}:", *names)), made) + note + _uncaptured(rows)
    )


def float8_ffn_errors(result: Result) -> str:
    """Signal over noise of the networks' outputs and gradients, against float32."""
    rows = result["numbers"]["rows"]
    # Rows that came in 8 bits are what the network makes of those in 16.
    ways = list(dict.fromkeys(way for row in rows for way in row["decibels"] if "," not in way))
    made = []
    for row in rows:
        cells = (", ".join(f"{value:.1f}" for value in row["decibels"][way].values()) for way in ways)
        made.append(f"{row['network']} | {' | '.join(cells)}")
    return f"{one_gpu(result)} dB against float32: output, gradient of the input, of each matrix.\n\n" + table(
        f"network | {' | '.join(f'{way}:' for way in ways)}", made
    )


def float8_power(result: Result) -> str:
    """Clock and power of steady steps; the first and the last ones are half of something else."""
    numbers = result["numbers"]
    rows = []
    for case in numbers["cases"]:
        steady = case["steps"][2:-2]  # the first that is written is step 2
        middle = {name: median(step[name] for step in steady) for name in steady[0]}
        rows.append(
            f"{case['case']} | {middle['tokens_per_second']:,.0f} | {middle['clock_mhz']:,.0f} | "
            f"{case['most_clock_mhz']:,.0f} | {middle['power_watts']:,.0f} | {case['most_power_watts']:,.0f}"
        )
    return (
        f"{one_gpu(result)} `{numbers['target']} {' '.join(numbers['overrides'])}`, medians of steps 4 to "
        f"{result['environment']['steps'] - 2}.\n\n"
        + table(" | tokens/s: | clock, MHz: | at most: | power, W: | at most:", rows)
    )


def dispatch_speed(result: Result) -> str:
    """Microseconds and useful bandwidth of every way, and how much faster ours is than all-to-all."""
    rows = result["numbers"]["speed"]
    # Results from before there were 8 bits do not say the payload.
    in_8_bits = [row.get("payload", "bf16") == "float8" for row in rows]
    base = {
        (row["shape"], row["tokens"], row["routing"]): row
        for row, is_small in zip(rows, in_8_bits, strict=True)
        if row["way"] == "all_to_all" and not is_small
    }
    made = []
    for row, is_small in zip(rows, in_8_bits, strict=True):
        other = base[row["shape"], row["tokens"], row["routing"]]
        ratios = (f"{other[f'{half}_us'] / row[f'{half}_us']:.1f}" for half in ("dispatch", "combine"))
        way = f"{row['way']}, 8 bits out" if is_small else row["way"]
        made.append(
            f"{row['shape']} | {row['tokens']:,} | {row['routing']} | {way} | "
            f"{row['dispatch_us']:,.0f} us | {row['combine_us']:,.0f} us | {row['dispatch_GB/s']:.0f}, "
            f"{row['combine_GB/s']:.0f} | {', '.join(ratios)}"
        )
    head = "shape | tokens of a rank: | routing | way | dispatch: | combine: | useful GB/s: | over all-to-all:"
    return (
        f"{origin(result)}. Microseconds of the slowest rank, and useful bytes that leave a rank over the time.\n\n"
        + table(head, made)
    )


def balanced_plan(result: Result) -> str:
    """Projected steps by recorded loads with and without balance, and their share of the speed of forced balance."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["numbers"]["steps"]:
        if row["dispatch.balance"] != "forced":
            cases.setdefault((row["on"], row["loads"]), []).append(row)
    made = []
    for (machine, loads), rows in cases.items():
        columns = [
            ", ".join(f"{row['fullest']:.2f}" for row in rows),
            ", ".join(f"{row['replicas']:.1f}" for row in rows[1:]),
            ", ".join(f"{1e3 * row['exposed_seconds']:.1f}" for row in rows[1:]) + " ms",
            ", ".join(f"{1e3 * row['step_seconds']:,.0f}" for row in rows) + " ms",
            ", ".join(f"{row['of_forced']:.1%}" for row in rows),
        ]
        made.append(f"{machine} | {loads} | {' | '.join(columns)}")
    head = "on | loads | fullest rank: | replicas: | waiting for them: | step: | of forced balance:"
    return (
        f"Projected, commit `{result['commit']}`. Columns have none, bounded and exact, or the last two of them.\n\n"
        + table(head, made)
    )


def balanced_steps(result: Result) -> str:
    """Measured steps without balance, with it and with forced balance; beside each what the plan projects."""
    numbers = result["numbers"]
    made = []
    for bits, way in product(("bf16", "8 bits"), ("none", "bounded", "tight", "exact", "forced")):
        row = numbers.get(f"step {bits}, {way}")
        if row is None:
            continue
        forced = numbers.get(f"step {bits}, forced", {}).get("tokens_per_second_per_device")
        speed = row["tokens_per_second_per_device"]
        projected = numbers["plan"]["projected"][f"step {bits}, {way}"]["tokens_per_second_per_device"]
        fullest = row["balance_load_after"] or (1.0 if way == "forced" else row["balance_load_before"])
        made.append(
            f"{bits} | {'bounded, 2 %' if way == 'tight' else way} | {speed:,.0f} | "
            f"{shown(forced and speed / forced, '.1%')} | {shown(fullest, '.2f')} | "
            f"{row['peak_memory_bytes'] / 1e9:.1f} GB | {projected / speed - 1:+.1%}"
        )
    head = "bits | `dispatch.balance` | tokens/s/GPU: | of forced balance: | fullest rank: | memory: | plan:"
    return f"{origin(result)}, natural routing but where forced.\n\n{table(head, made)}"


def balanced_layer(result: Result) -> str:
    """One layer with and without balance, by workload."""
    cases: dict[str, dict[str, Result]] = {}
    for row in result["numbers"]["layer"]["rows"]:
        cases.setdefault(row["workload"], {})[row["way"]] = row
    made = []
    for name, ways in cases.items():
        times = " | ".join(f"{ways[way]['ms']:.2f} ms" for way in ("none", "bounded", "exact"))
        replicas = f"{ways['bounded']['replicas']}, {ways['exact']['replicas']}"
        made.append(f"{name} | {ways['none']['fullest_over_even']:.2f} | {times} | {replicas}")
    return table("workload | fullest rank: | none: | bounded: | exact: | replicas:", made)


TABLES: dict[str, Callable[[Result], str]] = {
    "origin": one_gpu,
    "grouped_gemm_bars": grouped_gemm_bars,
    "grouped_gemm_products": grouped_gemm_products,
    "expert_block": expert_block,
    "linear_cross_entropy": linear_cross_entropy,
    "pointwise": pointwise,
    "rings": rings,
    "rings_over_triton": rings_over_triton,
    "attention": attention,
    "attention-masked": attention_masked,
    "optimizer-step": optimizer_step,
    "float8-curves": curves,
    "muon-curves": partial(curves, what="optimizer", beside="AdamW"),
    "optimizer-curves": partial(curves, what="state of the optimizer", beside="float32"),
    "float8-launches": float8_launches,
    "float8-products": float8_products,
    "float8-ffn": float8_ffn,
    "float8-ffn-errors": float8_ffn_errors,
    "float8-power": float8_power,
    "dispatch-speed": dispatch_speed,
    "balanced-plan": balanced_plan,
    "balanced-steps": balanced_steps,
    "balanced-layer": balanced_layer,
}
