"""Several residual streams: manifold-constrained hyper-connections (arXiv 2512.24880), as in DeepSeek-V4.

The streams of a position lie side by side, A of width D. Before attention, and before the feed-forward network:

    mixes = rms(x) weight^T                          of all streams together; scaled and shifted by learned numbers
    reads_A, writes_A = sigmoid, 2 sigmoid of them   and carries_AA, whose rows and columns sum to 1
    input_D = reads_A x_AD
    x_AD <- carries_AA^T x_AD + writes_A output_D

Behind the last layer `reads` alone makes one stream again. Weights and mixes are float32. The steps that balance rows
and columns run again in backward: they would save more than the streams of a narrow model.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.spans import Span
from penstock.config.model import HyperConnections
from penstock.kernels.float32_products import float32_linear
from penstock.kernels.sinkhorn import balanced
from penstock.parallel.recompute import recomputed
from penstock.parallel.spans import span


class Connection(NamedTuple):
    """The streams before a network, and how its output joins them; all without the output."""

    x_BSD: Tensor  # all streams side by side, A x D wide
    writes_BSA: Tensor  # float32
    carries_BSAA: Tensor  # float32, from the first A to the second

    def joined(self, y_BSD: Tensor) -> Tensor:
        """The streams behind the network, of which y is the output."""
        carries_BSAA, writes_BSA = self.carries_BSAA.to(y_BSD.dtype), self.writes_BSA.to(y_BSD.dtype)
        x_BSAD = self.x_BSD.unflatten(-1, (writes_BSA.shape[-1], -1))
        x_BSAD = torch.addcmul(carries_BSAA.mT @ x_BSAD, writes_BSA[..., None], y_BSD[..., None, :])
        # No view, with which FSDP2's hooks on a layer's output would not survive an operator in place.
        x_BSD: Tensor = torch.ops.aten._unsafe_view(x_BSAD, self.x_BSD.shape)
        return x_BSD


class StreamMixer(nn.Module):
    """Weights by which the streams of a position become one; before a network also those of its `Connection`."""

    def __init__(
        self, config: HyperConnections, hidden_size: int, *, rms_epsilon: float, only_reads: bool = False
    ) -> None:
        super().__init__()
        self.streams, self.epsilon, self.rms_epsilon = config.streams, config.epsilon, rms_epsilon
        self.sinkhorn_iters = config.sinkhorn_iters
        self.widths = (self.streams,) if only_reads else (self.streams, self.streams, self.streams**2)
        rows, columns = sum(self.widths), self.streams * hidden_size
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(rows, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(len(self.widths), dtype=torch.float32))

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One stream of B x S x A D, in its dtype, and what `Connection` has beside the streams."""
        with span(Span.RESIDUAL):
            x_TD = x_BSD.flatten(0, -2)
            # Saves x and one number of each position, where squares in float32 would be saved whole.
            norm_T1 = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True, dtype=torch.float32)
            scale_T1 = torch.rsqrt(norm_T1.square() / x_TD.shape[-1] + self.rms_epsilon)
            mixes = (float32_linear(x_TD, self.weight) * scale_T1).unflatten(0, x_BSD.shape[:-1])
            reads_BSA, *rest = recomputed(self._constrained, mixes, self.bias, self.scale)
            x_BSAD = x_BSD.unflatten(-1, (self.streams, -1))
            return (reads_BSA[..., None] * x_BSAD).sum(-2).to(x_BSD.dtype), tuple(rest)

    def _constrained(self, mixes: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """`reads`, `writes` and `carries` of the mixes of a position, B x S x their `widths`."""
        parts = zip(mixes.split(self.widths, -1), bias.split(self.widths), scale, strict=True)
        reads, *rest = (part * factor + shift for part, shift, factor in parts)
        reads = torch.sigmoid(reads) + self.epsilon
        if not rest:
            return (reads,)
        writes, carries = rest
        carries_BSAA = balanced(carries.unflatten(-1, (self.streams, -1)), self.sinkhorn_iters, self.epsilon)
        return reads, 2 * torch.sigmoid(writes), carries_BSAA
