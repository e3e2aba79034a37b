"""Passes on the meta device hold the same bytes as passes with memory."""

from collections.abc import Sequence

import pytest
import torch

from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers
from penstock.plan import meta_rank, meta_run
from penstock.plan.liveness import StagePiece
from tests.distributed.pool import Pool
from tests.parallel.symmetric_ranks import run_ranks
from tests.plan.real_rank import pieces_with_memory, pieces_without_memory, small_run

PRECISION = {"reference": "fp32", "torch": "bf16", "triton": "fp32"}

SEEDS = 1024
"""Bytes of the two scalars that a GPU's fused attention saves for dropout, and a CPU's does not."""


def compare(expected: Sequence[StagePiece], found: Sequence[StagePiece], *, also_peaks: bool = False) -> None:
    assert [piece.name for piece in found] == [piece.name for piece in expected]
    for real, planned in zip(expected, found, strict=True):
        differences = {
            name: planned.kept.get(name, 0) - real.kept.get(name, 0) for name in real.kept.keys() | planned.kept.keys()
        }
        assert all(size == 0 or (name.endswith("attention") and size == SEEDS) for name, size in differences.items()), (
            f"{real.name}: {differences}"
        )
        # The embedding's gradient is made in another way on a GPU; the loss's rows in another way too.
        if also_peaks and real.name not in ("embed", "head"):
            assert 0 <= planned.forward - real.forward <= SEEDS, real.name
            assert 0 <= planned.backward - real.backward <= 2 * SEEDS, real.name


RECOMPUTED = [[], ["norm"], ["latent-up"], ["attention"], ["expert-activation"], ["shared-expert", "dense"]]
RECOMPUTED += [["moe"], ["layer"], ["norm", "latent-up", "expert-activation", "shared-expert"]]


CASES = [("reference", modules) for modules in RECOMPUTED]
CASES += [("torch", modules) for modules in RECOMPUTED[:2]]
CASES.append(("triton", []))
CASES.append(pytest.param("triton", ["expert-activation"], marks=pytest.mark.slow))


@pytest.mark.parametrize(
    ("kernels", "modules"), CASES, ids=lambda part: part if isinstance(part, str) else "-".join(part)
)
def test_recomputed_passes_without_memory_keep_the_same_bytes(
    kernels: str, modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check([f"recompute.modules={modules}".replace("'", '"')], kernels, monkeypatch)


def check(overrides: list[str], kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the pieces of one rank, with their peaks where kernels are the definitions."""
    # torch's grouped products are documented for bfloat16 only.
    overrides = [*overrides, f"training.precision={PRECISION[kernels]}"]
    compare(
        pieces_with_memory(overrides, kernels, world=1),
        pieces_without_memory(overrides, kernels, 1, monkeypatch),
        also_peaks=kernels == "reference",
    )


FAMILIES = {
    "gpt-oss": ["model.moe.bias=true", "model.moe.clamped.limit=7", "model.moe.router.logit_bias=true"],
    "llama4": ["model.moe.router.apply_probs_on_input=true", "model.moe.moe_layer_freq=2", "model.dense_layers=0"],
}


@pytest.mark.parametrize("kernels", ["reference", "torch", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_any_family_keep_the_same_bytes(family: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(FAMILIES[family], kernels, monkeypatch)


def test_a_prediction_layer_keeps_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["model.mtp_layers=1"]
    expected = pieces_with_memory(overrides, "reference", world=1)
    compare(expected, pieces_without_memory(overrides, "reference", 1, monkeypatch))
    assert any(name.startswith("mtp") for name in expected[-1].kept)


HEADS = "kind='gqa', heads=4, kv_heads=4, head_dim=16"
ATTENTIONS = {
    "windows with sinks and biases": "bias=true, sinks=true, local={size=32, global_every=2}",
    "chunks": "qk_norm='rotated-head', local={kind='chunk', size=32, global_every=2, global_temperature=0.1}",
    "a norm of all heads": "qk_norm='projection'",
    "a norm of each head": "qk_norm='head'",
}


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_of_every_family_keeps_the_same_bytes(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["model.family='plain'", f"model.attention={{{HEADS}, {ATTENTIONS[attention]}}}"]
    check([*overrides, "training.sequence_length=128"], "reference", monkeypatch)


DISPATCHES = {
    "sent": ["dispatch.method=all-to-all"],
    "sent, counts of the device": ["dispatch.method=all-to-all", "dispatch.sync_free=1"],
    "gathered": ["dispatch.method=all-gather"],
    "gathered, bounded": ["dispatch.method=all-gather", "dispatch.sync_free=2", "dispatch.row_capacity_factor=1.5"],
    # The arena of one layer is as large as the layer.
    "gathered, on a arena": ["dispatch.method=all-gather", "dispatch.sync_free=2", "dispatch.row_capacity_factor=2.0"],
    "gathered, worst case": ["dispatch.method=all-gather", "dispatch.sync_free=3"],
    "padded": ["model.moe.balance.capacity_factor=2.0", "model.moe.balance.pad_to_capacity=true"],
}


BY_KERNELS = [
    *((way, "reference") for way in DISPATCHES),
    pytest.param("gathered, on a arena", "triton", marks=pytest.mark.slow),
]


@pytest.mark.often("sent, counts of the device-reference")
@pytest.mark.parametrize(("way", "kernels"), BY_KERNELS)
def test_every_dispatch_keeps_the_same_bytes(
    way: str, kernels: str, ranks: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["parallel.expert=2", "training.global_batch=2", *DISPATCHES[way]]
    expected, _ = ranks.run(2, pieces_with_memory, overrides, kernels, 2)
    compare(expected, pieces_without_memory(overrides, kernels, 2, monkeypatch))


@pytest.mark.often("tensor=2")
@pytest.mark.parametrize("parallel", ["tensor=2", "context=2", "expert_tensor=2"])
def test_ranks_that_share_matrices_or_rows_keep_the_same_bytes(
    parallel: str, ranks: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [f"parallel.{parallel}", "training.global_batch=2", "dispatch.method=all-to-all"]
    expected, _ = ranks.run(2, pieces_with_memory, overrides, "reference", 2)
    compare(expected, pieces_without_memory(overrides, "reference", 2, monkeypatch))


@pytest.mark.slow
def test_tokens_that_cross_nodes_keep_the_same_bytes(ranks: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["parallel.expert=4", "training.global_batch=4", "dispatch.method=hierarchical"]
    overrides.append("dispatch.sync_free=3")
    expected, *_ = ranks.run(4, pieces_with_memory, overrides, "reference", 4, 2)
    monkeypatch.setattr(meta_rank, "_shared_buffers", lambda *_: None)
    compare(expected, pieces_without_memory(overrides, "reference", 4, monkeypatch, per_node=2))


def _pushed(buffers: SymmetricBuffers, overrides: list[str]) -> tuple[StagePiece, ...]:
    torch.manual_seed(buffers.peers.rank)
    return pieces_with_memory(overrides, "triton", world=2, buffers=buffers)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_rows_that_are_pushed_keep_the_same_bytes(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["parallel.expert=2", "training.global_batch=2", f"dispatch.sync_free={stage}"]
    overrides += ["model.moe.balance.aux_loss=none", "model.moe.balance.aux_loss_coef=0"]
    run = small_run(overrides)
    sizes = BufferSizes(tokens=32, top_k=2, row_bytes=4 * run.model.hidden_size, ranks=2)
    expected, _ = run_ranks(_pushed, sizes, overrides)
    compare(expected, pieces_without_memory(overrides, "triton", 2, monkeypatch))


def test_a_stage_composed_of_one_layer_of_each_kind_is_the_whole_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["model.layers=6", "model.dense_layers=2"]
    together = pieces_without_memory(overrides, "reference", 1, monkeypatch)
    monkeypatch.setattr(meta_run, "kind_of", lambda decoder, layer, block: layer)
    assert pieces_without_memory(overrides, "reference", 1, monkeypatch) == together
