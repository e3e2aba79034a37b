"""Arguments of a call as models of work read them: tensors with a shape and the bytes of a number."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.trace.operators import Call

BYTES: Mapping[str, int] = {
    "double": 8,
    "long int": 8,
    "long": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "short": 2,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "char": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e5m2fnuz": 1,
    "c10::Float8_e8m0fnu": 1,
}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """An argument: its shape and the bytes of an element."""

    shape: tuple[int, ...]
    width: int

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.numel * self.width


class UnknownShapeError(Exception):
    """An argument is missing or has no shape; no model says how much work a call is."""


Found = tuple[float, float]
"""FLOPs and bytes."""

Model = Callable[[Call, list[Tensor | None], float], Found]
"""From a call, its arguments, and the share of rows of experts that held tokens."""


def tensor_at(call: Call, index: int) -> Tensor | None:
    """An argument, if it is a tensor."""
    width = BYTES.get(call.types[index] if index < len(call.types) else "")
    shape = call.shapes[index]
    if width is None or not isinstance(shape, (list, tuple)) or any(not isinstance(size, int) for size in shape):
        return None
    return Tensor(shape=tuple(shape), width=width)


def need(tensors: list[Tensor | None], index: int, dims: int = 0) -> Tensor:
    """An argument that must be a tensor with at least so many dims."""
    one = tensors[index]
    if one is None or len(one.shape) < dims:
        raise UnknownShapeError
    return one


def optional(tensors: list[Tensor | None], index: int) -> Tensor | None:
    """An argument, or None if there is none or it is no tensor."""
    return tensors[index] if index < len(tensors) else None
