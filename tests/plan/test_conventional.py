"""Separate operators compute the same as fused ones, and save their inputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.config.load import load_run
from penstock.config.schema import differences
from penstock.kernels import reference
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.tuning import named_device
from penstock.plan.memory import memory_of
from penstock.plan.meta_rank import Target, conventional, separate_expert_ffn
from tests.closeness import assert_close

TOKENS, TOP_K, HIDDEN, WIDTH, EXPERTS = 24, 2, 32, 16, 3
ROWS = TOKENS * TOP_K


def inputs() -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor, Tensor]:
    """What is differentiated (tokens, both matrices, weights), rows of each expert, and where each row comes from."""
    torch.manual_seed(0)
    shapes = ((TOKENS, HIDDEN), (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH), (ROWS,))
    x_TD, gate_up_eFD, down_eDF, weights_R = (torch.randn(shape, requires_grad=True) for shape in shapes)
    counts_e = torch.tensor([ROWS // 2, 0, ROWS // 2], dtype=torch.int32)
    return (x_TD, gate_up_eFD, down_eDF, weights_R), counts_e, torch.randperm(ROWS) // TOP_K


def test_separate_experts_equal_the_definition() -> None:
    results = []
    for ffn in (separate_expert_ffn, reference.expert_ffn):
        (x_TD, gate_up_eFD, down_eDF, weights_R), counts_e, index_R = inputs()
        y_RD = ffn(x_TD, gate_up_eFD, down_eDF, counts_e, weights_R, index_R)
        y_RD.square().sum().backward()
        results.append((y_RD, x_TD.grad, gate_up_eFD.grad, down_eDF.grad, weights_R.grad))
    for ours, right in zip(*results, strict=True):
        assert_close(ours, right, tolerance=1e-4)


def kept_by(ffn: Callable[..., Tensor]) -> int:
    """Numbers that are kept for backward, but for matrices and what is as small as a row's number."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.ndim == 2:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    (x_TD, gate_up_eFD, down_eDF, weights_R), counts_e, index_R = inputs()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y_RD = ffn(x_TD, gate_up_eFD, down_eDF, counts_e, weights_R, index_R)
        assert y_RD.shape == (ROWS, HIDDEN)
    return sum(kept.values())


def test_separate_experts_keep_their_rows_both_halves_and_the_activation() -> None:
    assert kept_by(separate_expert_ffn) == ROWS * (HIDDEN + 3 * WIDTH)
    assert kept_by(expert_ffn) == TOKENS * HIDDEN + ROWS * 2 * WIDTH


def test_only_a_dispatcher_that_was_not_named_is_changed() -> None:
    run = load_run("deepseek-v2-lite", [])
    assert {one.field for one in differences(run, conventional(run))} == {"dispatch.method", "kernels.loss_chunk"}
    assert conventional(run).dispatch.method == "all-to-all"
    for named in (["dispatch.method=symmetric"], ["dispatch.sync_free=2"]):
        run = load_run("deepseek-v2-lite", named)
        assert conventional(run).dispatch == run.dispatch


@pytest.mark.parametrize("overrides", [[], ["parallel.expert=2"]])
def test_a_run_of_separate_operators_needs_more(overrides: list[str]) -> None:
    run = load_run("deepseek-v2-lite-4l", overrides)
    device = named_device("H200", "bf16")
    ours = memory_of(run, world=2, rank=0, target=Target(device=device))
    theirs = memory_of(conventional(run), world=2, rank=0, target=Target(device=device, saving="conventional"))
    assert theirs.activations + theirs.logits > 1.05 * (ours.activations + ours.logits)
    assert theirs.parameters == ours.parameters and theirs.moments == ours.moments
