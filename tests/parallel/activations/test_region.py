"""What a recomputed region frees, gives back, and leaves as it was."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from penstock.kernels import reference
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.expert_kernels import REFERENCE
from penstock.parallel.recompute import (
    current,
    discarding,
    is_inside,
    is_recomputing,
    recomputed,
    save_plainly,
    saved_as_is,
)
from tests.parallel.activations.regions import ONE, Counted, D, T, assert_same, gradients, linear, norm, source
from tests.parallel.alive import Alive


@pytest.fixture(autouse=True)
def no_hook_is_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert current() is save_plainly and not is_inside()
    saved = (torch.ones(1, requires_grad=True) * 1).exp().grad_fn._saved_result
    assert isinstance(saved, Tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_to_the_bit_and_the_region_runs_twice(dtype: torch.dtype) -> None:
    x_TD = source(dtype)
    net = nn.Sequential(linear(dtype=dtype), nn.GELU(), linear(dtype=dtype), nn.Tanh())
    expected = gradients(net(x_TD).square().sum(), x_TD, net)
    region = Counted(net)
    assert_same(gradients(recomputed(region, x_TD).square().sum(), x_TD, net), expected)
    assert region.calls == 2


def test_what_is_saved_inside_is_freed_after_forward() -> None:
    x_TD, net = source(), nn.Sequential(linear(), nn.Tanh(), nn.Sigmoid(), nn.Tanh(), linear())
    with Alive() as plain:
        y_TD = net(x_TD)
        assert plain.bytes() == 4 * ONE  # three activations and the output
    with Alive() as alive:
        y_TD = recomputed(net, x_TD)
        assert alive.bytes() == ONE
        del y_TD
        assert alive.bytes() == 0


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
            return (
                one(h_TD).square().sum() + other(h_TD.view(2 * T, D // 2)).sum() + h_TD.chunk(2, dim=1)[1].exp().sum()
            )

    expected = gradients(layer(lambda f, x: f(x)), x_TD, one, other)
    region.calls = 0
    assert_same(gradients(layer(recomputed), x_TD, one, other), expected)
    assert region.calls == 2


def test_an_output_that_leaves_its_layer_is_kept() -> None:
    x_TD, after = source(), linear()
    region = Counted(torch.tanh)
    with discarding():
        h_TD = recomputed(region, x_TD)
    loss = after(h_TD).sum()
    gradients(loss, after)
    assert region.calls == 1


def test_an_output_that_was_changed_in_place_is_kept_as_it_became() -> None:
    x_TD, after = source(), linear()

    def layer(run: Callable[..., Tensor]) -> Tensor:
        with discarding():
            return after(run(lambda x: x * 2, x_TD).add_(1)).square().sum()

    assert_same(gradients(layer(recomputed), x_TD, after), gradients(layer(lambda f, x: f(x)), x_TD, after))


def test_an_output_that_is_a_view_of_an_input_needs_no_replay() -> None:
    x_TD, after = source(), linear(columns=D // 2)
    region = Counted(lambda x: x.view(-1, D // 2))
    with discarding():
        loss = after(recomputed(region, x_TD * 1)).sum()
    gradients(loss, after)
    assert region.calls == 1


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
    counts_e = torch.tensor([10, 0, 30, 20], dtype=torch.int32)

    def network(x_TD: Tensor, weights_R: Tensor) -> Tensor:
        return expert_ffn(
            reference.rms_norm(x_TD, torch.ones(D), 1e-6), gate_up, down, counts_e, weights_R, kernels=REFERENCE
        )

    wanted = (x_TD, gate_up, down, weights_R)
    expected = gradients(network(x_TD, weights_R).square().sum(), *wanted)
    with Alive() as alive:
        y_TD = recomputed(network, x_TD, weights_R)
        assert alive.bytes() == ONE
    assert_same(gradients(y_TD.square().sum(), *wanted), expected)


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

    wanted = (x_TD, weights_T, net)
    expected = gradients(layer(lambda f, x: f(x)), *wanted)
    with Alive() as alive:
        loss = layer(recomputed)
        assert alive.bytes() <= 8  # neither the norm's output nor the part's
    assert_same(gradients(loss, *wanted), expected)


def test_recomputation_stops_after_the_last_tensor_that_is_needed() -> None:
    x_TD, first = source(), linear()
    reached = []

    def region(x_TD: Tensor) -> Tensor:
        h_TD = first(x_TD).tanh()
        reached.append("middle")
        y_TD = h_TD.exp() + 1
        reached.append("end")
        return y_TD

    loss = recomputed(region, x_TD).sum()
    gradients(loss, first, x_TD)
    assert reached == ["middle", "end", "middle"]


def test_a_replay_goes_on_to_the_end_for_an_output_that_was_saved() -> None:
    x_TD = source()
    calls = []

    def region(x_TD: Tensor) -> tuple[Tensor, str, Tensor]:
        calls.append(1)
        return x_TD.tanh(), "not a tensor", (x_TD * 2).detach()

    with discarding():
        one, _, other = recomputed(region, x_TD)
        loss = (one * other).sum()
    expected = torch.autograd.grad((x_TD.tanh() * (x_TD * 2).detach()).sum(), x_TD)
    assert_same(gradients(loss, x_TD), list(expected))
    assert len(calls) == 2


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

    def two_batches(run: Callable[..., Tensor]) -> list[Tensor]:
        meter.zero_()
        losses = [run(route, x_TD).sum() for _ in range(2)]
        return [gradient for loss in losses for gradient in gradients(loss, x_TD, net)]

    expected = two_batches(lambda f, x: f(x))
    assert_same(two_batches(recomputed), expected)
    assert meter == 2


def test_without_gradients_a_region_is_a_plain_call() -> None:
    x_TD, region = source(), Counted(torch.tanh)
    with torch.no_grad(), discarding():
        y_TD = recomputed(region, x_TD)
    assert not y_TD.requires_grad and region.calls == 1


def test_an_error_in_forward_or_in_a_replay_leaves_no_hook_behind() -> None:
    x_TD = source()
    broken = [True]

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


def test_a_region_that_does_something_else_when_it_runs_again_is_found_out() -> None:
    x_TD = source()
    for again in (lambda x: x.tanh(), lambda x: x.tanh().exp()[1:].exp(), lambda x: x.double().exp().exp().exp()):
        functions = iter([lambda x: x.tanh().exp().exp(), again])
        loss = recomputed(lambda x, functions=functions: next(functions)(x), x_TD).sum()
        with pytest.raises(AssertionError, match="region"):
            loss.backward()


def test_an_input_that_is_changed_in_place_is_found_out() -> None:
    x_TD = source() * 1
    loss = recomputed(torch.tanh, x_TD.detach().requires_grad_()).sum()
    loss.backward()
    h_TD = x_TD * 1
    loss = recomputed(torch.tanh, h_TD).sum()
    with torch.no_grad():
        h_TD.add_(1)
    with pytest.raises(AssertionError, match="changed in place"):
        loss.backward()
