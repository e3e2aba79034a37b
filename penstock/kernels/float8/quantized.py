"""8-bit formats, recipes, and numbers with their scales. The contracted dim is always the last one.

Hopper's matrix units read 8-bit operands only in this order, and one rule for all chips is simpler than two. So a
product is always `a @ b^T` of a (M x K) and b (N x K), and an operand contracted over its rows is stored transposed.

A row that travels from rank to rank is packed into one message with its scales:

    | D values, one byte each | padding to a multiple of 16 | scales of the blocks | padding to a multiple of 32 |

T packed rows are a tensor of T x `row_bytes`, uint8. `as_quantized` views the same memory as an operand.

FSDP2 gathers a weight in 8 bits as a `GatheredWeight` (penstock/parallel/shard.py): a parameter of the compute
dtype for modules and autograd, but without 16-bit numbers. Its blocks are squares, so the transposed copy has the same
numbers and scales; it is made when backward first asks for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

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
    """Block sizes of each kind of operand, and the form of their scales.

    OCP's formats (OFP8) are used by NVIDIA, and by AMD from gfx950 on. gfx942 computes with the older FNUZ forms: the
    same bits, another exponent bias, no infinity, no negative zero; E4M3 ends at 240 there instead of 448.

    A recipe gives the blocks of `outer` rows by `depth` columns that share a scale, where the last dim is the
    contracted one; 0 means the whole dim. Each operand of each of the three products has its own blocks, so a matrix
    that two products contract over different dims is quantized twice, unless its blocks are squares.

        tensorwise   one scale for a tensor, or for each matrix of a stack of weights     (current scaling) rowwise
        one scale for each row, applied after the sum blockwise    activations and gradients 1 x 128, weights 128 x 128
        (DeepSeek-V3, arXiv 2412.19437, section 3.3) blockwise-square   the same, and 128 x 128 for activations in the
        gradient of a weight mxfp8        1 x 32, scales are powers of two in 8 bits (E8M0)          (OCP Microscaling
        formats 1.0)

    Where both operands of a product have a scale for each row, as in the gradient of a weight, each number of each
    partial sum has its own scale, and Hopper's matrix units wait while they are applied. With squares on one side a
    partial sum has one scale a row, as in the other two products. Only the activation may have squares: a gradient
    differs from token to token by far more (section B.2 there: squares for gradients made a training diverge).
    """

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


class Quantized(NamedTuple):
    """A matrix, or a stack of matrices, in 8 bits. The last blocks may be smaller than the others."""

    values: Tensor  # float8, ... x outer x depth; depth is contiguous, the stride of outer a multiple of 16 bytes
    scales: Tensor  # ... x outer blocks x depth blocks, any strides; float32, or float8_e8m0fnu for mxfp8
    block: Block

    def fill(self, other: "Quantized") -> None:
        """Copy another's numbers and scales into this memory."""
        self.values.copy_(other.values)
        self.scales.copy_(other.scales)


class RowColQuantized(NamedTuple):
    """A matrix as both of its products read it."""

    rows: Quantized  # x_RD, contracted over D
    columns: Quantized | None  # transposed, D x R, contracted over R; None if it was not asked for


class WeightCopies(NamedTuple):
    """A weight, or a stack of experts' weights, quantized once an optimizer step."""

    forward: Quantized  # ... F x D, contracted over D
    backward: Quantized  # ... D x F, contracted over F, for the gradient of the input

    def fill(self, others: "WeightCopies") -> "WeightCopies":
        """Copy others' numbers and scales into this memory, which captured graphs read."""
        self.forward.fill(others.forward)
        self.backward.fill(others.backward)
        return self


# Operators by which autograd, FSDP2 and recomputation get the same tensor again.
_ALIASES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.as_strided.default})


class GatheredCopies:
    """Both copies of a gathered weight, in memory that is freed and filled again.

    `backward` has scales, and memory for the values that `transpose` (`Float8Operators.transpose_weight`) fills.
    """

    def __init__(
        self, forward: Quantized, backward: Quantized, transpose: Callable[[Quantized, Quantized], None]
    ) -> None:
        self.forward = forward
        self._backward = backward
        self._transpose = transpose
        self._is_transposed = False

    @property
    def backward(self) -> Quantized:
        """The copy that is contracted over F; transposed at the first use."""
        if not self._is_transposed:
            with torch.no_grad():
                self._transpose(self.forward, self._backward)
            self._is_transposed = True
        return self._backward

    def renewed(self) -> None:
        """Say that `forward` has been filled again."""
        self._is_transposed = False


class GatheredWeight(Tensor):
    """A weight that FSDP gathered in 8 bits only, with the dtype that modules and autograd see; see the top.

    A stack of matrices has two shapes, which `view` changes: e x F x D as its copies, and e F x D as FSDP2 divides it.
    """

    copies: GatheredCopies
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # as in torch

    @staticmethod
    def __new__(
        cls, copies: GatheredCopies, dtype: torch.dtype, shape: Sequence[int] | None = None
    ) -> "GatheredWeight":
        """A tensor with a shape (default: that of the copies) and without memory."""
        values = copies.forward.values
        shape = values.shape if shape is None else shape
        weight: GatheredWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=values.device)
        weight.copies = copies
        return weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # no class method there
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> "GatheredWeight":
        """Return the same weight for operators that alias the whole tensor; refuse all others."""
        weight = args[0]
        assert func in _ALIASES and isinstance(weight, GatheredWeight), f"{func}, of a weight in 8 bits only"
        shape = tuple(weight.shape if len(args) == 1 else args[1])
        stack = tuple(weight.copies.forward.values.shape)
        assert shape in (stack, (prod(stack[:-1]), stack[-1])), f"a part of a weight in 8 bits: {shape}"
        return cls(weight.copies, weight.dtype, shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # not annotated there
        """Its shape and dtype, because its numbers need operators."""
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"


def copies_of(
    weight: Tensor, kept: WeightCopies | None, quantize: Callable[[Tensor], WeightCopies]
) -> WeightCopies | GatheredCopies:
    """The copies of a weight that products read: kept from step to step, gathered, or made now."""
    if kept is not None:
        return kept
    return weight.copies if isinstance(weight, GatheredWeight) else quantize(weight.detach())


SCALES_MULTIPLE = 16  # bytes, from which scales of a packed row begin
ROW_MULTIPLE = 32  # bytes of a packed row: the smallest memory transaction, which every dispatcher can move


def blocks_of(width: int, recipe: Recipe) -> int:
    """Scales of a packed row; the last block may be smaller. The recipe's blocks must lie in one row."""
    rows, depth = recipe.rows
    assert rows == 1 and depth > 0, f"rows do not travel by the recipe {recipe.name}"
    return -(-width // depth)


def scales_at(width: int) -> int:
    """Bytes of a packed row before its scales."""
    return _up(width, SCALES_MULTIPLE)


def row_bytes(width: int, recipe: Recipe) -> int:
    """Bytes of a packed row of D numbers."""
    return _up(scales_at(width) + blocks_of(width, recipe) * scale_dtype(recipe.scaling).itemsize, ROW_MULTIPLE)


def scale_dtype(scaling: Scaling) -> torch.dtype:
    return torch.float8_e8m0fnu if scaling == "e8m0" else torch.float32


def scales_in_bytes(scales: Tensor) -> Tensor:
    """Scales as kernels read them: exponents of E8M0 are bytes, because Triton has no such type."""
    return scales.view(torch.uint8) if scales.itemsize == 1 else scales


def as_quantized(packed: Tensor, width: int, recipe: Recipe, form: Format) -> Quantized:
    """Packed rows (uint8, rows x `row_bytes`) as an operand: views of the same memory."""
    assert packed.shape[1] == row_bytes(width, recipe), f"rows of {packed.shape[1]} bytes for {width} numbers"
    dtype, first = scale_dtype(recipe.scaling), scales_at(width)
    scales = packed[:, first : first + blocks_of(width, recipe) * dtype.itemsize]
    return Quantized(packed[:, :width].view(form.dtype), scales.view(dtype), recipe.rows)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
