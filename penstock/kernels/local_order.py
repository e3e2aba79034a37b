"""Order the slots of all ranks by this rank's experts: `order_rows` for the symmetric dispatcher.

    count   slots of each chunk on each of this rank's experts; slots of other ranks' experts count as dropped
    scan    slots in earlier chunks (`penstock.kernels.permute`)
    place   place of each slot; slot, row and weight of each place; counts limited to the rows of the buffer

Three launches replace a dozen operators on tensors: with 1,024 tokens on a rank the host would need longer to launch
those than the links need to bring the rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.language import tl, triton
from penstock.kernels.launching import start_kernel
from penstock.kernels.permute import tally


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
    """Find the places of one chunk's slots, like `permute.place_kernel`, and write slot, row and weight of each place.

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
