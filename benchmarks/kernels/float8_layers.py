"""Layers whose products of 8-bit numbers are measured: their operands, and their products in 8 and in 16 bits.

Dense layers of DeepSeek-V3 and experts' shares of V3, V2-Lite and Qwen3-30B-A3B, in E4M3 by one of `RECIPES`. Each has
three products: forward, gradient of the input, gradient of the weight added to a float32 sum.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.grouped_gemm import skewed_counts
from benchmarks.kernels.replays import replay_in_turns
from penstock.kernels.float8 import products, quantize, torch_products
from penstock.kernels.float8.launches import Product, ProductLaunch
from penstock.kernels.float8.quantized import Quantized, WeightCopies
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, Block, Recipe, format_on
from penstock.kernels.float8.reference import aligned_rows
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
"""Whether a run here leaves dense products to torch."""

RECIPES = {recipe.name: recipe for recipe in (BLOCKWISE, BLOCKWISE_SQUARE)}
"""Of all operands of a layer; they differ in those of the weight's gradient."""

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
    recipe: Recipe
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


def add_argument(parser: argparse.ArgumentParser) -> None:
    """The option that says by which recipe."""
    parser.add_argument("--recipe", choices=tuple(RECIPES), default=BLOCKWISE.name, help="which blocks share a scale")


def draw(shape: Shape, recipe: Recipe) -> Layer:
    """Random operands; a tail of no rows, so that flops are those of all rows."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    # Triton's interpreter multiplies no bfloat16.
    dtype = torch.bfloat16 if ON_GPU else torch.float32

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=DEVICE).to(dtype)

    x_RD, dy_RF = normal(shape.rows, shape.depth), normal(shape.rows, shape.width)
    counts_e, tiles = _groups_of(shape)
    w = normal(*_weight_shape(shape))
    both_x, both_dy = (
        quantize.quantize_rows(rows, recipe, FORM, columns=block, counts_e=counts_e)
        for rows, block in ((x_RD, recipe.columns), (dy_RF, recipe.rows))
    )
    assert both_x.columns is not None and both_dy.columns is not None, "columns were asked for"
    return Layer(
        shape=shape,
        recipe=recipe,
        x_RD=x_RD,
        w=w,
        dy_RF=dy_RF,
        main=torch.zeros(w.shape, device=DEVICE),
        copies=quantize.quantize_weight(w, recipe, FORM),
        x=both_x.rows,
        dy=both_dy.rows,
        x_columns=both_x.columns,
        dy_columns=both_dy.columns,
        counts_e=counts_e,
        tiles=tiles,
    )


def make_room(shape: Shape, recipe: Recipe) -> Layer:
    """Operands as `draw` makes them, with arbitrary values, for launches whose results are not read."""
    like = torch.empty(0, device=DEVICE, dtype=torch.bfloat16 if ON_GPU else torch.float32)

    def room(block: Block, *sizes: int) -> Quantized:
        return quantize.empty_copy(like, sizes, block, FORM, recipe.scaling)

    counts_e, tiles = _groups_of(shape)
    places = aligned_rows(shape.rows, shape.experts) if shape.experts else shape.rows
    *stack, width, depth = _weight_shape(shape)
    return Layer(
        shape=shape,
        recipe=recipe,
        x_RD=like.new_empty(shape.rows, depth),
        w=like.new_empty(*stack, width, depth),
        dy_RF=like.new_empty(shape.rows, width),
        main=torch.empty(*stack, width, depth, device=DEVICE),
        copies=WeightCopies(room(recipe.weights, *stack, width, depth), room(recipe.weights, *stack, depth, width)),
        x=room(recipe.rows, shape.rows, depth),
        dy=room(recipe.rows, shape.rows, width),
        x_columns=room(recipe.columns, depth, places),
        dy_columns=room(recipe.rows, width, places),
        counts_e=counts_e,
        tiles=tiles,
    )


def _weight_shape(shape: Shape) -> tuple[int, ...]:
    return (*((shape.experts,) if shape.experts else ()), shape.width, shape.depth)


def _groups_of(shape: Shape) -> tuple[Tensor | None, TileTable | None]:
    if not shape.experts:
        return None, None
    each = [shape.rows // shape.experts] * shape.experts
    counts = skewed_counts(shape.experts, shape.rows) if shape.skewed else each
    counts_e = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    return counts_e, tile_table(counts_e, shape.rows)


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
    if which == "weight gradient" and layer.x_columns.block[0] == 1:
        return "dense_gradient" if layer.counts_e is None else "columns"
    if which == "weight gradient":
        return "dense_square" if layer.counts_e is None else "columns_square"
    return "dense" if layer.counts_e is None else "rows"


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
    found = decibels(got, expected)
    assert found > LEAST_DB, f"{layer.shape.name}, {which}: {found:.1f} dB, the bar is {LEAST_DB}"
    return found


def decibels(found: Tensor, expected: Tensor) -> float:
    """Of what is expected over what was found beside it."""
    expected = expected.float()
    noise = (found.float() - expected).square().sum().clamp(min=1e-30)
    return 10 * torch.log10(expected.square().sum() / noise).item()


def timed(ways: Ways, rounds: int) -> dict[str, float]:
    """Median milliseconds of each as the device takes them (`replays`); on a CPU once by the clock."""
    return replay_in_turns(ways, rounds).milliseconds
