"""A weight that is there in 8 bits only: what FSDP2 gathers of one (penstock/parallel/float8_gather.py).

A module sees it as a parameter of the compute dtype, to which autograd gives gradients of that dtype, but there are no
16-bit numbers behind it: it can be detached and viewed as it is, and multiplied by its copies. Blocks are squares, so
the transposed copy has the same numbers and scales. It is made when backward first asks for it; many passes never do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.float8.quantized import Quantized, WeightCopies

_ALIASES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.as_strided.default})
"""Operators that autograd, FSDP2 and recomputation use to have the same tensor again."""


class GatheredCopies:
    """Both copies, in memory that is freed and filled again.

    Args:
        forward: ... F x D.
        backward: ... D x F: its scales, and memory for its values.
        transpose: fills the second's values from the first's (`Float8Operators.transpose_weight`).
    """

    def __init__(
        self, forward: Quantized, backward: Quantized, transpose: Callable[[Quantized, Quantized], None]
    ) -> None:
        self.forward = forward
        self._backward = backward
        self._transpose = transpose
        self._is_transposed = False

    @property
    def backward(self) -> Quantized:
        """Contracted over F."""
        if not self._is_transposed:
            with torch.no_grad():
                self._transpose(self.forward, self._backward)
            self._is_transposed = True
        return self._backward

    def renewed(self) -> None:
        """Say that `forward` has been filled again."""
        self._is_transposed = False


class GatheredWeight(Tensor):
    """See the top of the file.

    Args:
        copies: of the numbers.
        dtype: that it passes for.
    """

    copies: GatheredCopies
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # as torch has it itself

    @staticmethod
    def __new__(cls, copies: GatheredCopies, dtype: torch.dtype) -> "GatheredWeight":
        """A tensor with a shape and without memory."""
        values = copies.forward.values
        weight: GatheredWeight = Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)
        weight.copies = copies
        return weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # there it is no method of the class
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> "GatheredWeight":
        """Give the same weight again where that is all an operator asks for."""
        weight = args[0]
        assert func in _ALIASES and isinstance(weight, GatheredWeight), f"{func}, of a weight in 8 bits only"
        assert len(args) == 1 or tuple(args[1]) == tuple(weight.shape), f"a part of a weight in 8 bits: {args[1]}"
        return cls(weight.copies, weight.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # not annotated there
        """Without numbers, which need operators."""
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"


def copies_of(
    weight: Tensor, kept: WeightCopies | None, quantize: Callable[[Tensor], WeightCopies]
) -> WeightCopies | GatheredCopies:
    """The copies of a weight that products read: kept, gathered, or made now.

    Args:
        weight: as its module has it during the pass, or as backward finds it again.
        kept: those that stay from step to step, if there are any.
        quantize: what makes copies of a weight.
    """
    if kept is not None:
        return kept
    return weight.copies if isinstance(weight, GatheredWeight) else quantize(weight.detach())
