"""QK-clip (Kimi-K2, arXiv 2507.20534 section 2.1): after an update, weights of heads with large logits shrink.

A head whose largest logit of the step is m > t has its queries and keys multiplied by factors whose product is t / m:

    latent attention    plain parts: the root of t / m each; rotary queries: t / m, because all heads share the key
    grouped queries     the root of t / m each, with the largest m of the heads that share a key

The logits cost one more product of queries and keys in each pass, because attention kernels do not return them.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.kernels.attention import largest_logits
from penstock.models.linear import cut_over
from penstock.moe.balance import StepMeter
from penstock.parallel.axes import Axis
from penstock.parallel.layer_context import LayerContext


class LogitMeter(StepMeter):
    """The largest logits of this rank's heads."""

    largest_H: Tensor  # float32, the same tensor for the whole run

    def __init__(self, heads: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("largest_H", torch.full((heads,), -torch.inf, device=device), persistent=False)

    def reset(self) -> None:
        self.largest_H.fill_(-torch.inf)

    @torch.no_grad()
    def see(self, q_BSHN: Tensor, k_BSGN: Tensor, scale: float, allowed_BSS: Tensor | None) -> None:
        """Take queries and keys of a pass. Seeing them twice, as recomputation does, changes nothing."""
        largest_H = largest_logits(q_BSHN, k_BSGN, scale, allowed_BSS)
        self.largest_H.copy_(torch.maximum(self.largest_H, largest_H))


class SoftmaxAttention(nn.Module):
    """Attention by a softmax over keys; each tensor-parallel rank holds some heads."""

    def __init__(self, layer_context: LayerContext, heads: int, scale: float, *, sinks: bool) -> None:
        super().__init__()
        axis = layer_context.axes.tensor
        self.layer_context = layer_context
        self.heads = heads // axis.size  # of this rank
        self.scale = scale  # of scores
        self.logits: LogitMeter | None = None  # of QK-clip
        self.cuts = {"sinks_H": cut_over(axis, dim=0)}
        self.sinks_H = nn.Parameter(torch.empty(self.heads)) if sinks else None  # one softmax logit for each head

    def clip_factors(self, factor_H: Tensor) -> dict[str, Tensor]:
        """Factors of rows of weights and biases, by parameter, so that the logits of heads are multiplied."""
        raise NotImplementedError


def _layers(decoders: Iterable[nn.Module]) -> Iterator[tuple[str, SoftmaxAttention]]:
    for decoder in decoders:
        for path, module in decoder.named_modules():
            if isinstance(module, SoftmaxAttention):
                yield path, module


def measure_logits(decoders: Iterable[nn.Module], device: torch.device) -> None:
    """Let all layers with softmax attention measure their logits."""
    for _, layer in _layers(decoders):
        layer.logits = LogitMeter(layer.heads, device)


@torch.no_grad()
def clip_factors(decoders: Iterable[nn.Module], limit: float, data: Axis) -> dict[str, Tensor]:
    """Factors of the rows of weights and biases on this rank, by parameter, after the passes of a step.

    `data` are ranks that train on other tokens with the same heads; they call it together.
    """
    factors: dict[str, Tensor] = {}
    for path, layer in _layers(decoders):
        if layer.logits is None:
            continue
        largest_H = layer.logits.largest_H.clone()
        if data.group is not None:
            dist.all_reduce(largest_H, dist.ReduceOp.MAX, group=data.group)
        factor_H = (limit / largest_H.clamp(min=limit)).float()  # 1 below the limit
        factors |= {f"{path}.{name}": rows for name, rows in layer.clip_factors(factor_H).items()}
    return factors


def factors_of_rows(*parts: tuple[Tensor, int]) -> Tensor:
    """Factors of rows: in each head, so many rows for each of its parts."""
    return torch.cat([factor_H[:, None].expand(-1, width) for factor_H, width in parts], dim=1).flatten()
