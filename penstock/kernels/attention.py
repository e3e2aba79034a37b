"""Causal attention through torch's scaled_dot_product_attention, with the backend chosen by name.

On Hopper only cuDNN's backend is fast for latent attention's heads (192 wide for query and key, 128 for value); flash
needs equal widths and would pad the value. `auto` therefore puts cuDNN first where it exists and lets torch fall back.
"""

from contextlib import nullcontext

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_ORDERS: dict[str, list[SDPBackend]] = {
    "default": [],
    "math": [SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "auto": [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ],
}


def causal_attention(
    q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, *, scale: float, allowed_BSS: Tensor | None, backend: str
) -> Tensor:
    """Softmax attention of each position over itself and the positions before it.

    Args:
        q_BSHN: queries.
        k_BSGN: keys; G divides H, and each key/value head serves H / G query heads.
        v_BSGM: values; their width may differ from the keys'.
        scale: factor on the scores before the softmax.
        allowed_BSS: boolean, True where query position (first S) may look at key position (second S); it must be causal
            already. None means causal over the whole row.
        backend: `auto`, `default` (torch's own choice), or one of torch's backends by name; a named backend that cannot
            run raises torch's RuntimeError.

    Returns:
        o_BSHM in the dtype of q.
    """
    q_BHSN, k_BGSN, v_BGSM = q_BSHN.transpose(1, 2), k_BSGN.transpose(1, 2), v_BSGM.transpose(1, 2)
    order = _ORDERS[backend]
    with sdpa_kernel(order, set_priority=True) if order else nullcontext():
        o_BHSM = F.scaled_dot_product_attention(
            q_BHSN,
            k_BGSN,
            v_BGSM,
            attn_mask=None if allowed_BSS is None else allowed_BSS[:, None],
            is_causal=allowed_BSS is None,
            scale=scale,
            enable_gqa=q_BHSN.shape[1] != k_BGSN.shape[1],
        )
    return o_BHSM.transpose(1, 2)
