"""The inputs of a forward pass, and what every layer derives from them, angles of rotary embedding among it.

Built once per pass, immutable.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.config.model import Llama3Rope, Rope, Yarn
from penstock.kernels.bounded_attention import AttentionBounds
from penstock.moe.balance import Scope
from penstock.parallel.context import LocalMask
from penstock.parallel.graphs import PartialGraphs

# Angles of rotary position embedding, with the context extensions of YaRN and of Llama 3.1.
#
# Both divide low frequencies by a factor (they would reach angles never seen in pretraining), keep high ones, and
# interpolate between: YaRN (arXiv 2309.00071, section 3.2) by the index of the pair, Llama 3.1 by the number of
# rotations over the original context. YaRN also scales attention by a temperature that grows with the logarithm of the
# factor.


def frequencies(rope: Rope, rotary_dim: int, device: torch.device) -> Tensor:
    """Angle per position of each pair, float32, rotary_dim / 2 of them, fastest first."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    plain = rope.theta**-exponents / rope.linear
    if rope.llama3 is not None:
        return _by_turns(plain, rope.llama3)
    if rope.yarn is None:
        return plain
    low = _pair_that_turns(rope.yarn.beta_fast, rope, rope.yarn, rotary_dim)
    high = _pair_that_turns(rope.yarn.beta_slow, rope, rope.yarn, rotary_dim)
    if rope.yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    first, last = max(low, 0), min(high, rotary_dim - 1)
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device=device)
    # 0 for fast pairs, 1 for slow ones; 0.001 against a division by zero, as in the published code
    interpolated = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return plain / rope.yarn.factor * interpolated + plain * (1 - interpolated)


def _by_turns(plain: Tensor, llama3: Llama3Rope) -> Tensor:
    """Keep frequencies with many rotations over the original context, and divide those with few."""
    turns = plain * (llama3.original_max_position_embeddings / (2 * math.pi))
    kept = ((turns - llama3.low_freq_factor) / (llama3.high_freq_factor - llama3.low_freq_factor)).clamp(0, 1)
    return plain / llama3.factor * (1 - kept) + plain * kept


def _pair_that_turns(rotations: float, rope: Rope, yarn: Yarn, rotary_dim: int) -> float:
    """Fractional index of the pair that makes so many rotations over the original context."""
    inverse_frequency = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
    return rotary_dim * math.log(inverse_frequency) / (2 * math.log(rope.theta))


def _temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def softmax_scale(rope: Rope, head_dim: int) -> float:
    """Factor on attention scores: 1 / sqrt(head_dim), times the square of YaRN's temperature for all dims."""
    if rope.yarn is None or not rope.yarn.mscale_all_dim:
        return head_dim**-0.5
    return head_dim**-0.5 * _temperature(rope.yarn.factor, rope.yarn.mscale_all_dim) ** 2


def angles(rope: Rope, rotary_dim: int, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every pair at every position, float32, B x S x rotary_dim / 2 each."""
    angles_BSP = positions_BS[..., None].float() * frequencies(rope, rotary_dim, positions_BS.device)
    scale = 1.0
    if (yarn := rope.yarn) is not None:  # 1 too where both of YaRN's scales are equal
        scale = _temperature(yarn.factor, yarn.mscale) / _temperature(yarn.factor, yarn.mscale_all_dim)
    return angles_BSP.cos() * scale, angles_BSP.sin() * scale


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """A micro-batch as one rank reads it. Under context parallelism S is the number of positions on this rank."""

    tokens_BS: Tensor  # int64 ids
    positions_BS: Tensor  # int64, for the rotary embedding
    ahead: tuple[Tensor, ...] = ()  # tokens_BS for each multi-token prediction depth, shifted by 1, 2, ... positions
    documents_BS: Tensor | None = None  # int64 document of each position of whole rows; None lets attention cross them
    query_positions_S: Tensor | None = None  # int64 positions of the row with queries on this rank; None for all
    share: float = 1.0  # of this micro-batch in the global batch; scales auxiliary losses
    parts: PartialGraphs | None = None  # captured graphs of parts of the layers

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without those that are None."""
        tensors = {"tokens_BS": self.tokens_BS, "positions_BS": self.positions_BS}
        tensors |= {f"ahead {depth}": ahead_BS for depth, ahead_BS in enumerate(self.ahead, start=1)}
        rest = {"documents_BS": self.documents_BS, "query_positions_S": self.query_positions_S}
        return tensors | {name: tensor for name, tensor in rest.items() if tensor is not None}

    def allowed_BSS(self) -> Tensor | None:
        """The `attention_mask` of these rows. Each call builds it anew: it is too large to keep between passes."""
        return attention_mask(self.documents_BS, self.query_positions_S)


@dataclass(frozen=True)
class ForwardContext:
    """Values of a micro-batch that every layer reads."""

    cos_BSP: Tensor  # float32 cosine of each rotary pair's angle, P / 2 wide
    sin_BSP: Tensor
    allowed_BSS: Tensor | None  # bool, True where a query (first S) may attend to a key; None is causal attention
    scope: Scope  # for routers
    parts: PartialGraphs | None = None
    bounds: tuple[LocalMask, ...] = ()  # of layers that see the whole row; they replace `allowed_BSS`
    nears: tuple[LocalMask, ...] = ()  # of layers with a window or chunks
    local_angles: tuple[Tensor, ...] = ()  # cosine and sine of local layers that have a position embedding of their own
    documents_BS: Tensor | None = None  # int64 of whole rows, for linear attention; None without it, or without packing
    first_BS: Tensor | None = None  # int32 first position of each document, for sparse attention; None without it
    csa_windows: tuple[Tensor, ...] = ()  # `Windows` of compressed attention, by kind of layers; none without it
    hca_windows: tuple[Tensor, ...] = ()
    query_scale_S: Tensor | None = None  # float32 attention temperature of global layers; None without tuning
    temperature_BS: Tensor | None = None  # the same of all layers

    def scaled(self, q_BSHN: Tensor) -> Tensor:
        """Queries times the attention temperature of all layers, if there is one; the product is in float32."""
        scale_BS = self.temperature_BS
        return q_BSHN if scale_BS is None else (q_BSHN * scale_BS[..., None, None]).to(q_BSHN.dtype)

    def in_static_memory(self) -> "ForwardContext":
        """The same values; with captured parts, copied to the addresses that the graphs read."""
        parts = self.parts
        if parts is None:
            return self
        parts.check("scope of a micro-batch", replace(self.scope, tokens_T=None))  # numbers are baked into a graph

        def hold(name: str, value: Any) -> Any:
            match value:
                case Tensor():
                    return parts.hold(name, value)
                case tuple():
                    return tuple(hold(f"{name} {number}", mask) for number, mask in enumerate(value))
                case AttentionBounds(first_BQ=first_BQ, last_BK=last_BK):
                    return replace(
                        value, first_BQ=hold(f"{name} first", first_BQ), last_BK=hold(f"{name} last", last_BK)
                    )
                case Scope(tokens_T=tokens_T):
                    return replace(value, tokens_T=hold("tokens_T", tokens_T))
            return value

        return replace(self, **{name: hold(name, value) for name, value in vars(self).items()})


def shifted_tokens(tokens_BS: Tensor, depths: int) -> tuple[Tensor, ...]:
    """Tokens shifted by 1, 2, ... positions; they wrap around at the end of the row, where labels are ignored."""
    return tuple(tokens_BS.roll(-depth, dims=1) for depth in range(1, depths + 1))


def attention_mask(documents_BS: Tensor | None, query_positions_S: Tensor | None = None) -> Tensor | None:
    """The causal mask inside documents, built without waiting for the device; arguments as in `ModelInputs`.

    Returns bool, B x queries x positions of the row; None for plain causal attention.
    """
    if documents_BS is None:
        return None
    keys_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    queries_S, queries_BS = keys_S, documents_BS
    if query_positions_S is not None:
        queries_S, queries_BS = query_positions_S, documents_BS[:, query_positions_S]
    same_BSS = queries_BS[:, :, None] == documents_BS[:, None, :]  # the same document
    return same_BSS.logical_and_(queries_S[:, None] >= keys_S)  # in place: a mask has B x S x S bytes
