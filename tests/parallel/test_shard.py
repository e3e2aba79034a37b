"""FSDP2 divides what it is told to, sums what it reduces, and can be filled from whole tensors."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from penstock.config.parallel import Parallel
from penstock.layout.grid import Grid
from penstock.parallel.axes import Axes, make_axes
from penstock.parallel.shard import local_rows, own_rows, shard_fully
from tests.closeness import assert_close, relative_error
from tests.distributed.pool import Pool
from tests.parallel.simulated import fake_rank

D, F = 5, 7  # no number of ranks divides them
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, F)
        self.router = nn.Linear(F, 2, bias=False)
        self.experts = nn.Linear(F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.up(x))
        gates = self.router(x.float()).sigmoid()  # ignored by FSDP2: float32, and whole
        return self.experts(x * gates[:, :1].to(x.dtype))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(D, D)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def _divided(model: Blocks, axes: Axes, settings: Parallel, dtype: torch.dtype = torch.float32) -> Blocks:
    ignored = {block.router.weight for block in model.blocks}
    inner = {block.experts: axes.expert_data for block in model.blocks}
    shard_fully(list(model.blocks), model, axes.dense_data, settings, CPU, dtype, ignored, inner)
    return model


def _fill(model: nn.Module) -> nn.Module:
    """Initial values by name, as a model's owner draws them: whole, of which a rank keeps its rows."""
    for place, parameter in enumerate(model.parameters()):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(place))
        with torch.no_grad():
            own, rows = own_rows(parameter)
            own.copy_(drawn[slice(*rows)])
    return model


def _inputs(rank: int, micro_batch: int) -> Tensor:
    return torch.randn(3, D, generator=torch.Generator().manual_seed(100 + 10 * rank + micro_batch))


def _gradients(settings: Parallel, expert: int, dtype: torch.dtype, micro_batches: int) -> dict[str, Tensor]:
    """Whole gradients of some micro-batches; what is not divided over all ranks is summed here."""
    world = dist.get_world_size()
    axes = make_axes(Grid(world=world, expert=expert), shard_size=settings.shard_size)
    with torch.device("meta"):
        model = Blocks()
    _divided(model, axes, settings, dtype).to_empty(device=CPU)
    _fill(model)
    for block in model.blocks:
        if expert > 1 and axes.expert_data.size == 1:
            block.experts.to(dtype)  # one rank holds them: FSDP2 casts nothing
    for micro_batch in range(micro_batches):
        model(_inputs(dist.get_rank(), micro_batch).to(dtype)).float().square().sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        is_divided = isinstance(parameter, DTensor)
        assert is_divided == ("router" not in name and not ("experts" in name and axes.expert_data.size == 1)), name
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad.float()
        rest = axes.expert if is_divided and "experts" in name else axes.world
        if (not is_divided or "experts" in name) and rest.group is not None:
            dist.all_reduce(gradient, group=rest.group)
        found[name] = gradient
    return found


def _alone(*, ranks: int, micro_batches: int, dtype: torch.dtype = torch.float32) -> Blocks:
    """One process, with the gradients of what all ranks see."""
    model = _fill(Blocks()).to(dtype)
    for block in model.blocks:
        block.router.float()
    for rank in range(ranks):
        for micro_batch in range(micro_batches):
            model(_inputs(rank, micro_batch).to(dtype)).float().square().sum().backward()
    return model


@pytest.mark.parametrize(
    ("settings", "expert"),
    [
        pytest.param(Parallel(shard="full"), 1, id="full"),
        pytest.param(Parallel(shard="full", reshard="backward", prefetch=2), 2, id="experts-apart"),
        pytest.param(Parallel(shard="full", shard_size=2, prefetch=0), 2, id="hybrid-dense"),
        pytest.param(Parallel(shard="full", shard_size=2), 1, id="hybrid"),
        pytest.param(Parallel(shard="full", shard_size=2), 4, id="experts-not-divided"),
    ],
)
def test_gradients_are_those_of_one_process_that_saw_every_row(ranks: Pool, settings: Parallel, expert: int) -> None:
    alone = _alone(ranks=4, micro_batches=2)
    for found in ranks.run(4, _gradients, settings, expert, torch.float32, 2):
        for name, parameter in alone.named_parameters():
            assert_close(found[name], parameter.grad, tolerance=1e-4, what=name)


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_weights_gathered_in_bfloat16_have_gradients_that_add_up_in_float32(ranks: Pool, reduce: str) -> None:
    settings = Parallel.model_validate({"shard": "full", "reduce": reduce})
    for micro_batches in (1, 2):
        found = ranks.run(2, _gradients, settings, 1, torch.bfloat16, micro_batches)[0]
        rounded = _alone(ranks=2, micro_batches=micro_batches, dtype=torch.bfloat16).get_parameter
        for name, parameter in _alone(ranks=2, micro_batches=micro_batches).named_parameters():
            gradient, rounded_gradient = found[name], rounded(name).grad
            assert parameter.grad is not None and rounded_gradient is not None
            assert gradient.dtype == torch.float32
            rounding = relative_error(
                rounded_gradient.float(), parameter.grad, by="norm"
            )  # of one process, all in bfloat16
            assert_close(gradient, parameter.grad, by="norm", tolerance=2 * rounding, what=name)
            if reduce == "bf16" and "router" not in name:
                # The sum over ranks of one micro-batch travels as bfloat16; two such sums are added in float32.
                assert torch.equal(gradient, gradient.bfloat16().float()) == (micro_batches == 1), name


def _rows(shard_size: int) -> dict[str, tuple[tuple[int, int], tuple[int, ...]]]:
    axes = make_axes(Grid(world=4), shard_size=shard_size)
    model = _divided(Blocks(), axes, Parallel(shard="full"))
    return {
        name: (local_rows(parameter), tuple(parameter.to_local().shape))
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
    }


def test_rows_are_those_that_fsdp2_holds(ranks: Pool) -> None:
    for shard_size, expected in ((0, [(0, 2), (2, 4), (4, 6), (6, 7)]), (2, [(0, 4), (4, 7), (0, 4), (4, 7)])):
        for rank, found in enumerate(ranks.run(4, _rows, shard_size)):
            assert found["blocks.1.up.bias"][0] == expected[rank]
            for (first, end), shape in found.values():
                assert shape[0] == end - first


def test_any_rank_of_many_can_be_divided_on_the_meta_device() -> None:
    with fake_rank(13, 64), torch.device("meta"):
        axes = make_axes(Grid(world=64, expert=4), shard_size=8)
        model = _divided(Blocks(), axes, Parallel(shard="full"), torch.bfloat16)
        assert local_rows(model.blocks[0].up.weight) == (5, 6)  # place 5 of its block of 8; 7 rows, one each
        assert local_rows(model.blocks[0].experts.weight) == (3, 4)
        assert model.blocks[0].up.weight.to_local().shape == (1, D)
        assert not isinstance(model.blocks[0].router.weight, DTensor)


@pytest.mark.parametrize("is_ignored", [True, False])
def test_a_matrix_that_two_roots_share_is_left_whole_or_noticed(is_ignored: bool) -> None:
    first, second = nn.Sequential(nn.Linear(D, D)), nn.Sequential(nn.Linear(D, D))
    second[0] = first[0]
    ignored = set(first.parameters()) if is_ignored else set()
    with fake_rank(0, 4):
        data = make_axes(Grid(world=4)).dense_data
        shard_fully([], first, data, Parallel(shard="full"), CPU, torch.float32, ignored, {})
        refusal = pytest.raises(AssertionError, match=r"0\.weight belongs to another root")
        with nullcontext() if is_ignored else refusal:
            shard_fully([], second, data, Parallel(shard="full"), CPU, torch.float32, ignored, {})
    assert second[0].weight is first[0].weight
    assert isinstance(first[0].weight, DTensor) != is_ignored


def test_one_rank_shards_nothing() -> None:
    model = _divided(Blocks(), Axes(), Parallel(shard="full"))
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
