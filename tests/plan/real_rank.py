"""Passes of a small run with memory on CPU ranks, tracked as in the plan, for comparison."""

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, partialmethod
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from penstock.config.fit import context_method, grid_of
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.kernels import expert_kernels
from penstock.kernels.backends import TRITON
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.float32_products import float32_linear, linear_in_parts
from penstock.kernels.operators import REFERENCE, TORCH, Operators
from penstock.kernels.tuning import DeviceFacts
from penstock.layout.grid import Grid
from penstock.models.build import materialize, meta_stages, set_dtypes, transfers_of, whole_model
from penstock.models.model_inputs import ModelInputs
from penstock.models.parameters import fuse_wgrad_accumulation, param_shards
from penstock.models.rank_model import embedding_places
from penstock.moe import router
from penstock.parallel.axes import Axes, Axis, make_axes
from penstock.parallel.launch.rendezvous import start_fake_process_group, stop_process_group
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.symmetric import SymmetricBuffers
from penstock.plan import meta_rank
from penstock.plan.liveness import StagePiece
from penstock.plan.meta_rank import MetaRank, Target, make_meta_rank
from penstock.plan.meta_run import activations_of
from penstock.plan.op_recorder import MemoryTracker, TrackedSection
from penstock.train.optimizer import MasterAdamW
from penstock.train.passes import MicroBatch

CPU = torch.device("cpu")
FACTS = DeviceFacts(kind="cuda", name="none", target="none", packages=frozenset({"triton"}), dtype="fp32")

SMALL = [
    # Every rank and every expert gets the same number of rows, so nothing is left to chance.
    "model.moe.balance.force_load_balance=true",
    # As wide as a value, so that torch's fused attention of a CPU takes it.
    "model.attention.v_head_dim=48",
    "model.layers=2",
    "model.vocab_size=258",
    "training.sequence_length=32",
    "training.micro_batch=1",
    "evaluation.rows=0",
]

OPERATORS: dict[str, Operators] = {
    "reference": REFERENCE,
    "torch": TORCH,
    # Off a GPU too the experts' products are Triton's: interpreted.
    "triton": replace(TRITON, expert_ffn=partial(expert_ffn, kernels=expert_kernels.TRITON)),
}


def small_run(overrides: Sequence[str] = ()) -> Run:
    return load_run("debug", [*SMALL, *overrides])


def pieces_with_memory(
    overrides: Sequence[str],
    kernels: str,
    world: int,
    per_node: int = 0,
    buffers: SymmetricBuffers | None = None,
    let_go: float = 0.0,
) -> tuple[StagePiece, ...]:
    """On a rank: its pieces, of tensors that are there.

    A thread of gloo may hold the tensors of a collective for a moment after its end; `let_go` seconds wait for it.
    """
    run = small_run(overrides)
    axes = _axes_without_groups(buffers) if buffers is not None else _axes(run, world, per_node)
    with patch.object(MemoryTracker, "mark", partialmethod(_collect_and_mark, let_go)):
        return _pieces_of(run, axes, kernels, buffers)


def _axes(run: Run, world: int, per_node: int) -> Axes:
    return make_axes(grid_of(run, world), embedding_places(run), run.parallel.shard_size, per_node)


def _axes_without_groups(buffers: SymmetricBuffers) -> Axes:
    """Axes of ranks that share experts only, through memory."""
    ranks, rank = tuple(range(buffers.peers.size)), buffers.peers.rank
    expert = Axis(name="expert", ranks=ranks, rank=rank)
    grid = Grid(world=len(ranks), expert=len(ranks))
    return Axes(grid=grid, rank=rank, expert=expert, expert_node=replace(expert, name="expert_node"))


def _pieces_of(run: Run, axes: Axes, kernels: str, buffers: SymmetricBuffers | None) -> tuple[StagePiece, ...]:
    layer_context = LayerContext(
        operators=OPERATORS[kernels],
        axes=axes,
        context_method=context_method(run),
        dispatch=run.dispatch,
        buffers=buffers,
        transfers=transfers_of(run, CPU),
    )
    decoders = meta_stages(run, layer_context, {0: whole_model(run.model)})
    set_dtypes(run, decoders.values(), axes, CPU)
    materialize(run, CPU, decoders.values())
    optimizer = MasterAdamW(param_shards(decoders.values(), axes), run.optimizer, parallel=run.parallel, axes=axes)
    fuse_wgrad_accumulation(decoders.values(), optimizer.gradient_of)
    rank = MetaRank(
        run=run,
        target=Target(device=FACTS),
        axes=axes,
        decoders=decoders,
        state=optimizer.memory(),
        sharded=frozenset(),
        optimizer=optimizer,
        full_optimizer=optimizer,
        schedule=None,
        weight_grads=None,
        symmetric_bytes=0,
    )
    with patch.object(router, "float32_linear", _as_a_gpu):
        (stage,) = activations_of(rank, _batch(run, axes))
    return stage.pieces


_mark = MemoryTracker.mark


def _collect_and_mark(tracker: MemoryTracker, let_go: float, name: str) -> TrackedSection:
    """Mark when all have let go: the interpreter leaves tensors in cycles."""
    gc.collect()
    time.sleep(let_go)
    return _mark(tracker, name)


def _as_a_gpu(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """`float32_linear`, which on a CPU keeps a float32 copy of the tokens."""
    return float32_linear(x_TD, weight_ED) if x_TD.dtype == torch.float32 else linear_in_parts(x_TD, weight_ED)


def _batch(run: Run, axes: Axes) -> MicroBatch:
    shape = run.training.micro_batch, run.training.sequence_length // axes.context.size
    depths = run.model.mtp_layers
    draw = partial(torch.randint, run.model.vocab_size, shape)
    reading = ModelInputs(tokens_BS=draw(), positions_BS=draw(), ahead=tuple(draw() for _ in range(depths)))
    return MicroBatch(reading=reading, labels=tuple(draw() for _ in range(depths + 1)))


def pieces_without_memory(
    overrides: Sequence[str], kernels: str, world: int, monkeypatch: pytest.MonkeyPatch, per_node: int = 0
) -> tuple[StagePiece, ...]:
    """The same by the plan."""
    run = small_run(overrides)
    monkeypatch.setattr(meta_rank, "kernel_choices", lambda run, device: ())
    monkeypatch.setattr(meta_rank, "operators", lambda choices: OPERATORS[kernels])
    if world > 1:
        start_fake_process_group(0, world)
    try:
        axes = _axes(run, world, per_node)
        rank = make_meta_rank(run, axes, Target(device=FACTS, ranks_per_node=per_node, imbalance=1.0))
        (stage,) = activations_of(rank)
    finally:
        stop_process_group()
    return stage.pieces
