"""Hopper's own kernels of plain causal attention: their numbers, and the compiled code.

On a CPU `warps_in_torch` runs their source.
"""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import hopper_attention
from penstock.kernels.attention import causal_attention
from penstock.kernels.gluon import attention as hopper
from penstock.kernels.gluon.support import HAS_GLUON, REGISTERS
from tests.closeness import relative_error
from tests.kernels.ahead_of_time import compile_without_spills, on_meta
from tests.kernels.gluon.warps_in_torch import launched_on_cpu

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="no Gluon that the kernels know")

# Heads of queries and of keys, columns of keys.
HEADS = {"latent": (2, 2, 192), "grouped": (4, 2, 128)}
every_shape = pytest.mark.parametrize("name", HEADS)


def draw(name: str, rows: int, positions: int, device: str = "cpu") -> list[Tensor]:
    """Queries, keys, values and the gradient of the output."""
    heads, groups, width = HEADS[name]
    torch.manual_seed(7)
    shapes = ((heads, width), (groups, width), (groups, 128), (heads, 128))
    return [torch.randn(rows, positions, *shape, dtype=torch.bfloat16, device=device) for shape in shapes]


def passes(inputs: list[Tensor], dtype: torch.dtype, backend: str | None = None) -> list[Tensor]:
    """Output and gradients, of a backend of torch or of the kernels."""
    q, k, v, do = (x.detach().to(dtype) for x in inputs)
    leaves, scale = [x.requires_grad_() for x in (q, k, v)], 1.3 * q.shape[-1] ** -0.5
    if backend is None:
        o = hopper.attention(*leaves, scale=scale)
    else:
        o = causal_attention(*leaves, scale=scale, allowed_BSS=None, backend=backend)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def noise(inputs: list[Tensor], backend: str | None = None) -> list[float]:
    """Errors of the output and the gradients."""
    exact = passes(inputs, torch.float32, "math")
    found = passes(inputs, torch.bfloat16, backend)
    return [relative_error(one, other, by="norm") for one, other in zip(found, exact, strict=True)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """Options of each launch; torch runs the kernels."""
    return launched_on_cpu(monkeypatch, hopper, "causal_forward_kernel", "causal_backward_kernel")


@every_shape
@pytest.mark.parametrize("heads_at_once", [1, 3], ids=["one head at a time", "an unfinished group of heads"])
def test_output_and_gradients_are_those_of_the_definition(
    name: str, heads_at_once: int, launched: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "HEADS", heads_at_once)
    assert max(noise(draw(name, 2, 256))) < 5e-3  # numbers of bfloat16 are rounded by 2e-3
    heads, groups, width = HEADS[name]
    assert [(one["programs"], one["REST"]) for one in launched] == [(4 * heads, width - 128), (4 * groups, width - 128)]


def test_rows_of_more_blocks_than_the_rings_have_slots(launched: list[Mapping[str, Any]]) -> None:
    assert max(noise(draw("latent", 1, 640))) < 5e-3


@every_shape
def test_a_call_may_be_several_launches_of_some_rows(
    name: str, launched: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = draw(name, 3, 128)
    together = passes(inputs, torch.bfloat16)
    monkeypatch.setattr(hopper, "MOST", 2 * inputs[0][0].numel())
    parts = passes(inputs, torch.bfloat16)
    heads, groups, _ = HEADS[name]
    assert [one["programs"] for one in launched] == [3 * heads, 3 * groups, heads, 2 * heads, groups, 2 * groups]
    assert all(torch.equal(one, other) for one, other in zip(parts, together, strict=True))


def test_values_may_be_columns_of_a_wider_tensor(launched: list[Mapping[str, Any]]) -> None:
    q, k, v, do = draw("latent", 2, 128)
    wide = torch.full((2, 128, 2, 256), torch.nan, dtype=torch.bfloat16)
    wide[..., 128:] = v
    for given, step in ((wide[..., 128:], 256), (v.transpose(1, 2).contiguous().transpose(1, 2), 128)):
        o, log_sums = (x.clone() for x in hopper.forward(q, k, hopper._with_even_steps(given), 0.1))
        got = hopper.backward(do, q, k, hopper._with_even_steps(given), o, log_sums, 0.1)
        assert launched[-2]["V_STEP"] == launched[-1]["V_STEP"] == step
        expected = hopper.backward(do, q, k, v, *hopper.forward(q, k, v, 0.1), 0.1)
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other) and one.is_contiguous()


def test_calls_that_the_kernels_cannot_compute_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = draw("latent", 1, 128)
    assert not hopper_attention.takes(q, k, v), "a CPU has no such kernels"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(hopper_attention, "target_of", lambda device: "sm_90")
    assert hopper_attention.takes(q, k, v)
    assert not hopper_attention.takes(q[:, :64], k, v), "queries of a part of the row"
    assert not hopper_attention.takes(q[:, :64], k[:, :64], v[:, :64]), "half of a block"
    assert not hopper_attention.takes(q[..., :64], k[..., :64], v), "heads of another width"
    assert not hopper_attention.takes(q.float(), k.float(), v.float())
    large = q.new_empty(1).expand(2, 4096, 128, 192)
    assert not hopper_attention.takes(large, large, large[..., :128]), "a row is more than a launch may have"
    large = large[:, :, :64]
    assert hopper_attention.takes(large, large, large[..., :128])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not hopper_attention.takes(q, k, v), "sums are made in any order"


@every_shape
def test_nothing_spills_and_both_consumers_multiply(name: str) -> None:
    groups, width = {"latent": (16, 192), "grouped": (4, 128)}[name]
    heads = 16 if name == "latent" else 32
    q, k, v, o = (on_meta(2, 256, *shape) for shape in ((heads, width), (groups, width), (groups, 128), (heads, 128)))
    sums = on_meta(2, heads, 256, dtype=torch.float32)
    forward, *_ = compile_without_spills("sm_90", lambda: hopper.forward(q, k, v, 0.1))
    *_, backward = compile_without_spills("sm_90", lambda: hopper.backward(o, q, k, v, o, sums, 0.1))
    deep, keys = width // 16, width // 64
    # A product of 64 rows and a depth of 16 is one instruction. Before forward's loop there are scores, behind it the
    # last output. Backward's loop has scores, dp, dv, dk, and dq of the turn before, which is made once more behind it.
    assert forward.matrix_instructions == 2 * (2 * deep + 2 * 8), forward.summary
    each = deep + 8 + 4 + 4 * (keys - 1) + 2 * 8 * (keys - 1)
    assert backward.matrix_instructions == 2 * each, backward.summary
    for compiled in (forward, backward):
        assert compiled.registers == REGISTERS, compiled.summary
        threads = re.findall(r"\bbar(?:rier)?\.sync(?:\.aligned)?\s+\w+, (\d+);", compiled.asm)
        assert set(threads) == {"128"}, "barriers are of one consumer's four warps"
    adds = re.findall(r"cp\.reduce\.async\.bulk\S*add", backward.asm)
    assert len(adds) >= 2 * 2 * (keys - 1), "the copy engine adds the columns of dq"


@pytest.mark.gpu
@every_shape
def test_on_the_gpu_errors_are_like_cudnns(name: str) -> None:
    inputs = draw(name, 2, 1024, "cuda")
    if not hopper_attention.takes(*inputs[:3]):
        pytest.skip("no kernels for this chip")
    # The weights of latent attention's ds are rounded to bfloat16.
    limits = (1.05, 1.3, 1.3, 1.05) if name == "latent" else (1.05,) * 4
    pairs = zip(noise(inputs), limits, noise(inputs, "cudnn"), strict=True)
    assert all(mine <= limit * theirs for mine, limit, theirs in pairs)


@pytest.mark.gpu
def test_large_calls_are_finite_whatever_memory_held_before() -> None:
    """dq without numbers was seen, and not explained (docs/decisions/0172-attention-for-hopper.md)."""
    torch.manual_seed(7)
    q, k, v, do = (torch.randn(6, 4096, 16, size, device="cuda").bfloat16() for size in (192, 192, 128, 128))
    if not hopper_attention.takes(q, k, v):
        pytest.skip("no kernels for this chip")
    o, log_sums = hopper.forward(q, k, v, 0.07)
    for _ in range(20):
        held = [torch.full_like(q, torch.nan, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
        del held  # the sums of dq and dq have this memory next
        assert all(bool(x.isfinite().all()) for x in hopper.backward(do, q, k, v, o, log_sums, 0.07))


@pytest.mark.gpu
def test_a_captured_graph_repeats_it() -> None:
    inputs = draw("latent", 2, 512, "cuda")
    if not hopper_attention.takes(*inputs[:3]):
        pytest.skip("no kernels for this chip")
    expected = passes(inputs, torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = passes(inputs, torch.bfloat16)
    for _ in range(2):
        graph.replay()
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other, by="norm") < 1e-3  # sums of dq have no fixed order
