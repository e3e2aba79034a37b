"""Which part of a whole parameter a rank holds, as cuts along its dims, and where that part lies in the whole.

A cut divides one dim evenly. Some dims are several blocks behind one another that are cut each by themselves: the gate
and the up projection are stacked into one matrix, and a rank holds its share of both. Cut in two, with 2 blocks, rows
of an 8-row matrix go

    rank 0: 0 1 | 4 5        rank 1: 2 3 | 6 7

so what lies together on a rank need not lie together in the whole. `local_slices` lists the rectangles that do;
data-parallel sharding then takes a range of the local rows, which is one more cut on top (`rows`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Cut:
    """One dim of a parameter, divided evenly.

    Attributes:
        dim: which.
        index: the part that is ours.
        count: number of parts; divides the size of every block.
        blocks: equal blocks that the dim is made of, each cut by itself.
    """

    dim: int
    index: int
    count: int
    blocks: int = 1


@dataclass(frozen=True)
class LocalSlice:
    """A rectangle that lies together both here and in the whole.

    Attributes:
        here: offset of its first element in the local tensor, one number a dim.
        whole: offset of its first element in the whole tensor.
        sizes: its size.
    """

    here: tuple[int, ...]
    whole: tuple[int, ...]
    sizes: tuple[int, ...]


def local_shape(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[int, ...]:
    """Shape of what a rank holds of a parameter of `shape`."""
    sizes = list(shape)
    for cut in cuts:
        assert sizes[cut.dim] % (cut.count * cut.blocks) == 0, f"{shape} is not divided by {cut}"
        sizes[cut.dim] //= cut.count
    return tuple(sizes)


def global_shape(local: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[int, ...]:
    """The inverse of `local_shape`."""
    sizes = list(local)
    for cut in cuts:
        sizes[cut.dim] *= cut.count
    return tuple(sizes)


def local_slices(
    shape: tuple[int, ...], cuts: tuple[Cut, ...], rows: tuple[int, int] | None = None
) -> tuple[LocalSlice, ...]:
    """The rectangles of the whole that a rank holds.

    Args:
        shape: of the whole parameter.
        cuts: at most one for each dim.
        rows: first and last + 1 of the LOCAL rows (dim 0) that are meant; None for all. Offsets in `LocalSlice.here`
            count from the first of them.
    """
    assert len({cut.dim for cut in cuts}) == len(cuts), f"a dim is cut twice: {cuts}"
    own = {cut.dim: cut for cut in cuts}
    ranges = [list(_ranges(size, own.get(dim))) for dim, size in enumerate(shape)]
    if rows is not None and shape:
        ranges[0] = [part for one in ranges[0] if (part := _within(one, *rows)) is not None]
    return tuple(
        LocalSlice(tuple(r[0] for r in one), tuple(r[1] for r in one), tuple(r[2] for r in one))
        for one in product(*ranges)
    )


def _ranges(size: int, cut: Cut | None) -> Iterator[tuple[int, int, int]]:
    """(offset here, offset in the whole, length) of each block's part of one dim."""
    if cut is None:
        yield 0, 0, size
        return
    block = size // cut.blocks
    part = block // cut.count
    for number in range(cut.blocks):
        yield number * part, number * block + cut.index * part, part


def _within(one: tuple[int, int, int], first: int, end: int) -> tuple[int, int, int] | None:
    here, whole, length = one
    low, high = max(here, first), min(here + length, end)
    return (low - first, whole + low - here, high - low) if low < high else None


def rows_of_shard(rows: int, index: int, count: int) -> tuple[int, int]:
    """First and last + 1 of the rows that one of `count` shards holds: equal chunks, rounded up; the last may be short.

    This is how FSDP2 divides dim 0 (torch.chunk); both may be `rows` where nothing is left.
    """
    chunk = -(-rows // count)
    return min(index * chunk, rows), min((index + 1) * chunk, rows)
