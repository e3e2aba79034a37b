"""Tokens into expert order and back; the host never reads a count.

    order_rows   count: slots of each chunk on each expert
                 scan:  slots of the chunks before it, and the counts
                 place: first row of the expert + slots in earlier chunks + earlier slots of the chunk
    unpermute    K rows, times their weights, are summed for each token
                 backward: the token's gradient is spread to the K rows, and its dot products with them are those of
                 the weights
    gather_rows  copy of as many rows of an index as the device counts
    order_local_rows    `order_rows` of the slots of all ranks by this rank's experts, for the symmetric dispatcher;
                 slots of other ranks' experts count as dropped, and counts are limited to the rows of the buffer

A program handles one token, so its row is read once for any K, every place is written once and no sum needs an atomic.
Rows past the last expert's belong to dropped slots: their gradients are zeros, and they are never used. The three
launches of `order_local_rows` replace a dozen operators on tensors: with 1,024 tokens on a rank the host would need
longer to launch those than the links need to bring the rows.
"""

from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.language import ceil_div, power_of_two, start_kernel, tl, triton
from penstock.kernels.reference import RowOrder
from penstock.kernels.tuning import KernelLaunch, capped_programs

# Columns of K rows moved at a time: whole rows lie along the threads, so a sum over K stays within a thread.
LAUNCH = KernelLaunch(block_rows=1, block_columns=2048, warps=4)
# Rows are slots of a tile, which are compared with each other; columns are experts of a program that scans the chunks.
ORDER_LAUNCH = KernelLaunch(block_rows=128, block_columns=4, warps=4)
CHUNKS = 512  # of slots before each takes a second tile: more fill the chip, fewer make the scan over them short


def order_rows(experts_TK: Tensor, experts: int) -> RowOrder:
    """`penstock.kernels.reference.order_rows` in three small kernels, deterministic."""
    experts_TK = experts_TK.contiguous()
    slots, device = experts_TK.numel(), experts_TK.device
    slots_R = torch.empty(slots, dtype=torch.int64, device=device)
    places_TK = torch.empty_like(experts_TK, dtype=torch.int64)
    counts_E = torch.empty(experts, dtype=torch.int32, device=device)
    tallies_CE, sizes, by_slot = tally(count_kernel, experts_TK, (), counts_E)
    start_kernel(
        place_kernel, (len(tallies_CE),), experts_TK, tallies_CE, counts_E, slots_R, places_TK, *sizes, **by_slot
    )
    return RowOrder(slots_R, places_TK, counts_E)


def tally(
    kernel: triton.JITFunction, experts_TK: Tensor, firsts: tuple[int, ...], counts_E: Tensor
) -> tuple[Tensor, tuple[int, ...], dict[str, int]]:
    """Count the slots of each chunk on each expert by `kernel`, and scan the counts over the chunks.

    `counts_E`, int32, is filled; `firsts` are arguments of the kernel before its sizes. Returns the int32 slots of
    earlier chunks, by chunk and expert, and sizes and constants of the kernel that places slots.
    """
    slots, experts, launch = experts_TK.numel(), counts_E.numel(), ORDER_LAUNCH
    tiles = max(1, ceil_div(slots, CHUNKS * launch.block_rows))
    chunks = ceil_div(slots, tiles * launch.block_rows)
    tallies_CE = torch.empty(chunks, experts + 1, dtype=torch.int32, device=experts_TK.device)  # + 1: dropped slots
    sizes = (*firsts, slots, tiles)
    by_slot = {"EXPERTS": experts, "BINS": power_of_two(experts + 1)}
    by_slot |= {"BLOCK_R": launch.block_rows, "num_warps": launch.warps}
    start_kernel(kernel, (chunks,), experts_TK, tallies_CE, *sizes, **by_slot)
    start_kernel(
        scan_kernel, (ceil_div(experts + 1, launch.block_columns),), tallies_CE, counts_E, chunks,
        EXPERTS=experts, BLOCK_C=256, BLOCK_E=launch.block_columns, num_warps=launch.warps,
    )  # fmt: skip
    return tallies_CE, sizes, by_slot


def unpermute(y_RD: Tensor, order: RowOrder, weights_TK: Tensor | None = None) -> Tensor:
    """`penstock.kernels.reference.unpermute` in one kernel, and one kernel backward for both gradients.

    An order may have fewer places than slots, if dropped slots share a place past the last expert's; the gradient of
    rows without a slot may then hold anything.
    """
    if not order.places_TK.is_contiguous():
        raise KernelError("unpermute: places must be contiguous", got=f"strides {order.places_TK.stride()}")
    if y_RD.shape[0] != order.slots_R.numel():
        raise KernelError("unpermute: y must have one row for each place", got=f"{y_RD.shape[0]} rows")
    if weights_TK is not None and (weights_TK.shape != order.places_TK.shape or weights_TK.dtype != torch.float32):
        got, allowed = f"{weights_TK.dtype} {tuple(weights_TK.shape)}", tuple(order.places_TK.shape)
        raise KernelError("unpermute: weights must be float32, one for each slot", got=got, allowed=allowed)
    return _Unpermute.apply(y_RD, weights_TK, order.places_TK, order.counts_E)


class _Unpermute(torch.autograd.Function):
    """Backward reads the rows of y only if there are weights."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weights_TK: Tensor | None, places_TK: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(None if weights_TK is None else y_RD, weights_TK, places_TK, counts_E)
        ctx.rows = y_RD.shape[0]
        y_TD = y_RD.new_empty(places_TK.shape[0], y_RD.shape[1])
        tensors = y_RD.contiguous(), _contiguous(weights_TK), y_TD
        _launch_by_token(sum_rows_kernel, tensors, places_TK, counts_E)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        y_RD, weights_TK, places_TK, counts_E = ctx.saved_tensors
        y_RD, weights_TK = _contiguous(y_RD), _contiguous(weights_TK)
        dy_TD, dy_RD = dy_TD.contiguous(), dy_TD.new_empty(ctx.rows, dy_TD.shape[1])
        dweights_TK = None if weights_TK is None else torch.empty_like(weights_TK)
        _launch_by_token(spread_kernel, (dy_TD, y_RD, weights_TK, dy_RD, dweights_TK), places_TK, counts_E)
        return dy_RD, dweights_TK, None, None


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _launch_by_token(
    kernel: triton.JITFunction,
    tensors: tuple[Tensor, *tuple[Tensor | None, ...]],
    places_TK: Tensor,
    counts_E: Tensor,
) -> None:
    """One program for each token; `tensors` are the kernel's first parameters, rows of one width the first of all."""
    (tokens, top_k), width = places_TK.shape, tensors[0].shape[1]
    start_kernel(
        kernel, (tokens,),
        *tensors, places_TK, counts_E,
        K=top_k, D=width, EXPERTS=counts_E.shape[0], BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_D=min(LAUNCH.block_columns, triton.next_power_of_2(width)),
        BLOCK_E=triton.next_power_of_2(counts_E.shape[0]), num_warps=LAUNCH.warps,
    )  # fmt: skip


@triton.jit
def count_kernel(
    experts_ptr, tallies_ptr, slots, tiles, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Slots of one chunk (some tiles) on each expert; bin EXPERTS holds dropped slots."""
    chunk = tl.program_id(0)
    tally_E = tl.zeros([BINS], tl.int32)
    for tile in range(tiles):
        slot_R = (chunk * tiles + tile) * BLOCK_R + tl.arange(0, BLOCK_R)
        expert_R = tl.load(experts_ptr + slot_R, mask=slot_R < slots, other=EXPERTS).to(tl.int32)
        tally_E += tl.histogram(expert_R, BINS, slot_R < slots)
    bin_E = tl.arange(0, BINS)
    tl.store(tallies_ptr + chunk * (EXPERTS + 1) + bin_E, tally_E, mask=bin_E <= EXPERTS)


@triton.jit
def scan_kernel(tallies_ptr, counts_ptr, chunks, EXPERTS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr):
    """For some experts: replace each chunk's tally by the sum of the tallies before it; the whole sum is the count."""
    expert_E = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    sum_E = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, chunks, BLOCK_C):
        chunk_C = start + tl.arange(0, BLOCK_C)
        tally_ptrs = tallies_ptr + chunk_C[:, None] * (EXPERTS + 1) + expert_E[None, :]
        inside = (chunk_C < chunks)[:, None] & (expert_E <= EXPERTS)[None, :]
        tally_CE = tl.load(tally_ptrs, mask=inside, other=0)
        tl.store(tally_ptrs, sum_E[None, :] + tl.cumsum(tally_CE, 0) - tally_CE, mask=inside)
        sum_E += tl.sum(tally_CE, 0)
    tl.store(counts_ptr + expert_E, sum_E, mask=expert_E < EXPERTS)


@triton.jit
def place_kernel(
    experts_ptr, earlier_ptr, counts_ptr, slots_ptr, places_ptr, slots, tiles,  # tiles of one chunk
    EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Places of one chunk's slots.

    A slot's place is the rows of all smaller experts + the slots of its expert in earlier chunks and tiles + those
    before it in its tile. With tiles of 4 and experts [1, 0, 1, 2 | 0, 1] the last two slots go to 0 + 1 + 0 = 1 and 2
    + 2 + 0 = 4. Dropped slots have the largest id, so they come last.
    """
    chunk = tl.program_id(0)
    lane = tl.arange(0, BLOCK_R)
    bin_E = tl.arange(0, BINS)
    count_E = tl.load(counts_ptr + bin_E, mask=bin_E < EXPERTS, other=0)
    earlier_E = tl.load(earlier_ptr + chunk * (EXPERTS + 1) + bin_E, mask=bin_E <= EXPERTS, other=0)
    first_E = tl.cumsum(count_E, 0) - count_E + earlier_E  # next place of each expert in this chunk
    for tile in range(tiles):
        slot_R = (chunk * tiles + tile) * BLOCK_R + lane
        expert_R = tl.load(experts_ptr + slot_R, mask=slot_R < slots, other=EXPERTS).to(tl.int32)
        # Summed down the columns: a thread holds a column whole, so no partial sum crosses threads.
        is_before_RR = (expert_R[:, None] == expert_R[None, :]) & (lane[:, None] < lane[None, :])
        place_R = (tl.gather(first_E, expert_R, 0) + tl.sum(is_before_RR.to(tl.int32), 0)).to(tl.int64)
        tl.store(slots_ptr + place_R, slot_R.to(tl.int64), mask=slot_R < slots)
        tl.store(places_ptr + slot_R, place_R, mask=slot_R < slots)
        first_E += tl.histogram(expert_R, BINS, slot_R < slots)


@triton.jit
def _places_of(
    token, places_ptr, counts_ptr,
    K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Places of a token's slots, and the rows of all experts; dropped slots have places past these rows."""
    choice_K = tl.arange(0, BLOCK_K)
    place_K = tl.load(places_ptr + token * K + choice_K, mask=choice_K < K, other=0)
    expert_E = tl.arange(0, BLOCK_E)
    return place_K, tl.sum(tl.load(counts_ptr + expert_E, mask=expert_E < EXPERTS, other=0), 0)


@triton.jit
def spread_kernel(
    x_ptr, y_ptr, weights_ptr, rows_ptr, dweights_ptr, places_ptr, counts_ptr,
    K: tl.constexpr, D: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One token's row, times each slot's weight if there are weights, to its K places; zeros for dropped slots.

    With weights also dweights = <row of y at the place, x>. Example: token 1 with places [2, 5], 5 rows used and
    weights [0.5, 0.5]: row 2 becomes 0.5 x, row 5 becomes zeros.
    """
    token = tl.program_id(0).to(tl.int64)
    choice_K = tl.arange(0, BLOCK_K)
    is_slot_K = choice_K < K
    place_K, used = _places_of(token, places_ptr, counts_ptr, K, EXPERTS, BLOCK_K, BLOCK_E)
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
    rows_ptr, weights_ptr, out_ptr, places_ptr, counts_ptr,  # rows R x D, out T x D, places T x K
    K: tl.constexpr, D: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One token: the float32 sum of the rows at its K places, times weights if given; dropped slots are left out."""
    token = tl.program_id(0).to(tl.int64)
    choice_K = tl.arange(0, BLOCK_K)
    is_slot_K = choice_K < K
    place_K, used = _places_of(token, places_ptr, counts_ptr, K, EXPERTS, BLOCK_K, BLOCK_E)
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


SCALES = KernelLaunch(block_rows=16, block_columns=256, warps=4)  # for numbers that stand in columns, as scales do


def gather_rows(x_ND: Tensor, index_R: Tensor, used: Tensor, *, multiple: int = 1) -> Tensor:
    """x_ND[index_R], of which the first `used` rows are copied; the others hold anything.

    torch's `index_select` would copy all rows of the index. `used` is an int32 number on the device; rows of the copy
    lie a multiple of `multiple` numbers apart.
    """
    (rows,), width = index_R.shape, x_ND.shape[1]
    gathered_RD = x_ND.new_empty(rows, triton.cdiv(width, multiple) * multiple)[:, :width]
    blocks = triton.cdiv(rows, LAUNCH.block_rows)
    start_kernel(
        gather_rows_kernel, (capped_programs(blocks, x_ND.device), triton.cdiv(width, LAUNCH.block_columns)),
        x_ND, index_R, gathered_RD, used, rows, x_ND.stride(0), gathered_RD.stride(0),
        D=width, BLOCK_R=LAUNCH.block_rows, BLOCK_D=LAUNCH.block_columns, num_warps=LAUNCH.warps,
    )  # fmt: skip
    return gathered_RD


def gather_columns(x_DN: Tensor, index_R: Tensor, used: Tensor) -> Tensor:
    """x_DN[:, index_R], of which the first `used` columns are copied; the others hold anything.

    `x_DN` is contiguous and has few rows, each much longer than their number; other arguments as in `gather_rows`.
    """
    (columns,), depth = index_R.shape, x_DN.shape[0]
    gathered_DR = x_DN.new_empty(depth, columns)
    start_kernel(
        gather_columns_kernel, (triton.cdiv(columns, SCALES.block_columns),),
        x_DN, index_R, gathered_DR, used, depth, x_DN.shape[1], columns,
        BLOCK_D=SCALES.block_rows, BLOCK_R=SCALES.block_columns, num_warps=SCALES.warps,
    )  # fmt: skip
    return gathered_DR


@triton.jit(do_not_specialize=["columns"])
def gather_columns_kernel(
    x_ptr, index_ptr, gathered_ptr, used_ptr, depth, x_columns, columns, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Some places of all rows."""
    place_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_place_R = place_R < tl.minimum(columns, tl.load(used_ptr))
    source_R = tl.load(index_ptr + place_R, mask=is_place_R, other=0)
    for first in range(0, depth, BLOCK_D):
        row_D = (first + tl.arange(0, BLOCK_D)).to(tl.int64)
        inside = (row_D < depth)[:, None] & is_place_R[None, :]
        numbers_DR = tl.load(x_ptr + row_D[:, None] * x_columns + source_R[None, :], mask=inside)
        tl.store(gathered_ptr + row_D[:, None] * columns + place_R[None, :], numbers_DR, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gather_rows_kernel(
    x_ptr, index_ptr, gathered_ptr, used_ptr,  # x N x D, gathered R x D
    rows, x_stride, stride,  # strides of rows, in elements
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Blocks of rows and columns; programs take turns."""
    rows = tl.minimum(rows, tl.load(used_ptr))  # the grid covers the buffer; unused blocks end here
    column_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R), tl.num_programs(0)):
        row_R = block * BLOCK_R + tl.arange(0, BLOCK_R)
        is_row_R = row_R < rows
        source_R = tl.load(index_ptr + row_R, mask=is_row_R, other=0).to(tl.int64)
        inside = is_row_R[:, None] & (column_D < D)[None, :]
        numbers_RD = tl.load(x_ptr + source_R[:, None] * x_stride + column_D[None, :], mask=inside)
        tl.store(gathered_ptr + row_R.to(tl.int64)[:, None] * stride + column_D[None, :], numbers_RD, mask=inside)


class LocalOrder(NamedTuple):
    """Order of all ranks' slots by this rank's experts. Places without a slot hold 0."""

    slots_R: Tensor  # int64, the slot of each place
    index_R: Tensor  # int64, the source row of each place
    weights_R: Tensor  # float32, the weight of each place
    places_NK: Tensor  # int64, place of each slot; R - 1 for other ranks' experts and for slots that do not fit
    counts_e: Tensor  # int32, places of each expert of this rank


def order_local_rows(
    experts_NK: Tensor, weights_NK: Tensor, local_experts: range, rows: int, meter: Tensor | None = None
) -> LocalOrder:
    """Order slots by this rank's `local_experts`, stable in the slot number; `reference.order_rows` where all rows fit.

    With experts_NK = [[1, 0], [1, 2], [3, 1]], local_experts = 1 2 and 3 `rows` of the buffer there are 4 places, and
    the last one holds no row: places_NK = [[0, 3], [1, 3], [3, 2]], counts_e = [3, 0] and index_R = [0, 1, 2, 0]; one
    row did not fit. Of `meter`, int64 [2], the first gains the rows that did not fit, the second becomes the most rows
    so far.
    """
    slots, device, experts = experts_NK.numel(), experts_NK.device, len(local_experts)
    places = min(rows + 1, slots)  # the one past the buffer holds no row: slots that have none point there
    slots_R, index_R = torch.empty(2, places, dtype=torch.int64, device=device)
    weights_R = torch.empty(places, dtype=torch.float32, device=device)
    places_NK = torch.empty(experts_NK.shape, dtype=torch.int64, device=device)
    counts_e, totals_e = torch.empty(2, experts, dtype=torch.int32, device=device)
    arrivals = LocalOrder(slots_R, index_R, weights_R, places_NK, counts_e)
    tallies_CE, sizes, by_slot = tally(count_arrivals_kernel, experts_NK, (local_experts.start,), totals_e)
    start_kernel(
        place_arrivals_kernel, (len(tallies_CE),),
        experts_NK, weights_NK, tallies_CE, totals_e, *arrivals, meter, *sizes, rows, places,
        K=experts_NK.shape[1], **by_slot,
    )  # fmt: skip
    return arrivals


@triton.jit
def _own_experts(ids_ptr, slot_R, slots, first, EXPERTS: tl.constexpr):
    """Indices among this rank's experts; EXPERTS for all others."""
    local_R = tl.load(ids_ptr + slot_R, mask=slot_R < slots, other=-1).to(tl.int32) - first
    return tl.where((local_R >= 0) & (local_R < EXPERTS), local_R, EXPERTS)


@triton.jit(do_not_specialize=["first"])
def count_arrivals_kernel(
    ids_ptr, tallies_ptr, first, slots, tiles, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Count the slots of one chunk (some tiles) on each of this rank's experts; bin EXPERTS holds all others."""
    chunk = tl.program_id(0)
    tally_E = tl.zeros([BINS], tl.int32)
    for tile in range(tiles):
        slot_R = (chunk * tiles + tile) * BLOCK_R + tl.arange(0, BLOCK_R)
        tally_E += tl.histogram(_own_experts(ids_ptr, slot_R, slots, first, EXPERTS), BINS, slot_R < slots)
    bin_E = tl.arange(0, BINS)
    tl.store(tallies_ptr + chunk * (EXPERTS + 1) + bin_E, tally_E, mask=bin_E <= EXPERTS)


@triton.jit(do_not_specialize=["first"])
def place_arrivals_kernel(
    ids_ptr, weights_ptr, earlier_ptr, totals_ptr, slots_ptr, index_ptr, out_weights_ptr, places_ptr, counts_ptr,
    meter_ptr,
    first, slots, tiles, rows, places,  # first: id of the first local expert; rows: of the buffer
    EXPERTS: tl.constexpr, K: tl.constexpr, BINS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Find the places of one chunk's slots, like `place_kernel`, and write slot, row and weight of each place.

    Places from `rows` on hold no row. With 2 experts, totals 3 and 2, and 4 rows, the counts become 3 and 1.
    """
    chunk = tl.program_id(0)
    lane = tl.arange(0, BLOCK_R)
    bin_E = tl.arange(0, BINS)
    count_E = tl.load(totals_ptr + bin_E, mask=bin_E < EXPERTS, other=0)
    earlier_E = tl.load(earlier_ptr + chunk * (EXPERTS + 1) + bin_E, mask=bin_E <= EXPERTS, other=0)
    end_E = tl.cumsum(count_E, 0)
    first_E = end_E - count_E + earlier_E  # next place of each expert in this chunk
    total = tl.sum(count_E, 0)
    used = tl.minimum(total, rows)  # later places do not fit the buffer
    if chunk == 0:
        kept_E = tl.minimum(end_E, rows) - tl.minimum(end_E - count_E, rows)
        tl.store(counts_ptr + bin_E, kept_E, mask=bin_E < EXPERTS)
        if meter_ptr is not None:
            tl.store(meter_ptr, tl.load(meter_ptr) + (total - used))
            tl.store(meter_ptr + 1, tl.maximum(tl.load(meter_ptr + 1), total.to(tl.int64)))
    for tile in range(tiles):
        slot_R = (chunk * tiles + tile) * BLOCK_R + lane
        expert_R = _own_experts(ids_ptr, slot_R, slots, first, EXPERTS)
        # Summed down the columns: a thread holds a column whole, so no partial sum crosses threads.
        is_before_RR = (expert_R[:, None] == expert_R[None, :]) & (lane[:, None] < lane[None, :])
        place_R = (tl.gather(first_E, expert_R, 0) + tl.sum(is_before_RR.to(tl.int32), 0)).to(tl.int64)
        kept_R = (slot_R < slots) & (place_R < used)
        weight_R = tl.load(weights_ptr + slot_R, mask=kept_R, other=0.0)
        tl.store(slots_ptr + place_R, slot_R.to(tl.int64), mask=kept_R)
        tl.store(index_ptr + place_R, (slot_R // K).to(tl.int64), mask=kept_R)
        tl.store(out_weights_ptr + place_R, weight_R, mask=kept_R)
        tl.store(places_ptr + slot_R, tl.where(kept_R, place_R, places - 1), mask=slot_R < slots)
        first_E += tl.histogram(expert_R, BINS, slot_R < slots)
    # Places without a slot hold 0, so that every index that is read is valid.
    for block in range(chunk, tl.cdiv(places, BLOCK_R), tl.num_programs(0)):
        place_R = block * BLOCK_R + lane
        is_empty_R = (place_R >= used) & (place_R < places)
        tl.store(slots_ptr + place_R, tl.zeros([BLOCK_R], tl.int64), mask=is_empty_R)
        tl.store(index_ptr + place_R, tl.zeros([BLOCK_R], tl.int64), mask=is_empty_R)
        tl.store(out_weights_ptr + place_R, tl.zeros([BLOCK_R], tl.float32), mask=is_empty_R)


SUM_LAUNCH = KernelLaunch(block_rows=16, block_columns=1024, warps=4)


def add_runs(main_grad_VD: Tensor, tokens: Tensor, drows: Tensor) -> None:
    """`penstock.kernels.reference.add_token_rows` in kernels.

        order_tokens       places of tokens by id, stable: two counting passes over the digits of ids (`order_rows`)
        sum_runs_kernel    walks over blocks of 16 places; a run of equal ids that lies inside a block goes to the
        gradient,
                           what a block has of other runs is a part
        join_runs_kernel   sums the parts of each run that crosses blocks

    On one H200, with 16,384 tokens of a text, it is 1.7 times as fast as PyTorch's `index_put_`, which sorts
    (benchmarks/results/optimizer-step-h200.json). A frequent token is as much work as as many rare ones. Of ids [3, 5,
    5, 5, 5, 9] in blocks of 2, block 0 adds row 3 and has the part that begins run 5, block 1 is a part that continues
    it, and block 2 ends it and adds row 9.
    """
    width = main_grad_VD.shape[1]
    drows_TD, tokens_T = drows.reshape(-1, width).contiguous(), tokens.reshape(-1)
    count = tokens_T.numel()
    if not count:
        return
    ids_T, order_T = order_tokens(tokens_T, len(main_grad_VD))
    blocks = ceil_div(count, SUM_LAUNCH.block_rows)
    parts = torch.empty(2 * blocks, width, dtype=torch.float32, device=drows_TD.device)
    grid = blocks, ceil_div(width, SUM_LAUNCH.block_columns)
    sizes = {
        "D": width,
        "BLOCK_T": SUM_LAUNCH.block_rows,
        "BLOCK_D": min(SUM_LAUNCH.block_columns, power_of_two(width)),
    }
    sizes["num_warps"] = SUM_LAUNCH.warps
    start_kernel(sum_runs_kernel, grid, drows_TD, ids_T, order_T, main_grad_VD, parts, count, **sizes)
    start_kernel(join_runs_kernel, grid, parts, ids_T, main_grad_VD, count, **sizes)


def order_tokens(tokens_T: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Ids in ascending order, and the token of each place; tokens of one id stay in order."""
    base = power_of_two(isqrt(vocabulary - 1) + 1)
    by_low = order_rows((tokens_T % base)[:, None], base).slots_R
    high_T = (tokens_T // base).index_select(0, by_low)
    order_T = by_low.index_select(0, order_rows(high_T[:, None], ceil_div(vocabulary, base)).slots_R)
    return tokens_T.index_select(0, order_T), order_T


@triton.jit(do_not_specialize=["count"])
def sum_runs_kernel(
    drows_ptr, ids_ptr, order_ptr, sums_ptr, parts_ptr, count,  # drows T x D, sums V x D, parts 2 blocks x D
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the runs inside one block of places; write the part of a run that began before, and of one that goes on."""
    block = tl.program_id(0)
    first = block * BLOCK_T
    column_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column_D < D
    token_id = tl.load(ids_ptr + first)
    is_later = token_id == tl.load(ids_ptr + first - 1, mask=first > 0, other=-1)  # the run began before this block
    total_D = tl.zeros([BLOCK_D], tl.float32)
    for position in range(first, tl.minimum(first + BLOCK_T, count)):
        row = tl.load(order_ptr + position)
        total_D += tl.load(drows_ptr + row * D + column_D, mask=inside, other=0.0).to(tl.float32)
        following = tl.load(ids_ptr + position + 1, mask=position + 1 < count, other=-1)
        is_end = following != token_id
        is_whole = is_end & (is_later == 0)
        sum_ptrs = sums_ptr + token_id * D + column_D
        sum_D = tl.load(sum_ptrs, mask=inside & is_whole, other=0.0).to(tl.float32) + total_D
        tl.store(sum_ptrs, sum_D.to(sums_ptr.dtype.element_ty), mask=inside & is_whole)
        is_part = (is_end | (position + 1 == first + BLOCK_T)) & (is_whole == 0)
        part = 2 * block + tl.where(is_later, 0, 1)
        tl.store(parts_ptr + part.to(tl.int64) * D + column_D, total_D, mask=inside & is_part)
        total_D = tl.where(is_end, 0.0, total_D)
        is_later = is_later & (is_end == 0)
        token_id = following


@triton.jit(do_not_specialize=["count"])
def join_runs_kernel(
    parts_ptr, ids_ptr, sums_ptr, count, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Add the run that begins in one block and goes on in the next one."""
    block = tl.program_id(0)
    first = block * BLOCK_T
    end = tl.minimum(first + BLOCK_T, count)
    column_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token_id = tl.load(ids_ptr + end - 1)
    began_before = (tl.load(ids_ptr + first) == token_id) & (
        tl.load(ids_ptr + first - 1, mask=first > 0, other=-1) == token_id
    )
    goes_on = (began_before == 0) & (tl.load(ids_ptr + end, mask=end < count, other=-1) == token_id)
    if goes_on:
        # The run ends before `stop`: ids ascend, so halving the places finds it.
        stop, past = end, count
        while stop < past:
            middle = (stop + past) // 2
            is_of_run = tl.load(ids_ptr + middle) == token_id
            stop = tl.where(is_of_run, middle + 1, stop)
            past = tl.where(is_of_run, past, middle)
        inside = column_D < D
        part_ptrs = parts_ptr + (2 * block + 1).to(tl.int64) * D + column_D
        total_D = tl.load(part_ptrs, mask=inside, other=0.0)
        part_ptrs += D
        for _ in range(block + 1, tl.cdiv(stop, BLOCK_T)):
            total_D += tl.load(part_ptrs, mask=inside, other=0.0)
            part_ptrs += 2 * D
        sum_ptrs = sums_ptr + token_id * D + column_D
        sum_D = tl.load(sum_ptrs, mask=inside, other=0.0).to(tl.float32) + total_D
        tl.store(sum_ptrs, sum_D.to(sums_ptr.dtype.element_ty), mask=inside)
