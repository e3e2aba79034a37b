"""The operators that a model is built on, as one frozen value: modules get theirs when they are made.

Two sets stand here. `REFERENCE` is the eager truth. `TORCH` takes PyTorch's own fused forms where it has them: grouped_mm
for the experts, rms_norm, silu. A set is data, so a backend is chosen once and a module never asks which one it runs on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels import reference


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Callables with the signatures of `penstock.kernels.reference`.

    Attributes:
        name: how logs call this set.
        attention_backend: see `penstock.kernels.attention.causal_attention`.
    """

    name: str
    attention_backend: str
    expert_ffn: Callable[..., Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor], Tensor]


def torch_rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """`reference.rms_norm` by torch's fused kernel."""
    return F.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, epsilon)


def torch_swiglu(gate_up_RF: Tensor) -> Tensor:
    """`reference.swiglu` without weights, in the dtype of the input throughout."""
    gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
    return F.silu(gate_RF) * up_RF


def torch_expert_ffn(
    x_ND: Tensor,
    gate_up_eFD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    weights_R: Tensor | None = None,
    index_R: Tensor | None = None,
) -> Tensor:
    """`reference.expert_ffn` by torch's grouped_mm: one launch for all experts, counts stay on the device.

    grouped_mm leaves rows past the last expert's as they are in memory; the masks keep them out of outputs and gradients.
    """
    x_RD = x_ND if index_R is None else x_ND[index_R]
    ends_e = counts_e.cumsum(0, dtype=torch.int32)
    used_R1 = (torch.arange(x_RD.shape[0], device=x_RD.device) < ends_e[-1])[:, None]
    x_RD = torch.where(used_R1, x_RD, 0)
    gate_up_RF = F.grouped_mm(x_RD, gate_up_eFD.transpose(1, 2), offs=ends_e)
    h_RF = torch_swiglu(torch.where(used_R1, gate_up_RF, 0))
    if weights_R is not None:
        h_RF = (h_RF * weights_R[:, None]).to(h_RF.dtype)
    y_RD = F.grouped_mm(h_RF, down_eDF.transpose(1, 2), offs=ends_e)
    return torch.where(used_R1, y_RD, 0)


REFERENCE = Operators(
    name="reference",
    attention_backend="auto",
    expert_ffn=reference.expert_ffn,
    rms_norm=reference.rms_norm,
    swiglu=reference.swiglu,
)

TORCH = Operators(
    name="torch",
    attention_backend="auto",
    expert_ffn=torch_expert_ffn,
    rms_norm=torch_rms_norm,
    swiglu=torch_swiglu,
)
