"""Sparse attention over chosen keys: the kernels equal the definitions, output and all gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels import sparse_attention_launches as kernels
from penstock.kernels.sparse_attention import IndexLoss, between, choose_keys, keys_mask, sparse_attention
from tests.closeness import assert_close, assert_equal
from tests.kernels.ahead_of_time import TARGETS, compile_launches, on_meta

ROWS, POSITIONS, TOP_K, SCALE = 2, 21, 6, 0.3
FIRSTS = ([0] * 21, [0] * 5 + [5] * 16)  # the second row has two documents


def draw(dtype: torch.dtype, device: torch.device, *, heads: int = 3) -> tuple[list[Tensor], Tensor]:
    """Queries, latent (20 columns) and rotary parts (4); queries, keys and weights of 2 index heads; first keys."""
    generator = torch.Generator().manual_seed(5)
    widths = ((heads, 20), (heads, 4), (20,), (4,), (2, 8), (8,), (2,))
    inputs = [torch.randn(ROWS, POSITIONS, *width, generator=generator).to(device, dtype) for width in widths]
    inputs[0], inputs[-1] = inputs[0].permute(2, 0, 1, 3).contiguous(), inputs[-1].float()
    return inputs, torch.tensor(FIRSTS, dtype=torch.int32, device=device)


def normal(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def run(
    attend: Callable[..., Tensor], inputs: list[Tensor], keys_BSK: Tensor, first_BS: Tensor, scale: float = SCALE
) -> list[Tensor]:
    """Output, and gradients of all inputs with the loss of the indexer."""
    inputs = [one.detach().requires_grad_() for one in inputs]
    o_HBSC = attend(*inputs[:4], keys_BSK, first_BS, scale=scale, index=IndexLoss(*inputs[4:], 0.7))
    # Steps between so many numbers are too small for 16 bits; their values are the same in all dtypes.
    weights = torch.linspace(-3, 3, o_HBSC.numel(), device=o_HBSC.device).sin().bfloat16().to(o_HBSC.dtype)
    weights = weights.view_as(o_HBSC)
    return [o_HBSC.detach(), *torch.autograd.grad((o_HBSC * weights).sum(), inputs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no products in bfloat16
def test_kernels_equal_the_definition_in_float64(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, first_BS = draw(dtype, device)
    keys_BSK = choose_keys(*inputs[4:], first_BS, TOP_K)
    monkeypatch.setattr(kernels, "PAIR_BYTES", 2 * 3 * TOP_K * inputs[0].itemsize * 25)  # two chunks of queries
    exact = run(sparse_attention, [one.double() for one in inputs], keys_BSK, first_BS)
    found = run(kernels.sparse_attention, inputs, keys_BSK, first_BS)
    tolerance = 2e-6 if dtype == torch.float32 else 3e-3
    for got, expected in zip(found, exact, strict=True):
        assert_close(got.double(), expected, tolerance=tolerance, by="norm")


@pytest.mark.parametrize("chunk", [1, 8, 64])  # queries
def test_keys_are_chosen_by_the_definition(chunk: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, first_BS = draw(torch.float32, device)
    monkeypatch.setattr(kernels, "SCORE_BYTES", 4 * ROWS * POSITIONS * chunk)
    found = kernels.choose_keys(*inputs[4:], first_BS, TOP_K)
    assert found.dtype == torch.int32
    counts = (found >= 0).sum(-1)
    assert_equal(found >= 0, torch.arange(TOP_K, device=device) < counts[..., None])  # those of no key come last
    assert_equal(keys_mask(found), keys_mask(choose_keys(*inputs[4:], first_BS, TOP_K)))


def test_fewer_positions_than_keys_are_chosen_whole(device: torch.device) -> None:
    inputs, first_BS = draw(torch.float32, device)
    found = kernels.choose_keys(*inputs[4:], first_BS, 40)
    assert found.shape == (ROWS, POSITIONS, 40)
    assert_equal(keys_mask(found), between(first_BS))
    exact = run(sparse_attention, [one.double() for one in inputs], found, first_BS)
    for got, expected in zip(run(kernels.sparse_attention, inputs, found, first_BS), exact, strict=True):
        assert_close(got.double(), expected, tolerance=2e-6, by="norm")


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1], ids=["as GPUs write it", "negative"])
def test_scores_that_are_no_numbers_choose_keys_that_exist(bits: int, device: torch.device) -> None:
    inputs, first_BS = draw(torch.float32, device)
    inputs[6] = torch.full_like(inputs[6], bits, dtype=torch.int32).view(torch.float32)  # weights of heads
    keys_BSK = kernels.choose_keys(*inputs[4:], first_BS, TOP_K)
    chosen = keys_mask(keys_BSK)
    assert keys_BSK.min() >= -1 and keys_BSK.max() < POSITIONS
    assert not (chosen & ~between(first_BS)).any()
    assert_equal(chosen.sum(-1), between(first_BS).sum(-1).clamp(max=TOP_K))


def test_the_definition_chooses_the_highest_scores_of_a_document() -> None:
    k_BSN, first_BS = torch.tensor([9.0, 3.0, 1.0, 2.0]).view(1, 4, 1), torch.tensor([[0, 1, 1, 1]], dtype=torch.int32)
    keys_BSK = choose_keys(torch.ones(1, 4, 1, 1), k_BSN, torch.ones(1, 4, 1), first_BS, 2)
    assert keys_BSK[0].tolist() == [[0, -1], [1, -1], [1, 2], [1, 3]]


@pytest.mark.often("gfx942")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_with_few_spills(target: str) -> None:
    """With the sizes of DeepSeek-V3.2."""

    def both_passes() -> None:
        positions, heads, top_k, index_heads = 4096, 128, 2048, 64
        first_BS, keys_BSK = (on_meta(1, positions, *k, dtype=torch.int32) for k in ((), (top_k,)))
        widths = ((512,), (64,), (index_heads, 128), (128,))
        latent, rope, index_q, index_k = (on_meta(1, positions, *width).requires_grad_() for width in widths)
        weights = on_meta(1, positions, index_heads, dtype=torch.float32).requires_grad_()
        sizes = (heads, 1, positions, 512), (1, positions, heads, 64)
        q, q_rope = (on_meta(*size).requires_grad_() for size in sizes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "target_of", lambda device: target)
            patch.setattr(kernels, "SCORE_BYTES", 4 * positions**2)  # one launch of each kernel
            patch.setattr(kernels, "PAIR_BYTES", 2 * positions * heads * top_k * 2)
            kernels.choose_keys(index_q, index_k, weights, first_BS, top_k)
            index = IndexLoss(index_q, index_k, weights, 1.0)
            o = kernels.sparse_attention(q, q_rope, latent, rope, keys_BSK, first_BS, scale=0.1, index=index)
            o.backward(torch.empty_like(o))

    compiled = compile_launches(target, both_passes)
    assert len(compiled) == 9
    for one in compiled:
        # 64 outputs of 512 numbers and their sums in float32 are half of the registers of Hopper and Blackwell.
        assert one.spills <= 128 * target.startswith("sm_"), one.summary
        assert one.shared_bytes <= TARGETS[target].shared_bytes, one.summary
    assert all(one.matrix_instructions for one in compiled if one.kernel != "choose_keys_kernel")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 48])  # 48: not by Hopper's own kernels
def test_kernels_at_the_widths_of_a_model_equal_the_definition(heads: int) -> None:
    torch.manual_seed(3)
    rows, positions, top_k = 2, 1300, 256
    inputs = [0.3 * normal(heads, rows, positions, 512), 0.3 * normal(rows, positions, heads, 64)]
    inputs += [normal(rows, positions, *width) for width in ((512,), (64,), (64, 128), (128,))]
    inputs.append(0.01 * normal(rows, positions, 64).float())
    first_BS = torch.zeros(rows, positions, dtype=torch.int32, device="cuda")
    first_BS[1, 500:] = 500
    keys_BSK = kernels.choose_keys(*inputs[4:], first_BS, top_k)
    expected = keys_mask(choose_keys(*inputs[4:], first_BS, top_k))
    # Sums in another order may swap keys whose scores are nearly equal.
    assert (keys_mask(keys_BSK) != expected).sum() < 1e-3 * expected.sum()
    exact = run(sparse_attention, [one.float() for one in inputs], keys_BSK, first_BS, 0.07)
    for got, expected in zip(run(kernels.sparse_attention, inputs, keys_BSK, first_BS, 0.07), exact, strict=True):
        assert_close(got.float(), expected, tolerance=1e-2, by="norm")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu_memory")
def test_queries_at_the_end_of_a_long_row_equal_those_of_a_short_one() -> None:
    heads, positions, top_k = 128, 65536, 64  # more than 2 ** 31 numbers in a tensor
    torch.manual_seed(3)
    inputs = [normal(heads, 1, positions, 512).mul_(0.3), normal(1, positions, heads, 64), normal(1, positions, 512)]
    inputs.append(normal(1, positions, 64))
    position_S = torch.arange(positions, device="cuda", dtype=torch.int32)
    keys_BSK = (position_S[:, None] - torch.arange(top_k, device="cuda", dtype=torch.int32)).clamp(min=-1)[None]
    first_BS = torch.zeros(1, positions, dtype=torch.int32, device="cuda")

    def ends(tail: int, attend: Callable[..., Tensor]) -> list[Tensor]:
        """Outputs of the last queries, their gradients, and that of the last key; of rows of `tail` positions."""
        own = [one[:, :, -tail:] if one.shape[0] == heads else one[:, -tail:] for one in inputs]
        own = [one.contiguous().requires_grad_() for one in own]
        keys = (keys_BSK[:, -tail:] - (positions - tail)).clamp(min=-1)
        o = attend(*own, keys, first_BS[:, :tail].contiguous(), scale=0.07)
        dq, dq_rope, dlatent, drope = torch.autograd.grad(o[:, :, -4:].float().square().sum(), own)
        return [o[:, :, -4:], dq[:, :, -4:], dq_rope[:, -4:], dlatent[:, -1], drope[:, -1]]

    for got, expected in zip(ends(positions, kernels.sparse_attention), ends(2 * top_k, sparse_attention), strict=True):
        assert_close(got.float(), expected.float(), tolerance=2e-2, by="norm")
