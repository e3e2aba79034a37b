"""Each sync-free stage takes away what it says: the waits of a training step, counted by phase."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.hierarchical import HierarchicalDispatcher
from penstock.moe.layer import MoE
from penstock.train.step import train_step
from tests.distributed.one_loss import RATE, layout, start_session
from tests.distributed.pool import Pool
from tests.moe.host_waits import PHASES, HostWaits, unwatched_order_rows

RANKS, LAYERS = 2, 8
SMALL = layout(
    f"expert={RANKS}", "training.global_batch=2", "evaluation.rows=0", "model.moe.balance.aux_loss=micro-batch"
)
REFERENCE = ("kernels.all=reference",)
"""Counts rows on the host in the permutation and in every product of the experts."""

PADDED = ("model.moe.balance.capacity_factor=1.0", "model.moe.balance.pad_to_capacity=true")


def _waits(overrides: tuple[str, ...]) -> Counter[str]:
    """Of the second step of a rank with one micro-batch: the first may warm up."""
    session = start_session(SMALL + overrides)
    waits = HostWaits()
    layers = [module for decoder in session.model.modules for module in decoder.modules() if isinstance(module, MoE)]
    assert len(layers) == LAYERS
    for layer in layers:
        if session.run.kernels.all != "reference":
            # What a GPU takes by itself; a CPU takes the reference.
            layer.dispatcher = _with_our_order(layer.dispatcher)
        waits.follow(layer)
    batches = [session.state.batches.next_batch() for _ in range(2)]
    session.state.batches.close()
    train_step(session.model, session.state.optimizer, batches[0], session.rule, RATE)
    with waits.watching():
        waits.counts.clear()
        train_step(session.model, session.state.optimizer, batches[1], session.rule, RATE)
    return waits.counts


def _with_our_order(dispatcher: Dispatcher) -> Dispatcher:
    if isinstance(dispatcher, HierarchicalDispatcher):
        dispatcher = replace(dispatcher, inner=_with_our_order(dispatcher.inner))
    operators = replace(dispatcher.operators, order_rows=unwatched_order_rows)
    return replace(dispatcher, operators=operators)


def _dispatch(method: str, stage: int, *more: str) -> tuple[str, ...]:
    return (f"dispatch.method={method}", f"dispatch.sync_free={stage}", *more)


# Waits of each MoE layer in router, dispatch, experts and combine of one forward pass, and in its backward pass.
EXPECTED: dict[str, tuple[tuple[str, ...], tuple[int, int, int, int, int]]] = {
    "all-to-all, 0": (_dispatch("all-to-all", 0, *REFERENCE), (0, 2, 2, 0, 0)),
    "all-to-all, 1": (_dispatch("all-to-all", 1), (0, 1, 0, 0, 0)),
    "all-gather, 0": (_dispatch("all-gather", 0, *REFERENCE), (0, 2, 2, 0, 0)),
    "all-gather, 1": (_dispatch("all-gather", 1), (0, 1, 0, 0, 0)),
    "all-gather, 2": (_dispatch("all-gather", 2), (0, 0, 0, 0, 0)),
    "all-gather, 3": (_dispatch("all-gather", 3), (0, 0, 0, 0, 0)),
    "hierarchical, 1": (_dispatch("hierarchical", 1), (0, 2, 0, 0, 0)),
    "hierarchical, 2": (_dispatch("hierarchical", 2), (0, 0, 0, 0, 0)),
    "hierarchical, 3": (_dispatch("hierarchical", 3), (0, 0, 0, 0, 0)),
    "auto, 2": (_dispatch("auto", 2), (0, 0, 0, 0, 0)),
    "auto, 3": (_dispatch("auto", 3), (0, 0, 0, 0, 0)),
    "padded, 3": (_dispatch("auto", 3, *PADDED), (0, 0, 0, 0, 0)),
}


@pytest.mark.often(
    "all-to-all, 1", "all-gather, 0", "all-gather, 2", "all-gather, 3", "hierarchical, 3", "padded, 3", "auto, 2"
)
@pytest.mark.parametrize("case", EXPECTED)
def test_a_stage_leaves_only_the_waits_that_it_says(ranks: Pool, case: str) -> None:
    overrides, expected = EXPECTED[case]
    for counts in ranks.run(RANKS, _waits, overrides):
        found = tuple(counts[phase] / LAYERS for phase in PHASES[:-1])
        assert found == expected, dict(counts)
        # All figures of the step are read in one copy. Before it the labels were counted, of the batch and of the one
        # prediction depth, but these are on the CPU everywhere.
        assert counts["rest"] == 1 + 2, dict(counts)


def test_what_reads_a_value_is_counted() -> None:
    waits, numbers = HostWaits(), torch.tensor([1, 0, 2], requires_grad=False)
    with waits.watching():
        numbers.tolist()
        numbers.cpu()
        int(numbers.sum())
        bool(numbers[0] > 0)
        numbers.nonzero()
        numbers.bincount()
        numbers[numbers > 0]
        numbers.repeat_interleave(numbers)
    assert waits.counts == {"rest": 8}
    with waits.watching():
        numbers.repeat_interleave(numbers, output_size=3)
        torch.where(numbers > 0, numbers, 0).sort().values.cumsum(0)
    assert waits.counts == {"rest": 8}


def test_what_a_backward_pass_reads_is_counted_apart() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            gradients[0].tolist()
            gradients[0].sum().item()
            return gradients[0]

    waits = HostWaits()
    with waits.watching():
        Reads.apply(torch.zeros(3, requires_grad=True)).sum().backward()
    assert waits.counts == {"backward": 2}
