"""A row of 8-bit numbers with its scales behind it, as it travels from one rank to another.

    | D values, a byte each | up to a multiple of 16 | scales of their blocks | up to a multiple of 32 |

Values and scales are then one message, and whatever moves rows moves them: T rows are a tensor of T x bytes, uint8.
Where they arrive nothing is unpacked: `as_quantized` looks at the same memory.

`pack_rows` and `unpack_rows` are the definitions; `penstock.kernels.float8.pack` has them in one kernel each.
"""

import torch
from torch import Tensor

from penstock.kernels.float8 import reference
from penstock.kernels.float8.formats import Format
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.float8.recipes import Recipe

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


def pack_rows(x_TD: Tensor, recipe: Recipe, form: Format) -> Tensor:
    """Quantize rows for their journey.

    Args:
        x_TD: rows.
        recipe: see `blocks_of`.
        form: of the values.

    Returns:
        uint8, T x `row_bytes`.
    """
    tokens, width = x_TD.shape
    packed = torch.zeros(tokens, row_bytes(width, recipe), dtype=torch.uint8, device=x_TD.device)
    found, into = reference.quantize_rows(x_TD, recipe, form).rows, as_quantized(packed, width, recipe, form)
    into.values.copy_(found.values)
    into.scales.copy_(found.scales)
    return packed


def unpack_rows(packed: Tensor, width: int, recipe: Recipe, form: Format, dtype: torch.dtype) -> Tensor:
    """The numbers of packed rows.

    Args:
        packed: uint8, rows x `row_bytes`.
        width: D.
        recipe: by which they were packed.
        form: likewise.
        dtype: of the result.

    Returns:
        rows x D.
    """
    return reference.dequantize(as_quantized(packed, width, recipe, form)).to(dtype)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
