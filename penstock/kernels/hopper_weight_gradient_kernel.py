"""Hopper's own kernel for gradients of experts' weights in 16 bits.

What trades warps have and how slots of a ring change hands is told in `penstock.kernels.hopper_ring`. Here the
multipliers take whole tiles in turns, so that one writes while the other multiplies. They go through the ring in the
order of tiles: a barrier has two phases, so nobody may wait for a slot before all slots ahead of it were full. Sums
stay in the matrix unit's registers for all of a tile, and one product is always waiting behind the one that is made: a
slot is free when the product after its own has been started and its own is done.

Both operands have the contracted dim, an expert's rows, first in memory. So a slot holds columns of dy and of x for
some rows, and the matrix unit reads the first transposed. Descriptors are ragged
(`penstock.kernels.grouped_gemm_kernels`): past an expert's last row they give zeros, whatever stands there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from penstock.kernels.hopper_ring import (
    LOADER_REGISTERS,
    MULTIPLIER_REGISTERS,
    SPAN,
    copy_in,
    make_barriers,
    make_turns,
    ring,
    swizzle,
    write_pieces,
)


@gluon.jit(do_not_specialize=["experts"])
def weight_gradient_kernel(
    dy,
    x,
    dw,
    starts_ptr,
    rows,
    columns,
    experts,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """Multiply the transpose of each expert's rows of dy by its rows of x; add to what dw holds if ACCUMULATE.

    dw is experts x rows x columns, so dy is as wide as dw has rows, and x as wide as dw has columns. All three are
    descriptors, of a tile's rows of dw, of its columns, and of a piece of the result. `starts_ptr` says where
    each expert's rows begin, and where the last one's end. A sum is left alone where an expert has no rows.
    """
    height: gl.constexpr = dy.block_shape[3]
    width: gl.constexpr = x.block_shape[3]
    depth: gl.constexpr = dy.block_shape[2]
    down = gl.cdiv(rows, height)
    across = gl.cdiv(columns, width)
    walk = (starts_ptr, down, across, down * across * experts)
    dy_slots = gl.allocate_shared_memory(dy.dtype, [STAGES, 1, 1, depth, height], dy.layout)
    x_slots = gl.allocate_shared_memory(x.dtype, [STAGES, 1, 1, depth, width], x.layout)
    rooms = gl.allocate_shared_memory(dw.dtype, [4, 1, dw.block_shape[1], dw.block_shape[2]], dw.layout)
    full, empty = make_barriers(STAGES, 1)
    slots = (dy_slots, x_slots, full, empty)
    turns = make_turns()
    one: gl.constexpr = 0
    other: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply, (walk, slots, turns, dw, rooms, STAGES, GROUP, ACCUMULATE, one)),
            (_multiply, (walk, slots, turns, dw, rooms, STAGES, GROUP, ACCUMULATE, other)),
            (_load, (walk, slots, dy, x, STAGES, GROUP)),
        ],
        [4, 1],
        [MULTIPLIER_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _load(walk, slots, dy, x, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Fill slots with blocks of dy and x, tile by tile."""
    dy_slots, x_slots, full, empty = slots
    height: gl.constexpr = dy.block_shape[3]
    width: gl.constexpr = x.block_shape[3]
    depth: gl.constexpr = dy.block_shape[2]
    step = 0
    for tile in range(gl.program_id(0), walk[3], gl.num_programs(0)):
        start, end = _load_span(walk, tile)
        _, row, column = _place(walk, tile, GROUP)
        for block in range(gl.cdiv(end - start, depth)):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), (height + width) * depth * 2)
            span, place = gl.to_tensor(SPAN), start - end + block * depth + SPAN
            copy_in(dy, [span, end, place, row * height], full.index(slot), dy_slots.index(slot))
            copy_in(x, [span, end, place, column * width], full.index(slot), x_slots.index(slot))
            step += 1


@gluon.jit
def _multiply(
    walk,
    slots,
    turns,
    dw,
    rooms,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    PLACE: gl.constexpr,
):
    """Make every other tile."""
    dy_slots, x_slots, full, empty = slots
    depth: gl.constexpr = dy_slots.shape[3]
    height: gl.constexpr = dy_slots.shape[4]
    width: gl.constexpr = x_slots.shape[4]
    product: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16])
    programs = gl.num_programs(0)
    step = 0
    for tile in range(gl.program_id(0) + PLACE * programs, walk[3], 2 * programs):
        # Steps of the other multiplier's tiles are passed over.
        if PLACE == 1:
            step += _blocks_of(walk, tile - programs, depth)
        # Not carried from tile to tile: Triton 3.6 takes a bound that only an inner loop reads for the first tile's.
        start, end = _load_span(walk, tile)
        expert, row, column = _place(walk, tile, GROUP)
        sums = gl.zeros([height, width], gl.float32, product)
        mbarrier.wait(turns.index(PLACE), tile // (2 * programs) & 1 ^ 1 ^ PLACE)
        for block in range(gl.cdiv(end - start, depth)):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(full.index(slot), phase)
            dy_block = dy_slots.index(slot).reshape([depth, height]).permute([1, 0])
            x_block = x_slots.index(slot).reshape([depth, width])
            sums = hopper.warpgroup_mma(dy_block, x_block, sums, is_async=True)
            sums = hopper.warpgroup_mma_wait(1, deps=[sums])
            before, _ = ring(step + STAGES - 1, STAGES)
            mbarrier.arrive(empty.index(before), count=1, pred=block > 0)
            step += 1
        mbarrier.arrive(turns.index(1 - PLACE), count=1)
        sums = hopper.warpgroup_mma_wait(0, deps=[sums])
        before, _ = ring(step + STAGES - 1, STAGES)
        mbarrier.arrive(empty.index(before), count=1, pred=end > start)
        if PLACE == 0:
            # Behind the last tile nobody takes a step.
            step += _blocks_of(walk, gl.minimum(tile + programs, walk[3] - 1), depth)
        if (end > start) | (not ACCUMULATE):
            write_pieces(dw, rooms, sums, (expert,), row * height, column * width, ACCUMULATE, 0, PLACE)
    tma.store_wait(0)


@gluon.jit
def _blocks_of(walk, tile, DEPTH: gl.constexpr):
    """Load how many blocks a tile's expert has."""
    start, end = _load_span(walk, tile)
    return gl.cdiv(end - start, DEPTH)


@gluon.jit
def _load_span(walk, tile):
    """Load where the rows of a tile's expert begin and end."""
    starts_ptr, down, across, _ = walk
    start_ptr = starts_ptr + tile // (down * across)
    return gl.load(start_ptr), gl.load(start_ptr + 1)


@gluon.jit
def _place(walk, tile, GROUP: gl.constexpr):
    """Say which one it is: expert, and how many tiles down and across."""
    _, down, across, _ = walk
    row, column = swizzle(tile % (down * across), down, across, GROUP)
    return tile // (down * across), row, column
