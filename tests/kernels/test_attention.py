"""Attention with sinks equals the softmax with one more logit, on every backend."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from penstock.base.errors import KernelError
from penstock.kernels import attention
from penstock.kernels.attention import (
    AttentionOutput,
    ScoreOptions,
    backend_and_keys,
    backward,
    causal_attention,
    forward,
)
from penstock.kernels.attention_window import AttentionWindow
from penstock.kernels.bounded_attention import AttentionBounds, first_keys
from penstock.kernels.choose import MASKED, Choice, choose, operators, summary
from penstock.kernels.tuning import FLASH_4, extras, named_device
from tests.closeness import assert_close, relative_error
from tests.kernels.eager_attention import eager_attention, random_documents, random_heads, seen_by, with_gradients
from tests.kernels.test_choose import CPU, SHAPES

SCALE = 0.3
ROWS, LENGTH = 2, 24
attend = partial(causal_attention, scale=SCALE, allowed_BSS=None)


@pytest.mark.parametrize("backend", ["auto", "default", "flash", "math"])
@pytest.mark.parametrize("has_documents", [False, True], ids=["one document", "documents"])
def test_a_sink_takes_part_in_the_softmax(backend: str, has_documents: bool) -> None:
    _check_sinks(backend, has_documents)


def _check_sinks(backend: str, has_documents: bool) -> None:
    """Output and gradients equal eager attention with sinks."""
    q, k, v, sinks_H, direction = random_heads(ROWS, LENGTH)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks_H)]
    allowed_BSS = seen_by(None, LENGTH, random_documents(ROWS, LENGTH)) if has_documents else None
    seen_BSS = seen_by(None, LENGTH) if allowed_BSS is None else allowed_BSS
    expected = with_gradients(eager_attention(q, k, v, seen_BSS, SCALE, sinks_H), direction, leaves)
    o_BSHM = attend(q, k, v, allowed_BSS=allowed_BSS, backend=backend, sinks_H=sinks_H)
    assert_close(with_gradients(o_BSHM, direction, leaves), expected)


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_bfloat16_stays_near_float64(backend: str) -> None:
    q, k, v, sinks_H, direction = random_heads(ROWS, LENGTH, torch.bfloat16)
    wide = [x.double().requires_grad_() for x in (q, k, v, sinks_H)]
    expected = with_gradients(
        eager_attention(*wide[:3], seen_by(None, LENGTH), SCALE, wide[3]), direction.double(), wide
    )
    leaves = [x.requires_grad_() for x in (q, k, v, sinks_H)]
    o_BSHM = attend(q, k, v, backend=backend, sinks_H=sinks_H)
    for got, truth in zip(with_gradients(o_BSHM, direction, leaves), expected, strict=True):
        assert got.dtype == torch.bfloat16
        assert_close(got, truth, by="norm", same_dtype=False)


def test_a_very_low_sink_changes_nothing_and_a_very_high_one_leaves_nothing() -> None:
    q, k, v, sinks_H, _ = random_heads(ROWS, LENGTH)
    plain = attend(q, k, v, backend="auto")
    far, close = (attend(q, k, v, backend="auto", sinks_H=torch.full_like(sinks_H, s)) for s in (-1e4, 1e4))
    assert_close(far, plain)
    assert not close.any()


def test_a_named_backend_that_cannot_run_is_refused_and_not_replaced() -> None:
    q, k, v, sinks_H, _ = random_heads(ROWS, LENGTH, torch.bfloat16)
    for sinks in (None, sinks_H):
        with pytest.raises(KernelError) as refused:
            attend(q, k, v, backend="cudnn", sinks_H=sinks)
        assert str(refused.value) == (
            "torch's attention backend cudnn cannot compute this; "
            "got bfloat16, 4 heads of queries and 2 of keys, 8 columns wide, values 8; fix: kernels.attention=auto"
        )
    with pytest.raises(RuntimeError, match="first two dimensions"):  # other errors stay
        attend(q, k[:, :-1], v, backend="math")


def test_grouped_queries_get_keys_of_their_own_where_a_gpu_would_materialize_all_scores() -> None:
    q, k = (torch.empty(1, heads, 8, 8, dtype=torch.bfloat16) for heads in (4, 2))
    plain, masked = ScoreOptions(scale=SCALE), ScoreOptions(scale=SCALE, allowed=torch.ones(1, 1, 8, 8).bool())
    asked = [
        (q, k, plain, "efficient"),  # it has no grouped-query heads
        (q, k, masked, "auto"),
        (q.float(), k.float(), plain, "auto"),  # flash and cuDNN have no float32
    ]
    others = [(q, k, plain, "auto"), (q, q, masked, "efficient"), (q, k, masked, "math")]
    assert all(attention.may_need_own_keys(*one) for one in asked)
    assert not any(attention.may_need_own_keys(*one) for one in others)


def test_keys_are_repeated_where_torch_would_materialize_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose only fused backend with masks has no grouped-query heads."""
    real, asked = torch._fused_sdp_choice, []

    def choice(q: Tensor, k: Tensor, *args: object, **kwargs: object) -> int:
        asked.append(k.shape[1])
        return SDPBackend.MATH.value if q.shape[1] != k.shape[1] else real(q, k, *args, **kwargs)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    _check_sinks("auto", True)
    assert asked == [2, 4]  # heads of the keys: shared by pairs first, then repeated


def test_keys_stay_shared_with_backends_that_support_it() -> None:
    q, k, v = (x.transpose(1, 2) for x in random_heads(ROWS, LENGTH)[:3])
    for backend, expected in (("auto", SDPBackend.FLASH_ATTENTION), ("math", SDPBackend.MATH)):
        found, own_k, own_v = backend_and_keys(q, k, v, ScoreOptions(scale=SCALE), backend)
        assert found == expected and own_k is k and own_v is v
    meta = [x.to("meta") for x in (q.float(), k.float(), v.float())]
    assert backend_and_keys(*meta, ScoreOptions(scale=SCALE), "efficient")[1].shape == q.shape


GPU_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


@pytest.mark.parametrize("backend", GPU_BACKENDS, ids=lambda one: one.name.lower())
@pytest.mark.parametrize("has_mask", [False, True], ids=["causal", "masked"])
def test_signatures_of_the_backends_of_a_gpu_are_right(backend: SDPBackend, has_mask: bool) -> None:
    """On the meta device: names, order and shapes of arguments and results, forward and backward."""
    if has_mask and backend == SDPBackend.FLASH_ATTENTION:
        pytest.skip("flash has no masks")
    operands = tuple(torch.empty(2, 4, 24, 8, dtype=torch.bfloat16, device="meta") for _ in range(3))
    allowed = torch.empty(2, 1, 24, 24, dtype=torch.bool, device="meta") if has_mask else None
    scores = ScoreOptions(scale=SCALE, allowed=allowed)
    softmax = forward(backend, *operands, scores)
    assert softmax.o_BHSM.shape == operands[0].shape
    assert softmax.log_sums.dtype == torch.float32
    assert softmax.log_sums.shape[:2] == (2, 4)
    gradients = backward(backend, torch.empty_like(softmax.o_BHSM), operands, scores, softmax)
    assert [one.shape for one in gradients] == [one.shape for one in operands]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["auto", "math"])
def test_a_plan_has_sinks_without_memory(dtype: torch.dtype, backend: str) -> None:
    leaves = [x.to("meta").requires_grad_() for x in random_heads(ROWS, LENGTH, dtype)[:4]]
    q, k, v, sinks_H = leaves
    o_BSHM = attend(q, k, v, backend=backend, sinks_H=sinks_H)
    assert (o_BSHM.shape, o_BSHM.dtype) == (q.shape, dtype)
    assert [x.shape for x in torch.autograd.grad(o_BSHM.sum(), leaves)] == [x.shape for x in leaves]


def test_padding_of_logarithms_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The efficient backend has more logarithms than queries, infinite ones at the end; cuDNN's have one more dim."""

    def widened(*arguments: object) -> AttentionOutput:
        plain = forward(*arguments)
        return AttentionOutput(
            plain.o_BHSM, torch.nn.functional.pad(plain.log_sums, (0, 8), value=float("inf")), plain.rest
        )

    def narrowed(
        backend: SDPBackend, do: Tensor, operands: tuple, scores: ScoreOptions, softmax: AttentionOutput
    ) -> tuple:
        assert softmax.log_sums.shape[-1] == LENGTH + 8
        kept = AttentionOutput(softmax.o_BHSM, softmax.log_sums[..., :LENGTH].contiguous(), softmax.rest)
        return backward(backend, do, operands, scores, kept)

    monkeypatch.setattr("penstock.kernels.attention.forward", widened)
    monkeypatch.setattr("penstock.kernels.attention.backward", narrowed)
    _check_sinks("auto", False)


def test_a_bias_has_the_form_of_its_backend() -> None:
    scores = ScoreOptions(scale=SCALE, allowed=seen_by(None, 9)[:, None])
    q_BHSN = torch.zeros(1, 4, 9, 8)
    efficient = attention.bias_of(scores, q_BHSN, SDPBackend.EFFICIENT_ATTENTION)
    assert efficient.shape == (1, 4, 9, 9) and efficient.stride(2) == attention.BIAS_STRIDE
    assert efficient[0, 0].isinf().sum() == 36  # 9 * 8 / 2 keys after their query
    cudnn = attention.bias_of(scores, q_BHSN, SDPBackend.CUDNN_ATTENTION)
    assert cudnn.isfinite().all() and (cudnn < -65000).sum() == 36
    assert attention.bias_of(ScoreOptions(scale=SCALE), q_BHSN, SDPBackend.CUDNN_ATTENTION) is None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "cudnn", "flash", "efficient"])
@pytest.mark.parametrize(
    "window", [None, AttentionWindow(kind="window", size=32), AttentionWindow(kind="chunk", size=48)]
)
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("has_documents", [False, True], ids=["one document", "documents"])
def test_a_gpu_equals_the_definition(
    backend: str, window: AttentionWindow | None, has_sinks: bool, has_documents: bool
) -> None:
    if backend == "flash" and (has_documents or window is not None):
        pytest.skip("flash has no masks")
    rows, length, device = 2, 128, torch.device("cuda")
    generator = torch.Generator(device).manual_seed(3)
    groups = 2
    # Queries, keys, values, sinks.
    shapes = ((rows, length, 4, 64), (rows, length, groups, 64), (rows, length, groups, 64), (4,))
    given = [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes]
    direction = torch.randn(shapes[0], generator=generator, device=device, dtype=torch.bfloat16)
    documents_BS = random_documents(rows, length) if has_documents else None
    kept = 4 if has_sinks else 3
    wide = [x.double().requires_grad_() for x in given[:kept]]
    seen_BSS = seen_by(window, length, documents_BS).to(device)
    expected = with_gradients(eager_attention(*wide[:3], seen_BSS, 0.125, *wide[3:]), direction.double(), wide)
    leaves = [x.requires_grad_() for x in given[:kept]]
    q, k, v, *sinks = leaves
    sinks_H = sinks[0] if sinks else None
    allowed_BSS = None if documents_BS is None else seen_by(None, length, documents_BS).to(device)
    if window is not None:
        first_BS = first_keys(None if documents_BS is None else documents_BS.to(device), window, length, device)
        allowed_BSS = AttentionBounds.of(first_BS, length, window).seen_BQK().expand(rows, -1, -1)
    o_BSHM = attend(q, k, v, scale=0.125, allowed_BSS=allowed_BSS, backend=backend, sinks_H=sinks_H)
    for got, truth in zip(with_gradients(o_BSHM, direction, leaves), expected, strict=True):
        assert_close(got, truth, by="norm", tolerance=0.02, same_dtype=False)


H200 = named_device("H200", "bf16")
WITH_PACKAGE = replace(H200, packages=H200.packages | {FLASH_4})


def attention_choice(device: Any, wanted: str = "auto") -> Choice:
    return next(one for one in choose({"attention": wanted}, device, SHAPES, None) if one.op == "attention")


def test_the_package_is_taken_where_it_is_installed_and_was_measured_or_if_it_is_named() -> None:
    b200, mi300x = (replace(named_device(name, "bf16"), packages=WITH_PACKAGE.packages) for name in ("B200", "MI300X"))
    on_cpu = replace(CPU, packages=WITH_PACKAGE.packages)
    assert "flash-4: attention" in summary(choose({}, WITH_PACKAGE, SHAPES, None))
    for device, wanted, backend in (
        (WITH_PACKAGE, "auto", "flash-4"),
        (WITH_PACKAGE, "flash-4", "flash-4"),
        (H200, "auto", "auto"),
        (b200, "auto", "auto"),  # kernels, but no measurement
        (b200, "flash-4", "flash-4"),
        (WITH_PACKAGE, "cudnn", "cudnn"),
        (on_cpu, "auto", "default"),  # no kernels
        (replace(H200, packages=frozenset()), "auto", "auto"),
        (replace(H200, dtype="fp32"), "auto", "auto"),
    ):
        assert attention_choice(device, wanted).backend == backend
    for device, says in ((H200, "not installed"), (mi300x, "no kernels for"), (on_cpu, "no kernels for CPU")):
        with pytest.raises(KernelError, match=says):
            attention_choice(device, "flash-4")


def test_the_kernel_between_bounds_is_taken_where_it_was_measured_or_if_it_is_named() -> None:
    def masked(device: Any, wanted: str = "auto", **sizes: int) -> Choice:
        choices = choose({"attention": wanted}, device, replace(SHAPES, **sizes), None)
        return next(one for one in choices if one.op == MASKED)

    mi300x, float32 = named_device("MI300X", "bf16"), replace(H200, dtype="fp32")
    for device, wanted, backend in (
        (H200, "auto", "triton"),
        (WITH_PACKAGE, "auto", "triton"),  # documents; flash-attn-4 has the rest
        (H200, "cudnn", "torch"),
        (mi300x, "auto", "torch"),  # no measurement
        (mi300x, "triton", "triton"),
        (float32, "auto", "torch"),
    ):
        assert masked(device, wanted).backend == backend
        assert (operators(choose({"attention": wanted}, device, SHAPES, None)).bounded_attention is None) == (
            backend == "torch"
        )
    assert masked(H200, head_dim=112).reason == "heads of 112 and 128 columns"
    assert attention_choice(WITH_PACKAGE, "triton").backend == "flash-4"
    for device, says in ((float32, "float32"), (CPU, "no GPU"), (replace(H200, packages=frozenset()), "not installed")):
        with pytest.raises(KernelError, match=says):
            masked(device, "triton")
    assert all(one.op != MASKED for one in choose({}, CPU, SHAPES, None))


def test_head_widths_with_a_kernel() -> None:
    for target, widths in (("sm_90", [(192, 128), (256, 256)]), ("sm_100", [(192, 128), (64, 64)])):
        assert all(attention.flash_4_has_kernel(*pair, target) for pair in widths)
    assert not attention.flash_4_has_kernel(256, 256, "sm_100") and not attention.flash_4_has_kernel(36, 36, "sm_90")
    assert not attention.flash_4_has_kernel(128, 128, "gfx942")


def heads(device: str = "cpu", dtype: torch.dtype = torch.float32, length: int = 24) -> list[Tensor]:
    torch.manual_seed(3)
    shapes = ((2, length, 4, 192), (2, length, 4, 192), (2, length, 4, 128))  # DeepSeek-V3's widths of heads
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of the calls of a stand-in for the package, which computes by torch."""
    found: list[dict[str, Any]] = []

    def flash_attn_func(q_BSHN: Tensor, k_BSHN: Tensor, v_BSHM: Tensor, **how: Any) -> tuple[Tensor, None]:
        found.append(how)
        return attend(q_BSHN, k_BSHN, v_BSHM, scale=how["softmax_scale"], backend="math"), None

    monkeypatch.setattr(attention, "flash_4_takes", lambda q_BSHN, v_BSGM: True)
    monkeypatch.setattr(attention, "_flash_4_package", lambda: SimpleNamespace(flash_attn_func=flash_attn_func))
    return found


def test_attention_without_mask_is_computed_by_the_package(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = heads()
    expected = attend(q, k, v, backend="math")
    for deterministic in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda found=deterministic: found)
        assert_close(attend(q, k, v, backend="flash-4"), expected)
        assert calls.pop() == {"softmax_scale": SCALE, "causal": True, "deterministic": deterministic}


def test_masks_and_sinks_go_to_torch(calls: list[dict[str, Any]]) -> None:
    q, k, v = heads()
    seen_BSS = torch.ones(24, 24, dtype=torch.bool).tril().expand(2, 24, 24)
    masked = attend(q, k, v, allowed_BSS=seen_BSS, backend="flash-4")
    assert_close(masked, attend(q, k, v, backend="math"), tolerance=1e-5)
    attend(q, k, k, backend="flash-4", sinks_H=torch.zeros(4))
    assert not calls


def test_unsupported_heads_go_to_torch() -> None:
    q, k, v = heads()
    assert not attention.flash_4_takes(q, v)
    expected = attend(q, k, v, backend="math")
    assert_close(attend(q, k, v, backend="flash-4"), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not extras(), reason="flash-attn-4 is not installed")
def test_output_and_gradients_are_as_exact_as_cudnns() -> None:
    q, k, v = (x.requires_grad_() for x in heads("cuda", torch.bfloat16, 1000))
    if not attention.flash_4_takes(q, v):
        pytest.skip("no kernels for this chip")

    def noise(backend: str) -> list[float]:
        exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
        o = attend(*exact, scale=0.1, backend="math")
        direction = torch.randn_like(o)
        expected = [o, *torch.autograd.grad(o, exact, direction)]
        o = attend(q, k, v, scale=0.1, backend=backend)
        found = [o, *torch.autograd.grad(o, [q, k, v], direction.to(o.dtype))]
        return [relative_error(one, other, by="norm") for one, other in zip(found, expected, strict=True)]

    torch.manual_seed(5)
    package = noise("flash-4")
    torch.manual_seed(5)
    assert all(mine <= 1.1 * other for mine, other in zip(package, noise("cudnn"), strict=True))
