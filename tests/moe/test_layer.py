"""The layer runs its experts again in backward, as much as their network needs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import operators
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.expert_kernels import REFERENCE
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import BLOCKWISE
from penstock.kernels.operators import Operators
from penstock.kernels.reference import RowOrder
from penstock.kernels.replica_plan import ReplicaRule
from penstock.moe.balance import Routing, Scope
from penstock.moe.dispatch.balanced import BalancedDispatcher, ReplicaMeter
from penstock.moe.dispatch.contract import ExpertRows
from penstock.moe.experts import GroupedExperts
from penstock.moe.layer import MoE, Terms
from penstock.parallel.async_transfer import TransferStream, WeightGradStore
from penstock.parallel.layer_context import LayerContext, drain
from tests.closeness import assert_equal, decibels
from tests.moe.mixture import make_layer, plain_moe
from tests.parallel.alive import Alive

T, D, F, E, K = 24, 8, 16, 4, 2
PRE_ACTIVATION = T * K * 2 * F * 4


def _layer(network: Operators, kinds: tuple[str, ...], *, weight_grads: WeightGradStore | None = None) -> MoE:
    layer_context = LayerContext(operators=network, recompute=frozenset(kinds), weight_grads=weight_grads)
    return make_layer(plain_moe(E, F), layer_context, D)


def _whole(layer: MoE, run: Callable[..., Terms] | None = None) -> list[Tensor]:
    """Output, and gradients of the input and all parameters."""
    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (y_TD,) = (run or layer)(x_TD, Scope())
    y_TD.square().sum().backward()
    return [y_TD.detach(), x_TD.grad, *(parameter.grad for parameter in layer.parameters())]


def _by_itself(products: Counter[str]) -> Operators:
    """Operators whose network is the autograd function; its products count themselves."""

    def count(name: str) -> Callable[..., Tensor]:
        def run(*arguments: Any, **options: Any) -> Tensor:
            products[name] += 1
            product: Callable[..., Tensor] = vars(REFERENCE)[name]
            return product(*arguments, **options)

        return run

    kernels = replace(REFERENCE, **{name: count(name) for name in ("forward", "input_gradient", "weight_gradient")})
    return replace(operators.REFERENCE, expert_ffn=partial(expert_ffn, kernels=kernels), expert_ffn_is_fused=True)


@pytest.mark.parametrize(
    ("kinds", "forward"), [((), 2), (("expert-activation",), 3), (("expert-activation", "moe"), 4)]
)
def test_a_network_that_recomputes_by_itself_repeats_one_product(kinds: tuple[str, ...], forward: int) -> None:
    """A region around it, here the whole layer's, repeats both."""
    products: Counter[str] = Counter()
    layer = _layer(_by_itself(products), kinds)
    found = _whole(layer, partial(layer.layer_context.run, "moe", layer))
    assert_equal(found, _whole(_layer(_by_itself(Counter()), ())))
    assert products == {"forward": forward, "input_gradient": 2, "weight_gradient": 2}


@pytest.mark.parametrize("network", [operators.REFERENCE, operators.TORCH, _by_itself(Counter())])
def test_expert_activations_are_freed_whatever_the_network_is(network: Operators) -> None:
    kept, found = [], []
    for kinds in ((), ("expert-activation",)):
        layer, alive = _layer(network, kinds), Alive()

        def run(x_TD: Tensor, scope: Scope, layer: MoE = layer, alive: Alive = alive) -> Terms:
            with alive:
                terms = layer(x_TD, scope)
                kept.append(alive.bytes())
            return terms

        found.append(_whole(layer, run))
    assert kept[0] - kept[1] >= PRE_ACTIVATION
    assert_equal(*found)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_balanced_layer_begins_fetches_of_parameters_that_are_there(overlaps: bool) -> None:
    layer = _layer(operators.REFERENCE, ())
    rule, nothing = ReplicaRule(experts=E, groups=1, slots=1), partial(pytest.fail, "no rank dispatches here")
    balanced = BalancedDispatcher(rule, 0, layer.dispatcher, operators.REFERENCE, nothing, nothing, ReplicaMeter())
    transfers = TransferStream(torch.device("cpu")) if overlaps else None
    made = MoE(layer.router, balanced, layer.experts, None, replace(layer.layer_context, transfers=transfers))
    assert isinstance(made.dispatcher, BalancedDispatcher)
    experts = layer.experts
    matrices = () if overlaps else (experts.gate_up_eFD, experts.down_eDF)
    assert list(map(id, made.dispatcher.resident_weights())) == list(map(id, matrices))
    experts.gate_up_eFD = torch.nn.Parameter(experts.gate_up_eFD.detach().flatten(0, 1))  # as FSDP2 holds it
    assert made.dispatcher.resident_weights() == ()


@pytest.mark.parametrize(("kinds", "forward"), [((), 2), (("expert-activation",), 3)])
def test_experts_may_put_their_weight_gradients_off(kinds: tuple[str, ...], forward: int) -> None:
    weight_grads, products = WeightGradStore(), Counter()
    layer = _layer(_by_itself(products), kinds, weight_grads=weight_grads)
    with weight_grads.collecting() as work:
        found = _whole(layer)[:2]
    assert layer.experts.down_eDF.grad is None and products["weight_gradient"] == 0 and len(work) == 2
    for task in work:
        task()
    found += [parameter.grad for parameter in layer.parameters()]
    assert_equal(found, _whole(_layer(_by_itself(Counter()), ())))
    assert products == {"forward": forward, "input_gradient": 2, "weight_gradient": 2}, "each once"


def test_slots_are_sorted_once_and_by_the_router_if_dispatch_begins_with_that() -> None:
    sorts: list[Tensor] = []

    def order_rows(experts_TK: Tensor, experts: int) -> RowOrder:
        sorts.append(experts_TK)
        return operators.REFERENCE.order_rows(experts_TK, experts)

    layer = _layer(replace(operators.REFERENCE, order_rows=order_rows), ())
    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(0))
    routing = layer.route(x_TD, Scope())
    assert len(sorts) == 1
    again = Routing.of(*routing.tensors())
    assert again == routing
    ways = (again, Routing(*routing.tensors()[:2]))
    (found_TD,), (other_TD,) = (drain(layer.after_routing(x_TD, x_TD, way)) for way in ways)
    assert torch.equal(found_TD, other_TD)
    assert len(sorts) == 2
    assert Routing.of(routing.weights_TK, routing.experts_TK).sorted is None


def test_slots_are_sorted_by_a_dispatch_that_leaves_alone() -> None:
    layer = _layer(operators.REFERENCE, ())
    layer.layer_context = replace(layer.layer_context, transfers=TransferStream(torch.device("cpu")))
    assert layer.route(torch.ones(T, D), Scope()).sorted is None


HIDDEN, WIDTH, EXPERTS = 32, 48, 3

IN_8_BITS = Float8Rule(experts=BLOCKWISE)


def make(layer_context: LayerContext) -> GroupedExperts:
    torch.manual_seed(3)
    experts = GroupedExperts(EXPERTS, HIDDEN, WIDTH, layer_context)
    with torch.no_grad():
        for one in experts.parameters():
            one.normal_(std=one.shape[-1] ** -0.5)
    return experts


def draw() -> ExpertRows:
    generator = torch.Generator().manual_seed(5)
    x_ND = torch.randn(20, HIDDEN, generator=generator, requires_grad=True)
    counts_e = torch.tensor([7, 0, 11], dtype=torch.int32)
    return ExpertRows(x_ND, None, torch.rand(20, generator=generator), counts_e)


def test_8_bits_are_near_16() -> None:
    assert decibels(make(LayerContext(float8=IN_8_BITS))(draw()), make(LayerContext())(draw())) > 22


def test_copies_are_refreshed_in_place_and_are_no_part_of_the_state() -> None:
    experts = make(LayerContext(float8=IN_8_BITS))
    experts.refresh_float8()
    memory = [one.values.data_ptr() for copy in experts.float8_copies for one in copy]
    before = experts.float8_copies.down.backward.values.float()
    with torch.no_grad():
        experts.down_eDF.neg_()
    experts.refresh_float8()
    again = experts.float8_copies
    assert memory == [one.values.data_ptr() for copy in again for one in copy], "captured graphs read it"
    assert torch.equal(again.down.backward.values.float(), -before)
    assert set(experts.state_dict()) == {"gate_up_eFD", "down_eDF"}


def test_copies_are_read_as_long_as_they_are_fresh() -> None:
    experts, rows = make(LayerContext(float8=IN_8_BITS)), draw()
    made_now = experts(rows)
    experts.refresh_float8()
    assert torch.equal(experts(rows), made_now)
    experts.float8_copies.gate_up.forward.values.view(torch.uint8).zero_()
    assert not experts(rows).any(), "these are read"
    with torch.no_grad():
        experts.gate_up_eFD.mul_(1)
    assert torch.equal(experts(rows), made_now), "the matrices may have changed"


@pytest.mark.parametrize("with_sums", [True, False], ids=["sums", "autograd"])
def test_a_split_backward_puts_weight_gradients_off(with_sums: bool) -> None:
    weight_grads = WeightGradStore()
    at_once, split = (make(LayerContext(float8=IN_8_BITS, weight_grads=one)) for one in (None, weight_grads))
    for experts in (at_once, split):
        experts.sums = tuple(torch.zeros_like(one) for one in experts.parameters()) if with_sums else None

    def gradients(experts: GroupedExperts) -> list[Tensor | None]:
        return list(experts.sums or [one.grad for one in experts.parameters()])

    rows, again = draw(), draw()
    at_once(rows).square().sum().backward()
    with weight_grads.collecting() as work:
        split(again).square().sum().backward()
    assert torch.equal(again.x_ND.grad, rows.x_ND.grad), "the rows' gradient does not wait"
    assert not any(one is not None and one.any() for one in gradients(split)) and len(work) == 2
    for task in work:
        task()
    assert_equal(gradients(split), gradients(at_once))
    assert all(one.any() for one in gradients(split))
