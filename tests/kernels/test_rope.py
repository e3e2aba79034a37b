"""Rotary embedding and the assembly of latent attention's heads against their references, on every chip."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.base.errors import KernelError
from penstock.kernels import reference
from penstock.kernels.rope import mla_heads, rotate
from penstock.kernels.tuning import KernelLaunch
from tests.closeness import assert_equal
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta
from tests.kernels.parity import assert_near, assert_parity

SMALL_TILES = {"rope.LAUNCH": KernelLaunch(block_rows=2, block_columns=0, warps=1)}


def _angles(batch: int, positions: int, rotary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles_BSP = torch.rand(batch, positions, rotary // 2, device=device) * 6
    return angles_BSP.cos(), angles_BSP.sin()


def _compare(
    fast: Callable[..., Any], truth: Callable[..., Any], angles: tuple[Tensor, Tensor], inputs: Sequence[Tensor]
) -> None:
    assert_parity(lambda *x: fast(*x, *angles), lambda *x: truth(*x, *angles), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "batch"), [((2, 3, 5, 8), 2), ((2, 3, 4, 12), 1), ((1, 1, 1, 2), 1)])
def test_rotate_and_its_gradient_equal_the_reference(
    shape: tuple[int, int, int, int], batch: int, dtype: torch.dtype, device: torch.device
) -> None:
    x_BSHP = torch.randn(shape, device=device, dtype=dtype)
    _compare(rotate, reference.rotate, _angles(batch, shape[1], shape[3], device), [x_BSHP])


@pytest.mark.parametrize(("width", "rotary"), [(8, 4), (12, 2), (10, 8)])
def test_features_behind_the_rotated_ones_pass_as_they_are(width: int, rotary: int, device: torch.device) -> None:
    x_BSHN = torch.randn(2, 3, 5, width, device=device)
    angles = _angles(2, 3, rotary, device)
    _compare(rotate, reference.rotate, angles, [x_BSHN])
    assert_equal(reference.rotate(x_BSHN, *angles)[..., rotary:], x_BSHN[..., rotary:])


def test_rotate_reads_heads_in_any_memory_order(device: torch.device) -> None:
    for x_BSHP in (
        torch.randn(2, 5, 3, 8, device=device).transpose(1, 2),  # heads first, as attention's gradients come
        torch.randn(2, 3, 5, 12, device=device)[..., :8],  # a part of wider heads
        torch.randn(8, 2, 3, 5, device=device).permute(1, 2, 3, 0),  # numbers of a head lie apart
    ):
        _compare(rotate, reference.rotate, _angles(2, 3, 8, device), [x_BSHP])


@pytest.mark.often("3-8-*-dtype1", "4-6-*-dtype0", "1-1-*-dtype0", "5-16-*-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "plain", "rotary", "value", "batch"),
    [(3, 8, 4, 8, 2), (4, 6, 8, 10, 1), (1, 1, 2, 1, 1), (5, 16, 6, 3, 2)],
)
def test_mla_heads_and_all_gradients_equal_the_reference(
    heads: int, plain: int, rotary: int, value: int, batch: int, dtype: torch.dtype, device: torch.device
) -> None:
    q_BSHN = torch.randn(2, 3, heads, plain + rotary, device=device, dtype=dtype)
    kv_BSHN = torch.randn(2, 3, heads, plain + value, device=device, dtype=dtype)
    k_rope_BSP = torch.randn(2, 3, rotary, device=device, dtype=dtype)
    angles = _angles(batch, 3, rotary, device)
    _compare(mla_heads, reference.mla_heads, angles, [q_BSHN, kv_BSHN, k_rope_BSP])


def test_mla_heads_reads_the_shared_key_where_the_projection_left_it(device: torch.device) -> None:
    latent_and_key = torch.randn(2, 3, 20, device=device)
    q_BSHN, kv_BSHN = torch.randn(2, 3, 2, 10, device=device), torch.randn(2, 3, 2, 12, device=device)
    given = [q_BSHN, kv_BSHN, latent_and_key[..., 16:]]  # the key follows 16 numbers of the latent
    _compare(mla_heads, reference.mla_heads, _angles(1, 3, 4, device), given)


def test_attention_takes_the_value_as_a_view(device: torch.device) -> None:
    """Values and gradients through attention, whose gradients come back in its own memory order."""
    cos_BSP, sin_BSP = _angles(1, 8, 16, device)
    inputs = [torch.randn(2, 8, 2, 48, device=device), torch.randn(2, 8, 2, 64, device=device)]
    inputs.append(torch.randn(2, 8, 16, device=device))

    def attend(heads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.scaled_dot_product_attention(*(head.transpose(1, 2) for head in heads), is_causal=True)

    assert_parity(
        lambda *x: attend(mla_heads(*x, cos_BSP, sin_BSP)),
        lambda *x: attend(reference.mla_heads(*x, cos_BSP, sin_BSP)),
        inputs,
    )
    q_BSHN, kv_BSHN, k_rope_BSP = inputs
    v_BSHM = mla_heads(q_BSHN, kv_BSHN, k_rope_BSP, cos_BSP, sin_BSP)[2]
    assert v_BSHM.untyped_storage().data_ptr() == kv_BSHN.untyped_storage().data_ptr(), "the value must not be copied"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
def test_every_backend_of_attention_takes_the_value_as_a_view(backend: str) -> None:
    cos_BSP, sin_BSP = _angles(1, 128, 64, torch.device("cuda"))
    inputs = [torch.randn(2, 128, 4, width, device="cuda", dtype=torch.bfloat16) for width in (128, 192)]
    inputs.append(torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16))
    inputs = [x.requires_grad_() for x in inputs]

    def attend(as_view: bool) -> tuple[Tensor, ...]:
        q_BSHN, k_BSHN, v_BSHM = mla_heads(*inputs, cos_BSP, sin_BSP)
        heads = (q_BSHN, k_BSHN, v_BSHM if as_view else v_BSHM.contiguous())
        with sdpa_kernel([SDPBackend.__members__[backend]]):
            o_BHSM = F.scaled_dot_product_attention(*(head.transpose(1, 2) for head in heads), is_causal=True)
        return o_BHSM, *torch.autograd.grad(o_BHSM.square().sum(), inputs)

    for got, expected in zip(attend(as_view=True), attend(as_view=False), strict=True):
        assert_near(got, expected, f"{backend} with a view")


def test_misfits_are_refused() -> None:
    x_BSHP, cos_BSP = torch.zeros(2, 3, 4, 8), torch.zeros(1, 3, 4)
    with pytest.raises(KernelError, match="each position"):
        rotate(x_BSHP, cos_BSP[:, :2], cos_BSP[:, :2])
    with pytest.raises(KernelError, match="each pair"):
        rotate(x_BSHP, torch.zeros(1, 3, 5), torch.zeros(1, 3, 5))
    with pytest.raises(KernelError, match="wider"):
        mla_heads(x_BSHP, x_BSHP, torch.zeros(2, 3, 8), cos_BSP, cos_BSP)


@pytest.mark.often("*sm_90*")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_without_spills(target: str) -> None:
    cos_BSP, wide_cos_BSP = (on_meta(2, 4096, pairs, dtype=torch.float32) for pairs in (32, 64))
    compile_without_spills(target, lambda: rotate(on_meta(2, 4096, 32, 128), wide_cos_BSP, wide_cos_BSP))
    compile_without_spills(target, lambda: rotate(on_meta(2, 4096, 32, 128), cos_BSP, cos_BSP))  # half of each head
    inputs = on_meta(2, 4096, 16, 192).requires_grad_(), on_meta(2, 4096, 16, 256), on_meta(2, 4096, 64)

    def both_passes() -> None:
        heads = mla_heads(*inputs, cos_BSP, cos_BSP)
        torch.autograd.backward(heads, [torch.empty_like(one) for one in heads])

    assert len(compile_without_spills(target, both_passes)) == 2
