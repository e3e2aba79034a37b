"""Hopper's own kernel for gradients of weights, dense or of each expert; how it works: `penstock.kernels.hopper_ring`.

Its second operand has a scale for each row, with which every number of a partial sum is multiplied by itself, or one
for 128 rows (SQUARE), as weights have in `hopper_rows`, whose pace it then has.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from penstock.kernels.float8.hopper_blocks import (
    ACROSS,
    DEPTH,
    DOWN,
    HALF,
    PRODUCT,
    ROWS,
    WIDTH,
    add_one,
    add_two,
    scales_of_turn,
    start_product,
)
from penstock.kernels.hopper_ring import (
    LOADER_REGISTERS,
    MULTIPLIER_REGISTERS,
    add_out,
    copy_in,
    make_barriers,
    ring,
    swizzle,
)


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
    SQUARE: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """Multiply a by the transpose of b, contracted over each expert's columns; write it, or add it to what c holds.

    a is rows x depth, b columns x depth, both descriptors of blocks. A scale of a is for 1 x 128 numbers; one of b is,
    too, or with SQUARE for 128 x 128. c_ptr points to experts x rows x columns; a descriptor c of half a tile of the
    same, in float32, is added to instead. `starts_ptr` says at which multiple of 128 each expert's columns begin, and
    where the last one's end; without it there is one matrix, contracted over all. WHOLE says that tiles divide c, and
    that scales of neighbouring rows of b stand together, aligned at 16 bytes.
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
    if c is None:
        target = (c, c_ptr, c)
    else:
        target = (c, c_ptr, gl.allocate_shared_memory(c.dtype, [2, 1, HALF, WIDTH], c.layout))
    given = (walk, slots, scales, target, shape)
    upper: gl.constexpr = 0
    lower: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply_columns, (given, STAGES, STEPS, GROUP, SQUARE, WHOLE, upper)),
            (_multiply_columns, (given, STAGES, STEPS, GROUP, SQUARE, WHOLE, lower)),
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
    given,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    GROUP: gl.constexpr,
    SQUARE: gl.constexpr,
    WHOLE: gl.constexpr,
    PLACE: gl.constexpr,
):
    """Make rows PLACE * 64 and on of each tile."""
    walk, slots, scales, target, shape = given
    tiles = walk[4]
    step = 0
    tile = gl.minimum(gl.program_id(0), tiles - 1)
    start, end = _load_span(walk, tile)
    here = _place_columns(walk, tile, GROUP)
    found = _first_scales(scales, shape, walk, here, start, STEPS, SQUARE, WHOLE, PLACE)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        # Past the last tile it is the last one again, whose scales nobody uses.
        following = gl.minimum(tile + gl.num_programs(0), tiles - 1)
        next_start, next_end = _load_span(walk, following)
        there = _place_columns(walk, following, GROUP)
        if SQUARE:
            sums = _sum_squares(slots, scales, shape, walk, here, found, step, start, end, STAGES, STEPS, PLACE)
        else:
            sums = _sum_rows(slots, scales, shape, walk, here, found, step, start, end, STAGES, WHOLE, PLACE)
        step += end - start
        start, end = next_start, next_end
        found = _first_scales(scales, shape, walk, there, start, STEPS, SQUARE, WHOLE, PLACE)
        _store_matrix(target, sums, here, shape, WHOLE, PLACE)
        here = there
    if target[0] is not None:
        tma.store_wait(0)


@gluon.jit
def _first_scales(
    scales,
    shape,
    walk,
    here,
    start,
    STEPS: gl.constexpr,
    SQUARE: gl.constexpr,
    WHOLE: gl.constexpr,
    PLACE: gl.constexpr,
):
    """Load the scales with which a tile begins."""
    if SQUARE:
        strides = (scales[3], scales[5])
        found = scales_of_turn(_places_of_scales(scales, shape, here, PLACE), strides, start, walk[1], STEPS)
    else:
        found = _scales_of_rows(scales, shape, walk, here, start, WHOLE, PLACE)
    return found


@gluon.jit
def _sum_squares(
    slots,
    scales,
    shape,
    walk,
    here,
    found,
    step,
    start,
    end,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    PLACE: gl.constexpr,
):
    """Sum a tile's products, where b has one scale for all columns of a tile; as `hopper_rows` does."""
    places, strides = _places_of_scales(scales, shape, here, PLACE), (scales[3], scales[5])
    sums = gl.zeros([HALF, WIDTH], gl.float32, PRODUCT)
    for turn in range((end - start) // STEPS):
        ahead = start + (turn + 1) * STEPS
        if STEPS == 2:
            sums, found = add_two(sums, found, slots, places, strides, step, ahead, walk[1], STAGES, PLACE)
        else:
            sums, found = add_one(sums, found, slots, places, strides, step, ahead, walk[1], STAGES, PLACE)
        step += STEPS
    if STEPS == 2:  # noqa: SIM102 (the compiler decides this one, the program the other)
        if (end - start) % 2 == 1:
            sums = add_one(sums, found[:2], slots, places, strides, step, end, walk[1], STAGES, PLACE)[0]
    return sums


@gluon.jit
def _sum_rows(
    slots,
    scales,
    shape,
    walk,
    here,
    found,
    step,
    start,
    end,
    STAGES: gl.constexpr,
    WHOLE: gl.constexpr,
    PLACE: gl.constexpr,
):
    """Sum a tile's products, where b has a scale for each column of a tile."""
    a_slots, b_slots, full, empty = slots
    sums = gl.zeros([HALF, WIDTH], gl.float32, PRODUCT)
    for block in range(start, end):
        slot, phase = ring(step, STAGES)
        mbarrier.wait(full.index(slot), phase)
        product = start_product(a_slots.index(slot), b_slots.index(slot), PLACE)
        scale = gl.expand_dims(found[1], 0) * gl.expand_dims(found[0], 1)
        # Triton 3.6 takes the first tile's end for all tiles where only the bound of this loop reads it.
        found = _scales_of_rows(scales, shape, walk, here, gl.minimum(block + 1, end - 1), WHOLE, PLACE)
        product = hopper.warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index(slot), count=1)
        sums += product * scale
        step += 1
    return sums


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
def _places_of_scales(scales, shape, here, PLACE: gl.constexpr):
    """Where the scales of a first block are: of each row of a, and of the 128 of b."""
    a_scales, b_scales, a_scale_outer, _, b_scale_outer, _ = scales
    down = here[1] + PLACE * HALF + gl.arange(0, HALF, DOWN)
    return a_scales + gl.minimum(down, shape[0] - 1) * a_scale_outer, b_scales + here[2] // WIDTH * b_scale_outer


@gluon.jit
def _scales_of_rows(scales, shape, walk, here, block, WHOLE: gl.constexpr, PLACE: gl.constexpr):
    """Load both operands' scales of a block; past the last block those of the last one, which nobody uses."""
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
def _store_matrix(target, sums, here, shape, WHOLE: gl.constexpr, PLACE: gl.constexpr):
    """Write a tile, or add it by the copy engine. One program owns each element, so a sum has one order."""
    c, c_ptr, c_slots = target
    rows, columns = shape
    expert, row, column = here
    row += PLACE * HALF
    if c is not None:
        tma.store_wait(0)
        c_slots.index(PLACE).reshape([HALF, WIDTH]).store(sums)
        fence_async_shared()
        add_out(c, [expert, row, column], c_slots.index(PLACE))
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
