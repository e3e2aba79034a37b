"""What Hopper's kernels share: who does what, how blocks are handed over, and what a multiplier does with them.

Triton's compiler lets all warps of a program do the same thing at the same time, so matrix units stand still while
sums are scaled. In `hopper_rows` and `hopper_matrices`, which are written in Gluon, a program has a multiprocessor for
itself, and its warps have trades:

    a loader            one warp, copies blocks of both operands into a ring of STAGES slots
    two multipliers     four warps each, 64 rows of a tile of 128; each goes its own way: multiply a block, free its
                        slot, scale its sum and add it in float32

While one multiplier scales, the other's product is in the matrix unit. Slots are handed over by barriers in shared
memory: `full` counts the bytes that arrive, `empty` the two multipliers. `ring` says which slot and which phase of its
barriers a step uses, counted over all tiles of a program; nobody resets anything between tiles, so the loader is at
work on the next tile while results are written. Where a tile lies is loaded during the tile before, scales one turn
ahead. Sums are made as the Triton kernels make them, `sum += product * (scale * scale)`, block by block.

Both operands have their contracted dim last, in blocks of 128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

DEPTH = gl.constexpr(128)
ROWS = gl.constexpr(128)
"""Of a tile."""
HALF = gl.constexpr(64)
"""Rows of a tile that one multiplier has."""
WIDTH = gl.constexpr(128)
"""Columns of a product, and of a block of w that a slot holds."""
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
"""How the matrix unit spreads a product over a multiplier's threads."""
DOWN = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))
ACROSS = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))
MULTIPLIER_REGISTERS = gl.constexpr(240)
LOADER_REGISTERS = gl.constexpr(24)
"""Of a thread: 65536 of a multiprocessor, handed out to multiples of four warps."""

# Triton 3.9 renamed them.
copy_in = vars(tma)["async_load" if "async_load" in vars(tma) else "async_copy_global_to_shared"]
copy_out = vars(tma)["async_store" if "async_store" in vars(tma) else "async_copy_shared_to_global"]


@gluon.jit
def ring(step, STAGES: gl.constexpr):
    """Slot of a step, and the phase of its barriers: who takes a full slot waits for it, who fills it for the other."""
    return step % STAGES, step // STAGES & 1


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    """A slot is full when the one loader's bytes are there, empty when both multipliers are done."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    return full, empty


@gluon.jit
def start_product(x_slot, w_slot, PLACE: gl.constexpr):
    """Start the product of a multiplier's rows of x and the transpose of w."""
    zeros = gl.zeros([HALF, WIDTH], gl.float32, PRODUCT)
    x_block = x_slot.slice(PLACE * HALF, HALF)
    w_block = w_slot.reshape([WIDTH, DEPTH]).permute([1, 0])
    return hopper.warpgroup_mma(x_block, w_block, zeros, use_acc=False, is_async=True)


@gluon.jit
def swizzle(tile, tiles_down, tiles_across, GROUP: gl.constexpr):
    """As `penstock.kernels.output_tiles.swizzle`."""
    group = tile // (GROUP * tiles_across)
    height = gl.minimum(tiles_down - group * GROUP, GROUP)
    within = tile % (GROUP * tiles_across)
    return group * GROUP + within % height, within // height
