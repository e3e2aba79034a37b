"""What Hopper's kernels of 8 bits do with blocks of depth: bring their scales, multiply them, scale and sum in float32.

Who does what, and how slots change hands, is told in `penstock.kernels.gluon.ring`. Two or three multipliers have 64
rows of a tile each: each multiplies a block, frees its slot, scales its sum and adds it, while another's product is in
the matrix unit. Three share what they multiply with: a tile of 192 rows asks the L2 cache for a sixth less than one of
128, of the same numbers. Who has no row of a tile lets its slots pass.

Scales come into slots beside their blocks. Loaded when they are needed they would come from the L2 cache, which answers
late when it is asked for blocks all the time (docs/decisions/0152-scales-in-slots.md). Copies of 4 bytes need no
alignment and know all strides, so scales may lie as they like, also behind rows that travelled. Each of the loader's 32
threads arrives at a slot's `full` when its copies have landed, besides the one arrival for the blocks' bytes.

Sums are made as the Triton kernels make them, `sum += product * (scale * scale)`, block by block. Both operands have
their contracted dim last, in blocks of 128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from penstock.kernels.gluon.ring import make_barriers, ring

DEPTH = gl.constexpr(128)
HALF = gl.constexpr(64)
"""Rows of a tile that one multiplier has."""
WIDTH = gl.constexpr(128)
"""Columns of a product, and of a block of w that a slot holds."""
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
"""How the matrix unit spreads a product over a multiplier's threads."""
DOWN = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))
ACROSS = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
"""How scales are spread over the loader's threads."""
IN_A_ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""How they lie in a slot."""

# Of a thread, by how many multipliers there are: what a multiplier and the loader have of 65536.
PAIRS_REGISTERS = gl.constexpr(240)
PAIRS_LOADER_REGISTERS = gl.constexpr(24)
TRIOS_REGISTERS = gl.constexpr(160)
TRIOS_LOADER_REGISTERS = gl.constexpr(32)

# Triton 3.9 renamed it.
copy_scales = vars(async_copy)["async_load" if "async_load" in vars(async_copy) else "async_copy_global_to_shared"]


@gluon.jit
def make_slots(x, w_slots, STAGES: gl.constexpr, MULTIPLIERS: gl.constexpr, EACH: gl.constexpr):
    """Slots of x, a part for each multiplier, slots of w, those of both operands' scales, `full` and `empty`.

    With EACH w has a scale for each row of a slot, else one for all of them, which stands there once for each row of a
    multiplier.
    """
    x_slots = gl.allocate_shared_memory(x.dtype, [STAGES * MULTIPLIERS, HALF, DEPTH], x.layout)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES * MULTIPLIERS, HALF], IN_A_ROW)
    w_scales = gl.allocate_shared_memory(gl.float32, [STAGES, WIDTH if EACH else HALF], IN_A_ROW)
    full, empty = make_barriers(STAGES, MULTIPLIERS, 33)
    return x_slots, w_slots, x_scales, w_scales, full, empty


@gluon.jit
def load_scales(
    slots,
    slot,
    x_scales,
    w_scales,
    strides,
    place,
    rows,
    block,
    MULTIPLIERS: gl.constexpr,
    EACH: gl.constexpr,
):
    """Bring a block's scales into a slot.

    x_scales and w_scales are pointers, `strides` those of both operands along outer and depth; `place` is the tile's
    first row of x and of w, and `rows` are those that both have: what stands past the last one is never written, so
    whose scale it gets does not matter.
    """
    x_outer, x_depth, w_outer, w_depth = strides
    lanes = _places(HALF)
    for part in gl.static_range(MULTIPLIERS):
        down = gl.minimum(place[0] + part * HALF + lanes, rows[0] - 1)
        copy_scales(slots[2].index(slot * MULTIPLIERS + part), x_scales + (down * x_outer + block * x_depth))
    if EACH:
        across = gl.minimum(place[1] + _places(WIDTH), rows[1] - 1)
    else:
        across = gl.full([HALF], place[1] // WIDTH, gl.int32, LANES)
    copy_scales(slots[3].index(slot), w_scales + (across * w_outer + block * w_depth))
    async_copy.mbarrier_arrive(slots[4].index(slot), increment_count=False)


@gluon.jit
def _places(COUNT: gl.constexpr):
    """0 to COUNT, made where they are needed.

    Of a plain range the assembler would make a thread's part before warps get their trades, and put it into memory, as
    multipliers leave it no register to keep it in.
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


@gluon.jit
def sum_blocks(
    slots,
    step,
    mine,
    blocks,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    MULTIPLIERS: gl.constexpr,
    EACH: gl.constexpr,
    PLACE: gl.constexpr,
):
    """Sum the scaled products of `mine` blocks, which are all `blocks` of a tile or none."""
    sums = gl.zeros([HALF, WIDTH], gl.float32, PRODUCT)
    for turn in range(mine // STEPS):  # noqa: B007 (the compiler's loops take no name twice)
        if STEPS == 2:
            sums = _add_two(sums, slots, step, STAGES, MULTIPLIERS, EACH, PLACE)
        else:
            sums = _add_one(sums, slots, step, STAGES, MULTIPLIERS, EACH, PLACE)
        step += STEPS
    if STEPS == 2:  # noqa: SIM102 (the compiler decides this one, the program the other)
        if mine % 2 == 1:
            sums = _add_one(sums, slots, step, STAGES, MULTIPLIERS, EACH, PLACE)
            step += 1
    for block in range(mine, blocks):  # noqa: B007
        slot, phase = ring(step, STAGES)
        mbarrier.wait(slots[4].index(slot), phase)
        mbarrier.arrive(slots[5].index(slot), count=1)
        step += 1
    return sums


@gluon.jit
def _add_one(
    sums, slots, step, STAGES: gl.constexpr, MULTIPLIERS: gl.constexpr, EACH: gl.constexpr, PLACE: gl.constexpr
):
    """Add a block's product."""
    full, empty = slots[4], slots[5]
    slot, phase = ring(step, STAGES)
    mbarrier.wait(full.index(slot), phase)
    scale = _scale_of(slots, slot, MULTIPLIERS, EACH, PLACE)
    product = _start_product(slots, slot, MULTIPLIERS, PLACE)
    product = hopper.warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(empty.index(slot), count=1)
    return sums + product * scale


@gluon.jit
def _add_two(
    sums, slots, step, STAGES: gl.constexpr, MULTIPLIERS: gl.constexpr, EACH: gl.constexpr, PLACE: gl.constexpr
):
    """Add the products of two blocks: the first one is scaled while the second one is made."""
    full, empty = slots[4], slots[5]
    slot, phase = ring(step, STAGES)
    next_slot, next_phase = ring(step + 1, STAGES)
    mbarrier.wait(full.index(slot), phase)
    mbarrier.wait(full.index(next_slot), next_phase)
    scale = _scale_of(slots, slot, MULTIPLIERS, EACH, PLACE)
    next_scale = _scale_of(slots, next_slot, MULTIPLIERS, EACH, PLACE)
    # Nothing but arithmetic may stand from here to the last wait, else the assembler waits for each instruction.
    product = _start_product(slots, slot, MULTIPLIERS, PLACE)
    next_product = _start_product(slots, next_slot, MULTIPLIERS, PLACE)
    product = hopper.warpgroup_mma_wait(1, deps=[product])
    mbarrier.arrive(empty.index(slot), count=1)
    sums += product * scale
    next_product = hopper.warpgroup_mma_wait(0, deps=[next_product])
    mbarrier.arrive(empty.index(next_slot), count=1)
    return sums + next_product * next_scale


@gluon.jit
def _start_product(slots, slot, MULTIPLIERS: gl.constexpr, PLACE: gl.constexpr):
    """Start the product of a multiplier's rows of x and the transpose of w."""
    zeros = gl.zeros([HALF, WIDTH], gl.float32, PRODUCT)
    x_block = slots[0].index(slot * MULTIPLIERS + PLACE)
    w_block = slots[1].index(slot).reshape([WIDTH, DEPTH]).permute([1, 0])
    return hopper.warpgroup_mma(x_block, w_block, zeros, use_acc=False, is_async=True)


@gluon.jit
def _scale_of(slots, slot, MULTIPLIERS: gl.constexpr, EACH: gl.constexpr, PLACE: gl.constexpr):
    """What each number of a product is multiplied with."""
    down = slots[2].index(slot * MULTIPLIERS + PLACE).load(DOWN)
    if EACH:
        scale = gl.expand_dims(down, 1) * gl.expand_dims(slots[3].index(slot).load(ACROSS), 0)
    else:
        scale = gl.expand_dims(down * slots[3].index(slot).load(DOWN), 1)
    return scale
