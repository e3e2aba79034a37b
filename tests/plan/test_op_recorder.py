"""A recorder has the operators that a device is given, in their order, and no others."""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.kernels.language import counts_on_host, start_kernel
from penstock.parallel.async_transfer import TransferStream
from penstock.parallel.launch.rendezvous import start_fake_process_group, stop_process_group
from penstock.plan.hardware import RankGroup
from penstock.plan.op_recorder import (
    END,
    FORK,
    JOIN,
    WAIT,
    MemoryTracker,
    OpRecorder,
    RecordedOps,
    RecordedTransferStream,
)


def rows(*shape: int, trained: bool = False) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=trained)


def written(work: Callable[[], object], ranks_per_node: int = 0) -> RecordedOps:
    recorder = OpRecorder(ranks_per_node)
    with recorder:
        work()
    return recorder.cut()


def test_a_recorder_with_a_tracker_returns_what_both_return_alone() -> None:
    def work() -> None:
        weight = rows(8, 2, trained=True)
        (rows(4, 8) @ weight).float().sum().backward()

    alone, kept = MemoryTracker(), MemoryTracker()
    with alone:
        work()
    recorder = OpRecorder(tracker=kept)
    with recorder:
        work()
    ops = recorder.cut()
    assert ops == written(work)
    assert [one.name for one in ops].count("mm") == 2, "forward, and the weight's gradient; the input has none"
    assert alone.mark("work") == kept.mark("work")
    assert kept.sections[0].peak > 0


class FakeKernel:
    """Not launched, or the test fails."""

    __name__ = "fake_kernel"

    def __getitem__(self, grid: tuple[int, ...]) -> None:
        raise AssertionError("launched")


def test_a_product_is_written_with_shapes_and_bytes_and_its_result_is_the_last() -> None:
    (one,) = written(lambda: rows(4, 8) @ rows(8, 2))
    assert (one.name, one.shapes) == ("mm", ((4, 8), (8, 2), (4, 2)))
    assert (one.sizes, one.itemsize, one.moved_bytes) == ((64, 32, 16), 2, 112)


def test_views_and_allocations_are_not_recorded_and_a_tensor_changed_in_place_appears_once() -> None:
    assert written(lambda: rows(4, 8).view(2, 16).transpose(0, 1)[:3]) == ()
    assert written(lambda: rows(4, 8).new_empty(3)) == ()
    x = rows(4, 8)
    (one,) = written(lambda: x.add_(1))
    assert (one.name, one.shapes) == ("add_", ((4, 8),))


def test_a_launch_is_written_with_its_switches_and_not_made() -> None:
    arguments, constants = (rows(4, 8), 3, None, rows(2)), {"GATHER": True, "DEPTH": False}
    (one,) = written(lambda: start_kernel(FakeKernel(), (7,), *arguments, notes=["MOST=2"], **constants))
    assert (one.name, one.shapes, one.switches) == ("fake_kernel", ((4, 8), (2,)), ("GATHER", "MOST=2"))


def test_the_host_waits_where_it_would_read_counts() -> None:
    counts = torch.empty(4, dtype=torch.int32, device="meta")
    assert [one.name for one in written(lambda: counts_on_host(counts, 10))] == [WAIT]


def test_a_transfer_stands_between_its_fork_and_its_end_and_is_joined_later() -> None:
    transfers: TransferStream = RecordedTransferStream()

    def work() -> None:
        flight = transfers.launch("dispatch", lambda x: ((x + 1,), None), rows(4, 8))
        _ = rows(4, 8) @ rows(8, 2)
        flight.wait()

    assert [one.name for one in written(work)] == [FORK, "add", END, "mm", JOIN]


def test_a_collective_knows_how_many_of_its_ranks_share_a_node() -> None:
    start_fake_process_group(0, 16)
    try:
        every_fourth = dist.new_group([0, 4, 8, 12])
        (one,) = written(lambda: dist.all_reduce(rows(4, 8), group=every_fourth), ranks_per_node=8)
        (other,) = written(lambda: dist.all_reduce(rows(4, 8)))
    finally:
        stop_process_group()
    assert (one.name, one.group) == ("allreduce_", RankGroup(4, 2))
    assert other.group == RankGroup(16, 16)


def test_groups_that_move_nothing_leave_tracebacks_as_they_are() -> None:
    before = sys.excepthook
    start_fake_process_group(1, 2)
    stop_process_group()
    assert sys.excepthook is before


def test_an_operator_that_writes_into_a_tensor_gives_that_tensor_each_time() -> None:
    def run(device: str) -> list[tuple[int, ...]]:
        shapes = []
        for rows in (3, 3, 5):
            left, right, short = (
                torch.ones(rows, 2, device=device),
                torch.ones(2, device=device),
                torch.ones(1, device=device),
            )
            out = torch.empty_like(left)
            assert torch.sub(left, right, out=out) is out and left.add_(right) is left and out.copy_(left) is out
            shapes += [torch.sub(left, right, out=short[:0]).shape, out.shape, left.shape]
        return [tuple(shape) for shape in shapes]

    with MemoryTracker():
        assert run("meta") == run("meta") == run("cpu")
