"""Formats of the optimizer's state, and their definition in PyTorch.

    moments   fp32    both moments as they are
              bf16    both in bfloat16
              int8    one byte a value and a float32 scale for each block of up to 128 values of a row, as in
                      bitsandbytes (arXiv 2110.02861); vectors stay in float32
    masters   whole   float32, apart from the bfloat16 weight, which is rounded from it
              split   the weight and an int16 rest of the bits: master = (weight << 16) + rest, exactly

A block is divided by its largest magnitude, the scale, and each value takes a number of a dynamic code. With D decades
a code c > 0 lies in decade i = floor(log2 c), at step j = c + 1 - 2^i of 2^i equal ones:

    number(c) = 10^(i + 1 - D) * (0.1 + 0.9 j / 2^i)          number(0) = 0, number(2^D - 1) = 1

so large numbers are fine (128 steps from 0.1 to 1 with 8 decades), small ones reach far, and code and scale of stored
numbers are found again exactly. The first moment has a sign bit and 7 decades. The second one is stored as its root in
8 decades: then both moments of a value reach zero at about the same magnitude. If only the second one did, the update
would be divided by epsilon.

A step changes a moment by less than the distance of two codes, so an update rounds up or down by chance, with the
right mean (`noise`): to nearest, a second moment would grow and hardly ever fall. The chance is a hash of step, tensor
and place, so results are the same in every run and however data-parallel ranks divide the rows.

The bits of a split master are read as sign and magnitude, so ties of its weight round away from zero, not to even: one
value in 65,536.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Literal
from zlib import crc32

import torch
from torch import Tensor

MomentDtype = Literal["fp32", "bf16", "int8"]
MOMENT_DTYPES: Mapping[MomentDtype, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}  # codes are unsigned
)

BLOCK = 128  # values of a row that share a scale
SIGNED_DECADES, ROOT_DECADES = 7, 8
TINY = 2.0**-126  # least divisor, since a block of zeros has scale 0: smaller constants are float64 to Triton 3.6
FRACTION_BITS = 12  # of a place between two codes; more than rounding disturbs
FRACTION = 1 << FRACTION_BITS
# Odd factors of hashes, as int32.
GOLDEN, MIX_1, MIX_2 = 0x9E3779B1 - (1 << 32), 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)


def blocks_of_row(width: int) -> int:
    """Scales of a row; its last block may be smaller."""
    return -(-width // BLOCK)


@cache
def numbers(decades: int) -> tuple[float, ...]:
    """Numbers of the codes 0 to 2^decades - 1, ascending from 0 to 1."""
    values = [0.0]
    for decade in range(decades):
        steps = 1 << decade
        values += [10.0 ** (decade + 1 - decades) * (0.1 + 0.9 * step / steps) for step in range(1, steps + 1)]
    return tuple(values)


def encode(x: Tensor, decades: int, noise_: Tensor | None) -> Tensor:
    """Codes, int32, of float32 numbers from 0 to 1. In a fixed order of operations: kernels equal it.

    The place between the codes is concave and linear in each decade, so it is the least of the decades' lines; a number
    of the code is at a whole place.
    """
    level = x * line_of(0, decades)[0]
    for decade in range(1, decades):
        factor, offset = line_of(decade, decades)
        level = torch.minimum(level, x * factor + offset)
    fixed = torch.floor(level * FRACTION + 0.5).int()
    return (fixed + (FRACTION // 2 if noise_ is None else noise_ >> (16 - FRACTION_BITS))) >> FRACTION_BITS


def line_of(decade: int, decades: int) -> tuple[float, float]:
    """Factor and offset of a number's place between the codes of a decade; the first one begins at 0."""
    if decade == 0:
        return 10.0 ** (decades - 1), 0.0
    steps = 2.0**decade
    return steps * 10.0 ** (decades - 1 - decade) / 0.9, steps * (8 / 9) - 1.0


def quantize(x: Tensor, decades: int, noise_: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes (uint8; with 7 decades bit 7 is the sign) and float32 scales of each row's blocks.

    `noise_` are int32 numbers below 2**16 that decide about rounding; None rounds to nearest.
    """
    blocks = _in_blocks(x)
    scales = blocks.abs().amax(-1)
    noise_ = None if noise_ is None else _in_blocks(noise_)
    codes = encode(blocks.abs() * scales.clamp(min=TINY).reciprocal()[..., None], decades, noise_)
    if decades == SIGNED_DECADES:
        codes = torch.where((blocks < 0) & (codes > 0), codes + 128, codes)
    return codes.to(torch.uint8).flatten(-2)[..., : x.shape[-1]].contiguous(), scales


def dequantize(codes: Tensor, scales: Tensor, decades: int) -> Tensor:
    """The float32 numbers of codes."""
    code = _in_blocks(codes.int())
    table = torch.tensor(numbers(decades), dtype=torch.float32, device=codes.device)
    x = table[code & (len(table) - 1)]
    if decades == SIGNED_DECADES:
        x = torch.where(code > 127, -x, x)
    return (x * scales[..., None]).flatten(-2)[..., : codes.shape[-1]].contiguous()


def _in_blocks(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return padded.unflatten(-1, (-1, BLOCK))


def root_of(x: Tensor) -> Tensor:
    """The root, correctly rounded: on CPUs `torch.sqrt` of float32 may be wrong in the last bit."""
    return x.double().sqrt().float()


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 weight and the int16 rest of float32 numbers."""
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(value: Tensor, rest: Tensor) -> Tensor:
    """The float32 numbers of weights and rests."""
    return ((value.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)


def round_bf16(x: Tensor, noise_: Tensor | None = None) -> Tensor:
    """Round float32 numbers to bfloat16, by the noise of `quantize` or to nearest even."""
    if noise_ is None:
        return x.bfloat16()
    return ((x.view(torch.int32) + noise_) >> 16).to(torch.int16).view(torch.bfloat16)


def noise(like: Tensor, start: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two int32 numbers below 2**16 for each place of a tensor, which begins at a place of the whole."""
    places = torch.arange(start, start + like.numel(), device=like.device).view(like.shape)
    mixed = mix(places.to(torch.int32) * GOLDEN + seed)
    return mixed & 0xFFFF, (mixed >> 16) & 0xFFFF


def seed_of(step: int, salt: int) -> int:
    """Seed of a step and a tensor."""
    return int(mix(torch.tensor(step, dtype=torch.int32) * GOLDEN)) ^ salt


def salt_of(name: str) -> int:
    """A number of a tensor."""
    return crc32(name.encode()) - (1 << 31)


def mix(x: Tensor) -> Tensor:
    """The finalizer of MurmurHash3: int32 numbers whose bits all depend on all bits of the given ones."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * MIX_1
    x = (x ^ ((x >> 13) & 0x7FFFF)) * MIX_2
    return x ^ ((x >> 16) & 0xFFFF)
