"""QK-clip (Kimi-K2, arXiv 2507.20534 section 2.1): after an update, weights of heads with large logits shrink.

A head whose largest logit of the step is m > t has its queries and keys multiplied by factors whose product is t / m:

    latent attention    plain parts: the root of t / m each; rotary queries: t / m, because all heads share the key
    grouped queries     the root of t / m each, with the largest m of the heads that share a key

Layers keep the largest logits of their heads on this rank (`LogitMeter`). They cost one more product of queries and
keys in each pass, because attention kernels do not return them.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.models.attention import GroupedQueryLayer
from penstock.models.logits import LogitMeter
from penstock.models.mla import LatentLayer, LatentQuery
from penstock.parallel.axes import Axis

Layer = GroupedQueryLayer | LatentLayer


def _layers(decoders: Iterable[nn.Module]) -> Iterator[tuple[str, Layer]]:
    for decoder in decoders:
        for path, module in decoder.named_modules():
            if isinstance(module, GroupedQueryLayer | LatentLayer):
                yield path, module


def measure_logits(decoders: Iterable[nn.Module], device: torch.device) -> None:
    """Let all layers with attention measure their logits."""
    for _, layer in _layers(decoders):
        layer.logits = LogitMeter(torch.full((layer.heads,), -torch.inf, device=device))


def reset_logits(decoders: Iterable[nn.Module]) -> None:
    """Begin a step."""
    for _, layer in _layers(decoders):
        if layer.logits is not None:
            layer.logits.largest_H.fill_(-torch.inf)


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
        if isinstance(layer, LatentLayer):
            of_layer = _of_latent(layer, largest_H, limit)
        else:
            of_layer = _of_groups(layer, largest_H, limit)
        factors |= {f"{path}.{name}": rows for name, rows in of_layer.items()}
    return factors


def _of_latent(layer: LatentLayer, largest_H: Tensor, limit: float) -> dict[str, Tensor]:
    config, factor_H = layer.config, _factor(largest_H, limit)
    plain, ones = factor_H.sqrt(), torch.ones_like(factor_H)
    queries = _rows((plain, config.qk_nope_head_dim), (factor_H, config.qk_rope_head_dim))
    query = "query.up.weight" if isinstance(layer.query, LatentQuery) else "query.weight"
    return {query: queries, "kv_up.weight": _rows((plain, config.qk_nope_head_dim), (ones, config.v_head_dim))}


def _of_groups(layer: GroupedQueryLayer, largest_H: Tensor, limit: float) -> dict[str, Tensor]:
    config = layer.config
    group = config.heads // config.kv_heads
    factor_G = _factor(largest_H.view(-1, group).amax(1), limit).sqrt()
    factor_H = factor_G.repeat_interleave(group)
    gates = ((torch.ones_like(factor_H), config.head_dim),) if config.output_gate else ()
    factors = {"query": _rows((factor_H, config.head_dim), *gates), "key": _rows((factor_G, config.head_dim))}
    kinds = ("weight", "bias") if layer.query.bias is not None else ("weight",)
    return {f"{name}.{kind}": rows for name, rows in factors.items() for kind in kinds}


def _factor(largest: Tensor, limit: float) -> Tensor:
    return (limit / largest.clamp(min=limit)).float()  # 1 below the limit


def _rows(*parts: tuple[Tensor, int]) -> Tensor:
    """Factors of rows: in each head, so many rows for each of its parts."""
    return torch.cat([factor_H[:, None].expand(-1, width) for factor_H, width in parts], dim=1).flatten()
