"""Dense SwiGLU feed-forward network, used by the first layers and as shared expert."""

from torch import Tensor, nn

from penstock.kernels.operators import Operators


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product.

    Args:
        hidden_size: D.
        ffn_size: F.
        operators: kernels to run on.
    """

    def __init__(self, hidden_size: int, ffn_size: int, operators: Operators) -> None:
        super().__init__()
        self.operators = operators
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Apply to every token. Returns y_TD."""
        y_TD: Tensor = self.down(self.operators.swiglu(self.gate_up(x_TD)))
        return y_TD
