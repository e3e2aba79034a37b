"""Linear attention: chunks and kernels equal the definition, output and all gradients; documents do not meet."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import head_norms
from penstock.kernels import short_convolution as kernels
from penstock.kernels.delta_rule import (
    CHUNK,
    chunked_delta_rule,
    delta_rule,
    gated_norm,
    recurrent_delta_rule,
    short_convolution,
    unit_length,
)
from tests.closeness import assert_close, assert_equal
from tests.kernels.ahead_of_time import TARGETS, compile_launches, on_meta
from tests.kernels.parity import assert_parity

ROWS, POSITIONS = 2, 100
DOCUMENTS = (None, ((13, 70, 17), (64, 36)), ((100,), (1, 2, 3, 94)))
"""Lengths of the documents of each row; None for one in each."""


def documents_of(lengths: Sequence[Sequence[int]] | None, device: torch.device | str = "cpu") -> Tensor | None:
    if lengths is None:
        return None
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]).to(device)


def draw(dtype: torch.dtype, *, by_channel: bool, decay: float = 2.0) -> list[Tensor]:
    """q, k, v, g, beta of 2 key heads and 4 value heads."""
    generator = torch.Generator().manual_seed(4)

    def normal(*size: int) -> Tensor:
        return torch.randn(ROWS, POSITIONS, *size, generator=generator, dtype=torch.float64)

    heads = (4, 8) if by_channel else (4,)
    inputs = [
        unit_length(normal(2, 8), 8**-0.5),
        unit_length(normal(2, 8)),
        normal(4, 6),
        -decay * torch.rand(ROWS, POSITIONS, *heads, generator=generator, dtype=torch.float64),
        torch.rand(ROWS, POSITIONS, 4, generator=generator, dtype=torch.float64),
    ]
    return [one.to(dtype).requires_grad_() for one in inputs]


def run(function: Callable[..., Tensor], inputs: list[Tensor], documents_BS: Tensor | None) -> list[Tensor]:
    """Output, and gradients of all inputs."""
    output = function(*inputs, documents_BS)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view_as(output).sin()
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("by_channel", [False, True], ids=["of heads", "of features"])
@pytest.mark.parametrize("lengths", DOCUMENTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_chunks_give_what_the_definition_gives(
    by_channel: bool, lengths: Sequence[Sequence[int]] | None, dtype: torch.dtype, tolerance: float
) -> None:
    documents_BS = documents_of(lengths)
    exact = run(recurrent_delta_rule, draw(torch.float64, by_channel=by_channel), documents_BS)
    found = run(chunked_delta_rule, draw(dtype, by_channel=by_channel), documents_BS)
    for got, expected in zip(found, exact, strict=True):
        assert_close(got.double(), expected, tolerance=tolerance)


@pytest.mark.parametrize("decay", [0.0, 60.0])
@pytest.mark.parametrize("function", [chunked_delta_rule, delta_rule])
def test_no_decay_overflows(function: Callable[..., Tensor], decay: float, device: torch.device) -> None:
    inputs = [one.detach().to(device).requires_grad_() for one in draw(torch.float32, by_channel=True, decay=decay)]
    for got in run(function, inputs, documents_of(DOCUMENTS[1], device)):
        assert got.isfinite().all()


@pytest.mark.parametrize("decay", [0.5, 3.0, 60.0], ids=["of chunks", "of blocks", "of pairs"])
@pytest.mark.parametrize("lengths", [None, ((13, 70, 17), (64, 36))])
def test_decays_of_any_size_are_exact(
    lengths: Sequence[Sequence[int]] | None, decay: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of features that decay little are computed at once; those of others in blocks, or level by level."""
    monkeypatch.setattr("penstock.kernels.delta_rule.on_gpu", lambda tensor: False)  # float32 in kernels
    documents_BS = documents_of(lengths, device)
    inputs = [one.detach().to(device) for one in draw(torch.float32, by_channel=True, decay=decay)]
    exact = run(recurrent_delta_rule, [one.double().requires_grad_() for one in inputs], documents_BS)
    found = run(delta_rule, [one.requires_grad_() for one in inputs], documents_BS)
    # Decays are summed over a chunk in float32. The error of an exponent is the relative error of the exponential.
    tolerance = 1e-5 + decay * CHUNK * torch.finfo(torch.float32).eps / 2
    for got, expected in zip(found, exact, strict=True):
        assert_close(got.double(), expected, tolerance=tolerance, by="norm")


@pytest.mark.parametrize("function", [recurrent_delta_rule, chunked_delta_rule])
def test_a_document_is_computed_as_if_it_were_alone(function: Callable[..., Tensor]) -> None:
    inputs = draw(torch.float64, by_channel=False)
    together = run(function, inputs, documents_of(DOCUMENTS[1]))[0]
    alone = [function(*(one[:1, 13:83] for one in inputs)), function(*(one[1:, 64:] for one in inputs))]
    assert_close(together[:1, 13:83], alone[0].detach(), tolerance=1e-12)
    assert_close(together[1:, 64:], alone[1].detach(), tolerance=1e-12)


def test_the_state_returns_what_was_written_for_a_key() -> None:
    key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]).view(1, 3, 1, 2)
    value = torch.tensor([[3.0], [5.0], [7.0]]).view(1, 3, 1, 1)
    g, beta = torch.zeros(1, 3, 1), torch.tensor([1.0, 1.0, 0.5]).view(1, 3, 1)
    o_BSHM = recurrent_delta_rule(key, key, value, g, beta)
    assert_equal(o_BSHM.flatten(), torch.tensor([3.0, 5.0, 5.0]))  # the last is halfway from 3 to 7


def test_a_convolution_sees_its_own_document_only() -> None:
    x_BSD, weight_DJ = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[1.0, 10.0]])
    assert_close(short_convolution(x_BSD, weight_DJ)[0, :, 0], F.silu(torch.tensor([10.0, 21.0, 32.0])))
    packed = short_convolution(x_BSD, weight_DJ, torch.tensor([[0, 0, 1]]))
    assert_close(packed[0, :, 0], F.silu(torch.tensor([10.0, 21.0, 30.0])))


def test_a_convolution_is_torchs_with_padding_in_front() -> None:
    x_BSD, weight_DJ = torch.randn(2, 9, 5), torch.randn(5, 4)
    expected = F.silu(F.conv1d(x_BSD.mT, weight_DJ[:, None], padding=3, groups=5)[..., :9]).mT
    assert_close(short_convolution(x_BSD, weight_DJ), expected)
    assert_equal(short_convolution(x_BSD[:, :2], weight_DJ), short_convolution(x_BSD, weight_DJ)[:, :2])  # a short row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [6, 16])
def test_norms_of_heads_equal_the_definition(width: int, dtype: torch.dtype, device: torch.device) -> None:
    o_BSHM, gate_BSHM = (torch.randn(2, 150, 4, width, device=device, dtype=dtype) for _ in range(2))
    weight_M = torch.randn(width, device=device, dtype=dtype)
    assert_parity(lambda x: head_norms.unit_length(x, 0.3), lambda x: unit_length(x, 0.3), [o_BSHM])
    for is_silu in (True, False):
        how = {"epsilon": 1e-6, "is_silu": is_silu}
        assert_parity(
            lambda *x, how=how: head_norms.gated_norm(*x, **how),
            lambda *x, how=how: gated_norm(*x, **how),
            [o_BSHM, gate_BSHM, weight_M],
        )


def test_unit_length_survives_zeros() -> None:
    x_BSHN = torch.zeros(1, 1, 1, 4, requires_grad=True)
    unit_length(x_BSHN).sum().backward()
    assert x_BSHN.grad is not None and x_BSHN.grad.isfinite().all()
    assert_close(unit_length(torch.tensor([3.0, 4.0]), 2.0), torch.tensor([1.2, 1.6]), tolerance=1e-6)


@pytest.mark.often(
    "dtype0-lengths1-*", "dtype0-None-of heads", "dtype0-lengths2-of features", "dtype1-lengths1-of heads"
)
@pytest.mark.parametrize("by_channel", [False, True], ids=["of heads", "of features"])
@pytest.mark.parametrize("lengths", DOCUMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no products in bfloat16
def test_kernels_give_what_the_definition_gives(
    by_channel: bool,
    lengths: Sequence[Sequence[int]] | None,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.kernels.delta_rule.CHUNK", 16)
    documents_BS = documents_of(lengths, device)
    q, k, v, g, beta = (one.detach().to(device) for one in draw(torch.float32, by_channel=by_channel))
    inputs = [q.to(dtype), k.to(dtype), v.to(dtype), g, beta]
    exact = run(recurrent_delta_rule, [one.double().requires_grad_() for one in inputs], documents_BS)
    found = run(delta_rule, [one.requires_grad_() for one in inputs], documents_BS)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3  # a chain of products whose operands are rounded
    for got, expected in zip(found, exact, strict=True):
        assert_close(got.double(), expected, tolerance=tolerance, by="norm")


def test_a_chunk_of_kernels_may_be_wider_than_the_row(device: torch.device) -> None:
    inputs = [one.detach()[:1, :5].to(device) for one in draw(torch.float32, by_channel=False)]
    assert_close(delta_rule(*inputs), recurrent_delta_rule(*inputs))


def test_misfits_are_refused() -> None:
    q, k, v, g, beta = draw(torch.float32, by_channel=False)
    with pytest.raises(KernelError, match="do not fit"):
        delta_rule(q, k, v[:, :, :3], g, beta)
    with pytest.raises(KernelError, match="each feature"):
        kernels.short_convolution(torch.zeros(1, 2, 3), torch.zeros(4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [None, ((20, 1, 49), (2, 3, 65))])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_convolution_and_its_gradients_equal_the_definition(
    size: int, lengths: Sequence[Sequence[int]] | None, dtype: torch.dtype, device: torch.device
) -> None:
    documents_BS = documents_of(lengths, device)
    inputs = [torch.randn(2, 70, 9, device=device, dtype=dtype), torch.randn(9, size, device=device, dtype=dtype)]
    assert_parity(
        lambda *x: kernels.short_convolution(*x, documents_BS), lambda *x: short_convolution(*x, documents_BS), inputs
    )


MOST_SPILLED = {
    ("sm_90", "channel_pairs_kernel"): 544,
    ("sm_90", "channel_query_backward_kernel"): 112,
    ("sm_90", "channel_key_backward_kernel"): 336,
    ("sm_90", "channel_write_backward_kernel"): 16,
    ("sm_90", "delta_state_backward_kernel"): 8,  # with decays of features, which it takes in three stages
}
"""Bytes of a thread, with the launches that were timed on an H200 (channel-delta-rule-h200.json)."""


def rule_on_meta(rows: int, *, by_channel: bool = False) -> None:
    """Both passes with the sizes of Qwen3-Next, or of Kimi Linear."""
    q, k = (on_meta(rows, 4096, 32 if by_channel else 16, 128).requires_grad_() for _ in range(2))
    g = on_meta(rows, 4096, 32, *([128] if by_channel else []), dtype=torch.float32).requires_grad_()
    beta = on_meta(rows, 4096, 32, dtype=torch.float32).requires_grad_()
    v, documents_BS = on_meta(rows, 4096, 32, 128).requires_grad_(), on_meta(rows, 4096, dtype=torch.int64)
    o_BSHM = delta_rule(q, k, v, g, beta, documents_BS)
    o_BSHM.backward(torch.empty_like(o_BSHM))


def what_stands_around_it() -> None:
    """Short convolution and norms of heads."""
    v, documents_BS = on_meta(2, 4096, 32, 128).requires_grad_(), on_meta(2, 4096, dtype=torch.int64)
    y_BSD = kernels.short_convolution(v.flatten(2), on_meta(4096, 4).requires_grad_(), documents_BS)
    y_BSD.backward(torch.empty_like(y_BSD))
    y_BSHM = head_norms.gated_norm(head_norms.unit_length(v), v, on_meta(128).requires_grad_(), 1e-6, is_silu=True)
    y_BSHM.backward(torch.empty_like(y_BSHM))


COMPILED: dict[str, tuple[Callable[[], None], int]] = {
    "two rows": (lambda: rule_on_meta(2), 7),
    "one row": (lambda: rule_on_meta(1), 7),
    "of features": (lambda: rule_on_meta(2, by_channel=True), 9),
    "around it": (what_stands_around_it, 7),
}
"""Launches, and how many."""


@pytest.mark.often("sm_90-two rows", "gfx942-around it")
@pytest.mark.parametrize("part", COMPILED)
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_for_all_chips(target: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.kernels.delta_rule.target_of", lambda device: target)
    launches, count = COMPILED[part]
    compiled = compile_launches(target, launches)
    assert len(compiled) == count
    for one in compiled:
        assert one.spills <= MOST_SPILLED.get((target, one.kernel), 0), one.summary
        assert one.shared_bytes <= TARGETS[target].shared_bytes, one.summary
    assert part == "around it" or all(one.matrix_instructions for one in compiled)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu_memory")
@pytest.mark.parametrize("by_channel", [False, True], ids=["of heads", "of features"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("lengths", [None, (1000, 3000, 96)])
def test_kernels_at_the_size_of_a_model_equal_chunks(
    lengths: Sequence[int] | None, rows: int, by_channel: bool
) -> None:
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(rows, 4096, *size, generator=generator, device="cuda", dtype=torch.bfloat16)

    documents_BS = None if lengths is None else documents_of((lengths,) * rows, "cuda")
    g = -F.softplus(normal(32, 128).float() if by_channel else normal(32).float())
    key_heads = 32 if by_channel else 16
    q, k = unit_length(normal(key_heads, 128), 128**-0.5), unit_length(normal(key_heads, 128))
    inputs = [q, k, normal(32, 128), g, normal(32).float().sigmoid()]
    exact = run(chunked_delta_rule, [one.float().requires_grad_() for one in inputs], documents_BS)
    found = run(delta_rule, [one.requires_grad_() for one in inputs], documents_BS)
    for got, expected in zip(found, exact, strict=True):
        assert_close(got.float(), expected, tolerance=2e-2, by="norm")
