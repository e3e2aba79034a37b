"""What Hopper's own kernels share: who does what, how slots of a ring change hands, and how results are written.

Triton's compiler lets all warps of a program do the same thing at the same time, so matrix units stand still while
others load, scale or write. In kernels that are written in Gluon a program has a multiprocessor for itself, and its
warps have trades:

    a loader            one warp, copies blocks of both operands into a ring of STAGES slots
    multipliers         two or three, four warps each; each goes its own way

Those of 8 bits (`float8_gemm_kernels`) have a part of a tile each: while one scales, another one's
product is in the matrix unit. Those of 16 bits take tiles in turns: while one writes, the other multiplies.

Slots are handed over by barriers in shared memory: `full` counts the bytes that arrive, `empty` the multipliers that
read a slot. `ring` says which slot and which phase of its barriers a step uses, counted over all tiles of a program;
nobody resets anything between tiles, so the loader is at work on the next tile while results are written.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, ir
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

MULTIPLIER_REGISTERS = gl.constexpr(240)
LOADER_REGISTERS = gl.constexpr(24)
"""Of a thread: 65536 of a multiprocessor, handed out to multiples of four warps."""
SPAN = gl.constexpr(2**30)
"""Where a ragged descriptor's rows end; see `penstock.kernels.grouped_gemm_kernels`."""
LINE = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))
"""How a row's numbers are spread over threads."""

# Triton 3.9 renamed them.
copy_in = vars(tma)["async_load" if "async_load" in vars(tma) else "async_copy_global_to_shared"]
copy_out = vars(tma)["async_store" if "async_store" in vars(tma) else "async_copy_shared_to_global"]


@builtin
def add_out(target: Any, place: Any, slot: Any, _semantic: Any = None) -> None:
    """Add a slot to a block in memory by the copy engine; what Triton 3.9 calls `tma.async_atomic_add`, 3.6 nothing."""
    places = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, places, slot.handle)


@gluon.jit
def ring(step, STAGES: gl.constexpr):
    """Slot of a step, and the phase of its barriers: who takes a full slot waits for it, who fills it for the other."""
    return step % STAGES, step // STAGES & 1


@gluon.jit
def make_barriers(STAGES: gl.constexpr, READERS: gl.constexpr = 2, WRITERS: gl.constexpr = 1):
    """A slot is full when so many have arrived and its bytes are there, empty when so many multipliers are done."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=WRITERS)
        mbarrier.init(empty.index(slot), count=READERS)
    fence_async_shared()
    return full, empty


@gluon.jit
def make_turns():
    """For each of two multipliers that go through a ring one after the other: arrived at when it is its turn."""
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
def write_pieces(target, rooms, block, lead, row, column, ADD: gl.constexpr, PIECE: gl.constexpr, PLACE: gl.constexpr):
    """Write or add what a multiplier has, half by half until it is a piece that a descriptor writes.

    While the copy engine writes, or adds, a piece, the next one is put into the other of the multiplier's two rooms.

    `lead` are a piece's places in all but the last two dims of the descriptor; of the first piece PIECE is 0.
    """
    height: gl.constexpr = target.block_shape[len(target.block_shape) - 2]
    width: gl.constexpr = target.block_shape[len(target.block_shape) - 1]
    down: gl.constexpr = block.shape[0] // 2
    across: gl.constexpr = block.shape[1] // 2
    if block.shape[0] > height:
        one, other = gl.split(gl.permute(gl.reshape(block, [2, down, 2 * across]), [1, 2, 0]))
        write_pieces(target, rooms, one, lead, row, column, ADD, 2 * PIECE, PLACE)
        write_pieces(target, rooms, other, lead, row + down, column, ADD, 2 * PIECE + 1, PLACE)
    elif block.shape[1] > width:
        one, other = gl.split(gl.permute(gl.reshape(block, [2 * down, 2, across]), [0, 2, 1]))
        write_pieces(target, rooms, one, lead, row, column, ADD, 2 * PIECE, PLACE)
        write_pieces(target, rooms, other, lead, row, column + across, ADD, 2 * PIECE + 1, PLACE)
    else:
        # The piece before this one may still be read, from the other room.
        room = rooms.index(2 * PLACE + PIECE % 2)
        tma.store_wait(1)
        room.reshape([2 * down, 2 * across]).store(block.to(target.dtype))
        fence_async_shared()
        place = lead + (row, column)  # noqa: RUF005 (the compiler knows no starred expressions)
        if ADD:
            add_out(target, place, room)
        else:
            copy_out(target, place, room)


@gluon.jit
def zero_tail(y_ptr, tail, rows, columns, DTYPE: gl.constexpr):
    """Set rows from `tail` on to zero; programs take turns, a row at a time."""
    for row in range(tail + gl.program_id(0), rows, gl.num_programs(0)):
        row_ptr = y_ptr + row * columns.to(gl.int64)
        for first in range(0, columns, 1024):
            across = first + gl.arange(0, 1024, LINE)
            gl.store(row_ptr + across, gl.zeros([1024], DTYPE, LINE), mask=across < columns)
