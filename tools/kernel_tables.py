"""The tables of docs/kernels.md, made from a result of `python -m benchmarks.kernels.every`.

Each function of `TABLES` takes the whole result and gives Markdown. What the project promised stands here as numbers
(`BAR_...`), and whether it was met is worked out from the measurement, so that a new one changes the verdict as well.
`tools.documents` puts the tables between their markers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import geometric_mean
from typing import Any

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

Result = dict[str, Any]


def origin(result: Result) -> str:
    """On what, with what and from which commit it was measured."""
    environment = result["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "cuda") if name in environment)
    return f"Measured on one {environment['device']} ({versions}), commit `{result['commit']}`."


def grouped_gemm_bars(result: Result) -> str:
    """Ratios of the grouped GEMM beside what was promised."""
    ratios = result["numbers"]["grouped_gemm"]["summary"]
    balanced, skewed = ratios["balanced, over grouped_mm"], ratios["skewed, over grouped_mm"]
    bmm = ratios["balanced, over bmm"]
    least = min(balanced["least"], skewed["least"])
    rows = [
        ("balanced, over cuBLAS bmm", *_mean_row(bmm, BAR_OVER_BMM)),
        ("balanced, over `grouped_mm`", *_mean_row(balanced, BAR_OVER_GROUPED_MM)),
        ("skewed, over `grouped_mm`", *_mean_row(skewed, BAR_OVER_GROUPED_MM)),
        (
            "any single case, over `grouped_mm`",
            "",
            f"{least:.3f}",
            f"least >= {BAR_LEAST_OVER_GROUPED_MM:.2f}",
            _verdict(least >= BAR_LEAST_OVER_GROUPED_MM),
        ),
    ]
    for product in ("forward", "weight gradient"):
        ratio = ratios[f"{product}, gather fused over plain"]
        name = f"{product} with row gather, over the product without"
        rows.append((name, *_mean_row(ratio, BAR_GATHER, every_case=True)))
    rows += [(name, f"{ratio[MEAN]:.3f}", f"{ratio['least']:.3f}", "", "") for name, ratio in _without_bar(ratios)]
    table = _table(("speed of ours", "geometric mean", "least case", "bar", "verdict"), "lrrll", rows)
    tile_us = [one["milliseconds"]["tile table"] * 1e3 for one in result["numbers"]["grouped_gemm"]["extras"]]
    note = "The times of ours exclude the tile table, which a layer's six products share; making it takes"
    return f"{table}\n\n{note} {min(tile_us):.1f} to {max(tile_us):.1f} us."


def grouped_gemm_products(result: Result) -> str:
    """TFLOP/s of each product on each share of a model, balanced and skewed side by side."""
    lines: dict[tuple[str, str], dict[bool, Result]] = {}
    for row in result["numbers"]["grouped_gemm"]["tflops"]:
        lines.setdefault((row["case"].rpartition(", ")[0], row["product"]), {})[row["balanced"]] = row
    rows = []
    for (case, product), pair in lines.items():
        even, uneven = pair[True], pair[False]
        rows.append(
            (
                case,
                product,
                *(f"{even[name]:.0f}" for name in ("ours", "grouped_mm", "bmm", "mm")),
                f"{even['ours'] / even['bmm']:.2f}",
                f"{even['ours'] / even['grouped_mm']:.2f}",
                *(f"{uneven[name]:.0f}" for name in ("ours", "grouped_mm", "mm")),
                f"{uneven['ours'] / uneven['grouped_mm']:.2f}",
            )
        )
    even_titles = ("ours", "`grouped_mm`", "bmm", "mm", "/ bmm", "/ `grouped_mm`")
    titles = ("case", "product", *even_titles, "skewed: ours", "`grouped_mm`", "mm", "/ `grouped_mm`")
    return _table(titles, "ll" + "r" * 10, rows)


def expert_block(result: Result) -> str:
    """Times and memory of the expert block, even and skewed loads, and the verdict."""
    rows = []
    for part in ("expert_block", "expert_block_skewed"):
        measured = result["numbers"][part]
        skew = measured["shape"]["skew"]
        for name, block in measured["blocks"].items():
            rows.append(
                (
                    f"skewed, {skew:g}" if skew else "balanced",
                    name,
                    f"{block['forward_ms']:.2f}",
                    f"{block['backward_ms']:.2f}",
                    f"{block['ms']:.2f}",
                    f"{block['kept_mib']:,.0f}",
                    f"{block['peak_mib']:,.0f}",
                    f"{block['ours_times_as_fast']:.2f}",
                    f"{block['ours_keeps']:.2f}",
                )
            )
    titles = (
        "load",
        "block",
        "forward ms",
        "backward ms",
        "both ms",
        "kept MiB",
        "peak MiB",
        "ours, speed",
        "ours, kept",
    )
    verdicts = [_block_verdict(result["numbers"][part]) for part in ("expert_block", "expert_block_skewed")]
    return "\n".join([_table(titles, "ll" + "r" * 7, rows), "", *verdicts])


def linear_cross_entropy(result: Result) -> str:
    """Times and memory of output projection and loss, and the verdict."""
    candidates = result["numbers"]["linear_cross_entropy"]["candidates"]
    rows = [
        (name, f"{one['ms']:.2f}", f"{one['time_of_compiled']:.3f}", f"{one['peak_gib']:.2f}", f"{one['loss']:.3f}")
        for name, one in candidates.items()
    ]
    ours = candidates["ours"]
    ratio, gib = ours["time_of_compiled"], ours["peak_gib"]
    lines = [
        _table(("way", "ms", "of compiled", "peak GiB", "loss"), "lrrrr", rows),
        "",
        f"* Time of ours over the compiled version: {ratio:.3f}, bar <= {BAR_LOSS_TIME:.2f}: "
        f"{_verdict(ratio <= BAR_LOSS_TIME)}.",
        f"* Peak of ours: {gib:.2f} GiB, bar <= {BAR_LOSS_GIB:.1f} GiB: {_verdict(gib <= BAR_LOSS_GIB)}.",
    ]
    liger = {name: one for name, one in candidates.items() if name.startswith("Liger")}
    wide = {name: one for name, one in liger.items() if name.endswith("float32 sum")}
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
    rows, below = [], []
    for row in measured["rows"]:
        eager = "" if row["eager_us"] is None else f"{row['eager_us']:,.0f}"
        rows.append(
            (
                f"{row['tokens']:,}",
                row["model"],
                row["operator"],
                row["pass"],
                f"{row['bytes'] / 1e6:,.1f}",
                f"{row['us']:,.1f}",
                f"{row['share_of_copy']:.2f}",
                f"{row['share_of_neg']:.2f}",
                eager,
            )
        )
        if row["share_of_copy"] < BAR_COPY:
            place = f"{row['model']}, {row['tokens']:,}"
            below.append((f"{row['operator']} {row['pass']}", f"{place}: {row['share_of_copy']:.3f}"))
    titles = ("tokens", "model", "operator", "pass", "MB", "us", "of copy", "of negation", "definition us")
    met, terabytes = len(rows) - len(below), measured["copy_bytes_per_s"] / 1e12
    lines = [
        f"A large copy moves {terabytes:.2f} TB/s, read and written. Bar: {BAR_COPY:.2f} of it.",
        "",
        _table(titles, "rlll" + "r" * 5, rows),
        "",
        f"Met by {met} of {len(rows)} rows" + ("; **missed** by:" if below else "."),
    ]
    lines += [""] if below else []
    for operator in dict.fromkeys(name for name, _ in below):
        lines.append(f"* {operator} ({'; '.join(where for name, where in below if name == operator)})")
    return "\n".join(lines)


def rings(result: Result) -> str:
    """TFLOP/s of one product after the other by Triton's kernel, by each launch of Hopper's own and by cuBLAS."""
    names = [*dict.fromkeys(("triton", *result["numbers"]["checks"], "mm"))]
    rows = [(row["case"], *(f"{row['tflops'][name]:.0f}" for name in names)) for row in result["numbers"]["rows"]]
    heads = ("case", "Triton", *(f"`{name}`" for name in names[1:-1]), "mm")
    return f"{origin(result)}\n\n{_table(heads, 'l' + 'r' * len(names), rows)}"


def rings_over_triton(result: Result) -> str:
    """The same over Triton's kernel, in the mean of all cases with even and with uneven loads."""
    ratios: dict[tuple[str, str], dict[bool, list[float]]] = {}
    for row in result["numbers"]["rows"]:
        for name in (*result["numbers"]["checks"], "mm"):
            pair = ratios.setdefault((row.get("product", "weight_gradient"), name), {True: [], False: []})
            pair[row["balanced"]].append(row["tflops"][name] / row["tflops"]["triton"])
    rows = [
        (
            product.replace("_", " "),
            name if name == "mm" else f"`{name}`",
            *map(_mean_and_least, (pair[True], pair[False])),
        )
        for (product, name), pair in ratios.items()
    ]
    heads = ("product", "launch", "balanced, over Triton (least)", "skewed (least)")
    return f"{origin(result)}\n\n{_table(heads, 'llrr', rows)}"


def attention(result: Result) -> str:
    """Milliseconds and TFLOP/s of cuDNN's attention, and of ours or of flash-attn-4."""
    version = result["environment"].get("flash_attn_4")
    rival, title = ("hopper", "ours") if version is None else ("flash-4", "flash-4")
    package = "" if version is None else f" flash-attn-4 {version}."
    lines = [
        f"{origin(result)}{package} Milliseconds forward and backward, TFLOP/s of either.",
        "",
        f"| shape | cuDNN | {title} | backward | both |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, ways in result["numbers"]["times"].items():
        if rival not in ways:
            continue
        cells = [
            f"{way['forward_ms']:.2f} + {way['backward_ms']:.2f}, {way['forward_tflops']:.0f} and "
            f"{way['backward_tflops']:.0f}"
            for way in (ways["cudnn"], ways[rival])
        ]
        backward = ways["cudnn"]["backward_ms"] / ways[rival]["backward_ms"]
        lines.append(f"| {name} | {' | '.join(cells)} | {backward:.2f} | {ways[rival]['speed_of_first']:.2f} |")
    return "\n".join(lines)


def attention_masked(result: Result) -> str:
    """Milliseconds of attention over documents, windows and chunks, and memory, beside the faster of torch's paths."""
    lines = [
        f"{origin(result)} Milliseconds forward and backward, TFLOP/s of either over the pairs that are seen, memory.",
        "",
        "| case | torch's faster path | ours | speed |",
        "|---|---:|---:|---:|",
    ]
    for name, ways in result["numbers"]["times"].items():
        torchs = max((name for name in ways if name != "triton"), key=lambda name: ways[name]["speed_of_torch"])
        cells = [
            f"{way['forward_ms']:.2f} + {way['backward_ms']:.2f}, {way['forward_tflops']:.0f} and "
            f"{way['backward_tflops']:.0f}, {way['peak_gb']:.2f} GB"
            for way in (ways[torchs], ways["triton"])
        ]
        lines.append(f"| {name} | {torchs}: {cells[0]} | {cells[1]} | {ways['triton']['speed_of_torch']:.2f} |")
    return "\n".join(lines)


def optimizer_step(result: Result) -> str:
    """The update of each format in its usual launch, beside PyTorch's of float32 state."""
    numbers = result["numbers"]
    theirs, usual = numbers["torch_us"], "8 blocks, 4 warps"

    def line(name: str, has_remainders: bool, bytes_: float, us: float) -> str:
        share = bytes_ / us * 1e6 / numbers["copy_bytes_per_s"]
        remainders = "yes" if has_remainders else "no"
        return f"| {name} | {remainders} | {bytes_ / 1e9:.1f} GB | {us:,.0f} | {us / theirs:.2f} | {share:.0%} |"

    rows = numbers["updates"]
    lines = [
        origin(result),
        "",
        "| moments | remainders | bytes that must move | microseconds | beside PyTorch's | of a copy's rate |",
        "|---|---|---:|---:|---:|---:|",
        line("fp32, by PyTorch", False, rows[0]["bytes"], theirs),
        *(line(row["moments"], row["remainders"], row["bytes"], row["launches"][usual]) for row in rows),
    ]
    return "\n".join(lines)


TABLES: dict[str, Callable[[Result], str]] = {
    "optimizer-step": optimizer_step,
    "origin": origin,
    "rings": rings,
    "rings_over_triton": rings_over_triton,
    "grouped_gemm_bars": grouped_gemm_bars,
    "grouped_gemm_products": grouped_gemm_products,
    "expert_block": expert_block,
    "linear_cross_entropy": linear_cross_entropy,
    "pointwise": pointwise,
    "attention": attention,
    "attention-masked": attention_masked,
}


def _mean_and_least(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.3f} ({min(ratios):.3f})"


def _without_bar(ratios: Result) -> Iterator[tuple[str, Result]]:
    """Further figures that a reader wants to know."""
    for product, others in ratios["by product"].items():
        yield f"{product} alone, balanced, over cuBLAS bmm", others["bmm"]
    for product in ("forward", "weight gradient"):
        yield f"{product} with row gather, over a copy and the product", ratios[f"{product}, gather fused over apart"]
    name = "weight gradient, sum fused over apart"
    yield "weight gradient with float32 sum, over the product and `add_`", ratios[name]


def _mean_row(ratio: Result, bar: float, every_case: bool = False) -> tuple[str, str, str, str]:
    """Mean, least, bar and verdict; a bar for every case is met when the least case meets it."""
    mean, least = ratio[MEAN], ratio["least"]
    verdict = _verdict(mean >= bar)
    if every_case and least < bar <= mean:
        verdict = "met in the mean, **missed** by the least case"
    return f"{mean:.3f}", f"{least:.3f}", f">= {bar:.2f}", verdict


def _block_verdict(measured: Result) -> str:
    """Ours against the fastest and the most frugal of torch's ways."""
    blocks, ours = measured["blocks"], measured["blocks"]["ours"]
    torch_ways = [name for name in blocks if name.startswith("torch")]
    fastest = min(torch_ways, key=lambda name: blocks[name]["ms"])
    frugal = min(torch_ways, key=lambda name: blocks[name]["kept_mib"])
    speed = blocks[fastest]["ms"] / ours["ms"]
    kept = ours["kept_mib"] / blocks[frugal]["kept_mib"]
    peak = ours["peak_mib"] / min(blocks[name]["peak_mib"] for name in torch_ways)
    return (
        f"* {'Skewed' if measured['shape']['skew'] else 'Balanced'}: {speed:.2f} times as fast as the fastest torch way"
        f" ({fastest}), bar >= {BAR_BLOCK_SPEED:.1f}: {_verdict(speed >= BAR_BLOCK_SPEED)}; {kept:.2f} of the bytes"
        f" that the most frugal keeps, bar <= {BAR_BLOCK_KEPT:.1f}: {_verdict(kept <= BAR_BLOCK_KEPT)}. The peak, for"
        f" which there is no bar, is {peak:.2f} of torch's lowest."
    )


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def _table(titles: Sequence[str], sides: str, rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; `sides` has an l or r for each column."""
    rules = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join("| " + " | ".join(line) + " |" for line in (titles, rules, *rows))
