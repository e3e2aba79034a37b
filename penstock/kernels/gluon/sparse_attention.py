"""Forward of sparse attention for Hopper; `penstock.kernels.sparse_attention_kernels` has the general one.

Triton's compiler gives each group of four warps all 64 x 64 scores, which doubles that product. Here both groups have
half of the keys' scores, exchange probabilities through shared memory, and have half of the columns of the output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

# Triton 3.9 renamed them.
copy_rows = vars(async_copy)["async_load" if "async_load" in vars(async_copy) else "async_copy_global_to_shared"]
barrier = vars(gl)["barrier" if "barrier" in vars(gl) else "thread_barrier"]

WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16]))
STACKED = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _keys(keys_ptr, first, count):
    """Numbers of a block's keys, for the copies of both widths; 0 past the last one."""
    wide = first + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    narrow = first + gl.arange(0, 64, gl.SliceLayout(1, NARROW))
    return (
        gl.load(keys_ptr + wide, mask=wide < count, other=0),
        gl.load(keys_ptr + narrow, mask=narrow < count, other=0),
    )


@gluon.jit
def _gather(latent_ptr, rope_ptr, keys, k_slot, rope_slot):
    """Start copying the rows of a block."""
    wide = gl.arange(0, 512, gl.SliceLayout(0, WIDE))
    narrow = gl.arange(0, 64, gl.SliceLayout(0, NARROW))
    copy_rows(rope_slot, rope_ptr + keys[1][:, None] * 64 + narrow[None, :])
    copy_rows(k_slot, latent_ptr + keys[0][:, None] * 512 + wide[None, :])
    async_copy.commit_group()


@gluon.jit
def sparse_forward_hopper_kernel(
    q_ptr, q_rope_ptr, latent_ptr, rope_ptr, keys_ptr, firsts_ptr, o_ptr, log_sums_ptr, q_step, o_step, positions,
    scale, H: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """64 heads of a query, blocks of 64 keys: `sparse_forward_kernel` for latents of 512 columns and 64 rotary ones."""
    position = (gl.program_id(0) // (H // 64)).to(gl.int64)
    first_head = (gl.program_id(0) % (H // 64) * 64).to(gl.int64)
    count = gl.minimum(K, position % positions - gl.load(firsts_ptr + position) + 1).to(gl.int32)
    row = position // positions
    latent_ptr += row * positions * 512
    rope_ptr += row * positions * 64
    keys_ptr += position * K
    dtype: gl.constexpr = q_ptr.dtype.element_ty

    q = gl.allocate_shared_memory(dtype, [64, 512], SHARED)
    q_rope = gl.allocate_shared_memory(dtype, [64, 64], SHARED)
    k_slots = gl.allocate_shared_memory(dtype, [2, 64, 512], SHARED)
    rope_slots = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    p_slot = gl.allocate_shared_memory(dtype, [64, 64], SHARED)

    base = position * H + first_head
    head = gl.arange(0, 64, gl.SliceLayout(1, WIDE)).to(gl.int64)
    q_rows = (head * (q_step // 512), gl.arange(0, 64, gl.SliceLayout(1, NARROW)))
    _gather(q_ptr + (first_head * q_step + position * 512), q_rope_ptr + base * 64, q_rows, q, q_rope)
    _gather(latent_ptr, rope_ptr, _keys(keys_ptr, 0, count), k_slots.index(0), rope_slots.index(0))
    ahead = _keys(keys_ptr, 64, count)

    factor = scale * LOG2E
    slot_K = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    peak = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    sums = gl.zeros([64, 64], gl.float32, SCORES)
    o = gl.zeros([64, 512], gl.float32, OUTPUT)
    slot = 0
    for first in range(0, count, 64):
        async_copy.wait_group(0)
        barrier()
        fence_async_shared()
        k = k_slots.index(slot)
        s = gl.zeros([64, 64], gl.float32, SCORES)
        s = hopper.warpgroup_mma(q_rope, rope_slots.index(slot).permute([1, 0]), s, is_async=True)
        s = hopper.warpgroup_mma(q, k.permute([1, 0]), s, is_async=True)
        slot = 1 - slot
        _gather(latent_ptr, rope_ptr, ahead, k_slots.index(slot), rope_slots.index(slot))
        ahead = _keys(keys_ptr, first + 128, count)
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        s = gl.where((first + slot_K < count)[None, :], s * factor, float("-inf"))
        higher = gl.maximum(peak, gl.max(s, 1))
        p = gl.exp2(s - higher[:, None])
        kept = gl.exp2(peak - higher)
        sums = sums * kept[:, None] + p
        peak = higher
        p_slot.store(p.to(dtype))
        fence_async_shared()
        o = o * gl.convert_layout(kept, gl.SliceLayout(1, OUTPUT))[:, None]
        o = hopper.warpgroup_mma(p_slot, k, o, is_async=True)
        o = hopper.warpgroup_mma_wait(0, deps=[o])
    async_copy.wait_group(0)
    total = gl.sum(sums, 1)
    o = o / gl.convert_layout(total, gl.SliceLayout(1, OUTPUT))[:, None]
    k_slots.index(0).store(o.to(dtype))
    wide = gl.arange(0, 512, gl.SliceLayout(0, WIDE))
    rows = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    ptrs = o_ptr + (first_head * o_step + position * 512) + rows.to(gl.int64)[:, None] * o_step + wide[None, :]
    gl.store(ptrs, k_slots.index(0).load(WIDE))
    head = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    gl.store(log_sums_ptr + base + head, (peak + gl.log2(total)) / LOG2E)


@gluon.jit
def _start_copy(latent_ptr, rope_ptr, key, ring, step, STEP: gl.constexpr):
    """Start copying two panels of 64 columns of a block's rows of the latent, or the one of rotary columns."""
    column = gl.arange(0, 64, gl.SliceLayout(0, NARROW))
    if STEP < 4:
        ptrs = latent_ptr + key[:, None] * 512 + (STEP * 128 + column)[None, :]
        copy_rows(ring.index(step % 4 * 2), ptrs)
        copy_rows(ring.index(step % 4 * 2 + 1), ptrs + 64)
    else:
        copy_rows(ring.index(step % 4 * 2), rope_ptr + key[:, None] * 64 + column[None, :])
    async_copy.commit_group()


@gluon.jit
def _load_keys(keys_ptr, first, count):
    """Numbers of a block's keys; 0 past the last one."""
    slot = first + gl.arange(0, 64, gl.SliceLayout(1, NARROW))
    return gl.load(keys_ptr + slot, mask=slot < count, other=0)


@gluon.jit
def sparse_score_backward_hopper_kernel(
    q_ptr, q_rope_ptr, latent_ptr, rope_ptr, keys_ptr, firsts_ptr, o_ptr, log_sums_ptr, do_ptr, p_ptr, ds_ptr, mass_ptr,
    head_step, positions, first_place, scale, H: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """64 heads of a query, blocks of 64 keys: `sparse_score_backward_kernel` for the widths of the forward kernel.

    One product has both results: rows of q above those of do, times the keys. So each group of four warps has one of
    them. The keys' columns pass through a ring of four slots, two steps of a block's five ahead.
    """
    local = (gl.program_id(0) // (H // 64)).to(gl.int64)
    position = local + first_place
    first_head = (gl.program_id(0) % (H // 64) * 64).to(gl.int64)
    count = gl.minimum(K, position % positions - gl.load(firsts_ptr + position) + 1).to(gl.int32)
    row = position // positions
    latent_ptr += row * positions * 512
    rope_ptr += row * positions * 64
    keys_ptr += position * K
    tile = (local * H + first_head) * K
    mass_ptr += gl.program_id(0).to(gl.int64) * K
    dtype: gl.constexpr = q_ptr.dtype.element_ty

    both = gl.allocate_shared_memory(dtype, [9, 128, 64], SHARED)
    ring = gl.allocate_shared_memory(dtype, [8, 64, 64], SHARED)
    exchange = gl.allocate_shared_memory(dtype, [128, 64], SHARED)
    shifts = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))

    key = _load_keys(keys_ptr, 0, count)
    _start_copy(latent_ptr, rope_ptr, key, ring, 0, 0)
    _start_copy(latent_ptr, rope_ptr, key, ring, 1, 1)
    head = gl.arange(0, 64, gl.SliceLayout(1, NARROW))
    column = gl.arange(0, 64, gl.SliceLayout(0, NARROW))
    of_query = first_head * head_step + position * 512
    offset = head.to(gl.int64)[:, None] * head_step + column[None, :]
    delta = gl.zeros([64], gl.float32, gl.SliceLayout(1, NARROW))
    for panel in gl.static_range(8):
        do = gl.load(do_ptr + of_query + offset + panel * 64)
        o = gl.load(o_ptr + of_query + offset + panel * 64)
        delta += gl.sum(do.to(gl.float32) * o.to(gl.float32), 1)
        both.index(panel).slice(64, 64).store(do)
        both.index(panel).slice(0, 64).store(gl.load(q_ptr + of_query + offset + panel * 64))
    rope_ptrs = q_rope_ptr + (position * H + first_head) * 64 + head[:, None] * 64 + column[None, :]
    both.index(8).slice(0, 64).store(gl.load(rope_ptrs))
    both.index(8).slice(64, 64).store(gl.zeros([64, 64], dtype, NARROW))
    shifts.slice(0, 64).store(gl.load(log_sums_ptr + position * H + first_head + head) * LOG2E)
    shifts.slice(64, 64).store(delta * scale)
    fence_async_shared()

    row_R = gl.arange(0, 128, gl.SliceLayout(1, STACKED))
    is_score = (row_R < 64)[:, None]
    factor = gl.where(row_R < 64, scale * LOG2E, scale)[:, None]
    barrier()
    shift = shifts.load(gl.SliceLayout(1, STACKED))[:, None]
    ahead = _load_keys(keys_ptr, 64, count)
    step = 0
    for first in range(0, count, 64):
        r = gl.zeros([128, 64], gl.float32, STACKED)
        for part in gl.static_range(5):
            async_copy.wait_group(1)
            barrier()
            fence_async_shared()
            slot = step % 4 * 2
            r = hopper.warpgroup_mma(both.index(part * 2), ring.index(slot).permute([1, 0]), r, is_async=True)
            if part < 4:
                r = hopper.warpgroup_mma(
                    both.index(part * 2 + 1), ring.index(slot + 1).permute([1, 0]), r, is_async=True
                )
            if part < 3:
                _start_copy(latent_ptr, rope_ptr, key, ring, step + 2, part + 2)
            else:
                _start_copy(latent_ptr, rope_ptr, ahead, ring, step + 2, part - 3)
            r = hopper.warpgroup_mma_wait(2 if part < 4 else 0, deps=[r])
            step += 1
        key = ahead
        ahead = _load_keys(keys_ptr, first + 128, count)
        moved = r * factor - shift
        exchange.store(gl.where(is_score, gl.exp2(moved), moved).to(dtype))
        key_slot = first + gl.arange(0, 64, gl.SliceLayout(0, NARROW))
        p = gl.where((key_slot < count)[None, :], exchange.slice(0, 64).load(NARROW).to(gl.float32), 0.0)
        ds = p * exchange.slice(64, 64).load(NARROW).to(gl.float32)
        gl.store(mass_ptr + key_slot, gl.sum(p, 0))
        ptrs = head[:, None] * K + key_slot[None, :]
        gl.store(p_ptr + tile + ptrs, p.to(dtype))
        gl.store(ds_ptr + tile + ptrs, ds.to(dtype))
    async_copy.wait_group(0)
