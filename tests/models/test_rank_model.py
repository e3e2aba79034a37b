"""The parts of one rank of a run: dispatcher, stages, schedule, messages, positions."""

import math
from collections import defaultdict
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.model import Balance
from penstock.config.parallel import Dispatch, Parallel, Pipeline
from penstock.config.run import Run
from penstock.layout.grid import Grid
from penstock.layout.stages import Stage
from penstock.models.build import meta_model
from penstock.models.decoder import Decoder
from penstock.models.linear import Embedding, Linear
from penstock.models.parameters import fuse_wgrad_accumulation, param_shards
from penstock.models.rank_model import build_rank, embedding_places, message_of, schedule_of, stages_of
from penstock.moe.dispatch.collective import AllGatherDispatcher, AllToAllDispatcher, PaddedAllToAllDispatcher
from penstock.moe.dispatch.contract import LocalDispatcher
from penstock.moe.experts import GroupedExperts
from penstock.moe.layer import MoE
from penstock.parallel.axes import ALONE, Axes
from penstock.parallel.shard import ParamShard
from tests.models.families import moe_with
from tests.models.layouts import CPU, LAYOUTS, META, MODELS, V3, every_rank_model, laid_out, rectangles
from tests.parallel.simulated import every_rank

PADDED = Balance(capacity_factor=1.0, pad_to_capacity=True)


def _layers(layout: str, balance: Balance | None = None, **dispatch: Any) -> list[MoE]:
    run, world = laid_out(V3 if balance is None else moe_with(V3, balance=balance), layout)
    run = run.model_copy(update={"dispatch": Dispatch(**dispatch)})
    first = next(every_rank_model(run, world, META))
    return [module for decoder in first.modules for module in decoder.modules() if isinstance(module, MoE)]


@pytest.mark.parametrize(
    ("dispatch", "kind", "bound"),
    [
        ({}, AllToAllDispatcher, None),
        ({"sync_free": 1}, AllToAllDispatcher, None),
        ({"sync_free": 2}, AllGatherDispatcher, 2.0),
        ({"sync_free": 3}, AllGatherDispatcher, math.inf),
        ({"method": "all-gather"}, AllGatherDispatcher, None),
        ({"method": "all-gather", "sync_free": 2, "row_capacity_factor": 1.25}, AllGatherDispatcher, 1.25),
        ({"method": "all-to-all", "sync_free": 1}, AllToAllDispatcher, None),
    ],
)
def test_the_sync_free_stage_decides_the_dispatcher_and_its_row_capacity(
    dispatch: dict[str, Any], kind: type, bound: float | None
) -> None:
    layers = _layers("expert", **dispatch)
    assert layers
    for layer in layers:
        assert isinstance(layer.dispatcher, kind)
        assert (layer.row_capacity and layer.row_capacity.factor) == bound
        if isinstance(layer.dispatcher, AllGatherDispatcher):
            assert layer.dispatcher.row_capacity is layer.row_capacity, "what a layer asks is what the step looks at"


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_and_padded_rows_need_no_gathering(stage: int) -> None:
    assert all(isinstance(one.dispatcher, LocalDispatcher) for one in _layers("one rank", sync_free=stage))
    padded = _layers("expert", PADDED, sync_free=stage)
    assert all(isinstance(one.dispatcher, PaddedAllToAllDispatcher) for one in padded)


def _run(ranks: int, *, model: str = "v3", precision: str = "fp32", **pipeline: Any) -> Run:
    run, _ = laid_out(MODELS[model], "one rank", precision)
    changes = {"parallel": Parallel(pipeline=ranks), "pipeline": Pipeline.model_validate(pipeline)}
    return run.model_copy(update=changes)


def _axes(**sizes: int) -> list[Axes]:
    world = sizes.get("pipeline", 1) * sizes.get("tensor", 1) * sizes.get("context", 1)
    return list(every_rank(Grid(world=world, **sizes)))


def test_without_a_pipeline_one_stage_holds_everything() -> None:
    assert stages_of(_run(1)) == (Stage(embed=True, layers=(0, 1, 2), mtp=(0, 1), norm_and_head=True),)
    model = build_rank(_run(1), ALONE, META)
    assert model.pipeline is None
    assert model.whole is model.modules[0]
    assert list(model.decoders) == [0]
    assert schedule_of(_run(1), ALONE) is None
    assert message_of(_run(2, precision="bf16"), ALONE, CPU).dtype == torch.bfloat16


def test_a_rank_of_a_pipeline_has_its_stages_in_one_mode_and_no_whole_decoder() -> None:
    run, world = laid_out(V3, "v")
    models = list(every_rank_model(run, world, META))
    assert [tuple(model.decoders) for model in models] == [(0, 3), (1, 2)]
    for model in models:
        with pytest.raises(AssertionError, match="no whole decoder"):
            _ = model.whole
        for mode in (False, True):
            model.train(mode)
            assert all(decoder.training == mode for decoder in model.modules)


def test_stages_are_those_that_the_layout_names() -> None:
    first, second = stages_of(_run(2, layout="Et*2|t,m*2,L"))
    assert (first.embed, first.layers, first.mtp, first.norm_and_head) == (True, (0, 1), (), False)
    assert (second.embed, second.layers, second.mtp, second.norm_and_head) == (False, (2,), (0, 1), True)


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_stages_without_a_layout_hold_every_part_once_in_the_order_of_the_model(stages_per_rank: int) -> None:
    stages = stages_of(_run(2, schedule="gpipe", stages_per_rank=stages_per_rank))
    assert len(stages) == 2 * stages_per_rank
    assert [layer for stage in stages for layer in stage.layers] == [0, 1, 2]
    assert [depth for stage in stages for depth in stage.mtp] == [0, 1]
    assert [stage.embed for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.norm_and_head for stage in stages] == [False] * (len(stages) - 1) + [True]


@pytest.mark.parametrize("layout", ["interleaved", "v", "everything"])
def test_every_stage_is_built_with_its_parts_and_no_others(layout: str) -> None:
    run, world = laid_out(V3, layout)
    stages = stages_of(run)
    seen = set()
    for model in every_rank_model(run, world, META):
        for number, decoder in model.decoders.items():
            stage = stages[number]
            assert tuple(decoder.blocks) == tuple(map(str, stage.layers))
            assert tuple(decoder.mtp) == tuple(map(str, stage.mtp))
            assert (decoder.norm is not None, decoder.head is not None) == (stage.norm_and_head,) * 2
            assert (decoder.is_first, decoder.embed is not None) == (stage.embed, stage.embed or bool(stage.mtp))
            seen.add(number)
    assert seen == set(range(len(stages)))


def test_two_stages_of_a_rank_share_one_embedding() -> None:
    run, world = laid_out(V3, "v")
    first, _ = every_rank_model(run, world, CPU)
    begin, end = first.modules
    assert begin.embed is end.embed is not None
    names = [name for name, _ in first.named_parameters()]
    assert names.count("embed.weight") == 1 and len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("model", "ranks", "pipeline", "places"),
    [
        ("v3", 1, {}, (0,)),
        ("grouped queries", 3, {}, (0,)),
        ("v3", 3, {}, (0, 2)),
        ("tied", 2, {}, (0, 1)),
        ("v3", 2, {"schedule": "interleaved", "stages_per_rank": 2}, (0, 1)),
        ("v3", 2, {"schedule": "zb-v", "stages_per_rank": 2}, (0,)),
        ("tied", 2, {"schedule": "dualpipe-v", "stages_per_rank": 2}, (0,)),
    ],
)
def test_the_embedding_is_where_a_stage_reads_it(
    model: str, ranks: int, pipeline: dict[str, Any], places: tuple[int, ...]
) -> None:
    assert embedding_places(_run(ranks, model=model, **pipeline)) == places


def test_the_schedule_has_the_stages_and_micro_batches_of_the_run() -> None:
    for axes in _axes(pipeline=2):
        plan = schedule_of(_run(2, schedule="interleaved", stages_per_rank=2), axes)
        assert (plan.name, plan.ranks, plan.stages, plan.micro_batches) == ("interleaved", 2, 4, 24)


@pytest.mark.parametrize(("schedule", "puts_off"), [("1f1b", False), ("zb-1f1b", True)])
def test_weight_gradients_come_later_only_where_the_schedule_wants_it(schedule: str, puts_off: bool) -> None:
    run = _run(2, schedule=schedule)
    for axes in every_rank(Grid(world=2, pipeline=2), embedding_places(run)):
        model = build_rank(run, axes, META)
        layers = [layer for decoder in model.modules for layer in (*decoder.blocks.values(), *decoder.mtp.values())]
        matrices = [module for layer in layers for module in layer.modules() if isinstance(module, Linear)]
        assert len({id(matrix.weight_grads) for matrix in matrices}) == 1, "one for each process"
        assert (matrices[0].weight_grads is not None) == puts_off


@pytest.mark.parametrize(
    ("sizes", "positions"), [({}, 16), ({"tensor": 2}, 8), ({"context": 2}, 8), ({"context": 2, "tensor": 2}, 4)]
)
def test_a_message_is_the_positions_that_one_rank_holds(sizes: dict[str, int], positions: int) -> None:
    for axes in _axes(pipeline=2, **sizes):
        message = message_of(_run(2), axes, CPU)
        assert (message.shape, message.dtype, message.device) == ((1, positions, 32), torch.float32, CPU)


def test_only_ranks_that_share_rows_have_places_and_together_they_have_all() -> None:
    assert build_rank(_run(1), ALONE, META).positions is None
    run, world = laid_out(V3, "context")
    places = [model.positions for model in every_rank_model(run, world, META)]
    assert None not in places
    first, second = sorted(set(places))
    assert sorted(first + second) == list(range(16))
    assert places.count(first) == 2, "tensor ranks read the same positions"


def _held(model: str, layout: str) -> dict[str, list[tuple[int, ParamShard]]]:
    """The shards of each parameter, with their ranks."""
    held = defaultdict(list)
    run, world = laid_out(MODELS[model], layout)
    for rank, rank_model in enumerate(every_rank_model(run, world, META)):
        found = param_shards(rank_model.modules, rank_model.axes)
        assert [(one.name, id(one.parameter)) for one in found] == [
            (name, id(parameter)) for name, parameter in rank_model.named_parameters()
        ], "each parameter once"
        for holding in found:
            assert tuple(holding.parameter.shape) == holding.local_shape, holding.name
            held[holding.name].append((rank, holding))
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
            for there in rectangles(holding):
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
    partial = {name: [axis.name for axis in holding.partial] for name, ((_, holding), *_) in held.items()}
    for name in ("norm.weight_D", "blocks.1.ffn.router.weight_ED", "blocks.0.attention.kv_down.weight"):
        assert partial[name] == ["tensor"]
    for name in ("blocks.0.attention.kv_up.weight", "blocks.1.ffn.experts.gate_up_eFD", "embed.weight"):
        assert partial[name] == []


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
    assert decoder.head_main_grad is buffers[head]
    assert len(_buffers_of(decoder)) > 10 and None not in _buffers_of(decoder)
    for path, module in decoder.named_modules():
        if isinstance(module, (Linear, Embedding)):
            assert module.main_grad is buffers[f"{path}.weight"]


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
    out_biases = [(holding.cuts, [axis.name for axis in holding.partial]) for _, holding in of["out.bias"]]
    assert out_biases == [((), ["tensor"])] * 2
