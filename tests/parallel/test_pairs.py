"""A forward and a backward pass that a rank does at once: one computes while the other's tokens travel, and the
gradients are those of one after the other."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.layout.actions import Action, Kind, Schedule
from penstock.layout.grid import Grid
from penstock.layout.schedules import PAIRED_GRAMMARS, schedule
from penstock.parallel.async_transfer import Steps, TransferStream, drain
from penstock.parallel.axes import ALONE, make_axes
from penstock.parallel.pipeline import Message, PipelineRunner
from penstock.parallel.weight_grad_store import WeightGradStore
from tests.closeness import assert_close
from tests.distributed.pool import Pool
from tests.parallel.recorded import Recorded

B, S, D = 2, 3, 4
MESSAGE = Message(shape=(B, S, D), dtype=torch.float32, device=torch.device("cpu"))

Weights = dict[int, tuple[nn.Parameter, nn.Parameter]]


def _weights(stages: tuple[int, ...]) -> Weights:
    def parameter(seed: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(D, D, generator=torch.Generator().manual_seed(seed)))

    return {stage: (parameter(2 * stage), parameter(2 * stage + 1)) for stage in stages}


def _twice(x_BSD: Tensor) -> tuple[tuple[Tensor], None]:
    return (2 * x_BSD,), None


def _stage(
    weights: Weights, transfers: TransferStream, last: int, stage: int, number: int, x_BSD: Tensor | None
) -> Steps[Tensor]:
    """A product, a way, another product, a way back; the last stage weighs the micro-batch."""
    attention, experts = weights[stage]
    mark = transfers.mark if isinstance(transfers, Recorded) else lambda name, x: x
    if x_BSD is None:
        x_BSD = torch.randn(B, S, D, generator=torch.Generator().manual_seed(1000 + number))
    handle = transfers.launch("dispatch", _twice, mark(f"attention of {number}", F.linear(x_BSD, attention).tanh()))
    yield
    (y_BSD,), _ = handle.wait()
    handle = transfers.launch("combine", _twice, mark(f"experts of {number}", F.linear(y_BSD, experts).tanh()))
    yield
    (y_BSD,), _ = handle.wait()
    return y_BSD if stage < last else (y_BSD * (number + 1)).sum()


def _gradients(weights: Weights) -> dict[int, list[Tensor | None]]:
    return {stage: [one.grad for one in pair] for stage, pair in weights.items()}


def _train(plan: Schedule) -> dict[int, list[Tensor | None]]:
    axes = make_axes(Grid(world=plan.ranks, pipeline=plan.ranks))
    weights, transfers = _weights(plan.stages_of(axes.pipeline.rank)), TransferStream(torch.device("cpu"))
    calls = {stage: partial(_stage, weights, transfers, plan.stages - 1, stage) for stage in weights}
    pipeline = PipelineRunner(plan, axes, MESSAGE, weight_grads=None, transfers=transfers)
    pipeline.train(calls)
    return _gradients(weights)


def _one_after_the_other(plan: Schedule) -> dict[int, list[Tensor | None]]:
    weights = _weights(tuple(range(plan.stages)))
    for number in range(plan.micro_batches):
        x_BSD = None
        for stage in range(plan.stages):
            x_BSD = drain(_stage(weights, TransferStream(torch.device("cpu")), plan.stages - 1, stage, number, x_BSD))
        assert x_BSD is not None
        x_BSD.backward()
    return _gradients(weights)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("micro_batches", [6, 7])
def test_pairs_give_the_gradients_of_one_after_the_other(micro_batches: int, count: int, ranks: Pool) -> None:
    plan = schedule("interleaved", ranks=count, stages_per_rank=2, micro_batches=micro_batches, pairs=True)
    assert any(plan.pairs)
    found = {stage: pair for result in ranks.run(count, _train, plan) for stage, pair in result.items()}
    expected = _one_after_the_other(plan)
    assert found.keys() == expected.keys()
    for stage, pair in expected.items():
        for one, other in zip(found[stage], pair, strict=True):
            assert_close(one, other, tolerance=1e-5)


def _alone(transfers: TransferStream | None) -> PipelineRunner:
    """One stage; the second forward is done with the first backward."""
    actions = tuple(Action(0, kind, number) for kind in (Kind.FORWARD, Kind.BACKWARD) for number in range(2))
    plan = Schedule(
        name="by hand",
        ranks=1,
        stages_per_rank=1,
        placement="loop",
        micro_batches=2,
        actions=(actions,),
        pairs=(frozenset({1}),),
    )
    return PipelineRunner(plan, ALONE, MESSAGE, transfers=transfers)


def test_each_pass_computes_while_the_other_travels() -> None:
    transfers = Recorded()
    weights = _weights((0,))
    _alone(transfers).train({0: partial(_stage, weights, transfers, 0, 0)})
    first = transfers.events.index("combine 1 back leaves")
    last = transfers.events.index("combine 3 back leaves")
    assert transfers.events[first:last] == [
        "combine 1 back leaves",
        "attention of 1",
        "dispatch 2 leaves",
        "combine 1 back arrives",
        "experts of 0 back",
        "dispatch 0 back leaves",
        "dispatch 2 arrives",
        "experts of 1",
        "combine 3 leaves",
        "dispatch 0 back arrives",
        "attention of 0 back",
        "combine 3 arrives",
    ]


def test_a_schedule_with_pairs_needs_transfers() -> None:
    with pytest.raises(AssertionError, match="computes while tokens travel"):
        _alone(None)


@pytest.mark.parametrize("name", PAIRED_GRAMMARS)
def test_an_evaluation_has_no_pairs(name: str) -> None:
    plan = schedule(name, ranks=1, stages_per_rank=2, micro_batches=4, pairs=True)
    transfers, weights = Recorded(), _weights((0, 1))
    losses: list[Tensor] = []

    def call(stage: int, number: int, x_BSD: Tensor | None) -> Steps[Tensor]:
        output = yield from _stage(weights, transfers, 1, stage, number, x_BSD)
        losses.append(output)
        return output

    calls = {stage: partial(call, stage) for stage in weights}
    PipelineRunner(plan, ALONE, MESSAGE, weight_grads=WeightGradStore(), transfers=transfers).evaluate(calls, 3)
    assert len(losses) == 6 and not any(output.requires_grad for output in losses)
