"""Hopper's own kernel for gradients of weights, dense or of each expert; see `hopper_ring` for how it works."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from penstock.kernels.float8.hopper_ring import (
    ACROSS,
    DEPTH,
    DOWN,
    HALF,
    LOADER_REGISTERS,
    MULTIPLIER_REGISTERS,
    PRODUCT,
    ROWS,
    WIDTH,
    copy_in,
    make_barriers,
    ring,
    start_product,
    swizzle,
)


@gluon.jit
def float8_matrices_kernel(
    a,
    b,
    c,
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
    GROUP: gl.constexpr,
    WHOLE: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """Multiply a by the transpose of b, contracted over each expert's columns; add to what c holds if ACCUMULATE.

    a is rows x depth, b columns x depth, both descriptors of blocks, with a scale for 1 x 128 numbers; c is a pointer
    to experts x rows x columns. `starts_ptr` says at which multiple of 128 each expert's columns begin, and where the
    last one's end; without it there is one matrix, contracted over all. WHOLE says that tiles divide c, and that scales
    of neighbouring rows of b stand together, aligned at 16 bytes.
    """
    across = gl.cdiv(columns, WIDTH)
    down = gl.cdiv(rows, ROWS)
    walk = (starts_ptr, gl.cdiv(depth, DEPTH), down, across, down * across * experts)
    a_slots = gl.allocate_shared_memory(a.dtype, [STAGES, ROWS, DEPTH], a.layout)
    b_slots = gl.allocate_shared_memory(b.dtype, [STAGES, WIDTH, DEPTH], b.layout)
    full, empty = make_barriers(STAGES)
    slots = (a_slots, b_slots, full, empty)
    scales = (a_scales, b_scales, a_scale_outer, a_scale_depth, b_scale_outer, b_scale_depth)
    shape = (rows, columns)
    upper: gl.constexpr = 0
    lower: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply_columns, (walk, slots, scales, c, shape, STAGES, GROUP, WHOLE, ACCUMULATE, upper)),
            (_multiply_columns, (walk, slots, scales, c, shape, STAGES, GROUP, WHOLE, ACCUMULATE, lower)),
            (_load_columns, (walk, slots, a, b, STAGES, GROUP)),
        ],
        [4, 1],
        [MULTIPLIER_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _load_columns(walk, slots, a, b, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Fill slots with blocks of a and b, tile by tile."""
    a_slots, b_slots, full, empty = slots
    step = 0
    for tile in range(gl.program_id(0), walk[4], gl.num_programs(0)):
        start, end = _load_span(walk, tile)
        _, row, column = _place_columns(walk, tile, GROUP)
        for block in range(start, end):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), (ROWS + WIDTH) * DEPTH)
            copy_in(a, [row, block * DEPTH], full.index(slot), a_slots.index(slot))
            copy_in(b, [column, block * DEPTH], full.index(slot), b_slots.index(slot))
            step += 1


@gluon.jit
def _multiply_columns(
    walk,
    slots,
    scales,
    c,
    shape,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    WHOLE: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    PLACE: gl.constexpr,
):
    """Make rows PLACE * 64 and on of each tile."""
    a_slots, b_slots, full, empty = slots
    tiles = walk[4]
    step = 0
    tile = gl.minimum(gl.program_id(0), tiles - 1)
    start, end = _load_span(walk, tile)
    here = _place_columns(walk, tile, GROUP)
    a_next, b_next = _scales_of_tile(scales, shape, walk, here, start, WHOLE, PLACE)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        # Past the last tile it is the last one again, whose scales nobody uses.
        following = gl.minimum(tile + gl.num_programs(0), tiles - 1)
        next_start, next_end = _load_span(walk, following)
        sums = gl.zeros([HALF, WIDTH], gl.float32, PRODUCT)
        for block in range(start, end):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(full.index(slot), phase)
            product = start_product(a_slots.index(slot), b_slots.index(slot), PLACE)
            a_scale, b_scale = a_next, b_next
            a_next, b_next = _scales_of_tile(scales, shape, walk, here, block + 1, WHOLE, PLACE)
            product = hopper.warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(slot), count=1)
            sums += product * (gl.expand_dims(b_scale, 0) * gl.expand_dims(a_scale, 1))
            step += 1
        there = _place_columns(walk, following, GROUP)
        start, end = next_start, next_end
        a_next, b_next = _scales_of_tile(scales, shape, walk, there, start, WHOLE, PLACE)
        _store_matrix(c, sums, here, shape, WHOLE, ACCUMULATE, PLACE)
        here = there


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
def _place_columns(walk, tile, GROUP: gl.constexpr):
    """Say where a tile lies: expert, row, column."""
    _, _, down, across, _ = walk
    row, column = swizzle(tile % (down * across), down, across, GROUP)
    return tile // (down * across), row * ROWS, column * WIDTH


@gluon.jit
def _scales_of_tile(scales, shape, walk, here, block, WHOLE: gl.constexpr, PLACE: gl.constexpr):
    """Load both operands' scales of a block; past the expert's last block whichever are there."""
    a_scales, b_scales, a_scale_outer, a_scale_depth, b_scale_outer, b_scale_depth = scales
    rows, columns = shape
    block = gl.minimum(block, walk[1] - 1)
    down = here[1] + PLACE * HALF + gl.arange(0, HALF, DOWN)
    across = here[2] + gl.arange(0, WIDTH, ACROSS)
    a_places = a_scales + block * a_scale_depth + down * a_scale_outer
    b_places = b_scales + block * b_scale_depth + across * b_scale_outer
    if WHOLE:
        # Said here, as the compiler does not see what the second multiplier's pointers are multiples of.
        b_places = gl.max_contiguous(gl.multiple_of(b_places, 16), WIDTH)
        found = (gl.load(a_places), gl.load(b_places))
    else:
        found = (
            gl.load(a_places, mask=down < rows, other=0.0),
            gl.load(b_places, mask=across < columns, other=0.0),
        )
    return found


@gluon.jit
def _store_matrix(c, sums, here, shape, WHOLE: gl.constexpr, ACCUMULATE: gl.constexpr, PLACE: gl.constexpr):
    """Write or add a tile. One program owns each element, so a sum has one order; nobody waits for what was there."""
    rows, columns = shape
    expert, row, column = here
    down = row + PLACE * HALF + gl.arange(0, HALF, DOWN)
    across = column + gl.arange(0, WIDTH, ACROSS)
    c_places = c + expert.to(gl.int64) * rows * columns
    c_places = c_places + (gl.expand_dims(down * columns, 1) + gl.expand_dims(across, 0))
    inside = gl.expand_dims(down < rows, 1) & gl.expand_dims(across < columns, 0)
    if WHOLE:
        inside = None
        c_places = gl.max_contiguous(gl.multiple_of(c_places, [1, 16]), [1, WIDTH])
    if ACCUMULATE:
        gl.atomic_add(c_places, sums, mask=inside, sem="relaxed")
    else:
        gl.store(c_places, sums.to(c.dtype.element_ty), mask=inside)
