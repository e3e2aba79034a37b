"""SwiGLU times the routing weight: silu(gate) * up * weight, one pass forward and one pass backward.

An `ExpertRule` may clamp gate and up, apply the weight before the activation, take GELU for SiLU, or square a ReLU of
one projection instead, by compile-time constants. The weight is applied before the linear down projection: its
gradient is the dot product of its row's incoming gradient with silu(gate) * up, and backward has both in registers.
Only the pre-activation is saved. Backward can also write the weighted activation again, which the weight gradient of
the down projection reads.

A program holds some whole rows and walks over them in blocks of columns; all arithmetic is in float32. Where only the
device knows how many rows are used, a limited number of programs take turns, so unused rows cost no time.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.language import start_kernel, tl, triton
from penstock.kernels.reference import SWIGLU, ExpertRule
from penstock.kernels.tuning import KernelLaunch, capped_programs

# 16 bytes for each thread and load, two loads of gate and of up.
LAUNCH = KernelLaunch(block_rows=1, block_columns=2048, warps=4)
# One load of each of three tensors is enough; of 3 x 512 columns 1,408 (DeepSeek-V2-Lite) leave only 8 % idle.
BACKWARD_LAUNCH = KernelLaunch(block_rows=2, block_columns=512, warps=4)


def swiglu(
    gate_up_RF: Tensor,
    weights_R: Tensor | None = None,
    rule: ExpertRule = SWIGLU,
    *,
    launch: KernelLaunch | None = None,
) -> Tensor:
    """`penstock.kernels.reference.swiglu` in one kernel, and one kernel backward.

    `gate_up_RF` may have any leading dims. `launch` sets the rows and columns that a program holds at a time; None
    takes `LAUNCH` and `BACKWARD_LAUNCH`. Raises KernelError for an odd width, or if there is not one weight a row.
    """
    return _Swiglu.apply(gate_up_RF, weights_R, rule, launch)


class SwigluGradients(NamedTuple):
    """Results of `swiglu_backward`."""

    d_gate_up_RF: Tensor  # in shape and dtype of the pre-activation
    dweights_R: Tensor | None  # float32; None without weights
    h_RF: Tensor | None  # the output of `swiglu`; None if not asked for


def swiglu_backward(
    gate_up_RF: Tensor | SavedRows,
    weights_R: Tensor | None,
    dh_RF: Tensor,
    rule: ExpertRule = SWIGLU,
    *,
    recompute: bool = False,
    used: Tensor | None = None,
    launch: KernelLaunch = BACKWARD_LAUNCH,
) -> SwigluGradients:
    """Gradients of `swiglu` from its inputs and the incoming gradient, without autograd; see `swiglu_forward`.

    With `recompute` h_RF is returned too, from the same pass. Weights of unused rows have the gradient 0.
    """
    gate_up_RF, first, _ = rows_given(gate_up_RF, weights_R, rule)
    dh_RF = dh_RF.contiguous()
    width = dh_RF.shape[-1]
    rows = dh_RF.numel() // max(width, 1)
    d_gate_up_RF = dh_RF.new_empty(*dh_RF.shape[:-1], rule.projections * width)
    dweights_R = None
    if weights_R is not None:
        make = torch.empty_like if used is None else torch.zeros_like  # no program writes those of unused rows
        dweights_R = make(weights_R, memory_format=torch.contiguous_format)
    h_RF = torch.empty_like(dh_RF) if recompute else None
    start_kernel(
        swiglu_backward_kernel, (_programs(triton.cdiv(rows, launch.block_rows), used),),
        gate_up_RF, first, None if weights_R is None else weights_R.contiguous(), dh_RF, d_gate_up_RF, dweights_R,
        h_RF, used, rows,
        F=width, BLOCK_R=launch.block_rows, BLOCK_F=launch.block_columns, **rule_constants(rule),
        num_warps=launch.warps,
    )  # fmt: skip
    return SwigluGradients(d_gate_up_RF, dweights_R, h_RF)


def swiglu_forward(
    gate_up_RF: Tensor | SavedRows,
    weights_R: Tensor | None = None,
    rule: ExpertRule = SWIGLU,
    *,
    used: Tensor | None = None,
    launch: KernelLaunch = LAUNCH,
) -> Tensor:
    """`swiglu` without autograd; `gate_up_RF` may also be its place in a buffer.

    `used` (int32, one number, on the device) limits the computation to the first rows; the others hold anything.
    """
    gate_up_RF, first, leading = rows_given(gate_up_RF, weights_R, rule)
    width = gate_up_RF.shape[-1] // rule.projections
    h_RF = gate_up_RF.new_empty(*leading, width)
    rows = h_RF.numel() // max(width, 1)
    start_kernel(
        swiglu_kernel,
        (_programs(triton.cdiv(rows, launch.block_rows), used), triton.cdiv(width, launch.block_columns)),
        gate_up_RF, first, None if weights_R is None else weights_R.contiguous(), h_RF, used, rows,
        F=width, BLOCK_R=launch.block_rows, BLOCK_F=launch.block_columns, **rule_constants(rule),
        num_warps=launch.warps,
    )  # fmt: skip
    return h_RF


def rows_given(
    gate_up_RF: Tensor | SavedRows, weights_R: Tensor | None, rule: ExpertRule
) -> tuple[Tensor, Tensor | None, tuple[int, ...]]:
    """The rows, contiguous, of saved ones the number of the first on the device, and the shape that weights have.

    Raises KernelError for an odd width, or if there is not one weight for each row.
    """
    if isinstance(gate_up_RF, SavedRows):
        source_SF, first, leading = gate_up_RF.rows_SF, gate_up_RF.first, (gate_up_RF.room,)
    else:
        source_SF, first, leading = gate_up_RF, None, tuple(gate_up_RF.shape[:-1])
    if source_SF.shape[-1] % rule.projections:
        raise KernelError("swiglu: the width must hold gate and up", got=source_SF.shape[-1], allowed="an even number")
    if weights_R is not None and (weights_R.shape != leading or weights_R.dtype != torch.float32):
        got = f"{weights_R.dtype} {tuple(weights_R.shape)} for rows {leading}"
        raise KernelError("swiglu: weights must be float32, one for each row", got=got)
    return source_SF.contiguous(), first, leading


def _programs(blocks: int, used: Tensor | None) -> int:
    """One for each block of rows; or fewer that take turns where most blocks may be empty."""
    return blocks if used is None else capped_programs(blocks, used.device)


def rule_constants(rule: ExpertRule) -> dict[str, Any]:
    return {
        "LIMIT": rule.limit,
        "ALPHA": None if rule.is_gelu else rule.alpha,
        "OFFSET": rule.up_offset,
        "WEIGHS_INPUT": rule.weighs_input,
        "SQUARES": not rule.is_gated,
    }


class _Swiglu(torch.autograd.Function):
    """Saves its inputs only."""

    @staticmethod
    def forward(
        ctx: Any, gate_up_RF: Tensor, weights_R: Tensor | None, rule: ExpertRule, launch: KernelLaunch | None
    ) -> Tensor:
        gate_up_RF = gate_up_RF.contiguous()
        ctx.save_for_backward(gate_up_RF, weights_R)
        ctx.rule, ctx.launch = rule, launch or BACKWARD_LAUNCH
        return swiglu_forward(gate_up_RF, weights_R, rule, launch=launch or LAUNCH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_RF: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        gate_up_RF, weights_R = ctx.saved_tensors
        gradients = swiglu_backward(gate_up_RF, weights_R, dh_RF, ctx.rule, launch=ctx.launch)
        return gradients.d_gate_up_RF, gradients.dweights_R, None, None


@triton.jit(do_not_specialize=["rows"])
def swiglu_kernel(
    gate_up_ptr, first_ptr, weights_ptr, h_ptr, used_ptr, rows,  # gate_up R x 2F, h R x F
    F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    OFFSET: tl.constexpr, WEIGHS_INPUT: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Blocks of h. Example with F = 2, gate_up [1, 2, 10, 20] and weight 0.5: h = [5 silu(1), 10 silu(2)].

    With WEIGHS_INPUT it is [5 silu(0.5), 10 silu(1)]. With SQUARES, [1, 2] gives [0.5, 2].
    """
    if used_ptr is not None:
        rows = tl.minimum(rows, tl.load(used_ptr))
    if first_ptr is not None:  # saved rows: the layer's first row is known on the device only
        gate_up_ptr += tl.load(first_ptr) * (F if SQUARES else 2 * F)
    column_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R), tl.num_programs(0)):
        row_R = block * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = (row_R < rows)[:, None] & (column_F < F)[None, :]
        start_R1 = row_R.to(tl.int64)[:, None]
        h_RF = load_activated(
            gate_up_ptr, weights_ptr, row_R, row_R < rows, start_R1, column_F, inside, F, LIMIT, ALPHA, OFFSET,
            WEIGHS_INPUT, SQUARES,
        )  # fmt: skip
        tl.store(h_ptr + start_R1 * F + column_F[None, :], h_RF.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def swiglu_backward_kernel(
    gate_up_ptr, first_ptr, weights_ptr, dh_ptr, d_gate_up_ptr, dweights_ptr, h_ptr, used_ptr, rows,
    F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    OFFSET: tl.constexpr, WEIGHS_INPUT: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Gradients of whole rows, and their h where h_ptr is not None."""
    WIDE: tl.constexpr = F if SQUARES else 2 * F
    if used_ptr is not None:
        rows = tl.minimum(rows, tl.load(used_ptr))
    if first_ptr is not None:
        gate_up_ptr += tl.load(first_ptr) * WIDE
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R), tl.num_programs(0)):
        row_R = block * BLOCK_R + tl.arange(0, BLOCK_R)
        start_R1 = row_R.to(tl.int64)[:, None]
        weight_R1 = None
        if weights_ptr is not None:
            weight_R1 = tl.load(weights_ptr + row_R, mask=row_R < rows, other=0.0)[:, None]
        products_RF = tl.zeros([BLOCK_R, BLOCK_F], tl.float32)  # terms of the weights' gradients
        for start in range(0, F, BLOCK_F):
            column_F = start + tl.arange(0, BLOCK_F)
            inside = (row_R < rows)[:, None] & (column_F < F)[None, :]
            wide = start_R1 * WIDE + column_F[None, :]  # offsets in rows of gate and up
            narrow = start_R1 * F + column_F[None, :]  # offsets in rows of h
            gate_RF = tl.load(gate_up_ptr + wide, mask=inside, other=0.0).to(tl.float32)
            dh_RF = tl.load(dh_ptr + narrow, mask=inside, other=0.0).to(tl.float32)
            if SQUARES:
                h_RF, dgate_RF, product_RF = square_gradients(gate_RF, dh_RF, weight_R1, WEIGHS_INPUT)
            else:
                up_RF = tl.load(gate_up_ptr + wide + F, mask=inside, other=0.0).to(tl.float32)
                h_RF, dgate_RF, dup_RF, product_RF = activation_gradients(
                    gate_RF, up_RF, dh_RF, weight_R1, LIMIT, ALPHA, OFFSET, WEIGHS_INPUT
                )
                tl.store(d_gate_up_ptr + wide + F, dup_RF.to(d_gate_up_ptr.dtype.element_ty), mask=inside)
            if weights_ptr is not None:
                products_RF += product_RF
            if h_ptr is not None:
                tl.store(h_ptr + narrow, h_RF.to(h_ptr.dtype.element_ty), mask=inside)
            tl.store(d_gate_up_ptr + wide, dgate_RF.to(d_gate_up_ptr.dtype.element_ty), mask=inside)
        if weights_ptr is not None:
            tl.store(dweights_ptr + row_R, tl.sum(products_RF, 1), mask=row_R < rows)


@triton.jit
def load_activated(
    gate_up_ptr, weights_ptr, row_R, is_row_R, start_R1, column_F, inside, F,  # start_R1: rows in 64 bits
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr, WEIGHS_INPUT: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Load gate, up and weights of a tile, and return `swiglu` of them, float32; 0 outside."""
    gate_ptrs = gate_up_ptr + start_R1 * (F if SQUARES else 2 * F) + column_F[None, :]
    gate_RF = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    weight_R1 = None
    if weights_ptr is not None:
        weight_R1 = tl.load(weights_ptr + row_R, mask=is_row_R, other=0.0)[:, None]
    if SQUARES:
        h_RF, _, _ = square_gradients(gate_RF, gate_RF, weight_R1, WEIGHS_INPUT)
    else:
        up_RF = tl.load(gate_ptrs + F, mask=inside, other=0.0).to(tl.float32)
        h_RF = activated(gate_RF, up_RF, weight_R1, LIMIT, ALPHA, OFFSET, WEIGHS_INPUT)
    return h_RF


@triton.jit
def activated(
    gate, up, weight, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr, WEIGHS_INPUT: tl.constexpr
):
    """Output of `swiglu` from float32 gate and up; `weight` is None for 1."""
    if weight is not None and WEIGHS_INPUT:
        gate *= weight
        up *= weight
    if LIMIT is not None:
        gate, up, _, _ = _clamp(gate, up, LIMIT, OFFSET)
    steep, _ = _steep(gate, LIMIT, ALPHA)
    h = gate * tl.sigmoid(steep) * up
    if weight is not None and not WEIGHS_INPUT:
        h *= weight
    return h


@triton.jit
def square_gradients(x, dh, weight, WEIGHS_INPUT: tl.constexpr):
    """relu(x)**2, the gradient of x, and the terms whose row sum is the weight's gradient. NaN stays NaN."""
    given = x
    if weight is not None and WEIGHS_INPUT:
        x *= weight
    relu = tl.where(x <= 0.0, 0.0, x)
    h = relu * relu
    product = dh * h
    if weight is not None and not WEIGHS_INPUT:
        h *= weight
        dh *= weight
    dx = 2.0 * dh * relu
    if weight is not None and WEIGHS_INPUT:
        product = dx * given
        dx *= weight
    return h, dx, product


@triton.jit
def activation_gradients(
    gate, up, dh, weight, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr, WEIGHS_INPUT: tl.constexpr
):
    """Output of `swiglu`, gradients of gate and up, and the terms whose row sum is the weight's gradient.

    With s = sigmoid(f(gate)): (gate s)' = s (1 + gate f'(gate) (1 - s)). Values at their limit and beyond have no
    gradient.
    `weight` is None for 1.
    """
    given_gate, given_up = gate, up
    if weight is not None and WEIGHS_INPUT:
        gate *= weight
        up *= weight
    if LIMIT is not None:
        gate, up, gate_is_over, up_is_over = _clamp(gate, up, LIMIT, OFFSET)
    steep, slope = _steep(gate, LIMIT, ALPHA)
    sigmoid = tl.sigmoid(steep)
    silu = gate * sigmoid
    h = silu * up
    product = dh * h
    if weight is not None and not WEIGHS_INPUT:
        h *= weight
        dh *= weight
    dgate = dh * up * sigmoid * (1.0 + slope * (1.0 - sigmoid))
    dup = dh * silu
    if LIMIT is not None:
        dgate = tl.where(gate_is_over, 0.0, dgate)
        dup = tl.where(up_is_over, 0.0, dup)
    if weight is not None and WEIGHS_INPUT:
        product = dgate * given_gate + dup * given_up
        dgate *= weight
        dup *= weight
    return h, dgate, dup, product


@triton.jit
def _steep(gate, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """The f of gate * sigmoid(f(gate)), and gate * f'(gate); without ALPHA it is that of the tanh form of GELU."""
    if ALPHA is None:
        cube = 0.044715 * gate * gate * gate
        steep, slope = 1.5957691216057308 * (gate + cube), 1.5957691216057308 * (gate + 3.0 * cube)  # 2 sqrt(2 / pi)
    else:
        steep = gate if LIMIT is None else ALPHA * gate
        slope = steep
    return steep, slope


@triton.jit
def _clamp(gate, up, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """Clamp both, add the offset of up, and return where they are at their limit or beyond. NaN stays NaN."""
    gate_is_over, up_is_over = gate >= LIMIT, tl.abs(up) >= LIMIT
    gate = tl.where(gate_is_over, LIMIT, gate)
    up = tl.where(up_is_over, tl.where(up > 0, LIMIT, -LIMIT), up) + OFFSET
    return gate, up, gate_is_over, up_is_over
