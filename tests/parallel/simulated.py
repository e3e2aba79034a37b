"""Every rank of a grid in one process, one after another: real axes, whose groups carry nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.layout.grid import Grid
from penstock.parallel.axes import Axes, make_axes
from penstock.parallel.launch.rendezvous import start_fake_process_group, stop_process_group


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    """Collectives of one rank return at once."""
    if world > 1:
        start_fake_process_group(rank, world)  # moves nothing
    try:
        yield
    finally:
        stop_process_group()


def every_rank(grid: Grid, embedding_places: tuple[int, ...] = (0,), **sizes: int) -> Iterator[Axes]:
    """Axes of each rank; its process group lives until the next one is asked for. `sizes` as of `make_axes`."""
    for rank in range(grid.world):
        with fake_rank(rank, grid.world):
            yield make_axes(grid, embedding_places, **sizes)
