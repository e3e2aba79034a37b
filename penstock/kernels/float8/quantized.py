"""Numbers of 8 bits with their scales. Everywhere the contracted dim is the last one.

Matrix units of Hopper take 8-bit operands only so, and one rule for all chips is simpler than two. So a product is
always `a @ b^T` of a (M x K) and b (N x K), and what is contracted over its rows is held transposed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.float8.recipes import Block, Format, Recipe


class Quantized(NamedTuple):
    """A matrix, or a stack of them, in 8 bits.

    Attributes:
        values: float8, ... x outer x depth. The last dim is contiguous; rows may stand apart (a row that travelled is
            followed by its scales), by a multiple of 16 bytes.
        scales: what a block's values are multiplied with, ... x outer blocks x depth blocks, with any strides; float32,
            or float8_e8m0fnu for mxfp8. A last block may be smaller than the others.
        block: rows and columns of a block; 0 for all.
    """

    values: Tensor
    scales: Tensor
    block: Block


class RowColQuantized(NamedTuple):
    """A matrix as both of its products want it.

    Attributes:
        rows: x_RD as it is, contracted over D.
        columns: transposed, D x R, contracted over R; None if nobody asked for it.
    """

    rows: Quantized
    columns: Quantized | None


class WeightCopies(NamedTuple):
    """A weight, or a stack of experts' weights, quantized once an optimizer step.

    Attributes:
        forward: ... F x D, contracted over D.
        backward: ... D x F, contracted over F, for the gradient of the input.
    """

    forward: Quantized
    backward: Quantized


_ALIASES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.as_strided.default})
"""Operators that autograd, FSDP2 and recomputation use to have the same tensor again."""


class GatheredCopies:
    """Both copies, in memory that is freed and filled again.

    Args:
        forward: ... F x D.
        backward: ... D x F: its scales, and memory for its values.
        transpose: fills the second's values from the first's (`Float8Operators.transpose_weight`).
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
        """Contracted over F."""
        if not self._is_transposed:
            with torch.no_grad():
                self._transpose(self.forward, self._backward)
            self._is_transposed = True
        return self._backward

    def renewed(self) -> None:
        """Say that `forward` has been filled again."""
        self._is_transposed = False


class GatheredWeight(Tensor):
    """See the top of the file.

    Args:
        copies: of the numbers.
        dtype: that it passes for.
    """

    copies: GatheredCopies
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # as torch has it itself

    @staticmethod
    def __new__(cls, copies: GatheredCopies, dtype: torch.dtype) -> "GatheredWeight":
        """A tensor with a shape and without memory."""
        values = copies.forward.values
        weight: GatheredWeight = Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)
        weight.copies = copies
        return weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # there it is no method of the class
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> "GatheredWeight":
        """Give the same weight again where that is all an operator asks for."""
        weight = args[0]
        assert func in _ALIASES and isinstance(weight, GatheredWeight), f"{func}, of a weight in 8 bits only"
        assert len(args) == 1 or tuple(args[1]) == tuple(weight.shape), f"a part of a weight in 8 bits: {args[1]}"
        return cls(weight.copies, weight.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # not annotated there
        """Without numbers, which need operators."""
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"


def copies_of(
    weight: Tensor, kept: WeightCopies | None, quantize: Callable[[Tensor], WeightCopies]
) -> WeightCopies | GatheredCopies:
    """The copies of a weight that products read: kept, gathered, or made now.

    Args:
        weight: as its module has it during the pass, or as backward finds it again.
        kept: those that stay from step to step, if there are any.
        quantize: what makes copies of a weight.
    """
    if kept is not None:
        return kept
    return weight.copies if isinstance(weight, GatheredWeight) else quantize(weight.detach())


SCALES_MULTIPLE = 16
"""Bytes after which scales may begin."""

ROW_MULTIPLE = 32
"""Bytes: the least that memory moves, and that every way to experts can move."""


def blocks_of(width: int, recipe: Recipe) -> int:
    """Scales of a row; the last block may be smaller than the others.

    Args:
        width: D.
        recipe: one whose blocks lie in one row, and are not all of it.
    """
    rows, depth = recipe.rows
    assert rows == 1 and depth > 0, f"rows do not travel by the recipe {recipe.name}"
    return -(-width // depth)


def scales_at(width: int) -> int:
    """Bytes of a row before its scales."""
    return _up(width, SCALES_MULTIPLE)


def row_bytes(width: int, recipe: Recipe) -> int:
    """Bytes of a row.

    Args:
        width: D.
        recipe: see `blocks_of`.
    """
    return _up(scales_at(width) + blocks_of(width, recipe) * scale_dtype(recipe).itemsize, ROW_MULTIPLE)


def scale_dtype(recipe: Recipe) -> torch.dtype:
    """Of the scales of a row that travels."""
    return torch.float8_e8m0fnu if recipe.scaling == "e8m0" else torch.float32


def as_quantized(packed: Tensor, width: int, recipe: Recipe, form: Format) -> Quantized:
    """Packed rows as operands: views of the same memory.

    Args:
        packed: uint8, rows x `row_bytes`.
        width: D.
        recipe: by which they were packed.
        form: likewise.
    """
    assert packed.shape[1] == row_bytes(width, recipe), f"rows of {packed.shape[1]} bytes for {width} numbers"
    dtype, first = scale_dtype(recipe), scales_at(width)
    scales = packed[:, first : first + blocks_of(width, recipe) * dtype.itemsize]
    return Quantized(packed[:, :width].view(form.dtype), scales.view(dtype), recipe.rows)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
