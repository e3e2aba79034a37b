"""The inputs of a forward pass, and the values that every layer derives from them. Built once per pass, immutable."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.bounded_attention import AttentionBounds
from penstock.moe.balance import Scope
from penstock.parallel.context import LocalMask
from penstock.parallel.graphs import PartialGraphs


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
    documents_BS: Tensor | None = None  # int64 of whole rows, for linear attention; None without it, or without packing
    first_BS: Tensor | None = None  # int32 first position of each document, for sparse attention; None without it
    query_scale_S: Tensor | None = None  # float32 attention temperature of global layers; None without tuning

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
