"""Output projection and cross entropy in chunks, without the logits of all tokens in memory.

The logits of 8,192 tokens x 102,400 words are 1.7 GB in bfloat16, and their float32 copy and gradient several times
that. Tokens are independent here, so they are processed in chunks:

    logits = x head^T          cuBLAS, into one buffer that all chunks share
    logits -> their gradient   one kernel, in place: pass 1 finds logsumexp, pass 2 writes softmax - onehot
    dx     = dlogits head      cuBLAS
    dhead += dlogits^T x       cuBLAS, summed over the chunks in float32

So forward computes the gradients for an incoming gradient of 1, and backward multiplies them by the real one. The host
never waits.

In 8 bits (`Float8Rule.head`) the head is quantized in each call, x in each chunk. The row pass finds logsumexp alone,
and `Float8Operators.logits_gradient` reads the logits once more and writes their gradient by rows and transposed, in 8
bits only: 6 bytes of a logit move, not 10. Where a scale belongs to a whole row, or the head needs no gradient, the
gradient stands in place of the logits, as in 16 bits, and is quantized afterwards.

With a process group the vocabulary is split over its ranks: each finds logsumexp of its own columns, two small
all-reduces combine them, and the gradient alone follows. The row pass exists in Triton and in plain torch (for a CPU).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.kernels.float32_products import add_product
from penstock.kernels.language import HAS_TRITON, on_gpu, start_kernel, tl, triton
from penstock.kernels.reference import IGNORED_LABEL, logits_gradient
from penstock.kernels.tuning import KernelLaunch

LOGITS_BYTES = 2**31  # most bytes of the logits of a chunk of 4,096 tokens; above it a chunk has 2,048
# A program holds one row, `block_columns` of it at a time; loads run `stages` blocks ahead.
LAUNCH = KernelLaunch(block_rows=1, block_columns=8192, warps=16, stages=3)
SCALE_BLOCK = 4096  # elements of a program that scales a gradient


def linear_cross_entropy(
    x_TD: Tensor,
    head_VD: Tensor,
    labels_T: Tensor,
    z_weight: float = 0.0,
    *,
    chunk_tokens: int | None = None,
    group: dist.ProcessGroup | None = None,
    accumulate_into: Tensor | None = None,
    float8: Float8Rule | None = None,
    launch: KernelLaunch | None = None,
) -> Tensor:
    """`reference.linear_cross_entropy` of hidden states and head in one dtype, float32 or bfloat16; int64 labels.

    A label outside the vocabulary makes the loss NaN, because an error would need the host to wait. Raises KernelError
    where shapes or dtypes do not fit.

    Args:
        chunk_tokens: tokens of a chunk; None for `default_chunk_tokens`.
        group: ranks over which the vocabulary is split: equal parts, in rank order, so `head_VD` is this rank's. x,
            labels and the loss are the same on all of them. The gradient of x is this rank's part of a sum, which the
            backward of the operation that copied or gathered x adds up.
        accumulate_into: contiguous float32, V x D: backward adds the head's gradient here instead of returning it.
        float8: rule whose recipe `head` the products follow; None computes them in the dtype of x.
        launch: of the Triton kernel; None takes `LAUNCH` on a GPU and the form in plain torch on a CPU.
    """
    _check(x_TD, head_VD, labels_T, accumulate_into)
    columns = head_VD.shape[0]
    first, vocabulary = (0, columns) if group is None else (dist.get_rank(group) * columns, group.size() * columns)
    plan = _Plan(
        first_label=first,
        vocabulary=vocabulary,
        z_weight=z_weight,
        chunk_tokens=default_chunk_tokens(head_VD) if chunk_tokens is None else chunk_tokens,
        group=group,
        accumulate_into=accumulate_into,
        float8=float8,
        launch=LAUNCH if launch is None and on_gpu(x_TD) and (HAS_TRITON or x_TD.is_meta) else launch,
    )
    if torch.is_grad_enabled() and (x_TD.requires_grad or head_VD.requires_grad):
        return _LinearCrossEntropy.apply(x_TD, head_VD, labels_T.contiguous(), plan)
    return _walk_chunks(x_TD, head_VD, labels_T.contiguous(), plan, wants_x=False, wants_head=False)[0]


def default_chunk_tokens(head_VD: Tensor) -> int:
    """4,096 tokens while their logits fit into `LOGITS_BYTES`, else 2,048: with fewer the products lose speed."""
    return 4096 if 4096 * head_VD.shape[0] * head_VD.element_size() <= LOGITS_BYTES else 2048


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Arguments of `linear_cross_entropy` that are not differentiated."""

    first_label: int  # of the first column on this rank
    vocabulary: int  # labels over all ranks
    z_weight: float
    chunk_tokens: int
    group: dist.ProcessGroup | None
    accumulate_into: Tensor | None
    float8: Float8Rule | None
    launch: KernelLaunch | None


class _Rows(NamedTuple):
    """The rows of a chunk: logits, their labels, and two results of the row pass."""

    logits_TV: Tensor
    labels_T: Tensor
    logsumexp_T: Tensor
    target_T: Tensor


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward computes the gradients; backward scales them."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, head_VD: Tensor, labels_T: Tensor, plan: _Plan) -> Tensor:
        wants_x, wants_head = ctx.needs_input_grad[:2]
        loss, *gradients = _walk_chunks(x_TD, head_VD, labels_T, plan, wants_x=wants_x, wants_head=wants_head)
        ctx.save_for_backward(*gradients)
        ctx.head_dtype, ctx.plan = head_VD.dtype, plan
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        dx_TD, dhead_VD = ctx.saved_tensors
        sum_VD, in_triton = ctx.plan.accumulate_into, ctx.plan.launch is not None
        if dx_TD is not None:
            dx_TD = _scale(dx_TD, dloss, torch.empty_like(dx_TD), in_triton)
        if dhead_VD is not None and sum_VD is None:
            dhead_VD = _scale(dhead_VD, dloss, torch.empty_like(dhead_VD, dtype=ctx.head_dtype), in_triton)
        elif dhead_VD is not None:
            _scale(dhead_VD, dloss, sum_VD, in_triton, add=True)
            dhead_VD = None
        return dx_TD, dhead_VD, None, None


def _walk_chunks(
    x_TD: Tensor, head_VD: Tensor, labels_T: Tensor, plan: _Plan, *, wants_x: bool, wants_head: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss, and its gradients for an incoming gradient of 1: of x, and of the head in float32.

    Inside the loop T is the tokens of a chunk; logits_TV is overwritten by its own gradient, unless products make that.
    """
    tokens, columns = x_TD.shape[0], head_VD.shape[0]
    buffer_TV = x_TD.new_empty(min(plan.chunk_tokens, tokens), columns)
    logsumexp_T, target_T = x_TD.new_empty(2, tokens, dtype=torch.float32)
    dx_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format) if wants_x else None
    # The first chunk overwrites it, so only a batch without tokens needs the zeros.
    make_head_gradient = torch.empty_like if tokens else torch.zeros_like
    dhead_VD = make_head_gradient(head_VD, dtype=torch.float32) if wants_head else None
    products = _Products(head_VD) if plan.float8 is None else _Float8Products(head_VD, plan, wants_head)

    for start in range(0, tokens, plan.chunk_tokens):
        chunk = slice(start, start + plan.chunk_tokens)
        logits_TV = buffer_TV[: labels_T[chunk].shape[0]]
        products.multiply(x_TD[chunk], logits_TV)
        rows = _Rows(logits_TV, labels_T[chunk], logsumexp_T[chunk], target_T[chunk])
        _pass_over_rows(rows, plan, wants_gradient=(wants_x or wants_head) and not products.makes_dlogits)
        if wants_x or wants_head:
            products.put_gradients(rows, None if dx_TD is None else dx_TD[chunk], dhead_VD, overwrite=start == 0)

    loss_T = logsumexp_T - target_T + plan.z_weight * logsumexp_T.square()
    return torch.where(labels_T != IGNORED_LABEL, loss_T, 0.0).sum(), dx_TD, dhead_VD


class _Products:
    """Those of the operator, in the dtype of x and the head; of one chunk after the other."""

    makes_dlogits = False  # whether `put_gradients` makes the gradient of the logits from logits

    def __init__(self, head_VD: Tensor) -> None:
        self._head_VD = head_VD

    def multiply(self, x_TD: Tensor, logits_TV: Tensor) -> None:
        """Write a chunk's logits."""
        self._x_TD = x_TD
        torch.mm(x_TD, self._head_VD.T, out=logits_TV)

    def put_gradients(self, rows: _Rows, dx_TD: Tensor | None, dhead_VD: Tensor | None, *, overwrite: bool) -> None:
        """Write the gradient of this chunk's x, and add that of the head in float32, or overwrite it; what is given.

        Unless it `makes_dlogits`, the rows have the gradient of the logits in their place.
        """
        if dx_TD is not None:
            torch.mm(rows.logits_TV, self._head_VD, out=dx_TD)
        if dhead_VD is not None:
            add_product(dhead_VD, rows.logits_TV.T, self._x_TD, overwrite=overwrite)


class _Float8Products:
    """`_Products` in 8 bits, each operand in the blocks that it has in a dense product (models/linear.py)."""

    def __init__(self, head_VD: Tensor, plan: _Plan, wants_head: bool) -> None:
        rule = plan.float8
        assert rule is not None and rule.head is not None, "the output projection is in 16 bits"
        self._plan, self._rule, self._recipe, self._operators = plan, rule, rule.head, rule.operators
        self._head = self._operators.quantize_weight(head_VD.detach(), rule.head, rule.forward)
        self._wants_head = wants_head
        # A scale for a whole row needs its largest gradient first, so there gradients are written in 16 bits.
        self.makes_dlogits = wants_head and rule.head.rows[1] != 0

    def multiply(self, x_TD: Tensor, logits_TV: Tensor) -> None:
        columns = self._recipe.columns if self._wants_head else None
        self._x = self._operators.quantize_rows(x_TD, self._recipe, self._rule.forward, columns=columns)
        self._operators.multiply(self._x.rows, self._head.forward, logits_TV.dtype, out=logits_TV)

    def put_gradients(self, rows: _Rows, dx_TD: Tensor | None, dhead_VD: Tensor | None, *, overwrite: bool) -> None:
        dlogits = self._gradient(rows)
        if dx_TD is not None:
            self._operators.multiply(dlogits.rows, self._head.backward, dx_TD.dtype, out=dx_TD)
        if dhead_VD is not None:
            target = {"out" if overwrite else "accumulate_into": dhead_VD}
            self._operators.multiply(dlogits.columns, self._x.columns, dhead_VD.dtype, **target)

    def _gradient(self, rows: _Rows) -> RowColQuantized:
        """The gradient of the logits by rows, and transposed for that of the head."""
        recipe, form = self._recipe, self._rule.gradient
        if not self.makes_dlogits:
            columns = recipe.rows if self._wants_head else None
            return self._operators.quantize_rows(rows.logits_TV, recipe, form, columns=columns)
        options = {"first_label": self._plan.first_label, "z_weight": self._plan.z_weight}
        logits_TV, labels_T, logsumexp_T, _ = rows
        return self._operators.logits_gradient(logits_TV, labels_T, logsumexp_T, recipe, form, **options)


def _scale(gradient: Tensor, scale: Tensor, out: Tensor, in_triton: bool, add: bool = False) -> Tensor:
    """`out = gradient * scale`, or += with `add`, in float32 and in one pass; the scale stays on the device."""
    if in_triton:
        grid, numbers = (triton.cdiv(gradient.numel(), SCALE_BLOCK),), gradient.numel()
        start_kernel(scale_kernel, grid, gradient, scale, out, numbers, ADD=add, BLOCK=SCALE_BLOCK, num_warps=8)
        return out
    # Two-dimensional, so that the scale takes part in type promotion: a bfloat16 gradient is multiplied in float32.
    scale = scale.view(1, 1)
    return out.addcmul_(gradient, scale) if add else torch.mul(gradient, scale, out=out)


def _pass_over_rows(rows: _Rows, plan: _Plan, *, wants_gradient: bool) -> None:
    """Fill logsumexp and target of each row over the whole vocabulary; replace logits by their gradient if wanted."""
    run = _rows_in_torch if plan.launch is None else _rows_in_triton
    if plan.group is None:
        run(rows, plan, statistics=True, gradient=wants_gradient)
        return
    run(rows, plan, statistics=True, gradient=False)  # the gradient needs logsumexp of all ranks' columns
    _join_shards(rows.logsumexp_T, rows.target_T, plan.group)
    if wants_gradient:
        run(rows, plan, statistics=False, gradient=True)


def _join_shards(logsumexp_T: Tensor, target_T: Tensor, group: dist.ProcessGroup) -> None:
    """Combine each rank's columns in place. The target is 0 on ranks without the label."""
    largest_T = logsumexp_T.clone()  # subtracted before exp, so that the sum cannot overflow
    dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=group)
    sums_2T = torch.stack(((logsumexp_T - largest_T).exp(), target_T))
    dist.all_reduce(sums_2T, dist.ReduceOp.SUM, group=group)
    torch.add(largest_T, sums_2T[0].log(), out=logsumexp_T)
    target_T.copy_(sums_2T[1])


def _rows_in_torch(rows: _Rows, plan: _Plan, *, statistics: bool, gradient: bool) -> None:
    """`linear_cross_entropy_kernel` in torch."""
    logits_TV, labels_T, logsumexp_T, target_T = rows
    if statistics:
        values_TV, column_T = logits_TV.float(), labels_T - plan.first_label
        logsumexp_T.copy_(values_TV.logsumexp(-1))
        here_T = (column_T >= 0) & (column_T < logits_TV.shape[1])
        exists_T = (labels_T == IGNORED_LABEL) | ((labels_T >= 0) & (labels_T < plan.vocabulary))
        elsewhere_T = torch.where(exists_T, 0.0, math.nan)
        found_T = values_TV.gather(1, torch.where(here_T, column_T, 0)[:, None])[:, 0]
        target_T.copy_(torch.where(here_T, found_T, elsewhere_T))
    if gradient:
        logits_TV.copy_(logits_gradient(logits_TV, labels_T, logsumexp_T, plan.first_label, plan.z_weight))


def _rows_in_triton(rows: _Rows, plan: _Plan, *, statistics: bool, gradient: bool) -> None:
    """Launch `linear_cross_entropy_kernel`, one program for each row."""
    assert plan.launch is not None, "the form in torch has no launch"
    start_kernel(
        linear_cross_entropy_kernel, (rows.logits_TV.shape[0],),
        *rows, rows.logits_TV.shape[1], plan.first_label, plan.vocabulary, plan.z_weight,
        IGNORED=IGNORED_LABEL, STATISTICS=statistics, GRADIENT=gradient, BLOCK=plan.launch.block_columns,
        STAGES=plan.launch.stages, num_warps=plan.launch.warps,
    )  # fmt: skip


@triton.jit
def linear_cross_entropy_kernel(
    logits_ptr, labels_ptr, logsumexp_ptr, target_ptr,  # logits T x V, the others T
    columns, first_label, vocabulary, z_weight,  # columns on this rank; labels on all ranks
    IGNORED: tl.constexpr, STATISTICS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One row of logits: logsumexp and the logit of its label (STATISTICS), then its gradient in place (GRADIENT).

    Without STATISTICS logsumexp is read. Example: the second of two shards of a vocabulary of 8 has columns = 4 and
    first_label = 4; label 5 is its column 1, label 2 is on the other shard and gives a target of 0, label 9 does not
    exist and gives NaN.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * columns
    label = tl.load(labels_ptr + row)
    counted = label != IGNORED
    here = counted & (label >= first_label) & (label < first_label + columns)
    column = tl.where(here, label - first_label, -1).to(tl.int32)
    offsets = tl.arange(0, BLOCK)
    # A row that is not counted is never read.
    readable = tl.where(counted, columns, 0)

    if STATISTICS:
        # Read before the second pass overwrites it; the reductions in between are barriers.
        target = tl.load(logits_ptr + column, mask=here, other=0.0).to(tl.float32)
        exists = (label == IGNORED) | ((label >= 0) & (label < vocabulary))
        # Finite, so that a first block of -inf does not become inf - inf.
        largest = -1.0e30
        sums = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, readable, BLOCK, num_stages=STAGES):
            in_row = start + offsets < readable
            values = tl.load(logits_ptr + start + offsets, mask=in_row, other=float("-inf")).to(tl.float32)
            previous = largest
            largest = tl.maximum(previous, tl.max(values, 0))
            # One sum for each lane: only the maximum is reduced in each block.
            sums = sums * tl.exp2((previous - largest) * LOG2_E) + tl.exp2(values * LOG2_E - largest * LOG2_E)
        logsumexp = tl.where(counted, largest + tl.log(tl.sum(sums, 0)), 0.0)
        tl.store(logsumexp_ptr + row, logsumexp)
        tl.store(target_ptr + row, tl.where(exists, target, float("nan")))
    else:
        logsumexp = tl.load(logsumexp_ptr + row)

    if GRADIENT:
        factor = 1.0 + 2.0 * z_weight * logsumexp  # of the softmax: cross entropy and z-loss
        for start in range(0, columns, BLOCK):
            values = tl.load(logits_ptr + start + offsets, mask=start + offsets < readable, other=0.0).to(tl.float32)
            slopes = logit_slopes(values, logsumexp, factor, start + offsets == column)
            slopes = tl.where(counted, slopes, 0.0).to(logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + start + offsets, slopes, mask=start + offsets < columns)


@triton.jit
def logit_slopes(values, logsumexp, factor, is_label):
    """Gradients of logits in float32: a factor times the softmax, less 1 for the label's."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    slopes = tl.exp2(values * LOG2_E - logsumexp * LOG2_E) * factor
    return tl.where(is_label, slopes - 1.0, slopes)


@triton.jit
def scale_kernel(gradient_ptr, scale_ptr, out_ptr, elements, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One block of out = gradient * scale, or of out += gradient * scale."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    scaled = tl.load(gradient_ptr + offsets, mask=inside).to(tl.float32) * tl.load(scale_ptr)
    if ADD:
        scaled += tl.load(out_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, scaled.to(out_ptr.dtype.element_ty), mask=inside)


def _check(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor, accumulate_into: Tensor | None) -> None:
    if x_TD.dim() != 2 or head_VD.dim() != 2 or x_TD.shape[1] != head_VD.shape[1]:
        got = f"x {tuple(x_TD.shape)}, head {tuple(head_VD.shape)}"
        raise KernelError("linear_cross_entropy: x and head must be matrices of equal width", got=got)
    if x_TD.dtype != head_VD.dtype:
        got = f"{x_TD.dtype} and {head_VD.dtype}"
        raise KernelError("linear_cross_entropy: x and head must have one dtype", got=got)
    if labels_T.shape != x_TD.shape[:1] or labels_T.dtype != torch.int64:
        got = f"{labels_T.dtype} {tuple(labels_T.shape)} for {x_TD.shape[0]} rows"
        raise KernelError("linear_cross_entropy: labels must be int64, one for each row of x", got=got)
    if accumulate_into is None:
        return
    is_wide = accumulate_into.dtype in (torch.float32, torch.float64)
    if accumulate_into.shape != head_VD.shape or not is_wide or not accumulate_into.is_contiguous():
        what = "linear_cross_entropy: accumulate_into must be contiguous float32 in the shape of head"
        raise KernelError(what, got=f"{accumulate_into.dtype} {tuple(accumulate_into.shape)}")
