"""Products of 8-bit numbers on one GPU, bare and with their quantization, beside our bfloat16 kernels and torch's.

    python -m benchmarks.kernels.float8_products --output float8_products.json
    python -m benchmarks.kernels.float8_products --launches --output float8_launches.json   # each launch, bare products
    TRITON_INTERPRET=1 python -m benchmarks.kernels.float8_products --tiny                  # on a CPU: does it run?

Dense layers of DeepSeek-V3 and experts' shares of V3, V2-Lite and Qwen3-30B-A3B, blockwise in E4M3: forward, gradient
of the input, gradient of the weight added to a float32 sum, and the three together. Before anything is timed each
result is held against the product in float32 of the numbers before quantization.

`quantized` is what a training step does for a product, with nothing fused and torch's dense products where it has them:
the forward pass quantizes the rows (of a dense layer transposed, too), the gradient of the input quantizes dy both
ways, the gradient of an expert's weight transposes the rows that forward quantized. Weights are quantized once a step
and not counted.

What is compared takes turns on a GPU that is kept warm, as in `benchmarks.kernels.grouped_gemm`; times are medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.grouped_gemm import burn, skewed_counts, take_turns
from penstock.kernels.float8 import products, quantize, torch_products
from penstock.kernels.float8.formats import format_on
from penstock.kernels.float8.launches import CANDIDATES, PRODUCTS, Product, ProductLaunch
from penstock.kernels.float8.quantized import Quantized, WeightCopies
from penstock.kernels.float8.recipes import BLOCKWISE
from penstock.kernels.float8.triton_operators import multiply_with_torch
from penstock.kernels.float32_products import add_product
from penstock.kernels.grouped_gemm import (
    grouped_gemm_forward,
    grouped_gemm_input_gradient,
    grouped_gemm_weight_gradient,
)
from penstock.kernels.tile_table import TileTable, tile_table
from penstock.kernels.tuning import target_of

PASSES = ("forward", "input gradient", "weight gradient")
LEAST_DB = 25.0
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TARGET = target_of(DEVICE)
FORM = format_on("e4m3", TARGET)
HAS_TORCH = ON_GPU and torch_products.obstacle(BLOCKWISE, TARGET, torch.version.cuda) is None
TORCHAO = "torchao.prototype.blockwise_fp8_training.kernels"

Ways = dict[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Shape:
    """A layer: one matrix, or one for each of some experts; rows are those of all experts."""

    name: str
    rows: int
    depth: int
    width: int
    experts: int = 0
    skewed: bool = False


TOKENS = 8192
DENSE = (
    Shape("V3 query and key down", TOKENS, 7168, 2112),
    Shape("V3 query up", TOKENS, 1536, 24576),
    Shape("V3 key and value up", TOKENS, 512, 32768),
    Shape("V3 attention out", TOKENS, 16384, 7168),
    Shape("V3 dense gate-up", TOKENS, 7168, 36864),
    Shape("V3 dense down", TOKENS, 18432, 7168),
)
GROUPED = tuple(
    Shape(f"{name}, {layer}{', skewed' if skewed else ''}", experts * each, depth, width, experts, skewed)
    for name, experts, each, hidden, ffn in (
        ("V3 8 experts", 8, 4096, 7168, 2048),
        ("V2-Lite EP4", 16, 3072, 2048, 1408),
        ("Qwen3 EP4", 32, 2048, 2048, 768),
    )
    for layer, depth, width in (("gate-up", hidden, 2 * ffn), ("down", ffn, hidden))
    for skewed in (False, True)
)
TINY = (Shape("dense", 40, 192, 64), Shape("grouped", 90, 192, 64, 3, skewed=True))


@dataclass(frozen=True)
class Layer:
    """Operands of a layer's three products, in 16 and in 8 bits; a dense layer has no counts and no tile table."""

    shape: Shape
    x_RD: Tensor
    w: Tensor
    dy_RF: Tensor
    main: Tensor
    copies: WeightCopies
    x: Quantized
    dy: Quantized
    x_columns: Quantized
    dy_columns: Quantized
    counts_e: Tensor | None
    tiles: TileTable | None


def main() -> None:
    options = parse_arguments()
    shapes = TINY if options.tiny else [one for one in (*DENSE, *GROUPED) if options.only in one.name]
    if ON_GPU:
        burn(seconds=2.0)
    rows = [row for shape in shapes for row in measure(draw(shape), options)]
    print_rows(rows)
    summary = summarize_launches(rows) if options.launches else summarize(rows)
    for name, figures in summary.items():
        print(f"{name:42} " + ", ".join(f"{key} {figure:.3f}" for key, figure in figures.items()))
    record.write(options, {"rows": rows, "summary": summary}, triton=triton.__version__)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="turns that each contender takes")
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--launches", action="store_true", help="bare products only, with each launch of this chip")
    parser.add_argument("--tiny", action="store_true", help="two small layers, to see that it runs")
    record.add_arguments(parser)
    return parser.parse_args()


def draw(shape: Shape) -> Layer:
    """Random operands; a tail of no rows, so that flops are those of all rows."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    # Triton's interpreter multiplies no bfloat16.
    dtype = torch.bfloat16 if ON_GPU else torch.float32

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=DEVICE).to(dtype)

    x_RD, dy_RF = normal(shape.rows, shape.depth), normal(shape.rows, shape.width)
    counts_e = tiles = None
    if shape.experts:
        each = [shape.rows // shape.experts] * shape.experts
        counts = skewed_counts(shape.experts, shape.rows) if shape.skewed else each
        counts_e = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
        tiles = tile_table(counts_e, shape.rows)
    w = normal(*((shape.experts,) if shape.experts else ()), shape.width, shape.depth)
    both_x, both_dy = (
        quantize.quantize_rows(rows, BLOCKWISE, FORM, columns=True, counts_e=counts_e) for rows in (x_RD, dy_RF)
    )
    assert both_x.columns is not None and both_dy.columns is not None, "columns were asked for"
    return Layer(
        shape=shape,
        x_RD=x_RD,
        w=w,
        dy_RF=dy_RF,
        main=torch.zeros(w.shape, device=DEVICE),
        copies=quantize.quantize_weight(w, BLOCKWISE, FORM),
        x=both_x.rows,
        dy=both_dy.rows,
        x_columns=both_x.columns,
        dy_columns=both_dy.columns,
        counts_e=counts_e,
        tiles=tiles,
    )


def bare(layer: Layer, which: str, launch: ProductLaunch | None = None) -> Tensor:
    """One product of a layer by our kernels, of operands that stand in 8 bits."""
    counts_e, tiles, dtype = layer.counts_e, layer.tiles, layer.x_RD.dtype
    if which == "weight gradient":
        dy, x = layer.dy_columns, layer.x_columns
        if counts_e is None:
            return products.multiply(dy, x, torch.float32, accumulate_into=layer.main, launch=launch)
        return products.multiply_columns(
            dy, x, counts_e, dtype=dtype, accumulate_into=layer.main, tiles=tiles, launch=launch
        )
    rows, w = (layer.x, layer.copies.forward) if which == "forward" else (layer.dy, layer.copies.backward)
    if counts_e is None:
        return products.multiply(rows, w, dtype, launch=launch)
    return products.multiply_groups(rows, w, counts_e, dtype=dtype, tiles=tiles, launch=launch)


def product_of(layer: Layer, which: str) -> Product:
    """Which row of the tables of launches it is."""
    if which == "weight gradient":
        return "dense_gradient" if layer.counts_e is None else "columns"
    return "dense" if layer.counts_e is None else "rows"


def quantized(layer: Layer, which: str) -> Tensor:
    """The same with what has to be quantized for it."""
    counts_e = layer.counts_e
    if which == "forward":
        quantize.quantize_rows(layer.x_RD, BLOCKWISE, FORM, columns=counts_e is None)
    elif which == "input gradient":
        quantize.quantize_rows(layer.dy_RF, BLOCKWISE, FORM, columns=True, counts_e=counts_e)
    elif counts_e is not None:
        quantize.quantize_groups(layer.x, counts_e, BLOCKWISE, FORM)
    return with_torch(layer, which) if counts_e is None and HAS_TORCH else bare(layer, which)


def with_torch(layer: Layer, which: str) -> Tensor:
    """A dense product as a run on this chip makes it: torch's where it can."""
    if which == "weight gradient":
        return multiply_with_torch(layer.dy_columns, layer.x_columns, torch.float32, accumulate_into=layer.main)
    rows, w = (layer.x, layer.copies.forward) if which == "forward" else (layer.dy, layer.copies.backward)
    return multiply_with_torch(rows, w, layer.x_RD.dtype)


def plain(layer: Layer, which: str) -> Tensor:
    """The same in 16 bits: our grouped GEMM, cuBLAS for one matrix."""
    x_RD, w, dy_RF, counts_e, tiles = layer.x_RD, layer.w, layer.dy_RF, layer.counts_e, layer.tiles
    if counts_e is None:
        if which == "weight gradient":
            add_product(layer.main, dy_RF.T, x_RD)
            return layer.main
        return x_RD @ w.T if which == "forward" else dy_RF @ w
    if which == "weight gradient":
        return grouped_gemm_weight_gradient(dy_RF, x_RD, counts_e, accumulate_into=layer.main, tiles=tiles)
    if which == "forward":
        return grouped_gemm_forward(x_RD, w, counts_e, tiles=tiles)
    return grouped_gemm_input_gradient(dy_RF, w, counts_e, tiles=tiles)


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
        if find_spec("torchao") is not None:
            product = vars(import_module(TORCHAO)).get("triton_fp8_gemm_1x128_128x128")
            scales = b.scales.contiguous().T
            ways["torchao"] = partial(product, a.values, b.values.T, a.scales, scales, 128, dtype)
    return ways if torch_products.shape_obstacle(a, b) is None else {}


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


def check(layer: Layer, which: str) -> float:
    """Decibels of our product over its distance from the float32 product of what was quantized."""
    layer.main.zero_()
    got = bare(layer, which).float()
    x_RD, w, dy_RF = layer.x_RD.float(), layer.w.float(), layer.dy_RF.float()
    if layer.counts_e is None:
        expected = {"forward": lambda: x_RD @ w.T, "input gradient": lambda: dy_RF @ w}.get(
            which, lambda: dy_RF.T @ x_RD
        )()
    else:
        counts = layer.counts_e.tolist()
        pieces = zip(x_RD.split(counts), dy_RF.split(counts), w, strict=True)
        if which == "weight gradient":
            expected = torch.stack([dy.T @ x for x, dy, _ in pieces])
        else:
            expected = torch.cat([x @ one.T if which == "forward" else dy @ one for x, dy, one in pieces])
    noise = (got - expected).square().sum()
    decibels = 10 * torch.log10(expected.square().sum() / noise).item()
    assert decibels > LEAST_DB, f"{layer.shape.name}, {which}: {decibels:.1f} dB, the bar is {LEAST_DB}"
    return decibels


def measure(layer: Layer, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row for each product: milliseconds of each way, and TFLOP/s."""
    flops = 2 * layer.shape.rows * layer.shape.depth * layer.shape.width
    for which in PASSES:
        decibels = check(layer, which)
        ways: Ways = {"bf16": partial(plain, layer, which), "bare": partial(bare, layer, which)}
        if options.launches:
            for name, launch in CANDIDATES.get(TARGET, {}).get(product_of(layer, which), {}).items():
                ways[name] = partial(bare, layer, which, launch)
        else:
            ways |= {"quantized": partial(quantized, layer, which)} | others(layer, which)
        times = timed(ways, options.rounds)
        yield {
            "layer": layer.shape.name,
            "grouped": bool(layer.shape.experts),
            "pass": which,
            "decibels": decibels,
            "milliseconds": times,
            "tflops": {name: flops / milliseconds / 1e9 for name, milliseconds in times.items()},
        }


def timed(ways: Ways, rounds: int) -> dict[str, float]:
    """Median milliseconds of each; on a CPU once by the clock."""
    if ON_GPU:
        return take_turns(ways, rounds)
    times = {}
    for name, way in ways.items():
        start = time.perf_counter()
        way()
        times[name] = (time.perf_counter() - start) * 1e3
    return times


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


def summarize_launches(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Speed of each launch over the table's, geometric mean over the layers, by kind of layer and pass."""
    found = {}
    for grouped in (False, True):
        for which in PASSES:
            times = [row["milliseconds"] for row in rows if row["grouped"] == grouped and row["pass"] == which]
            if times:
                found[f"{'grouped' if grouped else 'dense'}, {which}"] = {
                    name: statistics.geometric_mean(one["bare"] / one[name] for one in times) for name in times[0]
                }
    return found


def print_rows(rows: list[dict]) -> None:
    names: Mapping[str, None] = dict.fromkeys(name for row in rows for name in row["tflops"])
    print(f"{'TFLOP/s':34} {'':16} {'dB':>5} " + " ".join(f"{name:>15}" for name in names))
    for row in rows:
        figures = (f"{row['tflops'][name]:15.0f}" if name in row["tflops"] else " " * 15 for name in names)
        print(f"{row['layer']:34} {row['pass']:16} {row['decibels']:5.1f} " + " ".join(figures))
    print(f"launches: {PRODUCTS.get(TARGET, 'those that run anywhere')}")


if __name__ == "__main__":
    main()
