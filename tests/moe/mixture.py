"""A small mixture of experts, written out: what dispatchers and orders of rows are compared with."""

import torch
from torch import Tensor

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
