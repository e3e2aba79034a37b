"""Products of 8-bit numbers on one GPU, bare and with their quantization, beside our bfloat16 kernels and torch's.

    python -m benchmarks.kernels.float8_products --output float8_products.json
    python -m benchmarks.kernels.float8_products --recipe blockwise-square --output float8_products_square.json
    python -m benchmarks.kernels.float8_products --launches --output float8_launches.json   # each launch, bare products
    TRITON_INTERPRET=1 python -m benchmarks.kernels.float8_products --tiny                  # on a CPU: does it run?

The layers are those of `benchmarks.kernels.float8_layers`, the launches those of `benchmarks.kernels.launches_tried`.
Before anything is timed each result is held against the product in float32 of the numbers before quantization.

`quantized` is what a training step does for a product, with nothing fused and torch's dense products where it has them:
the forward pass quantizes the rows (of a dense layer transposed, too), the gradient of the input quantizes dy both
ways, the gradient of an expert's weight transposes the rows that forward quantized. Weights are quantized once a step
and not counted.

Times are those of the device: each way is captured in a CUDA graph and replayed (`benchmarks.kernels.measure`), as in a
run. `eager_milliseconds` are those of launches from Python, which for small products is slower than what it launches.
Whole networks, where the norm, SwiGLU and dispatch quantize, are `benchmarks.kernels.float8_ffn`. What was measured is
written after each product, so that a run which is ended keeps what it has.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import geometric_mean
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.float8_layers import (
    DENSE,
    FORM,
    GROUPED,
    HAS_TORCH,
    OPTION,
    PASSES,
    RECIPES,
    TARGET,
    TINY,
    Layer,
    Shape,
)
from benchmarks.kernels.launches_tried import CANDIDATES
from benchmarks.kernels.measure import DEVICE, ON_GPU, Ways, burn, replay_in_turns, take_turns
from penstock.kernels.float8 import quantize, torch_products
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.float8.triton_operators import multiply_with_torch

TORCHAO = "torchao.prototype.blockwise_fp8_training.kernels"
NAMES = dict.fromkeys(["bf16", "bare", *(name for names in CANDIDATES.get(TARGET, {}).values() for name in names)])
"""Our product in 16 bits, the launch of the table, and the launches that are compared with them on this chip."""

Row = dict[str, Any]


def main() -> None:
    options = parse_arguments()
    if ON_GPU:
        burn(seconds=2.0)
    run(options, TINY if options.tiny else [shape for shape in (*DENSE, *GROUPED) if options.only in shape.name])


def parse_arguments() -> argparse.Namespace:
    parser = record.parser(
        __doc__,
        rounds=(6, "turns that each contender takes"),
        only=("", "layers whose name contains this"),
        tiny=(False, "two small layers, to see that it runs"),
        recipe=OPTION,
        launches=(False, "bare products only, with each launch of this chip"),
        candidates=(",".join(NAMES), "launches, by commas"),
    )
    options = parser.parse_args()
    if unknown := {*options.candidates.split(",")} - NAMES.keys():
        parser.error(f"--candidates: {', '.join(sorted(unknown))} is none of {', '.join(NAMES)}")
    return options


def run(options: argparse.Namespace, shapes: Sequence[Shape]) -> None:
    """Measure all shapes."""
    rows: list[Row] = []
    for shape in shapes:
        layer = Layer(shape, RECIPES[options.recipe])
        for which in PASSES:
            rows.append(measure(layer, which, options))
            record.show(rows[-1])
            summary = launch_summary(rows) if options.launches else summarize(rows)
            numbers = {"recipe": options.recipe, "rows": rows, "summary": summary}
            record.write(options, numbers, triton=triton.__version__)
        del layer


def measure(layer: Layer, which: str, options: argparse.Namespace) -> Row:
    """One product: milliseconds of each way by replayed graphs and by launches, and TFLOP/s."""
    noise = layer.check(which)
    ways: Ways = {"bf16": partial(layer.plain, which), "bare": partial(layer.bare, which)}
    if options.launches:
        tried = CANDIDATES.get(TARGET, {}).get(layer.product(which), {})
        ways |= {name: partial(layer.bare, which, launch) for name, launch in tried.items()}
        ways = {name: way for name, way in ways.items() if name in options.candidates.split(",")}
    else:
        ways |= {"quantized": partial(quantized, layer, which)} | others(layer, which)
    times, not_captured = replay_in_turns(ways, options.rounds)
    eager = take_turns(ways, options.rounds) if ON_GPU and not options.launches else {}
    return {
        "layer": layer.shape.name,
        "grouped": bool(layer.shape.experts),
        "pass": which,
        "decibels": noise,
        "milliseconds": times,
        "eager_milliseconds": eager,
        "not_captured": not_captured,
        "tflops": {name: layer.flops / milliseconds / 1e9 for name, milliseconds in times.items()},
    }


def quantized(layer: Layer, which: str) -> Tensor:
    """A product with what has to be quantized for it, by torch where a run on this chip leaves it to torch."""
    counts_e, recipe = layer.counts_e, layer.recipe
    if which == "forward":
        quantize.quantize_rows(layer.x_RD, recipe, FORM, columns=recipe.columns if counts_e is None else None)
    elif which == "input gradient":
        quantize.quantize_rows(layer.dy_RF, recipe, FORM, columns=recipe.rows, counts_e=counts_e)
    elif counts_e is not None:
        quantize.quantize_groups(layer.x, counts_e, recipe, FORM)
    if counts_e is not None or not HAS_TORCH:
        return layer.bare(which)
    if which == "weight gradient":
        return multiply_with_torch(*layer.operands(which), torch.float32, accumulate_into=layer.main)
    return multiply_with_torch(*layer.operands(which), layer.x_RD.dtype)


def others(layer: Layer, which: str) -> Ways:
    """What else can compute a product of the same 8-bit numbers here, bare."""
    if not HAS_TORCH:
        return {}
    a, b = layer.operands(which)
    if layer.counts_e is not None:
        return {} if which == "weight gradient" else {"torch, row-wise": torch_grouped(a, b, layer.counts_e)}
    dtype, total = layer.x_RD.dtype, layer.main if which == "weight gradient" else None
    if total is not None:
        ways: Ways = {"torch": partial(torch_products.multiply, a, b, torch.float32, accumulate_into=total)}
    else:
        ways = {"torch": partial(torch_products.multiply, a, b, dtype)}
    if b.block[0] != 1 and find_spec("torchao") is not None:
        ways["torchao"] = torchao(a, b, dtype, total)
    return ways if torch_products.shape_obstacle(a, b) is None else {}


def torchao(a: Quantized, b: Quantized, dtype: torch.dtype, total: Tensor | None) -> Callable[[], Tensor]:
    """Its product of 1 x 128 and 128 x 128, which as torch's has no sum to add to."""
    product = vars(import_module(TORCHAO))["triton_fp8_gemm_1x128_128x128"]
    given = a.values, b.values.T, a.scales, b.scales.contiguous().T, 128, dtype if total is None else torch.float32
    return partial(product, *given) if total is None else lambda: total.add_(product(*given))


def torch_grouped(rows: Quantized, w: Quantized, counts_e: Tensor) -> Callable[[], Tensor]:
    """torch's grouped product, which knows scales of whole rows only: for its speed, whatever its numbers mean."""
    scales = torch.ones(len(rows.values), device=DEVICE), torch.ones(w.values.shape[:2], device=DEVICE)
    how = {"offs": counts_e.cumsum(0, dtype=torch.int32), "out_dtype": torch.bfloat16}
    return partial(torch._scaled_grouped_mm, rows.values, w.values.transpose(1, 2), *scales, **how)


def summarize(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """How many times as fast as bfloat16: each layer's three products together, bare and with their quantization."""
    speeds: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["layer"] for row in rows):
        times = [row["milliseconds"] for row in rows if row["layer"] == name]
        total = {way: sum(row[way] for row in times) for way in ("bf16", "bare", "quantized")}
        speeds[name] = {way: total["bf16"] / total[way] for way in ("bare", "quantized")}
    for family in ("V3 8 experts", "V3", "V2-Lite", "Qwen3"):
        is_experts = "experts" in family
        kin = [name for name in speeds if name.startswith(family) and ("experts" in name) == is_experts]
        if kin:
            means = {way: geometric_mean(speeds[name][way] for name in kin) for way in ("bare", "quantized")}
            speeds[f"all of {family}"] = means
    return speeds


def launch_summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Speed of each launch over the table's, geometric mean over the layers, by kind of layer and pass."""

    def groups() -> Iterator[tuple[str, list[dict[str, float]]]]:
        for grouped in (False, True):
            for which in PASSES:
                times = [row["milliseconds"] for row in rows if (row["grouped"], row["pass"]) == (grouped, which)]
                yield f"{'grouped' if grouped else 'dense'}, {which}", times

    return {
        name: {way: geometric_mean(row["bare"] / row[way] for row in times) for way in times[0]}
        for name, times in groups()
        if times and all("bare" in row for row in times)
    }


if __name__ == "__main__":
    main()
