"""Attention in 8 bits where ranks share a row: the same bits as one process, or a refusal."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.float8.operators import Float8Rule
from penstock.layout.grid import Grid
from penstock.layout.sequence import SequenceLayout
from penstock.parallel.axes import ALONE, Axes, make_axes
from penstock.parallel.context import attend, attend_locally, attend_to_row
from penstock.parallel.layer_context import LayerContext
from tests.closeness import relative_error
from tests.distributed.pool import Pool

LENGTH = 160
RANKS = 2
IN_EIGHT_BITS = Float8Rule(attention=True)


def _passes(axes: Axes, own: list[int]) -> list[Tensor]:
    """Output and gradients at some positions, for 4 heads that share 2 of keys."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, LENGTH, heads, 32, generator=generator)[:, own] for heads in (4, 2, 2, 4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    layer_context = LayerContext(axes=axes, context_method="ulysses", float8=IN_EIGHT_BITS)
    o_BSHM = attend(*leaves, layer_context, scale=0.2, allowed_BSS=None)
    return [o_BSHM.detach(), *torch.autograd.grad(o_BSHM, leaves, do)]


def _on_a_rank() -> list[Tensor]:
    axes = make_axes(Grid(world=RANKS, context=RANKS))
    layout = SequenceLayout(length=LENGTH, context=RANKS, method="ulysses")
    return _passes(axes, list(layout.of_context(axes.context.rank)))


def test_ranks_that_swap_positions_for_heads_compute_the_same_bits(ranks: Pool) -> None:
    expected = _passes(ALONE, list(range(LENGTH)))
    layout = SequenceLayout(length=LENGTH, context=RANKS, method="ulysses")
    for rank, got in enumerate(ranks.run(RANKS, _on_a_rank)):
        own = list(layout.of_context(rank))
        for name, mine, whole in zip(("output", "dq", "dk", "dv"), got, expected, strict=True):
            assert torch.equal(mine, whole[:, own]), f"{name} of rank {rank}"


def test_it_is_attention_in_eight_bits_that_runs() -> None:
    q, k, v = (torch.randn(1, 40, 2, 32) for _ in range(3))
    layer_context = LayerContext()
    plain = attend(q, k, v, layer_context, scale=0.2, allowed_BSS=None)
    rounded = attend(q, k, v, replace(layer_context, float8=IN_EIGHT_BITS), scale=0.2, allowed_BSS=None)
    assert 0.001 < relative_error(rounded, plain, by="norm") < 0.1


def test_what_has_no_kernel_is_never_computed_in_16_bits_instead() -> None:
    q, k, v = (torch.randn(1, 8, 2, 32) for _ in range(3))
    layer_context, causal_BSS = LayerContext(float8=IN_EIGHT_BITS), torch.ones(1, 8, 8, dtype=torch.bool).tril()
    with pytest.raises(AssertionError, match="masks"):
        attend(q, k, v, layer_context, scale=1.0, allowed_BSS=causal_BSS)
    with pytest.raises(AssertionError, match="sinks"):
        attend(q, k, v, layer_context, scale=1.0, allowed_BSS=None, sinks_H=torch.zeros(2))
    with pytest.raises(AssertionError, match="all-gather"):
        attend_to_row(q, k, v, layer_context, scale=1.0, allowed_BSS=None)
    with pytest.raises(AssertionError, match="windows"):
        attend_locally(q, k, v, layer_context, scale=1.0, nears=())
