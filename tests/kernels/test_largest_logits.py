"""The kernel of the largest logits finds what the definition finds, and compiles for all chips."""

import pytest
import torch

from penstock.kernels.attention import largest_logits, logits_by_kernel
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta


def _drawn(length: int, heads: int, groups: int, width: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(2, length, count, width, generator=generator) for count in (heads, groups))
    allowed = torch.rand(2, length, length, generator=generator) < 0.5
    allowed[:, range(length), range(length)] = True
    return q.to(device), k.to(device), (allowed & torch.ones(length, length).tril().bool()).to(device)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize(("length", "heads", "groups", "width"), [(130, 2, 1, 24), (7, 4, 4, 70), (256, 1, 1, 64)])
def test_the_kernel_finds_the_largest_logits_of_the_definition(
    length: int, heads: int, groups: int, width: int, with_mask: bool, device: torch.device
) -> None:
    q, k, allowed = _drawn(length, heads, groups, width, device)
    mask = allowed if with_mask else None
    assert_close(logits_by_kernel(q, k, mask), largest_logits(q, k, 1.0, mask), tolerance=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("with_mask", [False, True])
def test_the_largest_logits_of_a_model_are_found_on_a_gpu(with_mask: bool) -> None:
    q, k, allowed = (one.cuda() for one in _drawn(4096, 16, 16, 192, torch.device("cuda")))
    mask = allowed if with_mask else None
    expected = largest_logits(q.bfloat16().float(), k.bfloat16().float(), 0.1, mask)
    assert_close(largest_logits(q.bfloat16(), k.bfloat16(), 0.1, mask), expected, tolerance=1e-4)


@pytest.mark.often("sm_90-mask", "gfx942-causal")
@pytest.mark.parametrize("with_mask", [False, True], ids=["causal", "mask"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles_without_spills(target: str, with_mask: bool) -> None:
    q = on_meta(4, 4096, 16, 192)
    mask = on_meta(4, 4096, 4096, dtype=torch.bool) if with_mask else None
    (compiled,) = compile_without_spills(target, lambda: logits_by_kernel(q, q, mask))
    assert compiled.matrix_instructions
