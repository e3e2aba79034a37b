"""The operators that need nothing but PyTorch, where PyTorch's own kernels leave memory as it was."""

from collections.abc import Iterator

import pytest
import torch

from penstock.kernels.operators import REFERENCE, TORCH, Operators


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that was not written is NaN."""
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("operators", [REFERENCE, TORCH], ids=["reference", "torch"])
@pytest.mark.usefixtures("poisoned_memory")
def test_rows_past_the_last_expert_take_no_part_in_outputs_and_gradients(operators: Operators) -> None:
    used, rows, hidden, width = 5, 8, 16, 32
    counts_e = torch.tensor([2, 3], dtype=torch.int32)
    x_RD, weights_R = torch.randn(rows, hidden).requires_grad_(), torch.rand(rows).requires_grad_()
    gate_up_eFD = torch.randn(2, 2 * width, hidden).requires_grad_()
    down_eDF = torch.randn(2, hidden, width).requires_grad_()
    y_RD = operators.expert_ffn(x_RD, gate_up_eFD, down_eDF, counts_e, weights_R)
    y_RD.sum().backward()
    assert y_RD[used:].eq(0).all()
    for gradient in (x_RD.grad, weights_R.grad):
        assert gradient is not None
        assert gradient[used:].eq(0).all() and gradient.isfinite().all()
    for gradient in (gate_up_eFD.grad, down_eDF.grad):
        assert gradient is not None and gradient.isfinite().all()
