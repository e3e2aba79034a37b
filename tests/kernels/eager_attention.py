"""Attention as its definition says it, with all scores in memory: what the fast forms are compared with."""

import torch
from torch import Tensor

from penstock.kernels.attention_window import AttentionWindow


def eager_attention(
    q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, seen_BSS: Tensor, scale: float, sinks_H: Tensor | None = None
) -> Tensor:
    """Softmax over the keys that are seen, and over the sink of a head if there is one."""
    groups = q_BSHN.shape[2] // k_BSGN.shape[2]
    k_BSHN, v_BSHM = (x.repeat_interleave(groups, dim=2) for x in (k_BSGN, v_BSGM))
    weights_BHSS = (torch.einsum("bqhn,bkhn->bhqk", q_BSHN, k_BSHN) * scale).exp() * seen_BSS[:, None]
    sums_BHS1 = weights_BHSS.sum(-1, keepdim=True)
    if sinks_H is not None:
        sums_BHS1 = sums_BHS1 + sinks_H.exp()[:, None, None]
    return torch.einsum("bhqk,bkhm->bqhm", weights_BHSS / sums_BHS1, v_BSHM)


def seen_by(window: AttentionWindow | None, length: int, documents_BS: Tensor | None = None) -> Tensor:
    """Which position (first S) sees which (second S): boolean, 1 or B x S x S. Chunks begin with documents."""
    if documents_BS is None:
        documents_BS = torch.zeros(1, length, dtype=torch.int64)
    query, key = torch.arange(length)[:, None], torch.arange(length)
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    seen_BSS = same_BSS & (key <= query)
    if window is not None and window.kind == "window":
        seen_BSS = seen_BSS & (query - key < window.size)
    if window is not None and window.kind == "chunk":
        place_BS = torch.arange(length) - same_BSS.int().argmax(-1)  # in its document, which argmax finds the start of
        seen_BSS = seen_BSS & (place_BS[:, :, None] // window.size == place_BS[:, None] // window.size)
    return seen_BSS


def random_heads(rows: int, length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Queries of 4 heads, keys and values of 2, sinks, and the direction in which the output is differentiated."""
    generator = torch.Generator().manual_seed(11)
    shapes = ((rows, length, 4, 8), (rows, length, 2, 8), (rows, length, 2, 8), (4,), (rows, length, 4, 8))
    q, k, v, sinks_H, direction = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return q, k, v, sinks_H, direction


def random_documents(rows: int, length: int) -> Tensor:
    """Ids of documents with borders at other places in each row."""
    generator = torch.Generator().manual_seed(5)
    return (torch.rand(rows, length, generator=generator) < 0.2).cumsum(1)


def with_gradients(o_BSHM: Tensor, direction_BSHM: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of the leaves along a direction."""
    return [o_BSHM.detach(), *torch.autograd.grad((o_BSHM * direction_BSHM).sum(), leaves)]
