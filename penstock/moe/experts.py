"""Routed experts: one SwiGLU network for each, held as two stacked matrices so that one launch serves all."""

from functools import partial

import torch
from torch import Tensor, nn

from penstock.layout.pieces import Cut, local_shape
from penstock.moe.dispatch.contract import ExpertRows
from penstock.parallel.kit import Kit
from penstock.parallel.later import deferrable


class Experts(nn.Module):
    """The experts that this rank holds, or its part of each of them.

    Args:
        experts: of the whole layer, E.
        hidden_size: D.
        ffn_size: width of a whole expert, F.
        kit: kernels, and the ranks that share the experts.

    Attributes:
        sums: float32 sums of the gradients of `gate_up_eFD` and `down_eDF`, for backward to add to instead of giving
            gradients to autograd; None leaves that to autograd. Set by whoever owns the sums.
    """

    sums: tuple[Tensor, Tensor] | None = None

    def __init__(self, experts: int, hidden_size: int, ffn_size: int, kit: Kit) -> None:
        super().__init__()
        self.operators = kit.operators
        self.later = kit.later
        grid = kit.axes.grid
        group, part = divmod(kit.axes.expert.rank, grid.expert_tensor)
        of_experts = () if grid.expert == 1 else (Cut(0, group, grid.expert),)
        of_gate_up = () if grid.expert_tensor == 1 else (Cut(1, part, grid.expert_tensor, blocks=2),)
        of_down = () if grid.expert_tensor == 1 else (Cut(2, part, grid.expert_tensor),)
        self.cuts = {"gate_up_eFD": of_experts + of_gate_up, "down_eDF": of_experts + of_down}
        gate_up, down = (experts, 2 * ffn_size, hidden_size), (experts, hidden_size, ffn_size)
        self.gate_up_eFD = nn.Parameter(torch.empty(local_shape(gate_up, self.cuts["gate_up_eFD"])))
        self.down_eDF = nn.Parameter(torch.empty(local_shape(down, self.cuts["down_eDF"])))

    def forward(self, rows: ExpertRows, *, recompute: bool = False) -> Tensor:
        """Apply each expert to its rows, times their routing weights.

        Args:
            rows: what the dispatcher brought.
            recompute: keep no pre-activation; only of operators that do this by themselves.

        Returns:
            y_RD in the dtype of the rows.
        """
        function = partial(self._ffn, rows, recompute)
        return deferrable(function, (rows.x_ND, rows.weights_R), (self.gate_up_eFD, self.down_eDF), self.later)

    def _ffn(
        self,
        rows: ExpertRows,
        recompute: bool,
        x_ND: Tensor,
        weights_R: Tensor,
        gate_up_eFD: Tensor,
        down_eDF: Tensor,
    ) -> Tensor:
        ffn = self.operators.expert_ffn
        if self.operators.expert_ffn_is_ours:
            # Deferred gradients go through autograd: a kernel that adds them up would do so too early.
            ffn = partial(ffn, recompute=recompute, accumulate_into=None if self.later else self.sums)
        return ffn(x_ND, gate_up_eFD, down_eDF, rows.counts_e, weights_R, rows.index_R, places_TK=rows.places_NK)
