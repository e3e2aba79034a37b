"""Deferred weight gradients (zero-bubble pipelines, arXiv 2401.10241).

The previous stage waits only for the gradient of this stage's input. While a `WeightGradStore` collects, backward of a
`deferrable` function returns input gradients at once and stores the weights' as tasks:

    with weight_grads.collecting() as work:
        torch.autograd.backward(...)      # input gradients; work fills up
    for task in work:
        task()                            # later: weight gradients, each into its parameter's .grad, hooks included

The function is recorded as its own graph, whose two halves are differentiated apart: free for a matrix product, while
stages between two weights (the experts' two products) are walked twice. A parameter's post-accumulate hooks also run at
the end of the input pass, with nothing new in `.grad`: autograd sees the weights as inputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

Task = Callable[[], None]


class WeightGradStore:
    """Collects the weight gradients of one backward pass. One for each process; passes do not overlap."""

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
