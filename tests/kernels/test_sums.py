"""Sums of three, forward and of gradients, against their definitions, and what the kernel becomes on every chip."""

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import reference
from penstock.kernels.norm import SUM_BLOCK, add_three, add_three_kernel, fan_out
from penstock.plan.op_recorder import OpRecorder
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, compile_for
from tests.kernels.parity import assert_parity


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 700), (2, 3, 5), (SUM_BLOCK,), (1,)])
def test_a_sum_of_three_and_its_gradients_equal_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    terms = list(torch.randn(3, *shape, device=device, dtype=dtype))
    assert_parity(add_three, reference.add_three, terms)


def test_a_sum_of_three_is_rounded_once(device: torch.device) -> None:
    large, half = (torch.full((4,), value, device=device, dtype=torch.bfloat16) for value in (1.0, 2.0**-8))
    for add in (add_three, reference.add_three):
        assert add(large, half, half).tolist() == [1.0 + 2.0**-7] * 4
    assert ((large + half) + half).tolist() == [1.0] * 4, "else rounding would lose both"


def test_float32_is_added_in_the_order_of_two_additions(device: torch.device) -> None:
    x, y, z = torch.randn(3, 5000, device=device)
    assert torch.equal(add_three(x, y, z), (x + y) + z)
    assert torch.equal(reference.add_three(x, y, z), (x + y) + z)


def test_terms_may_lie_apart_and_the_widest_dtype_wins(device: torch.device) -> None:
    x, y = torch.randn(6, 4, device=device).T, torch.randn(4, 9, device=device)[:, :6]
    z = torch.randn(4, 6, device=device).bfloat16()
    found = add_three(x, y, z)
    assert found.is_contiguous() and found.dtype == torch.float32
    assert_close(found, x + y + z)


def test_no_rows_have_an_empty_sum(device: torch.device) -> None:
    empty = torch.zeros(0, 8, device=device)
    assert add_three(empty, empty, empty).shape == (0, 8)


def test_terms_of_different_shapes_are_refused() -> None:
    with pytest.raises(KernelError, match="one shape"):
        add_three(torch.zeros(2, 3), torch.zeros(3), torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("readers", [(0,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_three_readers_of_one_tensor_give_it_the_sum_of_their_gradients(
    readers: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    def read(form: object, x_TD: Tensor) -> tuple[Tensor, ...]:
        copies = form(x_TD)  # type: ignore[operator]
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
    assert (one.name, one.shapes) == ("add_three_kernel", ((4, 8),) * 4)


@pytest.mark.often("*sm_90*", "*gfx942*")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles_without_spills(target: str) -> None:
    pointers = dict.fromkeys(("x_ptr", "y_ptr", "z_ptr", "sum_ptr"), "*bf16:16")
    compiled = compile_for(add_three_kernel, pointers | {"numbers": "i32:16"}, {"BLOCK": SUM_BLOCK}, TARGETS[target])
    assert compiled.spills == 0, compiled.summary
