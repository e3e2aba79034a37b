"""Transfers that write down what leaves and what arrives, in forward and in backward."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.parallel.async_transfer import AsyncTransfer, Transfer, TransferStream

Result = TypeVar("Result")


class Recorded(TransferStream):
    """On a CPU, so a transfer runs when it leaves."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.events: list[str] = []  # such as "dispatch 0 leaves", "combine 1 arrives", "combine 1 back leaves"
        self.launched = 0  # so far: the number of the next transfer

    def launch(self, name: str, function: "Transfer[Any]", *inputs: Tensor) -> AsyncTransfer[Any]:
        number, self.launched = self.launched, self.launched + 1
        return super().launch(f"{name} {number}", function, *inputs)  # launch order tells equal names apart

    def fork(self, label: str, work: Callable[[], Result]) -> "tuple[Result, torch.cuda.Event | None]":
        self.events.append(f"{label} leaves")
        return super().fork(label, work)

    def join(self, label: str, end: "torch.cuda.Event | None") -> None:
        self.events.append(f"{label} arrives")
        super().join(label, end)

    def mark(self, name: str, x: Tensor) -> Tensor:
        marked: Tensor = _Mark.apply(x, name, self.events)
        return marked


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, events: list[str]) -> Tensor:
        ctx.name, ctx.events = name, events
        events.append(name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(f"{ctx.name} back")
        return gradient, None, None


def mirrored(events: list[str]) -> list[str]:
    """What backward does if it is the mirror image of a forward pass: what arrived leaves, what left arrives."""
    turned = {"leaves": "back arrives", "arrives": "back leaves"}  # a fork in forward is a join in backward
    return [" ".join([*words[:-1], turned[words[-1]]]) for words in (event.split() for event in reversed(events))]
