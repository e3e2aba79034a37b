"""RMSNorm, alone and of a residual sum, against its reference, and compiled for every chip."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import reference
from penstock.kernels.norm import (
    BACKWARD_LAUNCH,
    SUM_BLOCK,
    add_rms_norm,
    add_three,
    fan_out,
    rms_norm,
    rms_norm_beside,
    stages_of,
    tile_of,
)
from penstock.kernels.operators import torch_rms_norm
from penstock.kernels.tuning import KernelLaunch
from penstock.plan.op_recorder import OpRecorder
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta
from tests.kernels.parity import assert_parity

SMALL_TILES = dict.fromkeys(
    ("norm.LAUNCH", "norm.BACKWARD_LAUNCH"), KernelLaunch(block_rows=2, block_columns=16, warps=1)
)
EPSILON = 1e-5


def _with(operator: Callable[..., Any], offset: float = 0.0) -> Callable[..., Any]:
    return lambda *inputs: operator(*inputs, EPSILON, offset)


NORMS = {
    "rms_norm": (_with(rms_norm), _with(reference.rms_norm)),
    "rms_norm_beside": (_with(rms_norm_beside), _with(reference.rms_norm_beside)),
    "add_rms_norm": (_with(add_rms_norm), _with(reference.add_rms_norm)),
    "rms_norm of zero-centred weights": (_with(rms_norm, 1.0), _with(reference.rms_norm, 1.0)),
}
NORM, TRUTH = NORMS["rms_norm"]


def _draw(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Rows, the residual if the norm adds one, and a weight."""
    rows = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2 if name == "add_rms_norm" else 1)]
    centre = 0 if "zero-centred" in name else 1
    return [*rows, (centre + 0.1 * torch.randn(shape[-1], device=device)).to(dtype)]


def test_weights_centred_at_zero_are_added_to_one() -> None:
    x_TD, weight_D = torch.randn(3, 8), 0.1 * torch.randn(8)
    for norm in (reference.rms_norm, torch_rms_norm):
        assert_close(norm(x_TD, weight_D, EPSILON, 1.0), norm(x_TD, 1 + weight_D, EPSILON))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(37, 16), (1, 24), (3, 5, 8), (2, 70)])
@pytest.mark.parametrize("name", NORMS)
def test_norms_and_their_gradients_equal_the_reference(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    assert_parity(*NORMS[name], _draw(name, shape, device, dtype))


@pytest.mark.parametrize("name", ["rms_norm_beside", "add_rms_norm"])
def test_either_output_alone_may_be_used(name: str, device: torch.device) -> None:
    fast, truth = NORMS[name]
    for index in (0, 1):
        *rows, weight_D = _draw(name, (5, 16), device)
        assert_parity(
            lambda *x, index=index, weight_D=weight_D: fast(*x, weight_D)[index],
            lambda *x, index=index, weight_D=weight_D: truth(*x, weight_D)[index],
            rows,
        )


def test_one_node_of_autograd_returns_the_norm_and_its_input(device: torch.device) -> None:
    x_TD, weight_D = _draw("rms_norm_beside", (37, 16), device)
    normed_TD, beside_TD = rms_norm_beside(x_TD.requires_grad_(), weight_D, EPSILON)
    assert torch.equal(beside_TD, x_TD) and beside_TD.data_ptr() == x_TD.data_ptr()
    assert normed_TD.grad_fn is beside_TD.grad_fn, "autograd adds nothing behind one node"


def test_a_weight_of_another_dtype_promotes_as_the_reference_does(device: torch.device) -> None:
    x_TD, weight_D = torch.randn(4, 16, device=device, dtype=torch.bfloat16), torch.ones(16, device=device)
    normed_TD = NORM(x_TD, weight_D)
    expected_TD = reference.rms_norm(x_TD, weight_D, EPSILON)
    assert normed_TD.dtype == expected_TD.dtype == torch.float32
    assert_close(normed_TD, expected_TD, tolerance=2**-7)  # the last place of bfloat16


def test_rows_may_lie_apart_or_be_zero(device: torch.device) -> None:
    weight_D = torch.rand(16, device=device)
    apart_TD, across_TD = torch.randn(5, 24, device=device)[:, :16], torch.randn(16, 5, device=device).T
    for x_TD in (apart_TD, across_TD, torch.zeros(3, 16, device=device)):
        assert_parity(NORM, TRUTH, [x_TD, weight_D])


def test_no_rows_leave_the_weight_without_gradient(device: torch.device) -> None:
    x_TD, weight_D = torch.zeros(0, 16, device=device), torch.ones(16, device=device, requires_grad=True)
    NORM(x_TD, weight_D).sum().backward()
    assert weight_D.grad is not None and not weight_D.grad.any(), "a sum over no rows is zero"
    assert add_three(x_TD, x_TD, x_TD).shape == (0, 16)


def test_misfits_are_refused() -> None:
    with pytest.raises(KernelError, match="weight"):
        rms_norm(torch.zeros(2, 8), torch.zeros(7), EPSILON)
    with pytest.raises(KernelError, match="one shape"):
        add_rms_norm(torch.zeros(2, 8), torch.zeros(1, 8), torch.zeros(8), EPSILON)
    with pytest.raises(KernelError, match="one shape"):
        add_three(torch.zeros(2, 3), torch.zeros(3), torch.zeros(2, 3))


def test_tiles_loaded_ahead_fit_into_shared_memory() -> None:
    wide = tile_of(16384, BACKWARD_LAUNCH)
    assert [stages_of(2 * 8192, BACKWARD_LAUNCH), stages_of(4 * 8192, BACKWARD_LAUNCH)] == [3, 2]
    assert stages_of(4 * wide[0] * wide[1], BACKWARD_LAUNCH) == 1, "float32 rows of 16,384 are not loaded ahead"


@pytest.mark.often("7168-sm_90")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [128, 7168])
def test_the_kernels_compile_without_spills(width: int, target: str) -> None:
    x_TD, residual_TD, weight_D = on_meta(8191, width), on_meta(8191, width), on_meta(width)

    def both_passes() -> None:
        outputs = add_rms_norm(x_TD, residual_TD, weight_D.requires_grad_(), EPSILON)
        torch.autograd.backward(outputs, (x_TD, residual_TD))
        add_three(x_TD, x_TD, residual_TD)

    found = compile_without_spills(target, both_passes)
    # Norm, its gradient, the sum of the weight's parts, the sum of three.
    assert len(found) == 4 and all(one.shared_bytes <= TARGETS[target].shared_bytes for one in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 700), (2, 3, 5), (SUM_BLOCK,), (1,)])
def test_a_sum_of_three_and_its_gradients_equal_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    terms = list(torch.randn(3, *shape, device=device, dtype=dtype))
    assert_parity(add_three, reference.add_three, terms)


def test_a_sum_of_three_is_rounded_once(device: torch.device) -> None:
    # A half is half of the last place of 1 in bfloat16.
    large, half = (torch.full((4,), value, device=device, dtype=torch.bfloat16) for value in (1.0, 2.0**-8))
    for add in (add_three, reference.add_three):
        assert add(large, half, half).tolist() == [1.0 + 2.0**-7] * 4
    assert ((large + half) + half).tolist() == [1.0] * 4, "else rounding would lose both"


def test_float32_is_added_in_the_order_of_two_additions_wherever_it_lies(device: torch.device) -> None:
    x, y, z = torch.randn(3, 5000, device=device)
    assert torch.equal(add_three(x, y, z), (x + y) + z)
    assert torch.equal(reference.add_three(x, y, z), (x + y) + z)
    x, y = torch.randn(6, 4, device=device).T, torch.randn(4, 9, device=device)[:, :6]
    z = torch.randn(4, 6, device=device).bfloat16()
    found = add_three(x, y, z)
    assert found.is_contiguous() and found.dtype == torch.float32, "the widest dtype wins"
    assert_close(found, x + y + z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("readers", [(0,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_three_readers_of_one_tensor_give_it_the_sum_of_their_gradients(
    readers: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    def read(form: object, x_TD: Tensor) -> tuple[Tensor, ...]:
        copies = form(x_TD)
        return tuple(copies[reader] * (1 + reader) for reader in readers)

    x_TD = torch.randn(5, 7, device=device, dtype=dtype)
    assert_parity(lambda x: read(fan_out, x), lambda x: read(reference.fan_out, x), [x_TD])


def test_three_readers_share_memory_and_their_gradients_are_one_kernel() -> None:
    x_TD = torch.randn(4, 8, requires_grad=True)
    assert {copy.data_ptr() for copy in fan_out(x_TD)} == {x_TD.data_ptr()}
    tape = OpRecorder()
    with tape:
        copies = fan_out(torch.empty(4, 8, device="meta", requires_grad=True))
        assert tape.cut() == ()
        gradients = [torch.empty(4, 8, device="meta") for _ in copies]
        torch.autograd.backward(copies, gradients)
    (one,) = tape.cut()
    assert (one.name, one.shapes) == ("add_three_kernel", ((4, 8),) * 4)  # three gradients and their sum
