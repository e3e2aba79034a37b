"""MXFP4 (OCP Microscaling Formats v1.0): numbers of 4 bits, E2M1, and a power of two (E8M0) for 32 neighbours of a row.

The scale of a block is 2 ** (floor(log2(amax)) - 2), because 6, the largest number of E2M1, has the exponent 2. So the
largest magnitude over its scale is in [4, 8). Numbers are rounded to the nearest, halves to even; above 6 they are 6:

    weights      0.9      -0.3     0.05     scale 2 ** -3
    over scale   7.2      -2.4     0.4
    E2M1         6        -2       0.5
    rounded      0.75     -0.25    0.0625

`to_mxfp4` rounds weights in their own dtype (fake quantization), `pack_mxfp4` writes the same numbers in the form of
gpt-oss's files: two of them in a byte, the first in the lower half, and the exponents of scales with a bias of 127. As
eager operators the rounding moves some 120 bytes for each weight of 16 bits, `mxfp4_kernel` moves 4.
"""

import torch
from torch import Tensor

from penstock.kernels.float8.quantize_kernels import magnitude_bits, power_of
from penstock.kernels.language import ceil_div, start_kernel, tl, triton

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # by number
BLOCK = 32  # numbers that share a scale
_TILE = 64  # blocks of a program: 16 numbers for each of 128 threads


def to_mxfp4(w_D: Tensor) -> Tensor:
    """Each weight's nearest number in MXFP4, in the dtype of the weights. The last dim is made of whole blocks.

    A block with NaN or infinity keeps it. Nothing is read on the host. Without autograd.
    """
    sizes, signed, biased = _scaled(w_D)
    bits = torch.where(biased == 0, 0x00400000, biased << 23)  # of the scale as float32; 2 ** -127 is subnormal
    return (torch.copysign(sizes, signed) * bits.view(torch.float32)).flatten(-2).to(w_D.dtype)


def pack_mxfp4(w_D: Tensor) -> tuple[Tensor, Tensor]:
    """`to_mxfp4` as bytes: (blocks, ... x D / 32 x 16, and scales, ... x D / 32), both uint8. Weights are finite."""
    sizes, signed, biased = _scaled(w_D)
    codes = torch.where(sizes < 2, 2 * sizes, torch.where(sizes < 4, sizes + 2, sizes / 2 + 4)).to(torch.uint8)
    codes |= signed.signbit().to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, biased.squeeze(-1).to(torch.uint8)


def _scaled(w_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Magnitudes over their scales as numbers of E2M1, the weights as float32, the scales' exponents plus 127."""
    blocks = w_D.detach().float().unflatten(-1, (-1, BLOCK))
    sizes = blocks.abs()
    biased = ((sizes.amax(-1, keepdim=True).view(torch.int32) >> 23) - 2).clamp_min(0)
    sizes = sizes * ((254 - biased) << 23).view(torch.float32)  # 1 / scale
    steps = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    return ((sizes / steps).round() * steps).clamp_max(6.0), blocks, biased


def to_mxfp4_triton(w_D: Tensor) -> Tensor:
    """`to_mxfp4` by one kernel, bit for bit."""
    w_D = w_D.detach().contiguous()
    rounded_D, blocks = torch.empty_like(w_D), w_D.numel() // BLOCK
    if blocks:
        start_kernel(mxfp4_kernel, (ceil_div(blocks, _TILE),), w_D, rounded_D, blocks, TILE=_TILE, num_warps=4)
    return rounded_D


@triton.jit
def mxfp4_kernel(weights_ptr, rounded_ptr, blocks, TILE: tl.constexpr):
    """Some blocks of 32 weights. Example: of a block with the largest magnitude 0.9, 0.3 becomes 0.25."""
    block_N = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place_NB = block_N[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = (block_N < blocks)[:, None]
    w_NB = tl.load(weights_ptr + place_NB, mask=inside, other=0.0).to(tl.float32)
    size_bits = magnitude_bits(w_NB)  # as integers, among which NaN is the largest
    amax_N1 = tl.max(size_bits, 1, keep_dims=True)
    biased_N1 = tl.maximum((amax_N1 >> 23) - 2, 0)
    size_NB = size_bits.to(tl.float32, bitcast=True) * ((254 - biased_N1) << 23).to(tl.float32, bitcast=True)
    # Adding 1.5 * 2**23 times the step between numbers rounds to multiples of the step.
    magic_NB = tl.where(size_NB < 2.0, 0.5, tl.where(size_NB < 4.0, 1.0, 2.0)) * 12582912.0
    size_NB = (size_NB + magic_NB) - magic_NB
    size_NB = tl.where(size_NB > 6.0, 6.0, size_NB) * power_of(biased_N1)
    sign = w_NB.to(tl.int32, bitcast=True) & -0x80000000
    rounded_NB = (size_NB.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    tl.store(rounded_ptr + place_NB, rounded_NB.to(rounded_ptr.dtype.element_ty), mask=inside)
