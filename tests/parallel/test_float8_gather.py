"""Weights that FSDP2 gathers in 8 bits are those that quantizing the whole weight gives, and half the bytes travel."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.base.errors import KernelError
from penstock.config.parallel import Parallel
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import (
    BLOCKWISE,
    E4M3_FNUZ,
    RECIPES,
    GatheredWeight,
    Recipe,
    WeightCopies,
    copies_of,
)
from penstock.kernels.float8.reference import dequantize, quantize_weight
from penstock.layout.grid import Grid
from penstock.parallel.axes import Axes, make_axes
from penstock.parallel.shard import Float8Shard, by_rows, local_rows, refresh, shard_fully
from penstock.train.checkpoint import CheckpointStore
from penstock.train.state import restore_state, save_state
from tests.distributed.one_loss import Saved, StepFigures, follow, same_state, saved_by, start_session
from tests.distributed.pool import Pool, WorkerError

CPU = torch.device("cpu")
SHAPES = {
    "blocks that two ranks share": (400, 48),
    "rows that no rank count divides": (272, 144),
    "fewer rows than a block": (16, 256),
    "one matrix more than ranks": (3, 144, 80),
    "fewer matrices than ranks": (1, 160, 272),  # ranks divide a matrix, and a block of it
    "matrices whose last block is smaller": (5, 136, 48),  # two ranks divide the third matrix
}


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_FD: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, w_FD)
        return x_TD @ dequantize(_copies(w_FD).forward).to(x_TD.dtype).mT

    @staticmethod
    def backward(ctx: Any, dy_TF: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x_TD, w_FD = ctx.saved_tensors
        dx_TD = dy_TF @ dequantize(_copies(w_FD).backward).to(dy_TF.dtype).mT
        return dx_TD, dy_TF.mT @ x_TD


def _copies(w_FD: Tensor) -> Any:
    return copies_of(w_FD, None, partial(quantize_weight, recipe=BLOCKWISE, form=Float8Rule().forward))


class Product(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape  # `shard_fully` makes a stack of matrices one matrix
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[-2]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x, self.weight.view(self.shape))
        return y + self.bias


def _divided(axes: Axes, *shapes: tuple[int, ...], reshard: str = "forward") -> nn.Sequential:
    """Products with weights of these shapes, divided over the ranks and filled with drawn numbers."""
    with torch.device("meta"):
        model = nn.Sequential(*map(Product, shapes))
    settings = Parallel.model_validate({"shard": "full", "reshard": reshard})
    inner = {one: axes.dense_data for one, shape in zip(model, shapes, strict=True) if len(shape) > 2}
    shard_fully(
        [one for one in model if one not in inner], model, axes.dense_data, settings, CPU, torch.bfloat16, set(), inner
    )
    model.to_empty(device=CPU)  # FSDP2 divides meta tensors; then each rank fills its rows
    for place, parameter in enumerate(model.parameters()):
        assert isinstance(parameter, DTensor)
        drawn = _drawn(shapes[place // 2] if place % 2 == 0 else tuple(parameter.shape), place)
        with torch.no_grad():
            parameter.to_local().copy_(by_rows(drawn)[slice(*local_rows(parameter))])
    return model


def _drawn(shape: tuple[int, ...], place: int) -> Tensor:
    """Numbers whose blocks have scales of their own."""
    drawn = 0.01 * torch.randn(shape, generator=torch.Generator().manual_seed(place))
    return drawn * (1 + torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)) % 37)


def _bits(copies: WeightCopies) -> list[Tensor]:
    return [part for one in copies for part in (one.values.contiguous().view(torch.uint8), one.scales)]


def _gathered(shape: tuple[int, ...], recipe: Recipe, rule: Float8Rule) -> list[Tensor]:
    """Bits of what a rank has after a gather, and of the copies of the whole weight."""
    layer, rows = _one_matrix(shape, recipe, rule)
    refresh([rows])
    whole = quantize_weight(_drawn(shape, 0).bfloat16(), recipe, rule.forward)
    layer.unshard()
    weight = layer.weight
    assert isinstance(weight, GatheredWeight) and isinstance(weight, nn.Parameter)
    assert (weight.view(shape).shape, weight.dtype, layer.bias.dtype) == (shape, torch.bfloat16, torch.bfloat16)
    found = WeightCopies(weight.copies.forward, weight.copies.backward)
    assert all(map(torch.equal, _bits(found), _bits(whole)))
    assert (found.forward.block, found.backward.block) == (whole.forward.block, whole.backward.block)
    layer.reshard()
    assert isinstance(layer.weight, DTensor) and layer.weight.dtype == torch.float32  # the optimizer sees masters only
    return [part.clone() for part in _bits(whole)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_what_is_gathered_equals_the_copies_of_the_whole_weight(
    ranks: Pool, shape: tuple[int, ...], recipe: str
) -> None:
    ranks.run(2, _gathered, shape, RECIPES[recipe], Float8Rule())


def test_blocks_that_three_ranks_share_have_one_scale_in_every_format(ranks: Pool) -> None:
    ranks.run(3, _gathered, (160, 48), BLOCKWISE, Float8Rule(forward=E4M3_FNUZ))


class _Gathers(TorchDispatchMode):
    """Counts the bytes that a rank sends in all-gathers, and those of the largest tensor that is made."""

    sent = 0
    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if "allgather" in str(function):  # c10d's operator
            self.sent += args[1].nbytes
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, GatheredWeight):
                self.largest = max(self.largest, leaf.nbytes)
        return result


def _one_matrix(
    shape: tuple[int, ...], recipe: Recipe = BLOCKWISE, rule: Float8Rule | None = None
) -> tuple[Any, Float8Shard]:
    axes = make_axes(Grid(world=dist.get_world_size()))
    layer = _divided(axes, shape)[0]
    return layer, _shard(layer, axes, recipe, rule or Float8Rule())


def _shard(layer: Any, axes: Axes, recipe: Recipe, rule: Float8Rule) -> Float8Shard:
    matrices = layer.shape[0] if len(layer.shape) > 2 else None
    return Float8Shard(layer.weight, axes.dense_data, recipe, rule, torch.bfloat16, matrices)


def _largest() -> int:
    """Bytes of the largest tensor that a gather and both copies of a weight need."""
    layer, rows = _one_matrix((256, 512))
    refresh([rows])
    with _Gathers() as gathers:
        layer.unshard()
        _ = layer.weight.copies.backward
    with pytest.raises(AssertionError, match="of a weight in 8 bits only"):
        layer.weight + 1
    return gathers.largest


def test_nothing_of_16_bits_is_made_of_a_gathered_weight(ranks: Pool) -> None:
    assert ranks.run(2, _largest) == [256 * 512 + 2 * 256] * 2, "what arrives, with the bias in 16 bits"


def _unrefreshed() -> None:
    layer, rows = _one_matrix((32, 32))
    refresh([rows])
    with torch.no_grad():
        layer.weight.to_local().mul_(2)
    layer.unshard()


def test_a_master_that_was_changed_is_not_gathered_as_it_was_before(ranks: Pool) -> None:
    with pytest.raises(WorkerError, match="without a refresh of its 8-bit rows"):
        ranks.run(2, _unrefreshed)


def _refused(recipe: Recipe) -> str:
    with pytest.raises(KernelError) as caught:
        _one_matrix((32, 32), recipe)
    return str(caught.value)


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_recipes_whose_transposed_weight_has_other_numbers_are_refused(ranks: Pool, recipe: str) -> None:
    assert "fix: set float8.gather=false, or the recipe to blockwise" in ranks.run(2, _refused, RECIPES[recipe])[0]


def _trained(in_8_bits: bool, reshard: str) -> tuple[dict[str, Tensor], int]:
    """Masters after three steps of two micro-batches, and the bytes that a rank sends in a forward pass."""
    axes = make_axes(Grid(world=2))  # data parallel
    model = _divided(axes, (416, 48), (48, 416), (2, 16, 48), reshard=reshard)
    layers = list(model) if in_8_bits else []
    rows = [_shard(one, axes, BLOCKWISE, Float8Rule()) for one in layers]
    refresh(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x_TD = torch.randn(3, 6, 48, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    with _Gathers() as gathers, torch.no_grad():
        model(x_TD[0])
    for step in range(3):
        for micro in range(2):
            model(x_TD[step] * (1 + micro)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        refresh(rows)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.dtype == torch.float32, name
    return {name: one.full_tensor().detach() for name, one in model.named_parameters()}, gathers.sent


@pytest.mark.parametrize("reshard", ["forward", "backward"])
def test_masters_are_those_of_quantizing_on_the_fly_and_half_the_bytes_travel(ranks: Pool, reshard: str) -> None:
    plain, sent_16 = ranks.run(2, _trained, False, reshard)[0]
    for masters, sent_8 in ranks.run(2, _trained, True, reshard):
        for name, master in masters.items():
            assert torch.equal(master, plain[name]), name
            place = list(masters).index(name)
            drawn = by_rows(_drawn((2, 16, 48) if name == "2.weight" else tuple(master.shape), place))
            assert not torch.equal(master, drawn), f"{name} was not trained"
        # Weights and biases of two ranks, which send half each.
        weights, biases = 416 * 48 * 2 + 2 * 16 * 48, 416 + 48 + 16
        assert (sent_16, sent_8) == (weights + biases, weights // 2 + biases)


RUN = ("parallel.shard=full", "float8.dense=blockwise", "float8.experts=blockwise")
RUN += ("training.precision=bf16", "model.layers=2")


def _run(gather: bool, folder: str, saves: bool) -> tuple[StepFigures, Saved]:
    session = start_session((*RUN, f"float8.gather={str(gather).lower()}"))
    assert bool(session.model.whole.blocks["0"].attention.out.gathered) == gather
    assert bool(session.model.whole.blocks["1"].ffn.experts.gathered) == gather
    store = CheckpointStore(Path(folder), keep=1, asynchronous=False, world=session.axes.world)
    if not saves:
        restore_state(store, 2, session.state)
    seen = follow(session, 2)
    if saves:
        save_state(store, 2, session.state, notes={})
    store.close()
    session.state.batches.close()
    return seen, saved_by(session)


@pytest.mark.slow
def test_a_run_that_gathers_in_8_bits_is_bit_for_bit_the_one_that_does_not(ranks: Pool, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("plain", "gathered")]
    first = [ranks.run(2, _run, bool(gather), folder, True) for gather, folder in enumerate(folders)]
    # Each goes on from the checkpoint of the other.
    second = [ranks.run(2, _run, bool(gather), folder, False) for gather, folder in enumerate(folders[::-1])]
    for plain, gathered in (first, second):
        for got, expected in zip(gathered, plain, strict=True):
            assert got[0] == expected[0] and same_state(got[1], expected[1])
    assert first[0][0][0].losses != second[0][0][0].losses
