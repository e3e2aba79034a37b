"""Parts that are graphs: what is copied, what is where it was, in which order all is captured, what is refused."""

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from penstock.parallel.graphs import PartialGraphs
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers, TransferDirection
from tests.parallel.recorded_graph import SameAddresses


def layers(count: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(count)]


def through(parts: PartialGraphs | None, stack: list[nn.Linear], x_TD: Tensor) -> Tensor:
    """Layers with a part that gives two tensors and a choice, and eager work behind each."""
    for layer in stack:

        def part(x_TD: Tensor, layer: nn.Linear = layer) -> tuple[Tensor, ...]:
            h_TD = x_TD + layer(x_TD).tanh()
            return h_TD, h_TD.square(), h_TD.argmax(1)

        h_TD, square_TD, best_T = part(x_TD) if parts is None else parts.run(layer, part, x_TD)
        x_TD = h_TD + square_TD.sin() * best_T[:, None]
    return x_TD


def gradients(parts: PartialGraphs | None, stack: list[nn.Linear], seed: int) -> list[Tensor]:
    for layer in stack:
        layer.zero_grad()
    x_TD = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    out_TD = through(parts, stack, x_TD)
    out_TD.square().sum().backward()
    assert x_TD.grad is not None  # part of the result
    own = [parameter.grad.clone() for layer in stack for parameter in layer.parameters() if parameter.grad is not None]
    return [out_TD.detach().clone(), x_TD.grad, *own]


def test_replayed_parts_give_the_values_and_gradients_of_eager_ones_pass_after_pass() -> None:
    parts, stack = PartialGraphs(SameAddresses().capture), layers(3)
    for seed in range(4):
        expected, found = gradients(None, stack, seed), gradients(parts, stack, seed)
        assert len(found) == 2 + 6 and all(map(torch.equal, found, expected))


def test_parts_are_captured_replayed_and_released_in_one_order() -> None:
    graphs = SameAddresses()
    parts, stack = PartialGraphs(graphs.capture), layers(2)
    gradients(parts, stack, 0)
    assert graphs.log == [f"{what} {number}" for number in range(4) for what in ("capture", "replay")]
    graphs.log.clear()
    gradients(parts, stack, 1)
    assert graphs.log == [f"replay {number}" for number in range(4)]
    assert (parts.count, parts.seconds) == (4, 1.0)
    for _ in range(2):
        parts.release()
    assert graphs.log[4:] == [f"release {number}" for number in range(4)], "each is released once"
    assert parts.pool_bytes == 0


def test_incoming_gradients_share_their_memory_and_what_another_graph_wrote_is_read_where_it_is() -> None:
    parts, stack, row = PartialGraphs(SameAddresses().capture), layers(2), 5 * 4 * 4

    def chained(x_TD: Tensor) -> Tensor:
        for layer in stack:
            (x_TD,) = parts.run(layer, lambda x_TD, layer=layer: (layer(x_TD),), x_TD)
        return x_TD

    for _ in range(2):
        chained(torch.ones(5, 4, requires_grad=True)).sum().backward()
    # The input of the first part and the gradient of the last one.
    assert parts.pool_bytes == 4 * 100_000_000 + 2 * row
    parts = PartialGraphs(SameAddresses().capture)
    gradients(parts, layers(3), 0)
    assert parts.pool_bytes == 6 * 100_000_000 + 3 * row + 2 * row


def test_a_part_none_of_whose_inputs_has_a_gradient_still_trains_its_weights() -> None:
    parts, (layer,) = PartialGraphs(SameAddresses().capture), layers(1)
    for _ in range(2):
        layer.zero_grad()
        (y_TD,) = parts.run(layer, lambda x_TD: (layer(x_TD),), torch.ones(5, 4))
        y_TD.sum().backward()
        assert torch.equal(layer.bias.grad, torch.full((4,), 5.0))


def test_held_values_are_read_anew_by_every_pass() -> None:
    parts, (layer,) = PartialGraphs(SameAddresses().capture), layers(1)
    for angle in (2.0, 3.0):
        own = parts.hold("angle", torch.tensor([angle]))
        (y_TD,) = parts.run(layer, lambda x_TD, own=own: (x_TD * own,), torch.ones(5, 4, requires_grad=True))
        assert torch.equal(y_TD, torch.full((5, 4), angle))
        y_TD.sum().backward()


def test_other_shapes_facts_and_a_second_pass_are_refused() -> None:
    parts, (layer,) = PartialGraphs(SameAddresses().capture), layers(1)

    def run(rows: int) -> Tensor:
        return parts.run(layer, lambda x_TD: (layer(x_TD),), torch.ones(rows, 4))[0]

    run(5).sum().backward()
    with pytest.raises(AssertionError, match=r"tensor 0 of a graph is torch.float32 \(5, 4\), and .* \(6, 4\) came"):
        run(6)
    parts, (layer,) = PartialGraphs(SameAddresses().capture), layers(1)
    run(5)
    with pytest.raises(AssertionError, match="begins a pass before the last one was differentiated"):
        run(5)
    parts.check("share", 0.5)
    parts.check("share", 0.5)
    with pytest.raises(AssertionError, match=r"share of a graph is 0.5, and 1.0 came"):
        parts.check("share", 1.0)
    parts.hold("cos", torch.zeros(3))
    with pytest.raises(AssertionError, match="cos of a graph is"):
        parts.hold("cos", torch.zeros(4))


@pytest.mark.parametrize("fails_at", range(6))
def test_a_pass_in_which_memory_ends_is_right_all_the_same(fails_at: int) -> None:
    graphs, stack = SameAddresses(fails_at=fails_at), layers(3)
    parts = PartialGraphs(graphs.capture)
    expected, found = gradients(None, stack, 0), gradients(parts, stack, 0)
    assert all(map(torch.equal, found, expected))
    assert parts.obstacle == "tried to allocate 2 GiB"  # the first sentence of the error


OUT, BACK = TransferDirection.OUT, TransferDirection.BACK


def buffers(slots: int = 2) -> SymmetricBuffers:
    sizes = BufferSizes(tokens=4, top_k=2, row_bytes=16, ranks=1, slots=slots)  # the smallest rows
    memory = torch.zeros(sizes.total_bytes, dtype=torch.uint8)
    return SymmetricBuffers(sizes, memory, [memory.data_ptr()], 0)


def take_pass(one: SymmetricBuffers, number: int = 3) -> list[tuple[TransferDirection, int]]:
    return [(lane, one.take(lane)) for _ in range(2 * number) for lane in (OUT, BACK)]


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_taken_while_a_graph_is_captured_is_forgotten(fails: bool) -> None:
    recorded, plain = buffers(), buffers()
    with suppress(ZeroDivisionError), recorded.recording() as transfers:
        taken = take_pass(recorded)
        _ = 1 // (not fails)  # a capture that fails forgets its transfers too
    assert transfers == taken
    assert take_pass(recorded) == take_pass(plain)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_pass_may_be_replayed_between_any_others(before: int) -> None:
    one = buffers()
    for _ in range(before):
        one.take(OUT), one.take(BACK)
    with one.recording() as transfers:
        take_pass(one)
    for eager_layers in (0, 1, 2, 3):  # such as an evaluation, or a step that is made again
        one.replayed(transfers)
        one.replayed(transfers)
        take_pass(one, eager_layers)


def test_a_graph_that_ends_with_the_slot_that_it_begins_with_cannot_follow_itself() -> None:
    one = buffers()
    with one.recording() as transfers:
        for lane in (OUT, BACK, OUT, BACK, OUT):
            one.take(lane)
    one.replayed(transfers)
    one.replayed(())
    with pytest.raises(AssertionError, match="a graph begins with slot 0 of OUT, as what came before ended"):
        one.replayed(transfers)
    single = buffers(slots=1)
    with single.recording() as transfers:
        single.take(OUT), single.take(BACK)
    single.replayed(transfers)
    with pytest.raises(AssertionError, match="two transfers in a row in slot 0 of BACK"):
        single.take(BACK)
