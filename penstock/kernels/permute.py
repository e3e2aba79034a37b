"""Tokens into expert order and back, without a word to the host.

    order_rows   count: each program counts the experts of its chunk of slots
                 place: each program sorts its chunk, adds up the counts of the chunks before it, and writes places
    permute      each token's row is read once and written to its K places         (backward: sum of K rows)
    unpermute    K rows, times their weights, are summed for each token            (backward: spread, with dot products
                                                                                    for the weights from the same rows)

Everything is organized by token, so x is read once whatever K is, every place is written exactly once (places are a
permutation) and no sum needs an atomic. Sorting by (expert, slot number) is stable by construction. Rows past the last
expert's belong to dropped slots: they are written as zeros, and what they hold is never used, NaN included.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.reference import RowOrder
from penstock.kernels.tuning import Launch

LAUNCH = Launch(block_rows=1, block_columns=1024, warps=4)
"""Columns of a row moved at a time: 16 bytes a thread for bfloat16, so that a sum over K stays within threads."""

ORDER_LAUNCH = Launch(block_rows=512, block_columns=0, warps=4)
"""Fewest slots of a chunk: a sort of 512 keys by 128 threads."""

MOST_CHUNKS = 128
"""Every program reads the counts of all chunks, so their number is bounded before the chunk's size is ..."""

LARGEST_CHUNK = 4096
"""... up to a sort of 4,096 keys."""


def order_rows(experts_TK: Tensor, experts: int, *, launch: Launch = ORDER_LAUNCH) -> RowOrder:
    """`penstock.kernels.reference.order_rows` in two kernels, deterministic.

    Args:
        experts_TK: integer ids from 0 to `experts`; the last marks a dropped slot.
        experts: E.
        launch: fewest slots of a chunk (a power of two), and warps.
    """
    experts_TK = experts_TK.contiguous()
    slots = experts_TK.numel()
    slots_R = torch.empty(slots, dtype=torch.int64, device=experts_TK.device)
    places_TK = torch.empty_like(experts_TK, dtype=torch.int64)
    counts_E = torch.empty(experts, dtype=torch.int32, device=experts_TK.device)
    wanted = triton.next_power_of_2(triton.cdiv(slots, MOST_CHUNKS))
    chunk = min(max(wanted, launch.block_rows), LARGEST_CHUNK)
    # Without slots one program still writes the counts.
    chunks = max(triton.cdiv(slots, chunk), 1)
    # One bin more for dropped slots, and one for the lanes past the last slot.
    bins = triton.next_power_of_2(experts + 2)
    tallies_CE = torch.empty(chunks, bins, dtype=torch.int32, device=experts_TK.device)
    warps = launch.warps * max(1, chunk // 1024)
    count_kernel[(chunks,)](
        experts_TK, tallies_CE, slots, EXPERTS=experts, BINS=bins, CHUNK=chunk, num_warps=launch.warps
    )
    place_kernel[(chunks,)](
        experts_TK,
        tallies_CE,
        slots_R,
        places_TK,
        counts_E,
        slots,
        chunks,
        EXPERTS=experts,
        BINS=bins,
        CHUNK=chunk,
        BLOCK_C=max(1, 2048 // bins),
        num_warps=min(warps, 8),
    )
    return RowOrder(slots_R, places_TK, counts_E)


def permute(x_TD: Tensor, order: RowOrder, *, launch: Launch = LAUNCH) -> Tensor:
    """`penstock.kernels.reference.permute` in one kernel, and one kernel backward.

    Args:
        x_TD: rows must be contiguous (a copy is made if not).
        order: from `order_rows`; its places must be a permutation of all rows.
        launch: columns that a program moves at a time.
    """
    _check(x_TD.shape[0], order)
    return _Permute.apply(x_TD, order.places_TK, order.counts_E, launch)


def unpermute(
    y_RD: Tensor, order: RowOrder, weights_TK: Tensor | None = None, *, launch: Launch = LAUNCH
) -> Tensor:
    """`penstock.kernels.reference.unpermute` in one kernel, and one kernel backward for both gradients.

    Args:
        y_RD: one row for each slot.
        order: from `order_rows`; its places must be a permutation of all rows.
        weights_TK: float32, or None.
        launch: columns that a program moves at a time.
    """
    _check(order.places_TK.shape[0], order)
    if y_RD.shape[0] != order.places_TK.numel():
        raise KernelError("unpermute: y must have one row for each slot", got=f"{y_RD.shape[0]} rows")
    if weights_TK is not None and (weights_TK.shape != order.places_TK.shape or weights_TK.dtype != torch.float32):
        raise KernelError(
            "unpermute: weights must be float32, one for each slot",
            got=f"{weights_TK.dtype} {tuple(weights_TK.shape)}",
            allowed=tuple(order.places_TK.shape),
        )
    return _Unpermute.apply(y_RD, weights_TK, order.places_TK, order.counts_E, launch)


class _Permute(torch.autograd.Function):
    """Spread; backward is a sum without weights."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_TD: Tensor, places_TK: Tensor, counts_E: Tensor, launch: Launch) -> Tensor:
        ctx.save_for_backward(places_TK, counts_E)
        ctx.launch = launch
        return _spread(x_TD, places_TK, counts_E, launch)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dx_RD: Tensor) -> tuple[Tensor, None, None, None]:
        places_TK, counts_E = ctx.saved_tensors
        return _sum_rows(dx_RD, None, places_TK, counts_E, ctx.launch), None, None, None


class _Unpermute(torch.autograd.Function):
    """Sum; backward is a spread, which meets the rows of y again only if there are weights."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, y_RD: Tensor, weights_TK: Tensor | None, places_TK: Tensor, counts_E: Tensor, launch: Launch
    ) -> Tensor:
        ctx.save_for_backward(None if weights_TK is None else y_RD, weights_TK, places_TK, counts_E)
        ctx.launch = launch
        return _sum_rows(y_RD, weights_TK, places_TK, counts_E, launch)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy_TD: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        y_RD, weights_TK, places_TK, counts_E = ctx.saved_tensors
        if weights_TK is None:
            return _spread(dy_TD, places_TK, counts_E, ctx.launch), None, None, None, None
        dy_RD, dweights_TK = _spread_with_weights(dy_TD, y_RD, weights_TK, places_TK, counts_E, ctx.launch)
        return dy_RD, dweights_TK, None, None, None


def _spread(x_TD: Tensor, places_TK: Tensor, counts_E: Tensor, launch: Launch) -> Tensor:
    """x_RD: each token's row at the places of its slots."""
    x_TD = x_TD.contiguous()
    width, slots = x_TD.shape[1], places_TK.numel()
    x_RD = x_TD.new_empty(slots, width)
    _launch_by_token(spread_kernel, (x_TD, None, None, x_RD, None), width, places_TK, counts_E, launch)
    return x_RD


def _spread_with_weights(
    dy_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, places_TK: Tensor, counts_E: Tensor, launch: Launch
) -> tuple[Tensor, Tensor]:
    """Gradients of `unpermute`: dy_RD = weight dy_T and dweight = <y_R, dy_T>."""
    y_RD, weights_TK = y_RD.contiguous(), weights_TK.contiguous()
    dy_RD, dweights_TK = torch.empty_like(y_RD), torch.empty_like(weights_TK)
    tensors = (dy_TD.contiguous(), y_RD, weights_TK, dy_RD, dweights_TK)
    _launch_by_token(spread_kernel, tensors, y_RD.shape[1], places_TK, counts_E, launch)
    return dy_RD, dweights_TK


def _sum_rows(
    y_RD: Tensor, weights_TK: Tensor | None, places_TK: Tensor, counts_E: Tensor, launch: Launch
) -> Tensor:
    """y_TD: the rows of each token's slots, times their weights, summed."""
    y_RD = y_RD.contiguous()
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    y_TD = y_RD.new_empty(places_TK.shape[0], y_RD.shape[1])
    _launch_by_token(sum_rows_kernel, (y_RD, weights_TK, y_TD), y_RD.shape[1], places_TK, counts_E, launch)
    return y_TD


def _launch_by_token(
    kernel: triton.JITFunction,
    tensors: tuple[Tensor | None, ...],
    width: int,
    places_TK: Tensor,
    counts_E: Tensor,
    launch: Launch,
) -> None:
    """One program for each token; `tensors` are the kernel's own, which stand before the order."""
    tokens, top_k = places_TK.shape
    kernel[(tokens,)](
        *tensors,
        places_TK,
        counts_E,
        K=top_k,
        D=width,
        EXPERTS=counts_E.shape[0],
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_D=min(launch.block_columns, triton.next_power_of_2(width)),
        BLOCK_E=triton.next_power_of_2(counts_E.shape[0]),
        num_warps=launch.warps,
    )


def _check(tokens: int, order: RowOrder) -> None:
    if order.places_TK.shape[0] != tokens or not order.places_TK.is_contiguous():
        raise KernelError(
            "permute: places must be contiguous, one row for each token",
            got=f"{tuple(order.places_TK.shape)} for {tokens} tokens",
        )


@triton.jit
def count_kernel(
    experts_ptr, tallies_ptr, slots, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr
):
    """Slots of one chunk on each expert; bin EXPERTS holds dropped slots, the next bin the lanes past the last slot."""
    chunk = tl.program_id(0)
    slot_R = chunk * CHUNK + tl.arange(0, CHUNK)
    expert_R = tl.load(experts_ptr + slot_R, mask=slot_R < slots, other=EXPERTS + 1).to(tl.int32)
    tl.store(tallies_ptr + chunk * BINS + tl.arange(0, BINS), tl.histogram(expert_R, BINS))


@triton.jit
def place_kernel(
    experts_ptr,
    tallies_ptr,
    slots_ptr,
    places_ptr,
    counts_ptr,
    slots,
    chunks,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Places of one chunk's slots.

    After the sort, lane i of the chunk has the i-th slot by (expert, slot number). Its place is

        rows of all smaller experts + rows of its expert in earlier chunks + (i - slots of smaller experts in this chunk)

    With chunks of 4 and experts [1, 0, 1, 2 | 0, 1]: chunk 1 sorts to experts [0, 1]; expert 0 begins at place 0 and has
    one row before, expert 1 begins at place 2 and has two: the places are 0 + 1 + (0 - 0) = 1 and 2 + 2 + (1 - 1) = 4.
    """
    chunk = tl.program_id(0)
    lane_R = tl.arange(0, CHUNK)
    bin_E = tl.arange(0, BINS)
    total_E = tl.zeros([BINS], tl.int32)
    earlier_E = tl.zeros([BINS], tl.int32)
    for start in range(0, chunks, BLOCK_C):
        other_C = start + tl.arange(0, BLOCK_C)
        tally_ptrs = tallies_ptr + other_C[:, None] * BINS + bin_E[None, :]
        tally_CE = tl.load(tally_ptrs, mask=(other_C < chunks)[:, None], other=0)
        total_E += tl.sum(tally_CE, 0)
        earlier_E += tl.sum(tl.where((other_C < chunk)[:, None], tally_CE, 0), 0)
    here_E = tl.load(tallies_ptr + chunk * BINS + bin_E)
    first_E = (tl.cumsum(total_E, 0) - total_E) + earlier_E - (tl.cumsum(here_E, 0) - here_E)

    slot_R = chunk * CHUNK + lane_R
    expert_R = tl.load(experts_ptr + slot_R, mask=slot_R < slots, other=EXPERTS + 1).to(tl.int32)
    key_R = tl.sort(expert_R * CHUNK + lane_R)
    slot_R = (chunk * CHUNK + key_R % CHUNK).to(tl.int64)
    place_R = (tl.gather(first_E, key_R // CHUNK, 0) + lane_R).to(tl.int64)
    tl.store(slots_ptr + place_R, slot_R, mask=slot_R < slots)
    tl.store(places_ptr + slot_R, place_R, mask=slot_R < slots)
    if chunk == 0:
        tl.store(counts_ptr + bin_E, total_E, mask=bin_E < EXPERTS)


@triton.jit
def spread_kernel(
    x_ptr,
    y_ptr,
    weights_ptr,
    rows_ptr,
    dweights_ptr,
    places_ptr,
    counts_ptr,
    K: tl.constexpr,
    D: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One token's row, times each slot's weight if there are weights, to its K places; zeros where a slot was dropped.

    With weights also dweights = <row of y at the place, x>. Example: token 1 with places [2, 5], 5 rows used and weights
    [0.5, 0.5]: row 2 becomes 0.5 x, row 5 becomes zeros.
    """
    token = tl.program_id(0).to(tl.int64)
    choice_K = tl.arange(0, BLOCK_K)
    is_slot_K = choice_K < K
    place_K = tl.load(places_ptr + token * K + choice_K, mask=is_slot_K, other=0)
    expert_E = tl.arange(0, BLOCK_E)
    used = tl.sum(tl.load(counts_ptr + expert_E, mask=expert_E < EXPERTS, other=0), 0)
    kept_K1 = (place_K < used)[:, None]
    if weights_ptr is not None:
        weight_K1 = tl.load(weights_ptr + token * K + choice_K, mask=is_slot_K, other=0.0)[:, None]
        dweight_K = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, D, BLOCK_D):
        column_1D = start + tl.arange(0, BLOCK_D)[None, :]
        row_KD = place_K[:, None] * D + column_1D
        inside = is_slot_K[:, None] & (column_1D < D)
        x_1D = tl.load(x_ptr + token * D + column_1D, mask=column_1D < D, other=0.0)
        spread_KD = tl.broadcast_to(x_1D, [BLOCK_K, BLOCK_D])
        if weights_ptr is not None:
            spread_KD = spread_KD.to(tl.float32)
            # Loaded before it is known whether the slot was kept: the row exists anyhow, and waiting costs more.
            y_KD = tl.load(y_ptr + row_KD, mask=inside, other=0.0).to(tl.float32)
            dweight_K += tl.sum(tl.where(kept_K1, y_KD * spread_KD, 0.0), 1)
            spread_KD *= weight_K1
        spread_KD = tl.where(kept_K1, spread_KD, 0.0)
        tl.store(rows_ptr + row_KD, spread_KD.to(rows_ptr.dtype.element_ty), mask=inside)
    if weights_ptr is not None:
        tl.store(dweights_ptr + token * K + choice_K, dweight_K, mask=is_slot_K)


@triton.jit
def sum_rows_kernel(
    rows_ptr,
    weights_ptr,
    out_ptr,
    places_ptr,
    counts_ptr,
    K: tl.constexpr,
    D: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One token: the rows at its K places, times their weights if given, summed in float32; dropped slots left out.

    Example: token 1 with places [2, 5], 5 rows used and weights [0.5, 0.5] is 0.5 times row 2.
    """
    token = tl.program_id(0).to(tl.int64)
    choice_K = tl.arange(0, BLOCK_K)
    is_slot_K = choice_K < K
    place_K = tl.load(places_ptr + token * K + choice_K, mask=is_slot_K, other=0)
    expert_E = tl.arange(0, BLOCK_E)
    used = tl.sum(tl.load(counts_ptr + expert_E, mask=expert_E < EXPERTS, other=0), 0)
    kept_K1 = (is_slot_K & (place_K < used))[:, None]
    if weights_ptr is not None:
        weight_K1 = tl.load(weights_ptr + token * K + choice_K, mask=is_slot_K, other=0.0)[:, None]
    for start in range(0, D, BLOCK_D):
        column_1D = start + tl.arange(0, BLOCK_D)[None, :]
        inside = is_slot_K[:, None] & (column_1D < D)
        rows_KD = tl.load(rows_ptr + place_K[:, None] * D + column_1D, mask=inside, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            rows_KD *= weight_K1
        out_D = tl.sum(tl.where(kept_K1, rows_KD, 0.0), 0)
        column_D = start + tl.arange(0, BLOCK_D)
        tl.store(out_ptr + token * D + column_D, out_D.to(out_ptr.dtype.element_ty), mask=column_D < D)
