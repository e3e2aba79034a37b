"""Hopper kernels for grouped products in 16 bits: rows times the matrix of their expert, and gradients of weights.

The warps and the ring of slots are described below. The two consumers take whole tiles in turns, so that one writes
while the other multiplies. They read the ring in the order of tiles, and a barrier has only two phases, so a consumer
must not wait for a slot before all earlier slots were full: the barriers `turns` see to that. Sums stay in registers
for a whole tile, and one product is always queued behind the running one: a slot is free when the next product has been
started and its own is done.

`expert_rows_kernel` reads the weight as the model stores it. Where its contracted dim is the last one, like that of
the rows, the matrix unit reads the transpose of a block; for the gradient of the input the contracted dim is the first.
In `weight_gradient_kernel` both operands have the contracted dim, an expert's rows, first in memory: a slot holds
columns of dy and of x for some rows, and the matrix unit reads dy transposed.

Descriptors of rows are ragged (`penstock.kernels.grouped_gemm_kernels`): past an expert's last row they read zeros and
write nothing.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, ir
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Device functions that the Hopper products share: the ring of slots between warps, and writing results.
#
# Triton's compiler lets all warps of a program do the same at the same time, so matrix units idle while others load,
# scale or write. In these kernels a program has a multiprocessor for itself, and its warps are specialized:
#
#     producer            one warp, copies blocks of both operands into a ring of STAGES slots
#     consumers           two or three, four warps each, which multiply independently of each other
#
# In 8 bits (`float8_gemm_kernels`) each consumer has a part of every tile: while one scales, the product of another is
# in the matrix unit. In 16 bits (`grouped_gemm_kernels`) consumers take whole tiles in turns: while one writes, the
# other multiplies.
#
# Slots are handed over by barriers in shared memory: `full` counts the bytes that arrive, `empty` the consumers that
# have read a slot. Steps are counted over all tiles of a program, so nothing is reset between tiles, and the producer
# loads the next tile while results are written.

# Registers of a thread: a multiprocessor's 65536 are given to groups of four warps.
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
SPAN = gl.constexpr(2**30)  # end of the rows of a ragged descriptor; see `penstock.kernels.grouped_gemm_kernels`
LINE = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))  # how the numbers of a row are spread over threads
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # how numbers beside blocks are spread over the producer

# Triton 3.9 renamed them.
copy_in = vars(tma)["async_load" if "async_load" in vars(tma) else "async_copy_global_to_shared"]
copy_out = vars(tma)["async_store" if "async_store" in vars(tma) else "async_copy_shared_to_global"]


@builtin
def add_out(target: Any, coordinates: Any, slot: Any, _semantic: Any = None) -> None:
    """Add a slot to a block in memory by the copy engine: `tma.async_atomic_add` of Triton 3.9; 3.6 has none."""
    places = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, places, slot.handle)


@gluon.jit
def ring(step, STAGES: gl.constexpr):
    """Slot of a step, and the phase of its barriers: consumers wait for this phase, the producer for the other."""
    return step % STAGES, step // STAGES & 1


@gluon.jit
def make_barriers(STAGES: gl.constexpr, READERS: gl.constexpr = 2, WRITERS: gl.constexpr = 1):
    """Barriers of the slots: `full` after WRITERS arrivals and all bytes, `empty` after READERS arrivals."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=WRITERS)
        mbarrier.init(empty.index(slot), count=READERS)
    fence_async_shared()  # the copy engine sees the barriers too
    return full, empty


@gluon.jit
def make_turns():
    """Barriers of two consumers that pass through a ring in turns: each is arrived at when its consumer may go on."""
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    return turns


@gluon.jit
def swizzle(tile, tiles_down, tiles_across, GROUP: gl.constexpr):
    """As `penstock.kernels.grouped_gemm_kernels.swizzle`."""
    group = tile // (GROUP * tiles_across)
    height = gl.minimum(tiles_down - group * GROUP, GROUP)
    within = tile % (GROUP * tiles_across)
    return group * GROUP + within % height, within // height


@gluon.jit
def write_pieces(
    target, buffers, block, lead, row, column, ADD: gl.constexpr, PIECE: gl.constexpr, PLACE: gl.constexpr
):
    """Write or add a consumer's result, halved until a piece has the size of the descriptor's block.

    While the copy engine writes or adds a piece, the next one goes into the other of the consumer's two buffers. `lead`
    is the place of a piece in all but the last two dims of the descriptor; the first piece has PIECE 0.
    """
    height: gl.constexpr = target.block_shape[len(target.block_shape) - 2]
    width: gl.constexpr = target.block_shape[len(target.block_shape) - 1]
    down: gl.constexpr = block.shape[0] // 2
    across: gl.constexpr = block.shape[1] // 2
    if block.shape[0] > height:
        half, other = gl.split(gl.permute(gl.reshape(block, [2, down, 2 * across]), [1, 2, 0]))
        write_pieces(target, buffers, half, lead, row, column, ADD, 2 * PIECE, PLACE)
        write_pieces(target, buffers, other, lead, row + down, column, ADD, 2 * PIECE + 1, PLACE)
    elif block.shape[1] > width:
        half, other = gl.split(gl.permute(gl.reshape(block, [2 * down, 2, across]), [0, 2, 1]))
        write_pieces(target, buffers, half, lead, row, column, ADD, 2 * PIECE, PLACE)
        write_pieces(target, buffers, other, lead, row, column + across, ADD, 2 * PIECE + 1, PLACE)
    else:
        # The copy engine may still read the previous piece, from the other buffer.
        buffer = buffers.index(2 * PLACE + PIECE % 2)
        tma.store_wait(1)
        buffer.reshape([2 * down, 2 * across]).store(block.to(target.dtype))
        fence_async_shared()
        coordinates = lead + (row, column)  # noqa: RUF005 (the compiler knows no starred expressions)
        if ADD:
            add_out(target, coordinates, buffer)
        else:
            copy_out(target, coordinates, buffer)


@gluon.jit
def zero_tail(y_ptr, tail, rows, columns, DTYPE: gl.constexpr):
    """Set rows from `tail` on to zero; programs take turns, a row at a time."""
    for row in range(tail + gl.program_id(0), rows, gl.num_programs(0)):
        row_ptr = y_ptr + row * columns.to(gl.int64)
        for first in range(0, columns, 1024):
            across = first + gl.arange(0, 1024, LINE)
            gl.store(row_ptr + across, gl.zeros([1024], DTYPE, LINE), mask=across < columns)


@gluon.jit
def places(COUNT: gl.constexpr):
    """0 to COUNT, computed where it is used.

    The assembler would compute a thread's part of a plain range before warps specialize, and keep it in memory, because
    consumers leave no register for it.
    """
    firsts = gl.arange(0, COUNT, LANES) // 32 * 32
    return gl.inline_asm_elementwise(
        "{ .reg .b32 lane; mov.u32 lane, %laneid; add.s32 $0, lane, $1; }",
        "=r,r",
        [firsts],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit(do_not_specialize=["rows", "experts"])
def expert_rows_kernel(
    x, w, y, y_ptr, starts_ptr, owners_ptr, block_count_ptr, first_ptr,
    rows, columns, depth, experts,
    DEPTH_FIRST: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ONLY_LAST: gl.constexpr,
):  # fmt: skip
    """Multiply each row of x by the matrix of its expert; set rows of the tail to zero, or with ONLY_LAST the last one.

    x is rows x depth, w experts x columns x depth, or experts x depth x columns if DEPTH_FIRST, y rows x columns. All
    three are descriptors: of a tile's rows of x, of its columns of w, and of a piece of the result, which is ragged;
    y_ptr is the pointer. With `first_ptr` rows are written from that row of y on, and there is no tail.
    """
    height: gl.constexpr = x.block_shape[0]
    block_depth: gl.constexpr = x.block_shape[1]
    width: gl.constexpr = w.block_shape[2] if DEPTH_FIRST else w.block_shape[1]
    across = gl.cdiv(columns, width)
    schedule = (owners_ptr, across, gl.load(block_count_ptr) * across)
    blocks = gl.cdiv(depth, block_depth)
    x_slots = gl.allocate_shared_memory(x.dtype, [STAGES, height, block_depth], x.layout)
    w_slots = gl.allocate_shared_memory(w.dtype, [STAGES, 1, w.block_shape[1], w.block_shape[2]], w.layout)
    buffers = gl.allocate_shared_memory(y.dtype, [4, 1, 1, y.block_shape[2], y.block_shape[3]], y.layout)
    full, empty = make_barriers(STAGES, 1)
    slots = (x_slots, w_slots, full, empty)
    turns = make_turns()
    target = (y, buffers, first_ptr)
    first: gl.constexpr = 0
    other: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply_rows, (schedule, slots, turns, target, blocks, DEPTH_FIRST, STAGES, GROUP, first)),
            (_multiply_rows, (schedule, slots, turns, target, blocks, DEPTH_FIRST, STAGES, GROUP, other)),
            (_load_rows, (schedule, slots, x, w, blocks, DEPTH_FIRST, STAGES, GROUP)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
    if first_ptr is None:
        tail = gl.load(starts_ptr + experts)
        zero_tail(y_ptr, gl.maximum(tail, rows - 1) if ONLY_LAST else tail, rows, columns, y.dtype)


@gluon.jit
def _load_rows(schedule, slots, x, w, blocks, DEPTH_FIRST: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Fill slots with blocks of x and w, tile by tile."""
    x_slots, w_slots, full, empty = slots
    height: gl.constexpr = x.block_shape[0]
    block_depth: gl.constexpr = x.block_shape[1]
    width: gl.constexpr = w.block_shape[2] if DEPTH_FIRST else w.block_shape[1]
    step = 0
    for tile in range(gl.program_id(0), schedule[2], gl.num_programs(0)):
        expert, start, _, row, column = _place_rows(schedule, tile, _load_owner(schedule, tile), height, GROUP)
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
    schedule, slots, turns, target, blocks,
    DEPTH_FIRST: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, PLACE: gl.constexpr,
):  # fmt: skip
    """Make every other tile."""
    x_slots, w_slots, full, empty = slots
    y, buffers, first_ptr = target
    height: gl.constexpr = x_slots.shape[1]
    outer: gl.constexpr = w_slots.shape[2]
    inner: gl.constexpr = w_slots.shape[3]
    width: gl.constexpr = inner if DEPTH_FIRST else outer
    product: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16])
    # A buffer of many layers has fewer than 2**31 rows, though more numbers.
    shift = 0 if first_ptr is None else gl.load(first_ptr).to(gl.int32)
    programs = gl.num_programs(0)
    # Skip the steps of the other consumer's tiles.
    step = PLACE * blocks
    for tile in range(gl.program_id(0) + PLACE * programs, schedule[2], 2 * programs):
        # Loaded while the tile is multiplied; it is used after.
        owner = _load_owner(schedule, tile)
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
        _, start, end, row, column = _place_rows(schedule, tile, owner, height, GROUP)
        position = start - end + row + SPAN
        result = sums.to(y.dtype)
        write_pieces(y, buffers, result, (gl.to_tensor(SPAN), end + shift), position, column * width, False, 0, PLACE)
    tma.store_wait(0)


@gluon.jit
def _load_owner(schedule, tile):
    """Load the owner of a tile: expert, its first row, the row past its last, its first block of rows."""
    owner_ptr = schedule[0] + tile // schedule[1] * 4
    return gl.load(owner_ptr), gl.load(owner_ptr + 1), gl.load(owner_ptr + 2), gl.load(owner_ptr + 3)


@gluon.jit
def _place_rows(schedule, tile, owner, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Place of a tile: expert, its first row, the row past its last, the tile's row in it, its number across."""
    expert, start, end, first_block = owner
    row, column = swizzle(tile - first_block * schedule[1], gl.cdiv(end - start, ROWS), schedule[1], GROUP)
    return expert, start, end, row * ROWS, column


@gluon.jit(do_not_specialize=["experts"])
def weight_gradient_kernel(
    dy, x, dw, starts_ptr, rows, columns, experts, STAGES: gl.constexpr, GROUP: gl.constexpr, ACCUMULATE: gl.constexpr
):
    """Multiply the transpose of each expert's rows of dy by its rows of x; add to dw if ACCUMULATE.

    dw is experts x rows x columns, so dy is as wide as dw has rows, and x as wide as dw has columns. All three are
    descriptors: of a tile's rows of dw, of its columns, and of a piece of the result. `starts_ptr` has the first row of
    each expert, and the end of the last one's. A sum does not change where an expert has no rows.
    """
    height: gl.constexpr = dy.block_shape[3]
    width: gl.constexpr = x.block_shape[3]
    depth: gl.constexpr = dy.block_shape[2]
    down = gl.cdiv(rows, height)
    across = gl.cdiv(columns, width)
    tiles = down * across * experts
    if ACCUMULATE:
        tiles *= (gl.load(starts_ptr + experts) > gl.load(starts_ptr)).to(gl.int32)  # no rows change no sum
    schedule = (starts_ptr, down, across, tiles)
    dy_slots = gl.allocate_shared_memory(dy.dtype, [STAGES, 1, 1, depth, height], dy.layout)
    x_slots = gl.allocate_shared_memory(x.dtype, [STAGES, 1, 1, depth, width], x.layout)
    buffers = gl.allocate_shared_memory(dw.dtype, [4, 1, dw.block_shape[1], dw.block_shape[2]], dw.layout)
    full, empty = make_barriers(STAGES, 1)
    slots = (dy_slots, x_slots, full, empty)
    turns = make_turns()
    first: gl.constexpr = 0
    other: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply_weights, (schedule, slots, turns, dw, buffers, STAGES, GROUP, ACCUMULATE, first)),
            (_multiply_weights, (schedule, slots, turns, dw, buffers, STAGES, GROUP, ACCUMULATE, other)),
            (_load_weights, (schedule, slots, dy, x, STAGES, GROUP)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _load_weights(schedule, slots, dy, x, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Fill slots with blocks of dy and x, tile by tile."""
    dy_slots, x_slots, full, empty = slots
    height: gl.constexpr = dy.block_shape[3]
    width: gl.constexpr = x.block_shape[3]
    depth: gl.constexpr = dy.block_shape[2]
    step = 0
    for tile in range(gl.program_id(0), schedule[3], gl.num_programs(0)):
        start, end = _load_span(schedule, tile)
        _, row, column = _place_weights(schedule, tile, GROUP)
        for block in range(gl.cdiv(end - start, depth)):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), (height + width) * depth * 2)
            span, position = gl.to_tensor(SPAN), start - end + block * depth + SPAN
            copy_in(dy, [span, end, position, row * height], full.index(slot), dy_slots.index(slot))
            copy_in(x, [span, end, position, column * width], full.index(slot), x_slots.index(slot))
            step += 1


@gluon.jit
def _multiply_weights(
    schedule, slots, turns, dw, buffers,
    STAGES: gl.constexpr, GROUP: gl.constexpr, ACCUMULATE: gl.constexpr, PLACE: gl.constexpr,
):  # fmt: skip
    """Make every other tile."""
    dy_slots, x_slots, full, empty = slots
    depth: gl.constexpr = dy_slots.shape[3]
    height: gl.constexpr = dy_slots.shape[4]
    width: gl.constexpr = x_slots.shape[4]
    product: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16])
    programs = gl.num_programs(0)
    step = 0
    for tile in range(gl.program_id(0) + PLACE * programs, schedule[3], 2 * programs):
        # Skip the steps of the other consumer's tiles.
        if PLACE == 1:
            step += _blocks_of(schedule, tile - programs, depth)
        # Not carried from tile to tile: Triton 3.6 keeps the first tile's value of a bound that only an inner loop
        # reads.
        start, end = _load_span(schedule, tile)
        expert, row, column = _place_weights(schedule, tile, GROUP)
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
            # After the last tile the count is not used.
            step += _blocks_of(schedule, gl.minimum(tile + programs, schedule[3] - 1), depth)
        if (end > start) | (not ACCUMULATE):
            write_pieces(dw, buffers, sums, (expert,), row * height, column * width, ACCUMULATE, 0, PLACE)
    tma.store_wait(0)


@gluon.jit
def _blocks_of(schedule, tile, DEPTH: gl.constexpr):
    """Load the number of blocks of a tile's expert."""
    start, end = _load_span(schedule, tile)
    return gl.cdiv(end - start, DEPTH)


@gluon.jit
def _load_span(schedule, tile):
    """Load the first row of a tile's expert and the row past its last."""
    starts_ptr, down, across, _ = schedule
    start_ptr = starts_ptr + tile // (down * across)
    return gl.load(start_ptr), gl.load(start_ptr + 1)


@gluon.jit
def _place_weights(schedule, tile, GROUP: gl.constexpr):
    """Place of a tile: expert, and its number down and across."""
    _, down, across, _ = schedule
    row, column = swizzle(tile % (down * across), down, across, GROUP)
    return tile // (down * across), row, column
