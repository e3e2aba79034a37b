"""Sinkhorn's steps by kernels beside their definition in float64."""

import pytest
import torch

from penstock.kernels.sinkhorn import balanced, balanced_triton
from tests.closeness import assert_close, relative_error
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta

EPSILON = 1e-6


@pytest.mark.parametrize(("streams", "iterations"), [(4, 20), (3, 5), (2, 1), (5, 4)])
def test_kernels_are_as_exact_as_the_definition_in_float32(streams: int, iterations: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(streams)
    logits = 3 * torch.randn(2, 37, streams, streams, generator=generator)
    weights = torch.randn(logits.shape, generator=generator)

    def results(dtype: torch.dtype, by_kernel: bool) -> list[torch.Tensor]:
        where = device if by_kernel else torch.device("cpu")
        given = logits.to(where, dtype).requires_grad_()
        values = (balanced_triton if by_kernel else balanced)(given, iterations, EPSILON)
        (gradient,) = torch.autograd.grad((values * weights.to(where, dtype)).sum(), given)
        return [part.detach().cpu().double() for part in (values, gradient)]

    exact, plain, kernel = results(torch.float64, False), results(torch.float32, False), results(torch.float32, True)
    for truth, theirs, ours in zip(exact, plain, kernel, strict=True):
        # Sums of a few numbers in another order, and a division of 2 units in the last place for one of a half.
        assert_close(ours, truth, tolerance=4 * relative_error(theirs, truth) + 2**-23)


def test_columns_sum_to_one_and_no_positions_are_no_launch(device: torch.device) -> None:
    sums = balanced_triton(
        torch.randn(9, 4, 4, generator=torch.Generator().manual_seed(0)).to(device), 20, EPSILON
    ).sum(-2)
    assert_close(sums, torch.ones_like(sums))
    assert balanced_triton(torch.empty(0, 4, 4, device=device), 20, EPSILON).shape == (0, 4, 4)


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_without_spills(target: str) -> None:
    def launch() -> None:
        logits = on_meta(2, 64, 4, 4, dtype=torch.float32).requires_grad_()
        balanced(logits, 20, EPSILON).sum().backward()

    compiled = compile_without_spills(target, launch)
    assert [one.kernel for one in compiled] == ["sinkhorn_kernel", "sinkhorn_backward_kernel"]
