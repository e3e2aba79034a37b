"""Plain causal attention by our kernels for Hopper (`penstock.kernels.gluon.attention`), which are imported when used.

Rows are multiples of 128 positions, and heads of keys and values as wide as latent attention's (192 and 128) or both
128. Gradients of queries are summed in no fixed order, so a repeated step may differ in its last bits. With
`training.deterministic` torch's backends compute all calls.

Only `kernels.attention=hopper` takes them. For heads of latent attention they are faster than cuDNN's, also in a whole
step. But beside cuDNN, launches with more queries than `MOST` once gave NaN in the gradients of queries of one of the
two, while other processes used the GPU; it was not found out which, and later launches were finite
(docs/decisions/0172-attention-for-hopper.md). So a launch has at most so many, and torch computes larger rows.
"""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.tuning import target_of

NAME = "hopper"  # value of `kernels.attention`
WIDTHS = ((192, 128), (128, 128))  # of keys and of values
BLOCK = 128  # positions
MOST = 2**26  # elements of queries in a launch, which has whole rows


def obstacle(keys: int, values: int, target: str) -> str | None:
    """Why there is no kernel for heads of these widths on a chip, or None."""
    if target != "sm_90":
        return f"the kernels are Hopper's, this is {target}"
    return None if (keys, values) in WIDTHS else f"heads of {keys} and {values} columns"


def takes(q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor) -> bool:
    """Whether there are kernels for this call."""
    if not q_BSHN.is_cuda or q_BSHN.dtype != torch.bfloat16 or torch.are_deterministic_algorithms_enabled():
        return False
    if q_BSHN.shape[1] != k_BSGN.shape[1] or q_BSHN.shape[1] % BLOCK or q_BSHN.shape[1:].numel() > MOST:
        return False
    target = target_of(q_BSHN.device)
    return obstacle(q_BSHN.shape[-1], v_BSGM.shape[-1], target) is None and bool(_launcher().HAS_GLUON)


def attention(q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, *, scale: float) -> Tensor:
    """`penstock.kernels.attention.causal_attention` without mask and sinks. Returns o_BSHM."""
    o_BSHM: Tensor = _launcher().attention(q_BSHN, k_BSGN, v_BSGM, scale=scale)
    return o_BSHM


@cache
def _launcher() -> Any:
    return import_module("penstock.kernels.gluon.attention")
