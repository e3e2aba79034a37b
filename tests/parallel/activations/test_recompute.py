"""Which layers recompute which parts."""

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.config.parallel import RECOMPUTABLE, Recompute
from penstock.kernels import reference
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.expert_kernels import REFERENCE
from penstock.parallel.async_transfer import WeightGradStore, deferrable
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import (
    current,
    discarding,
    is_inside,
    is_recomputing,
    recomputed,
    recomputed_kinds,
    save_plainly,
    saved_as_is,
)
from tests.distributed.pool import Pool
from tests.examples import examples
from tests.parallel.alive import Alive
from tests.parallel.test_collectives import world


@given(
    layers=st.lists(st.integers(0, 5), max_size=3),
    stages=st.lists(st.integers(0, 3), max_size=2),
    layer=st.integers(0, 5),
    stage=st.integers(0, 3),
)
def test_a_layer_recomputes_if_its_number_and_its_stage_are_named(
    layers: list[int], stages: list[int], layer: int, stage: int
) -> None:
    kinds = recomputed_kinds(Recompute(modules=("moe",), layers=tuple(layers), stages=tuple(stages)), layer, stage)
    assert (kinds == {"moe"}) == ((layer in layers or not layers) and (stage in stages or not stages))


def test_a_part_that_no_layer_has_is_refused() -> None:
    with pytest.raises(AssertionError, match="'mlp', 'norm'.* are not all of"):
        LayerContext(recompute=recomputed_kinds(Recompute(modules=("norm", "mlp")), 0, 0))


@pytest.mark.parametrize("kind", RECOMPUTABLE)
def test_a_layer_recomputes_the_kinds_that_it_names_and_no_other(kind: str) -> None:
    layer_context, x_TD = LayerContext(recompute=frozenset({kind})), source()
    for name in RECOMPUTABLE:
        part = Counted(torch.tanh)  # tanh saves its output, so backward needs it again
        layer_context.run(name, part, x_TD).sum().backward()
        assert part.calls == 1 + (name == kind)


def test_a_part_inside_a_recomputed_layer_does_not_recompute_by_itself() -> None:
    layer_context = LayerContext(recompute=frozenset({"layer", "expert-activation"}))
    seen = []

    def layer(x_TD: Tensor) -> Tensor:
        seen.append(layer_context.recomputes("expert-activation"))
        return x_TD.tanh()

    layer_context.run("layer", layer, source()).sum().backward()
    assert seen == [False, False] and layer_context.recomputes("expert-activation")  # in both runs of the layer


@pytest.mark.parametrize(("kinds", "calls"), [(frozenset({"norm"}), 2), (frozenset(), 1)])
def test_outputs_are_discarded_in_a_layer_that_recomputes_something(kinds: frozenset[str], calls: int) -> None:
    double = Counted(lambda x_TD: x_TD * 2)
    with LayerContext(recompute=kinds).discarding():
        # Doubling saves nothing; only the square needs what it gave.
        loss = recomputed(double, source()).square().sum()
    loss.backward()
    assert double.calls == calls


T, D = 64, 32
ONE = T * D * 4
"""Bytes of one float32 activation."""

Result = TypeVar("Result")


@dataclass
class Counted:
    """A function that counts its calls."""

    function: Callable[..., Any]
    calls: int = 0

    def __call__(self, *arguments: Tensor) -> Any:
        self.calls += 1
        return self.function(*arguments)


def linear(columns: int = D, dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(columns, D, dtype=dtype)


def norm(x_TD: Tensor) -> Tensor:
    return F.rms_norm(x_TD, (x_TD.shape[-1],))


def source(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(T, D, dtype=dtype, requires_grad=True)


def gradients(loss: Tensor, *of: Tensor | nn.Module) -> list[Tensor]:
    tensors = [t for one in of for t in (one.parameters() if isinstance(one, nn.Module) else [one])]
    return list(torch.autograd.grad(loss, tensors))


def plainly(function: Callable[..., Result], *arguments: object) -> Result:
    """`recomputed` without recomputation."""
    return function(*arguments)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def assert_as_plain(layer: Callable[[Callable[..., Any]], Tensor], *of: Tensor | nn.Module, most: int = 0) -> None:
    """A layer recomputed has the gradients of the same layer without, and at most so many bytes between the passes."""
    expected = gradients(layer(plainly), *of)
    with Alive() as alive:
        loss = layer(recomputed)
        assert not most or alive.bytes() <= most
    assert_same(gradients(loss, *of), expected)


@pytest.fixture(autouse=True)
def no_hook_is_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert current() is save_plainly and not is_inside()
    saved = (torch.ones(1, requires_grad=True) * 1).exp().grad_fn._saved_result
    assert isinstance(saved, Tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_to_the_bit_and_what_is_saved_inside_is_freed_after_forward(dtype: torch.dtype) -> None:
    x_TD, one = source(dtype), T * D * dtype.itemsize
    net = nn.Sequential(linear(dtype=dtype), nn.Tanh(), nn.Sigmoid(), nn.Tanh(), linear(dtype=dtype))
    with Alive() as plain:
        y_TD = net(x_TD)
        assert plain.bytes() == 4 * one  # three activations and the output
    expected, region = gradients(y_TD.square().sum(), x_TD, net), Counted(net)
    with Alive() as alive:
        y_TD = recomputed(region, x_TD)
        assert alive.bytes() == one
    assert_same(gradients(y_TD.square().sum(), x_TD, net), expected)
    assert region.calls == 2


def test_an_output_is_not_kept_for_the_layer_that_saves_it() -> None:
    x_TD, down = source(), linear()
    with Alive() as alive:
        with discarding():
            y_TD = down(recomputed(norm, x_TD))
        assert alive.bytes() == ONE  # y alone
    with Alive() as alive:
        y_TD = down(recomputed(norm, x_TD))
        assert alive.bytes() == 2 * ONE
    del y_TD


def test_one_recomputation_serves_the_region_and_all_consumers_of_its_output() -> None:
    x_TD, one, other = source(), linear(), linear(columns=D // 2)
    region = Counted(norm)

    def layer(run: Callable[..., Tensor]) -> Tensor:
        with discarding():
            h_TD = run(region, x_TD)
            views = other(h_TD.view(2 * T, D // 2)).sum() + h_TD.chunk(2, dim=1)[1].exp().sum()
            return one(h_TD).square().sum() + views

    assert_as_plain(layer, x_TD, one, other)
    assert region.calls == 1 + 2


def test_an_output_that_leaves_its_layer_is_kept_and_a_view_of_an_input_needs_no_replay() -> None:
    x_TD, after, region = source(), linear(), Counted(torch.tanh)
    with discarding():
        h_TD = recomputed(region, x_TD)
    gradients(after(h_TD).sum(), after)
    assert region.calls == 1
    after, region = linear(columns=D // 2), Counted(lambda x: x.view(-1, D // 2))
    with discarding():
        loss = after(recomputed(region, x_TD * 1)).sum()
    gradients(loss, after)
    assert region.calls == 1


def test_an_output_that_was_changed_in_place_is_kept_as_it_became() -> None:
    x_TD, after = source(), linear()

    def layer(run: Callable[..., Tensor]) -> Tensor:
        with discarding():
            return after(run(lambda x: x * 2, x_TD).add_(1)).square().sum()

    assert_as_plain(layer, x_TD, after)
    region = Counted(torch.tanh)
    with torch.no_grad(), discarding():
        assert not recomputed(region, x_TD).requires_grad and region.calls == 1


def test_what_came_back_goes_when_the_graph_goes() -> None:
    x_TD, net, after = source(), nn.Sequential(nn.Tanh(), nn.Sigmoid()), linear()
    with Alive() as alive:
        with discarding():
            loss = after(recomputed(net, x_TD)).sum()
        found = torch.autograd.grad(loss, [x_TD, *after.parameters()])
        del loss
        gc.disable()  # nothing waits for the garbage collector
        assert alive.bytes() == sum(gradient.nbytes for gradient in found)
        gc.enable()


def test_custom_functions_save_into_a_region_like_any_other() -> None:
    experts, width = 4, 16
    x_TD = source()
    gate_up = torch.randn(experts, 2 * width, D, requires_grad=True)
    down = torch.randn(experts, D, width, requires_grad=True)
    weights_R = torch.rand(T, requires_grad=True)
    counts_e = torch.tensor([10, 0, 30, 20], dtype=torch.int32)  # 4 rows of T belong to no expert

    def network(x_TD: Tensor, weights_R: Tensor) -> Tensor:
        return expert_ffn(
            reference.rms_norm(x_TD, torch.ones(D), 1e-6), gate_up, down, counts_e, weights_R, kernels=REFERENCE
        )

    def layer(run: Callable[..., Tensor]) -> Tensor:
        return run(network, x_TD, weights_R).square().sum()

    assert_as_plain(layer, x_TD, gate_up, down, weights_R, most=ONE + 4)  # what the square saves, and its sum


@dataclass(frozen=True)
class Rows:
    x_TD: Tensor
    weights_T: Tensor
    scale: float


def test_tensors_in_a_dataclass_are_inputs_like_any_other() -> None:
    x_TD, weights_T, net = source(), torch.rand(T, requires_grad=True), linear()

    def part(rows: Rows) -> Tensor:
        return (rows.x_TD * rows.weights_T[:, None] * rows.scale).tanh()

    def layer(run: Callable[..., Tensor]) -> Tensor:
        with discarding():
            h_TD = run(norm, x_TD)
            return net(run(part, Rows(h_TD, weights_T, 0.5))).sum()

    assert_as_plain(layer, x_TD, weights_T, net, most=8)  # neither the norm's output nor the part's


def test_recomputation_stops_after_the_last_tensor_that_is_needed() -> None:
    x_TD, first, reached = source(), linear(), []

    def region(x_TD: Tensor) -> Tensor:
        h_TD = first(x_TD).tanh()
        reached.append("middle")
        y_TD = h_TD.exp() + 1
        reached.append("end")
        return y_TD

    gradients(recomputed(region, x_TD).sum(), first, x_TD)
    assert reached == ["middle", "end", "middle"]  # exp's output is the last saved tensor


def test_a_replay_goes_on_to_the_end_for_an_output_that_was_saved() -> None:
    x_TD, region = source(), Counted(lambda x: (x.tanh(), "not a tensor", (x * 2).detach()))

    def layer(run: Callable[..., tuple[Tensor, str, Tensor]]) -> Tensor:
        with discarding():
            one, _, other = run(region, x_TD)
            return (one * other).sum()

    assert_as_plain(layer, x_TD)
    assert region.calls == 1 + 2


def test_a_replay_counts_nothing_twice_and_an_attached_loss_survives_it() -> None:
    x_TD, net = source(), linear()
    meter = torch.zeros(())

    class Attach(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, carrier: Tensor, loss: Tensor) -> Tensor:
            return carrier.view_as(carrier)

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
            return gradient, torch.ones(())

    def route(x_TD: Tensor) -> Tensor:
        weights_TD = net(x_TD).sigmoid()
        if not is_recomputing():
            meter.add_(1)
            with saved_as_is():
                loss = (weights_TD.square() * meter.clone()).sum() / T
            weights_TD = Attach.apply(weights_TD, loss)
        return weights_TD * x_TD

    def two_batches(run: Callable[..., Tensor]) -> Tensor:
        meter.zero_()
        return run(route, x_TD).sum() + 2 * run(route, x_TD).sum()

    assert_as_plain(two_batches, x_TD, net)
    assert meter == 2


def test_an_error_in_forward_or_in_a_replay_leaves_no_hook_behind() -> None:
    x_TD, broken = source(), [True]

    def region(x_TD: Tensor) -> Tensor:
        y_TD = x_TD.tanh().exp()
        if broken:
            raise RuntimeError("the region broke")
        return y_TD.exp()

    with pytest.raises(RuntimeError, match="the region broke"), discarding():
        recomputed(region, x_TD)
    assert not is_inside() and current() is save_plainly
    broken.clear()
    loss = recomputed(region, x_TD).sum()
    broken.append(True)
    with pytest.raises(RuntimeError, match="the region broke"):
        loss.backward(retain_graph=True)
    assert not is_inside() and current() is save_plainly
    broken.clear()
    loss.backward()
    assert torch.equal(x_TD.grad, torch.autograd.grad(region(x_TD).sum(), x_TD)[0])


def test_a_region_that_does_something_else_or_has_another_input_when_it_runs_again_is_found_out() -> None:
    x_TD = source()
    for again in (lambda x: x.tanh(), lambda x: x.tanh().exp()[1:].exp(), lambda x: x.double().exp().exp().exp()):
        functions = iter([lambda x: x.tanh().exp().exp(), again])
        loss = recomputed(lambda x, functions=functions: next(functions)(x), x_TD).sum()
        with pytest.raises(AssertionError, match="region"):
            loss.backward()
    h_TD = source() * 1
    loss = recomputed(torch.tanh, h_TD).sum()
    with torch.no_grad():
        h_TD.add_(1)
    with pytest.raises(AssertionError, match="changed in place"):
        loss.backward()


def test_regions_in_a_chain_each_run_once_more_and_inside_another_as_a_part_of_it() -> None:
    x_TD, inner, outer = source(), linear(), linear()
    parts = [Counted(norm), Counted(lambda h: torch.tanh(inner(h))), Counted(norm)]

    def layer(run: Callable[..., Tensor], x_TD: Tensor) -> Tensor:
        with discarding():
            for part in parts:
                x_TD = run(part, x_TD)
            return outer(x_TD).square().sum()

    for around, calls in ((plainly, 1 + 2), (recomputed, 2 + 2)):
        for part in parts:
            part.calls = 0
        # The square saves the last product.
        assert_as_plain(lambda run, around=around: around(layer, run, x_TD), x_TD, inner, outer, most=ONE + 8)
        assert [part.calls for part in parts] == [calls] * 3


def test_a_graph_that_is_asked_twice_replays_once_and_keeps_the_values_until_the_second_time() -> None:
    x_TD, net, after = source(), nn.Sequential(linear(), nn.Tanh()), linear()
    region = Counted(net)
    with discarding():
        loss = after(recomputed(region, x_TD)).square().sum()
    expected = gradients(after(net(x_TD)).square().sum(), x_TD, after, net)
    (dx_TD,) = torch.autograd.grad(loss, [x_TD], retain_graph=True)  # fills the slots
    assert_same([dx_TD, *gradients(loss, after, net)], expected)
    assert region.calls == 2


@pytest.mark.parametrize("inside", [True, False])
def test_weight_gradients_can_be_put_off_inside_and_behind_a_region(inside: bool) -> None:
    x_TD, down, weight_grads = source(), linear(), WeightGradStore()

    def product(h_TD: Tensor) -> Tensor:
        return deferrable(F.linear, [h_TD], [down.weight], weight_grads)

    region = Counted(lambda x: product(norm(x)) if inside else norm(x))
    with discarding():
        h_TD = recomputed(region, x_TD)
        loss = (h_TD if inside else product(h_TD)).square().sum()
    expected = gradients(F.linear(norm(x_TD), down.weight).square().sum(), x_TD, down.weight)
    with weight_grads.collecting() as work:
        loss.backward()
    assert torch.equal(x_TD.grad, expected[0]) and down.weight.grad is None
    for task in work:
        task()
    assert torch.equal(down.weight.grad, expected[1])
    assert region.calls == 2


def exchange_in_a_region() -> bool:
    """One rank: gradients through an exchange between two ranks, with and without a region around it."""
    axis = world()
    generator = torch.Generator().manual_seed(axis.rank)
    x_TD = torch.randn(6, D, generator=generator, requires_grad=True)
    weight_DD = torch.randn(D, D, generator=generator, requires_grad=True)

    def forward(x_TD: Tensor) -> Tensor:
        gathered_TD = all_gather(x_TD.tanh(), axis, 0)
        return reduce_scatter((gathered_TD @ weight_DD).exp().sigmoid(), axis, 0)

    expected = gradients(forward(x_TD).square().sum(), x_TD, weight_DD)
    losses = [recomputed(forward, x_TD).square().sum() for _ in range(2)]
    return all(all(map(torch.equal, gradients(loss, x_TD, weight_DD), expected)) for loss in losses)


def test_ranks_meet_in_the_exchanges_of_a_replay(ranks: Pool) -> None:
    assert ranks.run(2, exchange_in_a_region) == [True, True]


Program = list[tuple[str, "Program"]]
LEAVES = st.sampled_from(["tanh", "linear", "norm", "residual", "split"]).map(lambda name: (name, []))
PROGRAMS = st.recursive(
    st.lists(LEAVES, min_size=1, max_size=3),
    lambda inner: st.lists(
        st.one_of(LEAVES, st.tuples(st.sampled_from(["region", "layer", "both"]), inner)), min_size=1, max_size=4
    ),
    max_leaves=12,
)


def play(program: Program, x_TD: Tensor, weight_DD: Tensor, *, recompute: bool) -> Tensor:
    """Run a program of operators, regions and layers."""
    for name, body in program:

        def inside(x_TD: Tensor, body: Program = body) -> Tensor:
            return play(body, x_TD, weight_DD, recompute=recompute)

        match name:
            case "tanh":
                x_TD = x_TD.tanh()
            case "linear":
                x_TD = x_TD @ weight_DD
            case "norm":
                x_TD = norm(x_TD)
            case "residual":
                x_TD = x_TD + x_TD.sigmoid() * x_TD
            case "split":
                one, other = x_TD.chunk(2, dim=1)
                x_TD = torch.cat((one * other, other), dim=1)
            case "region":
                x_TD = recomputed(inside, x_TD) if recompute else inside(x_TD)
            case "layer" | "both":
                with discarding() if recompute else nullcontext():
                    x_TD = recomputed(inside, x_TD) if recompute and name == "both" else inside(x_TD)
                    x_TD = x_TD @ weight_DD
    return x_TD


@examples(60, deadline=None)
@given(program=PROGRAMS, seed=st.integers(0, 99))
def test_any_composition_of_regions_and_layers_gives_the_same_gradients(program: Program, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(4, 6, generator=generator, requires_grad=True)
    weight_DD = torch.randn(6, 6, generator=generator, requires_grad=True)
    found = []
    for recompute in (False, True):
        losses = [play(program, x_TD @ weight_DD * scale, weight_DD, recompute=recompute).sum() for scale in (1, 2, 3)]
        # Passes wait for backward in any order.
        found.append([one for number in (1, 0, 2) for one in gradients(losses[number], x_TD, weight_DD)])
    assert_same(found[1], found[0])
