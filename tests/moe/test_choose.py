"""The dispatcher of each rank if the ranks that share experts are on several nodes, and the memory that it takes."""

from typing import Any

import pytest
import torch

from penstock.base.errors import DeviceError
from penstock.config.load import load_run
from penstock.config.parallel import Dispatch
from penstock.layout.grid import ExpertPlacement, Grid
from penstock.moe.dispatch.build import make_dispatcher
from penstock.moe.dispatch.collective import AllGatherDispatcher, AllToAllDispatcher, HierarchicalDispatcher
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.moe.dispatch.symmetric import SymmetricDispatcher
from penstock.parallel import replicas
from penstock.parallel.axes import Axes, Axis, make_axes
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers
from tests.distributed.pool import Pool
from tests.parallel.simulated import every_rank

CPU, GPU, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
EP8 = Grid(world=8, expert=8)
LITE = load_run("deepseek-v2-lite", ())
MOE = LITE.model.moe


def _axes(grid: Grid, per_node: int) -> Axes:
    return next(every_rank(grid, ranks_per_node=per_node))


def _made(axes: Axes, method: str, stage: int, **more: Any) -> tuple[Dispatcher, RowCapacity | None]:
    return make_dispatcher(MOE, LayerContext(axes=axes, dispatch=Dispatch(method=method, sync_free=stage), **more))


@pytest.mark.parametrize("method", ["auto", "hierarchical"])
@pytest.mark.parametrize(
    ("stage", "inner"), [(0, AllToAllDispatcher), (1, AllToAllDispatcher), (2, AllGatherDispatcher)]
)
def test_several_ranks_on_several_nodes_go_to_nodes_first(method: str, stage: int, inner: type) -> None:
    dispatcher, row_capacity = _made(_axes(EP8, 4), method, stage)
    assert (type(dispatcher), type(dispatcher.inner)) == (HierarchicalDispatcher, inner)
    assert (dispatcher.is_counted, dispatcher.is_even) == (stage < 2, stage >= 2)
    assert dispatcher.inner.placement == ExpertPlacement(experts=32, expert=4)
    assert (row_capacity is None) == (stage < 2)
    if stage == 2:
        assert dispatcher.inner.row_capacity is row_capacity
        assert row_capacity.placement.expert == 8, "the even share is that of all ranks, because all their tokens come"


def test_auto_never_divides_an_expert_unequally_and_hierarchical_says_why() -> None:
    axes = _axes(Grid(world=12, expert=4, expert_tensor=3), 4)
    assert axes.expert_node.size == 4
    assert isinstance(_made(axes, "auto", 0)[0], AllToAllDispatcher)
    with pytest.raises(DeviceError, match="got 4 ranks on a node and parallel.expert_tensor 3; fix"):
        _made(axes, "hierarchical", 0)


@pytest.mark.parametrize(("stage", "is_counted"), [(0, True), (3, False)])
def test_inside_a_node_rows_are_written_into_other_gpus_memory_where_it_is_mapped(stage: int, is_counted: bool) -> None:
    sizes = BufferSizes(tokens=2, top_k=6, row_bytes=32, ranks=4)
    memory = torch.zeros(sizes.total_bytes + 256, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 256 :][: sizes.total_bytes]
    buffers = SymmetricBuffers(sizes, memory, [memory.data_ptr()] * 4, rank=0)
    dispatcher, row_capacity = _made(_axes(EP8, 4), "auto", stage, buffers=buffers)
    assert (type(dispatcher), type(dispatcher.inner)) == (HierarchicalDispatcher, SymmetricDispatcher)
    assert dispatcher.inner.row_capacity is row_capacity
    assert (dispatcher.is_counted, dispatcher.is_even) == (is_counted, True)


@pytest.mark.parametrize(
    ("method", "per_node", "tokens", "ranks"),
    [("auto", 4, 2 * 4096, 4), ("hierarchical", 2, 4 * 4096, 2), ("auto", 8, 4096, 8), ("symmetric", 8, 4096, 8)],
)
def test_buffers_hold_what_may_come_from_all_nodes(
    monkeypatch: pytest.MonkeyPatch, method: str, per_node: int, tokens: int, ranks: int
) -> None:
    monkeypatch.setattr(replicas, "peer_obstacle", lambda *_: "")
    monkeypatch.setattr(replicas, "allocate", lambda sizes, axis, device: (sizes, axis))
    axes = _axes(EP8, per_node)
    asked = ("training.sequence_length=4096", "parallel.expert=8", f"dispatch.method={method}")
    run = load_run("deepseek-v2-lite", asked)
    found: Any = replicas.shared_buffers(run, axes, GPU)
    assert found == (BufferSizes(tokens=tokens, top_k=6, row_bytes=2 * 2048, ranks=ranks), axes.expert_node)
    assert replicas.shared_buffers(run, axes, META) is None


@pytest.mark.parametrize(
    ("grid", "per_node", "device", "overrides", "reason"),
    [
        (EP8, 4, CPU, (), "device cpu, which is no GPU"),
        (EP8, 4, GPU, (), "8 ranks on several nodes, 4 on each"),
        (EP8, 1, GPU, (), "one rank on each node"),
        (EP8, 0, GPU, ("model.hidden_size=2052",), "rows of 4104 bytes, no multiple of 16"),
        (EP8, 0, GPU, ("model.hidden_size=2054", "training.precision=fp32"), "rows of 8216 bytes, no multiple of 16"),
        (Grid(world=32, expert=32), 0, GPU, ("parallel.expert=32",), "32 ranks on a node, and 31 are the most"),
    ],
)
def test_no_memory_is_mapped_where_the_kernels_cannot_write(
    monkeypatch: pytest.MonkeyPatch, grid: Grid, per_node: int, device: Any, overrides: tuple[str, ...], reason: str
) -> None:
    _pretend_gpus(monkeypatch, seen=8)
    monkeypatch.setattr(replicas, "all_gather_json", lambda value, _: [value])
    axes, expert = _axes(grid, per_node), f"parallel.expert={grid.expert}"
    by_name = load_run("deepseek-v2-lite", (expert, *overrides, "dispatch.method=symmetric"))
    with pytest.raises(DeviceError) as raised:
        replicas.shared_buffers(by_name, axes, device)
    assert f"dispatch.method=symmetric cannot be had; got {reason}" in str(raised.value)
    if per_node != 4 or device == CPU:
        assert replicas.shared_buffers(load_run("deepseek-v2-lite", (expert, *overrides)), axes, device) is None


def _pretend_gpus(patch: pytest.MonkeyPatch, *, seen: int, has_triton: bool = True) -> None:
    patch.setattr(torch.cuda, "device_count", lambda: seen)
    patch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    patch.setattr(replicas, "installed", lambda _: has_triton)


def _asked(method: str, seen: int, one_lacks_triton: bool) -> str:
    """On a rank of two: what comes of asking for memory that they share, in words."""
    axes = make_axes(Grid(world=2, expert=2))

    def allocate(sizes: BufferSizes, axis: Axis, device: torch.device) -> str:
        assert seen > 1, "torch refuses: detected allocations from overlapping devices from different ranks"
        return "mapped"

    with pytest.MonkeyPatch.context() as patch:
        _pretend_gpus(patch, seen=seen, has_triton=not (one_lacks_triton and axes.rank))
        patch.setattr(replicas, "allocate", allocate)
        run = load_run("deepseek-v2-lite", ("parallel.expert=2", f"dispatch.method={method}"))
        try:
            return str(replicas.shared_buffers(run, axes, torch.device("cuda", axes.rank if seen > 1 else 0)))
        except DeviceError as error:
            return str(error)


OWN_GPU = (
    "got 2 ranks of a node that see their own GPUs only and call them all 0 (show each rank all GPUs of its node: srun"
)


@pytest.mark.parametrize(
    ("method", "seen", "one_lacks_triton", "outcome"),
    [
        ("auto", 2, False, "mapped"),
        ("symmetric", 2, False, "mapped"),
        ("auto", 1, False, "None"),
        ("symmetric", 1, False, OWN_GPU),
        ("auto", 2, True, "None"),
        ("symmetric", 2, True, "dispatch.method=symmetric cannot be had; got no Triton"),
    ],
)
def test_all_ranks_go_without_shared_memory_for_the_same_reason(
    ranks: Pool, method: str, seen: int, one_lacks_triton: bool, outcome: str
) -> None:
    one, other = ranks.run(2, _asked, method, seen, one_lacks_triton)
    assert one == other
    assert outcome in one
