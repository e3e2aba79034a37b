"""Plain causal attention by the package flash-attn-4: FlashAttention's kernels for Hopper and Blackwell.

The kernels read queries, keys and values with positions before heads, as the models have them, and take heads whose
keys are wider than their values (latent attention). Masks and sinks stay with torch's backends. The package compiles a
kernel at the first call for its head widths, a few seconds for each direction.

Gradients of queries are summed in no fixed order, so a repeated step may differ in its last bits. With
`training.deterministic` the package sums in a fixed order, which is slower.
"""

import warnings
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.tuning import target_of

NAME = "flash-4"  # value of `kernels.attention`

# Widest heads of keys and of values, by chip; `LATENT` runs on all.
WIDEST: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"sm_90": (256, 256), "sm_100": (128, 128), "sm_103": (128, 128)}
)
LATENT = (192, 128)
MULTIPLE = 8  # of which head widths are multiples: 16 bytes
# Chips on which `auto` takes it, because it was faster there (benchmarks/results/attention-h200.json).
MEASURED = ("sm_90",)


def takes(q_BSHN: Tensor, v_BSGM: Tensor) -> bool:
    """Whether the package has a kernel for these heads on their device."""
    if not q_BSHN.is_cuda or q_BSHN.dtype.itemsize != 2:
        return False
    return has_kernel(q_BSHN.shape[-1], v_BSGM.shape[-1], target_of(q_BSHN.device))


def has_kernel(keys: int, values: int, target: str) -> bool:
    """Whether the package has a kernel for heads of these widths on a chip."""
    if target not in WIDEST or keys % MULTIPLE or values % MULTIPLE:
        return False
    widest = WIDEST[target]
    return (keys, values) == LATENT or (keys <= widest[0] and values <= widest[1])


def attention(q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, *, scale: float) -> Tensor:
    """`penstock.kernels.attention.causal_attention` without mask and sinks. Returns o_BSHM."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    how = {"softmax_scale": scale, "causal": True, "deterministic": is_deterministic}
    o_BSHM: Tensor = _package().flash_attn_func(q_BSHN, k_BSGN, v_BSGM, **how)[0]
    return o_BSHM


@cache
def _package() -> Any:
    # The package's compiler warns about its own code at every kernel.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"cutlass\.")
    return import_module("flash_attn.cute")
