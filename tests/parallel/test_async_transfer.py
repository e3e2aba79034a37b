"""A transfer that leaves and is waited for is the function that it runs; backward is the mirror image of forward."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.parallel.async_transfer import AsyncTransfer, TransferStream
from penstock.parallel.layer_context import Steps, drain, within
from tests.closeness import assert_close
from tests.parallel.alive import Alive
from tests.parallel.recorded import Recorded, mirrored

T, D = 64, 32
CYCLES = 2_000_000
"""About a millisecond of a GPU."""


def _scaled(x_TD: Tensor, scale_T: Tensor) -> tuple[tuple[Tensor, Tensor], int]:
    return (x_TD * scale_T[:, None], scale_T.square()), x_TD.shape[0]


def _leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_TD, scale_T = torch.randn(T, D, generator=generator), torch.rand(T, generator=generator)
    return x_TD.requires_grad_(), scale_T.requires_grad_()


def test_a_transfer_gives_the_outputs_the_rest_and_the_gradients_of_its_function() -> None:
    x_TD, scale_T = expected = _leaves()
    (y_TD, square_T), _ = _scaled(x_TD, scale_T)
    (y_TD.sin().sum() + square_T.sum()).backward()
    found = _leaves()
    (got_TD, got_T), tokens = TransferStream(torch.device("cpu")).launch("scale", _scaled, *found).wait()
    assert torch.equal(got_TD, y_TD) and torch.equal(got_T, square_T) and tokens == T
    (got_TD.sin().sum() + got_T.sum()).backward()
    for one, other in zip(found, expected, strict=True):
        assert one.grad is not None and torch.equal(one.grad, other.grad)


def test_an_input_without_gradient_an_unused_output_and_one_that_is_the_input_are_fine() -> None:
    x_TD, scale_T = _leaves()
    x_TD.requires_grad_(False)  # a transfer may have inputs of both kinds
    transfers = TransferStream(torch.device("cpu"))

    def transfer(x_TD: Tensor, scale_T: Tensor) -> tuple[tuple[Tensor, Tensor], None]:
        return (x_TD * scale_T[:, None], scale_T.exp()), None

    (y_TD, _), _ = transfers.launch("scale", transfer, x_TD, scale_T).wait()
    y_TD.sum().backward()
    assert_close(scale_T.grad, x_TD.sum(1))
    (y_TD,), _ = transfers.launch("nothing", lambda x_TD: ((x_TD,), None), x_TD.requires_grad_()).wait()
    (3 * y_TD).sum().backward()
    assert torch.equal(x_TD.grad, torch.full_like(x_TD, 3))


def test_without_gradients_nothing_is_recorded() -> None:
    transfers = Recorded()
    with torch.no_grad():
        handle = transfers.launch("scale", _scaled, *_leaves())
        (y_TD, _), tokens = handle.wait()
    assert y_TD.grad_fn is None and tokens == T
    assert transfers.events == ["scale 0 leaves", "scale 0 arrives"]


def test_what_runs_beside_a_transfer_in_forward_has_its_gradients_beside_it_in_backward() -> None:
    transfers, (x_TD, _) = Recorded(), _leaves()
    mark = transfers.mark
    before_TD = mark("before", x_TD)
    handle = transfers.launch("dispatch", lambda x_TD: ((x_TD.sin(),), None), before_TD)
    beside_TD = mark("beside", before_TD)
    (y_TD,), _ = handle.wait()
    out_TD = mark("after", y_TD)
    assert transfers.events == ["before", "dispatch 0 leaves", "beside", "dispatch 0 arrives", "after"]
    transfers.events.clear()
    (out_TD * beside_TD).sum().backward()
    back = ["after", "dispatch 0 back leaves", "beside", "dispatch 0 back arrives", "before"]
    assert [event.removesuffix(" back") for event in transfers.events] == back


def test_two_transfers_at_once_come_back_in_mirrored_order() -> None:
    transfers, inputs = Recorded(), [_leaves()[0] for _ in range(2)]
    handles = [transfers.launch("dispatch", lambda x_TD: ((x_TD.sin(),), None), x_TD) for x_TD in inputs]
    outputs = [handle.wait()[0][0] for handle in handles]
    forward, transfers.events = transfers.events, []
    torch.cat(outputs).sum().backward()
    assert transfers.events == mirrored(forward)
    assert forward == [f"dispatch {number} {what}" for what in ("leaves", "arrives") for number in range(2)]


def test_work_beside_a_backward_pass_is_done_whenever_a_transfer_has_left_and_records_its_own_graph() -> None:
    transfers, (x_TD, _) = Recorded(), _leaves()
    weight = nn.Parameter(torch.ones(D))
    done: list[Tensor] = []

    def work() -> None:
        transfers.events.append("work")
        done.append((weight * len(done)).sum())

    hidden_TD = x_TD
    for _ in range(2):
        (hidden_TD,), _ = transfers.launch("dispatch", lambda x_TD: ((x_TD.sin(),), None), hidden_TD).wait()
    transfers.events.clear()
    with transfers.during_transfers(work):
        hidden_TD.sum().backward()
    first, last = ([f"dispatch {number} back leaves", "work", f"dispatch {number} back arrives"] for number in (1, 0))
    assert transfers.events == first + last
    assert weight.grad is None, "one pass is not the other's"
    done[1].backward()
    assert torch.equal(weight.grad, torch.ones(D))


def test_what_the_transfer_reads_is_held_until_it_arrives_and_not_longer() -> None:
    transfers, size = TransferStream(torch.device("cpu")), T * D * 4
    x_TD, _ = _leaves()
    with Alive() as alive:
        handle = transfers.launch("move", lambda y_TD: ((y_TD + 1,), None), x_TD * 1)
        gc.collect()
        assert alive.bytes() == 2 * size, "its input, which has no other reference, and its output"  # float32
        (y_TD,), _ = handle.wait()
        del handle
        assert alive.bytes() == size
        y_TD.sum().backward()
        del y_TD
        assert alive.bytes() == size, "the gradient of the leaf"


def test_what_the_function_closes_over_is_held_too() -> None:
    transfers, size = TransferStream(torch.device("cpu")), T * 8
    x_TD, _ = _leaves()

    def launch() -> AsyncTransfer[None]:
        order_T = torch.arange(T).flip(0)  # allocated on this stream, read on the other one
        return transfers.launch("move", lambda x_TD: ((x_TD.sum() + order_T.sum(),), None), x_TD)

    with Alive() as alive:
        handle = launch()
        before = alive.bytes()
        handle.wait()
        assert before - alive.bytes() >= size


def test_a_transfer_is_differentiated_once_and_what_has_no_gradient_is_no_output() -> None:
    transfers, (x_TD, _) = TransferStream(torch.device("cpu")), _leaves()
    (y_TD,), _ = transfers.launch("move", lambda x_TD: ((x_TD * 2,), None), x_TD).wait()
    total = y_TD.sum()
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="is differentiated once"):
        total.backward()
    with pytest.raises(AssertionError, match="belong to the rest"):
        transfers.launch("move", lambda x_TD: ((x_TD.argmax(1),), None), x_TD)


class _Around(torch.autograd.Function):
    """A factor and some other work, in both directions."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, factor: int, work: Any) -> Tensor:
        ctx.factor, ctx.work = factor, work
        work(x_TD)
        return factor * x_TD

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.work(gradient)
        return ctx.factor * gradient, None, None


def _sleep(_: Tensor) -> None:
    torch.cuda._sleep(CYCLES)


def _write_over_free_blocks(x_TD: Tensor) -> None:
    for _ in range(4):  # any freed block that the other stream still reads is overwritten
        torch.full_like(x_TD, 1e6)


def _chain(x_TD: Tensor, transfers: TransferStream | None) -> Tensor:
    """Transfers with other work beside them, which asks for blocks while the transfers still read theirs."""
    for _ in range(6):  # so many transfers that freed blocks are used again
        beside_TD = x_TD.sin()
        if transfers is None:
            x_TD = 2 * (x_TD * 0.3) + beside_TD
            continue
        handle = transfers.launch("slow", lambda x_TD: ((_Around.apply(x_TD, 2, _sleep),), None), x_TD * 0.3)
        beside_TD = _Around.apply(beside_TD, 1, _write_over_free_blocks)
        (y_TD,), _ = handle.wait()
        x_TD = y_TD + beside_TD
    return x_TD.cos().sum()


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_read_before_it_is_there_and_no_block_is_used_again_too_early() -> None:
    device = torch.device("cuda")
    start_TD = torch.randn(512, 1024, device=device, generator=torch.Generator(device).manual_seed(0))
    expected, found = (start_TD.clone().requires_grad_() for _ in range(2))
    plain = _chain(expected, None)
    plain.backward()
    loss = _chain(found, TransferStream(device))
    loss.backward()
    assert torch.equal(loss, plain) and torch.equal(found.grad, expected.grad)


@pytest.mark.gpu
def test_on_a_gpu_both_directions_are_captured_and_replayed_with_other_inputs() -> None:
    device = torch.device("cuda")
    transfers, generator = TransferStream(device), torch.Generator(device).manual_seed(0)
    x_TD = torch.randn(512, 1024, device=device, generator=generator).requires_grad_()
    deferred = torch.cuda.Stream()
    deferred.wait_stream(torch.cuda.current_stream())  # a first run outside of capture makes streams and handles
    with torch.cuda.stream(deferred):
        _chain(x_TD, transfers).backward()
    torch.cuda.current_stream().wait_stream(deferred)
    x_TD.grad, graph = None, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = _chain(x_TD, transfers)
        loss.backward()
    other_TD = torch.randn(512, 1024, device=device, generator=generator).requires_grad_()
    with torch.no_grad():
        x_TD.copy_(other_TD)
    graph.replay()
    plain = _chain(other_TD, None)
    plain.backward()
    assert torch.equal(loss, plain) and torch.equal(x_TD.grad, other_TD.grad)


def _count(name: str, pieces: int, seen: list[str]) -> Steps[str]:
    for piece in range(pieces - 1):
        seen.append(f"{name}{piece}")
        yield
    seen.append(f"{name}{pieces - 1}")
    return name


def test_draining_runs_every_step() -> None:
    seen: list[str] = []
    assert drain(_count("a", 3, seen)) == "a"
    assert seen == ["a0", "a1", "a2"]


def test_a_context_is_left_at_every_stop() -> None:
    seen: list[str] = []

    @contextmanager
    def bracket() -> Iterator[None]:
        seen.append("(")
        yield
        seen.append(")")

    steps = within(bracket, _count("a", 2, seen))
    next(steps)
    seen.append("b")
    assert drain(steps) == "a"
    assert "".join(seen) == "(a0)b(a1)"
