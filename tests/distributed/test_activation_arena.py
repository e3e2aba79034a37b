"""Layers whose experts keep their rows on one arena: the same training as with a count on the host."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

from penstock.config.run import Run
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.expert_kernels import TRITON
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.triton_operators import TRITON as TRITON_IN_8_BITS
from penstock.kernels.operators import Operators
from penstock.models.kernels import choose_float8, choose_operators
from penstock.moe.dispatch.row_capacity import ActivationArena
from tests.closeness import assert_within
from tests.distributed.case import layout, pipeline
from tests.distributed.one_loss import (
    TOLERANCES,
    StepFigures,
    differences,
    follow,
    put_together,
    saved_by,
    start_session,
)
from tests.distributed.pool import Pool

GATHERED = "dispatch.method=all-gather"
SHELVED = (GATHERED, "dispatch.sync_free=2")
SMALL = (
    *("model.layers=3", "model.mtp_layers=0", "model.hidden_size=16", "model.moe.moe_intermediate_size=16"),
    *("training.sequence_length=16", "training.global_batch=2", "evaluation.rows=2"),
)
"""The interpreter takes its time."""
IN_8_BITS = ("float8.experts=blockwise", "model.moe.moe_intermediate_size=128")
"""As wide as a block, so that nothing is written in 16 bits between the products."""
NO_ROOM = "dispatch.row_capacity_factor=1.0"
QUICK = {"no room on the arena", "some in 8 bits"}  # the others are slow
WAYS = {
    "room for even loads only": (layout("expert=2"), (NO_ROOM, "dispatch.layer_capacity_factor=1.0")),
    "no room on the arena": (layout("expert=2"), (NO_ROOM,)),
    "room": (layout("expert=2"), ("dispatch.row_capacity_factor=2.0",)),
    "FSDP": (layout("expert=2", "shard=full"), ()),
    "recomputed": (layout("expert=2", "recompute.modules=moe"), ()),
    "products recomputed": (layout("expert=2", "recompute.modules=expert-activation"), ()),
    "offloaded": (layout("expert=2", "offload.activations=moe"), ()),
    "some in 8 bits": (layout("expert=2"), ("dispatch.row_capacity_factor=2.0", *IN_8_BITS, "float8.first_layers=2")),
    "in 8 bits, no room": (layout("expert=2"), (NO_ROOM, *IN_8_BITS)),
    "ZB-V": (pipeline("zb-v", 2, "expert=2"), ("model.layers=4", "training.global_batch=4")),
}


def with_our_experts(run: Run, device: torch.device) -> Operators:
    """The run's operators, but for the experts' network: that of Triton's kernels, which the interpreter runs."""
    ffn = partial(expert_ffn, kernels=TRITON)
    return replace(choose_operators(run, device), expert_ffn=ffn, expert_ffn_is_fused=True, saves_rows=True)


def with_our_kernels(run: Run, device: torch.device) -> Float8Rule:
    return replace(choose_float8(run, device), operators=TRITON_IN_8_BITS)


def play(overrides: tuple[str, ...]) -> tuple[StepFigures, list, float, int]:
    """Train on this rank; also the bound of its arena and how many layers share it."""
    place = "penstock.models.rank_model"
    with patch(f"{place}.choose_operators", with_our_experts), patch(f"{place}.choose_float8", with_our_kernels):
        session = start_session((*SMALL, *overrides))
    seen = follow(session, steps=1)
    session.state.batches.close()
    modules = [module for model in session.model.modules for module in model.modules()]
    arenas = [module for module in modules if isinstance(module, ActivationArena)]
    return seen, saved_by(session), max((one.factor for one in arenas), default=0.0), sum(one.layers for one in arenas)


@pytest.mark.often("no room on the arena")
@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in QUICK else pytest.mark.slow) for way in WAYS])
def test_experts_on_a_shelf_train_as_without(way: str, ranks: Pool) -> None:
    of_layout, settings = WAYS[way]
    count = 4 if way == "ZB-V" else 2  # ranks
    results = ranks.run(count, play, (*of_layout, *SHELVED, *settings))
    counted = ranks.run(count, play, (*of_layout, GATHERED, *settings))
    got, expected = (put_together([result[:2] for result in runs]) for runs in (results, counted))
    start = {name: torch.zeros_like(tensor) for name, tensor in expected.tensors.items()}  # relative to the values
    assert_within(differences(got, expected, start), TOLERANCES)
    bounds, layers = zip(*[result[2:] for result in results], strict=True)
    assert all(layers) != ("recomputed" in way or way == "offloaded"), "rows that are not saved need no arena"
    assert "8 bits" not in way or set(layers) == {2}, "in 16 bits and in 8"
    if "no room" in way or "even loads" in way:
        assert any(got.left_out) and max(bounds) > 1.0
    else:
        assert not any(got.left_out)
