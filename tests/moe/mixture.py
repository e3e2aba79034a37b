"""A small mixture of experts: written out token by token, and as a problem that many ranks solve together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.float8.reference import dequantize
from penstock.kernels.operators import REFERENCE
from penstock.kernels.reference import SWIGLU, ExpertRule
from penstock.layout.experts import ExpertPlacement
from penstock.moe.dispatch.contract import Dispatcher, ExpertRows, LocalDispatcher
from penstock.moe.routing import Routing
from tests.closeness import assert_close

D, F = 8, 8

Family = Literal["plain", "gpt-oss", "llama4"]
RULES = {
    "plain": SWIGLU,
    "gpt-oss": ExpertRule(limit=1.0, alpha=1.702),
    "llama4": ExpertRule(weighs_input=True),
}
"""Experts of gpt-oss have biases besides."""


def random_routing(tokens: int, experts: int, top_k: int, seed: int, dropped: float = 0.0) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.rand(tokens, experts, generator=generator)
    experts_TK = scores_TE.topk(top_k).indices
    weights_TK = torch.rand(tokens, top_k, generator=generator)
    drop_TK = torch.rand(tokens, top_k, generator=generator) < dropped
    return Routing(weights_TK.masked_fill(drop_TK, 0).requires_grad_(), experts_TK.masked_fill(drop_TK, experts))


def weights_of(experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    gate_up_eFD = torch.randn(experts, 2 * F, D, generator=generator, requires_grad=True)
    return gate_up_eFD, torch.randn(experts, D, F, generator=generator, requires_grad=True)


def token_by_token(x_TD: Tensor, routing: Routing, gate_up_eFD: Tensor, down_eDF: Tensor) -> Tensor:
    """The mixture, written out: each token through each of its experts alone."""
    rows = []
    for token in range(x_TD.shape[0]):
        row = x_TD[token] * 0
        for expert, weight in zip(routing.experts_TK[token].tolist(), routing.weights_TK[token], strict=True):
            if expert < gate_up_eFD.shape[0]:
                gate, up = (gate_up_eFD[expert] @ x_TD[token]).chunk(2)
                row = row + weight * (down_eDF[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@dataclass(frozen=True)
class Problem:
    """One layer's problem, of all ranks together. Its matrices are `weights_of`, its biases `biases_of`.

    Attributes:
        x_TD: tokens, divided evenly among the places.
        weights_TK: of their choices; zero where a slot was dropped.
        direction_TD: gradient of the output.
    """

    placement: ExpertPlacement
    x_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor
    direction_TD: Tensor
    family: Family = "plain"

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Of all experts: matrices, and biases if there are such."""
        experts = self.placement.experts
        biases = biases_of(experts) if self.family == "gpt-oss" else ()
        return tuple(one.detach() for one in (*weights_of(experts), *biases))

    def of(self, place: int) -> "Problem":
        """With the tokens of one place."""
        whole = (self.x_TD, self.weights_TK, self.experts_TK, self.direction_TD)
        own = (tensor.chunk(self.placement.places)[place] for tensor in whole)
        return Problem(self.placement, *own, family=self.family)


def biases_of(experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(12)
    return torch.randn(experts, 2 * F, generator=generator), torch.randn(experts, D, generator=generator)


def problem(placement: ExpertPlacement, routing: Routing, family: Family = "plain") -> Problem:
    """A routing with tokens and a direction, drawn."""
    T = routing.experts_TK.shape[0]
    weights_TK, experts_TK = routing.weights_TK.detach(), routing.experts_TK
    return Problem(placement, torch.randn(T, D), weights_TK, experts_TK, torch.randn(T, D), family)


def parts_of(parameters: Sequence[Tensor], place: int, placement: ExpertPlacement) -> list[Tensor]:
    """What a place holds: some experts, and of each its part of the width; the last bias with the first part only."""
    own, part, parts = placement.experts_of(place), place % placement.expert_tensor, placement.expert_tensor
    gate_up_eFD, down_eDF, *biases = (parameter[own.start : own.stop] for parameter in parameters)

    def cut(gate_up: Tensor) -> Tensor:
        return gate_up.unflatten(1, (2, parts, -1))[:, :, part].flatten(1, 2)

    held = [cut(gate_up_eFD), down_eDF.chunk(parts, 2)[part]]
    return held + [cut(bias) for bias in biases[:1]] + ([] if part else biases[1:])


def mix(dispatchers: Sequence[Dispatcher], problems: Sequence[Problem], place: int) -> list[list[Tensor]]:
    """Outputs of our tokens, and gradients of x, the weights and our matrices, for each problem.

    All dispatch before the first combines, and their backward passes are one, so all layers are in flight at once.
    """
    flying = []
    for dispatcher, whole in zip(dispatchers, problems, strict=True):
        own = whole.of(place)
        parameters = parts_of(whole.parameters, place, whole.placement)
        leaves = [leaf.clone().requires_grad_() for leaf in (own.x_TD, own.weights_TK, *parameters)]
        sent = dispatcher.dispatch(leaves[0], Routing(leaves[1], own.experts_TK))
        flying.append((dispatcher, leaves, RULES[whole.family], *sent))
    outputs = []
    for dispatcher, leaves, rule, rows, metadata in flying:
        _, _, gate_up_eFD, down_eDF, *held = leaves
        biases = (held[0], held[1] if len(held) > 1 else None) if held else None
        rest = rows.counts_e, rows.weights_R, rows.index_R
        options = {"places_TK": rows.places_NK, "biases": biases, "rule": rule}
        outputs.append(dispatcher.combine(expert_ffn(read(rows), gate_up_eFD, down_eDF, *rest, **options), metadata))
    directions = [whole.of(place).direction_TD for whole in problems]
    gradients = iter(torch.autograd.grad(outputs, [leaf for one in flying for leaf in one[1]], directions))
    return [
        [y_TD.detach(), *(next(gradients) for _ in leaves)]
        for y_TD, (_, leaves, *_) in zip(outputs, flying, strict=True)
    ]


def read(rows: ExpertRows) -> Tensor:
    """The rows' numbers, whatever they came in."""
    return rows.x_ND if rows.quantized is None else _Read.apply(rows.x_ND, rows.quantized)


class _Read(torch.autograd.Function):
    """What experts that multiply 8 bits do: they read those, and give the gradient to what carries it."""

    @staticmethod
    def forward(ctx: Any, carrier_ND: Tensor, quantized: Quantized) -> Tensor:
        return dequantize(quantized).to(carrier_ND.dtype)

    @staticmethod
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, None]:
        return gradient_ND, None


def compare(whole: Problem, got: Sequence[Sequence[Tensor]]) -> None:
    """What `mix` gave on every place, with one rank that holds all experts and tokens."""
    placement = whole.placement
    alone = replace(whole, placement=ExpertPlacement(experts=placement.experts))
    y_TD, dx_TD, dweights_TK, *parameters = mix([LocalDispatcher(placement.experts, REFERENCE)], [alone], 0)[0]
    is_kept_TK = whole.experts_TK < placement.experts
    together = [torch.cat([one[index] for one in got]) for index in range(3)]
    assert_close(together[0], y_TD, tolerance=1e-4)
    assert_close(together[1], dx_TD, tolerance=1e-4, what="gradient of x")
    assert_close(together[2][is_kept_TK], dweights_TK[is_kept_TK], tolerance=1e-4)
    for place, one in enumerate(got):
        for mine, theirs in zip(one[3:], parts_of(parameters, place, placement), strict=True):
            assert_close(mine, theirs, tolerance=1e-4, what=f"parameters of place {place}")
