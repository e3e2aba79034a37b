"""Rows of many layers one behind the other in one buffer, where only the device knows how many each layer has.

What a layer keeps for backward has as many rows as tokens came to its experts, and layers differ: the fullest of 26 may
have twice the even share, all together hardly more than it. So layers that keep their rows in one buffer need room for
the sum, and not each for its worst case. Where a layer begins is a number on the device: kernels that write or read
kept rows load it (`penstock.kernels.expert_parts.KeptRows`).

    buffer   | layer 0 | layer 1 .... | layer 2 | room
    first    0         cursor after 0            cursor now

A layer that does not fit is counted and written over the first ones: the pass is worth nothing then, and whoever counts
makes it again (penstock/moe/dispatch/row_capacity.py).
"""

import torch
from torch import Tensor

from penstock.kernels.language import tl, triton
from penstock.kernels.launching import start_kernel


def claim_rows(cursor: Tensor, used: Tensor, capacity: int, meter: Tensor) -> Tensor:
    """The first row of a layer's place in a buffer; moves the cursor on.

    Args:
        cursor: int64 [1]: rows that were taken so far, also of layers that did not fit.
        used: int32, one number: rows of the layer, at most `capacity`.
        capacity: S, rows of the buffer.
        meter: int64 [2]: rows that found no room are added to the first, the second becomes the most that were taken.

    Returns:
        int64 [1].
    """
    first = torch.empty_like(cursor)
    start_kernel(claim_rows_kernel, (1,), cursor, used, first, meter, capacity, num_warps=1)
    return first


@triton.jit(do_not_specialize=["capacity"])
def claim_rows_kernel(cursor_ptr, used_ptr, first_ptr, meter_ptr, capacity):
    """Example: cursor 5, 3 rows, capacity 7: cursor 8, the layer at row 0, and 1 row more that found no room."""
    begin = tl.load(cursor_ptr)
    end = begin + tl.load(used_ptr)
    tl.store(cursor_ptr, end)
    tl.store(first_ptr, tl.where(end <= capacity, begin, 0))
    missing = tl.maximum(end - tl.maximum(begin, capacity), 0)
    tl.store(meter_ptr, tl.load(meter_ptr) + missing)
    tl.store(meter_ptr + 1, tl.maximum(tl.load(meter_ptr + 1), end))
