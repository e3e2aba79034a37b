"""Saved activations that wait on the host: what moves, what stays, when it comes back."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from penstock.config.parallel import OFFLOADABLE, Offload
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.offload import HostStore, OffloadRule, rule_for
from penstock.parallel.recompute import current, discarding, recomputed, save_plainly
from tests.parallel.activations.test_recompute import ONE, D, T, assert_same, gradients, source
from tests.parallel.alive import Alive

CPU = torch.device("cpu")


class Watched(HostStore):
    """A store that writes down what it sends and brings."""

    def __init__(self, in_flight: int = 100 * ONE) -> None:
        super().__init__(CPU, smallest=ONE, in_flight=in_flight)
        self.sent: list[int] = []
        self.brought: list[int] = []
        self.outward.copy = partial(self._noted, self.sent, self.outward.copy)  # type: ignore[method-assign]
        self.inward.copy = partial(self._noted, self.brought, self.inward.copy)  # type: ignore[method-assign]

    def _noted(self, noted: list[int], copy: Any, pairs: Any, **rest: Any) -> Any:
        noted.extend(source.nbytes for source, _ in pairs)
        return copy(pairs, **rest)


def rule_of(store: HostStore) -> OffloadRule:
    return OffloadRule(kinds=frozenset(OFFLOADABLE), store=store)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Sigmoid())


@pytest.mark.parametrize("in_flight", [0, ONE, 100 * ONE])
def test_gradients_are_the_same_to_the_bit(in_flight: int) -> None:
    x_TD, nets, store = source(), [network() for _ in range(4)], Watched(in_flight)

    def forward(run: Callable[..., Tensor]) -> Tensor:
        h_TD = x_TD
        for net in nets:
            h_TD = run("dense", net, h_TD)
        return h_TD.square().sum()

    expected = gradients(forward(lambda _, net, h: net(h)), x_TD, *nets)
    for _ in range(2):
        assert_same(gradients(forward(rule_of(store).run), x_TD, *nets), expected)
    # Of each network: its input (twice: also the last one's output), tanh's output, its own output. Never a weight.
    assert store.sent == [ONE] * (1 + 2 * 4) * 2
    assert current() is save_plainly


def test_what_moved_is_freed_and_what_came_back_goes_with_the_graph() -> None:
    x_TD, net = source(), network()
    store = HostStore(CPU, smallest=ONE)
    with Alive() as alive:
        y_TD = rule_of(store).run("dense", net, x_TD * 1)
        on_host = 3 * ONE
        store._make_room(0)
        assert alive.bytes() == on_host + ONE  # y
        loss = y_TD.sum()
        del y_TD
        assert alive.bytes() == on_host + 4  # the scalar loss
        loss.backward()
        del loss
        gc.disable()
        assert alive.bytes() == sum(p.grad.nbytes for p in [x_TD, *net.parameters()])
        gc.enable()


def test_a_storage_moves_once_however_many_views_are_saved() -> None:
    x_TD, store = source(), Watched()

    def part(x_TD: Tensor) -> Tensor:
        one, other = (x_TD * 1).chunk(2, dim=1)  # two views of one storage
        return (one * other).sum() + one.square().sum() + other.exp().sum()

    loss = rule_of(store).run("dense", part, x_TD)
    assert store.sent == [ONE]
    assert_same(gradients(loss, x_TD), gradients(part(x_TD), x_TD))


def test_a_storage_that_changes_before_its_copy_is_over_is_found_out() -> None:
    x_TD, factor_TD = source(), torch.randn(T, D)
    y_TD = rule_of(Watched()).run("dense", torch.mul, x_TD, factor_TD)
    factor_TD.add_(1)  # the store still reads it
    with pytest.raises(AssertionError, match="changed in place"):
        y_TD.sum().backward()


def test_what_is_small_or_a_parameter_stays_and_what_backward_asks_for_at_once_is_still_there() -> None:
    store, weight = Watched(), nn.Parameter(torch.randn(T, D))
    x_TD = torch.randn(4, D, requires_grad=True)  # 4 x 32: below the smallest size
    rule_of(store).run("dense", lambda x: ((x @ weight.t()) @ weight).tanh(), x_TD).sum().backward()
    assert store.sent == []
    x_TD = source()
    gradients(rule_of(store).run("dense", torch.tanh, x_TD).sum(), x_TD)
    assert store.sent == [ONE] and store.brought == []


def test_memory_that_waits_for_its_copy_is_bounded() -> None:
    store = HostStore(CPU, smallest=ONE, in_flight=3 * ONE)
    copy = store.outward.copy

    slow = Mock(is_over=lambda: False)  # a copy that the compute stream must wait for
    store.outward.copy = lambda pairs, **rest: (copy(pairs, **rest), slow)[1]
    x_TD, net = source(), nn.Sequential(*(nn.Tanh() for _ in range(10)))
    expected = gradients(net(x_TD).sum(), x_TD)
    y_TD = rule_of(store).run("dense", net, x_TD)
    assert store.leaving_bytes == 3 * ONE and slow.wait.call_count == 10 - 3
    assert_same(gradients(y_TD.sum(), x_TD), expected)


def test_a_call_brings_the_one_before_it_and_no_more() -> None:
    store, x_TD = Watched(in_flight=0), source()
    h_TD, events = x_TD, []
    for _ in range(4):
        h_TD = rule_of(store).run("layer", lambda h: h.tanh().sigmoid(), h_TD)
        h_TD.register_hook(lambda _: events.append(len(store.brought)))
    store._make_room(ONE)
    h_TD.sum().backward()
    # Two activations of each call. The hook on a call's output runs before its backward.
    assert events == [0, 4, 6, 8] and len(store.brought) == 8


def test_calls_whose_graph_is_gone_are_not_brought() -> None:
    store, x_TD = Watched(in_flight=0), source()
    gone = rule_of(store).run("dense", torch.tanh, x_TD)
    y_TD = rule_of(store).run("dense", torch.tanh, x_TD)
    del gone  # its graph and slots go too
    store._make_room(ONE)
    y_TD.sum().backward()
    assert store.brought == [ONE]


def test_a_discarded_output_does_not_move_but_is_computed_again() -> None:
    store, x_TD, net = Watched(), source(), nn.Linear(D, D)
    with discarding():
        h_TD = recomputed(lambda x: x * 2, x_TD * 1)
        y_TD = rule_of(store).run("attention", net, h_TD)
    assert store.sent == []
    assert_same(gradients(y_TD.sum(), x_TD, net), gradients(net(x_TD * 2).sum(), x_TD, net))


def test_a_module_that_is_recomputed_too_keeps_its_input_on_the_host() -> None:
    store, x_TD, net = Watched(in_flight=0), source(), network()
    layer_context = LayerContext(recompute=frozenset({"layer"}), offload=rule_of(store))
    y_TD = layer_context.run("layer", net, x_TD * 1)
    assert store.sent == [ONE]
    assert_same(gradients(y_TD.sum(), x_TD, net), gradients(net(x_TD * 1).sum(), x_TD, net))
    assert store.brought == [] and len(store.sent) == 1  # a replay sends nothing


def test_modules_that_are_not_named_and_passes_without_gradients_are_left_alone() -> None:
    store, x_TD = Watched(), source()
    rule = OffloadRule(kinds=frozenset({"moe"}), store=store)
    rule.run("dense", torch.tanh, x_TD).sum().backward()
    with torch.no_grad():
        rule.run("moe", torch.tanh, x_TD)
    assert OffloadRule().run("moe", torch.tanh, x_TD).requires_grad
    assert store.sent == []


def test_an_error_leaves_no_hook_behind() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        rule_of(Watched()).run("moe", nn.Linear(D + 1, D), source())
    assert current() is save_plainly


def test_a_run_says_what_is_offloaded() -> None:
    assert rule_for(Offload(), CPU) == OffloadRule()
    rule = rule_for(Offload(activations=("moe", "dense")), CPU)
    assert rule.kinds == {"moe", "dense"} and rule.store is not None
    with pytest.raises(AssertionError, match="'norm'.* are not all of"):
        rule_for(Offload(activations=("norm",)), CPU)
