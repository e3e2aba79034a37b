"""On every layout the ranks together hold the whole model, and gradients are summed over equal shards."""

from math import prod

import pytest
import torch
from torch import Tensor

from penstock.models.build import meta_model
from penstock.models.decoder import Decoder
from penstock.models.linear import Embedding, Linear
from penstock.models.parameters import fuse_wgrad_accumulation, gradients_by_autograd, head_main_grad, param_shards
from penstock.moe.experts import GroupedExperts
from penstock.parallel.shard import ParamShard
from tests.models.layouts import LAYOUTS, META, MODELS, every_rank_model, laid_out, rectangles

Held = list[tuple[int, ParamShard]]
"""Rank and what it holds, of one parameter."""


def _held(model: str, layout: str) -> dict[str, Held]:
    """The shards of each parameter on all ranks."""
    held: dict[str, Held] = {}
    run, world = laid_out(MODELS[model], layout)
    for rank, rank_model in enumerate(every_rank_model(run, world, META)):
        found = param_shards(rank_model.modules, rank_model.axes)
        assert [(one.name, id(one.parameter)) for one in found] == [
            (name, id(parameter)) for name, parameter in rank_model.named_parameters()
        ], "each parameter once"
        for holding in found:
            assert tuple(holding.parameter.shape) == holding.local_shape, holding.name
            held.setdefault(holding.name, []).append((rank, holding))
    return held


@pytest.mark.often("*-everything", "v3-*", "grouped queries-tensor")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_shards_tile_every_parameter_and_gradients_are_summed_over_equal_shards(model: str, layout: str) -> None:
    held = _held(model, layout)
    whole = dict(meta_model(MODELS[model]).named_parameters())
    assert held.keys() == whole.keys()
    for name, parameter in whole.items():
        covered = torch.zeros(parameter.shape, dtype=torch.int64)
        parts = {rank: holding.pieces() for rank, holding in held[name]}
        for rank, holding in held[name]:
            assert holding.shape == tuple(parameter.shape), name
            for _, there in rectangles(holding):
                covered[there] += 1
            same = {other for other, pieces in parts.items() if pieces == parts[rank]}
            for axis in (holding.data, *holding.partial):
                assert set(axis.ranks) <= same, f"{name}: rank {rank} sums over {axis.name}"
                assert axis.ranks[axis.rank] == rank
        copies = {holding.data.size * prod(axis.size for axis in holding.partial) for _, holding in held[name]}
        assert len(copies) == 1, f"{name}: ranks disagree about {copies} copies"
        assert bool((covered == copies.pop()).all()), f"{name} is not covered evenly"


def test_replicated_parameters_of_tensor_ranks_have_partial_gradients() -> None:
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


@pytest.mark.parametrize(
    ("model", "layout", "is_shared"),
    [
        ("tied", "pipeline", True),
        ("v3", "pipeline", True),
        ("v3", "interleaved", True),
        ("tied", "v", False),
        ("v3", "v", False),
        ("grouped queries", "pipeline", False),
    ],
)
def test_an_embedding_on_two_pipeline_ranks_is_summed_over_both(model: str, layout: str, is_shared: bool) -> None:
    held = _held(model, layout)["embed.weight"]
    assert [axis.name for axis in held[0][1].partial] == ["embedding"] * is_shared
    assert len({holding.partial for _, holding in held}) == 1 or is_shared
    assert is_shared or {rank for rank, _ in held} == {0}


def _with_buffers(model: str) -> tuple[Decoder, dict[str, Tensor]]:
    decoder = meta_model(MODELS[model])
    buffers = {name: torch.zeros_like(one) for name, one in decoder.named_parameters()}
    fuse_wgrad_accumulation([decoder], buffers.__getitem__)
    return decoder, buffers


def _buffers_of(decoder: Decoder) -> list[Tensor | tuple[Tensor, ...] | None]:
    matrices = [module.main_grad for module in decoder.modules() if isinstance(module, (Linear, Embedding))]
    return [*matrices, *(module.sums for module in decoder.modules() if isinstance(module, GroupedExperts))]


def test_experts_add_to_the_buffers_of_all_their_parameters_in_order() -> None:
    decoder, buffers = _with_buffers("biases in every second layer")
    path, experts = next((path, one) for path, one in decoder.named_modules() if isinstance(one, GroupedExperts))
    assert path == "blocks.2.ffn.experts", "every second layer has experts"
    names = ("gate_up_eFD", "down_eDF", "gate_up_bias_eF", "down_bias_eD")
    assert experts.sums is not None and len(experts.sums) == len(names)
    assert all(one is buffers[f"{path}.{name}"] for one, name in zip(experts.sums, names, strict=True))


@pytest.mark.parametrize(("model", "head"), [("v3", "head.weight"), ("tied", "embed.weight")])
def test_products_and_the_loss_add_to_the_buffers_of_their_weights(model: str, head: str) -> None:
    decoder, buffers = _with_buffers(model)
    assert head_main_grad(decoder) is buffers[head]
    assert len(_buffers_of(decoder)) > 10 and None not in _buffers_of(decoder)
    for path, module in decoder.named_modules():
        if isinstance(module, (Linear, Embedding)):
            assert module.main_grad is buffers[f"{path}.weight"]
    with gradients_by_autograd(decoder):
        assert set(_buffers_of(decoder)) == {None} and head_main_grad(decoder) is None
    assert None not in _buffers_of(decoder)


def test_frozen_parameters_have_no_buffer() -> None:
    decoder = meta_model(MODELS["v3"])
    decoder.requires_grad_(False)
    fuse_wgrad_accumulation([decoder], lambda name: pytest.fail(f"{name} has no buffer"))
    assert set(_buffers_of(decoder)) == {None}


def test_sinks_biases_and_projection_norms_are_sharded_like_the_heads() -> None:
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
