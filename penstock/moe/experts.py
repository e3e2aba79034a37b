"""Routed experts: one SwiGLU network for each, held as two stacked matrices so that one launch serves all."""

import torch
from torch import Tensor, nn

from penstock.kernels.operators import Operators
from penstock.moe.dispatch.contract import ExpertRows


class Experts(nn.Module):
    """The experts that this rank holds.

    Args:
        experts: how many, e.
        hidden_size: D.
        ffn_size: F.
        operators: kernels to run on.
    """

    def __init__(self, experts: int, hidden_size: int, ffn_size: int, operators: Operators) -> None:
        super().__init__()
        self.operators = operators
        self.gate_up_eFD = nn.Parameter(torch.empty(experts, 2 * ffn_size, hidden_size))
        self.down_eDF = nn.Parameter(torch.empty(experts, hidden_size, ffn_size))

    def forward(self, rows: ExpertRows) -> Tensor:
        """Apply each expert to its rows, times their routing weights. Returns y_RD in the dtype of the rows."""
        return self.operators.expert_ffn(
            rows.x_ND,
            self.gate_up_eFD,
            self.down_eDF,
            rows.counts_e,
            rows.weights_R,
            rows.index_R,
            places_TK=rows.places_NK,
        )
