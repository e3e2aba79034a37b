"""Products of 8-bit numbers on one GPU, bare and with their quantization, beside our bfloat16 kernels and torch's.

    python -m benchmarks.kernels.float8_products --output float8_products.json
    python -m benchmarks.kernels.float8_products --recipe blockwise-square --output float8_products_square.json
    python -m benchmarks.kernels.float8_products --launches --output float8_launches.json   # each launch, bare products
    TRITON_INTERPRET=1 python -m benchmarks.kernels.float8_products --tiny                  # on a CPU: does it run?

The layers are those of `benchmarks.kernels.float8_layers`; of `--launches` tells `benchmarks.kernels.float8_launches`.
Before anything is timed each result is held against the product in float32 of the numbers before quantization.

`quantized` is what a training step does for a product, with nothing fused and torch's dense products where it has them:
the forward pass quantizes the rows (of a dense layer transposed, too), the gradient of the input quantizes dy both
ways, the gradient of an expert's weight transposes the rows that forward quantized. Weights are quantized once a step
and not counted.

What is compared takes turns on a GPU that is kept warm; times are medians. They are those of the device: each way is
captured in a CUDA graph and replayed (`benchmarks.kernels.replays`), as in a run. `eager_milliseconds` are those of
launches from Python, which for small products is slower than what it launches. Whole networks, where the norm, SwiGLU
and dispatch quantize, are `benchmarks.kernels.float8_ffn`. What was measured is written after each layer.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels import float8_launches
from benchmarks.kernels.float8_layers import (
    DENSE,
    DEVICE,
    FORM,
    GROUPED,
    HAS_TORCH,
    ON_GPU,
    PASSES,
    RECIPES,
    TARGET,
    TINY,
    Layer,
    Ways,
    add_argument,
    bare,
    check,
    draw,
    plain,
)
from benchmarks.kernels.grouped_gemm import burn, take_turns
from benchmarks.kernels.replays import replay_in_turns
from penstock.kernels.float8 import quantize, torch_products
from penstock.kernels.float8.launches import PRODUCTS
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.float8.triton_operators import multiply_with_torch

TORCHAO = "torchao.prototype.blockwise_fp8_training.kernels"


def main() -> None:
    options = parse_arguments()
    shapes = TINY if options.tiny else [one for one in (*DENSE, *GROUPED) if options.only in one.name]
    if ON_GPU and not options.compile:
        burn(seconds=2.0)
    if options.launches or options.compile:
        float8_launches.run(options, shapes)
        return
    rows: list[dict] = []
    for shape in shapes:
        rows += measure(draw(shape, RECIPES[options.recipe]), options.rounds)
        numbers = {"recipe": options.recipe, "rows": rows, "summary": summarize(rows)}
        record.write(options, numbers, triton=triton.__version__)
    print_rows(rows)
    for name, figures in summarize(rows).items():
        print(f"{name:42} " + ", ".join(f"{key} {figure:.3f}" for key, figure in figures.items()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="turns that each contender takes")
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="two small layers, to see that it runs")
    add_argument(parser)
    float8_launches.add_arguments(parser)
    record.add_arguments(parser)
    options = parser.parse_args()
    float8_launches.refuse_unknown(parser, options.candidates)
    return options


def quantized(layer: Layer, which: str) -> Tensor:
    """The same with what has to be quantized for it."""
    counts_e, recipe = layer.counts_e, layer.recipe
    if which == "forward":
        quantize.quantize_rows(layer.x_RD, recipe, FORM, columns=recipe.columns if counts_e is None else None)
    elif which == "input gradient":
        quantize.quantize_rows(layer.dy_RF, recipe, FORM, columns=recipe.rows, counts_e=counts_e)
    elif counts_e is not None:
        quantize.quantize_groups(layer.x, counts_e, recipe, FORM)
    return with_torch(layer, which) if counts_e is None and HAS_TORCH else bare(layer, which)


def with_torch(layer: Layer, which: str) -> Tensor:
    """A dense product as a run on this chip makes it: torch's where it can."""
    if which == "weight gradient":
        return multiply_with_torch(layer.dy_columns, layer.x_columns, torch.float32, accumulate_into=layer.main)
    rows, w = (layer.x, layer.copies.forward) if which == "forward" else (layer.dy, layer.copies.backward)
    return multiply_with_torch(rows, w, layer.x_RD.dtype)


def others(layer: Layer, which: str) -> Ways:
    """What else can compute a product of the same 8-bit numbers here, bare."""
    if not HAS_TORCH:
        return {}
    dtype = layer.x_RD.dtype
    if layer.counts_e is not None:
        return {} if which == "weight gradient" else {"torch, row-wise": torch_grouped(layer, which)}
    if which == "weight gradient":
        a, b = layer.dy_columns, layer.x_columns
        ways: Ways = {"torch": partial(torch_products.multiply, a, b, torch.float32, accumulate_into=layer.main)}
    else:
        a, b = (layer.x, layer.copies.forward) if which == "forward" else (layer.dy, layer.copies.backward)
        ways = {"torch": partial(torch_products.multiply, a, b, dtype)}
    if b.block[0] != 1 and find_spec("torchao") is not None:
        ways["torchao"] = torchao(a, b, dtype, layer.main if which == "weight gradient" else None)
    return ways if torch_products.shape_obstacle(a, b) is None else {}


def torchao(a: Quantized, b: Quantized, dtype: torch.dtype, total: Tensor | None) -> Callable[[], Tensor]:
    """Its product of 1 x 128 and 128 x 128, which as torch's has no sum to add to."""
    product = vars(import_module(TORCHAO))["triton_fp8_gemm_1x128_128x128"]
    given = a.values, b.values.T, a.scales, b.scales.contiguous().T, 128, dtype if total is None else torch.float32
    return partial(product, *given) if total is None else lambda: total.add_(product(*given))


def torch_grouped(layer: Layer, which: str) -> Callable[[], Tensor]:
    """torch's grouped product, which knows scales of whole rows only: for its speed, whatever its numbers mean."""
    assert layer.counts_e is not None, "of a grouped layer"
    rows, w = (layer.x, layer.copies.forward) if which == "forward" else (layer.dy, layer.copies.backward)
    ones_R = torch.ones(len(rows.values), device=DEVICE)
    ones_eF = torch.ones(w.values.shape[:2], device=DEVICE)
    ends_e = layer.counts_e.cumsum(0, dtype=torch.int32)
    return partial(
        torch._scaled_grouped_mm,
        rows.values,
        w.values.transpose(1, 2),
        ones_R,
        ones_eF,
        offs=ends_e,
        out_dtype=torch.bfloat16,
    )


def measure(layer: Layer, rounds: int) -> Iterator[dict[str, object]]:
    """One row for each product: milliseconds of each way by replayed graphs and by launches, and TFLOP/s."""
    flops = 2 * layer.shape.rows * layer.shape.depth * layer.shape.width
    for which in PASSES:
        decibels = check(layer, which)
        ways: Ways = {"bf16": partial(plain, layer, which), "bare": partial(bare, layer, which)}
        ways |= {"quantized": partial(quantized, layer, which)} | others(layer, which)
        times, not_captured = replay_in_turns(ways, rounds)
        yield {
            "layer": layer.shape.name,
            "grouped": bool(layer.shape.experts),
            "pass": which,
            "decibels": decibels,
            "milliseconds": times,
            "eager_milliseconds": take_turns(ways, rounds) if ON_GPU else {},
            "not_captured": not_captured,
            "tflops": {name: flops / milliseconds / 1e9 for name, milliseconds in times.items()},
        }


def summarize(rows: list[dict]) -> dict[str, dict[str, float]]:
    """How many times as fast as bfloat16: each layer's three products together, bare and with their quantization."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["layer"] for row in rows):
        sums = {
            way: sum(row["milliseconds"][way] for row in rows if row["layer"] == name)
            for way in ("bf16", "bare", "quantized")
        }
        found[name] = {way: sums["bf16"] / sums[way] for way in ("bare", "quantized")}
    for family in ("V3 8 experts", "V3", "V2-Lite", "Qwen3"):
        own = {name for name in found if name.startswith(family) and ("experts" in name) == ("experts" in family)}
        if own:
            found[f"all of {family}"] = {
                way: statistics.geometric_mean(found[name][way] for name in own) for way in ("bare", "quantized")
            }
    return found


def print_rows(rows: list[dict]) -> None:
    names: Mapping[str, None] = dict.fromkeys(name for row in rows for name in row["tflops"])
    print(f"{'TFLOP/s':34} {'':16} {'dB':>5} " + " ".join(f"{name:>15}" for name in names))
    for row in rows:
        figures = (f"{row['tflops'][name]:15.0f}" if name in row["tflops"] else " " * 15 for name in names)
        print(f"{row['layer']:34} {row['pass']:16} {row['decibels']:5.1f} " + " ".join(figures))
        for name, reason in row["not_captured"].items():
            print(f"    {name}: launched from Python, no graph holds it: {reason}")
    print(f"launches: {PRODUCTS.get(TARGET, 'those that run anywhere')}")


if __name__ == "__main__":
    main()
