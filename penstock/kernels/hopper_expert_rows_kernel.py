"""Hopper's own kernel for products of experts' rows in 16 bits: forward and the gradient of the input.

What trades warps have and how slots of a ring change hands is told in `penstock.kernels.hopper_ring`, and how
two multipliers take whole tiles in turns in `penstock.kernels.hopper_weight_gradient_kernel`.

The weight is read as the model has it. Where its contracted dim is the last one, as the rows' is, the matrix unit gets
a block's transpose; for the gradient of the input it is the first of the two, and a block is taken as it lies.

Descriptors of the result are ragged (`penstock.kernels.grouped_gemm_kernels`): rows past an expert's last are
multiplied, whatever they hold, and never written.
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
            (_multiply, (walk, slots, turns, target, blocks, DEPTH_FIRST, STAGES, GROUP, one)),
            (_multiply, (walk, slots, turns, target, blocks, DEPTH_FIRST, STAGES, GROUP, other)),
            (_load, (walk, slots, x, w, blocks, DEPTH_FIRST, STAGES, GROUP)),
        ],
        [4, 1],
        [MULTIPLIER_REGISTERS, LOADER_REGISTERS],
    )
    if first_ptr is None:
        tail = gl.load(starts_ptr + experts)
        zero_tail(y_ptr, gl.maximum(tail, rows - 1) if ONLY_LAST else tail, rows, columns, y.dtype)


@gluon.jit
def _load(walk, slots, x, w, blocks, DEPTH_FIRST: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Fill slots with blocks of x and w, tile by tile."""
    x_slots, w_slots, full, empty = slots
    height: gl.constexpr = x.block_shape[0]
    block_depth: gl.constexpr = x.block_shape[1]
    width: gl.constexpr = w.block_shape[2] if DEPTH_FIRST else w.block_shape[1]
    step = 0
    for tile in range(gl.program_id(0), walk[2], gl.num_programs(0)):
        expert, start, _, row, column = _place(walk, tile, _load_owner(walk, tile), height, GROUP)
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
def _multiply(
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
        _, start, end, row, column = _place(walk, tile, owner, height, GROUP)
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
def _place(walk, tile, owner, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Say which one it is: expert, its first row, the row past its last, the tile's row in it, how many across."""
    expert, start, end, first_block = owner
    row, column = swizzle(tile - first_block * walk[1], gl.cdiv(end - start, ROWS), walk[1], GROUP)
    return expert, start, end, row * ROWS, column
