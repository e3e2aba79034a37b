"""Dense SwiGLU feed-forward network, used by the first layers and as shared expert."""

from torch import Tensor, nn

from penstock.kernels.float8.quantized import RowColQuantized
from penstock.models.float8_linear import float8_swiglu_network
from penstock.models.linear import Linear
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.layer_context import LayerContext


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product; in 8 bits all of it as one function.

    Tensor-parallel ranks hold a part of the width each. Every token must pass all of it, so their tokens are gathered
    before and the partial outputs summed and divided after; the order of the tokens between does not matter.

    Args:
        hidden_size: D.
        ffn_size: F.
        layer_context: kernels and ranks.
    """

    def __init__(self, hidden_size: int, ffn_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self.operators = layer_context.operators
        self.axis = layer_context.axes.tensor
        self.gate_up = Linear(hidden_size, 2 * ffn_size, layer_context, split="outputs", blocks=2)
        self.down = Linear(ffn_size, hidden_size, layer_context, split="inputs")

    @property
    def reads_ready(self) -> bool:
        """Whether products read what comes in in 8 bits; what ranks gather they quantize behind that."""
        return self.gate_up.float8 is not None and self.axis.size == 1

    def forward(self, x_TD: Tensor, ready: RowColQuantized | None = None) -> Tensor:
        """Apply to every token. Returns y_TD.

        Args:
            x_TD: our own tokens.
            ready: the same in 8 bits, if they are there.
        """
        if self.gate_up.float8 is None or self.down.float8 is None:
            return self.narrow(self.widen(x_TD, ready))
        x_TD = all_gather(x_TD, self.axis, dim=0)
        y_TD = float8_swiglu_network(x_TD, self.gate_up.float8_weight(), self.down.float8_weight(), ready)
        return reduce_scatter(y_TD, self.axis, dim=0)

    def widen(self, x_TD: Tensor, ready: RowColQuantized | None = None) -> Tensor:
        """Our part of the width, activation included, of the tokens of all tensor-parallel ranks. Returns h_TF."""
        x_TD = all_gather(x_TD, self.axis, dim=0)
        return self.operators.swiglu(self.gate_up(x_TD, ready))

    def narrow(self, h_TF: Tensor) -> Tensor:
        """From there to our own tokens. Returns y_TD."""
        return reduce_scatter(self.down(h_TF), self.axis, dim=0)
