"""Router: scores, group limit, top-k, weights and the sums of balance losses, in one pass over the logits.

    route_kernel            scores, choice and weights of some rows; their counts, mass and z summed
    sum_parts_kernel        sum over the programs, for each sequence
    route_backward_kernel   gradients of weights, mass and z to the logits; recomputes the scores
    balance_loss_kernel     the auxiliary losses of a layer and their gradients

Counts, mass and z need no atomics, and the order of their sums depends on the number of tokens alone. Only the logits
and the choices are saved. Device code of the router is in `penstock.kernels.topk_kernels`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.language import tl, triton
from penstock.kernels.launching import start_kernel
from penstock.kernels.operators import LinearLoss
from penstock.kernels.reference import Routed, RouterRule
from penstock.kernels.topk_kernels import MOST_COLUMNS, route_backward_kernel, route_kernel, sum_parts_kernel
from penstock.kernels.tuning import KernelLaunch

LAUNCH = KernelLaunch(block_rows=4, block_columns=64, warps=1)
"""A tile of 256 elements, eight for each thread of one warp: all values stay in registers and no warp waits."""

PROGRAMS = 2048
"""Programs of forward before each takes a second tile: more fill the chip, fewer make fewer partial sums."""


def route(
    logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule, sequences: int, *, launch: KernelLaunch = LAUNCH
) -> Routed:
    """`penstock.kernels.reference.route`: one kernel and a small sum forward, one kernel backward.

    `launch` sets the elements (rows x columns, powers of two) and warps of a tile.

    Raises:
        KernelError: the rule or the bias does not fit the logits.
    """
    _check(logits_TE, bias_E, rule, sequences)
    return Routed(*_Route.apply(logits_TE, bias_E, rule, sequences, launch))


class _Route(torch.autograd.Function):
    """Saves logits and choices."""

    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule, sequences: int, launch: KernelLaunch
    ) -> tuple[Tensor, ...]:
        logits_TE = logits_TE.contiguous()
        (tokens, experts), device = logits_TE.shape, logits_TE.device
        length = tokens // sequences
        constants = kernel_constants(experts, rule, launch)
        tiles = max(1, tokens // (PROGRAMS * constants["BLOCK_T"]))
        chunks = triton.cdiv(length, tiles * constants["BLOCK_T"])

        weights_TK = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=device)
        experts_TK = torch.empty(tokens, rule.top_k, dtype=torch.int64, device=device)
        part_counts_BCE = torch.empty(sequences, chunks, experts, dtype=torch.int32, device=device)
        part_mass_BCE = torch.empty(sequences, chunks, experts, dtype=torch.float32, device=device)
        part_z_BC = torch.empty(sequences, chunks, dtype=torch.float32, device=device)
        parts = (part_counts_BCE, part_mass_BCE, part_z_BC)
        start_kernel(
            route_kernel, (chunks, sequences),
            logits_TE, bias_E, weights_TK, experts_TK, *parts, length, tiles,
            **constants, num_warps=launch.warps,
        )  # fmt: skip
        counts_BE = torch.empty(sequences, experts, dtype=torch.int64, device=device)
        mass_BE = torch.empty(sequences, experts, dtype=torch.float32, device=device)
        z_B = torch.empty(sequences, dtype=torch.float32, device=device)
        start_kernel(
            sum_parts_kernel, (triton.cdiv(experts, 8), sequences),
            *parts, counts_BE, mass_BE, z_B, chunks,
            E=experts, BLOCK_E=8, BLOCK_C=512, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(logits_TE, experts_TK)
        ctx.rule, ctx.sequences, ctx.launch = rule, sequences, launch
        ctx.mark_non_differentiable(experts_TK, counts_BE)
        ctx.set_materialize_grads(False)
        return weights_TK, experts_TK, counts_BE, mass_BE, z_B

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        dweights_TK: Tensor | None,
        _dexperts_TK: None,
        _dcounts_BE: None,
        dmass_BE: Tensor | None,
        dz_B: Tensor | None,
    ) -> tuple[Tensor, None, None, None, None]:
        logits_TE, experts_TK = ctx.saved_tensors
        tokens, experts = logits_TE.shape
        length = tokens // ctx.sequences
        constants = backward_constants(experts, ctx.rule, ctx.launch)
        incoming = (None if gradient is None else gradient.contiguous() for gradient in (dweights_TK, dmass_BE, dz_B))
        dlogits_TE = torch.empty_like(logits_TE)
        start_kernel(
            route_backward_kernel, (triton.cdiv(length, constants["BLOCK_T"]), ctx.sequences),
            logits_TE, experts_TK, *incoming, dlogits_TE, length,
            **constants, num_warps=ctx.launch.warps,
        )  # fmt: skip
        return dlogits_TE, None, None, None, None


def kernel_constants(experts: int, rule: RouterRule, launch: KernelLaunch) -> dict[str, Any]:
    """Constants of `route_kernel`: the rule, and a tile of BLOCK_T rows x BLOCK_Q groups x BLOCK_G columns."""
    groups = triton.next_power_of_2(rule.groups)
    columns = triton.next_power_of_2(experts // rule.groups)
    return {
        "E": experts,
        "K": rule.top_k,
        "SIGMOID": rule.score == "sigmoid",
        "AFTER": rule.softmax_after_top_k,
        "GROUPS": rule.groups,
        "GROUPS_KEPT": rule.topk_group,
        "TOP2": rule.group_score == "top2",
        "NORMALIZE": rule.normalize,
        "SCALE": rule.scale,
        "BLOCK_T": _rows_of_tile(groups * columns, launch),
        "BLOCK_Q": groups,
        "BLOCK_G": columns,
        "BLOCK_K": triton.next_power_of_2(rule.top_k),
    }


def backward_constants(experts: int, rule: RouterRule, launch: KernelLaunch) -> dict[str, Any]:
    """Constants of `route_backward_kernel`, which ignores groups: a tile of BLOCK_T rows x BLOCK_E columns."""
    constants = kernel_constants(experts, rule, launch)
    width = triton.next_power_of_2(experts)
    kept = ("E", "K", "SIGMOID", "AFTER", "NORMALIZE", "SCALE")
    return {name: constants[name] for name in kept} | {"BLOCK_T": _rows_of_tile(width, launch), "BLOCK_E": width}


def _rows_of_tile(width: int, launch: KernelLaunch) -> int:
    return max(1, launch.block_rows * launch.block_columns // width)


def _check(logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule, sequences: int) -> None:
    tokens, experts = logits_TE.shape
    group = experts // rule.groups
    if experts % rule.groups or rule.top_k > rule.topk_group * group or rule.topk_group > rule.groups:
        raise KernelError(
            "route: the groups kept must hold top_k experts, and groups must divide the experts",
            got=f"{experts} experts in {rule.groups} groups, {rule.topk_group} kept, top {rule.top_k}",
        )
    if rule.groups > 1 and rule.group_score == "top2" and group < 2:
        raise KernelError("route: a group judged by its best two must have two", got=f"{group} expert in each group")
    if rule.softmax_after_top_k and rule.score != "softmax":
        raise KernelError("route: softmax_after_top_k needs the softmax score", got=rule.score)
    columns = triton.next_power_of_2(rule.groups) * triton.next_power_of_2(group)
    if columns > MOST_COLUMNS.value:
        raise KernelError("route: too many experts", got=f"{experts}", allowed=f"{MOST_COLUMNS.value} columns")
    if max(logits_TE.numel(), tokens * rule.top_k) >= 2**31:
        raise KernelError("route: logits are counted in 32 bits", got=f"{tokens} x {experts}", fix="cut the batch")
    if tokens % sequences:
        raise KernelError("route: tokens must fill the sequences", got=f"{tokens} tokens for {sequences} sequences")
    if bias_E is not None and (bias_E.shape != (experts,) or bias_E.dtype != torch.float32):
        raise KernelError("route: the bias must be float32, one for each expert", got=f"{bias_E.dtype} {bias_E.shape}")


def balance_loss(mass_BE: Tensor, z_B: Tensor, slots_BE: Tensor, factor: float, z_factor: float) -> LinearLoss:
    """`penstock.kernels.operators.reference_balance_loss` in one kernel of one program; sums in another order.

    The definition has some twenty operators on a few hundred numbers each; a GPU needs microseconds for each of them,
    and tokens wait for them in every layer.
    """
    sequences, experts = mass_BE.shape
    found = LinearLoss(mass_BE.new_empty(()), mass_BE.new_empty(sequences, experts), z_B.new_empty(sequences))
    start_kernel(
        balance_loss_kernel, (1,),
        mass_BE.contiguous(), z_B.contiguous(), slots_BE.contiguous(), *found, sequences,
        0 if len(slots_BE) == 1 else experts, experts, factor, z_factor,
        BLOCK_E=triton.next_power_of_2(experts), num_warps=1,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["sequences", "slots_stride", "factor", "z_factor"])
def balance_loss_kernel(
    mass_ptr, z_ptr, slots_ptr, loss_ptr, dmass_ptr, dz_ptr,  # mass, slots, dmass B x E; z, dz B
    sequences, slots_stride, experts, factor, z_factor,  # stride 0: slots of all sequences
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """All sequences, one after the other. Example with 2 experts, a factor of 1 and slots [3, 1]: dmass [1.5, 0.5]."""
    expert_E = tl.arange(0, BLOCK_E)
    is_expert = expert_E < experts
    loss_E = tl.zeros([BLOCK_E], tl.float32)
    z_sum = 0.0
    for sequence in range(sequences):
        slots_E = tl.load(slots_ptr + sequence * slots_stride + expert_E, mask=is_expert, other=0).to(tl.float32)
        even = experts / tl.maximum(tl.sum(slots_E, 0), 1.0)
        dmass_E = slots_E * (even * factor)
        place_E = sequence * experts + expert_E
        loss_E += dmass_E * tl.load(mass_ptr + place_E, mask=is_expert, other=0.0)
        tl.store(dmass_ptr + place_E, dmass_E, mask=is_expert)
        z_sum += tl.load(z_ptr + sequence)
        tl.store(dz_ptr + sequence, z_factor)
    tl.store(loss_ptr, tl.sum(loss_E, 0) + z_sum * z_factor)
