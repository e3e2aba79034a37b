"""Hopper's own kernel for products of experts' rows, or of all rows, with weights.

How it works is told in `penstock.kernels.hopper_ring`. With STEPS = 2 a multiplier starts two products and scales the
first while the second is made, which takes 64 registers more for the second sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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
)
from penstock.kernels.hopper_ring import (
    LOADER_REGISTERS,
    MULTIPLIER_REGISTERS,
    SPAN,
    copy_in,
    copy_out,
    make_barriers,
    ring,
    swizzle,
    zero_tail,
)


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
    ONLY_LAST: gl.constexpr,
):
    """Multiply each row of x by the matrix of the row's expert; set the rows of the tail to zero, or ONLY_LAST of them.

    x is rows x depth with a scale for 1 x 128 numbers, w experts x columns x depth with one for 128 x 128, y rows x
    columns. x and w are descriptors of blocks, y a ragged one of half a tile in bfloat16, or None; y_ptr is the
    pointer. Without `owners_ptr` all rows are one expert's. With `first_ptr` the first row of y is not its own: rows
    are written from the one on that is said there, and there is no tail.
    """
    across = gl.cdiv(columns, WIDTH)
    down = gl.cdiv(rows, ROWS) if owners_ptr is None else gl.load(block_count_ptr)
    walk = (owners_ptr, rows, across, down * across)
    blocks = gl.cdiv(depth, DEPTH)
    x_slots = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], x.layout)
    w_slots = gl.allocate_shared_memory(w.dtype, [STAGES, 1, WIDTH, DEPTH], w.layout)
    full, empty = make_barriers(STAGES)
    slots = (x_slots, w_slots, full, empty)
    scales = (x_scales, w_scales, x_scale_outer, x_scale_depth, w_scale_expert, w_scale_outer, w_scale_depth)
    if y is None:
        target = (y, y_ptr, y, first_ptr)
    else:
        target = (y, y_ptr, gl.allocate_shared_memory(y.dtype, [2, 1, 1, HALF, WIDTH], y.layout), first_ptr)
    upper: gl.constexpr = 0
    lower: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply_rows, (walk, slots, scales, target, columns, blocks, STAGES, STEPS, GROUP, upper)),
            (_multiply_rows, (walk, slots, scales, target, columns, blocks, STAGES, STEPS, GROUP, lower)),
            (_load_rows, (walk, slots, x, w, blocks, STAGES, GROUP)),
        ],
        [4, 1],
        [MULTIPLIER_REGISTERS, LOADER_REGISTERS],
    )
    if owners_ptr is not None and first_ptr is None:
        tail = gl.load(starts_ptr + experts)
        zero_tail(y_ptr, gl.maximum(tail, rows - 1) if ONLY_LAST else tail, rows, columns, y_ptr.dtype.element_ty)


@gluon.jit
def _load_rows(walk, slots, x, w, blocks, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Fill slots with blocks of x and w, tile by tile."""
    x_slots, w_slots, full, empty = slots
    step = 0
    for tile in range(gl.program_id(0), walk[3], gl.num_programs(0)):
        expert, start, _, row, column = _place_rows(walk, tile, _load_owner(walk, tile), GROUP)
        for block in range(blocks):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), (ROWS + WIDTH) * DEPTH)
            copy_in(x, [start + row, block * DEPTH], full.index(slot), x_slots.index(slot))
            copy_in(w, [expert, column, block * DEPTH], full.index(slot), w_slots.index(slot))
            step += 1


@gluon.jit
def _multiply_rows(
    walk,
    slots,
    scales,
    target,
    columns,
    blocks,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    GROUP: gl.constexpr,
    PLACE: gl.constexpr,
):
    """Make rows PLACE * 64 and on of each tile."""
    tiles = walk[3]
    strides = (scales[3], scales[6])
    # On a shelf of many layers there are fewer than 2**31 rows, if not numbers.
    shift = 0 if target[3] is None else gl.load(target[3]).to(gl.int32)
    step = 0
    if tiles > 0:
        tile = gl.minimum(gl.program_id(0), tiles - 1)
        here = _place_rows(walk, tile, _load_owner(walk, tile), GROUP)
        places = _places_of_scales(scales, here, walk[1], PLACE)
        found = scales_of_turn(places, strides, 0, blocks, STEPS)
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            # Past the last tile it is the last one again, whose scales nobody uses.
            following = gl.minimum(tile + gl.num_programs(0), tiles - 1)
            owner = _load_owner(walk, following)
            sums = gl.zeros([HALF, WIDTH], gl.float32, PRODUCT)
            for turn in range(blocks // STEPS):
                ahead = (turn + 1) * STEPS
                if STEPS == 2:
                    sums, found = add_two(sums, found, slots, places, strides, step, ahead, blocks, STAGES, PLACE)
                else:
                    sums, found = add_one(sums, found, slots, places, strides, step, ahead, blocks, STAGES, PLACE)
                step += STEPS
            if STEPS == 2:  # noqa: SIM102 (the compiler decides this one, the program the other)
                if blocks % 2 == 1:
                    sums = add_one(sums, found[:2], slots, places, strides, step, blocks, blocks, STAGES, PLACE)[0]
                    step += 1
            there = _place_rows(walk, following, owner, GROUP)
            places = _places_of_scales(scales, there, walk[1], PLACE)
            found = scales_of_turn(places, strides, 0, blocks, STEPS)
            _store_rows(target, sums, here, shift, columns, PLACE)
            here = there
    if target[0] is not None:
        tma.store_wait(0)


@gluon.jit
def _load_owner(walk, tile):
    """Load whose tile it is: expert, its first row, the row past its last, its first block of rows."""
    owners_ptr, rows, across, _ = walk
    owner = (gl.to_tensor(0), gl.to_tensor(0), rows, gl.to_tensor(0))
    if owners_ptr is not None:
        owner_ptr = owners_ptr + tile // across * 4
        owner = (gl.load(owner_ptr), gl.load(owner_ptr + 1), gl.load(owner_ptr + 2), gl.load(owner_ptr + 3))
    return owner


@gluon.jit
def _place_rows(walk, tile, owner, GROUP: gl.constexpr):
    """Say where a tile lies: expert, its first row, the row past its last, the tile's row in it, the tile's column."""
    across = walk[2]
    expert, start, end, first_block = owner
    row, column = swizzle(tile - first_block * across, gl.cdiv(end - start, ROWS), across, GROUP)
    return expert, start, end, row * ROWS, column * WIDTH


@gluon.jit
def _places_of_scales(scales, here, rows, PLACE: gl.constexpr):
    """Where the scales of a tile's first block are: of each row, and of the 128 columns."""
    x_scales, w_scales, x_scale_outer, _, w_scale_expert, w_scale_outer, _ = scales
    expert, start, _, row, column = here
    down = start + row + PLACE * HALF + gl.arange(0, HALF, DOWN)
    # Rows past the expert's last are never written, so whose scale they get does not matter.
    x_places = x_scales + gl.minimum(down, rows - 1) * x_scale_outer
    return x_places, w_scales + expert * w_scale_expert + column // WIDTH * w_scale_outer


@gluon.jit
def _store_rows(target, sums, here, shift, columns, PLACE: gl.constexpr):
    """Write the rows that are the expert's own: by descriptor, or through pointers if there is none."""
    y, y_ptr, y_slots, _ = target
    _, start, end, row, column = here
    start, end, row = start + shift, end + shift, row + PLACE * HALF
    result = sums.to(y_ptr.dtype.element_ty)
    if y is not None:
        tma.store_wait(0)
        y_slots.index(PLACE).reshape([HALF, WIDTH]).store(result)
        fence_async_shared()
        copy_out(y, [gl.to_tensor(SPAN), end, start - end + row + SPAN, column], y_slots.index(PLACE))
    else:
        place = start + row + gl.arange(0, HALF, DOWN)
        across = column + gl.arange(0, WIDTH, ACROSS)
        inside = gl.expand_dims(place < end, 1) & gl.expand_dims(across < columns, 0)
        y_places = gl.expand_dims(place.to(gl.int64) * columns, 1) + gl.expand_dims(across, 0)
        gl.store(y_ptr + y_places, result, mask=inside)
