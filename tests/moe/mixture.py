"""A small mixture of experts: written out token by token, and as a problem that many ranks solve together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.operators import REFERENCE
from penstock.layout.experts import ExpertPlacement
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.local import LocalDispatcher
from penstock.moe.routing import Routing

D, F = 8, 8


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
    """One layer's problem, of all ranks together. Its matrices are `weights_of`.

    Attributes:
        placement: of its experts.
        x_TD: tokens, divided evenly among the places.
        weights_TK: of their choices; zero where a slot was dropped.
        experts_TK: the choices.
        direction_TD: gradient of the output.
    """

    placement: ExpertPlacement
    x_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor
    direction_TD: Tensor

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """Of all experts."""
        gate_up_eFD, down_eDF = weights_of(self.placement.experts)
        return gate_up_eFD.detach(), down_eDF.detach()

    def of(self, place: int) -> "Problem":
        """With the tokens of one place."""
        whole = (self.x_TD, self.weights_TK, self.experts_TK, self.direction_TD)
        return Problem(self.placement, *(tensor.chunk(self.placement.places)[place] for tensor in whole))


def problem(placement: ExpertPlacement, routing: Routing) -> Problem:
    """A routing with tokens and a direction, drawn."""
    T = routing.experts_TK.shape[0]
    return Problem(placement, torch.randn(T, D), routing.weights_TK.detach(), routing.experts_TK, torch.randn(T, D))


def parts_of(matrices: tuple[Tensor, Tensor], place: int, placement: ExpertPlacement) -> tuple[Tensor, Tensor]:
    """What a place holds of the matrices: some experts, and of each its part of the width."""
    own, part, parts = placement.experts_of(place), placement.part_of(place), placement.expert_tensor
    gate_up_eFD, down_eDF = (matrix[own.start : own.stop] for matrix in matrices)
    gate_up_eFD = gate_up_eFD.unflatten(1, (2, parts, -1))[:, :, part].flatten(1, 2)
    return gate_up_eFD, down_eDF.chunk(parts, 2)[part]


def mix(dispatchers: Sequence[Dispatcher], problems: Sequence[Problem], place: int) -> list[list[Tensor]]:
    """Outputs of our tokens, and gradients of x, the weights and our matrices, for each problem.

    All dispatch before the first combines, and their backward passes are one, so all layers are in flight at once.
    """
    flying = []
    for dispatcher, whole in zip(dispatchers, problems, strict=True):
        own = whole.of(place)
        matrices = parts_of(whole.matrices, place, whole.placement)
        leaves = [leaf.clone().requires_grad_() for leaf in (own.x_TD, own.weights_TK, *matrices)]
        flying.append((dispatcher, leaves, *dispatcher.dispatch(leaves[0], Routing(leaves[1], own.experts_TK))))
    outputs = []
    for dispatcher, leaves, rows, receipt in flying:
        y_RD = expert_ffn(
            rows.x_ND, leaves[2], leaves[3], rows.counts_e, rows.weights_R, rows.index_R, places_TK=rows.places_NK
        )
        outputs.append(dispatcher.combine(y_RD, receipt))
    directions = [whole.of(place).direction_TD for whole in problems]
    gradients = iter(torch.autograd.grad(outputs, [leaf for one in flying for leaf in one[1]], directions))
    return [[y_TD.detach(), *(next(gradients) for _ in range(4))] for y_TD in outputs]


def compare(whole: Problem, got: Sequence[Sequence[Tensor]]) -> None:
    """What `mix` gave on every place, with one rank that holds all experts and tokens."""
    placement = whole.placement
    alone = replace(whole, placement=ExpertPlacement(experts=placement.experts))
    y_TD, dx_TD, dweights_TK, *matrices = mix([LocalDispatcher(placement.experts, REFERENCE)], [alone], 0)[0]
    is_kept_TK = whole.experts_TK < placement.experts
    together = [torch.cat([one[index] for one in got]) for index in range(3)]
    torch.testing.assert_close(together[0], y_TD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[1], dx_TD, rtol=1e-4, atol=1e-4, msg=lambda text: f"gradient of x: {text}")
    torch.testing.assert_close(together[2][is_kept_TK], dweights_TK[is_kept_TK], rtol=1e-4, atol=1e-4)
    for place, one in enumerate(got):
        for mine, theirs in zip(one[3:], parts_of((matrices[0], matrices[1]), place, placement), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, msg=f"matrices of place {place}")
