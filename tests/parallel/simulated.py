"""Every rank of a grid in one process, one after another: real axes, whose groups carry nothing."""

from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.layout.grid import Grid
from penstock.parallel.axes import Axes, make_axes


def every_rank(grid: Grid, embedding_places: tuple[int, ...] = (0,), ranks_per_node: int = 0) -> Iterator[Axes]:
    """Axes of each rank; its process group lives until the next one is asked for."""
    for rank in range(grid.world):
        if grid.world > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.world)
        try:
            yield make_axes(grid, embedding_places, ranks_per_node=ranks_per_node)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
