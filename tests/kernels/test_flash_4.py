"""Attention by the package flash-attn-4: when it is chosen, its arguments, and its results where it runs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import flash_4
from penstock.kernels.attention import causal_attention
from penstock.kernels.choose import Choice, choose, summary
from penstock.kernels.device_facts import FLASH_4, extras, named_device
from tests.closeness import assert_close, relative_error
from tests.kernels.test_choose import CPU, SHAPES

H200 = named_device("H200", "bf16")
WITH_PACKAGE = replace(H200, packages=H200.packages | {FLASH_4})


def attention_choice(device: Any, wanted: str = "auto") -> Choice:
    return next(one for one in choose({"attention": wanted}, device, SHAPES, None) if one.op == "attention")


def test_auto_takes_the_package_where_it_is_installed_and_was_measured() -> None:
    assert attention_choice(WITH_PACKAGE).backend == "flash-4"
    assert "flash-4: attention" in summary(choose({}, WITH_PACKAGE, SHAPES, None))
    assert attention_choice(H200).backend == "auto"
    b200 = named_device("B200", "bf16")
    assert attention_choice(replace(b200, packages=WITH_PACKAGE.packages)).backend == "auto"


def test_the_package_can_be_named_and_is_refused_with_the_reason() -> None:
    b200 = named_device("B200", "bf16")
    assert attention_choice(replace(b200, packages=WITH_PACKAGE.packages), "flash-4").backend == "flash-4"
    with pytest.raises(KernelError, match="not installed"):
        attention_choice(H200, "flash-4")
    mi300x = named_device("MI300X", "bf16")
    with pytest.raises(KernelError, match="no kernels for"):
        attention_choice(replace(mi300x, packages=WITH_PACKAGE.packages), "flash-4")
    with pytest.raises(KernelError, match="no kernels for CPU"):
        attention_choice(replace(CPU, packages=WITH_PACKAGE.packages), "flash-4")


def test_a_named_backend_wins_over_the_installed_package() -> None:
    assert attention_choice(WITH_PACKAGE, "cudnn").backend == "cudnn"
    on_cpu = replace(CPU, packages=WITH_PACKAGE.packages)
    assert attention_choice(on_cpu).backend == "default"


@pytest.mark.parametrize(
    ("keys", "values", "target", "expected"),
    [
        (192, 128, "sm_90", True),
        (192, 128, "sm_100", True),
        (256, 256, "sm_90", True),
        (256, 256, "sm_100", False),
        (64, 64, "sm_100", True),
        (36, 36, "sm_90", False),
        (128, 128, "gfx942", False),
    ],
)
def test_head_widths_with_a_kernel(keys: int, values: int, target: str, expected: bool) -> None:
    assert flash_4.has_kernel(keys, values, target) is expected


def heads(device: str = "cpu", dtype: torch.dtype = torch.float32, length: int = 24) -> list[Tensor]:
    torch.manual_seed(3)
    shapes = ((2, length, 4, 192), (2, length, 4, 192), (2, length, 4, 128))
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of the calls of a stand-in for the package, which computes by torch."""
    found: list[dict[str, Any]] = []

    def flash_attn_func(q_BSHN: Tensor, k_BSHN: Tensor, v_BSHM: Tensor, **how: Any) -> tuple[Tensor, None]:
        found.append(how)
        scale = how["softmax_scale"]
        o_BSHM = causal_attention(q_BSHN, k_BSHN, v_BSHM, scale=scale, allowed_BSS=None, backend="math")
        return o_BSHM, None

    monkeypatch.setattr(flash_4, "takes", lambda q_BSHN, v_BSGM: True)
    monkeypatch.setattr(flash_4, "_package", lambda: SimpleNamespace(flash_attn_func=flash_attn_func))
    return found


def test_attention_without_mask_is_computed_by_the_package(calls: list[dict[str, Any]]) -> None:
    q, k, v = heads()
    expected = causal_attention(q, k, v, scale=0.1, allowed_BSS=None, backend="math")
    assert_close(causal_attention(q, k, v, scale=0.1, allowed_BSS=None, backend="flash-4"), expected)
    assert calls == [{"softmax_scale": 0.1, "causal": True, "deterministic": False}]


def test_deterministic_runs_ask_for_a_fixed_order_of_sums(calls: list[dict[str, Any]]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        causal_attention(*heads(), scale=0.1, allowed_BSS=None, backend="flash-4")
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls[0]["deterministic"] is True


def test_masks_and_sinks_go_to_torch(calls: list[dict[str, Any]]) -> None:
    q, k, v = heads()
    seen_BSS = torch.ones(24, 24, dtype=torch.bool).tril().expand(2, 24, 24)
    masked = causal_attention(q, k, v, scale=0.1, allowed_BSS=seen_BSS, backend="flash-4")
    assert_close(masked, causal_attention(q, k, v, scale=0.1, allowed_BSS=None, backend="math"), tolerance=1e-5)
    causal_attention(q, k, k, scale=0.1, allowed_BSS=None, backend="flash-4", sinks_H=torch.zeros(4))
    assert not calls


def test_unsupported_heads_go_to_torch() -> None:
    q, k, v = heads()
    assert not flash_4.takes(q, v)
    expected = causal_attention(q, k, v, scale=0.1, allowed_BSS=None, backend="math")
    assert_close(causal_attention(q, k, v, scale=0.1, allowed_BSS=None, backend="flash-4"), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not extras(), reason="flash-attn-4 is not installed")
def test_output_and_gradients_are_as_exact_as_cudnns() -> None:
    q, k, v = (x.requires_grad_() for x in heads("cuda", torch.bfloat16, 1000))
    if not flash_4.takes(q, v):
        pytest.skip("no kernels for this chip")

    def noise(backend: str) -> list[float]:
        exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
        o = causal_attention(*exact, scale=0.1, allowed_BSS=None, backend="math")
        direction = torch.randn_like(o)
        expected = [o, *torch.autograd.grad(o, exact, direction)]
        o = causal_attention(q, k, v, scale=0.1, allowed_BSS=None, backend=backend)
        found = [o, *torch.autograd.grad(o, [q, k, v], direction.to(o.dtype))]
        return [relative_error(one, other, by="norm") for one, other in zip(found, expected, strict=True)]

    torch.manual_seed(5)
    package = noise("flash-4")
    torch.manual_seed(5)
    assert all(mine <= 1.1 * other for mine, other in zip(package, noise("cudnn"), strict=True))
