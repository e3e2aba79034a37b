"""A pipeline of small stages on several ranks gives what one process gives that holds them all."""

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.layout.actions import Action, Kind, Schedule
from penstock.layout.grid import Grid
from penstock.layout.schedules import PAIRED_GRAMMARS, SCHEDULES, schedule
from penstock.parallel.async_transfer import TransferStream, WeightGradStore, deferrable
from penstock.parallel.axes import ALONE, Axes, Axis, make_axes
from penstock.parallel.layer_context import Steps, drain
from penstock.parallel.pipeline import Message, PipelineRunner, StageCall
from tests.closeness import assert_close
from tests.distributed.pool import Pool
from tests.parallel.recorded import Recorded

B, S, D = 2, 3, 4  # of a message
MICRO_BATCHES = 6
CPU = torch.device("cpu")
PARTS = (("attention", "dispatch"), ("experts", "combine"))  # product, and the transfer behind it


def _message(dtype: torch.dtype = torch.float32) -> Message:
    return Message(shape=(B, S, D), dtype=dtype, device=CPU)


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _twice(x_BSD: Tensor) -> tuple[tuple[Tensor], None]:
    return (2 * x_BSD,), None


@dataclass
class Seen:
    """Stages of two products with a transfer behind each; the first reads the micro-batch, the last weighs it."""

    stages: tuple[int, ...]
    count: int  # stages of all ranks
    weight_grads: WeightGradStore | None = None
    dtype: torch.dtype = torch.float32
    transfers: TransferStream = field(default_factory=partial(TransferStream, CPU))
    losses: dict[int, float] = field(default_factory=dict)  # by micro-batch
    modes: set[bool] = field(default_factory=set)  # whether outputs had a graph

    def __post_init__(self) -> None:
        drawn = {stage: [_drawn(2 * stage + one, D, D).to(self.dtype) for one in range(2)] for stage in self.stages}
        self.weights = {stage: [nn.Parameter(one) for one in pair] for stage, pair in drawn.items()}
        self.last = self.count - 1

    def calls(self) -> dict[int, StageCall]:
        return {stage: partial(self._call, stage) for stage in self.weights}

    def _call(self, stage: int, number: int, x_BSD: Tensor | None) -> Steps[Tensor]:
        assert (x_BSD is None) == (stage == 0), f"stage {stage} got {x_BSD}"
        x_BSD = _drawn(1000 + number, B, S, D).to(self.dtype) if x_BSD is None else x_BSD
        for (part, way), weight in zip(PARTS, self.weights[stage], strict=True):
            x_BSD = deferrable(F.linear, (x_BSD,), (weight,), self.weight_grads).tanh()
            if isinstance(self.transfers, Recorded):
                x_BSD = self.transfers.mark(f"{part} of {number}", x_BSD)
            handle = self.transfers.launch(way, _twice, x_BSD)
            yield
            (x_BSD,), _ = handle.wait()
        output = x_BSD if stage < self.last else (x_BSD.float() * (number + 1)).sum()  # micro-batches weigh differently
        self.modes.add(output.requires_grad)
        if stage == self.last:
            self.losses[number] = float(output.detach())
        return output

    def gradients(self) -> dict[int, list[Tensor | None]]:
        return {stage: [weight.grad for weight in pair] for stage, pair in self.weights.items()}


Result = tuple[dict[int, list[Tensor | None]], dict[int, float]]


def _plan(name: str, ranks: int) -> Schedule:
    stages = max(SCHEDULES[name].fewest, 1)  # on a rank
    return schedule(name, ranks=ranks, stages_per_rank=stages, micro_batches=max(MICRO_BATCHES, 2 * ranks))


def _in_one_process(plan: Schedule, dtype: torch.dtype = torch.float32) -> Result:
    whole = Seen(tuple(range(plan.stages)), plan.stages, dtype=dtype)
    for number in range(plan.micro_batches):
        x_BSD = None
        for call in whole.calls().values():
            x_BSD = drain(call(number, x_BSD))
        x_BSD.backward()
    return whole.gradients(), whole.losses


def _rank(plan: Schedule, dtype: torch.dtype = torch.float32) -> tuple[PipelineRunner, Seen]:
    """The pipeline of this rank, with what its stages see."""
    axes, transfers = make_axes(Grid(world=plan.ranks, pipeline=plan.ranks)), TransferStream(CPU)  # pipeline only
    weight_grads = WeightGradStore() if plan.splits_backward else None
    seen = Seen(plan.stages_of(axes.pipeline.rank), plan.stages, weight_grads, dtype, transfers)
    return PipelineRunner(plan, axes, _message(dtype), weight_grads, transfers if plan.pairs else None), seen


def _train(plan: Schedule, dtype: torch.dtype) -> list[Result]:
    """Two steps with the same weights, each from no gradients."""
    results = []
    for _ in range(2):
        pipeline, seen = _rank(plan, dtype)
        pipeline.train(seen.calls())
        results.append((seen.gradients(), seen.losses))
    return results


def _joined(results: list[Result]) -> Result:
    gradients = {stage: gradient for found, _ in results for stage, gradient in found.items()}
    return gradients, {number: loss for _, found in results for number, loss in found.items()}


def _assert_same(found: Result, expected: Result, tolerance: float = 1e-5) -> None:
    assert found[0].keys() == expected[0].keys(), "every stage is somewhere"
    assert_close(found[1], expected[1], what="loss of micro-batch")
    for stage, gradients in expected[0].items():
        assert_close(found[0][stage], gradients, tolerance=tolerance, what=f"gradients of stage {stage}")


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_gradients_of_one_process(name: str, count: int, ranks: Pool) -> None:
    plan = _plan(name, count)
    results = ranks.run(count, _train, plan, torch.float32)
    for step in range(2):
        _assert_same(_joined([result[step] for result in results]), _in_one_process(plan))


def test_messages_travel_in_the_compute_dtype(ranks: Pool) -> None:
    plan = _plan("1f1b", 2)
    results = ranks.run(2, _train, plan, torch.bfloat16)
    _assert_same(_joined([result[0] for result in results]), _in_one_process(plan, torch.bfloat16), tolerance=1e-2)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("micro_batches", [6, 7])
def test_pairs_give_the_gradients_of_one_after_the_other(micro_batches: int, count: int, ranks: Pool) -> None:
    plan = schedule("interleaved", ranks=count, stages_per_rank=2, micro_batches=micro_batches, pairs=True)
    assert any(plan.pairs)
    results = ranks.run(count, _train, plan, torch.float32)
    _assert_same(_joined([result[0] for result in results]), _in_one_process(plan))


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-v", "dualpipe-v"])
def test_stages_of_one_rank_hand_over_without_a_message(name: str) -> None:
    plan = schedule(name, ranks=1, stages_per_rank=2, micro_batches=MICRO_BATCHES)
    pipeline, seen = _rank(plan)
    pipeline.train(seen.calls())
    _assert_same((seen.gradients(), seen.losses), _in_one_process(plan))


def _evaluate(plan: Schedule, micro_batches: int) -> tuple[dict[int, float], set[bool], bool]:
    pipeline, seen = _rank(plan)
    pipeline.evaluate(seen.calls(), micro_batches)
    return seen.losses, seen.modes, not any(one is not None for pair in seen.gradients().values() for one in pair)


@pytest.mark.parametrize("micro_batches", [1, 5])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_an_evaluation_runs_forward_only_on_any_number_of_micro_batches(
    name: str, micro_batches: int, ranks: Pool
) -> None:
    plan = _plan(name, 2)
    results = ranks.run(2, _evaluate, plan, micro_batches)
    losses = {number: loss for found, _, _ in results for number, loss in found.items()}
    expected = _in_one_process(plan)[1]
    assert_close(losses, {number: expected[number] for number in range(micro_batches)})
    for _, records_graph, has_no_gradient in results:
        assert records_graph == {False} and has_no_gradient


# What is wrong is said


def _by_hand(actions: str, stages: int = 1, micro_batches: int = 1, **options: Any) -> PipelineRunner:
    """A pipeline of one rank that does what is written: `0F0 1F0 1B0 0B0`; `+` joins a pair."""
    spelled, pairs = list[Action](), set[int]()
    for unit in actions.split():
        words = unit.split("+")  # two words: forward in the gaps of backward
        pairs |= {len(spelled)} if len(words) > 1 else set()
        spelled += [Action(int(word[0]), Kind(word[1]), int(word[2:])) for word in words]
    plan = Schedule(
        name="by hand",
        ranks=1,
        stages_per_rank=stages,
        placement="loop",
        micro_batches=micro_batches,
        actions=(tuple(spelled),),
        pairs=(frozenset(pairs),) if pairs else (),
    )
    return PipelineRunner(plan, ALONE, _message(), **options)


def test_a_schedule_that_splits_needs_stages_that_can_and_one_with_pairs_needs_transfers() -> None:
    with pytest.raises(AssertionError, match="zb-1f1b puts weight gradients off"):
        PipelineRunner(_plan("zb-1f1b", 2), ALONE, _message())
    with pytest.raises(AssertionError, match="computes while tokens travel"):
        _by_hand(ONE_PAIR, micro_batches=2)


@pytest.mark.parametrize("actions", ["0F0", "0F0 0I0"])
def test_a_schedule_that_leaves_a_pass_or_work_undone_is_refused(actions: str) -> None:
    weight_grads = WeightGradStore()
    with pytest.raises(AssertionError, match="left something undone"):
        _by_hand(actions, weight_grads=weight_grads).train(Seen((0,), 1, weight_grads).calls())


def test_a_stage_that_does_not_use_its_input_and_a_message_that_no_rank_sends_are_named() -> None:
    def unused(number: int, x_BSD: Tensor | None) -> Steps[Tensor]:
        yield
        return nn.Parameter(torch.ones(D)).sum()

    calls = Seen((0, 1), 2).calls()
    with pytest.raises(AssertionError, match="no rank sends .*stage=1"):
        _by_hand("1F0 0F0 1B0 0B0", 2).train(calls)
    with pytest.raises(AssertionError, match="stage 1 does not depend on its input"):
        _by_hand("0F0 1F0 1B0 0B0", 2).train(calls | {1: unused})


@pytest.mark.parametrize("has_left", [True, False])
def test_a_message_that_has_left_gives_up_its_memory(monkeypatch: pytest.MonkeyPatch, has_left: bool) -> None:
    sent: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def send(tensor: Tensor, *_: object, **__: object) -> Mock:
        sent.append(weakref.ref(tensor))
        alive.append(sum(one() is not None for one in sent))
        return Mock(is_completed=lambda: has_left)

    monkeypatch.setattr("torch.distributed.isend", send)
    axes = Axes(pipeline=Axis(name="pipeline", ranks=(0, 1)))
    PipelineRunner(_plan("1f1b", 2), axes, _message()).evaluate(Seen((0,), 2).calls(), 3)
    assert alive == ([1, 1, 1] if has_left else [1, 2, 3])  # tensors of messages after each send


def test_weight_gradients_wait_for_their_turn() -> None:
    weight_grads, order = WeightGradStore(), list[str]()
    seen = Seen((0,), 1, weight_grads)

    def take(weight: Tensor) -> None:
        if weight.grad is not None:
            order.append("weight")
            weight.grad = None

    def forward(number: int, x_BSD: Tensor | None) -> Steps[Tensor]:
        order.append("forward")
        return (yield from seen.calls()[0](number, x_BSD))

    seen.weights[0][0].register_post_accumulate_grad_hook(take)
    pipeline = _by_hand("0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2", micro_batches=3, weight_grads=weight_grads)
    pipeline.train({0: forward})
    assert order == ["forward"] * 3 + ["weight"] * 3


ONE_PAIR = "0F0 0F1+0B0 0B1"


def test_each_pass_computes_while_the_other_travels() -> None:
    transfers = Recorded()
    _by_hand(ONE_PAIR, micro_batches=2, transfers=transfers).train(Seen((0,), 1, transfers=transfers).calls())
    first = transfers.events.index("combine 1 back leaves")
    last = transfers.events.index("combine 3 back leaves")
    assert transfers.events[first:last] == [
        "combine 1 back leaves", "attention of 1", "dispatch 2 leaves", "combine 1 back arrives",
        "experts of 0 back", "dispatch 0 back leaves", "dispatch 2 arrives", "experts of 1",
        "combine 3 leaves", "dispatch 0 back arrives", "attention of 0 back", "combine 3 arrives",
    ]  # fmt: skip


@pytest.mark.parametrize("name", PAIRED_GRAMMARS)
def test_an_evaluation_has_no_pairs(name: str) -> None:
    pipeline, seen = _rank(schedule(name, ranks=1, stages_per_rank=2, micro_batches=4, pairs=True))
    pipeline.evaluate(seen.calls(), 3)
    assert len(seen.losses) == 3 and seen.modes == {False}
