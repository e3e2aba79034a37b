"""Latent attention's heads, as `penstock.kernels.rope.mla_heads` assembles them, between products in 8 bits.

The gradients of queries, and of keys and values, are read by products alone. So backward reads what attention gives
once and writes them in 8 bits only, by rows and transposed, as `quantize_rows` would have made them of the gradients in
16 bits. They are handed over (`handed`). One kernel does it for each of dq, dk and dv, another one sums the gradient of
the shared rotary key.

Hopper has its own form of that kernel (`penstock.kernels.gluon`), for a multiple of 128 tokens in each sequence.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels import rope
from penstock.kernels.float8.formats import Format
from penstock.kernels.float8.gradient_side_channel import HandedHeads, carrier_of
from penstock.kernels.float8.latent_heads_kernels import latent_heads_backward_kernel, shared_key_backward_kernel
from penstock.kernels.float8.quantize import empty_copy, memory_of, register_limit, run_of, warps_of
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.kernels.float8.recipes import BLOCKWISE, DEPTH
from penstock.kernels.float8.tile_launches import (
    TRANSPOSING,
    TRANSPOSING_TAKEN,
    TURNING,
    TURNING_TAKEN,
    TileLaunch,
)
from penstock.kernels.gluon import float8_quantize
from penstock.kernels.launching import start_kernel
from penstock.kernels.tuning import target_of

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, (B or 1) x S x P / 2, float32, contiguous."""


def mla_heads(
    q_BSHN: Tensor,
    kv_BSHN: Tensor,
    k_rope_BSP: Tensor,
    cos_BSP: Tensor,
    sin_BSP: Tensor,
    handed: HandedHeads,
    form: Format,
    *,
    launch: TileLaunch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`penstock.kernels.rope.mla_heads` whose gradients of queries, and of keys and values, are handed over in 8 bits.

    Args:
        q_BSHN: queries, [no position | rotary] in the last dim; `handed.obstacle` says of which widths.
        kv_BSHN: [key without position | value] in the last dim.
        k_rope_BSP: the one rotary key that all heads share; its gradient comes in its own dtype.
        cos_BSP: float32, P / 2 wide; B may be 1.
        sin_BSP: float32.
        handed: where backward leaves its gradients.
        form: of their values.
        launch: of the kernel that quantizes; None is `TURNING_TAKEN` for queries, else `TRANSPOSING_TAKEN`.

    Returns:
        q_BSHN and k_BSHN, contiguous; v_BSHM, a view of kv.

    Raises:
        KernelError: angles do not fit the rotary part, or widths do not fit each other.
    """
    angles = cos_BSP.contiguous(), sin_BSP.contiguous()
    return _LatentHeads.apply(q_BSHN, kv_BSHN, k_rope_BSP, *angles, handed, form, launch)


class _LatentHeads(torch.autograd.Function):
    """Saves the angles."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BSHN: Tensor,
        kv_BSHN: Tensor,
        k_rope_BSP: Tensor,
        cos_BSP: Tensor,
        sin_BSP: Tensor,
        handed: HandedHeads,
        form: Format,
        launch: TileLaunch | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_out_BSHN, k_out_BSHN, v_BSHM = rope.mla_heads(q_BSHN, kv_BSHN, k_rope_BSP, cos_BSP, sin_BSP)
        ctx.save_for_backward(cos_BSP, sin_BSP)
        ctx.how = handed, form, launch
        return q_out_BSHN, k_out_BSHN, kv_BSHN[..., -v_BSHM.shape[-1] :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_BSHN: Tensor, dk_BSHN: Tensor, dv_BSHM: Tensor) -> tuple[Tensor | None, ...]:
        handed, form, launch = ctx.how
        assert handed.q is not None and handed.kv is not None, "gradients are handed over"
        cos_BSP, sin_BSP = ctx.saved_tensors
        q, kv, dk_rope_BSP = mla_heads_backward(dq_BSHN, dk_BSHN, dv_BSHM, cos_BSP, sin_BSP, form, launch=launch)
        handed.q.put(q)
        handed.kv.put(kv)
        wide = kv.rows.values.shape[1] // dk_BSHN.shape[2]
        dkv_BSHN = carrier_of((*dk_BSHN.shape[:-1], wide), dk_BSHN)
        return carrier_of(dq_BSHN.shape, dq_BSHN), dkv_BSHN, dk_rope_BSP, None, None, None, None, None


class HeadsGradients(NamedTuple):
    """What backward makes.

    Attributes:
        q: tokens x (H N).
        kv: tokens x (H (plain + M)).
        k_rope_BSP: of the shared key, in its own dtype.
    """

    q: RowColQuantized
    kv: RowColQuantized
    k_rope_BSP: Tensor


def mla_heads_backward(
    dq_BSHN: Tensor,
    dk_BSHN: Tensor,
    dv_BSHM: Tensor,
    cos_BSP: Tensor,
    sin_BSP: Tensor,
    form: Format,
    *,
    launch: TileLaunch | None = None,
) -> HeadsGradients:
    """The gradients of what `mla_heads` is given, from those of what it gives.

    Args:
        dq_BSHN: of queries; batch, position and head in any order of memory.
        dk_BSHN: of keys, likewise.
        dv_BSHM: of values, likewise.
        cos_BSP: float32, P / 2 wide, contiguous; B may be 1.
        sin_BSP: float32, contiguous.
        form: of the values.
        launch: as of `mla_heads`.
    """
    angles = cos_BSP, sin_BSP
    plain, value = dq_BSHN.shape[-1] - 2 * cos_BSP.shape[-1], dv_BSHM.shape[-1]
    q, kv = _room(dq_BSHN, dq_BSHN.shape[-1], form), _room(dk_BSHN, plain + value, form)
    _fill(q, dq_BSHN, 0, angles, form, launch)
    _fill(kv, dk_BSHN[..., :plain], 0, None, form, launch)
    _fill(kv, dv_BSHM, plain, None, form, launch)
    return HeadsGradients(q, kv, _shared_key(dk_BSHN[..., plain:], angles))


def _room(like_BSHN: Tensor, width: int, form: Format) -> RowColQuantized:
    """Memory for a gradient of heads of so many columns, by rows and transposed."""
    batch, positions, heads, _ = like_BSHN.shape
    outer, depth = batch * positions, heads * width
    block, scaling = BLOCKWISE.rows, BLOCKWISE.scaling
    rows, columns = ((outer, depth), (depth, outer))
    return RowColQuantized(*(empty_copy(like_BSHN, shape, block, form, scaling) for shape in (rows, columns)))


def _fill(
    both: RowColQuantized, x_BSHN: Tensor, first: int, angles: Angles | None, form: Format, launch: TileLaunch | None
) -> None:
    """Write some columns of each head.

    Args:
        both: of all of them.
        x_BSHN: those that are written.
        first: the first of them in a head.
        angles: by which the last of them are turned back; None turns none.
        form: of the values.
        launch: None is what runs take; where it is `gluon` and that cannot be, a launch of Triton's is taken.
    """
    x_BSHN = rope.with_contiguous_rows(x_BSHN)
    batch, positions, heads, width = x_BSHN.shape
    rows, columns = both
    assert columns is not None, "both are written"
    tokens, whole = rows.values.shape
    if tokens == 0:
        return
    cos_BSP, sin_BSP = angles or (None, None)
    sizes = {"WIDTH": width, "APART": whole // heads, "FIRST": first, "LARGEST": form.largest}
    sizes["PLAIN"] = width if cos_BSP is None else width - 2 * cos_BSP.shape[-1]
    strides = *x_BSHN.stride()[:3], *((0, 0) if cos_BSP is None else rope.angle_strides(cos_BSP, batch))
    source = x_BSHN, cos_BSP, sin_BSP
    launch = launch or (TRANSPOSING_TAKEN if angles is None else TURNING_TAKEN)
    if launch.engine == "gluon":
        target = target_of(x_BSHN.device)
        problem = float8_quantize.obstacle([BLOCKWISE.rows] * 2, BLOCKWISE.scaling, [form], heads * width, target)
        if problem is None and x_BSHN.dtype == torch.bfloat16 and positions % DEPTH == 0:
            float8_quantize.launch_latent_heads(source, both, positions, strides, sizes, launch)
            return
        launch = TRANSPOSING if angles is None else TURNING
    start_kernel(
        latent_heads_backward_kernel,
        (heads * width // DEPTH, -(-tokens // DEPTH)),
        *source,
        rows.values,
        memory_of(rows.scales),
        columns.values,
        memory_of(columns.scales),
        tokens,
        positions,
        *strides,
        rows.values.stride(0),
        columns.values.stride(0),
        whole,
        **sizes,
        BLOCK_R=DEPTH,
        BLOCK_D=DEPTH,
        RUN=run_of(launch),
        num_warps=warps_of(launch, x_BSHN.device),
        **register_limit(launch, x_BSHN.device),
    )


def _shared_key(dk_BSHP: Tensor, angles: Angles) -> Tensor:
    """The gradient of the rotary key that all heads share, from those of the heads."""
    batch, positions, heads, rotary = dk_BSHP.shape
    dk_BSHP = rope.with_contiguous_rows(dk_BSHP)
    dk_rope_BSP = dk_BSHP.new_empty(batch, positions, rotary)
    start_kernel(
        shared_key_backward_kernel,
        (positions, batch),
        dk_BSHP,
        *angles,
        dk_rope_BSP,
        *dk_BSHP.stride()[:3],
        *rope.angle_strides(angles[0], batch),
        H=heads,
        P=rotary,
        BLOCK_P=1 << (rotary - 1).bit_length(),
        **rope.heads_at_a_time(heads, rope.LAUNCH),
    )
    return dk_rope_BSP
