"""What a forward pass reads of a micro-batch, and what every layer must know about it. Made once, never changed."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels.local_attention import BlockMasks
from penstock.moe.routing import Scope
from penstock.parallel.graphs import PartialGraphs


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """A micro-batch as one rank reads it. Where ranks share rows, S is the positions that this one holds.

    Attributes:
        tokens_BS: int64 token ids.
        positions_BS: int64, for the rotary embedding.
        ahead: for each multi-token prediction depth the tokens that many positions further on.
        documents_BS: int64 document of each position of whole rows, ours or not; None if attention may cross them.
        places_S: int64, which positions of the row have queries here; None for all of them.
        share: part of the global batch that this micro-batch is; auxiliary losses are scaled by it.
        parts: parts of the layers that are replayed as graphs; None if there are none.
    """

    tokens_BS: Tensor
    positions_BS: Tensor
    ahead: tuple[Tensor, ...] = ()
    documents_BS: Tensor | None = None
    places_S: Tensor | None = None
    share: float = 1.0
    parts: PartialGraphs | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them by name; those that are None are left out."""
        found = {"tokens_BS": self.tokens_BS, "positions_BS": self.positions_BS}
        found |= {f"ahead {depth}": ahead_BS for depth, ahead_BS in enumerate(self.ahead, start=1)}
        if self.documents_BS is not None:
            found["documents_BS"] = self.documents_BS
        if self.places_S is not None:
            found["places_S"] = self.places_S
        return found

    def allowed_BSS(self) -> Tensor | None:
        """Where attention may look, see `attention_mask`. Made anew by each call, for one pass: it is large."""
        return attention_mask(self.documents_BS, self.places_S)

    def halves(self) -> tuple["ModelInputs", "ModelInputs"]:
        """The first rows and the last; of an even number."""
        rows = self.tokens_BS.shape[0]
        assert rows % 2 == 0, f"{rows} rows have no halves"
        assert self.parts is None, "parts that are graphs have memory for one pass, and halves are two"

        def of(part: slice) -> ModelInputs:
            return ModelInputs(
                tokens_BS=self.tokens_BS[part],
                positions_BS=self.positions_BS[part],
                ahead=tuple(ahead_BS[part] for ahead_BS in self.ahead),
                documents_BS=None if self.documents_BS is None else self.documents_BS[part],
                places_S=self.places_S,
                share=self.share / 2,
            )

        return of(slice(rows // 2)), of(slice(rows // 2, None))


@dataclass(frozen=True)
class ForwardContext:
    """Angles, attention borders and share of a micro-batch.

    Attributes:
        cos_BSP: float32 cosine of each rotary pair's angle, P / 2 wide.
        sin_BSP: float32 sine.
        allowed_BSS: boolean, True where a query position (first S) may look at a key position; None for plain causal.
        scope: what balance losses must know.
        parts: as in `ModelInputs`.
        nears: what layers may look at that see a part of the row; empty if there are none, or they see all of it.
        tempered_S: float32, what queries of our positions grow by in layers that see the whole row; None for nothing.
    """

    cos_BSP: Tensor
    sin_BSP: Tensor
    allowed_BSS: Tensor | None
    scope: Scope
    parts: PartialGraphs | None = None
    nears: tuple[BlockMasks, ...] = ()
    tempered_S: Tensor | None = None

    def staying(self) -> "ForwardContext":
        """The same values; if parts of the layers are graphs, where these read them."""
        if self.parts is None:
            return self
        self.parts.check("scope of a micro-batch", self.scope)

        def hold(name: str, value: Tensor | None) -> Tensor | None:
            return None if value is None or self.parts is None else self.parts.hold(name, value)

        return replace(
            self,
            cos_BSP=self.parts.hold("cos_BSP", self.cos_BSP),
            sin_BSP=self.parts.hold("sin_BSP", self.sin_BSP),
            allowed_BSS=hold("allowed_BSS", self.allowed_BSS),
            nears=tuple(
                replace(near, masks=tuple(hold(f"mask {range_} {kind}", mask) for kind, mask in enumerate(near.masks)))
                for range_, near in enumerate(self.nears)
            ),
            tempered_S=hold("tempered_S", self.tempered_S),
        )


def shifted_tokens(tokens_BS: Tensor, depths: int) -> tuple[Tensor, ...]:
    """Tokens 1, 2, ... positions further on; at the row's end, where nothing is predicted, they wrap around."""
    return tuple(tokens_BS.roll(-depth, dims=1) for depth in range(1, depths + 1))


def attention_mask(documents_BS: Tensor | None, places_S: Tensor | None = None) -> Tensor | None:
    """Where attention may look when it stays inside a document. The host waits for nothing.

    Args:
        documents_BS: document id of each position of whole rows; None if attention may cross documents.
        places_S: int64, positions that have queries, on the same device; None for all.

    Returns:
        Boolean, B x queries x positions of the row: causal and inside equal ids. None if there are no borders.
    """
    if documents_BS is None:
        return None
    keys_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    queries_S, queries_BS = keys_S, documents_BS
    if places_S is not None:
        queries_S, queries_BS = places_S, documents_BS[:, places_S]
    same_BSS = queries_BS[:, :, None] == documents_BS[:, None, :]
    return same_BSS.logical_and_(queries_S[:, None] >= keys_S)
