"""Attention in 8 bits: how far it is from float32's, what it cannot see, and that kernels do what it is defined as."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.float8 import attention as triton_attention
from penstock.kernels.float8 import attention_reference
from penstock.kernels.float8.attention import Launches, quantize_heads
from penstock.kernels.float8.attention_kernels import (
    attention_keys_kernel,
    attention_queries_kernel,
    quantize_heads_kernel,
    quantize_output_gradient_kernel,
)
from penstock.kernels.float8.attention_limits import obstacle, parts_of
from penstock.kernels.float8.attention_reference import BLOCK
from penstock.kernels.float8.formats import E4M3, E4M3_FNUZ, E5M2, Format
from penstock.kernels.tuning import Launch
from tests.closeness import assert_close, decibels
from tests.kernels.ahead_of_time import TARGETS, Target, compile_for
from tests.kernels.eager_attention import eager_attention, seen_by

LATENT = (1, 2, 2, 192, 128)
GROUPED = (2, 4, 2, 128, 128)
NAMES = ("output", "dq", "dk", "dv")
BARS_DB = (20.0, 15.0, 15.0, 15.0)
"""Least signal to noise of the output and of the gradients, against float32."""

KERNELS_DB = 35.0 if torch.cuda.is_available() else 60.0
"""Least signal to noise of kernels against the definition. Sums of a GPU's matrix units are less exact, and where a
rounding flips for it, it does so by a sixteenth."""

truth = partial(attention_reference.attention, forward=E4M3, gradient=E4M3)
fast = partial(triton_attention.attention, forward=E4M3, gradient=E4M3)


def _heads(shape: tuple[int, ...], length: int) -> list[Tensor]:
    """Queries, keys and values, and the gradient of the output. Shape: rows, heads, shared heads, two widths."""
    B, H, G, N, M = shape
    return [torch.randn(B, length, *size) for size in ((H, N), (G, N), (G, M), (H, M))]


def _passes(attention: object, inputs: list[Tensor], **how: object) -> list[Tensor]:
    """Output and gradients."""
    *leaves, do_BSHM = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    o_BSHM = attention(*leaves, scale=leaves[0].shape[-1] ** -0.5, **how)  # type: ignore[operator]
    return [o_BSHM.detach(), *torch.autograd.grad(o_BSHM, leaves, do_BSHM)]


def _in_float32(*operands: Tensor, scale: float) -> Tensor:
    return eager_attention(*operands, seen_by(None, operands[0].shape[1]), scale)


def _assert_near(got: list[Tensor], expected: list[Tensor], bars: tuple[float, ...]) -> None:
    for name, one, other, bar in zip(NAMES, got, expected, bars, strict=True):
        found = decibels(one, other)
        assert found > bar, f"{name}: {found:.1f} dB, the bar is {bar}"


@pytest.mark.parametrize("gradient", [E4M3, E5M2], ids=lambda form: form.name)
@pytest.mark.parametrize("shape", [LATENT, GROUPED], ids=["latent", "grouped"])
def test_it_is_near_attention_in_float32(shape: tuple[int, ...], gradient: Format) -> None:
    inputs = _heads(shape, 300)
    _assert_near(_passes(truth, inputs, gradient=gradient), _passes(_in_float32, inputs), BARS_DB)


def test_rows_that_look_at_one_key_have_gradients() -> None:
    """There dS is a small difference of large numbers: with the usual sum, or the usual delta, all of it is noise."""
    inputs = _heads(LATENT, 300)
    q, k = inputs[:2]
    q += 10 * k[:, :1] / k[:, :1].norm(dim=-1, keepdim=True)
    _assert_near(_passes(truth, inputs), _passes(_in_float32, inputs), BARS_DB)


KERNEL_CASES = {
    "one position": ((1, 1, 1, 32, 32), 1, (64, 64), E4M3),
    "latent, three blocks": ((1, 1, 1, 192, 128), 260, (128, 64), E4M3),
    "shared keys, odd length": ((1, 4, 2, 96, 32), 131, (64, 128), E4M3),
    "gradients of 5 bits of exponent": ((1, 2, 1, 64, 64), 70, (64, 64), E5M2),
}


@pytest.mark.parametrize("case", KERNEL_CASES.values(), ids=KERNEL_CASES)
def test_kernels_equal_the_definition(case: tuple, device: torch.device) -> None:
    shape, length, (queries, keys), gradient = case
    launch = Launch(block_rows=queries, block_columns=keys, warps=4, stages=1)
    launches = Launches(forward=launch, queries=launch, keys=launch)
    inputs = [x.to(device) for x in _heads(shape, length)]
    got = _passes(fast, inputs, gradient=gradient, launches=launches)
    _assert_near(got, _passes(truth, inputs, gradient=gradient), (KERNELS_DB,) * 4)


@pytest.mark.parametrize("form", [E4M3, E4M3_FNUZ], ids=["ocp", "fnuz"])
def test_what_kernels_quantize_equals_the_definition_bit_by_bit(form: Format, device: torch.device) -> None:
    if form is E4M3_FNUZ and device.type == "cuda" and torch.version.hip is None:
        pytest.skip("only AMD's compilers know these numbers")
    x_BSHN = torch.randn(2, 200, 3, 192, device=device) * torch.randn(2, 200, 1, 1, device=device).exp()
    x_BSHN[0, 130:, 1] = 0
    got = quantize_heads(x_BSHN, form, columns=True)
    expected = attention_reference.quantize_heads(x_BSHN, form)
    rows_BHSN = got.rows_BHSN.view(torch.uint8)
    assert torch.equal(rows_BHSN[:, :, :200], expected.values.view(torch.uint8))
    assert not rows_BHSN[:, :, 200:].any(), "positions behind the last are zeros"
    assert got.columns_BHNS is not None and torch.equal(got.columns_BHNS.view(torch.uint8), rows_BHSN.mT)
    assert torch.equal(got.scales, expected.scales[..., 0])


def test_operands_may_lie_anyhow(device: torch.device) -> None:
    """Keys and values that are parts of one projection, a gradient that is the same number everywhere."""
    q, kv = torch.randn(1, 40, 2, 32, device=device), torch.randn(1, 40, 1, 64, device=device)
    parts = list(kv.split([32, 32], dim=-1))
    one = torch.ones((), device=device).expand(1, 40, 2, 32)
    got = _passes(fast, [q, *parts, one])
    expected = _passes(fast, [x.contiguous() for x in (q, *parts, one)])
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize("attention", [truth, fast], ids=["definition", "kernels"])
def test_a_later_token_never_changes_an_earlier_output(attention: object, device: torch.device) -> None:
    """Nor does one of the same block that is not larger than what the block has."""
    length, changed = 2 * BLOCK + 20, BLOCK + 50
    inputs = [x.to(device) for x in _heads((1, 1, 1, 32, 32), length)]
    q, k, v, _ = inputs
    before = attention(q, k, v, scale=0.2)  # type: ignore[operator]
    for x in (q, k, v):
        x[:, changed] *= -0.5
        x[:, 2 * BLOCK + 3] *= 1e3
    after = attention(q, k, v, scale=0.2)  # type: ignore[operator]
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed:], after[:, changed:])


@pytest.mark.parametrize("attention", [truth, fast], ids=["definition", "kernels"])
def test_outliers_make_no_nan(attention: object, device: torch.device) -> None:
    inputs = [x.to(device) for x in _heads((1, 2, 1, 32, 32), 100)]
    for x in inputs:
        x[:, 5, 0, 3] = 1e8
        x[:, 90, :, 1] = -1e12
        x[:, 7] = 0
        x[:, 9] = 1e-42
    for name, found in zip(NAMES, _passes(attention, inputs), strict=True):
        assert not found.isnan().any(), f"{name} is NaN"


@pytest.mark.parametrize("attention", [truth, fast], ids=["definition", "kernels"])
def test_where_all_scores_are_zero_values_are_averaged(attention: object, device: torch.device) -> None:
    inputs = [x.to(device) for x in _heads((1, 1, 1, 32, 32), 40)]
    q, k, v, _ = inputs
    q.zero_()
    k.zero_()
    o_BSHM, dq_BSHN, dk_BSGN, _ = _passes(attention, inputs)
    averages = v.cumsum(1) / torch.arange(1, 41, device=device)[:, None, None]
    assert_close(o_BSHM, averages, by="norm", tolerance=0.1, same_dtype=False)
    assert not dq_BSHN.any() and not dk_BSGN.any()


@pytest.mark.parametrize("attention", [truth, fast], ids=["definition", "kernels"])
def test_nan_stays_visible(attention: object, device: torch.device) -> None:
    inputs = [x.to(device) for x in _heads((1, 2, 2, 32, 32), 100)]
    inputs[1][0, 3, 0, 3] = math.nan
    o_BSHM = _passes(attention, inputs)[0]
    assert o_BSHM[:, 3:, 0].isnan().all()
    assert o_BSHM[:, :, 1].isfinite().all(), "another head has nothing to do with it"


def test_heads_have_nothing_to_do_with_each_other() -> None:
    """So ranks that divide heads, for good or for an exchange of positions, compute the same bits."""
    inputs = _heads((1, 4, 2, 32, 32), 140)
    whole, half = _passes(truth, inputs), _passes(truth, [x[:, :, : x.shape[2] // 2] for x in inputs])
    for all_heads, some_heads in zip(whole, half, strict=True):
        assert torch.equal(all_heads[:, :, : some_heads.shape[2]], some_heads)


def test_backward_keeps_operands_in_8_bits() -> None:
    kept: list[Tensor] = []
    leaves = [x.bfloat16().to("meta").requires_grad_() for x in _heads(LATENT, 256)[:3]]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        o_BSHM = fast(*leaves, scale=0.1)
    assert sum(x.nbytes for x in kept if x.dtype == E4M3.dtype) == sum(x.numel() for x in leaves)
    assert [tuple(x.shape) for x in kept if x.dtype == torch.bfloat16] == [tuple(o_BSHM.shape)]
    assert len(kept) == 8, "besides these the sums of rows and three tensors of scales"


def test_a_plan_has_it_without_memory() -> None:
    leaves = [x.bfloat16().to("meta").requires_grad_() for x in _heads(GROUPED, 300)[:3]]
    o_BSHM = fast(*leaves, scale=0.1)
    gradients = torch.autograd.grad(o_BSHM.sum(), leaves)
    assert (o_BSHM.shape, o_BSHM.dtype) == ((2, 300, 4, 128), torch.bfloat16)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in leaves]


def test_chips_and_widths_without_kernels_are_refused_with_the_reason() -> None:
    assert obstacle("sm_90", 192, 128) is None and obstacle("gfx942", 128, 128) is None
    assert obstacle("cpu", 80, 80) is None, "by its definition it can always be computed"
    assert "sm_80" in (obstacle("sm_80", 128, 128) or "")
    for query, value in ((80, 64), (256, 128), (144, 128), (16, 32), (128, 192), (128, 96)):
        assert "wide" in (obstacle("sm_90", query, value) or ""), (query, value)
    with pytest.raises(KernelError, match="8 bits"):
        fast(*_heads((1, 1, 1, 80, 64), 8)[:3], scale=1.0)


@pytest.mark.parametrize("shape", [(1, 3, 2, 32, 32), (1, 2, 2, 64, 32)], ids=["heads", "width"])
def test_heads_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    q, k, v, _ = _heads(shape, 8)
    with pytest.raises(KernelError, match="fit"):
        fast(q[..., :32], k, v, scale=1.0)


def _operand(target: Target) -> str:
    return "*fp8e4b8:16" if target.name == "gfx942" else "*fp8e4nv:16"


def _largest(target: Target) -> float:
    return (E4M3_FNUZ if target.name == "gfx942" else E4M3).largest


SIZES = {"positions": "i32", "padded": "i32:16", "heads": "i32", "factor": "fp32"}
NUMBERS = ("q_scales_ptr", "k_scales_ptr", "v_scales_ptr", "do_scales_ptr", "log_sums_ptr", "delta_ptr")


def _long_kernel(target: Target, name: str, widths: tuple[int, int]) -> tuple[object, dict, dict, Launch]:
    """Kernel, types, constants and launch of the table."""
    is_keys = name == "keys"
    launch: Launch = vars(triton_attention.TABLE[target.name])[name]
    wide, rest = parts_of(widths[0])
    bits = ("k_ptr", "q_ptr", "q_columns_ptr", "v_ptr", "do_ptr", "do_columns_ptr")
    bits = bits if is_keys else ("q_ptr", "k_ptr", "k_columns_ptr", "v_ptr", "do_ptr")
    outputs = ("dk_ptr", "dv_ptr") if is_keys else ("out_ptr",)
    types = dict.fromkeys(bits, _operand(target)) | dict.fromkeys(NUMBERS, "*fp32:16") | SIZES
    types |= dict.fromkeys(outputs, "*bf16:16")
    constants = {
        "WIDE": wide,
        "REST": rest,
        "VALUE": widths[1],
        "SHARE": 1,
        "LARGEST": _largest(target),
        "BLOCK_QUERIES": launch.block_rows,
        "BLOCK_KEYS": launch.block_columns,
        "BLOCK": BLOCK,
    }
    if is_keys:
        return attention_keys_kernel, types, constants | {"LARGEST_GRADIENT": _largest(target)}, launch
    return attention_queries_kernel, types, constants | {"BACKWARD": name == "queries"}, launch


TARGETS_AND_WIDTHS = [
    pytest.param(
        target,
        widths,
        id=f"{target.name}-{widths[0]}",
        marks=() if target.name in ("sm_90", "gfx942") and widths == (192, 128) else pytest.mark.slow,
    )
    for target in TARGETS.values()
    for widths in ((192, 128), (128, 128))
]


MEASURED_SPILLS = {("sm_90", "forward"): 16, ("sm_90", "queries"): 128, ("sm_90", "keys"): 320}
"""Bytes of launches that were the fastest all the same."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward", "queries", "keys"])
@pytest.mark.parametrize(("target", "widths"), TARGETS_AND_WIDTHS)
def test_long_kernels_compile_to_products_of_8_bits_and_spill_no_more_than_was_measured(
    target: Target, widths: tuple[int, int], name: str
) -> None:
    kernel, types, constants, launch = _long_kernel(target, name, widths)
    compiled = compile_for(kernel, types, constants, target, num_warps=launch.warps, num_stages=launch.stages)
    assert compiled.spills <= MEASURED_SPILLS.get((target.name, name), 0), compiled.summary
    assert compiled.shared_bytes <= target.shared_bytes, compiled.summary
    bits = {"sm_90": "e4m3.e4m3", "sm_100": "kind::f8f6f4", "gfx942": "fp8_fp8", "gfx950": "f8f6f4"}[target.name]
    products = [line for line in compiled.asm.splitlines() if _is_product(target, line)]
    assert products and all(bits in line for line in products), compiled.summary


def _is_product(target: Target, line: str) -> bool:
    start = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}.get(target.name, "v_mfma_")
    return start in line


@pytest.mark.parametrize("target", [TARGETS["sm_90"], TARGETS["gfx942"]], ids=lambda target: target.name)
def test_short_kernels_compile_without_spills(target: Target) -> None:
    numbers = ("positions", "heads")
    strides = ("stride_batch", "stride_position", "stride_head")
    types = dict.fromkeys(("rows_ptr", "columns_ptr"), _operand(target)) | {"scales_ptr": "*fp32:16"}
    types |= dict.fromkeys(numbers, "i32") | dict.fromkeys(strides, "i32:16")
    constants = {"LARGEST": _largest(target), "BLOCK": BLOCK}
    heads = {"WIDTH": 192, "WIDE": 128, "REST": 64, "COLUMNS": True}
    for kernel, more, sizes in (
        (quantize_heads_kernel, {"x_ptr": "*bf16:16"}, heads),
        (
            quantize_output_gradient_kernel,
            {"do_ptr": "*bf16:16", "o_ptr": "*bf16:16", "delta_ptr": "*fp32:16"},
            {"WIDTH": 128},
        ),
    ):
        compiled = compile_for(kernel, types | more, constants | sizes, target, num_warps=8)
        assert compiled.spills == 0, compiled.summary
