"""The pool tells what every rank returned, raised, or did not do."""

import os
import time
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.closeness import assert_equal
from tests.distributed.pool import Pool, WorkerError


def _sum_of_ranks(start: Tensor) -> Tensor:
    total = start + dist.get_rank()
    dist.all_reduce(total)
    return total


def _process() -> int:
    return os.getpid()


def _rank_1_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("seven is too many")
    dist.barrier()


def _rank_1_sleeps() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)  # beyond every timeout
    raise ValueError("seven is too many")


def _rank_1_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_gives_its_result(ranks: Pool, size: int) -> None:
    start = torch.ones(3, dtype=torch.bfloat16)
    assert_equal(ranks.run(size, _sum_of_ranks, start), [start * size + sum(range(size))] * size)


def test_processes_are_kept_between_calls(ranks: Pool) -> None:
    first = ranks.run(2, _process)
    assert len(set(first)) == 2
    assert ranks.run(4, _process)[:2] == first


def test_an_exception_on_a_rank_is_told_and_the_pool_goes_on(ranks: Pool) -> None:
    with pytest.raises(WorkerError, match=r"_rank_1_raises on rank 1 of 2:\n(.|\n)*seven is too many"):
        ranks.run(2, _rank_1_raises)
    assert len(ranks.run(2, _process)) == 2


@pytest.mark.parametrize("accident", [_rank_1_sleeps, _rank_1_dies])
def test_a_rank_that_never_answers_is_told_and_replaced(accident: Callable[[], None]) -> None:
    with closing(Pool(grace=0.5)) as pool:
        before = pool.run(2, _process)
        with pytest.raises(WorkerError, match="on rank 1 of 2"):
            pool.run(2, accident)
        assert not set(before) & set(pool.run(2, _process))
