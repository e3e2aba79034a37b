"""Regions together: in chains, inside each other, with micro-batches, work that is put off, and other ranks."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.recompute import discarding, recomputed
from penstock.parallel.weight_grad_store import WeightGradStore, deferrable
from tests.distributed.pool import Pool
from tests.examples import examples
from tests.parallel.activations.regions import ONE, Counted, D, assert_same, gradients, linear, norm, source
from tests.parallel.alive import Alive


def test_regions_in_a_chain_each_run_once_more() -> None:
    x_TD, inner, outer = source(), linear(), linear()
    first, second, third = Counted(norm), Counted(lambda h: torch.tanh(inner(h))), Counted(norm)

    def layer(run: Callable[..., Tensor]) -> Tensor:
        with discarding():
            return outer(run(third, run(second, run(first, x_TD)))).square().sum()

    expected = gradients(layer(lambda f, x: f(x)), x_TD, inner, outer)
    first.calls = second.calls = third.calls = 0
    with Alive() as alive:
        loss = layer(recomputed)
        assert alive.bytes() <= ONE + 8  # what square saved: the last product
    assert_same(gradients(loss, x_TD, inner, outer), expected)
    assert (first.calls, second.calls, third.calls) == (2, 2, 2)


def test_a_region_inside_a_region_is_part_of_it() -> None:
    x_TD, net = source(), linear()
    inside = Counted(norm)

    def layer(x_TD: Tensor) -> Tensor:
        with discarding():
            return net(recomputed(inside, x_TD)).tanh()

    expected = gradients(layer(x_TD).sum(), x_TD, net)
    inside.calls = 0
    outside = Counted(layer)
    with Alive() as alive:
        y_TD = recomputed(outside, x_TD)
        assert alive.bytes() == ONE
    assert_same(gradients(y_TD.sum(), x_TD, net), expected)
    assert (outside.calls, inside.calls) == (2, 2)


def test_several_micro_batches_wait_for_backward_in_any_order() -> None:
    net, after = linear(), linear()
    batches = [source() for _ in range(3)]

    def forward(x_TD: Tensor, run: Callable[..., Tensor]) -> Tensor:
        with discarding():
            return after(run(lambda x: net(x).tanh(), x_TD)).square().sum()

    expected = [gradients(forward(x, lambda f, x: f(x)), x, net, after) for x in batches]
    losses = [forward(x, recomputed) for x in batches]
    for index in (1, 0, 2):
        assert_same(gradients(losses[index], batches[index], net, after), expected[index])


def test_a_graph_that_is_asked_twice_replays_once_and_keeps_the_values_until_the_second_time() -> None:
    x_TD, net, after = source(), nn.Sequential(linear(), nn.Tanh()), linear()
    region = Counted(net)
    with discarding():
        loss = after(recomputed(region, x_TD)).square().sum()
    expected = gradients(after(net(x_TD)).square().sum(), x_TD, after, net)
    (dx_TD,) = torch.autograd.grad(loss, [x_TD], retain_graph=True)
    assert_same([dx_TD, *gradients(loss, after, net)], expected)
    assert region.calls == 2


def test_weight_gradients_can_be_put_off() -> None:
    x_TD, down = source(), linear()
    weight_grads, region = WeightGradStore(), Counted(norm)
    with discarding():
        h_TD = recomputed(region, x_TD)
        loss = deferrable(F.linear, [h_TD], [down.weight], weight_grads).square().sum()
    expected = gradients(F.linear(norm(x_TD), down.weight).square().sum(), x_TD, down.weight)
    with weight_grads.collecting() as work:
        loss.backward()
    assert torch.equal(x_TD.grad, expected[0]) and down.weight.grad is None
    for task in work:
        task()
    assert torch.equal(down.weight.grad, expected[1])
    assert region.calls == 2


def test_a_region_may_hold_work_that_is_put_off() -> None:
    x_TD, net = source(), linear()
    weight_grads = WeightGradStore()
    region = Counted(lambda x: deferrable(F.linear, [norm(x)], [net.weight], weight_grads).tanh())
    loss = recomputed(region, x_TD).square().sum()
    expected = gradients(F.linear(norm(x_TD), net.weight).tanh().square().sum(), x_TD, net.weight)
    with weight_grads.collecting() as work:
        loss.backward()
    for task in work:
        task()
    assert_same([x_TD.grad, net.weight.grad], expected)
    assert region.calls == 2


def exchange_in_a_region() -> bool:
    """One rank: gradients through an exchange between two ranks, with and without a region around it."""
    rank = dist.get_rank()
    axis = Axis(name="expert", ranks=(0, 1), rank=rank, group=dist.group.WORLD)
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(6, D, generator=generator, requires_grad=True)
    weight_DD = torch.randn(D, D, generator=generator, requires_grad=True)

    def forward(x_TD: Tensor) -> Tensor:
        gathered_TD = all_gather(x_TD.tanh(), axis, 0)
        return reduce_scatter((gathered_TD @ weight_DD).exp().sigmoid(), axis, 0)

    expected = gradients(forward(x_TD).square().sum(), x_TD, weight_DD)
    losses = [recomputed(forward, x_TD).square().sum() for _ in range(2)]
    return all(
        torch.equal(one, other)
        for loss in losses
        for one, other in zip(gradients(loss, x_TD, weight_DD), expected, strict=True)
    )


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
        losses = [play(program, x_TD @ weight_DD * scale, weight_DD, recompute=recompute).sum() for scale in (1.0, 0.5)]
        found.append([gradient for loss in losses for gradient in torch.autograd.grad(loss, [x_TD, weight_DD])])
    assert_same(found[1], found[0])
