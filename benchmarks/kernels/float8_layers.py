"""Layers whose products of 8-bit numbers are measured: their operands, and their products in 8 and in 16 bits.

Dense layers of DeepSeek-V3 and experts' shares of V3, V2-Lite and Qwen3-30B-A3B, in E4M3 by one of `RECIPES`. Each has
three products: forward, gradient of the input, gradient of the weight added to a float32 sum.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.grouped_gemm import skewed_counts
from benchmarks.kernels.measure import DEVICE, DTYPE, ON_GPU, decibels
from penstock.kernels.float8 import products, quantize, torch_products
from penstock.kernels.float8.quantize import Product, ProductLaunch
from penstock.kernels.float8.quantized import BLOCKWISE, BLOCKWISE_SQUARE, Quantized, Recipe, format_on
from penstock.kernels.float32_products import add_product
from penstock.kernels.grouped_gemm import (
    grouped_gemm_forward,
    grouped_gemm_input_gradient,
    grouped_gemm_weight_gradient,
)
from penstock.kernels.tile_table import tile_table
from penstock.kernels.tuning import target_of

PASSES = ("forward", "input gradient", "weight gradient")
LEAST_DB = 25.0
TARGET = target_of(DEVICE)
FORM = format_on("e4m3", TARGET)
HAS_TORCH = ON_GPU and torch_products.obstacle(BLOCKWISE, TARGET, torch.version.cuda) is None
"""Whether a run here leaves dense products to torch."""

RECIPES = {recipe.name: recipe for recipe in (BLOCKWISE, BLOCKWISE_SQUARE)}
"""Of all operands of a layer; they differ in those of the weight's gradient."""

OPTION = (BLOCKWISE.name, f"which blocks share a scale: {', '.join(RECIPES)}")
"""Of benchmarks: the recipe."""


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


class Layer:
    """Random operands of a layer's three products, in 16 and in 8 bits; a dense layer has no counts and no tile table.

    There is a tail of no rows, so that flops are those of all rows.
    """

    def __init__(self, shape: Shape, recipe: Recipe) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        normal = partial(torch.randn, generator=generator, device=DEVICE)
        self.shape, self.recipe = shape, recipe
        self.x_RD, self.dy_RF = (normal(shape.rows, size).to(DTYPE) for size in (shape.depth, shape.width))
        self.counts_e = self.tiles = None
        if shape.experts:
            each = [shape.rows // shape.experts] * shape.experts
            counts = skewed_counts(shape.experts, shape.rows) if shape.skewed else each
            self.counts_e = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
            self.tiles = tile_table(self.counts_e, shape.rows)
        self.w = normal(*([shape.experts] if shape.experts else []), shape.width, shape.depth).to(DTYPE)
        self.main = torch.zeros(self.w.shape, device=DEVICE)
        self.copies = quantize.quantize_weight(self.w, recipe, FORM)
        self.x, self.x_columns = self._both(self.x_RD, recipe.columns)
        self.dy, self.dy_columns = self._both(self.dy_RF, recipe.rows)
        self.flops = 2 * shape.rows * shape.depth * shape.width

    def _both(self, rows: Tensor, columns: tuple[int, int]) -> tuple[Quantized, Quantized]:
        both = quantize.quantize_rows(rows, self.recipe, FORM, columns=columns, counts_e=self.counts_e)
        assert both.columns is not None, "columns were asked for"
        return both.rows, both.columns

    def operands(self, which: str) -> tuple[Quantized, Quantized]:
        """Both sides of a product, in 8 bits."""
        if which == "weight gradient":
            return self.dy_columns, self.x_columns
        return (self.x, self.copies.forward) if which == "forward" else (self.dy, self.copies.backward)

    def bare(self, which: str, launch: ProductLaunch | None = None) -> Tensor:
        """One product by our kernels, of operands that stand in 8 bits."""
        counts_e, dtype, pair = self.counts_e, self.x_RD.dtype, self.operands(which)
        if which == "weight gradient":
            if counts_e is None:
                return products.multiply(*pair, torch.float32, accumulate_into=self.main, launch=launch)
            how = {"accumulate_into": self.main, "tiles": self.tiles}
            return products.multiply_columns(*pair, counts_e, dtype=dtype, launch=launch, **how)
        if counts_e is None:
            return products.multiply(*pair, dtype, launch=launch)
        return products.multiply_groups(*pair, counts_e, dtype=dtype, tiles=self.tiles, launch=launch)

    def plain(self, which: str) -> Tensor:
        """The same in 16 bits: our grouped GEMM, cuBLAS for one matrix."""
        x_RD, w, dy_RF, counts_e, tiles = self.x_RD, self.w, self.dy_RF, self.counts_e, self.tiles
        if counts_e is None:
            if which == "weight gradient":
                add_product(self.main, dy_RF.T, x_RD)
                return self.main
            return x_RD @ w.T if which == "forward" else dy_RF @ w
        if which == "weight gradient":
            return grouped_gemm_weight_gradient(dy_RF, x_RD, counts_e, accumulate_into=self.main, tiles=tiles)
        if which == "forward":
            return grouped_gemm_forward(x_RD, w, counts_e, tiles=tiles)
        return grouped_gemm_input_gradient(dy_RF, w, counts_e, tiles=tiles)

    def product(self, which: str) -> Product:
        """Which row of the tables of launches it is."""
        if which != "weight gradient":
            return "dense" if self.counts_e is None else "rows"
        if self.x_columns.block[0] == 1:
            return "dense_gradient" if self.counts_e is None else "columns"
        return "dense_square" if self.counts_e is None else "columns_square"

    def check(self, which: str) -> float:
        """Decibels of our product over its distance from the float32 product of what was quantized."""
        self.main.zero_()
        result = self.bare(which).float()
        counts = [self.shape.rows] if self.counts_e is None else self.counts_e.tolist()
        w = self.w.float().view(-1, *self.w.shape[-2:])
        pieces = zip(self.x_RD.float().split(counts), self.dy_RF.float().split(counts), w, strict=True)
        if which == "weight gradient":
            expected = torch.stack([dy.T @ x for x, dy, _ in pieces]).view_as(self.w)
        else:
            expected = torch.cat([x @ w.T if which == "forward" else dy @ w for x, dy, w in pieces])
        apart = decibels(result, expected)
        assert apart > LEAST_DB, f"{self.shape.name}, {which}: {apart:.1f} dB, the bar is {LEAST_DB}"
        return apart
