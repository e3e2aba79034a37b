"""RMSNorm into 8 bits equals a norm and quantization behind it, and compiles for every chip."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import norm as plain_norm
from penstock.kernels.float8 import norm, operators
from penstock.kernels.float8.quantized import (
    BLOCKWISE,
    BLOCKWISE_SQUARE,
    E4M3,
    E4M3_FNUZ,
    MXFP8,
    ROWWISE,
    Format,
    Recipe,
    format_on,
)
from penstock.kernels.float8.reference import quantize_rows
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta
from tests.kernels.float8.draw_quantized import assert_all_same, assert_same
from tests.kernels.parity import assert_parity

EPSILON = 1e-5


def inputs(tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x_TD, residual_TD = torch.randn(2, tokens, width, device=device)
    x_TD[tokens // 2] *= 1e3
    weight_D = 1 + 0.1 * torch.randn(width, device=device)
    return x_TD.to(dtype), residual_TD.to(dtype), weight_D.to(dtype)


@pytest.mark.often(
    "dtype0-True-blockwise", "dtype1-False-mxfp8", "dtype1-False-rowwise", "dtype0-True-blockwise-square"
)
@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE, MXFP8, ROWWISE], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(("dtype", "columns"), [(torch.bfloat16, True), (torch.float32, False)])
def test_both_copies_are_of_the_very_rows_that_come_out(
    dtype: torch.dtype, columns: bool, recipe: Recipe, device: torch.device
) -> None:
    x_TD, residual_TD, weight_D = inputs(130, 2048 if device.type == "cuda" else 160, device, dtype)
    expected_TD, expected_sum_TD = plain_norm.add_rms_norm(x_TD, residual_TD, weight_D, EPSILON)
    normed_TD, sum_TD, found = norm.rms_norm(x_TD, residual_TD, weight_D, EPSILON, recipe, E4M3, columns=columns)
    assert torch.equal(normed_TD, expected_TD) and torch.equal(sum_TD, expected_sum_TD)
    expected = quantize_rows(expected_TD, recipe, E4M3, columns=recipe.columns if columns else None)
    assert_all_same(found, expected)


@pytest.mark.parametrize("form", [E4M3, E4M3_FNUZ], ids=["ocp", "fnuz"])
def test_rows_are_not_written_in_16_bits_without_keep_plain(form: Format, device: torch.device) -> None:
    x_TD, residual_TD, weight_D = inputs(20, 144, device, torch.float32)
    for residual in (None, residual_TD):
        given = x_TD, residual, weight_D, EPSILON, BLOCKWISE, form
        kept_TD, sum_TD, expected = norm.rms_norm(*given, columns=True)
        carrier_TD, same_TD, found = norm.rms_norm(*given, columns=True, keep_plain=False)
        assert (carrier_TD.shape, carrier_TD.dtype) == (kept_TD.shape, kept_TD.dtype)
        assert carrier_TD.untyped_storage().nbytes() == 4
        assert torch.equal(same_TD, sum_TD) and (residual is not None or torch.equal(sum_TD, x_TD))
        assert_all_same(found, expected)


@pytest.mark.parametrize("keep_plain", [True, False])
@pytest.mark.parametrize("module", [norm, operators], ids=["triton", "reference"])
def test_gradients_are_those_of_the_norm(module: ModuleType, keep_plain: bool, device: torch.device) -> None:
    x_TD, residual_TD, weight_D = inputs(20, 144, device, torch.float32)
    given_TD = torch.randn_like(x_TD)

    def gradients(function: Callable[..., Any], *tensors: Tensor, outputs: int = 2) -> list[Tensor | None]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        torch.autograd.backward(function(*leaves)[:outputs], [given_TD, given_TD * 2][:outputs])
        return [leaf.grad for leaf in leaves]

    how = {"epsilon": EPSILON, "recipe": BLOCKWISE, "form": E4M3, "columns": True, "keep_plain": keep_plain}
    summed = partial(module.rms_norm, **how)
    plain = partial(plain_norm.add_rms_norm, epsilon=EPSILON)
    pairs = [(gradients(f, x_TD, residual_TD, weight_D) for f in (summed, plain))]
    plain = partial(plain_norm.rms_norm_beside, epsilon=EPSILON)
    for outputs in (1, 2):
        both = (lambda x_TD, weight_D: summed(x_TD, None, weight_D)), plain
        pairs.append([gradients(f, x_TD, weight_D, outputs=outputs) for f in both])
    for found, expected in pairs:
        assert_close(found, expected, tolerance=1e-5)


def test_rows_that_lie_apart_are_read_where_they_are(device: torch.device) -> None:
    x_TD, _, weight_D = inputs(20, 160, device, torch.float32)
    wide_TD = torch.randn(20, 200, device=device)
    wide_TD[:, :160] = x_TD
    _, _, expected = norm.rms_norm(x_TD, None, weight_D, EPSILON, BLOCKWISE, E4M3, columns=True)
    _, _, found = norm.rms_norm(wide_TD[:, :160], None, weight_D, EPSILON, BLOCKWISE, E4M3, columns=True)
    assert_same(found.columns, expected.columns)


def test_a_norm_in_8_bits_has_parity_with_its_reference(device: torch.device) -> None:
    def normed(module: ModuleType) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda *x: module.rms_norm(*x, EPSILON, BLOCKWISE, E4M3, columns=False)[:2]

    assert_parity(normed(norm), normed(operators), list(inputs(20, 144, device, torch.bfloat16)))


def test_misfits_are_refused(device: torch.device) -> None:
    weight_D = torch.ones(16, device=device)
    with pytest.raises(KernelError, match="takes a matrix"):
        norm.rms_norm(torch.zeros(2, 3, 16), None, weight_D, EPSILON, BLOCKWISE, E4M3, columns=True)
    with pytest.raises(KernelError, match="one shape"):
        norm.rms_norm(torch.zeros(2, 16), torch.zeros(1, 16), weight_D, EPSILON, BLOCKWISE, E4M3, columns=True)


@pytest.mark.often("sm_90-blockwise", "gfx942-mxfp8")
@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE, MXFP8], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles_without_spills(target: str, recipe: Recipe) -> None:
    if recipe is MXFP8 and target in ("sm_90", "gfx942"):
        pytest.skip("its matrix units apply no scales of 32 numbers")
    given = on_meta(8191, 7168), on_meta(8191, 7168), on_meta(7168), EPSILON, recipe, format_on("e4m3", target)
    for compiled in compile_without_spills(target, lambda: norm.rms_norm(*given, columns=True)):
        assert compiled.shared_bytes <= TARGETS[target].shared_bytes, compiled.summary
