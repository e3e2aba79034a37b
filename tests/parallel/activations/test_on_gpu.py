"""What only a GPU can show of recomputation and offload: streams, autograd's own threads, freed memory, overlap."""

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from penstock.config.parallel import OFFLOADABLE
from penstock.parallel.offload import ChunkStream, HostStore, OffloadRule
from penstock.parallel.recompute import discarding, is_recomputing, recomputed
from tests.parallel.activations.test_recompute import assert_same, gradients, norm, plainly

pytestmark = pytest.mark.gpu

T, D = 4096, 1024
ONE = T * D * 4
"""Bytes of one activation."""


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def make(layers: int = 6) -> tuple[Tensor, nn.ModuleList]:
    torch.manual_seed(0)
    x_TD = torch.randn(T, D, device="cuda", requires_grad=True)
    return x_TD, nn.ModuleList(nn.Linear(D, D, device="cuda") for _ in range(layers))


def forward(x_TD: Tensor, layers: nn.ModuleList, run: Callable[..., Tensor]) -> Tensor:
    for layer in layers:
        with discarding():
            x_TD = x_TD + layer(run(norm, x_TD)).tanh()
    return x_TD.square().sum()


def held_after(make_loss: Callable[[], Tensor]) -> int:
    """Bytes that a forward pass holds."""
    before = torch.cuda.memory_allocated()
    loss = make_loss()
    held = torch.cuda.memory_allocated() - before
    del loss
    return held


def test_recomputed_gradients_are_the_same_to_the_bit_and_memory_falls() -> None:
    x_TD, layers = make()
    expected = gradients(forward(x_TD, layers, plainly), x_TD, layers)
    assert_same(gradients(forward(x_TD, layers, recomputed), x_TD, layers), expected)
    plain = held_after(lambda: forward(x_TD, layers, plainly))
    freed = plain - held_after(lambda: forward(x_TD, layers, recomputed))
    assert freed >= len(layers) * ONE  # the norms' outputs


def test_a_replay_knows_that_it_is_one_in_the_thread_of_autograd() -> None:
    x_TD, seen = torch.randn(8, D, device="cuda", requires_grad=True), []

    def part(x_TD: Tensor) -> Tensor:
        seen.append((threading.get_ident(), is_recomputing()))
        return x_TD.tanh()

    recomputed(part, x_TD).sum().backward()
    (thread, first), (other, second) = seen
    assert (first, second) == (False, True) and thread != other  # autograd replays on a thread of its own


def test_regions_on_two_streams_wait_for_each_other() -> None:
    x_TD, layers = make(2)
    side = torch.cuda.Stream()

    def both(run: Callable[..., Tensor]) -> Tensor:
        here = torch.cuda.current_stream()
        with discarding():
            h_TD = run(lambda x: norm(x).exp(), x_TD)
            side.wait_stream(here)
            with torch.cuda.stream(side):
                one_TD = run(lambda h: layers[0](h).tanh(), h_TD)
            other_TD = layers[1](h_TD)
            here.wait_stream(side)
            one_TD.record_stream(here)
            h_TD.record_stream(side)
            return (one_TD * other_TD).square().sum()

    expected = gradients(both(plainly), x_TD, layers)
    for _ in range(5):  # a missing wait shows in some of the runs only
        assert_same(gradients(both(recomputed), x_TD, layers), expected)


@pytest.mark.parametrize("in_flight", [0, 2 * ONE, 100 * ONE])
def test_offloaded_gradients_are_the_same_to_the_bit_and_memory_falls(in_flight: int) -> None:
    x_TD, layers = make()
    rule = OffloadRule(kinds=frozenset(OFFLOADABLE), store=HostStore(torch.device("cuda"), in_flight=in_flight))

    def run(away: bool) -> Tensor:
        h_TD = x_TD * 1
        for layer in layers:
            part = partial(lambda layer, h: layer(norm(h).sigmoid()).tanh(), layer)
            h_TD = rule.run("dense", part, h_TD) if away else part(h_TD)
        return h_TD.square().sum()

    expected = gradients(run(False), x_TD, layers)
    for _ in range(4):
        assert_same(gradients(run(True), x_TD, layers), expected)
    held = held_after(partial(run, True))
    assert held <= in_flight + 4 * ONE and (in_flight > 50 * ONE or held < held_after(partial(run, False)) / 2)


def test_a_graph_may_be_thrown_away_while_copies_run() -> None:
    x_TD, layers = make()
    rule = OffloadRule(kinds=frozenset(OFFLOADABLE), store=HostStore(torch.device("cuda"), in_flight=2 * ONE))
    expected = gradients(layers[0](x_TD).tanh().sum(), x_TD, layers[0])
    for _ in range(10):
        rule.run("dense", lambda x: layers[1](layers[0](x).tanh()).sigmoid(), x_TD * 1)
        loss = rule.run("dense", lambda x: layers[0](x).tanh(), x_TD).sum()
        assert_same(gradients(loss, x_TD, layers[0]), expected)


def test_chunks_come_and_go_on_a_gpu() -> None:
    host = [[torch.full((1 << 20,), float(i), pin_memory=True) for _ in range(3)] for i in range(7)]
    stream = ChunkStream(torch.device("cuda"))
    for _ in range(3):
        stream.run(host, lambda index, tensors: torch._foreach_add_(tensors, index + 1))
    stream.finish()
    for index, chunk in enumerate(host):
        for tensor in chunk:
            assert tensor.unique().tolist() == [index + 3 * (index + 1)]
