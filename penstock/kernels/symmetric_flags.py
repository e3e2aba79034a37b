"""How kernels of several GPUs tell each other what is written: device code shared by `symmetric_kernels`.

The tokens of a rank are cut into chunks, with a flag for each chunk and sender. Programs that send walk from chunk to
chunk, and each counts the chunk's flag up, with a release, when it has written its part; so a chunk is complete when
every flag has grown by the number of programs. Programs that read wait for a chunk, with an acquire, when they come to
it. How far each flag must have grown is counted on the device, by the last program that leaves, so a captured graph can
be replayed, and transfers may differ in their number of chunks.
"""

from penstock.kernels.language import tl, triton

MOST_CHUNKS = tl.constexpr(16)
"""Chunks that a channel has flags for."""


@triton.jit
def peer_pointer(addresses_ptr, rank, offset, dtype: tl.constexpr):
    """Pointer into the memory of one rank. All sections begin at multiples of 16 bytes; only we know that."""
    address = tl.multiple_of(tl.load(addresses_ptr + rank), 16) + tl.multiple_of(offset, 16)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def signal(addresses_ptr, flags_offset, rank, chunk, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Count our flag of a chunk up by one at every rank, after all that this program wrote before."""
    tl.debug_barrier()
    peer_W = tl.arange(0, BLOCK_W)
    address_W = tl.load(addresses_ptr + peer_W, mask=peer_W < W, other=0) + flags_offset + (chunk * W + rank) * 8
    flags_ptr = address_W.to(tl.pointer_type(tl.int64))
    one_W = tl.full([BLOCK_W], 1, tl.int64)
    tl.atomic_add(flags_ptr, one_W, mask=peer_W < W, sem="release", scope="sys")


@triton.jit
def await_chunk(flags_ptr, wanted, late_ptr, channel, limit, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Spin until the flags of all ranks have grown to `wanted`.

    After `limit` looks the channel's number, plus one, is left in `late`, and nobody waits again: a wait in vain must
    end, and whoever reads `late` will not trust what was computed.
    """
    peer_W = tl.arange(0, BLOCK_W)
    looks = tl.where(tl.load(late_ptr) == 0, limit, 1).to(tl.int64)
    here = tl.full([], 0, tl.int32)
    while (here == 0) & (looks > 0):
        # An addition of zero is Triton's only load that acquires.
        zero_W = tl.zeros([BLOCK_W], tl.int64)
        count_W = tl.atomic_add(flags_ptr + peer_W, zero_W, mask=peer_W < W, sem="acquire", scope="sys")
        here = tl.min(tl.where(peer_W < W, count_W >= wanted, True).to(tl.int32), 0)
        looks -= 1
    if here == 0:
        tl.store(late_ptr, channel + 1)
    tl.debug_barrier()


@triton.jit
def leave(expected_ptr, left_ptr, channel, signals, chunks):
    """The last program of a launch leaves behind what flags had grown to; the others still read the old numbers."""
    tl.debug_barrier()
    before = tl.atomic_add(left_ptr + channel, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.store(left_ptr + channel, 0)
        chunk_C = tl.arange(0, MOST_CHUNKS)
        expected_C = tl.load(expected_ptr + chunk_C, mask=chunk_C < chunks, other=0)
        tl.store(expected_ptr + chunk_C, expected_C + signals, mask=chunk_C < chunks)


@triton.jit
def first_tile(chunk, tiles):
    """Of the tiles of a chunk, the first one of this program, if tiles of all chunks go round among the programs."""
    programs = tl.num_programs(0)
    return (tl.program_id(0) + programs - chunk * tiles % programs) % programs
