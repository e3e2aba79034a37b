"""Routings that a dispatcher must survive, and a layer whose numbers are all whole, so that right means equal."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.moe.balance import Routing
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.symmetric import SymmetricDispatcher
from penstock.parallel.axes import Axis

KINDS = ("even", "skewed", "all on the last rank", "one expert", "some dropped", "all dropped", "one sender")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides the cost; letters as in penstock/base/shapes.py."""

    name: str
    D: int
    E: int
    K: int


V2_LITE = Shape(name="V2-Lite", D=2048, E=64, K=6)
V3 = Shape(name="V3", D=7168, E=256, K=8)
SMALL = Shape(name="small", D=512, E=16, K=4)


def choices(kind: str, shape: Shape, tokens: int, axis: Axis, device: torch.device, seed: int = 0) -> Tensor:
    """Choices of our tokens; the number of experts is a dropped slot."""
    generator = torch.Generator(device).manual_seed(seed * axis.size + axis.rank)
    scores_TE = torch.rand(tokens, shape.E, generator=generator, device=device)
    if kind == "skewed":
        # Gumbel noise on a load that falls by e over a quarter of the experts.
        scores_TE = -(-scores_TE.clamp(1e-9, 1 - 1e-7).log()).log()
        scores_TE -= torch.arange(shape.E, device=device) / (shape.E / 4)
    if kind == "all on the last rank":
        scores_TE[:, : -(shape.E // axis.size)] -= 2
    experts_TK = scores_TE.topk(shape.K).indices
    drop_TK = torch.zeros_like(experts_TK, dtype=torch.bool)
    if kind == "one expert":
        experts_TK[:, 0] = 1
        drop_TK[:, 1:] = True
    if kind == "some dropped":
        drop_TK = torch.rand(experts_TK.shape, generator=generator, device=device) < 0.4
    if kind == "all dropped":
        drop_TK[:] = True
    if kind == "one sender":
        drop_TK[:] = axis.rank != 0
    return experts_TK.masked_fill(drop_TK, shape.E)


@dataclass(frozen=True, kw_only=True)
class Exact:
    """One layer in whole numbers: expert i multiplies by i % 3 + 1 and by the weight, 1 or 2; no sum is rounded."""

    x_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor
    direction_TD: Tensor
    experts: int

    @staticmethod
    def draw(shape: Shape, experts_TK: Tensor) -> "Exact":
        small = [torch.randint(-4, 5, (len(experts_TK), shape.D), device=experts_TK.device).float() for _ in range(2)]
        weights_TK = torch.randint(1, 3, experts_TK.shape, device=experts_TK.device).float()
        weights_TK = weights_TK.masked_fill(experts_TK == shape.E, 0)
        leaves = {"x_TD": small[0].requires_grad_(), "weights_TK": weights_TK.requires_grad_()}
        return Exact(**leaves, experts_TK=experts_TK, direction_TD=small[1], experts=shape.E)

    def begin(self, dispatcher: Dispatcher, first: int) -> Callable[[], Tensor]:
        """Dispatch; the function that is returned does the rest."""
        rows, metadata = dispatcher.dispatch(self.x_TD, Routing(self.weights_TK, self.experts_TK))
        slot_R = torch.arange(len(rows.weights_R), device=rows.x_ND.device)
        ends_e = rows.counts_e.cumsum(0)
        expert_R = torch.searchsorted(ends_e, slot_R, right=True).clamp(max=len(ends_e) - 1)
        factor_R = (expert_R + first) % 3 + 1.0
        used_R1 = (slot_R < ends_e[-1])[:, None]
        y_RD = torch.where(used_R1, rows.x_ND[rows.index_R] * (rows.weights_R * factor_R)[:, None], 0)
        return lambda: dispatcher.combine(y_RD, metadata)

    def wrong(self, y_TD: Tensor, dx_TD: Tensor, dweights_TK: Tensor) -> Tensor:
        """How many numbers are not what they must be; stays on the device."""
        factor_TK = (self.experts_TK % 3 + 1.0) * (self.experts_TK < self.experts)
        scale_T1 = (self.weights_TK * factor_TK).sum(1, keepdim=True)
        dot_T1 = (self.x_TD * self.direction_TD).sum(1, keepdim=True)
        pairs = [(y_TD, self.x_TD * scale_T1), (dx_TD, self.direction_TD * scale_T1), (dweights_TK, dot_T1 * factor_TK)]
        return sum((result != truth).sum() for result, truth in pairs)


def wrong_numbers(dispatcher: SymmetricDispatcher, layers: list[Exact]) -> Tensor:
    """Forward and backward of layers that are all in flight at once; how many numbers are wrong."""
    first = dispatcher.placement.experts_of(dispatcher.transport.buffers.peers.rank).start
    outputs = [finish() for finish in [layer.begin(dispatcher, first) for layer in layers]]
    leaves = [leaf for layer in layers for leaf in (layer.x_TD, layer.weights_TK)]
    gradients = torch.autograd.grad(outputs, leaves, [layer.direction_TD for layer in layers])
    parts = zip(layers, outputs, gradients[::2], gradients[1::2], strict=True)
    return sum(layer.wrong(*results) for layer, *results in parts)
