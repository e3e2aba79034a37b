"""Compare a fast operator with its reference: output and all gradients.

The reference runs in float32 on the same values; a fast operator in bfloat16 is then at the distance that rounding
makes, and one in float32 almost exact. Distance is signal to noise in decibels: 20 more is ten times closer.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.closeness import assert_close, assert_equal

# Least signal to noise by dtype of the fast operator's result.
BARS_DB = {torch.float32: 100.0, torch.bfloat16: 45.0}
# Triton's interpreter truncates to bfloat16 where chips round: twice the error, always toward zero.
INTERPRETER_LOSS_DB = 5.0

Operator = Callable[..., Tensor | tuple[Tensor, ...]]


def assert_parity(fast: Operator, truth: Operator, inputs: Sequence[Tensor | None]) -> None:
    """Compare all floating outputs and the gradients of all floating inputs, for random incoming gradients.

    `truth` gets the inputs in float32, `fast` as they are; None and integer tensors are passed on.
    """
    got_outputs, got_gradients = _run(fast, [_leaf(x) for x in inputs])
    wide = [x.float() if x is not None and x.is_floating_point() else x for x in inputs]
    outputs, gradients = _run(truth, [_leaf(x) for x in wide])
    assert len(got_outputs) == len(outputs), "fast and truth differ in how many outputs they have"
    for index, (got, expected) in enumerate(zip(got_outputs, outputs, strict=True)):
        assert_near(got, expected, f"output {index}")
    for index, (got, expected) in enumerate(zip(got_gradients, gradients, strict=True)):
        assert_near(got, expected, f"gradient of floating input {index}")


def assert_near(got: Tensor, expected: Tensor, what: str) -> None:
    """Integers must be equal; floats near enough for the dtype of `got`, by their norm."""
    if not got.is_floating_point():
        assert_equal(got, expected, what=what)
        return
    bar = BARS_DB[got.dtype] - (0.0 if got.is_cuda else INTERPRETER_LOSS_DB)
    assert_close(got, expected, tolerance=10 ** (-bar / 20), by="norm", same_dtype=False, what=what)


def _leaf(x: Tensor | None) -> Tensor | None:
    return x if x is None or not x.is_floating_point() else x.detach().requires_grad_()


def _run(operator: Operator, inputs: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of floating inputs for incoming gradients that are the same on every call."""
    outputs = operator(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    generator = torch.Generator().manual_seed(1)
    floating = [output for output in outputs if output.is_floating_point() and output.requires_grad]
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    # Rounded to bfloat16, so that both runs get the same numbers in any dtype.
    incoming = [torch.randn(output.shape, generator=generator).bfloat16().to(output) for output in floating]
    gradients = torch.autograd.grad(floating, leaves, incoming)
    return [output.detach() for output in outputs], list(gradients)
