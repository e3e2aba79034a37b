"""Dense SwiGLU feed-forward network, used by the first layers and as shared expert."""

from torch import Tensor, nn

from penstock.models.linear import Linear
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.kit import Kit


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product.

    Tensor-parallel ranks hold a part of the width each. Every token must pass all of it, so their tokens are gathered
    before and the partial outputs summed and divided after; the order of the tokens between does not matter.

    Args:
        hidden_size: D.
        ffn_size: F.
        kit: kernels and ranks.
    """

    def __init__(self, hidden_size: int, ffn_size: int, kit: Kit) -> None:
        super().__init__()
        self.operators = kit.operators
        self.axis = kit.axes.tensor
        self.gate_up = Linear(hidden_size, 2 * ffn_size, kit, split="outputs", blocks=2)
        self.down = Linear(ffn_size, hidden_size, kit, split="inputs")

    def forward(self, x_TD: Tensor) -> Tensor:
        """Apply to every token. Returns y_TD."""
        return self.narrow(self.widen(x_TD))

    def widen(self, x_TD: Tensor) -> Tensor:
        """Our part of the width, activation included, of the tokens of all tensor-parallel ranks. Returns h_TF."""
        x_TD = all_gather(x_TD, self.axis, dim=0)
        return self.operators.swiglu(self.gate_up(x_TD))

    def narrow(self, h_TF: Tensor) -> Tensor:
        """From there to our own tokens. Returns y_TD."""
        return reduce_scatter(self.down(h_TF), self.axis, dim=0)
