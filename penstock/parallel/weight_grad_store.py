"""Weight gradients that are computed later than input gradients (zero-bubble pipelines, arXiv 2401.10241).

The next stage backwards waits for the gradient of this stage's input and for nothing else. `deferrable` runs a function
of inputs and weights so that, while a `WeightGradStore` collects, backward gives the inputs' gradients at once and puts
the weights' into a list of work, to be done when the schedule says so.

    with later.collecting() as work:
        torch.autograd.backward(...)      # input gradients; work fills up
    ...
    for task in work:
        task()                            # weight gradients, each into its parameter's .grad, hooks included

The function is recorded as a graph of its own whose two halves are asked for apart. For a matrix product that costs
nothing: its two gradients share no work. For a function with inner stages (the experts' two products) the stages
between the output and the first weights are walked twice.

A parameter's post-accumulate hooks are called at the end of the input pass too, with nothing new in `.grad`: to
autograd the weights are inputs of the function, since nobody knows in forward whether backward will be split.

Without a `WeightGradStore`, which is every run without a split schedule, nothing here is in the way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

Task = Callable[[], None]


class WeightGradStore:
    """Collects the weight gradients of one backward pass. One for each process; passes do not overlap."""

    def __init__(self) -> None:
        self._work: list[Task] | None = None

    @property
    def is_collecting(self) -> bool:
        """Whether weight gradients are put off at the moment."""
        return self._work is not None

    @contextmanager
    def collecting(self) -> Iterator[list[Task]]:
        """Put off the weight gradients of every backward pass inside; yields the list that they go to."""
        assert self._work is None, "two backward passes collect at once"
        work: list[Task] = []
        self._work = work
        try:
            yield work
        finally:
            self._work = None

    def add(self, task: Task) -> None:
        """Put off one task."""
        assert self._work is not None, "nobody collects"
        self._work.append(task)


class DeferredWork:
    """Work of one layer's backward pass that is done while something of the same pass travels.

    Whoever computes puts it here, and who sends what was computed last does it before it waits for the others.
    """

    def __init__(self) -> None:
        self._work: list[Task] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self._work

    def add(self, task: Task) -> None:
        """Leave one task."""
        self._work.append(task)

    def do(self) -> None:
        """Do all of it, once."""
        work, self._work = self._work, []
        for task in work:
            task()


def deferrable(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    weight_grads: WeightGradStore | None,
) -> Tensor:
    """`function(*inputs, *weights)`, whose weight gradients `weight_grads` may put off.

    Args:
        function: of tensors only, differentiable; whatever else it needs it has already.
        inputs: tensors whose gradients are needed at once.
        weights: parameters.
        weight_grads: None computes everything at once.
    """
    if weight_grads is None or not torch.is_grad_enabled():
        return function(*inputs, *weights)
    output: Tensor = _Deferrable.apply(function, weight_grads, len(inputs), *inputs, *weights)
    return output


class _Deferrable(torch.autograd.Function):
    """Keeps the graph of `function`, so that its halves can be differentiated apart.

    It knows the graph by its edges and not by its tensors, which recomputation may free.
    """

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], weight_grads: WeightGradStore, inputs: int, *tensors: Tensor
    ) -> Tensor:
        own = [entered(tensor) for tensor in tensors[:inputs]]
        weights = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors[inputs:]]
        with torch.enable_grad():
            output = function(*own, *weights)
        ctx.weight_grads, ctx.output = weight_grads, get_gradient_edge(output)
        ctx.inputs = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in own]
        ctx.weights = list(zip(weights, tensors[inputs:], strict=True))
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [edge for edge in ctx.inputs if edge is not None]
        weights = [(own, parameter) for own, parameter in ctx.weights if own.requires_grad]
        output, ctx.output = ctx.output, None
        is_split = ctx.weight_grads.is_collecting
        wanted = inputs if is_split else [*inputs, *(own for own, _ in weights)]
        found = iter(torch.autograd.grad((output,), wanted, (gradient,), retain_graph=is_split) if wanted else ())
        by_input = tuple(None if edge is None else next(found) for edge in ctx.inputs)
        if is_split and weights:
            ctx.weight_grads.add(lambda: _weight_gradients(output, weights, gradient))
        by_weight = (next(found) if own.requires_grad and not is_split else None for own, _ in ctx.weights)
        return None, None, None, *by_input, *by_weight


class _Entrance(torch.autograd.Function):
    """Identity on `value`; the result belongs to a graph, so that its place there can be named without it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        raise AssertionError("gradients are asked for at the entrance and go no further")


def entered(tensor: Tensor) -> Tensor:
    """An input at the beginning of a graph of its own. A leaf would do, but the graph would hold it."""
    if not tensor.requires_grad:
        return tensor.detach()
    with torch.enable_grad():
        begin: Tensor = _Entrance.apply(torch.empty(0, requires_grad=True), tensor.detach())
    return begin


def _weight_gradients(output: GradientEdge, weights: list[tuple[Tensor, Tensor]], gradient: Tensor) -> None:
    """Differentiate by the weights; what is found goes through each parameter's own hooks, as in any backward pass."""
    found = torch.autograd.grad((output,), [own for own, _ in weights], (gradient,))
    for (_, parameter), value in zip(weights, found, strict=True):
        parameter.view_as(parameter).backward(value)
