"""The parts of one rank of a run: dispatcher, stages, schedule, messages, positions."""

import math
from typing import Any

import pytest
import torch

from penstock.config.model import Balance
from penstock.config.parallel import Dispatch, Parallel, Pipeline
from penstock.config.run import Run
from penstock.layout.grid import Grid
from penstock.layout.stages import Stage
from penstock.models.linear import Linear
from penstock.models.rank_model import (
    build_rank,
    embedding_places,
    message_of,
    schedule_of,
    stages_of,
)
from penstock.moe.dispatch.all_gather import AllGatherDispatcher
from penstock.moe.dispatch.all_to_all import AllToAllDispatcher, PaddedAllToAllDispatcher
from penstock.moe.dispatch.contract import LocalDispatcher
from penstock.moe.layer import MoE
from penstock.parallel.axes import ALONE, Axes
from tests.models.layouts import CPU, META, MODELS, V3, every_rank_model, laid_out
from tests.parallel.simulated import every_rank

PADDED = Balance(capacity_factor=1.0, pad_to_capacity=True)


def _layers(layout: str, balance: Balance | None = None, **dispatch: Any) -> list[MoE]:
    model = V3
    assert model.moe is not None
    if balance is not None:
        model = model.model_copy(update={"moe": model.moe.model_copy(update={"balance": balance})})
    run, world = laid_out(model, layout, "fp32")
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
def test_the_stage_decides_who_brings_tokens_and_with_how_much_room(
    dispatch: dict[str, Any], kind: type, bound: float | None
) -> None:
    layers = _layers("expert", **dispatch)
    assert layers
    for layer in layers:
        assert isinstance(layer.dispatcher, kind)
        assert (None if layer.row_capacity is None else layer.row_capacity.factor) == bound
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


# Stages


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


# The ranks that hold the embedding


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


# Order and messages


def test_the_schedule_has_the_stages_and_micro_batches_of_the_run() -> None:
    run = _run(2, schedule="interleaved", stages_per_rank=2)
    for axes in _axes(pipeline=2):
        plan = schedule_of(run, axes)
        assert plan is not None
        assert (plan.name, plan.ranks, plan.stages, plan.micro_batches) == ("interleaved", 2, 4, 24)


@pytest.mark.parametrize(("schedule", "stages", "puts_off"), [("1f1b", 1, False), ("zb-1f1b", 1, True)])
def test_weight_gradients_come_later_only_where_the_schedule_wants_it(
    schedule: str, stages: int, puts_off: bool
) -> None:
    run = _run(2, schedule=schedule, stages_per_rank=stages)
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


# Positions and mode


def test_only_ranks_that_share_rows_have_places_and_together_they_have_all() -> None:
    assert build_rank(_run(1), ALONE, META).positions is None
    run, world = laid_out(V3, "context")
    places = [model.positions for model in every_rank_model(run, world, META)]
    assert None not in places
    first, second = sorted(set(places))
    assert sorted(first + second) == list(range(16))
    assert places.count(first) == 2, "tensor ranks read the same positions"
