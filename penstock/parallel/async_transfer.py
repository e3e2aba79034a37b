"""Asynchronous transfers in forward and backward, and weight gradients that are deferred.

    handle = transfers.launch("dispatch", function, x_TD)   fork: a second stream waits for this one, runs function
    ...                                                     runs beside it
    (rows,), rest = handle.wait()                           join: this stream waits for the transfer

Autograd sees two nodes, which change roles because backward takes nodes in reverse order:

    forward     launch: fork, transfer     compute      wait: join
    backward    launch: join               its grads    wait: fork, transfer's gradients

The transfer is recorded as its own graph, and differentiated on the second stream. Between the nodes travel placeholder
gradients of the right shape; the true ones are in the `AsyncTransfer`.

torch's allocator returns a freed block to the stream that allocated it. Blocks of this stream that the other one reads
are held by the handle until the join. Blocks of the other stream that this one reads are free once the host drops them,
after it has launched every reader; the next transfer that can get them begins with a fork. `record_stream` would keep
blocks of a captured graph from ever being reused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

Task = Callable[[], None]


class WeightGradStore:
    """Collects the weight gradients of one backward pass. One for each process; passes do not overlap.

    The previous stage waits only for the gradient of this stage's input. While a `WeightGradStore` collects, backward
    of a `deferrable` function returns input gradients at once and stores the weights' as tasks:

        with weight_grads.collecting() as work:
            torch.autograd.backward(...)      # input gradients; work fills up
        for task in work:
            task()                            # later: weight gradients, each into its parameter's .grad, hooks included

    The function is recorded as its own graph, whose two halves are differentiated apart: free for a matrix product,
    while stages between two weights (the experts' two products) are walked twice. A parameter's post-accumulate hooks
    also run at the end of the input pass, with nothing new in `.grad`: autograd sees the weights as inputs.
    """

    def __init__(self) -> None:
        self._work: list[Task] | None = None

    @property
    def is_collecting(self) -> bool:
        return self._work is not None

    @contextmanager
    def collecting(self) -> Iterator[list[Task]]:
        """Defer the weight gradients of every backward pass inside; yields the list of tasks."""
        assert self._work is None, "two backward passes collect at once"
        work: list[Task] = []
        self._work = work
        try:
            yield work
        finally:
            self._work = None

    def add(self, task: Task) -> bool:
        """Defer a task if a backward pass collects; returns whether it does."""
        if self._work is not None:
            self._work.append(task)
        return self._work is not None


def deferrable(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    weight_grads: WeightGradStore | None,
) -> Tensor:
    """`function(*inputs, *weights)`, whose weight gradients the store may defer; input gradients are needed at once."""
    if weight_grads is None or not torch.is_grad_enabled():
        return function(*inputs, *weights)
    output: Tensor = _Deferrable.apply(function, weight_grads, len(inputs), *inputs, *weights)
    return output


class _Deferrable(torch.autograd.Function):
    """Keeps the graph of `function` by its edges, so that tensors can be freed and its halves differentiated apart."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], weight_grads: WeightGradStore, inputs: int, *tensors: Tensor
    ) -> Tensor:
        entries = [entered(tensor) for tensor in tensors[:inputs]]
        weights = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors[inputs:]]
        with torch.enable_grad():  # autograd switches it off inside `forward`
            output = function(*entries, *weights)
        ctx.weight_grads, ctx.output = weight_grads, get_gradient_edge(output)
        ctx.inputs = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in entries]
        ctx.weights = list(zip(weights, tensors[inputs:], strict=True))
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [edge for edge in ctx.inputs if edge is not None]
        weights = [(weight, parameter) for weight, parameter in ctx.weights if weight.requires_grad]
        output, ctx.output = ctx.output, None  # only the task holds the graph from here on
        is_split = ctx.weight_grads.is_collecting
        wanted = inputs if is_split else [*inputs, *(weight for weight, _ in weights)]
        gradients = iter(torch.autograd.grad((output,), wanted, (gradient,), retain_graph=is_split) if wanted else ())
        by_input = tuple(None if edge is None else next(gradients) for edge in ctx.inputs)

        def add_weight_gradients() -> None:
            later = torch.autograd.grad((output,), [weight for weight, _ in weights], (gradient,))
            for (_, parameter), value in zip(weights, later, strict=True):
                parameter.view_as(parameter).backward(value)  # adds to .grad and runs the parameter's hooks

        if is_split and weights:
            ctx.weight_grads.add(add_weight_gradients)
        by_weight = (next(gradients) if weight.requires_grad and not is_split else None for weight, _ in ctx.weights)
        return None, None, None, *by_input, *by_weight


class _Entrance(torch.autograd.Function):
    """Identity on `value`; gives the result a place in a graph without holding it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        raise AssertionError("gradients are asked for at the entrance and go no further")


def entered(tensor: Tensor) -> Tensor:
    """An input as the start of a separate graph. A leaf would do, but the graph would hold it."""
    if not tensor.requires_grad:
        return tensor.detach()
    with torch.enable_grad():
        begin: Tensor = _Entrance.apply(torch.empty(0, requires_grad=True), tensor.detach())
    return begin


Rest = TypeVar("Rest")
Result = TypeVar("Result")

Transfer = Callable[..., tuple[tuple[Tensor, ...], Rest]]
"""Tensors -> (tensors with gradients, anything without). It runs on one stream, and gives the current one no work if
that is another."""


class TransferStream:
    """The stream of one process that transfers run on."""

    def __init__(self, device: torch.device) -> None:
        # Small kernels that others wait for: they go first wherever there is room.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._work_meanwhile: Callable[[], None] | None = None

    def launch(self, name: str, function: "Transfer[Rest]", *inputs: Tensor) -> "AsyncTransfer[Rest]":
        """Start a transfer; tensors that `function` closes over have no gradient."""
        handle: AsyncTransfer[Rest] = AsyncTransfer(self, name)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            handle.outputs = _Launch.apply(handle, function, *inputs)
        else:
            handle.outputs = handle.start(function, inputs)
        return handle

    @contextmanager
    def during_transfers(self, work: Callable[[], None]) -> Iterator[None]:
        """Call `work` whenever a backward pass inside has started a transfer."""
        assert self._work_meanwhile is None, "two works beside one backward pass"
        self._work_meanwhile = work
        try:
            yield
        finally:
            self._work_meanwhile = None

    def run_meanwhile(self) -> None:
        """Call the work of `during_transfers`, if there is any."""
        if self._work_meanwhile is not None:
            with torch.enable_grad():
                self._work_meanwhile()

    def fork(self, label: str, work: Callable[[], Result]) -> "tuple[Result, torch.cuda.Event | None]":
        """Run `work` on the other stream after this one's. Returns its result, valid after `join`, and its end."""
        del label
        if self._stream is None:
            return work(), None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))  # inputs are written there
        with torch.cuda.stream(self._stream):
            return work(), self._stream.record_event()

    def join(self, label: str, end: "torch.cuda.Event | None") -> None:
        """Let the current stream wait for the end of a fork."""
        del label
        if end is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(end)


class AsyncTransfer(Generic[Rest]):
    """One transfer under way; backward runs once at most."""

    def __init__(self, transfers: TransferStream, name: str) -> None:
        self.transfers = transfers
        self.name = name
        self.outputs: tuple[Tensor, ...] = ()
        self._rest: list[Rest] = []
        self._end: torch.cuda.Event | None = None  # of the transfer under way; None on a CPU
        self._held: tuple[object, ...] = ()  # blocks of this stream that the other one reads until the join
        self._graph: tuple[list[GradientEdge], list[GradientEdge | None]] | None = None  # ends, beginnings
        self._gradients: tuple[Tensor | None, ...] = ()  # of the inputs, valid after the join of backward

    def wait(self) -> tuple[tuple[Tensor, ...], Rest]:
        """Join. Returns the function's result."""
        outputs, self.outputs = self.outputs, ()
        if any(output.requires_grad for output in outputs):
            outputs = _Wait.apply(self, *outputs)
        else:
            self.finish()
        return outputs, self._rest.pop()

    def start(self, function: "Transfer[Rest]", inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Start, without gradients."""
        (outputs, rest), self._end = self.transfers.fork(self.name, lambda: function(*inputs))
        self._rest, self._held = [rest], (function, *inputs)
        return outputs

    def start_recorded(self, function: "Transfer[Rest]", inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Start, and keep the graph of the transfer."""

        def work() -> tuple[tuple[Tensor, ...], Rest, list[GradientEdge], list[GradientEdge | None]]:
            entries = [entered(tensor) for tensor in inputs]
            with torch.enable_grad():
                outputs, rest = function(*entries)
            have_gradients = all(output.requires_grad for output in outputs)
            assert have_gradients, f"{self.name}: tensors without gradient belong to the rest"
            ends = [get_gradient_edge(output) for output in outputs]
            begins = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in entries]
            return tuple(output.detach() for output in outputs), rest, ends, begins

        (outputs, rest, ends, begins), self._end = self.transfers.fork(self.name, work)
        self._rest, self._held, self._graph = [rest], (function, *inputs), (ends, begins)
        return outputs

    def finish(self) -> None:
        """Join the forward transfer."""
        self.transfers.join(self.name, self._end)
        self._held, self._end = (), None

    def start_backward(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Start the gradients of the inputs from those of the outputs."""
        assert self._graph is not None, f"{self.name}: a transfer is differentiated once"
        ends, begins = self._graph
        known = [(end, gradient) for end, gradient in zip(ends, gradients, strict=True) if gradient is not None]
        wanted = [begin for begin in begins if begin is not None]

        def work() -> tuple[Tensor | None, ...]:
            # The graph is kept: it may hold blocks of the current stream, which are read until the join.
            roots, values = [end for end, _ in known], [value for _, value in known]
            return torch.autograd.grad(roots, wanted, values, retain_graph=True, allow_unused=True)

        input_gradients, self._end = self.transfers.fork(f"{self.name} back", work)
        by_input = iter(input_gradients)
        self._held = gradients
        self._gradients = tuple(None if begin is None else next(by_input) for begin in begins)
        self.transfers.run_meanwhile()

    def finish_backward(self) -> tuple[Tensor | None, ...]:
        """Join. Returns the gradients of the inputs."""
        self.transfers.join(f"{self.name} back", self._end)
        gradients, self._gradients = self._gradients, ()
        self._held, self._graph, self._end = (), None, None
        return gradients


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, handle: AsyncTransfer[Rest], function: "Transfer[Rest]", *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.handle = handle
        ctx.set_materialize_grads(False)  # no zeros for outputs without a gradient
        return handle.start_recorded(function, inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *placeholders: Tensor | None) -> tuple[Tensor | None, ...]:
        del placeholders
        return None, None, *ctx.handle.finish_backward()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: AsyncTransfer[Rest], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.handle = handle
        ctx.set_materialize_grads(False)
        handle.finish()
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.handle.start_backward(gradients)
        return None, *gradients  # placeholders on the way to `_Launch`, whose backward joins
