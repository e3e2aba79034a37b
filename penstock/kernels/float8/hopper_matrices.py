"""Hopper's own kernel for gradients of weights, dense or of each expert.

How it works: `penstock.kernels.hopper_ring` and `penstock.kernels.float8.hopper_blocks`. The second operand has a scale
for each row, with which every number of a partial sum is multiplied by itself, or one for 128 rows (SQUARE), as weights
have in `hopper_rows`.
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
from penstock.kernels.hopper_ring import copy_in, ring, swizzle, write_pieces


@gluon.jit
def float8_matrices_kernel(
    a,
    b,
    c,
    c_ptr,
    a_scales,
    b_scales,
    starts_ptr,
    rows,
    columns,
    depth,
    experts,
    a_scale_outer,
    a_scale_depth,
    b_scale_outer,
    b_scale_depth,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    GROUP: gl.constexpr,
    MULTIPLIERS: gl.constexpr,
    SQUARE: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """Multiply a by the transpose of b, contracted over each expert's columns; write it, or add it to what c holds.

    a is rows x depth, b columns x depth, both descriptors of blocks. A scale of a is for 1 x 128 numbers; one of b is,
    too, or with SQUARE for 128 x 128. c_ptr points to experts x rows x columns; a descriptor c of pieces of the same,
    in float32, is added to instead. `starts_ptr` says at which multiple of 128 each expert's columns begin, and where
    the last one's end; without it there is one matrix, contracted over all. WHOLE says that tiles divide c.
    """
    across = gl.cdiv(columns, WIDTH)
    down = gl.cdiv(rows, HALF * MULTIPLIERS)
    walk = (starts_ptr, gl.cdiv(depth, DEPTH), down, across, down * across * experts)
    b_slots = gl.allocate_shared_memory(b.dtype, [STAGES, WIDTH, DEPTH], b.layout)
    slots = make_slots(a, b_slots, STAGES, MULTIPLIERS, not SQUARE)
    scales = (a_scales, b_scales, a_scale_outer, a_scale_depth, b_scale_outer, b_scale_depth)
    if c is None:
        target = (c, c_ptr, c)
    else:
        rooms = gl.allocate_shared_memory(c.dtype, [2 * MULTIPLIERS] + c.block_shape, c.layout)  # noqa: RUF005
        target = (c, c_ptr, rooms)
    given = (walk, slots, target, (rows, columns))
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    third: gl.constexpr = 2
    if MULTIPLIERS == 3:
        gl.warp_specialize(
            [
                (_multiply_columns, (given, STAGES, STEPS, GROUP, MULTIPLIERS, SQUARE, WHOLE, first)),
                (_multiply_columns, (given, STAGES, STEPS, GROUP, MULTIPLIERS, SQUARE, WHOLE, second)),
                (_multiply_columns, (given, STAGES, STEPS, GROUP, MULTIPLIERS, SQUARE, WHOLE, third)),
                (_load_columns, (given, scales, a, b, STAGES, GROUP, MULTIPLIERS, SQUARE)),
            ],
            [4, 4, 1],
            [TRIOS_REGISTERS, TRIOS_REGISTERS, TRIOS_LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_columns, (given, STAGES, STEPS, GROUP, MULTIPLIERS, SQUARE, WHOLE, first)),
                (_multiply_columns, (given, STAGES, STEPS, GROUP, MULTIPLIERS, SQUARE, WHOLE, second)),
                (_load_columns, (given, scales, a, b, STAGES, GROUP, MULTIPLIERS, SQUARE)),
            ],
            [4, 1],
            [PAIRS_REGISTERS, PAIRS_LOADER_REGISTERS],
        )


@gluon.jit
def _load_columns(
    given,
    scales,
    a,
    b,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    MULTIPLIERS: gl.constexpr,
    SQUARE: gl.constexpr,
):
    """Fill slots with blocks of a and b and their scales, tile by tile."""
    walk, slots, shape = given[0], given[1], given[3]
    a_slots, b_slots, full, empty = slots[0], slots[1], slots[4], slots[5]
    step = 0
    for tile in range(gl.program_id(0), walk[4], gl.num_programs(0)):
        start, end = _load_span(walk, tile)
        _, row, column = _place_columns(walk, tile, GROUP, MULTIPLIERS)
        for block in range(start, end):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), (HALF * MULTIPLIERS + WIDTH) * DEPTH)
            for part in gl.static_range(MULTIPLIERS):
                a_slot = a_slots.index(slot * MULTIPLIERS + part)
                copy_in(a, [row + part * HALF, block * DEPTH], full.index(slot), a_slot)
            copy_in(b, [column, block * DEPTH], full.index(slot), b_slots.index(slot))
            load_scales(
                slots, slot, scales[0], scales[1], scales[2:], (row, column), shape, block, MULTIPLIERS, not SQUARE
            )
            step += 1


@gluon.jit
def _multiply_columns(
    given,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    GROUP: gl.constexpr,
    MULTIPLIERS: gl.constexpr,
    SQUARE: gl.constexpr,
    WHOLE: gl.constexpr,
    PLACE: gl.constexpr,
):
    """Make rows PLACE * 64 and on of each tile."""
    walk, slots, target, shape = given
    tiles = walk[4]
    step = 0
    start, end = _load_span(walk, gl.minimum(gl.program_id(0), tiles - 1))
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        # Past the last tile it is the last one again, whose span nobody uses.
        next_start, next_end = _load_span(walk, gl.minimum(tile + gl.num_programs(0), tiles - 1))
        here = _place_columns(walk, tile, GROUP, MULTIPLIERS)
        blocks = end - start
        mine = gl.where(here[1] + PLACE * HALF < shape[0], blocks, 0)
        sums = sum_blocks(slots, step, mine, blocks, STAGES, STEPS, MULTIPLIERS, not SQUARE, PLACE)
        # Triton 3.6 takes the first tile's span for all tiles where nothing but bounds of loops reads it.
        step += end - start
        start, end = next_start, next_end
        _store_matrix(target, sums, here, shape, WHOLE, PLACE)
    if target[0] is not None:
        tma.store_wait(0)


@gluon.jit
def _load_span(walk, tile):
    """Load a tile's first block of depth and the one past its last: those of its expert."""
    starts_ptr, blocks, down, across, _ = walk
    span = (gl.to_tensor(0), blocks)
    if starts_ptr is not None:
        start_ptr = starts_ptr + tile // (down * across)
        span = (gl.load(start_ptr) // DEPTH, gl.load(start_ptr + 1) // DEPTH)
    return span


@gluon.jit
def _place_columns(walk, tile, GROUP: gl.constexpr, MULTIPLIERS: gl.constexpr):
    """Say where a tile lies: expert, row, column."""
    _, _, down, across, _ = walk
    row, column = swizzle(tile % (down * across), down, across, GROUP)
    return tile // (down * across), row * (HALF * MULTIPLIERS), column * WIDTH


@gluon.jit
def _store_matrix(target, sums, here, shape, WHOLE: gl.constexpr, PLACE: gl.constexpr):
    """Write a tile, or add it by the copy engine. One program owns each element, so a sum has one order."""
    c, c_ptr, rooms = target
    rows, columns = shape
    expert, row, column = here
    row += PLACE * HALF
    if c is not None:
        write_pieces(c, rooms, sums, (expert,), row, column, True, 0, PLACE)
    else:
        down = row + gl.arange(0, HALF, DOWN)
        across = column + gl.arange(0, WIDTH, ACROSS)
        c_places = c_ptr + expert.to(gl.int64) * rows * columns
        c_places = c_places + (gl.expand_dims(down * columns, 1) + gl.expand_dims(across, 0))
        inside = gl.expand_dims(down < rows, 1) & gl.expand_dims(across < columns, 0)
        if WHOLE:
            inside = None
            c_places = gl.max_contiguous(gl.multiple_of(c_places, [1, 16]), [1, WIDTH])
        gl.store(c_places, sums.to(c_ptr.dtype.element_ty), mask=inside)
