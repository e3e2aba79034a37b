"""On every layout the ranks together hold the whole model, and know who else holds the same."""

from math import prod

import pytest
import torch
from torch import Tensor

from penstock.models.build import meta_model
from penstock.models.decoder import Decoder
from penstock.models.holdings import add_in_kernels, gradients_by_autograd, head_total, holdings
from penstock.models.linear import Embedding, Linear
from penstock.moe.experts import Experts
from penstock.parallel.axes import ALONE
from penstock.parallel.holding import Holding
from tests.models.layouts import LAYOUTS, META, MODELS, every_rank_model, laid_out, rectangles

Held = list[tuple[int, Holding]]
"""Rank and what it holds, of one parameter."""


def _held(model: str, layout: str) -> dict[str, Held]:
    """What all ranks hold of each parameter."""
    held: dict[str, Held] = {}
    run, world = laid_out(MODELS[model], layout)
    for rank, rank_model in enumerate(every_rank_model(run, world, META)):
        for holding in holdings(rank_model.modules, rank_model.axes):
            held.setdefault(holding.name, []).append((rank, holding))
    return held


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_rank_holds_each_of_its_parameters_once(model: str, layout: str) -> None:
    run, world = laid_out(MODELS[model], layout)
    for rank_model in every_rank_model(run, world, META):
        found = holdings(rank_model.modules, rank_model.axes)
        assert {one.name: id(one.parameter) for one in found} == {
            name: id(parameter) for name, parameter in rank_model.named_parameters()
        }
        assert len({id(one.parameter) for one in found}) == len(found)
        for one in found:
            assert tuple(one.parameter.shape) == one.local_shape, one.name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_the_pieces_of_all_ranks_tile_every_parameter_as_often_as_there_are_copies(model: str, layout: str) -> None:
    held = _held(model, layout)
    whole = dict(meta_model(MODELS[model]).named_parameters())
    assert held.keys() == whole.keys()
    for name, parameter in whole.items():
        covered = torch.zeros(parameter.shape, dtype=torch.int64)
        for _, holding in held[name]:
            assert holding.shape == tuple(parameter.shape), name
            for _, there in rectangles(holding):
                covered[there] += 1
        copies = {holding.data.size * prod(axis.size for axis in holding.partial) for _, holding in held[name]}
        assert len(copies) == 1, f"{name}: ranks disagree about {copies} copies"
        assert bool((covered == copies.pop()).all()), f"{name} is not covered evenly"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_ranks_that_sum_a_gradient_are_those_that_hold_the_same(model: str, layout: str) -> None:
    for name, held in _held(model, layout).items():
        parts = {rank: holding.pieces() for rank, holding in held}
        for rank, holding in held:
            same = {other for other, pieces in parts.items() if pieces == parts[rank]}
            for axis in (holding.data, *holding.partial):
                assert set(axis.ranks) <= same, f"{name}: rank {rank} sums over {axis.name}"
                assert axis.ranks[axis.rank] == rank


def test_what_tensor_ranks_hold_whole_they_have_a_partial_gradient_of() -> None:
    held = _held("v3", "experts folded over tensor and data")
    partial = {name: [axis.name for axis in holdings_of_one[0][1].partial] for name, holdings_of_one in held.items()}
    assert partial["norm.weight_D"] == ["tensor"]
    assert partial["blocks.1.ffn.router.weight_ED"] == ["tensor"]
    assert partial["blocks.0.attention.kv_down.weight"] == ["tensor"]
    assert partial["blocks.0.attention.kv_up.weight"] == []
    assert partial["blocks.1.ffn.experts.gate_up_eFD"] == []
    assert partial["embed.weight"] == []


@pytest.mark.parametrize(("model", "layout"), [("tied", "pipeline"), ("v3", "pipeline"), ("v3", "interleaved")])
def test_an_embedding_on_two_pipeline_ranks_is_summed_over_both(model: str, layout: str) -> None:
    held = _held(model, layout)["embed.weight"]
    assert {axis.name for _, holding in held for axis in holding.partial} == {"embedding"}
    assert {len(holding.partial) for _, holding in held} == {1}


@pytest.mark.parametrize(("model", "layout"), [("tied", "v"), ("v3", "v"), ("grouped queries", "pipeline")])
def test_an_embedding_on_one_pipeline_rank_is_nobody_elses(model: str, layout: str) -> None:
    held = _held(model, layout)["embed.weight"]
    assert {rank for rank, _ in held} == {0}
    assert all(holding.partial == () for _, holding in held)


def _sums_of(decoder: Decoder) -> list[Tensor | tuple[Tensor, Tensor] | None]:
    matrices = [module.total for module in decoder.modules() if isinstance(module, (Linear, Embedding))]
    return [*matrices, *(module.sums for module in decoder.modules() if isinstance(module, Experts))]


def test_products_add_to_the_sums_of_their_own_weights_unless_all_goes_to_autograd() -> None:
    decoder = meta_model(MODELS["v3"])
    sums = {name: torch.zeros_like(one) for name, one in decoder.named_parameters()}
    add_in_kernels([decoder], sums.__getitem__)
    assert len(_sums_of(decoder)) > 10
    assert None not in _sums_of(decoder)
    for path, module in decoder.named_modules():
        if isinstance(module, (Linear, Embedding)):
            assert module.total is sums[f"{path}.weight"]
    with gradients_by_autograd(decoder):
        assert set(_sums_of(decoder)) == {None}
        assert head_total(decoder) is None
    assert None not in _sums_of(decoder)


@pytest.mark.parametrize(("model", "owner"), [("v3", "head.weight"), ("tied", "embed.weight")])
def test_the_loss_adds_to_the_sum_of_whose_weights_are_the_output_projection(model: str, owner: str) -> None:
    decoder = meta_model(MODELS[model])
    sums = {name: torch.zeros_like(one) for name, one in decoder.named_parameters()}
    add_in_kernels([decoder], sums.__getitem__)
    assert head_total(decoder) is sums[owner]


def test_what_is_not_trained_has_no_sum() -> None:
    decoder = meta_model(MODELS["v3"])
    decoder.requires_grad_(False)
    add_in_kernels([decoder], lambda name: pytest.fail(f"{name} has no sum"))
    assert set(_sums_of(decoder)) == {None}


def test_one_rank_holds_everything_whole_and_alone() -> None:
    for holding in holdings([meta_model(MODELS["v3"])], ALONE):
        tensor: Tensor = holding.parameter
        assert (holding.shape, holding.cuts, holding.partial) == (tuple(tensor.shape), (), ())
        assert holding.data.size == 1
