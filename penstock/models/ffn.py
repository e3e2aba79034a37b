"""Dense feed-forward network: the first layers of a model, and the shared expert."""

import torch
from torch import Tensor, nn

from penstock.kernels.float8.quantized import RowColQuantized
from penstock.kernels.reference import SWIGLU, ExpertRule
from penstock.models.float8_linear import float8_network
from penstock.models.linear import Linear
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.layer_context import LayerContext


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), or the activation of `rule`; gate and up in one product, and in float8 all.

    Tensor-parallel ranks divide the width F. Every token passes the whole width, so their tokens are gathered before
    the products, and the partial outputs are reduce-scattered after them.

    With a gate, a sigmoid of the token multiplies the output. It is applied before the second product, which is linear.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        layer_context: LayerContext,
        rule: ExpertRule = SWIGLU,
        *,
        has_gate: bool = False,
    ) -> None:
        super().__init__()
        self.rule = rule
        self.operators = layer_context.operators
        self.axis = layer_context.axes.tensor
        parts = rule.projections
        self.gate_up = Linear(hidden_size, parts * ffn_size, layer_context, split="outputs", blocks=parts)
        self.down = Linear(ffn_size, hidden_size, layer_context, split="inputs")
        self.gate = Linear(hidden_size, 1, layer_context) if has_gate else None

    @property
    def reads_float8(self) -> bool:
        """Whether products read a float8 input; gathered tokens are quantized after the collective instead."""
        return self.gate_up.float8 is not None and self.axis.size == 1

    def forward(self, x_TD: Tensor, x_float8: RowColQuantized | None = None) -> Tensor:
        """Apply to every token. Returns y_TD; `x_float8` is a quantized copy of x, if there is one."""
        if self.gate_up.float8 is None or self.down.float8 is None or self.gate is not None:
            return self.narrow(self.widen(x_TD, x_float8))
        x_TD = all_gather(x_TD, self.axis, dim=0)  # tokens of all tensor ranks
        weights = self.gate_up.float8_weight(), self.down.float8_weight()
        y_TD = float8_network(x_TD, *weights, x_float8, self.rule)
        return reduce_scatter(y_TD, self.axis, dim=0)

    def widen(self, x_TD: Tensor, x_float8: RowColQuantized | None = None) -> Tensor:
        """The first product and the activation: this rank's part of h_TF, for the tokens of all tensor ranks."""
        x_TD = all_gather(x_TD, self.axis, dim=0)  # tokens of all tensor ranks
        wide_TF = self.gate_up(x_TD, x_float8)  # T x 2F, then T x F
        if self.gate is None:
            return self.operators.swiglu(wide_TF, None, self.rule)
        return self.operators.swiglu(wide_TF, torch.sigmoid(self.gate(x_TD).float())[:, 0], self.rule)

    def narrow(self, h_TF: Tensor) -> Tensor:
        """The second product, reduced to this rank's own tokens. Returns y_TD."""
        return reduce_scatter(self.down(h_TF), self.axis, dim=0)
