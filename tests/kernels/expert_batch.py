"""Random arguments of the experts' networks in 16 and in 8 bits, and what tests of both look at."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.reference import RowOrder, order_rows


@dataclass(frozen=True)
class Batch:
    """Arguments of `expert_ffn` for one routing, and the order that they were made from."""

    x_TD: Tensor
    gate_up_eFD: Tensor
    down_eDF: Tensor
    weights_R: Tensor  # float32; zero for slots without a row
    index_R: Tensor
    order: RowOrder
    biases: tuple[Tensor, Tensor]

    @property
    def rest(self) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments behind the matrices."""
        return self.order.counts_E, self.weights_R, self.index_R

    @property
    def inputs(self) -> list[Tensor | None]:
        """In the order of the signature; weights in the dtype of the others, so that their gradients have one bar."""
        weights_R = self.weights_R.to(self.x_TD)
        return [self.x_TD, self.gate_up_eFD, self.down_eDF, self.order.counts_E, weights_R, self.index_R]

    @property
    def used(self) -> int:
        """Rows that belong to an expert."""
        return int(self.order.counts_E.sum())


def draw_batch(experts_TK: Tensor, experts: int, hidden: int, width: int, device: torch.device) -> Batch:
    """In bfloat16 on a GPU; in float32 in the interpreter, which has no bfloat16 products and cuts bfloat16 off."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens, top_k = experts_TK.shape
    order = order_rows(experts_TK, experts)
    weights_R = torch.rand(tokens * top_k) + 0.1
    weights_R[int(order.counts_E.sum()) :] = 0

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    return Batch(
        draw(tokens, hidden),
        draw(experts, 2 * width, hidden) / hidden**0.5,
        draw(experts, hidden, width) / width**0.5,
        weights_R.to(device),
        (order.slots_R // top_k).to(device),
        RowOrder(*(tensor.to(device) for tensor in order)),
        (draw(experts, 2 * width), draw(experts, hidden)),
    )


def refuse(*_: object, **__: object) -> Tensor:
    """Stands for a product that must not be computed."""
    raise AssertionError("computed a gradient that is not needed")


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """What autograd saves meanwhile."""
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        yield saved


def assert_host_does_not_wait(step: Callable[[], None]) -> None:
    step()  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
