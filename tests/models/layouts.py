"""Small models on layouts of every kind, and what each rank of such a layout holds of them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.config.fit import grid_of
from penstock.config.model import ClampedSwiglu, GroupedQueryAttention, Model, Moe, Router
from penstock.config.parallel import Parallel, Pipeline
from penstock.config.run import Optimizer, Run, Training
from penstock.models.rank_model import RankModel, build_rank, embedding_places
from penstock.parallel.shard import ParamShard, ShardedTensor
from tests.models.families import tiny_attention, tiny_model
from tests.parallel.simulated import every_rank

CPU, META = torch.device("cpu"), torch.device("meta")

V3 = tiny_model(vocab_size=64, mtp_layers=2, attention=tiny_attention(q_lora_rank=20))
MODELS = {
    "v3": V3,
    "tied": tiny_model(vocab_size=64, tie_word_embeddings=True, mtp_layers=1),
    "grouped queries": tiny_model(
        family="plain", vocab_size=64, attention=GroupedQueryAttention(heads=4, kv_heads=2, head_dim=8)
    ),
    "biases in every second layer": tiny_model(
        family="plain",
        vocab_size=64,
        layers=5,
        attention=GroupedQueryAttention(heads=4, kv_heads=2, head_dim=8, bias=True, sinks=True, qk_norm="projection"),
        moe=Moe(
            experts=8,
            top_k=2,
            moe_intermediate_size=16,
            moe_layer_freq=2,
            bias=True,
            clamped=ClampedSwiglu(),
            router=Router(softmax_after_top_k=True, logit_bias=True),
        ),
    ),
}

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {}),
    "data": (3, {}, {}),
    "tensor": (2, {"tensor": 2}, {}),
    "expert": (4, {"expert": 4}, {}),
    "expert tensor": (4, {"expert": 2, "expert_tensor": 2}, {}),
    "experts folded over tensor and data": (8, {"tensor": 2, "expert": 4}, {}),
    "context": (4, {"context": 2, "tensor": 2, "expert": 2}, {}),
    "pipeline": (2, {"pipeline": 2}, {}),
    "interleaved": (4, {"pipeline": 2, "expert": 2}, {"schedule": "interleaved", "stages_per_rank": 2}),
    "v": (2, {"pipeline": 2}, {"schedule": "zb-v", "stages_per_rank": 2}),
    "everything": (
        16,
        {"pipeline": 2, "tensor": 2, "expert": 2, "expert_tensor": 2},
        {"schedule": "zb-v", "stages_per_rank": 2},
    ),
}
"""Ranks, `parallel`, `pipeline`."""


def laid_out(model: Model, layout: str, precision: str = "fp32") -> tuple[Run, int]:
    """A run of a model on a layout, and its ranks."""
    world, parallel, pipeline = LAYOUTS[layout]
    training = {"steps": 1, "sequence_length": 16, "global_batch": 24, "micro_batch": 1, "precision": precision}
    run = Run(
        name="tiny",
        seed=3,
        model=model,
        training=Training.model_validate(training),
        optimizer=Optimizer(learning_rate=1e-3),
        parallel=Parallel.model_validate(parallel),
        pipeline=Pipeline.model_validate(pipeline),
    )
    return run, world


def every_rank_model(run: Run, world: int, device: torch.device) -> Iterator[RankModel]:
    """The part of each rank."""
    for axes in every_rank(grid_of(run, world), embedding_places(run)):
        yield build_rank(run, axes, device)


def rectangles(holding: ParamShard) -> Iterator[tuple[slice, ...]]:
    """Where parts of what a rank holds lie in the whole."""
    for piece in holding.pieces():
        yield tuple(slice(start, start + size) for start, size in zip(piece.whole, piece.sizes, strict=True))


def part_of(whole: Tensor, holding: ParamShard) -> Tensor:
    """What a rank holds, cut out of the whole tensor."""
    part = torch.full(holding.local_shape, float("nan"), dtype=whole.dtype)
    held = ShardedTensor(tensor=part, shape=holding.shape, pieces=holding.pieces())
    for (_, values), there in zip(held.views(), rectangles(holding), strict=True):
        values.copy_(whole[there])
    return part
