"""Attention between bounds, forward and backward: packed documents, sliding windows, chunks and sinks, without a mask.

A block of queries reads consecutive blocks of keys, and only
those at both ends need the comparison of positions:

    keys      0 1 | 2 3 | 4 5 | 6 7 | 8 9        blocks of 2
    query 8         . x   x x   x x   x .        first 3: block 0 is not read
    query 9         . x   x x   x x   x x        blocks 1 and 4 are borders, blocks 2 and 3 are seen whole

Backward has two kernels without atomics. That of the queries walks over keys, like forward, and writes do . o for the
other one; that of the keys walks over the queries from its first key up to the last query that sees its last one
(`last`). The softmax counts in powers of two: log_sums is log2 of the sum of exp, sinks included.

The rows of a tile of queries are positions by heads of one group of keys: with 8 heads, 128 rows are 16 positions, so a
window of 128 needs 143 keys instead of 255. Heads of keys that are no power of two wide are multiplied in two parts
(192 = 128 + 64).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels.attention import causal_attention
from penstock.kernels.attention_window import AttentionWindow
from penstock.kernels.language import TensorDescriptor, ceil_div, power_of_two, start_kernel, tl, triton
from penstock.kernels.tuning import KernelLaunch, section_or_any, target_of

NAME = "triton"  # value of `kernels.attention`
# Chips on which `auto` takes the kernel, because it was faster there.
MEASURED = ("sm_90",)
NARROWEST, WIDEST = 16, 256  # columns of a part of a head
_MOST = "MOST="


@dataclass(frozen=True)
class AttentionBounds:
    """Bounds of queries up to the position of the last key; those of one row may stand for all rows.

    A query sees the keys from `first` up to its own position, and `first` never falls from one query to the next:

        documents   0 0 0 1 1 1 1        window of 3    0 1 2 3 4 5 6        chunks of 3    0 1 2 3 4 5 6
        first       0 0 0 3 3 3 3        first          0 0 0 1 2 3 4        first          0 0 0 3 3 3 6

    Where several apply, the largest counts; chunks begin with their document. Bounds are made once for a micro-batch,
    two integers for a position instead of a mask of the square.
    """

    first_BQ: Tensor  # int32, first key that a query sees
    last_BK: Tensor  # int32, last query that sees a key, counted from the first query; -1 for none
    most: int  # keys that a query sees at most

    @classmethod
    def of(cls, first_BQ: Tensor, keys: int, window: AttentionWindow | None = None) -> "AttentionBounds":
        """From the first key of each query; a window or chunk, if there is one, is in them already."""
        first_BQ = first_BQ.contiguous()
        key_BK = torch.arange(keys, dtype=torch.int32, device=first_BQ.device).repeat(first_BQ.shape[0], 1)
        last_BK = torch.searchsorted(first_BQ, key_BK, right=True, out_int32=True) - 1
        return cls(first_BQ, last_BK, keys if window is None else min(keys, window.size))

    @property
    def keys(self) -> int:
        return self.last_BK.shape[1]

    def seen_BQK(self) -> Tensor:
        """The mask: True where a query sees a key."""
        key_K = torch.arange(self.keys, device=self.first_BQ.device)
        place_Q = key_K[self.keys - self.first_BQ.shape[1] :]
        return (key_K >= self.first_BQ[:, :, None]) & (key_K <= place_Q[:, None])


def parts_of(width: int) -> tuple[int, int]:
    """A head as one or two powers of two of columns, (width, 0) or the parts."""
    larger = power_of_two(width + 1) // 2
    return larger, width - larger


def has_kernel(keys: int, values: int) -> bool:
    """Whether the kernel takes heads of these widths."""
    parts = *parts_of(keys), values
    return all(part == power_of_two(part) and NARROWEST <= part <= WIDEST for part in parts if part) and bool(values)


def noted(limit: int) -> str:
    """The note of a launch that says how many keys a query sees at most."""
    return f"{_MOST}{limit}"


def most_of(notes: Sequence[str]) -> int:
    """The number in `noted`."""
    return next(int(note.removeprefix(_MOST)) for note in notes if note.startswith(_MOST))


def first_keys(
    documents_BS: Tensor | None, window: AttentionWindow | None, length: int, device: torch.device
) -> Tensor:
    """First key that each position sees, int32 B x S, or 1 x S without documents, which are runs of one number."""
    place_S = torch.arange(length, dtype=torch.int32, device=device)
    first_BS = torch.zeros_like(place_S)[None]
    if documents_BS is not None:
        is_begin_BS = F.pad(documents_BS[:, 1:] != documents_BS[:, :-1], (1, 0))
        first_BS = (place_S * is_begin_BS).cummax(1).values
    if window is None:
        return first_BS
    if window.kind == "chunk":
        return place_S - (place_S - first_BS) % window.size
    return torch.maximum(first_BS, place_S - (window.size - 1))


def attention_by_mask(
    q_BQHN: Tensor,
    k_BKGN: Tensor,
    v_BKGM: Tensor,
    bounds: AttentionBounds,
    *,
    scale: float,
    sinks_H: Tensor | None = None,  # a logit of each query head that takes part in the softmax
) -> Tensor:
    """Definition of `penstock.kernels.bounded_attention.bounded_attention`: all scores, and a mask of the bounds."""
    seen_BQK = bounds.seen_BQK().expand(q_BQHN.shape[0], -1, -1)
    return causal_attention(q_BQHN, k_BKGN, v_BKGM, scale=scale, allowed_BSS=seen_BQK, backend="math", sinks_H=sinks_H)


LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)


@dataclass(frozen=True, kw_only=True)
class AttentionLaunch(KernelLaunch):
    """`block_rows` queries (positions by heads) and `block_columns` keys of a tile."""

    descriptors: bool = False  # copy tiles by descriptors (NVIDIA's tensor memory accelerator) instead of pointers
    heads: int = 1  # of one group in a tile of queries, at most; cut to a power of two that divides the group


AttentionLaunches = Mapping[str, AttentionLaunch]  # of `forward`, and of backward's `queries` and `keys`
NARROW = 512  # keys that a query sees at most where a tile of queries has several heads


@cache
def _launches(target: str) -> Mapping[str, AttentionLaunches]:
    sections = section_or_any(target, "bounded_attention").items()
    return {name: {kernel: AttentionLaunch(**row) for kernel, row in rows.items()} for name, rows in sections}


def launches_for(target: str, width: int, key_limit: int) -> AttentionLaunches:
    """The launches of a chip for keys of this width, of which a query sees `key_limit`."""
    launches = _launches(target)
    name = "latent" if width > 128 else "narrow" if key_limit <= NARROW else "wide"
    return launches.get(name, launches["wide"])


def bounded_attention(
    q_BQHN: Tensor,
    k_BKGN: Tensor,
    v_BKGM: Tensor,
    bounds: AttentionBounds,
    *,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`penstock.kernels.bounded_attention.attention_by_mask`; o_BQHM in the dtype of q."""
    return _BoundedAttention.apply(q_BQHN, k_BKGN, v_BKGM, sinks_H, bounds, scale)


class _BoundedAttention(torch.autograd.Function):
    """Saves the inputs, the output and log_sums."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BQHN: Tensor,
        k_BKGN: Tensor,
        v_BKGM: Tensor,
        sinks_H: Tensor | None,
        bounds: AttentionBounds,
        scale: float,
    ) -> Tensor:
        q_BQHN, k_BKGN, v_BKGM = (x.contiguous() for x in (q_BQHN, k_BKGN, v_BKGM))
        (rows, queries, heads, _), width = q_BQHN.shape, v_BKGM.shape[-1]
        o_BQHM = q_BQHN.new_empty(rows, queries, heads, width)
        log_sums_BHQ = q_BQHN.new_empty(rows, heads, queries, dtype=torch.float32)
        launches = launches_for(target_of(q_BQHN.device), q_BQHN.shape[-1], bounds.most)
        launch, first_BQ = launches["forward"], bounds.first_BQ
        start_kernel(
            attention_kernel, _grid_of_queries(q_BQHN, k_BKGN, launch),
            q_BQHN, *_key_blocks_of(k_BKGN, v_BKGM, launch), first_BQ, sinks_H, o_BQHM, log_sums_BHQ,
            queries, k_BKGN.shape[1], _row_stride(first_BQ), scale,
            notes=(noted(bounds.most),), **_constants(q_BQHN, k_BKGN, width, launch),
        )  # fmt: skip
        ctx.save_for_backward(q_BQHN, k_BKGN, v_BKGM, sinks_H, o_BQHM, log_sums_BHQ, first_BQ, bounds.last_BK)
        ctx.how = scale, launches, noted(bounds.most)
        return o_BQHM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BQHM: Tensor) -> tuple[Tensor | None, ...]:
        q_BQHN, k_BKGN, v_BKGM, sinks_H, o_BQHM, log_sums_BHQ, first_BQ, last_BK = ctx.saved_tensors
        scale, launches, note = ctx.how
        of_queries, of_keys = launches["queries"], launches["keys"]
        do_BQHM, delta_BHQ = do_BQHM.contiguous(), torch.empty_like(log_sums_BHQ)
        dq_BQHN, dk_BKGN, dv_BKGM = (torch.empty_like(x) for x in (q_BQHN, k_BKGN, v_BKGM))
        (rows, keys, groups, _), width = k_BKGN.shape, v_BKGM.shape[-1]
        sizes = q_BQHN.shape[1], keys
        start_kernel(
            attention_query_gradient_kernel, _grid_of_queries(q_BQHN, k_BKGN, of_queries),
            q_BQHN, *_key_blocks_of(k_BKGN, v_BKGM, of_queries), first_BQ, o_BQHM, log_sums_BHQ,
            do_BQHM, dq_BQHN, delta_BHQ, *sizes, _row_stride(first_BQ), scale,
            notes=(note,), **_constants(q_BQHN, k_BKGN, width, of_queries),
        )  # fmt: skip
        q, q_rest, do = _query_blocks_of(q_BQHN, do_BQHM, k_BKGN, of_keys)
        start_kernel(
            attention_key_gradient_kernel, (groups, ceil_div(keys, of_keys.block_columns), rows),
            q, k_BKGN, v_BKGM, q_rest, do, first_BQ, last_BK, log_sums_BHQ, delta_BHQ, dk_BKGN, dv_BKGM,
            *sizes, _row_stride(first_BQ), _row_stride(last_BK), scale,
            notes=(note,), **_constants(q_BQHN, k_BKGN, width, of_keys),
        )  # fmt: skip
        dsinks_H = None
        if sinks_H is not None:
            weights_BHQ = torch.exp2(sinks_H.float()[:, None] * LOG2E - log_sums_BHQ)
            dsinks_H = -(weights_BHQ * delta_BHQ).sum((0, 2)).to(sinks_H.dtype)
        return dq_BQHN, dk_BKGN, dv_BKGM, dsinks_H, None, None


def _blocks(x_BSHN: Tensor, rows: int, columns: int) -> Any:
    """Descriptor of blocks of positions and columns of a head."""
    return TensorDescriptor.from_tensor(x_BSHN.flatten(2).flatten(0, 1), [rows, columns])


def _key_blocks_of(k_BKGN: Tensor, v_BKGM: Tensor, launch: AttentionLaunch) -> tuple[Any, Any, Any]:
    """Keys, values, and the second parts of keys, as tensors or descriptors."""
    if not launch.descriptors:
        return k_BKGN, v_BKGM, k_BKGN
    n1, n2 = parts_of(k_BKGN.shape[-1])
    k, rest = (_blocks(k_BKGN, launch.block_columns, n) for n in (n1, n2 or n1))
    return k, _blocks(v_BKGM, launch.block_columns, v_BKGM.shape[-1]), rest


def _query_blocks_of(q_BQHN: Tensor, do_BQHM: Tensor, k_BKGN: Tensor, launch: AttentionLaunch) -> tuple[Any, Any, Any]:
    """Queries, their second parts, and the gradient of the output, as tensors or descriptors."""
    if not launch.descriptors:
        return q_BQHN, q_BQHN, do_BQHM
    assert _heads_of(q_BQHN, k_BKGN, launch) == 1, "a block of a descriptor has one head"
    n1, n2 = parts_of(q_BQHN.shape[-1])
    q, rest = (_blocks(q_BQHN, launch.block_rows, n) for n in (n1, n2 or n1))
    return q, rest, _blocks(do_BQHM, launch.block_rows, do_BQHM.shape[-1])


def _row_stride(bounds_BS: Tensor) -> int:
    """From one row of bounds to the next; 0 if one stands for all."""
    return bounds_BS.shape[1] if bounds_BS.shape[0] > 1 else 0


def _heads_of(q_BQHN: Tensor, k_BKGN: Tensor, launch: AttentionLaunch) -> int:
    group = q_BQHN.shape[2] // k_BKGN.shape[2]
    return min(launch.heads, group & -group)  # the largest power of two that divides the group


def _grid_of_queries(q_BQHN: Tensor, k_BKGN: Tensor, launch: AttentionLaunch) -> tuple[int, int, int]:
    heads = _heads_of(q_BQHN, k_BKGN, launch)
    return q_BQHN.shape[2] // heads, ceil_div(q_BQHN.shape[1], launch.block_rows // heads), q_BQHN.shape[0]


def _constants(q_BQHN: Tensor, k_BKGN: Tensor, width: int, launch: AttentionLaunch) -> dict[str, int]:
    n1, n2 = parts_of(q_BQHN.shape[-1])
    return {
        "H": q_BQHN.shape[2],
        "G": k_BKGN.shape[2],
        "N1": n1,
        "N2": n2,
        "M": width,
        "BLOCK_Q": launch.block_rows,
        "BLOCK_K": launch.block_columns,
        "HEADS": _heads_of(q_BQHN, k_BKGN, launch),
        "DESCRIPTORS": launch.descriptors,
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


@triton.jit
def _load(ptr, line_S, width: tl.constexpr, inside_S, MASKED: tl.constexpr):
    """A tile from `ptr` on whose rows begin at `line_S`."""
    ptrs = ptr + line_S[:, None] + tl.arange(0, width)[None, :]
    if MASKED:
        return tl.load(ptrs, mask=inside_S[:, None], other=0.0)
    return tl.load(ptrs)


@triton.jit
def _load_keys(
    source, begin, start, head, first: tl.constexpr, width: tl.constexpr, G: tl.constexpr, end: tl.constexpr, inside_K,
    MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Keys or values from `start` on of a row that begins at `begin`: some columns of a head."""
    if DESCRIPTORS:
        block = source.load([begin + start, head * end + first])
    else:
        line_K = tl.arange(0, inside_K.shape[0]) * (G * end)
        ptr = source + (begin + start).to(tl.int64) * (G * end) + head * end + first
        block = _load(ptr, line_K, width, inside_K, MASKED)
    return block


@triton.jit
def _scores(q1, q2, k1, k2, N2: tl.constexpr):
    """Products of all rows of two tiles, of which one or both have a second part."""
    scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    if N2 > 0:
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee")
    return scores


@triton.jit
def _key_blocks(first_ptr, query, end, offset, BLOCK_K: tl.constexpr):
    """Blocks of keys of the queries `query` to `end` - 1: first key, borders before, first and end of whole, behind."""
    lowest, highest = tl.load(first_ptr + query), tl.load(first_ptr + end - 1)
    begin = lowest // BLOCK_K * BLOCK_K
    whole = tl.cdiv(highest, BLOCK_K) * BLOCK_K
    stop = tl.maximum((query + offset + 1) // BLOCK_K * BLOCK_K, whole)
    behind = tl.cdiv(tl.maximum(end + offset - stop, 0), BLOCK_K)
    return begin, (whole - begin) // BLOCK_K, whole, stop, behind


@triton.jit
def _attended(
    o_QM, most_Q, sum_Q, q1, q2, k, k_rest, v, row_place, group, start, keys, position_Q, first_Q, scale,
    G: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, M: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Output, largest score and sum of the softmax, with one more block of keys; `scale` has the factor log2 e."""
    N: tl.constexpr = N1 + N2
    key_K = start + tl.arange(0, BLOCK_K)
    inside_K = key_K < keys
    k1 = _load_keys(k, row_place, start, group, 0, N1, G, N, inside_K, MASKED, DESCRIPTORS)
    k2 = k1
    if N2 > 0:
        k2 = _load_keys(k_rest, row_place, start, group, N1, N2, G, N, inside_K, MASKED, DESCRIPTORS)
    scores_QK = _scores(q1, q2, k1, k2, N2)
    v_KM = _load_keys(v, row_place, start, group, 0, M, G, M, inside_K, MASKED, DESCRIPTORS)
    if MASKED:
        seen_QK = (key_K[None, :] <= position_Q[:, None]) & (key_K[None, :] >= first_Q[:, None])
        scores_QK = tl.where(seen_QK, scores_QK * scale, -1.0e30)
        new_Q = tl.maximum(most_Q, tl.max(scores_QK, 1))
        p_QK = tl.exp2(scores_QK - new_Q[:, None])
    else:
        new_Q = tl.maximum(most_Q, tl.max(scores_QK, 1) * scale)
        p_QK = tl.exp2(scores_QK * scale - new_Q[:, None])
    # A row that has seen no key yet has sums of masked scores, which the first real score multiplies by zero.
    shrink_Q = tl.exp2(most_Q - new_Q)
    sum_Q = sum_Q * shrink_Q + tl.sum(p_QK, 1)
    o_QM = tl.dot(p_QK.to(v_KM.dtype), v_KM, o_QM * shrink_Q[:, None], input_precision="ieee")
    return o_QM, new_Q, sum_Q


@triton.jit(do_not_specialize=["queries", "keys", "first_stride"])
def attention_kernel(
    q_ptr, k, v, k_rest, first_ptr, sinks_ptr, o_ptr, sums_ptr,  # q B x Q x H x N, k B x K x G x N, sums B x H x Q
    queries, keys, first_stride, scale,
    H: tl.constexpr, G: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, M: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEADS: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """One block of positions of some heads of a group, and the keys that they see."""
    N: tl.constexpr = N1 + N2
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(0) * HEADS
    position = (tl.num_programs(1) - 1 - tl.program_id(1)) * (BLOCK_Q // HEADS)  # the longest first
    index_Q = tl.arange(0, BLOCK_Q)
    place_Q, head_Q = position + index_Q // HEADS, head + index_Q % HEADS
    corner, line_Q = (row * queries + position) * H + head, index_Q // HEADS * H + index_Q % HEADS
    inside_Q, offset = place_Q < queries, keys - queries
    group, row_place = head // (H // G), tl.program_id(2) * keys
    first_ptr += row * first_stride
    q1 = _load(q_ptr + corner * N, line_Q * N, N1, inside_Q, True)
    q2 = q1
    if N2 > 0:
        q2 = _load(q_ptr + corner * N + N1, line_Q * N, N2, inside_Q, True)
    first_Q = tl.load(first_ptr + place_Q, mask=inside_Q, other=0)
    most_Q = tl.full([BLOCK_Q], -1.0e30, tl.float32)
    sum_Q = tl.zeros([BLOCK_Q], tl.float32)
    if sinks_ptr is not None:
        most_Q = tl.load(sinks_ptr + head_Q).to(tl.float32) * _LOG2E
        sum_Q += 1.0
    o_QM = tl.zeros([BLOCK_Q, M], tl.float32)
    scale2 = scale * _LOG2E
    end = tl.minimum(position + BLOCK_Q // HEADS, queries)
    begin, before, whole, stop, behind = _key_blocks(first_ptr, position, end, offset, BLOCK_K)
    for start in range(whole, stop, BLOCK_K):
        o_QM, most_Q, sum_Q = _attended(
            o_QM, most_Q, sum_Q, q1, q2, k, k_rest, v, row_place, group, start, keys, place_Q + offset, first_Q, scale2,
            G, N1, N2, M, BLOCK_K, False, DESCRIPTORS,
        )  # fmt: skip
    for block in range(before + behind):
        start = tl.where(block < before, begin + block * BLOCK_K, stop + (block - before) * BLOCK_K)
        o_QM, most_Q, sum_Q = _attended(
            o_QM, most_Q, sum_Q, q1, q2, k, k_rest, v, row_place, group, start, keys, place_Q + offset, first_Q, scale2,
            G, N1, N2, M, BLOCK_K, True, DESCRIPTORS,
        )  # fmt: skip
    o_ptrs = o_ptr + corner * M + (line_Q * M)[:, None] + tl.arange(0, M)[None, :]
    tl.store(o_ptrs, (o_QM / sum_Q[:, None]).to(o_ptr.dtype.element_ty), mask=inside_Q[:, None])
    tl.store(sums_ptr + row * H * queries + head_Q * queries + place_Q, most_Q + tl.log2(sum_Q), mask=inside_Q)


@triton.jit
def _query_gradient(
    dq1, dq2, q1, q2, do_QM, sums_Q, delta_Q, k, k_rest, v, row_place, group, start, keys, position_Q, first_Q, scale,
    G: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, M: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, without the factor `scale`, with one more block of keys."""
    N: tl.constexpr = N1 + N2
    key_K = start + tl.arange(0, BLOCK_K)
    inside_K = key_K < keys
    k1 = _load_keys(k, row_place, start, group, 0, N1, G, N, inside_K, MASKED, DESCRIPTORS)
    k2 = k1
    if N2 > 0:
        k2 = _load_keys(k_rest, row_place, start, group, N1, N2, G, N, inside_K, MASKED, DESCRIPTORS)
    v_KM = _load_keys(v, row_place, start, group, 0, M, G, M, inside_K, MASKED, DESCRIPTORS)
    p_QK = tl.exp2(_scores(q1, q2, k1, k2, N2) * scale - sums_Q[:, None])
    if MASKED:
        seen_QK = (key_K[None, :] <= position_Q[:, None]) & (key_K[None, :] >= first_Q[:, None])
        p_QK = tl.where(seen_QK, p_QK, 0.0)
    dp_QK = tl.dot(do_QM, tl.trans(v_KM), input_precision="ieee")
    ds_QK = (p_QK * (dp_QK - delta_Q[:, None])).to(k1.dtype)
    dq1 = tl.dot(ds_QK, k1, dq1, input_precision="ieee")
    if N2 > 0:
        dq2 = tl.dot(ds_QK, k2, dq2, input_precision="ieee")
    return dq1, dq2


@triton.jit(do_not_specialize=["queries", "keys", "first_stride"])
def attention_query_gradient_kernel(
    q_ptr, k, v, k_rest, first_ptr, o_ptr, sums_ptr, do_ptr, dq_ptr, delta_ptr,
    queries, keys, first_stride, scale,
    H: tl.constexpr, G: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, M: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEADS: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """One block of positions of some heads of a group: delta = do . o and dq."""
    N: tl.constexpr = N1 + N2
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(0) * HEADS
    position = (tl.num_programs(1) - 1 - tl.program_id(1)) * (BLOCK_Q // HEADS)
    index_Q = tl.arange(0, BLOCK_Q)
    place_Q, head_Q = position + index_Q // HEADS, head + index_Q % HEADS
    corner, line_Q = (row * queries + position) * H + head, index_Q // HEADS * H + index_Q % HEADS
    inside_Q, offset = place_Q < queries, keys - queries
    group, row_place = head // (H // G), tl.program_id(2) * keys
    first_ptr += row * first_stride
    do_QM = _load(do_ptr + corner * M, line_Q * M, M, inside_Q, True)
    o_QM = _load(o_ptr + corner * M, line_Q * M, M, inside_Q, True)
    delta_Q = tl.sum(do_QM.to(tl.float32) * o_QM.to(tl.float32), 1)
    number_Q = head_Q * queries + place_Q
    tl.store(delta_ptr + row * H * queries + number_Q, delta_Q, mask=inside_Q)
    sums_Q = tl.load(sums_ptr + row * H * queries + number_Q, mask=inside_Q, other=float("inf"))
    q1 = _load(q_ptr + corner * N, line_Q * N, N1, inside_Q, True)
    q2 = q1
    dq1 = tl.zeros([BLOCK_Q, N1], tl.float32)
    dq2 = dq1
    if N2 > 0:
        q2 = _load(q_ptr + corner * N + N1, line_Q * N, N2, inside_Q, True)
        dq2 = tl.zeros([BLOCK_Q, N2], tl.float32)
    first_Q = tl.load(first_ptr + place_Q, mask=inside_Q, other=0)
    end = tl.minimum(position + BLOCK_Q // HEADS, queries)
    begin, before, whole, stop, behind = _key_blocks(first_ptr, position, end, offset, BLOCK_K)
    scale2 = scale * _LOG2E
    for start in range(whole, stop, BLOCK_K):
        dq1, dq2 = _query_gradient(
            dq1, dq2, q1, q2, do_QM, sums_Q, delta_Q, k, k_rest, v, row_place, group, start, keys, place_Q + offset,
            first_Q, scale2, G, N1, N2, M, BLOCK_K, False, DESCRIPTORS,
        )  # fmt: skip
    for block in range(before + behind):
        start = tl.where(block < before, begin + block * BLOCK_K, stop + (block - before) * BLOCK_K)
        dq1, dq2 = _query_gradient(
            dq1, dq2, q1, q2, do_QM, sums_Q, delta_Q, k, k_rest, v, row_place, group, start, keys, place_Q + offset,
            first_Q, scale2, G, N1, N2, M, BLOCK_K, True, DESCRIPTORS,
        )  # fmt: skip
    dq_ptrs = dq_ptr + corner * N + (line_Q * N)[:, None]
    tl.store(dq_ptrs + tl.arange(0, N1)[None, :], (dq1 * scale).to(dq_ptr.dtype.element_ty), mask=inside_Q[:, None])
    if N2 > 0:
        dq_ptrs += N1 + tl.arange(0, N2)[None, :]
        tl.store(dq_ptrs, (dq2 * scale).to(dq_ptr.dtype.element_ty), mask=inside_Q[:, None])


@triton.jit
def _key_gradient(
    dk1, dk2, dv_KM, k1, k2, v_KM, key_K, q, q_rest, do, sums_ptr, delta_ptr, first_ptr, row_place, head, position,
    queries, offset, scale, H: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, M: tl.constexpr, BLOCK_Q: tl.constexpr,
    HEADS: tl.constexpr, MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys, without the factor `scale`, and values, with one more block of queries."""
    N: tl.constexpr = N1 + N2
    index_Q = tl.arange(0, BLOCK_Q)
    place_Q, head_Q = position + index_Q // HEADS, head + index_Q % HEADS
    inside_Q, number_Q = place_Q < queries, head_Q * queries + place_Q
    if DESCRIPTORS:
        q1, do_QM = q.load([row_place + position, head * N]), do.load([row_place + position, head * M])
        q2 = q1
        if N2 > 0:
            q2 = q_rest.load([row_place + position, head * N + N1])
    else:
        corner, line_Q = (row_place + position).to(tl.int64) * H + head, index_Q // HEADS * H + index_Q % HEADS
        q1 = _load(q + corner * N, line_Q * N, N1, inside_Q, MASKED)
        do_QM = _load(do + corner * M, line_Q * M, M, inside_Q, MASKED)
        q2 = q1
        if N2 > 0:
            q2 = _load(q + corner * N + N1, line_Q * N, N2, inside_Q, MASKED)
    sums_Q = tl.load(sums_ptr + number_Q, mask=inside_Q, other=float("inf"))  # no weight behind the last query
    delta_Q = tl.load(delta_ptr + number_Q, mask=inside_Q, other=0.0)
    p_KQ = tl.exp2(_scores(k1, k2, q1, q2, N2) * scale - sums_Q[None, :])
    if MASKED:
        first_Q = tl.load(first_ptr + place_Q, mask=inside_Q, other=0)
        seen_KQ = (key_K[:, None] <= (place_Q + offset)[None, :]) & (key_K[:, None] >= first_Q[None, :])
        p_KQ = tl.where(seen_KQ, p_KQ, 0.0)
    dv_KM = tl.dot(p_KQ.to(do_QM.dtype), do_QM, dv_KM, input_precision="ieee")
    dp_KQ = tl.dot(v_KM, tl.trans(do_QM), input_precision="ieee")
    ds_KQ = (p_KQ * (dp_KQ - delta_Q[None, :])).to(q1.dtype)
    dk1 = tl.dot(ds_KQ, q1, dk1, input_precision="ieee")
    if N2 > 0:
        dk2 = tl.dot(ds_KQ, q2, dk2, input_precision="ieee")
    return dk1, dk2, dv_KM


@triton.jit(do_not_specialize=["queries", "keys", "first_stride", "last_stride"])
def attention_key_gradient_kernel(
    q, k_ptr, v_ptr, q_rest, do, first_ptr, last_ptr, sums_ptr, delta_ptr, dk_ptr, dv_ptr,
    queries, keys, first_stride, last_stride, scale,
    H: tl.constexpr, G: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, M: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEADS: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """One block of keys of a head: the heads of queries of its group, and the queries of each that see the keys."""
    N: tl.constexpr = N1 + N2
    PLACES: tl.constexpr = BLOCK_Q // HEADS
    group, row, begin = tl.program_id(0), tl.program_id(2).to(tl.int64), tl.program_id(1) * BLOCK_K
    key_K, offset = begin + tl.arange(0, BLOCK_K), keys - queries
    corner, line_K, inside_K = (row * keys + begin) * G + group, tl.arange(0, BLOCK_K) * G, key_K < keys
    k1 = _load(k_ptr + corner * N, line_K * N, N1, inside_K, True)
    k2 = k1
    dk1 = tl.zeros([BLOCK_K, N1], tl.float32)
    dk2 = dk1
    if N2 > 0:
        k2 = _load(k_ptr + corner * N + N1, line_K * N, N2, inside_K, True)
        dk2 = tl.zeros([BLOCK_K, N2], tl.float32)
    v_KM = _load(v_ptr + corner * M, line_K * M, M, inside_K, True)
    dv_KM = tl.zeros([BLOCK_K, M], tl.float32)
    row_place = tl.program_id(2) * queries
    sums_ptr += row * H * queries
    delta_ptr += row * H * queries
    first_ptr += row * first_stride
    last_ptr += row * last_stride
    # Blocks of queries: borders, whole ones from `whole` to `stop`, and borders up to `end`.
    last_key = tl.minimum(begin + BLOCK_K, keys) - 1
    start = tl.maximum(begin - offset, 0) // PLACES * PLACES
    end = tl.load(last_ptr + last_key) + 1
    whole = tl.cdiv(tl.maximum(last_key - offset, 0), PLACES) * PLACES
    stop = tl.maximum((tl.load(last_ptr + begin) + 1) // PLACES * PLACES, whole)
    before = tl.cdiv(tl.maximum(tl.minimum(whole, end) - start, 0), PLACES)
    borders = before + tl.cdiv(tl.maximum(end - stop, 0), PLACES)
    blocks = (stop - whole) // PLACES
    scale2 = scale * _LOG2E
    head = group * (H // G)
    for turn in range(blocks * (H // G // HEADS)):
        position = whole + turn % blocks * PLACES
        dk1, dk2, dv_KM = _key_gradient(
            dk1, dk2, dv_KM, k1, k2, v_KM, key_K, q, q_rest, do, sums_ptr, delta_ptr, first_ptr, row_place,
            head + turn // blocks * HEADS, position, queries, offset, scale2, H, N1, N2, M, BLOCK_Q, HEADS, False,
            DESCRIPTORS,
        )  # fmt: skip
    for turn in range(borders * (H // G // HEADS)):
        block = turn % borders
        position = tl.where(block < before, start + block * PLACES, stop + (block - before) * PLACES)
        dk1, dk2, dv_KM = _key_gradient(
            dk1, dk2, dv_KM, k1, k2, v_KM, key_K, q, q_rest, do, sums_ptr, delta_ptr, first_ptr, row_place,
            head + turn // borders * HEADS, position, queries, offset, scale2, H, N1, N2, M, BLOCK_Q, HEADS, True,
            DESCRIPTORS,
        )  # fmt: skip
    dk_ptrs = dk_ptr + corner * N + (line_K * N)[:, None]
    tl.store(dk_ptrs + tl.arange(0, N1)[None, :], (dk1 * scale).to(dk_ptr.dtype.element_ty), mask=inside_K[:, None])
    if N2 > 0:
        dk_ptrs += N1 + tl.arange(0, N2)[None, :]
        tl.store(dk_ptrs, (dk2 * scale).to(dk_ptr.dtype.element_ty), mask=inside_K[:, None])
    dv_ptrs = dv_ptr + corner * M + (line_K * M)[:, None] + tl.arange(0, M)[None, :]
    tl.store(dv_ptrs, dv_KM.to(dv_ptr.dtype.element_ty), mask=inside_K[:, None])
