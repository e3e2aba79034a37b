"""8-bit formats, and recipes: which numbers share a scale.

OCP's formats (OFP8) are used by NVIDIA, and by AMD from gfx950 on. gfx942 computes with the older FNUZ forms: the same
bits, another exponent bias, no infinity, no negative zero; E4M3 ends at 240 there instead of 448.

A recipe gives the blocks of `outer` rows by `depth` columns that share a scale, where the last dim is the contracted
one; 0 means the whole dim. Each operand of each of the three products has its own blocks, so a matrix that two products
contract over different dims is quantized twice, unless its blocks are squares.

    tensorwise   one scale for a tensor, or for each matrix of a stack of weights     (current scaling)
    rowwise      one scale for each row, applied after the sum
    blockwise    activations and gradients 1 x 128, weights 128 x 128       (DeepSeek-V3, arXiv 2412.19437, section 3.3)
    blockwise-square   the same, and 128 x 128 for activations in the gradient of a weight
    mxfp8        1 x 32, scales are powers of two in 8 bits (E8M0)          (OCP Microscaling formats 1.0)

Where both operands of a product have a scale for each row, as in the gradient of a weight, each number of each partial
sum has its own scale, and Hopper's matrix units wait while they are applied. With squares on one side a partial sum has
one scale a row, as in the other two products. Only the activation may have squares: a gradient differs from token to
token by far more (section B.2 there: squares for gradients made a training diverge).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch

from penstock.base.errors import KernelError

FormatName = Literal["e4m3", "e5m2"]


@dataclass(frozen=True)
class Format:
    """An 8-bit floating-point format, named by its exponent and mantissa bits."""

    name: FormatName
    dtype: torch.dtype
    largest: float


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0)
E4M3_FNUZ = Format("e4m3", torch.float8_e4m3fnuz, 240.0)
E5M2_FNUZ = Format("e5m2", torch.float8_e5m2fnuz, 57344.0)

FNUZ_TARGETS = frozenset({"gfx942"})  # chips whose matrix units know only the FNUZ forms


def format_on(name: FormatName, target: str) -> Format:
    """The form of a format that a chip computes with; `cpu` and unknown chips get OCP's."""
    if target in FNUZ_TARGETS:
        return E4M3_FNUZ if name == "e4m3" else E5M2_FNUZ
    return E4M3 if name == "e4m3" else E5M2


RecipeName = Literal["tensorwise", "rowwise", "blockwise", "blockwise-square", "mxfp8"]
Scaling = Literal["float32", "power-of-two", "e8m0"]
Block = tuple[int, int]  # rows and columns that share a scale; 0 for the whole dim

DEPTH = 128  # numbers after which a partial sum is added in float32: Hopper's matrix unit keeps only 14 bits of a sum
ALIGNMENT = 128  # each expert's rows begin at a multiple of this in copies whose contracted dim is the rows


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Block sizes of each kind of operand, and the form of their scales."""

    name: RecipeName
    rows: Block  # of activations that are contracted over their columns, and of gradients in either direction
    columns: Block  # of activations that are contracted over their rows, in the gradient of a weight
    weights: Block
    scaling: Scaling


TENSORWISE = Recipe(name="tensorwise", rows=(0, 0), columns=(0, 0), weights=(0, 0), scaling="float32")
ROWWISE = Recipe(name="rowwise", rows=(1, 0), columns=(1, 0), weights=(1, 0), scaling="float32")
BLOCKWISE = Recipe(name="blockwise", rows=(1, 128), columns=(1, 128), weights=(128, 128), scaling="power-of-two")
BLOCKWISE_SQUARE = replace(BLOCKWISE, name="blockwise-square", columns=(128, 128))
MXFP8 = Recipe(name="mxfp8", rows=(1, 32), columns=(1, 32), weights=(1, 32), scaling="e8m0")

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {recipe.name: recipe for recipe in (TENSORWISE, ROWWISE, BLOCKWISE, BLOCKWISE_SQUARE, MXFP8)}
)

# Chips whose matrix units multiply 8-bit floating-point numbers, and those that apply a scale to every 32 of them.
HAS_FLOAT8 = frozenset({"sm_89", "sm_90", "sm_100", "sm_103", "gfx942", "gfx950"})
HAS_MICROSCALING = frozenset({"sm_100", "sm_103", "gfx950"})


def default_recipe(target: str) -> Recipe:
    """The recipe of `auto` on a chip (or `cpu`): mxfp8 where the matrix units apply its scales, else blockwise.

    Raises KernelError if the chip has no 8-bit products.
    """
    recipe = MXFP8 if target in HAS_MICROSCALING else BLOCKWISE
    refuse(recipe, target)
    return recipe


def obstacle(recipe: Recipe, target: str) -> str | None:
    """Why a chip cannot compute by a recipe, or None. A CPU computes any recipe, slowly."""
    if target == "cpu":
        return None
    if target not in HAS_FLOAT8:
        return f"{target} has no products of 8-bit floating-point numbers"
    if recipe.name == "mxfp8" and target not in HAS_MICROSCALING:
        return f"the matrix units of {target} do not apply scales of 32 numbers"
    return None


def refuse(recipe: Recipe, target: str) -> None:
    """Raise KernelError if a chip cannot compute by a recipe."""
    problem = obstacle(recipe, target)
    if problem is not None:
        possible = [name for name, candidate in RECIPES.items() if obstacle(candidate, target) is None]
        raise KernelError(
            f"recipe {recipe.name} cannot be had",
            got=problem,
            allowed=", ".join(("none", *possible)),
            fix="set the knob of the section float8 to one of these, or to auto",
        )
