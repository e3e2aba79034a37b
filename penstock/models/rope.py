"""Angles of rotary position embedding, with the context extensions of YaRN and of Llama 3.1.

Both divide low frequencies by a factor (they would reach angles never seen in pretraining), keep high ones, and
interpolate between: YaRN (arXiv 2309.00071, section 3.2) by the index of the pair, Llama 3.1 by the number of rotations
over the original context. YaRN also scales attention by a temperature that grows with the logarithm of the factor.
"""

import math

import torch
from torch import Tensor

from penstock.config.model import Llama3Rope, Rope, Yarn


def frequencies(rope: Rope, rotary_dim: int, device: torch.device) -> Tensor:
    """Angle per position of each pair, float32, rotary_dim / 2 of them, fastest first."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    plain = rope.theta**-exponents
    if rope.llama3 is not None:
        return _by_turns(plain, rope.llama3)
    if rope.yarn is None:
        return plain
    low = _pair_that_turns(rope.yarn.beta_fast, rope, rope.yarn, rotary_dim)
    high = _pair_that_turns(rope.yarn.beta_slow, rope, rope.yarn, rotary_dim)
    if rope.yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    first, last = max(low, 0), min(high, rotary_dim - 1)
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device=device)
    # 0 for fast pairs, 1 for slow ones; 0.001 against a division by zero, as in the published code
    interpolated = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return plain / rope.yarn.factor * interpolated + plain * (1 - interpolated)


def _by_turns(plain: Tensor, llama3: Llama3Rope) -> Tensor:
    """Keep frequencies with many rotations over the original context, and divide those with few."""
    turns = plain * (llama3.original_max_position_embeddings / (2 * math.pi))
    kept = ((turns - llama3.low_freq_factor) / (llama3.high_freq_factor - llama3.low_freq_factor)).clamp(0, 1)
    return plain / llama3.factor * (1 - kept) + plain * kept


def _pair_that_turns(rotations: float, rope: Rope, yarn: Yarn, rotary_dim: int) -> float:
    """Fractional index of the pair that makes so many rotations over the original context."""
    inverse_frequency = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
    return rotary_dim * math.log(inverse_frequency) / (2 * math.log(rope.theta))


def _temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def softmax_scale(rope: Rope, head_dim: int) -> float:
    """Factor on attention scores: 1 / sqrt(head_dim), times the square of YaRN's temperature for all dims."""
    if rope.yarn is None or not rope.yarn.mscale_all_dim:
        return head_dim**-0.5
    return head_dim**-0.5 * _temperature(rope.yarn.factor, rope.yarn.mscale_all_dim) ** 2


def angles(rope: Rope, rotary_dim: int, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every pair at every position, float32, B x S x rotary_dim / 2 each."""
    angles_BSP = positions_BS[..., None].float() * frequencies(rope, rotary_dim, positions_BS.device)
    scale = 1.0
    if (yarn := rope.yarn) is not None:  # 1 too where both of YaRN's scales are equal
        scale = _temperature(yarn.factor, yarn.mscale) / _temperature(yarn.factor, yarn.mscale_all_dim)
    return angles_BSP.cos() * scale, angles_BSP.sin() * scale
