"""Sparse attention in Triton: the indexer's choice of keys, attention over the chosen keys, and the indexer's loss.

Nothing here has the size of positions squared. The choice goes over some queries at a time, whose scores exist at once.
Attention gathers the chosen rows of the latent, which all heads share. Backward also goes over some queries at a time:
one kernel writes their probabilities and gradients of scores, two others multiply these, and the sum of probabilities
over the heads is the mass that the indexer's loss compares with. Gradients of keys are sums over the queries that chose
them, by atomic additions in float32: two runs may differ in the last bits.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels.gluon.support import obstacle
from penstock.kernels.language import ceil_div, power_of_two, start_kernel
from penstock.kernels.sparse_attention import IndexLoss
from penstock.kernels.sparse_attention_kernels import (
    choose_keys_kernel,
    index_backward_kernel,
    index_scores_kernel,
    sparse_forward_kernel,
    sparse_key_backward_kernel,
    sparse_query_backward_kernel,
    sparse_score_backward_kernel,
)
from penstock.kernels.tuning import INTERPRETER, KernelLaunch, section, target_of

if obstacle("sm_90") is None:
    from penstock.kernels.gluon.sparse_attention import (
        sparse_forward_hopper_kernel,
        sparse_score_backward_hopper_kernel,
    )

LEAST = 16  # sides of a product on matrix units
KEYS = 1024  # whose scores a program computes
PART = 4096  # scores that a program reads at a time
SCORE_BYTES = 1 << 30  # of the scores that exist at once
PAIR_BYTES = 1 << 30  # of the probabilities and gradients of scores that exist at once


@cache
def _launches(target: str) -> Mapping[str, KernelLaunch]:
    rows = section(target, "sparse_attention") or section("any", "sparse_attention")
    return {kernel: KernelLaunch(**fields) for kernel, fields in rows.items()}


def launches_for(device: torch.device) -> Mapping[str, KernelLaunch]:
    """The launches of a chip: `block_rows` heads (or queries times heads), `block_columns` keys, `block_depth` columns.

    Older chips and the interpreter take small ones, dry runs those of Hopper.
    """
    target = target_of(device)
    return _launches("sm_90" if target == INTERPRETER and device.type == "meta" else target)


class _Sizes(NamedTuple):
    """Sizes of one call."""

    rows: int
    positions: int
    heads: int
    latent: int
    rotary: int
    top_k: int

    @property
    def places(self) -> int:
        """Queries of all rows."""
        return self.rows * self.positions

    def constants(self, launch: KernelLaunch) -> dict[str, int]:
        """Constants of the kernels that read latent and rotary columns."""
        return {
            "H": self.heads,
            "C": self.latent,
            "P": self.rotary,
            "K": self.top_k,
            "BLOCK_H": min(launch.block_rows, max(LEAST, power_of_two(self.heads))),
            "BLOCK_K": launch.block_columns,
            "BLOCK_C": max(LEAST, power_of_two(self.latent)),
            "BLOCK_P": max(LEAST, power_of_two(self.rotary)),
            "STAGES": launch.stages,
            "num_warps": launch.warps,
        }

    def blocks(self, launch: KernelLaunch) -> int:
        return ceil_div(self.heads, launch.block_rows)


@torch.no_grad()
def choose_keys(q_BSGN: Tensor, k_BSN: Tensor, weights_BSG: Tensor, first_BS: Tensor, top_k: int) -> Tensor:
    """`penstock.kernels.sparse_attention.choose_keys`; scores of one chunk of queries exist at a time."""
    (rows, positions, heads, width), launches = q_BSGN.shape, launches_for(q_BSGN.device)
    launch, choice = launches["index"], launches["choice"]
    q_BSGN, k_BSN, weights_BSG = q_BSGN.contiguous(), k_BSN.contiguous(), weights_BSG.float().contiguous()
    keys_BSK = torch.empty(rows, positions, top_k, dtype=torch.int32, device=q_BSGN.device)
    block_heads = power_of_two(heads)
    together = max(1, launch.block_rows // block_heads)
    chunk = max(together, min(positions, SCORE_BYTES // (4 * rows * positions)))
    for first in range(0, positions, chunk):
        queries = min(chunk, positions - first)
        seen = first + queries
        scores_BQS = weights_BSG.new_empty(rows, queries, seen)
        blocks = min(KEYS // launch.block_columns, ceil_div(seen, launch.block_columns))
        start_kernel(
            index_scores_kernel,
            (ceil_div(queries, together), ceil_div(seen, launch.block_columns * blocks), rows),
            q_BSGN, k_BSN, weights_BSG, first_BS, scores_BQS, positions, first, queries, seen,
            G=heads, N=width, BLOCK_G=block_heads, BLOCK_N=max(LEAST, power_of_two(width)), QUERIES=together,
            BLOCK_K=launch.block_columns, BLOCKS=blocks, STAGES=launch.stages, num_warps=launch.warps,
        )  # fmt: skip
        held = min(power_of_two(seen), choice.block_columns)
        start_kernel(
            choose_keys_kernel, (queries, rows), scores_BQS, first_BS, keys_BSK, positions, first, queries, seen,
            K=top_k, BLOCK=held, PART=min(held, PART), num_warps=choice.warps,
        )  # fmt: skip
    return keys_BSK


def sparse_attention(
    q_HBSC: Tensor,
    q_rope_BSHP: Tensor,
    latent_BSC: Tensor,
    rope_BSP: Tensor,
    keys_BSK: Tensor,
    first_BS: Tensor,
    *,
    scale: float,
    index: IndexLoss | None = None,
) -> Tensor:
    """`penstock.kernels.sparse_attention.sparse_attention`; keys that are no -1 come first among a query's K."""
    *of_index, factor = (None, None, None, 0.0) if index is None else index
    return _SparseAttention.apply(
        q_HBSC, q_rope_BSHP, latent_BSC, rope_BSP, *of_index, keys_BSK, first_BS, scale, factor
    )


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_HBSC: Tensor,
        q_rope_BSHP: Tensor,
        latent_BSC: Tensor,
        rope_BSP: Tensor,
        index_q_BSGN: Tensor | None,
        index_k_BSN: Tensor | None,
        weights_BSG: Tensor | None,
        keys_BSK: Tensor,
        first_BS: Tensor,
        scale: float,
        factor: float,
    ) -> Tensor:
        inputs = tuple(value.contiguous() for value in (q_HBSC, q_rope_BSHP, latent_BSC, rope_BSP, keys_BSK, first_BS))
        index = tuple(None if part is None else part.contiguous() for part in (index_q_BSGN, index_k_BSN, weights_BSG))
        heads, rows, positions, width = q_HBSC.shape
        sizes = _Sizes(rows, positions, heads, width, rope_BSP.shape[-1], keys_BSK.shape[-1])
        o_HBSC = torch.empty_like(inputs[0])
        log_sums_BSH = torch.empty(q_rope_BSHP.shape[:-1], dtype=torch.float32, device=q_HBSC.device)
        tensors = (*inputs, o_HBSC, log_sums_BSH)
        if _is_hoppers(sizes, q_HBSC):
            grid = (sizes.places * sizes.heads // 64,)
            # The heads' steps of q and o are equal; given twice, the compiler does not hold offsets through the loop.
            steps = inputs[0].stride(0), o_HBSC.stride(0)
            start_kernel(
                sparse_forward_hopper_kernel, grid, *tensors, *steps, sizes.positions, scale,
                H=sizes.heads, K=sizes.top_k, num_warps=8,
            )  # fmt: skip
        else:
            launch = launches_for(q_HBSC.device)["forward"]
            grid = (sizes.places * sizes.blocks(launch),)
            numbers = sizes.places, sizes.positions, scale
            start_kernel(sparse_forward_kernel, grid, *tensors, *numbers, **sizes.constants(launch))
        ctx.save_for_backward(*inputs, *index, o_HBSC, log_sums_BSH)
        ctx.sizes, ctx.scale, ctx.factor = sizes, scale, factor
        return o_HBSC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_HBSC: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, index_q, index_k, weights, o_HBSC, log_sums_BSH = ctx.saved_tensors
        q_HBSC, q_rope_BSHP, latent_BSC, rope_BSP, keys_BSK, first_BS = inputs
        sizes: _Sizes = ctx.sizes
        launches, do_HBSC = launches_for(q_HBSC.device), do_HBSC.contiguous()
        chunk = max(1, min(sizes.places, PAIR_BYTES // (2 * sizes.heads * sizes.top_k * q_HBSC.itemsize)))
        p_QHK, ds_QHK = q_HBSC.new_empty(2, chunk, sizes.heads, sizes.top_k).unbind()
        is_hoppers = _is_hoppers(sizes, q_HBSC)
        parts = sizes.heads // 64 if is_hoppers else sizes.blocks(launches["scores"])
        mass_QK = torch.empty(chunk, parts, sizes.top_k, dtype=torch.float32, device=q_HBSC.device)
        dq_HBSC, dq_rope_BSHP = torch.empty_like(q_HBSC), torch.empty_like(q_rope_BSHP)
        dlatent_BSC, drope_BSP = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (latent_BSC, rope_BSP))
        dindex: tuple[Tensor | None, ...] = (None, None, None)
        if index_q is not None:
            dindex_k = torch.zeros_like(index_k, dtype=torch.float32)
            dindex = torch.empty_like(index_q), dindex_k, torch.empty_like(weights)
        by_head, by_place = (1, sizes.places), (sizes.heads, 1)  # steps of a place and of a head, in rows
        for first in range(0, sizes.places, chunk):
            queries = min(chunk, sizes.places - first)
            p_QHK, ds_QHK, mass_QK = p_QHK[:queries], ds_QHK[:queries], mass_QK[:queries]
            tensors = (*inputs, o_HBSC, log_sums_BSH, do_HBSC, p_QHK, ds_QHK, mass_QK)
            if is_hoppers:
                start_kernel(
                    sparse_score_backward_hopper_kernel, (queries * parts,), *tensors, q_HBSC.stride(0),
                    sizes.positions, first, ctx.scale, H=sizes.heads, K=sizes.top_k, num_warps=8,
                )  # fmt: skip
            else:
                start_kernel(
                    sparse_score_backward_kernel, (queries * parts,), *tensors, sizes.places, sizes.positions, first,
                    ctx.scale, **sizes.constants(launches["scores"]),
                )  # fmt: skip
            for rows, dq, steps in ((latent_BSC, dq_HBSC, by_head), (rope_BSP, dq_rope_BSHP, by_place)):
                grid, constants = _by_columns(sizes, rows.shape[-1], launches["queries"], queries)
                start_kernel(
                    sparse_query_backward_kernel, grid, ds_QHK, rows, keys_BSK, first_BS, dq, *steps, sizes.positions,
                    first, **constants,
                )  # fmt: skip
            for q, do, drows, steps in (
                (q_HBSC, do_HBSC, dlatent_BSC, by_head),
                (q_rope_BSHP, None, drope_BSP, by_place),
            ):
                grid, constants = _by_columns(sizes, q.shape[-1], launches["keys"], queries)
                start_kernel(
                    sparse_key_backward_kernel, grid, q, do, keys_BSK, first_BS, p_QHK, ds_QHK, drows, *steps,
                    sizes.positions, first, **constants,
                )  # fmt: skip
            if index_q is not None:
                of_loss = index_q, index_k, weights, keys_BSK, first_BS
                _add_index_gradients(of_loss, mass_QK, dindex, first, ctx.factor)
        if index_q is not None:
            dindex = dindex[0], dindex_k.to(index_k.dtype), dindex[2]
        dlatent_BSC, drope_BSP = dlatent_BSC.to(latent_BSC.dtype), drope_BSP.to(rope_BSP.dtype)
        return dq_HBSC, dq_rope_BSHP, dlatent_BSC, drope_BSP, *dindex, None, None, None, None


def _add_index_gradients(
    inputs: tuple[Tensor, ...], mass_QPK: Tensor, gradients: tuple[Tensor | None, ...], first: int, factor: float
) -> None:
    """Gradients of the indexer's loss of some queries from `first` on: of its queries, keys (added) and weights.

    The sum of `mass_QPK` over dim 1 is the attention of all heads.
    """
    (_, positions, heads, width), (queries, parts, top_k) = inputs[0].shape, mass_QPK.shape
    launch = launches_for(mass_QPK.device)["index_backward"]
    start_kernel(
        index_backward_kernel, (queries,),
        *inputs, mass_QPK, mass_QPK.new_empty(queries, top_k), *gradients, positions, first, factor,
        G=heads, N=width, K=top_k, PARTS=parts, BLOCK_G=max(LEAST, power_of_two(heads)),
        BLOCK_N=max(LEAST, power_of_two(width)), BLOCK_K=launch.block_columns, STAGES=launch.stages,
        num_warps=launch.warps,
    )  # fmt: skip


def _by_columns(sizes: _Sizes, width: int, launch: KernelLaunch, queries: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and constants of a kernel with a program for some columns of a query's heads."""
    columns = max(LEAST, min(launch.block_depth, power_of_two(width)))
    heads = max(LEAST, min(launch.block_rows, power_of_two(sizes.heads)))
    constants = {
        "H": sizes.heads,
        "C": width,
        "K": sizes.top_k,
        "BLOCK_H": heads,
        "BLOCK_K": launch.block_columns,
        "BLOCK_C": columns,
        "STAGES": launch.stages,
        "num_warps": launch.warps,
    }
    return (queries * ceil_div(width, columns) * ceil_div(sizes.heads, heads),), constants


def _is_hoppers(sizes: _Sizes, q_HBSC: Tensor) -> bool:
    """Whether Hopper's own kernel has these widths."""
    fits = sizes.latent == 512 and sizes.rotary == 64 and q_HBSC.itemsize == 2
    fits = fits and sizes.heads % 64 == 0 and sizes.top_k % 64 == 0
    return fits and obstacle(target_of(q_HBSC.device)) is None
