"""Plain causal attention for Hopper, forward and backward.

`penstock.kernels.gluon.ring` describes the warps and the ring. Each of two consumers has 64 rows of a program's 128, so
that one has the matrix unit while the other computes exponentials. Heads of keys are 128 columns wide, or 192, which
are two blocks of shared memory. The softmax counts in powers of two, as in `penstock.kernels.bounded_attention`.

A program of forward has 128 queries, and starts the scores of the next block of keys before the weights of this one.

A program of backward has 128 keys of a head and walks over the blocks of 64 queries that see them, of every head of
their group. Scores are transposed, so weights and their gradients are operands in registers of the products for dv, dk:

    s = k q'    p = exp2(s - log_sums)    dv += p do    dp = v do'    ds = p (scale dp - delta)    dk += ds q
    dq += ds' k

dq of a block of queries needs the ds of both consumers. They exchange them in shared memory, and make dq of the block
before the one at hand, so that neither waits for the other. Each has some columns of it, which the copy engine adds to
sums in memory: 5 products instead of the 7 of two kernels, and sums in no fixed order.

With keys 192 wide the sums of dk and dv are 160 registers of a thread, so weights are kept in bfloat16 until their
gradients are there, and dp is started behind them; 128 wide, dp is made while they are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from penstock.kernels.gluon.ring import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    add_out,
    copy_in,
    make_barriers,
    places,
    ring,
)

# How the matrix unit spreads products of 64 rows over the threads of a consumer, and the first operand of a product.
NARROW = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
WIDE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
NARROW_OPERAND = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=NARROW.value, k_width=2))
WIDE_OPERAND = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=WIDE.value, k_width=2))
OF_QUERIES = gl.constexpr(gl.SliceLayout(0, NARROW.value))
OF_KEYS = gl.constexpr(gl.SliceLayout(1, NARROW.value))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
IN_A_ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # how they lie in a slot
LOG2E = gl.constexpr(1.4426950408889634)

# Triton 3.9 renamed it.
copy_numbers = vars(async_copy)["async_load" if "async_load" in vars(async_copy) else "async_copy_global_to_shared"]


@gluon.jit
def _place(positions, units, HEADS: gl.constexpr):
    """Row and head as one number, and a block of 128 positions.

    HEADS heads at a time, whose keys and queries stay in the L2 cache; of them one block after the other.
    """
    blocks = positions // 128
    first = gl.program_id(0) // (HEADS * blocks) * HEADS
    heads = gl.minimum(units - first, HEADS)
    within = gl.program_id(0) % (HEADS * blocks)
    return first + within % heads, within // heads


@gluon.jit
def _here(x):
    """A number that the compiler does not know, so that it keeps nothing in registers that is made of it."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, $1;", "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _rounded(x):
    """In bfloat16, two numbers in a register."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _widened(x):
    """In float32; the compiler itself would do this too early and keep both."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def _start_scores(one, one_rest, other, other_rest, LAYOUT: gl.constexpr, REST: gl.constexpr):
    """Start the products of all rows of two blocks, each in two parts with REST."""
    height: gl.constexpr = one.shape[0]
    width: gl.constexpr = other.shape[0]
    s = gl.zeros([height, width], gl.float32, LAYOUT)
    s = hopper.warpgroup_mma(one, other.permute([1, 0]), s, use_acc=False, is_async=True)
    if REST > 0:
        s = hopper.warpgroup_mma(one_rest, other_rest.permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def _allocate(source, rest, COUNT: gl.constexpr, REST: gl.constexpr):
    """Slots for blocks of a descriptor, and for their second parts with REST."""
    height: gl.constexpr = source.block_shape[0]
    width: gl.constexpr = source.block_shape[1]
    slots = gl.allocate_shared_memory(source.dtype, [COUNT, height, width], source.layout)
    more = slots
    if REST > 0:
        more = gl.allocate_shared_memory(rest.dtype, [COUNT, height, REST], rest.layout)
    return slots, more


@gluon.jit
def _copy_in(source, rest, row, head, ready, slot, more, REST: gl.constexpr):
    """Copy a block of rows of a head, and its second part with REST."""
    width: gl.constexpr = source.block_shape[1]
    copy_in(source, [row, head * (width + REST)], ready, slot)
    if REST > 0:
        copy_in(rest, [row, head * (width + REST) + width], ready, more)


@gluon.jit
def _write(ptr, block, stride, LAYOUT: gl.constexpr):
    """Write the rows of a block."""
    row = gl.arange(0, block.shape[0], gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, block.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(ptr + row[:, None] * stride + column[None, :], block)


@gluon.jit(do_not_specialize=["positions", "rows"])
def causal_forward_kernel(
    q, q_rest, k, k_rest, v, o_ptr, sums_ptr, positions, rows, scale,
    H: gl.constexpr, G: gl.constexpr, REST: gl.constexpr, V_STEP: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """128 queries of a head and the keys before them, from their own block back to the first one.

    q, k and v are descriptors of 64, 128 and 128 positions by the columns of a head, or those but the last REST, which
    q_rest and k_rest describe; heads of v are V_STEP columns apart. o is rows x positions x H x columns of v, log_sums
    rows x H x positions.
    """
    unit, turn = _place(positions, rows * H, HEADS)
    place = (unit // H, unit % H, positions // 128 - 1 - turn, positions)  # the longest first
    q1, q2 = _allocate(q, q_rest, 2, REST)
    k1, k2 = _allocate(k, k_rest, STAGES, REST)
    values, _ = _allocate(v, v, STAGES, 0)
    q_full, _ = make_barriers(1, 1)
    slots = (q1, q2, k1, k2, values, q_full, make_barriers(STAGES, 2), make_barriers(STAGES, 2))
    sources = (q, q_rest, k, k_rest, v)
    one: gl.constexpr = 0
    other: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_attend, (place, slots, o_ptr, sums_ptr, scale, H, REST, one)),
            (_attend, (place, slots, o_ptr, sums_ptr, scale, H, REST, other)),
            (_load_keys, (place, slots, sources, H, G, REST, V_STEP)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _load_keys(
    place, slots, sources, H: gl.constexpr, G: gl.constexpr, REST: gl.constexpr, V_STEP: gl.constexpr
):  # fmt: skip
    """Copy the queries, then block by block the keys and values."""
    row, head, last, positions = place
    q1, q2, k1, k2, values, q_full, k_barriers, v_barriers = slots
    q, q_rest, k, k_rest, v = sources
    k_full, k_empty = k_barriers
    v_full, v_empty = v_barriers
    STAGES: gl.constexpr = k1.shape[0]
    group = head // (H // G)
    mbarrier.expect(q_full.index(0), 256 * (q1.shape[2] + REST))
    for half in gl.static_range(2):
        position = row * positions + last * 128 + half * 64
        _copy_in(q, q_rest, position, head, q_full.index(0), q1.index(half), q2.index(half), REST)
    for turn in range(last + 1):
        slot, phase = ring(turn, STAGES)
        position = row * positions + (last - turn) * 128
        mbarrier.wait(k_empty.index(slot), phase ^ 1)
        mbarrier.expect(k_full.index(slot), 256 * (k1.shape[2] + REST))
        _copy_in(k, k_rest, position, group, k_full.index(slot), k1.index(slot), k2.index(slot), REST)
        mbarrier.wait(v_empty.index(slot), phase ^ 1)
        mbarrier.expect(v_full.index(slot), 256 * values.shape[2])
        copy_in(v, [position, group * V_STEP], v_full.index(slot), values.index(slot))


@gluon.jit
def _attend(place, slots, o_ptr, sums_ptr, scale, H: gl.constexpr, REST: gl.constexpr, PLACE: gl.constexpr):
    """Output and log_sums of 64 queries."""
    row, head, last, positions = place
    q1, q2, k1, k2, values, q_full, k_barriers, v_barriers = slots
    k_full, k_empty = k_barriers
    v_full, v_empty = v_barriers
    STAGES: gl.constexpr = k1.shape[0]
    width: gl.constexpr = values.shape[2]
    down: gl.constexpr = gl.SliceLayout(1, WIDE)
    scale *= LOG2E
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = _start_scores(q1.index(PLACE), q2.index(PLACE), k1.index(0), k2.index(0), WIDE, REST)
    s = hopper.warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(0), count=1)
    behind = gl.arange(0, 128, gl.SliceLayout(0, WIDE))[None, :] - gl.arange(0, 64, down)[:, None]
    s = gl.where(behind <= PLACE * 64, s, float("-inf"))
    most = gl.max(s, 1) * scale
    p = gl.exp2(s * scale - most[:, None])
    total = gl.sum(p, 1)
    operand = gl.convert_layout(_rounded(p), WIDE_OPERAND)
    o = gl.zeros([64, width], gl.float32, WIDE)
    for turn in range(1, last + 1):
        slot, phase = ring(turn, STAGES)
        before, before_phase = ring(turn - 1, STAGES)
        mine = _here(PLACE)
        mbarrier.wait(k_full.index(slot), phase)
        s_next = _start_scores(q1.index(mine), q2.index(mine), k1.index(slot), k2.index(slot), WIDE, REST)
        mbarrier.wait(v_full.index(before), before_phase)
        o = hopper.warpgroup_mma(operand, values.index(before), o, is_async=True)
        s = hopper.warpgroup_mma_wait(1, deps=[s_next])
        mbarrier.arrive(k_empty.index(slot), count=1)
        higher = gl.maximum(most, gl.max(s, 1) * scale)
        p = gl.exp2(s * scale - higher[:, None])
        shrink = gl.exp2(most - higher)
        total = total * shrink + gl.sum(p, 1)
        most = higher
        o = hopper.warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_empty.index(before), count=1)
        o = o * shrink[:, None]
        operand = gl.convert_layout(_rounded(p), WIDE_OPERAND)
    slot, phase = ring(last, STAGES)
    mbarrier.wait(v_full.index(slot), phase)
    o = hopper.warpgroup_mma(operand, values.index(slot), o, is_async=True)
    o = hopper.warpgroup_mma_wait(0, deps=[o])
    first = last * 128 + PLACE * 64
    corner = ((row * positions + first).to(gl.int64) * H + head) * width
    _write(o_ptr + corner, (o / total[:, None]).to(values.dtype), H * width, WIDE)
    numbers = (row * H + head).to(gl.int64) * positions + first + gl.arange(0, 64, down)
    gl.store(sums_ptr + numbers, most + gl.log2(total))


@gluon.jit(do_not_specialize=["positions", "rows"])
def causal_backward_kernel(
    q, q_rest, k, k_rest, v, do, sums_ptr, delta_ptr, dq, dk_ptr, dv_ptr, positions, rows, scale,
    H: gl.constexpr, G: gl.constexpr, REST: gl.constexpr, V_STEP: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """128 keys of a head: dk and dv, and their part of dq, which is added to float32 sums.

    q, k, v and do are descriptors of 64 positions, as in `causal_forward_kernel`, and dq of 64 by 64; log_sums, and
    delta = scale (do . o), are rows x H x positions. dk and dv have the shapes of k and v.
    """
    unit, block = _place(positions, rows * G, HEADS)  # the first keys have most queries
    place = (unit // G, unit % G, block, positions)
    k1, k2 = _allocate(k, k_rest, 2, REST)
    values, _ = _allocate(v, v, 2, 0)
    q1, q2 = _allocate(q, q_rest, STAGES, REST)
    gradients, _ = _allocate(do, do, STAGES, 0)
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, 64], IN_A_ROW)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, 64], IN_A_ROW)
    keys_full, _ = make_barriers(1, 1)
    full, empty = make_barriers(STAGES, 2, 33)  # 32 threads that copy numbers, and 1 for the bytes of blocks
    keys = (k1, k2, values, keys_full)
    slots = (q1, q2, gradients, sums, deltas, full, empty)
    exchange = (gl.allocate_shared_memory(q.dtype, [4, 64, 64], SWIZZLED), make_barriers(2, 2, 2))
    target = (dq, gl.allocate_shared_memory(gl.float32, [2, 64, 64], dq.layout))
    sources = (q, q_rest, k, k_rest, v, do, sums_ptr, delta_ptr)
    one: gl.constexpr = 0
    other: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_differentiate, (place, keys, slots, exchange, target, dk_ptr, dv_ptr, scale, H, G, REST, one)),
            (_differentiate, (place, keys, slots, exchange, target, dk_ptr, dv_ptr, scale, H, G, REST, other)),
            (_load_queries, (place, keys, slots, sources, H, G, REST, V_STEP)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _turns(place, H: gl.constexpr, G: gl.constexpr):
    """Blocks of queries of a head that see the keys, and of all heads of the group."""
    _, _, block, positions = place
    count = positions // 64 - block * 2
    return count, count * (H // G)


@gluon.jit
def _queries(place, turn, count, H: gl.constexpr, G: gl.constexpr):
    """Head of a turn, its block of queries, counted from the first one of the keys, and its first position."""
    _, group, block, _ = place
    head, ahead = group, turn
    if H > G:
        head, ahead = group * (H // G) + turn // count, turn % count
    return head, ahead, (block * 2 + ahead) * 64


@gluon.jit
def _load_queries(
    place, keys, slots, sources, H: gl.constexpr, G: gl.constexpr, REST: gl.constexpr, V_STEP: gl.constexpr
):  # fmt: skip
    """Copy the keys and values, then block by block the queries, do, log_sums and delta."""
    row, group, block, positions = place
    k1, k2, values, keys_full = keys
    q1, q2, gradients, sums, deltas, full, empty = slots
    q, q_rest, k, k_rest, v, do, sums_ptr, delta_ptr = sources
    STAGES: gl.constexpr = q1.shape[0]
    columns: gl.constexpr = q1.shape[2] + REST + values.shape[2]
    ready = keys_full.index(0)
    mbarrier.expect(ready, 256 * columns)
    for half in gl.static_range(2):
        position = row * positions + block * 128 + half * 64
        _copy_in(k, k_rest, position, group, ready, k1.index(half), k2.index(half), REST)
        copy_in(v, [position, group * V_STEP], ready, values.index(half))
    count, turns = _turns(place, H, G)
    for turn in range(turns):
        slot, phase = ring(turn, STAGES)
        head, _, position = _queries(place, turn, count, H, G)
        numbers = (row * H + head) * positions + position + places(64)
        mbarrier.wait(empty.index(slot), phase ^ 1)
        ready = full.index(slot)
        mbarrier.expect(ready, 128 * columns)
        position += row * positions
        _copy_in(q, q_rest, position, head, ready, q1.index(slot), q2.index(slot), REST)
        copy_in(do, [position, head * gradients.shape[2]], ready, gradients.index(slot))
        copy_numbers(sums.index(slot), sums_ptr + numbers)
        copy_numbers(deltas.index(slot), delta_ptr + numbers)
        async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def _differentiate(
    place, keys, slots, exchange, target, dk_ptr, dv_ptr, scale,
    H: gl.constexpr, G: gl.constexpr, REST: gl.constexpr, PLACE: gl.constexpr,
):  # fmt: skip
    """Gradients of 64 keys and values, and of some columns of queries."""
    k1, k2, values, keys_full = keys
    q1, q2, gradients, sums, deltas, full, empty = slots
    ds_slots, ds_barriers = exchange
    ds_full, ds_empty = ds_barriers
    STAGES: gl.constexpr = q1.shape[0]
    count, turns = _turns(place, H, G)
    key_width: gl.constexpr = k1.shape[2]
    value_width: gl.constexpr = values.shape[2]
    dk = gl.zeros([64, key_width], gl.float32, WIDE)
    dk_rest = gl.zeros([64, 64], gl.float32, NARROW)
    dv = gl.zeros([64, value_width], gl.float32, WIDE)
    mbarrier.wait(keys_full.index(0), 0)
    for turn in range(turns):
        slot, phase = ring(turn, STAGES)
        kept, kept_phase = ring(turn, 2)
        mine = _here(PLACE)
        do = gradients.index(slot)
        mbarrier.wait(full.index(slot), phase)
        s = _start_scores(k1.index(mine), k2.index(mine), q1.index(slot), q2.index(slot), NARROW, REST)
        if REST == 0:
            dp = _start_scores(values.index(mine), values.index(mine), do, do, NARROW, 0)
        s = hopper.warpgroup_mma_wait(1 if REST == 0 else 0, deps=[s])
        p = gl.exp2(s * (scale * LOG2E) - sums.index(slot).load(OF_QUERIES)[None, :])
        _, ahead, _ = _queries(place, turn, count, H, G)
        if ahead < 2:
            # What depends on the thread stays in few registers, and the rest are constants.
            query = gl.arange(0, 64, OF_QUERIES)
            before = gl.arange(0, 64, OF_KEYS)[:, None] - (query % 8)[None, :]
            p = gl.where(before <= (query // 8 * 8 + _here(ahead - PLACE) * 64)[None, :], p, 0.0)
        weights = _rounded(p)
        dv = hopper.warpgroup_mma(gl.convert_layout(weights, NARROW_OPERAND), do, dv, is_async=True)
        if REST == 0:
            dp = hopper.warpgroup_mma_wait(1, deps=[dp])
        else:
            dp = _start_scores(values.index(mine), values.index(mine), do, do, NARROW, 0)
            dp = hopper.warpgroup_mma_wait(0, deps=[dp])
            p = _widened(weights)
        ds = _rounded(p * (dp * scale - deltas.index(slot).load(OF_QUERIES)[None, :]))
        mbarrier.wait(ds_empty.index(kept), kept_phase ^ 1)
        ds_slots.index(kept * 2 + PLACE).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(kept), count=1)
        operand = gl.convert_layout(ds, NARROW_OPERAND)
        dk = hopper.warpgroup_mma(operand, q1.index(slot), dk, is_async=True)
        if REST > 0:
            dk_rest = hopper.warpgroup_mma(operand, q2.index(slot), dk_rest, is_async=True)
        if turn > 0:
            _add_query_gradient(place, k1, k2, exchange, target, turn - 1, count, H, G, REST, PLACE)
        dk, dk_rest, dv = hopper.warpgroup_mma_wait(0, deps=[dk, dk_rest, dv])
        mbarrier.arrive(empty.index(slot), count=1)
    _add_query_gradient(place, k1, k2, exchange, target, turns - 1, count, H, G, REST, PLACE)
    tma.store_wait(0)
    row, group, block, positions = place
    first = (row * positions + block * 128 + PLACE * 64).to(gl.int64) * G + group
    dk_ptr += first * (key_width + REST)
    _write(dk_ptr, dk.to(k1.dtype), G * (key_width + REST), WIDE)
    if REST > 0:
        _write(dk_ptr + key_width, dk_rest.to(k1.dtype), G * (key_width + REST), NARROW)
    _write(dv_ptr + first * value_width, dv.to(k1.dtype), G * value_width, WIDE)


@gluon.jit
def _add_query_gradient(
    place, k1, k2, exchange, target, turn, count,
    H: gl.constexpr, G: gl.constexpr, REST: gl.constexpr, PLACE: gl.constexpr,
):  # fmt: skip
    """Add the consumer's columns of dq of a turn: 64 of the first 128, and all others in every second turn."""
    row, _, _, positions = place
    _, ds_barriers = exchange
    ds_full, ds_empty = ds_barriers
    kept, phase = ring(turn, 2)
    head, _, position = _queries(place, turn, count, H, G)
    position += row * positions
    column = head * (k1.shape[2] + REST)
    zero = _here(0)
    mbarrier.wait(ds_full.index(kept), phase)
    one = k1.index(zero).slice(PLACE * 64, 64, dim=1)
    other = k1.index(zero + 1).slice(PLACE * 64, 64, dim=1)
    _add_columns(exchange, kept, one, other, target, [position, column + PLACE * 64], PLACE)
    if REST > 0:  # noqa: SIM102 (the compiler decides this one, the program the other)
        if turn % 2 == PLACE:
            at = [position, column + k1.shape[2]]
            _add_columns(exchange, kept, k2.index(zero), k2.index(zero + 1), target, at, PLACE)
    mbarrier.arrive(ds_empty.index(kept), count=1)


@gluon.jit
def _add_columns(exchange, kept, one, other, target, at, PLACE: gl.constexpr):
    """Add 64 columns of dq, from those columns of both consumers' keys."""
    ds_slots, _ = exchange
    sums, pieces = target
    dq = gl.zeros([64, 64], gl.float32, NARROW)
    dq = hopper.warpgroup_mma(ds_slots.index(kept * 2).permute([1, 0]), one, dq, use_acc=False, is_async=True)
    dq = hopper.warpgroup_mma(ds_slots.index(kept * 2 + 1).permute([1, 0]), other, dq, is_async=True)
    dq = hopper.warpgroup_mma_wait(0, deps=[dq])
    tma.store_wait(0)  # the copy engine may still read the columns before
    pieces.index(PLACE).store(dq)
    fence_async_shared()
    add_out(sums, at, pieces.index(PLACE))
