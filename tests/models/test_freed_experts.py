"""Experts that FSDP2 divides are freed, and their gradients leave, as soon as backward has passed their layer.

FSDP2 knows by the gradients of a module's inputs. Before torch 2.13 it finds these inputs with `tree_flatten` alone, so
that is how it finds them here.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from penstock.kernels.float8.quantized import Quantized
from penstock.models.block import Block
from penstock.moe.dispatch.contract import ExpertRows
from penstock.moe.experts import GroupedExperts
from penstock.moe.layer import MoE
from tests.distributed.one_loss import follow, start_session
from tests.distributed.pool import Pool

RUN = ("parallel.shard=full", "model.layers=3", "model.mtp_layers=0")
MOE_LAYERS = 2
FLOAT8 = ("training.precision=bf16", "float8.experts=blockwise", "float8.dispatch=auto", "model.hidden_size=128")


def _has_gradient(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _found(inputs: Any) -> tuple[Tensor, ...]:
    """Tensors that get gradients, as torch 2.11 finds them."""
    return tuple(filter(_has_gradient, tree_leaves(inputs)))


def _put_back(inputs: Any, tensors: Iterator[Tensor]) -> Any:
    return tree_map(lambda leaf: next(tensors) if _has_gradient(leaf) else leaf, inputs)


def _watch(block: Block, seen: list[tuple[bool, bool]]) -> None:
    """Note, when the gradient of a block's input is there: its experts are divided again, and have their gradients."""

    def look(experts: GroupedExperts, _: Tensor) -> None:
        held = list(experts.parameters())
        has_gradients = all(isinstance(one.grad, DTensor) and bool(one.grad.to_local().any()) for one in held)
        seen.append((all(isinstance(one, DTensor) for one in held), has_gradients))

    def at_entrance(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(partial(look, block.ffn.experts))

    block.register_forward_pre_hook(at_entrance)


def _step(overrides: tuple[str, ...]) -> list[tuple[bool, bool]]:
    """What is seen in a step's backward passes."""
    session = start_session((*RUN, *overrides))
    seen: list[tuple[bool, bool]] = []
    for block in session.model.whole.blocks.values():
        if isinstance(block.ffn, MoE):
            _watch(block, seen)
    by_tree = {"collect_grad_tensors": _found, "replace_grad_tensors": _put_back}
    with mock.patch.multiple(_fsdp_param_group, create=True, **by_tree):
        follow(session, 1)
    session.state.batches.close()
    return seen


@pytest.mark.often("layer recomputed", "over ranks in 8 bits")
@pytest.mark.parametrize(
    ("count", "overrides"),
    [
        pytest.param(2, (), id="alone"),
        pytest.param(2, ("parallel.reshard=backward",), id="gathered until backward"),
        pytest.param(2, ('recompute.modules=["expert-activation"]',), id="activation recomputed"),
        pytest.param(2, ('recompute.modules=["layer"]',), id="layer recomputed"),
        pytest.param(4, ("parallel.expert=2",), id="over ranks"),
        pytest.param(4, ("parallel.expert=2", *FLOAT8), id="over ranks in 8 bits"),
    ],
)
def test_experts_are_freed_and_reduced_before_backward_reaches_the_layer_before(
    ranks: Pool, count: int, overrides: tuple[str, ...]
) -> None:
    micro_batches = 8 // count
    for seen in ranks.run(count, _step, overrides):
        assert seen == [(True, True)] * (MOE_LAYERS * micro_batches)


@pytest.mark.parametrize("is_full", [True, False])
def test_rows_are_put_together_as_they_were_taken_apart(is_full: bool) -> None:
    x_ND, weights_R, counts_e = torch.randn(3, 4, requires_grad=True), torch.rand(3, requires_grad=True), torch.ones(2)
    rows = ExpertRows(x_ND, None, weights_R, counts_e)
    if is_full:
        places_NK, quantized = torch.arange(3)[:, None], Quantized(torch.zeros(3, 4), torch.ones(3, 1), (1, 128))
        rows = ExpertRows(x_ND, torch.arange(3), weights_R, counts_e, places_NK, quantized, only_last=True)
    leaves, form = tree_flatten((rows, "another argument"))
    assert [leaf for leaf in leaves if _has_gradient(leaf)] == [x_ND, weights_R]
    again, other = tree_unflatten(leaves, form)
    assert isinstance(again, ExpertRows) and other == "another argument"
    assert isinstance(again.quantized, Quantized) == is_full
    for name, value in vars(rows).items():
        assert [*map(id, tree_leaves(getattr(again, name)))] == [*map(id, tree_leaves(value))], name
