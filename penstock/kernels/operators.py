"""The operators that a model is built on, as one frozen value that modules receive when they are constructed.

Two sets here need nothing but PyTorch. `REFERENCE` is the eager definition. `TORCH` uses PyTorch's fused forms where
they exist: grouped_mm for the experts, rms_norm, silu. The third, `penstock.kernels.backends.TRITON`, has the
Triton kernels. Backends are chosen once, operator by operator (`penstock.kernels.choose`); modules do not ask which one
they have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels import delta_rule as linear_attention
from penstock.kernels import reference, replica_plan
from penstock.kernels.reference import SWIGLU, ExpertRule, Routed, RowOrder, check_biases
from penstock.kernels.replica_plan import ReplicaPlan, ReplicaRule


class LinearLoss(NamedTuple):
    """A loss that is linear in its inputs, and its gradients, which are known in forward; all float32."""

    loss: Tensor  # scalar
    dmass_BE: Tensor  # of the router mass of each expert and sequence
    dz_B: Tensor  # of the squared logsumexp of each sequence


def reference_balance_loss(
    mass_BE: Tensor, z_B: Tensor, slots_BE: Tensor, factor: float, z_factor: float
) -> LinearLoss:
    """The sum `factor` * mass * E * slots / all slots, plus `z_factor` * z.

    `mass_BE` and `z_B` are those of `reference.Routed`; `slots_BE` are int64 slots of each expert in each sequence, or
    1 x E for all sequences.
    """
    even_B1 = mass_BE.shape[1] / slots_BE.sum(1, keepdim=True).clamp(min=1)
    dmass_BE = (slots_BE * even_B1 * factor).expand_as(mass_BE)
    dz_B = torch.full_like(z_B, z_factor)
    return LinearLoss((mass_BE * dmass_BE).sum() + (z_B * dz_B).sum(), dmass_BE, dz_B)


def torch_rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """`reference.rms_norm` by torch's fused kernel; the sum of offset and weight is rounded to the weight's dtype."""
    return F.rms_norm(x_TD, (x_TD.shape[-1],), weight_D + offset if offset else weight_D, epsilon)


def torch_add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, epsilon: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm` with torch's fused norm."""
    sum_TD = x_TD + residual_TD
    return torch_rms_norm(sum_TD, weight_D, epsilon, offset), sum_TD


def torch_swiglu(gate_up_RF: Tensor, weights_R: Tensor | None = None, rule: ExpertRule = SWIGLU) -> Tensor:
    """`reference.swiglu` in the dtype of the input throughout; weights are on the output."""
    h_RF = reference.activate(gate_up_RF, rule)
    return h_RF if weights_R is None else (h_RF * weights_R[..., None]).to(h_RF.dtype)


def torch_add_bias(y_RF: Tensor, bias_eF: Tensor, counts_e: Tensor, weights_R: Tensor | None = None) -> Tensor:
    """`reference.add_bias` with the counts on the device: a product with a mask gives each row its bias.

    Gradients of rows past the last expert's must be finite: mask the result.
    """
    ends_e = counts_e.cumsum(0)
    row_R1 = torch.arange(y_RF.shape[0], device=y_RF.device)[:, None]
    is_of_Re = (row_R1 >= ends_e - counts_e) & (row_R1 < ends_e)  # one 1 a row, none past the last expert's
    bias_RF = is_of_Re.to(bias_eF.dtype) @ bias_eF
    if weights_R is not None:
        bias_RF = bias_RF * torch.where(row_R1 < ends_e[-1], weights_R[:, None], 0)
    return (y_RF + bias_RF).to(y_RF.dtype)


def torch_expert_ffn(
    x_ND: Tensor,
    gate_up_eFD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    weights_R: Tensor | None = None,
    index_R: Tensor | None = None,
    *,
    places_TK: Tensor | None = None,
    biases: tuple[Tensor, Tensor | None] | None = None,
    rule: ExpertRule = SWIGLU,
) -> Tensor:
    """`reference.expert_ffn` by torch's grouped_mm: one launch for all experts, counts stay on the device.

    grouped_mm does not write rows past the last expert's; the masks keep them out of outputs and gradients.
    """
    check_biases(biases is not None, rule)
    x_RD = x_ND if index_R is None else x_ND[index_R]
    ends_e = counts_e.cumsum(0, dtype=torch.int32)
    used_R1 = (torch.arange(x_RD.shape[0], device=x_RD.device) < ends_e[-1])[:, None]

    def weighted(rows_RF: Tensor) -> Tensor:
        # The mask is for backward: grouped_mm's gradient is anything there, and that of the weights would sum it.
        return rows_RF if weights_R is None else torch.where(used_R1, rows_RF * weights_R[:, None], 0).to(rows_RF.dtype)

    gate_up_bias_eF, down_bias_eD = biases or (None, None)
    gate_up_RF = grouped_mm(torch.where(used_R1, x_RD, 0), gate_up_eFD, ends_e)
    if gate_up_bias_eF is not None:
        gate_up_RF = torch_add_bias(gate_up_RF, gate_up_bias_eF, counts_e)
    gate_up_RF = torch.where(used_R1, gate_up_RF, 0)
    if rule.weighs_input:
        h_RF = torch_swiglu(weighted(gate_up_RF), rule=rule)
    else:
        h_RF = weighted(torch_swiglu(gate_up_RF, rule=rule))
    y_RD = grouped_mm(h_RF, down_eDF, ends_e)
    if down_bias_eD is not None:
        y_RD = torch_add_bias(y_RD, down_bias_eD, counts_e, weights_R)
    return torch.where(used_R1, y_RD, 0)


def grouped_mm(x_RD: Tensor, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
    """Rows times their expert's matrix."""
    if x_RD.is_meta and x_RD.dtype != torch.bfloat16:
        # Tensors without memory have grouped_mm in bfloat16 only. All rows of one expert are as large and as much work.
        return x_RD @ w_eFD[0].T
    width = w_eFD.shape[1]
    x_RD, w_eFD = aligned(x_RD), aligned(w_eFD, both=True)
    y_RF = F.grouped_mm(x_RD, w_eFD.transpose(1, 2), offs=ends_e)
    return y_RF if y_RF.shape[1] == width else y_RF[:, :width]


def aligned(x: Tensor, *, both: bool = False) -> Tensor:
    """The tensor with columns (and rows) of zeros, so that rows (and columns) are multiples of 16 bytes.

    grouped_mm refuses other strides, which a part of a small expert may have.
    """
    unit = 16 // x.element_size()
    columns, rows = -x.shape[-1] % unit, -x.shape[-2] % unit if both else 0
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Callables with the signatures of the definitions, which are their defaults."""

    attention_backend: str = "auto"  # see `penstock.kernels.attention.causal_attention`
    # Of `penstock.kernels.bounded_attention`; None attends with masks.
    bounded_attention: Callable[..., Tensor] | None = None
    route: Callable[..., Routed] = reference.route
    balance_loss: Callable[[Tensor, Tensor, Tensor, float, float], LinearLoss] = reference_balance_loss
    order_rows: Callable[[Tensor, int], RowOrder] = reference.order_rows
    plan_replicas: Callable[..., ReplicaPlan] = replica_plan.plan_replicas
    assign_replicas: Callable[[Tensor, RowOrder, ReplicaPlan, ReplicaRule], Tensor] = replica_plan.assign_replicas
    unpermute: Callable[[Tensor, RowOrder], Tensor] = reference.unpermute
    expert_ffn: Callable[..., Tensor] = reference.expert_ffn
    expert_ffn_is_fused: bool = False  # one autograd function, which also takes `recompute` and `accumulate_into`
    saves_rows: bool = False  # of several layers in one buffer: `keep` of `penstock.kernels.expert_ffn`
    swiglu: Callable[..., Tensor] = reference.swiglu  # for dense networks; weights are those of a gated shared expert
    rms_norm: Callable[..., Tensor] = reference.rms_norm
    rms_norm_beside: Callable[..., tuple[Tensor, Tensor]] = reference.rms_norm_beside
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = reference.add_rms_norm
    add_three: Callable[[Tensor, Tensor, Tensor], Tensor] = reference.add_three
    fan_out: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] = reference.fan_out
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = reference.rotate
    delta_rule: Callable[..., Tensor] = linear_attention.recurrent_delta_rule
    short_convolution: Callable[..., Tensor] = linear_attention.short_convolution
    unit_length: Callable[..., Tensor] = linear_attention.unit_length
    gated_norm: Callable[..., Tensor] = linear_attention.gated_norm
    # Of `penstock.kernels.sparse_attention`; None attends to all keys under a mask.
    choose_keys: Callable[..., Tensor] | None = None
    sparse_attention: Callable[..., Tensor] | None = None
    mla_heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = reference.mla_heads


REFERENCE = Operators()

TORCH = Operators(
    expert_ffn=torch_expert_ffn,
    swiglu=torch_swiglu,
    delta_rule=linear_attention.chunked_delta_rule,
    rms_norm=torch_rms_norm,
    rms_norm_beside=lambda x_TD, *norm: (torch_rms_norm(x_TD, *norm), x_TD),
    add_rms_norm=torch_add_rms_norm,
    add_three=lambda x_TD, y_TD, z_TD: x_TD + y_TD + z_TD,  # two additions, each rounded
)
