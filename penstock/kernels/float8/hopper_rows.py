"""Hopper's own kernel for products of experts' rows, or of all rows, with weights.

How it works is told in `penstock.kernels.hopper_ring` and `penstock.kernels.float8.hopper_blocks`. With STEPS = 2 a
multiplier starts two products and scales the first while the second is made, which takes 64 registers more for the
second sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from penstock.kernels.float8.hopper_blocks import (
    ACROSS,
    DEPTH,
    DOWN,
    HALF,
    PAIRS_LOADER_REGISTERS,
    PAIRS_REGISTERS,
    TRIOS_LOADER_REGISTERS,
    TRIOS_REGISTERS,
    WIDTH,
    load_scales,
    make_slots,
    sum_blocks,
)
from penstock.kernels.hopper_ring import SPAN, copy_in, ring, swizzle, write_pieces, zero_tail


@gluon.jit
def float8_rows_kernel(
    x,
    w,
    y,
    y_ptr,
    x_scales,
    w_scales,
    starts_ptr,
    owners_ptr,
    block_count_ptr,
    first_ptr,
    rows,
    columns,
    depth,
    experts,
    x_scale_outer,
    x_scale_depth,
    w_scale_expert,
    w_scale_outer,
    w_scale_depth,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    GROUP: gl.constexpr,
    MULTIPLIERS: gl.constexpr,
    ONLY_LAST: gl.constexpr,
):
    """Multiply each row of x by the matrix of the row's expert; set the rows of the tail to zero, or ONLY_LAST of them.

    x is rows x depth with a scale for 1 x 128 numbers, w experts x columns x depth with one for 128 x 128, y rows x
    columns. x and w are descriptors of blocks, y a ragged one of pieces in bfloat16, or None; y_ptr is the pointer.
    Without `owners_ptr` all rows are one expert's; else it is the table of tiles of 64 rows for each multiplier. With
    `first_ptr` the first row of y is not its own: rows are written from the one on that is said there, and there is no
    tail.
    """
    across = gl.cdiv(columns, WIDTH)
    down = gl.cdiv(rows, HALF * MULTIPLIERS) if owners_ptr is None else gl.load(block_count_ptr)
    walk = (owners_ptr, rows, columns, across, down * across)
    blocks = gl.cdiv(depth, DEPTH)
    w_slots = gl.allocate_shared_memory(w.dtype, [STAGES, 1, WIDTH, DEPTH], w.layout)
    slots = make_slots(x, w_slots, STAGES, MULTIPLIERS, False)
    scales = (x_scales, w_scales, x_scale_outer, x_scale_depth, w_scale_expert, w_scale_outer, w_scale_depth)
    if y is None:
        target = (y, y_ptr, y, first_ptr)
    else:
        rooms = gl.allocate_shared_memory(y.dtype, [2 * MULTIPLIERS] + y.block_shape, y.layout)  # noqa: RUF005
        target = (y, y_ptr, rooms, first_ptr)
    given = (walk, slots, target, blocks)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    third: gl.constexpr = 2
    if MULTIPLIERS == 3:
        gl.warp_specialize(
            [
                (_multiply_rows, (given, STAGES, STEPS, GROUP, MULTIPLIERS, first)),
                (_multiply_rows, (given, STAGES, STEPS, GROUP, MULTIPLIERS, second)),
                (_multiply_rows, (given, STAGES, STEPS, GROUP, MULTIPLIERS, third)),
                (_load_rows, (given, scales, x, w, STAGES, GROUP, MULTIPLIERS)),
            ],
            [4, 4, 1],
            [TRIOS_REGISTERS, TRIOS_REGISTERS, TRIOS_LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_rows, (given, STAGES, STEPS, GROUP, MULTIPLIERS, first)),
                (_multiply_rows, (given, STAGES, STEPS, GROUP, MULTIPLIERS, second)),
                (_load_rows, (given, scales, x, w, STAGES, GROUP, MULTIPLIERS)),
            ],
            [4, 1],
            [PAIRS_REGISTERS, PAIRS_LOADER_REGISTERS],
        )
    if owners_ptr is not None and first_ptr is None:
        tail = gl.load(starts_ptr + experts)
        zero_tail(y_ptr, gl.maximum(tail, rows - 1) if ONLY_LAST else tail, rows, columns, y_ptr.dtype.element_ty)


@gluon.jit
def _load_rows(given, scales, x, w, STAGES: gl.constexpr, GROUP: gl.constexpr, MULTIPLIERS: gl.constexpr):
    """Fill slots with blocks of x and w and their scales, tile by tile."""
    walk, slots, blocks = given[0], given[1], given[3]
    x_slots, w_slots, full, empty = slots[0], slots[1], slots[4], slots[5]
    x_scales, w_scales, x_outer, x_depth, w_expert, w_outer, w_depth = scales
    strides, rows = (x_outer, x_depth, w_outer, w_depth), (walk[1], walk[2])
    step = 0
    for tile in range(gl.program_id(0), walk[4], gl.num_programs(0)):
        expert, start, _, row, column = _place_rows(walk, tile, _load_owner(walk, tile), GROUP, MULTIPLIERS)
        place, of_expert = (start + row, column), w_scales + expert * w_expert
        for block in range(blocks):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), (HALF * MULTIPLIERS + WIDTH) * DEPTH)
            for part in gl.static_range(MULTIPLIERS):
                x_slot = x_slots.index(slot * MULTIPLIERS + part)
                copy_in(x, [start + row + part * HALF, block * DEPTH], full.index(slot), x_slot)
            copy_in(w, [expert, column, block * DEPTH], full.index(slot), w_slots.index(slot))
            load_scales(slots, slot, x_scales, of_expert, strides, place, rows, block, MULTIPLIERS, False)
            step += 1


@gluon.jit
def _multiply_rows(
    given,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    GROUP: gl.constexpr,
    MULTIPLIERS: gl.constexpr,
    PLACE: gl.constexpr,
):
    """Make rows PLACE * 64 and on of each tile."""
    walk, slots, target, blocks = given
    tiles = walk[4]
    # On a arena of many layers there are fewer than 2**31 rows, if not numbers.
    shift = 0 if target[3] is None else gl.load(target[3]).to(gl.int32)
    step = 0
    if tiles > 0:
        tile = gl.minimum(gl.program_id(0), tiles - 1)
        owner = _load_owner(walk, tile)
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            here = _place_rows(walk, tile, owner, GROUP, MULTIPLIERS)
            # Past the last tile it is the last one again, which nobody places.
            owner = _load_owner(walk, gl.minimum(tile + gl.num_programs(0), tiles - 1))
            mine = gl.where(here[1] + here[3] + PLACE * HALF < here[2], blocks, 0)
            sums = sum_blocks(slots, step, mine, blocks, STAGES, STEPS, MULTIPLIERS, False, PLACE)
            step += blocks
            _store_rows(target, sums, here, shift, walk[2], PLACE)
    if target[0] is not None:
        tma.store_wait(0)


@gluon.jit
def _load_owner(walk, tile):
    """Load whose tile it is: expert, its first row, the row past its last, its first block of rows."""
    owners_ptr, rows, _, across, _ = walk
    owner = (gl.to_tensor(0), gl.to_tensor(0), rows, gl.to_tensor(0))
    if owners_ptr is not None:
        owner_ptr = owners_ptr + tile // across * 4
        owner = (gl.load(owner_ptr), gl.load(owner_ptr + 1), gl.load(owner_ptr + 2), gl.load(owner_ptr + 3))
    return owner


@gluon.jit
def _place_rows(walk, tile, owner, GROUP: gl.constexpr, MULTIPLIERS: gl.constexpr):
    """Say where a tile lies: expert, its first row, the row past its last, the tile's row in it, the tile's column."""
    across = walk[3]
    expert, start, end, first_block = owner
    height: gl.constexpr = HALF * MULTIPLIERS
    row, column = swizzle(tile - first_block * across, gl.cdiv(end - start, height), across, GROUP)
    return expert, start, end, row * height, column * WIDTH


@gluon.jit
def _store_rows(target, sums, here, shift, columns, PLACE: gl.constexpr):
    """Write the rows that are the expert's own: by descriptor, or through pointers if there is none."""
    y, y_ptr, rooms, _ = target
    _, start, end, row, column = here
    start, end, row = start + shift, end + shift, row + PLACE * HALF
    result = sums.to(y_ptr.dtype.element_ty)
    if y is not None:
        write_pieces(y, rooms, result, (gl.to_tensor(SPAN), end), start - end + row + SPAN, column, False, 0, PLACE)
    else:
        place = start + row + gl.arange(0, HALF, DOWN)
        across = column + gl.arange(0, WIDTH, ACROSS)
        inside = gl.expand_dims(place < end, 1) & gl.expand_dims(across < columns, 0)
        y_places = gl.expand_dims(place.to(gl.int64) * columns, 1) + gl.expand_dims(across, 0)
        gl.store(y_ptr + y_places, result, mask=inside)
