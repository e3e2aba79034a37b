"""Hopper kernels for grouped products in 16 bits: rows times the matrix of their expert, and gradients of weights.

`penstock.kernels.gluon.ring` describes the warps and the ring of slots. Here the two consumers take whole tiles in
turns, so that one writes while the other multiplies. They read the ring in the order of tiles, and a barrier has only
two phases, so a consumer must not wait for a slot before all earlier slots were full: the barriers `turns` see to that.
Sums stay in registers for a whole tile, and one product is always queued behind the running one: a slot is free when
the next product has been started and its own is done.

`expert_rows_kernel` reads the weight as the model stores it. Where its contracted dim is the last one, like that of
the rows, the matrix unit reads the transpose of a block; for the gradient of the input the contracted dim is the first.
In `weight_gradient_kernel` both operands have the contracted dim, an expert's rows, first in memory: a slot holds
columns of dy and of x for some rows, and the matrix unit reads dy transposed.

Descriptors of rows are ragged (`penstock.kernels.grouped_gemm_kernels`): past an expert's last row they read zeros and
write nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from penstock.kernels.gluon.ring import (
    LOADER_REGISTERS,
    MULTIPLIER_REGISTERS,
    SPAN,
    copy_in,
    make_barriers,
    make_turns,
    ring,
    swizzle,
    write_pieces,
    zero_tail,
)


@gluon.jit(do_not_specialize=["rows", "experts"])
def expert_rows_kernel(
    x,
    w,
    y,
    y_ptr,
    starts_ptr,
    owners_ptr,
    block_count_ptr,
    first_ptr,
    rows,
    columns,
    depth,
    experts,
    DEPTH_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    ONLY_LAST: gl.constexpr,
):
    """Multiply each row of x by the matrix of the row's expert; set the rows of the tail to zero, or ONLY_LAST of them.

    x is rows x depth, w experts x columns x depth, or experts x depth x columns if DEPTH_FIRST, y rows x columns. All
    three are descriptors, of a tile's rows of x, of its columns of w, and of a piece of the result, which is ragged;
    y_ptr is the pointer. With `first_ptr` the first row of y is not its own: rows are written from the one on that is
    said there, and there is no tail.
    """
    height: gl.constexpr = x.block_shape[0]
    block_depth: gl.constexpr = x.block_shape[1]
    width: gl.constexpr = w.block_shape[2] if DEPTH_FIRST else w.block_shape[1]
    across = gl.cdiv(columns, width)
    walk = (owners_ptr, across, gl.load(block_count_ptr) * across)
    blocks = gl.cdiv(depth, block_depth)
    x_slots = gl.allocate_shared_memory(x.dtype, [STAGES, height, block_depth], x.layout)
    w_slots = gl.allocate_shared_memory(w.dtype, [STAGES, 1, w.block_shape[1], w.block_shape[2]], w.layout)
    rooms = gl.allocate_shared_memory(y.dtype, [4, 1, 1, y.block_shape[2], y.block_shape[3]], y.layout)
    full, empty = make_barriers(STAGES, 1)
    slots = (x_slots, w_slots, full, empty)
    turns = make_turns()
    target = (y, rooms, first_ptr)
    one: gl.constexpr = 0
    other: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply_rows, (walk, slots, turns, target, blocks, DEPTH_FIRST, STAGES, GROUP, one)),
            (_multiply_rows, (walk, slots, turns, target, blocks, DEPTH_FIRST, STAGES, GROUP, other)),
            (_load_rows, (walk, slots, x, w, blocks, DEPTH_FIRST, STAGES, GROUP)),
        ],
        [4, 1],
        [MULTIPLIER_REGISTERS, LOADER_REGISTERS],
    )
    if first_ptr is None:
        tail = gl.load(starts_ptr + experts)
        zero_tail(y_ptr, gl.maximum(tail, rows - 1) if ONLY_LAST else tail, rows, columns, y.dtype)


@gluon.jit
def _load_rows(walk, slots, x, w, blocks, DEPTH_FIRST: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Fill slots with blocks of x and w, tile by tile."""
    x_slots, w_slots, full, empty = slots
    height: gl.constexpr = x.block_shape[0]
    block_depth: gl.constexpr = x.block_shape[1]
    width: gl.constexpr = w.block_shape[2] if DEPTH_FIRST else w.block_shape[1]
    step = 0
    for tile in range(gl.program_id(0), walk[2], gl.num_programs(0)):
        expert, start, _, row, column = _place_rows(walk, tile, _load_owner(walk, tile), height, GROUP)
        for block in range(blocks):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), (height + width) * block_depth * 2)
            deep = block * block_depth
            copy_in(x, [start + row, deep], full.index(slot), x_slots.index(slot))
            if DEPTH_FIRST:
                copy_in(w, [expert, deep, column * width], full.index(slot), w_slots.index(slot))
            else:
                copy_in(w, [expert, column * width, deep], full.index(slot), w_slots.index(slot))
            step += 1


@gluon.jit
def _multiply_rows(
    walk,
    slots,
    turns,
    target,
    blocks,
    DEPTH_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    PLACE: gl.constexpr,
):
    """Make every other tile."""
    x_slots, w_slots, full, empty = slots
    y, rooms, first_ptr = target
    height: gl.constexpr = x_slots.shape[1]
    outer: gl.constexpr = w_slots.shape[2]
    inner: gl.constexpr = w_slots.shape[3]
    width: gl.constexpr = inner if DEPTH_FIRST else outer
    product: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16])
    # On a arena of many layers there are fewer than 2**31 rows, if not numbers.
    shift = 0 if first_ptr is None else gl.load(first_ptr).to(gl.int32)
    programs = gl.num_programs(0)
    # Steps of the other multiplier's tiles are passed over.
    step = PLACE * blocks
    for tile in range(gl.program_id(0) + PLACE * programs, walk[2], 2 * programs):
        # On its way while the tile is multiplied: nobody needs it before.
        owner = _load_owner(walk, tile)
        sums = gl.zeros([height, width], gl.float32, product)
        mbarrier.wait(turns.index(PLACE), tile // (2 * programs) & 1 ^ 1 ^ PLACE)
        for block in range(blocks):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(full.index(slot), phase)
            w_block = w_slots.index(slot).reshape([outer, inner])
            if not DEPTH_FIRST:
                w_block = w_block.permute([1, 0])
            sums = hopper.warpgroup_mma(x_slots.index(slot), w_block, sums, is_async=True)
            sums = hopper.warpgroup_mma_wait(1, deps=[sums])
            before, _ = ring(step + STAGES - 1, STAGES)
            mbarrier.arrive(empty.index(before), count=1, pred=block > 0)
            step += 1
        mbarrier.arrive(turns.index(1 - PLACE), count=1)
        sums = hopper.warpgroup_mma_wait(0, deps=[sums])
        before, _ = ring(step + STAGES - 1, STAGES)
        mbarrier.arrive(empty.index(before), count=1)
        step += blocks
        _, start, end, row, column = _place_rows(walk, tile, owner, height, GROUP)
        place = start - end + row + SPAN
        result = sums.to(y.dtype)
        write_pieces(y, rooms, result, (gl.to_tensor(SPAN), end + shift), place, column * width, False, 0, PLACE)
    tma.store_wait(0)


@gluon.jit
def _load_owner(walk, tile):
    """Load whose tile it is: expert, its first row, the row past its last, its first block of rows."""
    owner_ptr = walk[0] + tile // walk[1] * 4
    return gl.load(owner_ptr), gl.load(owner_ptr + 1), gl.load(owner_ptr + 2), gl.load(owner_ptr + 3)


@gluon.jit
def _place_rows(walk, tile, owner, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Say which one it is: expert, its first row, the row past its last, the tile's row in it, how many across."""
    expert, start, end, first_block = owner
    row, column = swizzle(tile - first_block * walk[1], gl.cdiv(end - start, ROWS), walk[1], GROUP)
    return expert, start, end, row * ROWS, column


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
            (_multiply_weights, (walk, slots, turns, dw, rooms, STAGES, GROUP, ACCUMULATE, one)),
            (_multiply_weights, (walk, slots, turns, dw, rooms, STAGES, GROUP, ACCUMULATE, other)),
            (_load_weights, (walk, slots, dy, x, STAGES, GROUP)),
        ],
        [4, 1],
        [MULTIPLIER_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _load_weights(walk, slots, dy, x, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Fill slots with blocks of dy and x, tile by tile."""
    dy_slots, x_slots, full, empty = slots
    height: gl.constexpr = dy.block_shape[3]
    width: gl.constexpr = x.block_shape[3]
    depth: gl.constexpr = dy.block_shape[2]
    step = 0
    for tile in range(gl.program_id(0), walk[3], gl.num_programs(0)):
        start, end = _load_span(walk, tile)
        _, row, column = _place_weights(walk, tile, GROUP)
        for block in range(gl.cdiv(end - start, depth)):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), (height + width) * depth * 2)
            span, place = gl.to_tensor(SPAN), start - end + block * depth + SPAN
            copy_in(dy, [span, end, place, row * height], full.index(slot), dy_slots.index(slot))
            copy_in(x, [span, end, place, column * width], full.index(slot), x_slots.index(slot))
            step += 1


@gluon.jit
def _multiply_weights(
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
        expert, row, column = _place_weights(walk, tile, GROUP)
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
def _place_weights(walk, tile, GROUP: gl.constexpr):
    """Say which one it is: expert, and how many tiles down and across."""
    _, down, across, _ = walk
    row, column = swizzle(tile % (down * across), down, across, GROUP)
    return tile // (down * across), row, column
