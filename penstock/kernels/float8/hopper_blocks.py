"""What Hopper's kernels of 8 bits do with blocks of depth: multiply them, scale their sums and add those in float32.

Who does what, and how slots change hands, is told in `penstock.kernels.hopper_ring`. A multiplier has 64 rows of a tile
of 128: it multiplies a block, frees its slot, scales its sum and adds it. Where a tile lies is loaded during the tile
before, scales one turn ahead. Sums are made as the Triton kernels make them, `sum += product * (scale * scale)`, block
by block. Both operands have their contracted dim last, in blocks of 128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from penstock.kernels.hopper_ring import ring

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
