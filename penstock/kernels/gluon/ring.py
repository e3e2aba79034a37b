"""Device functions that the Hopper products share: the ring of slots between warps, and writing results.

Triton's compiler lets all warps of a program do the same at the same time, so matrix units idle while others load,
scale or write. In these kernels a program has a multiprocessor for itself, and its warps are specialized:

    producer            one warp, copies blocks of both operands into a ring of STAGES slots
    consumers           two or three, four warps each, which multiply independently of each other

In 8 bits (`float8_gemm_kernels`) each consumer has a part of every tile: while one scales, the product of another is in
the matrix unit. In 16 bits (`grouped_gemm_kernels`) consumers take whole tiles in turns: while one writes, the other
multiplies.

Slots are handed over by barriers in shared memory: `full` counts the bytes that arrive, `empty` the consumers that have
read a slot. Steps are counted over all tiles of a program, so nothing is reset between tiles, and the producer loads
the next tile while results are written.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, ir
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

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
