"""Weight gradients that come later are the ones that would have come at once."""

from collections.abc import Iterable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.parallel.async_transfer import Task, WeightGradStore, deferrable
from tests.closeness import assert_close
from tests.parallel.alive import Alive

T, D, WIDE = 6, 5, 64  # WIDE: a weight is larger than all activations


def _weights(count: int = 2) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(D, D, generator=generator)) for _ in range(count)]


def _input() -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(2), requires_grad=True)


def _two_products(x_TD: Tensor, scale_T: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """As experts are: inner stages between the output and the first weights, and a second input."""
    return F.linear(F.silu(F.linear(x_TD, first)) * scale_T[:, None], second)


def _chain(x_TD: Tensor, weights: list[nn.Parameter], weight_grads: WeightGradStore | None) -> Tensor:
    for weight in weights:
        x_TD = deferrable(F.linear, (x_TD,), (weight,), weight_grads).tanh()
    return x_TD.square().sum()


def _put_off(loss: Tensor, weight_grads: WeightGradStore) -> list[Task]:
    with weight_grads.collecting() as work:
        loss.backward()
    return work


def _do(work: Iterable[Task]) -> None:
    for task in work:
        task()


def _ordinary(weights: list[nn.Parameter]) -> list[Tensor]:
    x_TD = _input()
    return list(torch.autograd.grad(_chain(x_TD, weights, None), [x_TD, *weights]))


@pytest.mark.parametrize("collects", [True, False])
def test_gradients_that_come_later_are_those_of_an_ordinary_backward_pass(collects: bool) -> None:
    weights, x_TD, weight_grads = _weights(), _input(), WeightGradStore()
    loss = _chain(x_TD, weights, weight_grads)
    with weight_grads.collecting() if collects else nullcontext([]) as work:
        loss.backward()
    assert len(work) == 2 * collects  # one task for each weight
    _do(work)
    assert all(map(torch.equal, [x_TD.grad, *(weight.grad for weight in weights)], _ordinary(weights)))


def test_a_function_with_inner_stages_and_two_inputs_has_the_same_gradients() -> None:
    weights, x_TD, scale_T, weight_grads = _weights(), _input(), torch.rand(T, requires_grad=True), WeightGradStore()
    tensors = [x_TD, scale_T, *weights]
    expected = torch.autograd.grad(_two_products(*tensors).square().sum(), tensors)
    output = deferrable(_two_products, (x_TD, scale_T), weights, weight_grads)
    work = _put_off(output.square().sum(), weight_grads)
    assert x_TD.grad is not None and scale_T.grad is not None
    _do(work)
    assert all(torch.equal(tensor.grad, other) for tensor, other in zip(tensors, expected, strict=True))


def test_the_input_has_its_gradient_at_once_and_the_weights_have_none_before_their_turn() -> None:
    weights, x_TD, weight_grads = _weights(3), _input(), WeightGradStore()
    work = _put_off(_chain(x_TD, weights, weight_grads), weight_grads)
    assert x_TD.grad is not None
    assert len(work) == 3
    for number, task in enumerate(work):
        # The last function of forward is the first of backward.
        assert [weight.grad is not None for weight in reversed(weights)] == [place < number for place in range(3)]
        task()
    assert all(weight.grad is not None for weight in weights)


def test_tasks_may_be_done_in_any_order_and_after_other_passes() -> None:
    weights, weight_grads = _weights(), WeightGradStore()
    twice = [2 * gradient for gradient in _ordinary(weights)[1:]]
    work = []
    for _ in range(2):
        work += _put_off(_chain(_input(), weights, weight_grads), weight_grads)
    _do(reversed(work))
    for weight, expected in zip(weights, twice, strict=True):
        assert_close(weight.grad, expected)


def test_hooks_of_a_parameter_see_its_gradient_when_it_comes() -> None:
    (weight,), weight_grads = _weights(1), WeightGradStore()
    expected = 2 * _ordinary([weight])[1]
    seen: list[Tensor] = []

    def look(parameter: Tensor) -> None:
        if parameter.grad is not None:  # autograd calls it at the end of every pass that could have had one
            seen.append(parameter.grad)
            parameter.grad = None

    weight.register_post_accumulate_grad_hook(look)
    weight.register_hook(lambda gradient: None if gradient is None else 2 * gradient)
    work = _put_off(_chain(_input(), [weight], weight_grads), weight_grads)
    assert seen == []
    work[0]()
    (gradient,) = seen
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("collects", [True, False])
def test_when_the_work_is_done_nothing_of_the_pass_is_left_in_memory(collects: bool) -> None:
    weight_grads, weight = WeightGradStore(), nn.Parameter(torch.randn(WIDE, WIDE))
    x_TD = torch.randn(T, WIDE, requires_grad=True)
    activation, gradient = T * WIDE * 4, WIDE * WIDE * 4
    with Alive() as alive:
        output = deferrable(F.linear, (x_TD.tanh(),), (weight,), weight_grads)
        direction = torch.ones_like(output)
        with weight_grads.collecting() if collects else nullcontext([]) as work:
            output.backward(direction)
        del output, direction
        assert not collects or alive.bytes() > 2 * activation, "the work needs what forward has left"
        while work:
            work.pop()()  # the list must not hold the graph either
        assert alive.bytes() <= activation + gradient, "only gradients of the input and of the weight are left"
    assert x_TD.grad is not None and weight.grad is not None


def test_without_a_later_or_without_gradients_nothing_is_recorded() -> None:
    weights, x_TD = _weights(), _input()
    plain = deferrable(F.linear, (x_TD,), (weights[0],), None)
    assert type(plain.grad_fn) is type(F.linear(x_TD, weights[0]).grad_fn)
    with torch.no_grad():
        assert deferrable(F.linear, (x_TD,), (weights[0],), WeightGradStore()).grad_fn is None


def test_an_input_without_gradient_puts_off_all_the_work_and_an_untrained_weight_is_none() -> None:
    (weight,), weight_grads, x_TD = _weights(1), WeightGradStore(), _input().detach()
    output = deferrable(F.linear, (x_TD,), (weight,), weight_grads)
    (task,) = _put_off(output.sum(), weight_grads)
    assert weight.grad is None
    task()
    assert_close(weight.grad, x_TD.sum(0).expand(D, -1))
    output = deferrable(F.linear, (x_TD.requires_grad_(),), (weight.requires_grad_(False),), weight_grads)
    assert _put_off(output.sum(), weight_grads) == []
    assert_close(x_TD.grad, weight.sum(0).expand(T, -1))


def test_two_passes_cannot_collect_at_once_and_one_that_fails_stops() -> None:
    weight_grads = WeightGradStore()
    outer, inner = weight_grads.collecting(), weight_grads.collecting()
    with outer, pytest.raises(AssertionError, match="two backward passes"), inner:
        pass
    with pytest.raises(ValueError, match="too bad"), weight_grads.collecting():
        raise ValueError("too bad")
    assert not weight_grads.is_collecting
    assert not weight_grads.add(lambda: None), "no backward pass collects"
