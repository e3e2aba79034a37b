"""What Hopper's kernels share: who does what, how blocks are handed over, and what a multiplier does with them.

Triton's compiler lets all warps of a program do the same thing at the same time, so matrix units stand still while
sums are scaled. In `hopper_rows` and `hopper_matrices`, which are written in Gluon, a program has a multiprocessor for
itself, and its warps have trades:

    a loader            one warp, copies blocks of both operands into a ring of STAGES slots
    two multipliers     four warps each, 64 rows of a tile of 128; each goes its own way: multiply a block, free its
                        slot, scale its sum and add it in float32

While one multiplier scales, the other's product is in the matrix unit. Slots are handed over by barriers in shared
memory: `full` counts the bytes that arrive, `empty` the two multipliers. `ring` says which slot and which phase of its
barriers a step uses, counted over all tiles of a program; nobody resets anything between tiles, so the loader is at
work on the next tile while results are written. Where a tile lies is loaded during the tile before, scales one turn
ahead. Sums are made as the Triton kernels make them, `sum += product * (scale * scale)`, block by block.

Both operands have their contracted dim last, in blocks of 128.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, ir
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

DEPTH = gl.constexpr(128)
ROWS = gl.constexpr(128)
"""Of a tile."""
HALF = gl.constexpr(64)
"""Rows of a tile that one multiplier has."""
WIDTH = gl.constexpr(128)
"""Columns of a product, and of a block of w that a slot holds."""
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
"""How the matrix unit spreads a product over a multiplier's threads."""
DOWN = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))
ACROSS = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))
MULTIPLIER_REGISTERS = gl.constexpr(240)
LOADER_REGISTERS = gl.constexpr(24)
"""Of a thread: 65536 of a multiprocessor, handed out to multiples of four warps."""

# Triton 3.9 renamed them.
copy_in = vars(tma)["async_load" if "async_load" in vars(tma) else "async_copy_global_to_shared"]
copy_out = vars(tma)["async_store" if "async_store" in vars(tma) else "async_copy_shared_to_global"]


@builtin
def add_out(target: Any, place: Any, slot: Any, _semantic: Any = None) -> None:
    """Add a slot to a block in memory by the copy engine; what Triton 3.9 calls `tma.async_atomic_add`, 3.6 nothing."""
    places = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, places, slot.handle)


@gluon.jit
def ring(step, STAGES: gl.constexpr):
    """Slot of a step, and the phase of its barriers: who takes a full slot waits for it, who fills it for the other."""
    return step % STAGES, step // STAGES & 1


@gluon.jit
def make_barriers(STAGES: gl.constexpr, READERS: gl.constexpr = 2):
    """A slot is full when the one loader's bytes are there, empty when so many multipliers are done."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    fence_async_shared()
    return full, empty


@gluon.jit
def make_turns():
    """For each of two multipliers that go through a ring one after the other: arrived at when it is its turn."""
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    return turns


@gluon.jit
def start_product(x_slot, w_slot, PLACE: gl.constexpr):
    """Start the product of a multiplier's rows of x and the transpose of w."""
    zeros = gl.zeros([HALF, WIDTH], gl.float32, PRODUCT)
    x_block = x_slot.slice(PLACE * HALF, HALF)
    w_block = w_slot.reshape([WIDTH, DEPTH]).permute([1, 0])
    return hopper.warpgroup_mma(x_block, w_block, zeros, use_acc=False, is_async=True)


@gluon.jit
def add_one(sums, found, slots, places, strides, step, block, blocks, STAGES: gl.constexpr, PLACE: gl.constexpr):
    """Add a block's product, whose scales were `found`; give those of `block`, the next one."""
    x_slots, w_slots, full, empty = slots
    slot, phase = ring(step, STAGES)
    mbarrier.wait(full.index(slot), phase)
    product = start_product(x_slots.index(slot), w_slots.index(slot), PLACE)
    scale = gl.expand_dims(found[0] * found[1], 1)
    found = scales_of_turn(places, strides, block, blocks, 1)
    product = hopper.warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(empty.index(slot), count=1)
    return sums + product * scale, found


@gluon.jit
def add_two(sums, found, slots, places, strides, step, block, blocks, STAGES: gl.constexpr, PLACE: gl.constexpr):
    """Add the products of two blocks, whose scales were `found`; give those of `block` and the one behind it."""
    x_slots, w_slots, full, empty = slots
    slot, phase = ring(step, STAGES)
    next_slot, next_phase = ring(step + 1, STAGES)
    mbarrier.wait(full.index(slot), phase)
    mbarrier.wait(full.index(next_slot), next_phase)
    # Nothing but arithmetic may stand from here to the last wait, else the assembler waits for each instruction.
    product = start_product(x_slots.index(slot), w_slots.index(slot), PLACE)
    next_product = start_product(x_slots.index(next_slot), w_slots.index(next_slot), PLACE)
    scale = gl.expand_dims(found[0] * found[1], 1)
    next_scale = gl.expand_dims(found[2] * found[3], 1)
    found = scales_of_turn(places, strides, block, blocks, 2)
    product = hopper.warpgroup_mma_wait(1, deps=[product])
    mbarrier.arrive(empty.index(slot), count=1)
    sums += product * scale
    next_product = hopper.warpgroup_mma_wait(0, deps=[next_product])
    mbarrier.arrive(empty.index(next_slot), count=1)
    return sums + next_product * next_scale, found


@gluon.jit
def scales_of_turn(places, strides, block, blocks, STEPS: gl.constexpr):
    """Load the scales of STEPS blocks: of each row, and of all columns."""
    found = _scales_of_block(places, strides, block, blocks)
    if STEPS == 2:
        found += _scales_of_block(places, strides, block + 1, blocks)
    return found


@gluon.jit
def _scales_of_block(places, strides, block, blocks):
    """Load a block's; past the last block those of the last one, which nobody uses."""
    x_places, w_place = places
    block = gl.minimum(block, blocks - 1)
    return gl.load(x_places + block * strides[0]), gl.load(w_place + block * strides[1])


@gluon.jit
def swizzle(tile, tiles_down, tiles_across, GROUP: gl.constexpr):
    """As `penstock.kernels.output_tiles.swizzle`."""
    group = tile // (GROUP * tiles_across)
    height = gl.minimum(tiles_down - group * GROUP, GROUP)
    within = tile % (GROUP * tiles_across)
    return group * GROUP + within % height, within // height
