"""On every layout the ranks together hold the whole model, and know who else holds the same."""

from math import prod

import pytest
import torch
from torch import Tensor

from penstock.models.build import meta_model
from penstock.models.decoder import Decoder
from penstock.models.linear import Embedding, Linear
from penstock.models.parameters import fuse_wgrad_accumulation, gradients_by_autograd, head_main_grad, param_shards
from penstock.moe.experts import GroupedExperts
from penstock.parallel.axes import ALONE
from penstock.parallel.shard import ParamShard
from tests.models.layouts import LAYOUTS, META, MODELS, every_rank_model, laid_out, rectangles

Held = list[tuple[int, ParamShard]]
"""Rank and what it holds, of one parameter."""


def _held(model: str, layout: str) -> dict[str, Held]:
    """What all ranks hold of each parameter."""
    held: dict[str, Held] = {}
    run, world = laid_out(MODELS[model], layout)
    for rank, rank_model in enumerate(every_rank_model(run, world, META)):
        for holding in param_shards(rank_model.modules, rank_model.axes):
            held.setdefault(holding.name, []).append((rank, holding))
    return held


@pytest.mark.often("*-everything", "v3-*", "grouped queries-tensor")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_rank_holds_each_of_its_parameters_once(model: str, layout: str) -> None:
    run, world = laid_out(MODELS[model], layout)
    for rank_model in every_rank_model(run, world, META):
        found = param_shards(rank_model.modules, rank_model.axes)
        assert {one.name: id(one.parameter) for one in found} == {
            name: id(parameter) for name, parameter in rank_model.named_parameters()
        }
        assert len({id(one.parameter) for one in found}) == len(found)
        for one in found:
            assert tuple(one.parameter.shape) == one.local_shape, one.name


@pytest.mark.often("*-everything", "v3-*", "grouped queries-tensor")
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


@pytest.mark.often("*-everything", "v3-*", "grouped queries-tensor")
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


def test_the_last_bias_of_an_expert_is_held_by_the_first_of_those_that_share_it() -> None:
    held = _held("biases in every second layer", "expert tensor")
    ranks = {name.rpartition(".")[2]: [rank for rank, _ in one] for name, one in held.items() if "blocks.2." in name}
    assert ranks["gate_up_bias_eF"] == ranks["down_eDF"] == [0, 1, 2, 3]
    assert ranks["down_bias_eD"] == [0, 2]
    assert {holding.shape for _, holding in held["blocks.2.ffn.experts.gate_up_bias_eF"]} == {(8, 32)}


def test_sinks_and_what_is_said_of_all_heads_are_divided_as_the_heads_are() -> None:
    held = _held("biases in every second layer", "tensor")
    of = {name.partition("attention.")[2]: one for name, one in held.items() if name.startswith("blocks.0.attention.")}
    whole = {"sinks_H": 4, "query.bias": 32, "key.bias": 16, "query_norm.weight_D": 32, "key_norm.weight_D": 16}
    for name, size in whole.items():
        assert {holding.shape for _, holding in of[name]} == {(size,)}
        assert [holding.cuts[0].index for _, holding in of[name]] == [0, 1]
        assert all(holding.partial == () for _, holding in of[name])
    # Added behind the sum, by each rank at its own positions.
    assert [(holding.cuts, [axis.name for axis in holding.partial]) for _, holding in of["out.bias"]] == [
        ((), ["tensor"]),
        ((), ["tensor"]),
    ]


def test_every_nth_layer_has_experts() -> None:
    names = {name for name, _ in meta_model(MODELS["biases in every second layer"]).named_parameters()}
    assert {name.split(".")[1] for name in names if ".experts." in name} == {"2", "4"}


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


def _sums_of(decoder: Decoder) -> list[Tensor | tuple[Tensor, ...] | None]:
    matrices = [module.main_grad for module in decoder.modules() if isinstance(module, (Linear, Embedding))]
    return [*matrices, *(module.sums for module in decoder.modules() if isinstance(module, GroupedExperts))]


def test_experts_add_to_the_sums_of_all_their_parameters_in_their_order() -> None:
    decoder = meta_model(MODELS["biases in every second layer"])
    sums = {name: torch.zeros_like(one) for name, one in decoder.named_parameters()}
    fuse_wgrad_accumulation([decoder], sums.__getitem__)
    path, experts = next((path, one) for path, one in decoder.named_modules() if isinstance(one, GroupedExperts))
    names = ("gate_up_eFD", "down_eDF", "gate_up_bias_eF", "down_bias_eD")
    assert experts.sums is not None and len(experts.sums) == len(names)
    assert all(total is sums[f"{path}.{name}"] for total, name in zip(experts.sums, names, strict=True))


def test_products_add_to_the_sums_of_their_own_weights_unless_all_goes_to_autograd() -> None:
    decoder = meta_model(MODELS["v3"])
    sums = {name: torch.zeros_like(one) for name, one in decoder.named_parameters()}
    fuse_wgrad_accumulation([decoder], sums.__getitem__)
    assert len(_sums_of(decoder)) > 10
    assert None not in _sums_of(decoder)
    for path, module in decoder.named_modules():
        if isinstance(module, (Linear, Embedding)):
            assert module.main_grad is sums[f"{path}.weight"]
    with gradients_by_autograd(decoder):
        assert set(_sums_of(decoder)) == {None}
        assert head_main_grad(decoder) is None
    assert None not in _sums_of(decoder)


@pytest.mark.parametrize(("model", "owner"), [("v3", "head.weight"), ("tied", "embed.weight")])
def test_the_loss_adds_to_the_sum_of_whose_weights_are_the_output_projection(model: str, owner: str) -> None:
    decoder = meta_model(MODELS[model])
    sums = {name: torch.zeros_like(one) for name, one in decoder.named_parameters()}
    fuse_wgrad_accumulation([decoder], sums.__getitem__)
    assert head_main_grad(decoder) is sums[owner]


def test_what_is_not_trained_has_no_sum() -> None:
    decoder = meta_model(MODELS["v3"])
    decoder.requires_grad_(False)
    fuse_wgrad_accumulation([decoder], lambda name: pytest.fail(f"{name} has no sum"))
    assert set(_sums_of(decoder)) == {None}


def test_one_rank_holds_everything_whole_and_alone() -> None:
    for holding in param_shards([meta_model(MODELS["v3"])], ALONE):
        tensor: Tensor = holding.parameter
        assert (holding.shape, holding.cuts, holding.partial) == (tuple(tensor.shape), (), ())
        assert holding.data.size == 1
