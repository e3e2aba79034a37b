"""Launch Hopper's own kernels of plain causal attention (`attention_kernels`).

`penstock.kernels.hopper_attention` says which calls they take.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels.attention_bounds import parts_of
from penstock.kernels.gluon.support import HAS_GLUON, REGISTERS, blocks_of
from penstock.kernels.hopper_attention import BLOCK, MOST
from penstock.kernels.language import tl, triton
from penstock.kernels.launching import start_kernel

if HAS_GLUON:
    from penstock.kernels.gluon.attention_kernels import causal_backward_kernel, causal_forward_kernel

ALIGNED = 8  # numbers, 16 bytes
STAGES = 2
HEADS = 4  # whose programs run at a time, a multiprocessor each in rows of 4,096 positions


def attention(q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, *, scale: float) -> Tensor:
    """`penstock.kernels.attention.causal_attention` without mask and sinks. Returns o_BSHM."""
    o_BSHM: Tensor = _CausalAttention.apply(q_BSHN, k_BSGN, v_BSGM, scale)
    return o_BSHM


class _CausalAttention(torch.autograd.Function):
    """Saves the inputs, the output and log_sums."""

    @staticmethod
    def forward(ctx: Any, q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, scale: float) -> Tensor:
        q_BSHN, k_BSGN, v_BSGM = q_BSHN.contiguous(), k_BSGN.contiguous(), _with_even_steps(v_BSGM)
        o_BSHM, log_sums_BHS = forward(q_BSHN, k_BSGN, v_BSGM, scale)
        ctx.save_for_backward(q_BSHN, k_BSGN, v_BSGM, o_BSHM, log_sums_BHS)
        ctx.scale = scale
        return o_BSHM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BSHM: Tensor) -> tuple[Tensor | None, ...]:
        q_BSHN, k_BSGN, v_BSGM, o_BSHM, log_sums_BHS = ctx.saved_tensors
        found = backward(do_BSHM.contiguous(), q_BSHN, k_BSGN, v_BSGM, o_BSHM, log_sums_BHS, ctx.scale)
        return *found, None


def forward(q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """o_BSHM, and log_sums_BHS = log2 of the sum of exp."""
    (rows, positions, heads, width), (groups, value_width) = q_BSHN.shape, v_BSGM.shape[2:]
    o_BSHM = q_BSHN.new_empty(rows, positions, heads, value_width)
    log_sums_BHS = q_BSHN.new_empty(rows, heads, positions, dtype=torch.float32)
    for part in _launches(q_BSHN):
        q, k, v, o, log_sums = (x[part] for x in (q_BSHN, k_BSGN, v_BSGM, o_BSHM, log_sums_BHS))
        start_kernel(
            causal_forward_kernel, (len(q) * heads * (positions // BLOCK),),
            *_blocks(q, 64), *_blocks(k, 128), _blocks(v, 128)[0], o, log_sums, positions, len(q), scale,
            H=heads, G=groups, REST=parts_of(width)[1], V_STEP=v.stride(2), STAGES=STAGES, HEADS=HEADS,
            num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip
    return o_BSHM, log_sums_BHS


def backward(
    do_BSHM: Tensor,
    q_BSHN: Tensor,
    k_BSGN: Tensor,
    v_BSGM: Tensor,
    o_BSHM: Tensor,
    log_sums_BHS: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq_BSHN, dk_BSGN and dv_BSGM."""
    (rows, positions, heads, width), (groups, value_width) = q_BSHN.shape, v_BSGM.shape[2:]
    dq_BSHN, dk_BSGN, dv_BSGM = (x.new_empty(x.shape) for x in (q_BSHN, k_BSGN, v_BSGM))
    delta_BHS = torch.empty_like(log_sums_BHS)
    start_kernel(
        delta_kernel, (heads, positions // 64, rows), do_BSHM, o_BSHM, delta_BHS, positions, scale,
        H=heads, M=value_width, num_warps=4,
    )  # fmt: skip
    parts = _launches(q_BSHN)
    sums_BSHN = torch.empty_like(q_BSHN[parts[-1]], dtype=torch.float32)  # no other part has more rows
    for part in parts:
        q, k, v, do = (x[part] for x in (q_BSHN, k_BSGN, v_BSGM, do_BSHM))
        sums = sums_BSHN[: len(q)].zero_()
        start_kernel(
            causal_backward_kernel, (len(q) * groups * (positions // BLOCK),),
            *_blocks(q, 64), *_blocks(k, 64), _blocks(v, 64)[0], _blocks(do, 64)[0],
            log_sums_BHS[part], delta_BHS[part], blocks_of(_rows_of(sums), 64, 64), dk_BSGN[part], dv_BSGM[part],
            positions, len(q), scale,
            H=heads, G=groups, REST=parts_of(width)[1], V_STEP=v.stride(2), STAGES=STAGES, HEADS=HEADS,
            num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip
        dq_BSHN[part] = sums
    return dq_BSHN, dk_BSGN, dv_BSGM


def _launches(q_BSHN: Tensor) -> list[slice]:
    """Rows of each launch, about equally many, with at most `MOST` numbers of queries."""
    rows, of_a_row = len(q_BSHN), q_BSHN.shape[1:].numel()
    assert of_a_row <= MOST, "a row is more than a launch may have"
    launches = max(1, -(-rows // (MOST // of_a_row)))
    bounds = [rows * number // launches for number in range(launches + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


def _with_even_steps(v_BSGM: Tensor) -> Tensor:
    """Values that a descriptor can describe: those of latent attention are columns of a wider tensor."""
    row, position, head, column = v_BSGM.stride()
    is_even = column == 1 and row == v_BSGM.shape[1] * position and not position % ALIGNED and not head % ALIGNED
    return v_BSGM if is_even and not v_BSGM.data_ptr() % 16 else v_BSGM.contiguous()


def _rows_of(x_BSHN: Tensor) -> Tensor:
    """Positions of all rows by columns of all heads, and what lies between these."""
    rows, positions, heads, width = x_BSHN.shape
    return x_BSHN.as_strided((rows * positions, (heads - 1) * x_BSHN.stride(2) + width), (x_BSHN.stride(1), 1))


def _blocks(x_BSHN: Tensor, positions: int) -> tuple[Any, Any]:
    """Descriptors of blocks of positions and of the parts of a head's columns; one twice if there is one part."""
    part, rest = parts_of(x_BSHN.shape[-1])
    rows = _rows_of(x_BSHN)
    return blocks_of(rows, positions, part), blocks_of(rows, positions, rest or part)


@triton.jit(do_not_specialize=["positions"])
def delta_kernel(do_ptr, o_ptr, delta_ptr, positions, scale, H: tl.constexpr, M: tl.constexpr):
    """The delta of a softmax, scale (do . o), of 64 positions of a head."""
    head, block, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    place_Q = block * 64 + tl.arange(0, 64)
    at_QM = ((row * positions + place_Q) * H + head)[:, None] * M + tl.arange(0, M)[None, :]
    product_QM = tl.load(do_ptr + at_QM).to(tl.float32) * tl.load(o_ptr + at_QM).to(tl.float32)
    tl.store(delta_ptr + (row * H + head) * positions + place_Q, tl.sum(product_QM, 1) * scale)
