"""Gradients of the experts' outputs that are pushed in 8 bits: the numbers that are quantized on arrival else."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.float8.expert_ffn import expert_ffn
from penstock.kernels.float8.gradient_side_channel import GradientSideChannel
from penstock.kernels.float8.operators import REFERENCE, Float8Operators, Float8Rule
from penstock.kernels.float8.quantized import row_bytes
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, E4M3, E5M2, MXFP8, Format, Recipe
from penstock.kernels.float8.reference import quantize_rows
from penstock.kernels.float8.triton_operators import TRITON
from penstock.moe.dispatch import symmetric
from penstock.moe.routing import Scope
from penstock.parallel.symmetric import SymmetricBuffers
from penstock.plan.op_recorder import OpRecorder
from tests.closeness import decibels
from tests.moe.packed_gradients import RANKS, READ, Case, D, F, layer_of, results_of
from tests.parallel.symmetric_ranks import run_ranks

CPU, META = torch.device("cpu"), torch.device("meta")
SIMULATED = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are simulated in Triton's interpreter")


def _solve(case: Case) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = run_ranks(results_of, case.sizes, case, CPU)
    return found


@contextmanager
def _pushed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.dtype, int]]]:
    """Type and width of rows, whenever rows of a chunk are pushed."""
    seen, push_rows = [], symmetric.push_rows

    def note(rows_T: Tensor, *arguments: Any, **options: Any) -> None:
        seen.append((rows_T.dtype, rows_T.shape[1]))
        push_rows(rows_T, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(symmetric, "push_rows", note)
        yield seen


BYTES, PLAIN = (torch.uint8, row_bytes(D, BLOCKWISE)), (torch.float32, D)


@SIMULATED
@pytest.mark.parametrize(
    ("case", "back"),
    [
        (Case(), BYTES),
        (Case(rule=replace(READ, experts=BLOCKWISE_SQUARE)), BYTES),
        (Case(rule=replace(READ, experts=None)), PLAIN),
        (Case(rule=replace(READ, experts=MXFP8)), PLAIN),
        (Case(bias=True), PLAIN),
        (Case(leaves=True), BYTES),
    ],
    ids=["same blocks", "squares", "16 bits", "other blocks", "biases", "beside other work"],
)
def test_gradients_are_pushed_as_bytes_where_experts_quantize_them_so(
    case: Case, back: tuple[torch.dtype, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with _pushed(monkeypatch) as seen:
        _solve(case)
    assert len(seen) == 2 * RANKS
    assert sorted(seen, key=str) == sorted([BYTES, back] * RANKS, key=str)


RECIPES = {
    "blockwise": (BLOCKWISE, E4M3),
    "e5m2": (BLOCKWISE, E5M2),
    "squares": (BLOCKWISE_SQUARE, E4M3),
    "mxfp8": (MXFP8, E4M3),
}


@SIMULATED
@pytest.mark.parametrize(
    ("recipe", "gradient", "operators"),
    [
        *(pytest.param(*given, REFERENCE, id=f"{name}-definition") for name, given in RECIPES.items()),
        # The kernels know three of these from their own tests; interpreted they take long.
        pytest.param(*RECIPES["squares"], TRITON, id="squares-triton"),
        *(
            pytest.param(*RECIPES[name], TRITON, id=f"{name}-triton", marks=pytest.mark.slow)
            for name in ("blockwise", "e5m2", "mxfp8")
        ),
    ],
)
def test_rows_of_gradients_are_those_that_are_quantized_on_arrival(
    recipe: Recipe, gradient: Format, operators: Float8Operators
) -> None:
    """So all that comes of them is equal; the gradient of down reads their columns, made of 8 bits instead of 16.

    Scales are powers of two, so only numbers that are small beside others of their columns are rounded twice.
    """
    dispatch = BLOCKWISE if recipe is BLOCKWISE_SQUARE else recipe
    case = Case(rule=Float8Rule(dispatch=dispatch, experts=recipe, gradient=gradient, operators=operators))
    for found, plain in zip(_solve(case), _solve(replace(case, in_sixteen=True)), strict=True):
        down, plain_down = found.pop("experts.down_eDF"), plain.pop("experts.down_eDF")
        assert found.keys() == plain.keys()
        assert not [name for name, one in found.items() if not torch.equal(one, plain[name])]
        assert decibels(down, plain_down) > (22 if gradient is E4M3 else 17)


@SIMULATED
@pytest.mark.parametrize(
    "case",
    [
        Case(recompute=("moe",)),
        Case(recompute=("expert-activation",)),
        Case(leaves=True),
        Case(passes=2),
        Case(passes=2, recompute=("moe",)),
    ],
    ids=["layer again", "activation again", "beside other work", "two passes", "two passes, layer again"],
)
def test_experts_find_them_however_the_layer_runs(case: Case) -> None:
    for found, once in zip(_solve(case), _solve(Case()), strict=True):
        for name, one in found.items():
            times = 1 if name == "y" else case.passes
            assert torch.equal(one, times * once[name]), name


@SIMULATED
def test_places_that_hold_nothing_may_hold_anything() -> None:
    """What is not written is NaN, in rows and in scales."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        found, once = _solve(Case(bound=2.0)), _solve(Case())
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(
        torch.equal(one, plain[name]) for mine, plain in zip(found, once, strict=True) for name, one in mine.items()
    )


@SIMULATED
def test_ranks_that_push_gradients_in_8_bits_give_what_one_rank_gives() -> None:
    alone, found = results_of(None, Case(), CPU), _solve(Case())
    for name, whole in alone.items():
        if name.startswith("experts") or name in ("y", "x"):
            together = torch.cat([one[name] for one in found])
        else:
            together = torch.stack([one[name] for one in found]).sum(0)
        # A weight's gradient is contracted over rows, and which of them share a scale depends on their order.
        assert decibels(together, whole) > (25 if name.startswith("experts") else 60), name


def test_a_plan_counts_their_bytes() -> None:
    case = Case(rule=replace(READ, operators=TRITON), bound=2.0)
    memory = torch.empty(case.sizes.total_bytes, dtype=torch.uint8, device=META)
    buffers, pushed, tokens = SymmetricBuffers(case.sizes, memory, [0] * RANKS, 0), [], case.sizes.tokens
    for one in (case, replace(case, in_sixteen=True)):
        layer, tape = layer_of(one, buffers, META), OpRecorder()
        with tape:
            (y_TD,) = layer(torch.empty(tokens, D, device=META, requires_grad=True), Scope())
            y_TD.sum().backward()
        pushed.append([one.sizes[0] for one in tape.cut() if one.name == "push_rows_kernel"])
    packed, plain = (tokens * size for size in (row_bytes(D, BLOCKWISE), 4 * D))
    assert pushed == [[packed, packed], [packed, plain]]


# The side channel.


def test_a_side_channel_is_empty_once_its_gradient_was_taken() -> None:
    channel, rows = GradientSideChannel(), quantize_rows(torch.randn(2, D), BLOCKWISE, E4M3)
    assert channel.take() is None and not channel.is_expected
    channel.expect()
    channel.put(rows)
    assert channel.is_expected and channel.take() is rows and channel.take() is None


def _run_experts(channel: GradientSideChannel | None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x_ND, matrices = torch.randn(6, D), (torch.randn(2, 2 * F, D), torch.randn(2, D, F))
    counts_e = torch.tensor([2, 3], dtype=torch.int32)
    return expert_ffn(x_ND.requires_grad_(), *matrices, counts_e, float8=READ, gradients=channel), x_ND


def test_experts_whose_side_channel_is_empty_read_the_gradient_of_autograd() -> None:
    (y_RD, x_ND), (plain_RD, plain_ND) = _run_experts(GradientSideChannel()), _run_experts(None)
    y_RD.square().sum().backward()
    plain_RD.square().sum().backward()
    assert torch.equal(x_ND.grad, plain_ND.grad)


def test_gradients_of_other_blocks_are_refused() -> None:
    channel = GradientSideChannel()
    y_RD, _ = _run_experts(channel)
    channel.put(quantize_rows(y_RD, MXFP8, E4M3))
    with pytest.raises(KernelError, match="rows in 8 bits must be those of the output's gradient"):
        y_RD.sum().backward()
