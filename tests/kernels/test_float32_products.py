"""Products of bfloat16 operands that are as exact as those of float32."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.float32_products import LEFT, RIGHT, add_product, float32_linear, in_parts, linear_in_parts
from tests.closeness import assert_close, relative_error

T, E, D = 96, 8, 64

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _draw(device: str, tokens: int = T, experts: int = E, hidden: int = D) -> tuple[Tensor, Tensor, Tensor]:
    """x in bfloat16, weight and the logits' gradient in float32."""
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(tokens, hidden, generator=generator).bfloat16()
    weight_ED = torch.randn(experts, hidden, generator=generator) * hidden**-0.5
    dlogits_TE = torch.randn(tokens, experts, generator=generator)
    return x_TD.to(device), weight_ED.to(device), dlogits_TE.to(device)


def _results(
    linear: Callable[[Tensor, Tensor], Tensor], x_TD: Tensor, weight_ED: Tensor, dy_TE: Tensor
) -> list[Tensor]:
    """Logits, and gradients of both operands."""
    x_TD, weight_ED = x_TD.detach().requires_grad_(), weight_ED.detach().requires_grad_()
    logits_TE = linear(x_TD, weight_ED)
    return [logits_TE.detach(), *torch.autograd.grad(logits_TE, (x_TD, weight_ED), dy_TE)]


@pytest.mark.parametrize("device", DEVICES)
def test_logits_and_gradients_are_as_exact_as_float32_and_far_from_bfloat16(device: str) -> None:
    drawn = _draw(device) if device == "cpu" else _draw(device, 8192, 64, 2048)
    exact = _results(F.linear, *(one.double() for one in drawn))
    found = _results(linear_in_parts, *drawn)
    plain = _results(lambda x_TD, weight_ED: F.linear(x_TD.float(), weight_ED), *drawn)
    rounded = _results(lambda x_TD, weight_ED: F.linear(x_TD, weight_ED.bfloat16()).float(), *drawn)
    assert [one.dtype for one in found] == [torch.float32, torch.bfloat16, torch.float32]
    for index, (mine, true) in enumerate(zip(found, exact, strict=True)):
        # The gradient of x is rounded to bfloat16 either way.
        in_float32, in_bfloat16 = (relative_error(one[index], true, by="norm") for one in (plain, rounded))
        limit = 1.001 * in_float32 if index == 1 else 1e-6 if device == "cpu" else 1e-5
        assert relative_error(mine, true, by="norm") < limit < in_bfloat16, index


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_x_is_exact_to_its_rounding(device: str) -> None:
    """Powers of two far apart in the operands: the result is bfloat16's to the bit only if the small parts counted."""
    weight_ED = torch.tensor([[1.0], [2.0**-12]], device=device)
    dlogits_TE = torch.tensor([[1.0 + 2.0**-9, -1.0], [-1.0, 2.0**12 * (1.0 + 2.0**-20)]], device=device)
    x_TD = torch.zeros(2, 1, device=device, dtype=torch.bfloat16)
    (_, dx_TD, _) = _results(linear_in_parts, x_TD, weight_ED, dlogits_TE)
    exact_TD = dlogits_TE.double() @ weight_ED.double()
    assert torch.equal(dx_TD, exact_TD.bfloat16())


def test_a_product_in_parts_keeps_its_operands_and_no_parts() -> None:
    x_TD, weight_ED, _ = _draw("cpu")
    kept: list[int] = []
    weight_ED.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.data_ptr()), lambda _: x_TD):
        linear_in_parts(x_TD, weight_ED)
    assert kept == [x_TD.data_ptr(), weight_ED.data_ptr()]


@given(st.floats(2.0**-100, 2.0**100, width=32), st.booleans())
def test_three_parts_are_the_value_to_the_last_bit(value: float, is_negative: bool) -> None:
    values = torch.tensor([-value if is_negative else value])
    for dim, places in itertools.product((0, 1), (LEFT, RIGHT)):
        six = in_parts(values, dim, places)
        assert (six.dtype, six.shape[dim]) == (torch.bfloat16, 6)
        parts = [six.select(dim, range(6)[place][0]) for place in places]
        assert torch.equal(sum(part.double() for part in parts), values.double())


def test_six_pairs_are_those_that_matter_in_float32() -> None:
    """Parts count as 1, 2, 3 from the largest; a pair is worth it if the two add up to 4 at most."""
    names = [[0] * 6, [0] * 6]
    for side, places in zip(names, (LEFT, RIGHT), strict=True):
        for part, place in enumerate(places, 1):
            side[place] = [part] * len(side[place])
    pairs = {(left, right) for left in (1, 2, 3) for right in (1, 2, 3) if left + right <= 4}
    assert {*zip(*names, strict=True)} == pairs
    assert {*names[0][:3]} == {*names[1][2:5]} == {1, 2, 3}, "slices of the other two products"


@pytest.mark.parametrize("device", DEVICES)
def test_only_bfloat16_on_a_gpu_is_multiplied_in_parts(device: str) -> None:
    x_TD, weight_ED, _ = _draw(device)
    linear = linear_in_parts if device == "cuda" else lambda x_TD, weight_ED: F.linear(x_TD.float(), weight_ED)
    assert torch.equal(float32_linear(x_TD, weight_ED), linear(x_TD, weight_ED))
    assert torch.equal(float32_linear(x_TD.float(), weight_ED), F.linear(x_TD.float(), weight_ED))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_added_without_being_rounded(device: str, dtype: torch.dtype) -> None:
    x_TD, _, dy_TE = _draw(device)
    x_TD, dy_TE = x_TD.to(dtype), dy_TE.to(dtype)
    total_ED = torch.full((E, D), 3.0, device=device)
    address = total_ED.data_ptr()
    exact_ED = dy_TE.double().T @ x_TD.double()
    for count in (1, 2):
        add_product(total_ED, dy_TE.T, x_TD)
        assert_close(total_ED.double(), 3.0 + count * exact_ED, tolerance=1e-5)
    add_product(total_ED, dy_TE.T, x_TD, overwrite=True)
    assert_close(total_ED.double(), exact_ED, tolerance=1e-5)
    assert total_ED.data_ptr() == address


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_may_overwrite_nan(device: str) -> None:
    x_TD, _, dy_TE = _draw(device)
    total_ED = torch.full((E, D), torch.nan, device=device)
    add_product(total_ED, dy_TE.bfloat16().T, x_TD, overwrite=True)
    assert bool(total_ED.isfinite().all())
