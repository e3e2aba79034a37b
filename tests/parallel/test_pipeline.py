"""A pipeline of small stages on several ranks gives what one process gives that holds them all."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.layout.actions import Action, Kind, Schedule
from penstock.layout.grid import Grid
from penstock.layout.schedules import PAIRED_GRAMMARS, SCHEDULES, schedule
from penstock.parallel.async_transfer import Steps, TransferStream, drain
from penstock.parallel.axes import ALONE, Axes, Axis, make_axes
from penstock.parallel.pipeline import Message, PipelineRunner, StageCall
from penstock.parallel.weight_grad_store import WeightGradStore, deferrable
from tests.closeness import assert_close
from tests.distributed.pool import Pool
from tests.parallel.recorded import Recorded

B, S, D = 2, 3, 4
MICRO_BATCHES = 6


def _message(dtype: torch.dtype = torch.float32) -> Message:
    return Message(shape=(B, S, D), dtype=dtype, device=torch.device("cpu"))


def _weight(stage: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    generator = torch.Generator().manual_seed(stage)
    return nn.Parameter(torch.randn(D, D, generator=generator).to(dtype))


def _data(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(1000 + number)).to(dtype)


def _stage(
    weight: Tensor, weight_grads: WeightGradStore | None, stage: int, last: int, number: int, x_BSD: Tensor | None
) -> Steps[Tensor]:
    """One product; the first stage reads the micro-batch, the last one weighs it."""
    yield
    assert (x_BSD is None) == (stage == 0), f"stage {stage} got {x_BSD}"
    x_BSD = _data(number, weight.dtype) if x_BSD is None else x_BSD
    y_BSD = deferrable(F.linear, (x_BSD,), (weight,), weight_grads).tanh()
    return y_BSD if stage < last else (y_BSD.float() * (number + 1)).sum()


class Seen:
    def __init__(
        self, stages: tuple[int, ...], count: int, weight_grads: WeightGradStore | None, dtype: torch.dtype
    ) -> None:
        self.weights = {stage: _weight(stage, dtype) for stage in stages}
        self.losses: dict[int, float] = {}
        self.modes: set[bool] = set()
        self.last = count - 1
        self.weight_grads = weight_grads

    def calls(self) -> dict[int, StageCall]:
        return {stage: partial(self._call, stage) for stage in self.weights}

    def _call(self, stage: int, number: int, x_BSD: Tensor | None) -> Steps[Tensor]:
        output = yield from _stage(self.weights[stage], self.weight_grads, stage, self.last, number, x_BSD)
        self.modes.add(output.requires_grad)
        if stage == self.last:
            self.losses[number] = float(output.detach())
        return output

    def gradients(self) -> dict[int, Tensor | None]:
        return {stage: weight.grad for stage, weight in self.weights.items()}


Result = tuple[dict[int, Tensor | None], dict[int, float]]


def _plan(name: str, ranks: int) -> Schedule:
    stages = max(SCHEDULES[name].fewest, 1)
    return schedule(name, ranks=ranks, stages_per_rank=stages, micro_batches=max(MICRO_BATCHES, 2 * ranks))


def _in_one_process(plan: Schedule, dtype: torch.dtype = torch.float32) -> Result:
    whole = Seen(tuple(range(plan.stages)), plan.stages, None, dtype)
    calls = whole.calls()
    for number in range(plan.micro_batches):
        x_BSD = None
        for stage in range(plan.stages):
            x_BSD = drain(calls[stage](number, x_BSD))
        assert x_BSD is not None
        x_BSD.backward()
    return whole.gradients(), whole.losses


def _train(plan: Schedule, dtype: torch.dtype) -> list[Result]:
    """Two steps with the same weights, each from no gradients."""
    axes = make_axes(Grid(world=plan.ranks, pipeline=plan.ranks))
    results = []
    for _ in range(2):
        weight_grads = WeightGradStore() if plan.splits_backward else None
        seen = Seen(plan.stages_of(axes.pipeline.rank), plan.stages, weight_grads, dtype)
        PipelineRunner(plan, axes, _message(dtype), weight_grads).train(seen.calls())
        results.append((seen.gradients(), seen.losses))
    return results


def _joined(results: list[Result]) -> Result:
    gradients = {stage: gradient for found, _ in results for stage, gradient in found.items()}
    return gradients, {number: loss for _, found in results for number, loss in found.items()}


def _assert_same(found: Result, expected: Result, tolerance: float = 1e-5) -> None:
    assert found[0].keys() == expected[0].keys(), "every stage is somewhere"
    assert_close(found[1], expected[1], what="loss of micro-batch")
    assert_close(found[0], expected[0], tolerance=tolerance, what="gradient of stage")


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


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-v", "dualpipe-v"])
def test_stages_of_one_rank_hand_over_without_a_message(name: str) -> None:
    plan = schedule(name, ranks=1, stages_per_rank=2, micro_batches=MICRO_BATCHES)
    weight_grads = WeightGradStore() if plan.splits_backward else None
    seen = Seen((0, 1), 2, weight_grads, torch.float32)
    PipelineRunner(plan, ALONE, _message(), weight_grads).train(seen.calls())
    _assert_same((seen.gradients(), seen.losses), _in_one_process(plan))


def _evaluate(plan: Schedule, micro_batches: int) -> tuple[dict[int, float], set[bool], list[bool]]:
    axes = make_axes(Grid(world=plan.ranks, pipeline=plan.ranks))
    weight_grads = WeightGradStore() if plan.splits_backward else None
    seen = Seen(plan.stages_of(axes.pipeline.rank), plan.stages, weight_grads, torch.float32)
    PipelineRunner(plan, axes, _message(), weight_grads).evaluate(seen.calls(), micro_batches)
    return seen.losses, seen.modes, [gradient is None for gradient in seen.gradients().values()]


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
        assert records_graph == {False}
        assert all(has_no_gradient)


# What is wrong is said


def _alone(actions: str, stages: int, weight_grads: WeightGradStore | None = None) -> PipelineRunner:
    """A pipeline of one rank that does what is written: `0F0 1F0 1B0 0B0`."""
    spelled = tuple(Action(int(word[0]), Kind(word[1]), int(word[2:])) for word in actions.split())
    plan = Schedule(
        name="by hand",
        ranks=1,
        stages_per_rank=stages,
        placement="loop",
        micro_batches=1,
        actions=(spelled,),
    )
    return PipelineRunner(plan, ALONE, _message(), weight_grads)


def _calls(stages: int, weight_grads: WeightGradStore | None = None) -> dict[int, StageCall]:
    return Seen(tuple(range(stages)), stages, weight_grads, torch.float32).calls()


def test_a_schedule_that_splits_needs_stages_that_can() -> None:
    with pytest.raises(AssertionError, match="zb-1f1b puts weight gradients off"):
        PipelineRunner(_plan("zb-1f1b", 2), ALONE, _message())


@pytest.mark.parametrize("actions", ["0F0", "0F0 0I0"])
def test_a_schedule_that_leaves_a_pass_or_work_undone_is_refused(actions: str) -> None:
    weight_grads = WeightGradStore()
    with pytest.raises(AssertionError, match="left something undone"):
        _alone(actions, 1, weight_grads).train(_calls(1, weight_grads))


def _at_once(output: Tensor) -> Steps[Tensor]:
    yield
    return output


def test_a_stage_that_does_not_use_its_input_is_named() -> None:
    calls = _calls(2)
    calls[1] = lambda number, x_BSD: _at_once(_weight(1).sum())
    with pytest.raises(AssertionError, match="stage 1 does not depend on its input"):
        _alone("0F0 1F0 1B0 0B0", 2).train(calls)


def test_a_message_that_no_rank_sends_is_named() -> None:
    with pytest.raises(AssertionError, match="no rank sends .*stage=1"):
        _alone("1F0 0F0 1B0 0B0", 2).train(_calls(2))


@pytest.mark.parametrize("has_left", [True, False])
def test_a_message_that_has_left_gives_up_its_memory(monkeypatch: pytest.MonkeyPatch, has_left: bool) -> None:
    sent: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Work:
        def is_completed(self) -> bool:
            return has_left

        def wait(self) -> None: ...

    def send(tensor: Tensor, *_: object, **__: object) -> Work:
        sent.append(weakref.ref(tensor))
        alive.append(sum(one() is not None for one in sent))
        return Work()

    monkeypatch.setattr("torch.distributed.isend", send)
    axes = Axes(pipeline=Axis(name="pipeline", ranks=(0, 1)))
    seen = Seen((0,), 2, None, torch.float32)
    PipelineRunner(_plan("1f1b", 2), axes, _message()).evaluate(seen.calls(), 3)
    assert alive == ([1, 1, 1] if has_left else [1, 2, 3])


def test_weight_gradients_wait_for_their_turn() -> None:
    weight_grads = WeightGradStore()
    seen = Seen((0,), 1, weight_grads, torch.float32)
    order: list[str] = []
    seen.weights[0].register_post_accumulate_grad_hook(partial(_take, order))
    calls = {0: _told(seen.calls()[0], order)}
    plan = replace(_plan("1f1b", 1), actions=(tuple(_split(3)),), micro_batches=3)
    PipelineRunner(plan, ALONE, _message(), weight_grads).train(calls)
    assert order == ["forward", "forward", "forward", "weight", "weight", "weight"]


def _take(order: list[str], weight: Tensor) -> None:
    if weight.grad is not None:
        order.append("weight")
        weight.grad = None


def _told(call: StageCall, order: list[str]) -> StageCall:
    def forward(number: int, x_BSD: Tensor | None) -> Steps[Tensor]:
        order.append("forward")
        return (yield from call(number, x_BSD))

    return forward


def _split(micro_batches: int) -> Iterator[Action]:
    for number in range(micro_batches):
        yield Action(0, Kind.FORWARD, number)
        yield Action(0, Kind.INPUT, number)
    for number in range(micro_batches):
        yield Action(0, Kind.WEIGHT, number)


Weights = dict[int, tuple[nn.Parameter, nn.Parameter]]


def _weights(stages: tuple[int, ...]) -> Weights:
    def parameter(seed: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(D, D, generator=torch.Generator().manual_seed(seed)))

    return {stage: (parameter(2 * stage), parameter(2 * stage + 1)) for stage in stages}


def _twice(x_BSD: Tensor) -> tuple[tuple[Tensor], None]:
    return (2 * x_BSD,), None


def _traveling_stage(
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


def _weight_gradients(weights: Weights) -> dict[int, list[Tensor | None]]:
    return {stage: [one.grad for one in pair] for stage, pair in weights.items()}


def _train_in_pairs(plan: Schedule) -> dict[int, list[Tensor | None]]:
    axes = make_axes(Grid(world=plan.ranks, pipeline=plan.ranks))
    weights, transfers = _weights(plan.stages_of(axes.pipeline.rank)), TransferStream(torch.device("cpu"))
    calls = {stage: partial(_traveling_stage, weights, transfers, plan.stages - 1, stage) for stage in weights}
    pipeline = PipelineRunner(plan, axes, _message(), weight_grads=None, transfers=transfers)
    pipeline.train(calls)
    return _weight_gradients(weights)


def _one_after_the_other(plan: Schedule) -> dict[int, list[Tensor | None]]:
    weights = _weights(tuple(range(plan.stages)))
    for number in range(plan.micro_batches):
        x_BSD = None
        for stage in range(plan.stages):
            x_BSD = drain(
                _traveling_stage(weights, TransferStream(torch.device("cpu")), plan.stages - 1, stage, number, x_BSD)
            )
        assert x_BSD is not None
        x_BSD.backward()
    return _weight_gradients(weights)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("micro_batches", [6, 7])
def test_pairs_give_the_gradients_of_one_after_the_other(micro_batches: int, count: int, ranks: Pool) -> None:
    plan = schedule("interleaved", ranks=count, stages_per_rank=2, micro_batches=micro_batches, pairs=True)
    assert any(plan.pairs)
    found = {stage: pair for result in ranks.run(count, _train_in_pairs, plan) for stage, pair in result.items()}
    expected = _one_after_the_other(plan)
    assert found.keys() == expected.keys()
    for stage, pair in expected.items():
        for one, other in zip(found[stage], pair, strict=True):
            assert_close(one, other, tolerance=1e-5)


def _with_one_pair(transfers: TransferStream | None) -> PipelineRunner:
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
    return PipelineRunner(plan, ALONE, _message(), transfers=transfers)


def test_each_pass_computes_while_the_other_travels() -> None:
    transfers = Recorded()
    weights = _weights((0,))
    _with_one_pair(transfers).train({0: partial(_traveling_stage, weights, transfers, 0, 0)})
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
        _with_one_pair(None)


@pytest.mark.parametrize("name", PAIRED_GRAMMARS)
def test_an_evaluation_has_no_pairs(name: str) -> None:
    plan = schedule(name, ranks=1, stages_per_rank=2, micro_batches=4, pairs=True)
    transfers, weights = Recorded(), _weights((0, 1))
    losses: list[Tensor] = []

    def call(stage: int, number: int, x_BSD: Tensor | None) -> Steps[Tensor]:
        output = yield from _traveling_stage(weights, transfers, 1, stage, number, x_BSD)
        losses.append(output)
        return output

    calls = {stage: partial(call, stage) for stage in weights}
    PipelineRunner(plan, ALONE, _message(), weight_grads=WeightGradStore(), transfers=transfers).evaluate(calls, 3)
    assert len(losses) == 6 and not any(output.requires_grad for output in losses)
