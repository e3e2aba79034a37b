"""Hopper kernels for products in 8 bits by the recipes blockwise and blockwise-square.

`float8_rows_kernel` multiplies the rows of experts, or all rows, with weights; `float8_matrices_kernel` makes gradients
of weights, dense or of each expert. Its second operand has a scale for each row, so every number of a partial sum has
a scale of its own, or one for 128 rows (SQUARE), as weights have. Both operands have their contracted dim last, in
blocks of 128.

`penstock.kernels.gluon.grouped_gemm_kernels` describes the warps and the ring. Each of two or three consumers has 64
rows of a tile: it multiplies a block, frees its slot, scales the sum and adds it, while the product of another consumer
is in the matrix unit. A tile of 192 rows asks the L2 cache for a sixth less than one of 128, for the same numbers. A
consumer without a row in a tile skips its slots. With STEPS = 2 a consumer starts two products and scales the first
while the second is made, which takes 64 more registers for the second sum.

Scales arrive in slots beside their blocks, because loads at their use would wait for an L2 cache that is busy with
blocks (docs/decisions/0152-scales-in-slots.md). Copies of 4 bytes need no alignment and take all strides, so scales may
lie anywhere, also behind packed rows. Each of the producer's 32 threads arrives at a slot's `full` when its copies have
landed, besides the one arrival for the bytes of blocks.

Sums are made as in the Triton kernels, `sum += product * (scale * scale)`, block by block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from penstock.kernels.gluon.grouped_gemm_kernels import (
    LANES,
    SPAN,
    copy_in,
    make_barriers,
    places,
    ring,
    swizzle,
    write_pieces,
    zero_tail,
)

DEPTH = gl.constexpr(128)
HALF = gl.constexpr(64)  # rows of a tile that one consumer has
WIDTH = gl.constexpr(128)  # columns of a product, and of a block of w that a slot holds
# How the matrix unit spreads a product over the threads of a consumer.
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
DOWN = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))
ACROSS = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))
IN_A_ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # how scales lie in a slot

# Registers of a thread of a consumer and of the producer, with two or three consumers; 65536 in all.
PAIRS_REGISTERS = gl.constexpr(240)
PAIRS_PRODUCER_REGISTERS = gl.constexpr(24)
TRIOS_REGISTERS = gl.constexpr(160)
TRIOS_PRODUCER_REGISTERS = gl.constexpr(32)

# Triton 3.9 renamed it.
copy_scales = vars(async_copy)["async_load" if "async_load" in vars(async_copy) else "async_copy_global_to_shared"]


@gluon.jit
def make_slots(x, w_slots, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, EACH: gl.constexpr):
    """Slots of x, a part for each consumer, slots of w, slots of both operands' scales, `full` and `empty`.

    With EACH w has a scale for each row of a slot, else one for all of them, repeated for each row of a consumer.
    """
    x_slots = gl.allocate_shared_memory(x.dtype, [STAGES * CONSUMERS, HALF, DEPTH], x.layout)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES * CONSUMERS, HALF], IN_A_ROW)
    w_scales = gl.allocate_shared_memory(gl.float32, [STAGES, WIDTH if EACH else HALF], IN_A_ROW)
    full, empty = make_barriers(STAGES, CONSUMERS, 33)  # 32 threads that copy scales, and 1 for the bytes of blocks
    return x_slots, w_slots, x_scales, w_scales, full, empty


@gluon.jit
def load_scales(
    slots, slot, x_scales, w_scales, strides, corner, rows, block, CONSUMERS: gl.constexpr, EACH: gl.constexpr
):
    """Copy a block's scales into a slot.

    x_scales and w_scales are pointers, `strides` those of both operands along outer and depth; `corner` is the tile's
    first row of x and of w, and `rows` are the rows of both. Rows past the last one are never written, so they may get
    any scale.
    """
    x_outer, x_depth, w_outer, w_depth = strides
    lanes = places(HALF)
    for part in gl.static_range(CONSUMERS):
        down = gl.minimum(corner[0] + part * HALF + lanes, rows[0] - 1)
        copy_scales(slots[2].index(slot * CONSUMERS + part), x_scales + (down * x_outer + block * x_depth))
    if EACH:
        across = gl.minimum(corner[1] + places(WIDTH), rows[1] - 1)
    else:
        across = gl.full([HALF], corner[1] // WIDTH, gl.int32, LANES)
    copy_scales(slots[3].index(slot), w_scales + (across * w_outer + block * w_depth))
    async_copy.mbarrier_arrive(slots[4].index(slot), increment_count=False)


@gluon.jit
def sum_blocks(
    slots, step, mine, blocks,
    STAGES: gl.constexpr, STEPS: gl.constexpr, CONSUMERS: gl.constexpr, EACH: gl.constexpr, PLACE: gl.constexpr,
):  # fmt: skip
    """Sum the scaled products of `mine` blocks, which are all `blocks` of a tile or none."""
    sums = gl.zeros([HALF, WIDTH], gl.float32, PRODUCT)
    for turn in range(mine // STEPS):  # noqa: B007 (the compiler's loops take no name twice)
        if STEPS == 2:
            sums = _add_two(sums, slots, step, STAGES, CONSUMERS, EACH, PLACE)
        else:
            sums = _add_one(sums, slots, step, STAGES, CONSUMERS, EACH, PLACE)
        step += STEPS
    if STEPS == 2:  # noqa: SIM102 (the compiler decides this one, the program the other)
        if mine % 2 == 1:
            sums = _add_one(sums, slots, step, STAGES, CONSUMERS, EACH, PLACE)
            step += 1
    # Slots of a tile in which this consumer has no row are only handed back.
    for block in range(mine, blocks):  # noqa: B007
        slot, phase = ring(step, STAGES)
        mbarrier.wait(slots[4].index(slot), phase)
        mbarrier.arrive(slots[5].index(slot), count=1)
        step += 1
    return sums


@gluon.jit
def _add_one(sums, slots, step, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, EACH: gl.constexpr, PLACE: gl.constexpr):
    """Add the product of a block."""
    full, empty = slots[4], slots[5]
    slot, phase = ring(step, STAGES)
    mbarrier.wait(full.index(slot), phase)
    scale = _scale_of(slots, slot, CONSUMERS, EACH, PLACE)
    product = _start_product(slots, slot, CONSUMERS, PLACE)
    product = hopper.warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(empty.index(slot), count=1)
    return sums + product * scale


@gluon.jit
def _add_two(sums, slots, step, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, EACH: gl.constexpr, PLACE: gl.constexpr):
    """Add the products of two blocks: the first one is scaled while the second one is made."""
    full, empty = slots[4], slots[5]
    slot, phase = ring(step, STAGES)
    next_slot, next_phase = ring(step + 1, STAGES)
    mbarrier.wait(full.index(slot), phase)
    mbarrier.wait(full.index(next_slot), next_phase)
    scale = _scale_of(slots, slot, CONSUMERS, EACH, PLACE)
    next_scale = _scale_of(slots, next_slot, CONSUMERS, EACH, PLACE)
    # Nothing but arithmetic may stand from here to the last wait, else the assembler waits for each instruction.
    product = _start_product(slots, slot, CONSUMERS, PLACE)
    next_product = _start_product(slots, next_slot, CONSUMERS, PLACE)
    product = hopper.warpgroup_mma_wait(1, deps=[product])
    mbarrier.arrive(empty.index(slot), count=1)
    sums += product * scale
    next_product = hopper.warpgroup_mma_wait(0, deps=[next_product])
    mbarrier.arrive(empty.index(next_slot), count=1)
    return sums + next_product * next_scale


@gluon.jit
def _start_product(slots, slot, CONSUMERS: gl.constexpr, PLACE: gl.constexpr):
    """Start the product of a consumer's rows of x and the transpose of w."""
    zeros = gl.zeros([HALF, WIDTH], gl.float32, PRODUCT)
    x_block = slots[0].index(slot * CONSUMERS + PLACE)
    w_block = slots[1].index(slot).reshape([WIDTH, DEPTH]).permute([1, 0])
    return hopper.warpgroup_mma(x_block, w_block, zeros, use_acc=False, is_async=True)


@gluon.jit
def _scale_of(slots, slot, CONSUMERS: gl.constexpr, EACH: gl.constexpr, PLACE: gl.constexpr):
    """Factor of each number of a product."""
    down = slots[2].index(slot * CONSUMERS + PLACE).load(DOWN)
    if EACH:
        scale = gl.expand_dims(down, 1) * gl.expand_dims(slots[3].index(slot).load(ACROSS), 0)
    else:
        scale = gl.expand_dims(down * slots[3].index(slot).load(DOWN), 1)
    return scale


@gluon.jit
def float8_rows_kernel(
    x, w, y, y_ptr, x_scales, w_scales, starts_ptr, owners_ptr, block_count_ptr, first_ptr,
    rows, columns, depth, experts, x_scale_outer, x_scale_depth, w_scale_expert, w_scale_outer, w_scale_depth,
    STAGES: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr, CONSUMERS: gl.constexpr, ONLY_LAST: gl.constexpr,
):  # fmt: skip
    """Multiply each row of x by the matrix of its expert; set rows of the tail to zero, or with ONLY_LAST the last one.

    x is rows x depth with a scale for 1 x 128 numbers, w experts x columns x depth with one for 128 x 128, y rows x
    columns. x and w are descriptors of blocks, y a ragged one of pieces in bfloat16, or None; y_ptr is the pointer.
    Without `owners_ptr` all rows belong to one expert; else it is the table of tiles of 64 rows for each consumer. With
    `first_ptr` rows are written from that row of y on, and there is no tail.
    """
    across = gl.cdiv(columns, WIDTH)
    down = gl.cdiv(rows, HALF * CONSUMERS) if owners_ptr is None else gl.load(block_count_ptr)
    schedule = (owners_ptr, rows, columns, across, down * across)
    blocks = gl.cdiv(depth, DEPTH)
    w_slots = gl.allocate_shared_memory(w.dtype, [STAGES, 1, WIDTH, DEPTH], w.layout)
    slots = make_slots(x, w_slots, STAGES, CONSUMERS, False)
    scales = (x_scales, w_scales, x_scale_outer, x_scale_depth, w_scale_expert, w_scale_outer, w_scale_depth)
    if y is None:
        target = (y, y_ptr, y, first_ptr)
    else:
        buffers = gl.allocate_shared_memory(y.dtype, [2 * CONSUMERS] + y.block_shape, y.layout)  # noqa: RUF005
        target = (y, y_ptr, buffers, first_ptr)
    given = (schedule, slots, target, blocks)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    third: gl.constexpr = 2
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_multiply_rows, (given, STAGES, STEPS, GROUP, CONSUMERS, first)),
                (_multiply_rows, (given, STAGES, STEPS, GROUP, CONSUMERS, second)),
                (_multiply_rows, (given, STAGES, STEPS, GROUP, CONSUMERS, third)),
                (_load_rows, (given, scales, x, w, STAGES, GROUP, CONSUMERS)),
            ],
            [4, 4, 1],
            [TRIOS_REGISTERS, TRIOS_REGISTERS, TRIOS_PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_rows, (given, STAGES, STEPS, GROUP, CONSUMERS, first)),
                (_multiply_rows, (given, STAGES, STEPS, GROUP, CONSUMERS, second)),
                (_load_rows, (given, scales, x, w, STAGES, GROUP, CONSUMERS)),
            ],
            [4, 1],
            [PAIRS_REGISTERS, PAIRS_PRODUCER_REGISTERS],
        )
    if owners_ptr is not None and first_ptr is None:
        tail = gl.load(starts_ptr + experts)
        zero_tail(y_ptr, gl.maximum(tail, rows - 1) if ONLY_LAST else tail, rows, columns, y_ptr.dtype.element_ty)


@gluon.jit
def _load_rows(given, scales, x, w, STAGES: gl.constexpr, GROUP: gl.constexpr, CONSUMERS: gl.constexpr):
    """Fill slots with blocks of x and w and their scales, tile by tile."""
    schedule, slots, blocks = given[0], given[1], given[3]
    x_slots, w_slots, full, empty = slots[0], slots[1], slots[4], slots[5]
    x_scales, w_scales, x_outer, x_depth, w_expert, w_outer, w_depth = scales
    strides, rows = (x_outer, x_depth, w_outer, w_depth), (schedule[1], schedule[2])
    step = 0
    for tile in range(gl.program_id(0), schedule[4], gl.num_programs(0)):
        expert, start, _, row, column = _place_rows(schedule, tile, _load_owner(schedule, tile), GROUP, CONSUMERS)
        corner, of_expert = (start + row, column), w_scales + expert * w_expert
        for block in range(blocks):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), (HALF * CONSUMERS + WIDTH) * DEPTH)
            for part in gl.static_range(CONSUMERS):
                x_slot = x_slots.index(slot * CONSUMERS + part)
                copy_in(x, [start + row + part * HALF, block * DEPTH], full.index(slot), x_slot)
            copy_in(w, [expert, column, block * DEPTH], full.index(slot), w_slots.index(slot))
            load_scales(slots, slot, x_scales, of_expert, strides, corner, rows, block, CONSUMERS, False)
            step += 1


@gluon.jit
def _multiply_rows(
    given, STAGES: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr, CONSUMERS: gl.constexpr, PLACE: gl.constexpr
):
    """Make the rows from PLACE * 64 on of each tile."""
    schedule, slots, target, blocks = given
    tiles = schedule[4]
    # A buffer of many layers has fewer than 2**31 rows, though more numbers.
    shift = 0 if target[3] is None else gl.load(target[3]).to(gl.int32)
    step = 0
    if tiles > 0:
        tile = gl.minimum(gl.program_id(0), tiles - 1)
        owner = _load_owner(schedule, tile)
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            here = _place_rows(schedule, tile, owner, GROUP, CONSUMERS)
            # Past the last tile the last one is loaded again, and not used.
            owner = _load_owner(schedule, gl.minimum(tile + gl.num_programs(0), tiles - 1))
            mine = gl.where(here[1] + here[3] + PLACE * HALF < here[2], blocks, 0)
            sums = sum_blocks(slots, step, mine, blocks, STAGES, STEPS, CONSUMERS, False, PLACE)
            step += blocks
            _store_rows(target, sums, here, shift, schedule[2], PLACE)
    if target[0] is not None:
        tma.store_wait(0)


@gluon.jit
def _load_owner(schedule, tile):
    """Load the owner of a tile: expert, its first row, the row past its last, its first block of rows."""
    owners_ptr, rows, _, across, _ = schedule
    owner = (gl.to_tensor(0), gl.to_tensor(0), rows, gl.to_tensor(0))
    if owners_ptr is not None:
        owner_ptr = owners_ptr + tile // across * 4
        owner = (gl.load(owner_ptr), gl.load(owner_ptr + 1), gl.load(owner_ptr + 2), gl.load(owner_ptr + 3))
    return owner


@gluon.jit
def _place_rows(schedule, tile, owner, GROUP: gl.constexpr, CONSUMERS: gl.constexpr):
    """Place of a tile: expert, its first row, the row past its last, the tile's row in it, the tile's column."""
    across = schedule[3]
    expert, start, end, first_block = owner
    height: gl.constexpr = HALF * CONSUMERS
    row, column = swizzle(tile - first_block * across, gl.cdiv(end - start, height), across, GROUP)
    return expert, start, end, row * height, column * WIDTH


@gluon.jit
def _store_rows(target, sums, here, shift, columns, PLACE: gl.constexpr):
    """Write the expert's own rows: by descriptor, or through pointers if there is none."""
    y, y_ptr, buffers, _ = target
    _, start, end, row, column = here
    start, end, row = start + shift, end + shift, row + PLACE * HALF
    result = sums.to(y_ptr.dtype.element_ty)
    if y is not None:
        write_pieces(y, buffers, result, (gl.to_tensor(SPAN), end), start - end + row + SPAN, column, False, 0, PLACE)
    else:
        position = start + row + gl.arange(0, HALF, DOWN)
        across = column + gl.arange(0, WIDTH, ACROSS)
        inside = gl.expand_dims(position < end, 1) & gl.expand_dims(across < columns, 0)
        y_places = gl.expand_dims(position.to(gl.int64) * columns, 1) + gl.expand_dims(across, 0)
        gl.store(y_ptr + y_places, result, mask=inside)


@gluon.jit
def float8_matrices_kernel(
    a, b, c, c_ptr, a_scales, b_scales, starts_ptr,
    rows, columns, depth, experts, a_scale_outer, a_scale_depth, b_scale_outer, b_scale_depth,
    STAGES: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr, CONSUMERS: gl.constexpr, SQUARE: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """Multiply a by the transpose of b, contracted over each expert's columns; write c or add to it.

    a is rows x depth, b columns x depth, both descriptors of blocks. A scale of a is for 1 x 128 numbers; one of b is
    too, or with SQUARE for 128 x 128. c_ptr points to experts x rows x columns; if c is a descriptor of pieces of the
    same, in float32, products are added to it. `starts_ptr` has the multiple of 128 at which each expert's columns
    begin, and the end of the last ones; without it there is one matrix, contracted over all. WHOLE says that tiles
    divide c.
    """
    across = gl.cdiv(columns, WIDTH)
    down = gl.cdiv(rows, HALF * CONSUMERS)
    schedule = (starts_ptr, gl.cdiv(depth, DEPTH), down, across, down * across * experts)
    b_slots = gl.allocate_shared_memory(b.dtype, [STAGES, WIDTH, DEPTH], b.layout)
    slots = make_slots(a, b_slots, STAGES, CONSUMERS, not SQUARE)
    scales = (a_scales, b_scales, a_scale_outer, a_scale_depth, b_scale_outer, b_scale_depth)
    if c is None:
        target = (c, c_ptr, c)
    else:
        buffers = gl.allocate_shared_memory(c.dtype, [2 * CONSUMERS] + c.block_shape, c.layout)  # noqa: RUF005
        target = (c, c_ptr, buffers)
    given = (schedule, slots, target, (rows, columns))
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    third: gl.constexpr = 2
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_multiply_columns, (given, STAGES, STEPS, GROUP, CONSUMERS, SQUARE, WHOLE, first)),
                (_multiply_columns, (given, STAGES, STEPS, GROUP, CONSUMERS, SQUARE, WHOLE, second)),
                (_multiply_columns, (given, STAGES, STEPS, GROUP, CONSUMERS, SQUARE, WHOLE, third)),
                (_load_columns, (given, scales, a, b, STAGES, GROUP, CONSUMERS, SQUARE)),
            ],
            [4, 4, 1],
            [TRIOS_REGISTERS, TRIOS_REGISTERS, TRIOS_PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_columns, (given, STAGES, STEPS, GROUP, CONSUMERS, SQUARE, WHOLE, first)),
                (_multiply_columns, (given, STAGES, STEPS, GROUP, CONSUMERS, SQUARE, WHOLE, second)),
                (_load_columns, (given, scales, a, b, STAGES, GROUP, CONSUMERS, SQUARE)),
            ],
            [4, 1],
            [PAIRS_REGISTERS, PAIRS_PRODUCER_REGISTERS],
        )


@gluon.jit
def _load_columns(
    given, scales, a, b, STAGES: gl.constexpr, GROUP: gl.constexpr, CONSUMERS: gl.constexpr, SQUARE: gl.constexpr
):
    """Fill slots with blocks of a and b and their scales, tile by tile."""
    schedule, slots, shape = given[0], given[1], given[3]
    a_slots, b_slots, full, empty = slots[0], slots[1], slots[4], slots[5]
    step = 0
    for tile in range(gl.program_id(0), schedule[4], gl.num_programs(0)):
        start, end = _load_span(schedule, tile)
        _, row, column = _place_columns(schedule, tile, GROUP, CONSUMERS)
        for block in range(start, end):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), (HALF * CONSUMERS + WIDTH) * DEPTH)
            for part in gl.static_range(CONSUMERS):
                a_slot = a_slots.index(slot * CONSUMERS + part)
                copy_in(a, [row + part * HALF, block * DEPTH], full.index(slot), a_slot)
            copy_in(b, [column, block * DEPTH], full.index(slot), b_slots.index(slot))
            load_scales(
                slots, slot, scales[0], scales[1], scales[2:], (row, column), shape, block, CONSUMERS, not SQUARE
            )
            step += 1


@gluon.jit
def _multiply_columns(
    given,
    STAGES: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr, CONSUMERS: gl.constexpr, SQUARE: gl.constexpr,
    WHOLE: gl.constexpr, PLACE: gl.constexpr,
):  # fmt: skip
    """Make the rows from PLACE * 64 on of each tile."""
    schedule, slots, target, shape = given
    tiles = schedule[4]
    step = 0
    start, end = _load_span(schedule, gl.minimum(gl.program_id(0), tiles - 1))
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        # Past the last tile the last span is loaded again, and not used.
        next_start, next_end = _load_span(schedule, gl.minimum(tile + gl.num_programs(0), tiles - 1))
        here = _place_columns(schedule, tile, GROUP, CONSUMERS)
        blocks = end - start
        mine = gl.where(here[1] + PLACE * HALF < shape[0], blocks, 0)
        sums = sum_blocks(slots, step, mine, blocks, STAGES, STEPS, CONSUMERS, not SQUARE, PLACE)
        # Triton 3.6 keeps the first tile's span for all tiles if only loop bounds read it.
        step += end - start
        start, end = next_start, next_end
        _store_matrix(target, sums, here, shape, WHOLE, PLACE)
    if target[0] is not None:
        tma.store_wait(0)


@gluon.jit
def _load_span(schedule, tile):
    """Load a tile's first block of depth and the one past its last: those of its expert."""
    starts_ptr, blocks, down, across, _ = schedule
    span = (gl.to_tensor(0), blocks)
    if starts_ptr is not None:
        start_ptr = starts_ptr + tile // (down * across)
        span = (gl.load(start_ptr) // DEPTH, gl.load(start_ptr + 1) // DEPTH)
    return span


@gluon.jit
def _place_columns(schedule, tile, GROUP: gl.constexpr, CONSUMERS: gl.constexpr):
    """Place of a tile: expert, row, column."""
    _, _, down, across, _ = schedule
    row, column = swizzle(tile % (down * across), down, across, GROUP)
    return tile // (down * across), row * (HALF * CONSUMERS), column * WIDTH


@gluon.jit
def _store_matrix(target, sums, here, shape, WHOLE: gl.constexpr, PLACE: gl.constexpr):
    """Write a tile, or add it by the copy engine. One program owns each element, so a sum has one order."""
    c, c_ptr, buffers = target
    rows, columns = shape
    expert, row, column = here
    row += PLACE * HALF
    if c is not None:
        write_pieces(c, buffers, sums, (expert,), row, column, True, 0, PLACE)
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
