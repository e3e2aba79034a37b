"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Depth k sees the hidden states of depth k - 1 (the main model's, after its final norm, for k = 1) and the embedding of
the token k further on; it joins the two, runs one more decoder layer and predicts the token after that one. Embedding
and output projection are the main model's. The last k positions of a row have no such token: their labels are not
counted.
"""

import torch
from torch import Tensor, nn

from penstock.models.block import Block
from penstock.models.linear import Linear
from penstock.models.model_inputs import ForwardContext
from penstock.models.norm import RMSNorm
from penstock.parallel.layer_context import LayerContext


class MultiTokenPrediction(nn.Module):
    """One depth of multi-token prediction.

    Args:
        hidden_size: D.
        epsilon: of its three norms.
        block: the decoder layer of this depth.
        layer_context: kernels and ranks.
    """

    def __init__(self, hidden_size: int, epsilon: float, block: Block, layer_context: LayerContext) -> None:
        super().__init__()
        self.embed_norm = RMSNorm(hidden_size, epsilon, layer_context.operators)
        self.hidden_norm = RMSNorm(hidden_size, epsilon, layer_context.operators)
        self.join = Linear(2 * hidden_size, hidden_size, layer_context)
        self.block = block
        self.norm = RMSNorm(hidden_size, epsilon, layer_context.operators)

    def forward(self, previous_BSD: Tensor, ahead_BSD: Tensor, frame: ForwardContext) -> Tensor:
        """Predict one token further.

        Args:
            previous_BSD: hidden states of the depth before.
            ahead_BSD: embeddings of the tokens k further on.
            frame: the micro-batch.

        Returns:
            Hidden states after this depth's norm.
        """
        joined_BSD = self.join(torch.cat((self.embed_norm(ahead_BSD), self.hidden_norm(previous_BSD)), dim=-1))
        out_BSD: Tensor = self.norm(self.block(joined_BSD, frame))
        return out_BSD
