"""Ranks tell each other small values, in JSON, beside what training does."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from penstock.base.errors import DeviceError
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import JsonGroup, all_gather_json
from tests.distributed.pool import Pool


def world() -> Axis:
    """All ranks of the process group."""
    ranks = tuple(range(dist.get_world_size()))
    return Axis(name="world", ranks=ranks, rank=dist.get_rank(), group=dist.group.WORLD)


def _talk() -> list[Any]:
    messages = JsonGroup(world())
    rank = messages.rank
    said = {"rank": rank, "text": "\u00e9" * 5000 * rank}
    heard = [
        messages.all_gather(said),
        messages.gather([rank]),
        messages.from_first(rank + 7),
        messages.all_gather(None),
    ]
    messages.close()
    return [*heard, all_gather_json(rank, world())]


def test_every_rank_hears_what_every_rank_says(ranks: Pool) -> None:
    said = [{"rank": rank, "text": "\u00e9" * 5000 * rank} for rank in range(3)]
    heard = ranks.run(3, _talk)
    assert heard == [[said, [[0], [1], [2]] if rank == 0 else [], 7, [None] * 3, [0, 1, 2]] for rank in range(3)]


def _talk_while_training() -> tuple[list[int], float]:
    messages = JsonGroup(world())
    total = torch.ones(())
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: [sum(messages.all_gather(messages.rank + n)) for n in range(50)])
        for _ in range(20):
            dist.all_reduce(total)
        heard = running.result()
    messages.close()
    return heard, total.item()


def test_a_thread_talks_while_training_uses_its_own_group(ranks: Pool) -> None:
    for heard, total in ranks.run(2, _talk_while_training):
        assert heard == [1 + 2 * n for n in range(50)]
        assert total == 2.0**20


def _last_one_leaves() -> str:
    messages = JsonGroup(world())
    if messages.rank == 1:
        messages.close()
        return "left"
    try:
        messages.all_gather(None)
    except DeviceError as error:
        return str(error)
    return "no error"


def test_a_rank_that_is_gone_is_one_line(ranks: Pool) -> None:
    said, left = ranks.run(2, _last_one_leaves)
    assert left == "left"
    assert said.startswith("another rank has ended or does not answer; got ")
    assert "\n" not in said


def test_a_rank_that_is_alone_hears_itself() -> None:
    messages = JsonGroup(Axis(name="world"))
    assert (messages.all_gather(3), messages.gather("a"), messages.from_first([1])) == ([3], ["a"], [1])
    assert all_gather_json(5, Axis(name="world")) == [5]
    messages.close()
