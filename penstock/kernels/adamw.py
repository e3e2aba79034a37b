"""AdamW (arXiv 1711.05101) in one pass over gradients and state, for all tensors of a rank in a few launches.

A pass scales the gradient (clipping), updates moments and master, rounds the master into the weight, and sets the
gradient to zero, so that every byte is moved once. Bytes read and written for each value of a bfloat16 weight; 8 of
them are the gradient, read and set to zero:

    moments    masters whole    split
    fp32       34               32
    bf16       26               24
    int8       22.1             20.1

The tensors of a launch have the same formats. A table on the device has their
addresses and sizes, and each program updates some blocks of 128 values of one tensor: `owners` has the tensor's number.
All programs read the same few lines of that table, so a program updates several tiles of blocks, one after the other.
`update` is the definition in PyTorch; the kernel makes the same operations in the same order, without fused
multiply-adds, so that both agree to the bit.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from types import MappingProxyType
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor

from penstock.kernels.language import ceil_div, record_launch, start_kernel, tl, triton
from penstock.kernels.tuning import KernelLaunch

MomentDtype = Literal["fp32", "bf16", "int8"]
MOMENT_DTYPES: Mapping[MomentDtype, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}  # codes are unsigned
)

# Formats of the optimizer's state, and their definition in PyTorch.
#
#     moments   fp32    both moments as they are
#               bf16    both in bfloat16
#               int8    one byte a value and a float32 scale for each block of up to 128 values of a row, as in
#                       bitsandbytes (arXiv 2110.02861); vectors stay in float32
#     masters   whole   float32, apart from the bfloat16 weight, which is rounded from it
#               split   the weight and an int16 rest of the bits: master = (weight << 16) + rest, exactly
#
# A block is divided by its largest magnitude, the scale, and each value takes a number of a dynamic code. With D
# decades a code c > 0 lies in decade i = floor(log2 c), at step j = c + 1 - 2^i of 2^i equal ones:
#
#     number(c) = 10^(i + 1 - D) * (0.1 + 0.9 j / 2^i)          number(0) = 0, number(2^D - 1) = 1
#
# so large numbers are fine (128 steps from 0.1 to 1 with 8 decades), small ones reach far, and code and scale of stored
# numbers are found again exactly. The first moment has a sign bit and 7 decades. The second one is stored as its root
# in 8 decades: then both moments of a value reach zero at about the same magnitude. If only the second one did, the
# update would be divided by epsilon.
#
# A step changes a moment by less than the distance of two codes, so an update rounds up or down by chance, with the
# right mean (`noise`): to nearest, a second moment would grow and hardly ever fall. The chance is a hash of step,
# tensor and place, so results are the same in every run and however data-parallel ranks divide the rows.
#
# The bits of a split master are read as sign and magnitude, so ties of its weight round away from zero, not to even:
# one value in 65,536.

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


LAUNCH = KernelLaunch(block_rows=8, block_columns=BLOCK, warps=4)
PROGRAM_BLOCKS = 128  # of a program, in tiles
ALIGNMENT = 16  # bytes of a load or store of a thread
VALUES = 16  # a row is a multiple of so many where every block begins at an aligned address

OWN, APART, SPLIT = range(3)  # master: the float32 weight itself, a float32 tensor, an int16 rest of the bits
FLOAT32, BFLOAT16, CODES = range(3)  # stored moments
_STATE = ("moment1", "moment2", "scale1", "scale2", "master")
FIELDS = 13  # of a table's row: seven addresses, then width, blocks of a row, blocks, first program, start, flags


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One tensor with its master and first moment, contiguous and on one device; all of it is updated in place."""

    value: Tensor  # float32, its own master, or bfloat16
    gradient: Tensor  # float32, in the shape of the value, as all that follow
    master: Tensor | None = None  # float32, or int16 rest (split); None if the value is its own
    moment1: Tensor  # float32, bfloat16, or codes (uint8)
    scale1: Tensor | None = None  # float32, one for each block of each row, of codes only
    is_decayed: bool
    salt: int = 0  # of the noise that rounds moments
    start: int = 0  # place of the first value, for that noise

    @property
    def state_fields(self) -> tuple[str, ...]:
        """Names of the present fields of state: moments and their scales, then the master."""
        return tuple(field for field in _STATE if vars(self).get(field) is not None)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The tensors of `state_fields`."""
        return tuple(vars(self)[state_field] for state_field in self.state_fields)

    @property
    def masters(self) -> int:
        """Place of the master: OWN, APART or SPLIT."""
        return OWN if self.master is None else SPLIT if self.master.dtype == torch.int16 else APART


@dataclass(frozen=True, kw_only=True)
class AdamWTensor(StateTensor):
    """One tensor with all state of AdamW."""

    moment2: Tensor
    scale2: Tensor | None = None

    def with_state(self, state: Sequence[Tensor]) -> "AdamWTensor":
        """The same values and gradients with other tensors of state."""
        fields: dict[str, Any] = dict(zip(self.state_fields, state, strict=True))
        return replace(self, **fields)


@dataclass(frozen=True, kw_only=True)
class AdamWScalars:
    """Numbers of one update."""

    step: int  # from 1
    decay: float  # learning rate times weight decay
    step_size: float  # learning rate over the first moment's bias correction
    root_factor: float  # inverse root of the second moment's bias correction
    beta1: float
    beta2: float
    epsilon: float
    scale: float  # of gradients


def scalars_of(
    step: int, *, learning_rate: float, betas: tuple[float, float], epsilon: float, weight_decay: float, divisor: float
) -> AdamWScalars:
    """The numbers of the update with this number, from 1; gradients are divided by `divisor`."""
    return AdamWScalars(
        step=step,
        decay=learning_rate * weight_decay,
        step_size=learning_rate / (1.0 - betas[0] ** step),
        root_factor=1.0 / sqrt(1.0 - betas[1] ** step),
        beta1=betas[0],
        beta2=betas[1],
        epsilon=epsilon,
        scale=1.0 / divisor,
    )


@torch.no_grad()
def update(tensor: AdamWTensor, step: AdamWScalars) -> None:
    """Make one step of AdamW and set the gradient to zero: the definition, in a fixed order of float32 operations."""
    gradient = tensor.gradient * step.scale
    master = master_of(tensor)
    moment1, moment2 = first_moment_of(tensor), _load(tensor.moment2, tensor.scale2, ROOT_DECADES)
    is_root = tensor.scale2 is not None
    if is_root:
        moment2 = moment2 * moment2
    if tensor.is_decayed:
        master = master - master * step.decay
    moment1 = moment1 * step.beta1 + gradient * (1.0 - step.beta1)
    moment2 = moment2 * step.beta2 + gradient * (1.0 - step.beta2) * gradient
    master = master - moment1 * step.step_size / (root_of(moment2) * step.root_factor + step.epsilon)
    rounds = tensor.moment1.dtype != torch.float32
    noise1, noise2 = noise(moment1, tensor.start, seed_of(step.step, tensor.salt)) if rounds else (None, None)
    store_first_moment(tensor, moment1, noise1)
    _store(tensor.moment2, tensor.scale2, root_of(moment2) if is_root else moment2, ROOT_DECADES, noise2)
    store_master(tensor, master)
    tensor.gradient.zero_()


def master_of(tensor: StateTensor) -> Tensor:
    """The float32 master; the tensor itself if there is one."""
    if tensor.master is None:
        return tensor.value
    return tensor.master if tensor.masters == APART else join(tensor.value, tensor.master)


def store_master(tensor: StateTensor, master: Tensor) -> None:
    """Store a float32 master, and round the value from it."""
    if tensor.masters == SPLIT:
        assert tensor.master is not None, "a split master has a rest"
        value, rest = split(master)
        tensor.value.copy_(value)
        tensor.master.copy_(rest)
        return
    if tensor.master is not None:
        tensor.master.copy_(master)
    tensor.value.copy_(master)


def first_moment_of(tensor: StateTensor) -> Tensor:
    """The first moment in float32; the tensor itself if it is float32."""
    return _load(tensor.moment1, tensor.scale1, SIGNED_DECADES)


def store_first_moment(tensor: StateTensor, moment1: Tensor, noise_: Tensor | None = None) -> None:
    """Store a float32 first moment, rounded by noise or to nearest."""
    _store(tensor.moment1, tensor.scale1, moment1, SIGNED_DECADES, noise_)


def _load(stored: Tensor, scales: Tensor | None, decades: int) -> Tensor:
    return stored.float() if scales is None else dequantize(stored, scales, decades)


def _store(target: Tensor, scales: Tensor | None, values: Tensor, decades: int, noise_: Tensor | None) -> None:
    if scales is None:
        target.copy_(round_bf16(values, noise_) if target.dtype == torch.bfloat16 else values)
        return
    new_codes, new_scales = quantize(values, decades, noise_)
    target.copy_(new_codes)
    scales.copy_(new_scales)


class AdamWLaunch:
    """A launch for tensors of one device with equal formats, whose addresses stay as they are."""

    def __init__(self, tensors: Sequence[AdamWTensor], *, launch: KernelLaunch = LAUNCH) -> None:
        self._tensors = tuple(tensors)
        first = self._tensors[0]
        (self._masters, self._moments), self._is_aligned = _formats(first), _is_aligned(first)
        self._launch = launch
        self._is_dry = first.value.is_meta
        if self._is_dry:
            return
        rows, owners, programs = [], [], 0
        for number, tensor in enumerate(self._tensors):
            assert (_formats(tensor), _is_aligned(tensor)) == (_formats(first), self._is_aligned), "formats differ"
            width = _width(tensor)
            blocks = tensor.value.numel() // width * blocks_of_row(width)
            parts = tensor.value, tensor.gradient, tensor.master, tensor.moment1, tensor.moment2
            addresses = [0 if part is None else part.data_ptr() for part in (*parts, tensor.scale1, tensor.scale2)]
            places = blocks_of_row(width), blocks, programs, tensor.start, (tensor.salt << 1) | tensor.is_decayed
            rows.append([*addresses, width, *places])
            tensor_programs = ceil_div(blocks, PROGRAM_BLOCKS)
            owners.append(torch.full((tensor_programs,), number, dtype=torch.int32, device="cpu"))
            programs += tensor_programs
        device = first.value.device
        self._table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
        self._owners = torch.cat(owners).to(device)
        self._numbers = _numbers_on(device)

    def run(self, step: AdamWScalars) -> None:
        """Update all tensors; the host does not wait."""
        if self._is_dry:
            self._record()
            return
        start_kernel(
            adamw_kernel, (len(self._owners),),
            self._owners, self._table, self._numbers, seed_of(step.step, 0), step.decay, step.step_size,
            step.root_factor, step.beta1, 1.0 - step.beta1, step.beta2, 1.0 - step.beta2, step.epsilon, step.scale,
            MASTERS=self._masters, MOMENTS=self._moments, ALIGNED=self._is_aligned, BLOCKS=self._launch.block_rows,
            TILES=PROGRAM_BLOCKS // self._launch.block_rows, num_warps=self._launch.warps, enable_fp_fusion=False,
        )  # fmt: skip

    def _record(self) -> None:
        """Report the launch in a dry run."""
        read = written = 0
        for tensor in self._tensors:
            changed = sum(part.nbytes for part in (tensor.gradient, *tensor.state))
            read += changed + (0 if self._masters == APART else tensor.value.nbytes)
            written += changed + tensor.value.nbytes
        byte = torch.empty((), dtype=torch.uint8, device="meta")
        switches = ["CODES"] if self._moments == CODES else []
        record_launch(adamw_kernel.__name__, byte.expand(read), byte.expand(written), switches=switches)


def launches_of(tensors: Sequence[AdamWTensor]) -> list[AdamWLaunch]:
    """As few launches as the formats of the tensors allow; tensors without elements are left out."""
    groups: dict[tuple[int, int, bool], list[AdamWTensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.value.numel():
            groups[*_formats(tensor), _is_aligned(tensor)].append(tensor)
    return [AdamWLaunch(group) for group in groups.values()]


def _formats(tensor: AdamWTensor) -> tuple[int, int]:
    moments = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.uint8: CODES}[tensor.moment1.dtype]
    return tensor.masters, moments


def _width(tensor: AdamWTensor) -> int:
    """Values of a row of blocks: the last dim with codes, else all, because blocks have no meaning."""
    return tensor.value.shape[-1] if tensor.scale1 is not None else tensor.value.numel()


def _is_aligned(tensor: AdamWTensor) -> bool:
    given = tensor.value, tensor.gradient, *tensor.state
    return _width(tensor) % VALUES == 0 and all(value.data_ptr() % ALIGNMENT == 0 for value in given)


@cache
def _numbers_on(device: torch.device) -> Tensor:
    """Numbers of the codes of roots, then of signed codes."""
    return torch.tensor((*numbers(ROOT_DECADES), *numbers(SIGNED_DECADES)), dtype=torch.float32).to(device)


_WIDTH = tl.constexpr(BLOCK)
_FIELDS = tl.constexpr(FIELDS)
_OWN, _APART, _SPLIT = tl.constexpr(OWN), tl.constexpr(APART), tl.constexpr(SPLIT)
_FLOAT32, _BFLOAT16, _CODES = tl.constexpr(FLOAT32), tl.constexpr(BFLOAT16), tl.constexpr(CODES)
_SIGNED, _ROOTS = tl.constexpr(SIGNED_DECADES), tl.constexpr(ROOT_DECADES)
_ROOT_CODES = tl.constexpr(1 << ROOT_DECADES)
_FRACTION, _BITS = tl.constexpr(FRACTION), tl.constexpr(FRACTION_BITS)
_TINY = tl.constexpr(TINY)
_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@triton.constexpr_function
def _factor(decade: int, decades: int) -> float:
    """The factor of `line_of`."""
    return 10.0 ** (decades - 1) if decade == 0 else 2.0**decade * 10.0 ** (decades - 1 - decade) / 0.9


@triton.constexpr_function
def _offset(decade: int) -> float:
    """The offset of `line_of`."""
    return 0.0 if decade == 0 else 2.0**decade * (8 / 9) - 1.0


@triton.jit
def _mixed(x):
    """`optimizer_state.mix`."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX_1
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _MIX_2
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _float_of(high):
    """Float32 numbers whose upper bits these int16 numbers are."""
    return (high.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _load_codes(codes_ptr, scales_ptr, numbers_ptr, at, inside, block, is_block, DECADES: tl.constexpr):
    """`optimizer_state.dequantize`; `numbers_ptr` has the numbers of both codes."""
    code = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    largest = tl.load(scales_ptr + block, mask=is_block, other=0.0)
    if DECADES == _SIGNED:
        x = tl.load(numbers_ptr + _ROOT_CODES + (code & 127))
        x = tl.where(code > 127, -x, x)
    else:
        x = tl.load(numbers_ptr + code)
    return x * largest[:, None]


@triton.jit
def _store_codes(x, codes_ptr, scales_ptr, at, inside, block, is_block, noise_, DECADES: tl.constexpr):
    """Store what `optimizer_state.quantize` returns; values outside of a row are 0."""
    largest = tl.max(tl.abs(x), 1)
    share = tl.abs(x) * tl.div_rn(tl.full(largest.shape, 1.0, tl.float32), tl.maximum(largest, _TINY))[:, None]
    level = share * _factor(0, DECADES)
    for decade in tl.static_range(1, DECADES):
        level = tl.minimum(level, share * _factor(decade, DECADES) + _offset(decade))
    fixed = tl.floor(level * _FRACTION + 0.5).to(tl.int32)
    code = (fixed + (noise_ >> (16 - _BITS))) >> _BITS
    if DECADES == _SIGNED:
        code = tl.where((x < 0) & (code > 0), code + 128, code)
    tl.store(codes_ptr + at, code.to(tl.uint8), mask=inside)
    tl.store(scales_ptr + block, largest, mask=is_block)


@triton.jit
def _pointer(entry_ptr, field: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """An address of the table."""
    pointer = tl.load(entry_ptr + field).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["seed"])
def adamw_kernel(
    owners_ptr, table_ptr, numbers_ptr, seed,
    decay, step_size, root_factor, beta1, rest1, beta2, rest2, epsilon, scale,
    MASTERS: tl.constexpr, MOMENTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One step for some blocks of one tensor, in tiles; `rest1` and `rest2` are 1 - beta.

    Example with blocks of 4 values: a tensor with rows of 6 has 2 blocks a row; block 3 has columns 4 and 5 of row 1.
    """
    # 1. The tensor. All of the table is read before the first store, which the compiler may not pass.
    entry_ptr = table_ptr + tl.load(owners_ptr + tl.program_id(0)) * _FIELDS
    MOMENT: tl.constexpr = tl.float32 if MOMENTS == _FLOAT32 else tl.int16 if MOMENTS == _BFLOAT16 else tl.uint8
    value_ptr = _pointer(entry_ptr, 0, tl.float32 if MASTERS == _OWN else tl.int16, ALIGNED)
    gradient_ptr = _pointer(entry_ptr, 1, tl.float32, ALIGNED)
    master_ptr = _pointer(entry_ptr, 2, tl.int16 if MASTERS == _SPLIT else tl.float32, ALIGNED)
    moment1_ptr = _pointer(entry_ptr, 3, MOMENT, ALIGNED)
    moment2_ptr = _pointer(entry_ptr, 4, MOMENT, ALIGNED)
    scale1_ptr = _pointer(entry_ptr, 5, tl.float32, ALIGNED)
    scale2_ptr = _pointer(entry_ptr, 6, tl.float32, ALIGNED)
    width = tl.load(entry_ptr + 7)
    if ALIGNED:
        width = tl.multiple_of(width, 16)
    row_blocks = tl.load(entry_ptr + 8).to(tl.int32)
    blocks = tl.load(entry_ptr + 9).to(tl.int32)
    first = (tl.program_id(0) - tl.load(entry_ptr + 10).to(tl.int32)) * (BLOCKS * TILES)
    start = tl.load(entry_ptr + 11).to(tl.int32)
    flags = tl.load(entry_ptr + 12)
    decay = tl.where((flags & 1) != 0, decay, 0.0)
    seed = seed ^ (flags >> 1).to(tl.int32)

    for tile in range(TILES):
        # 2. Places of the tile's blocks. A thread has 4 neighbours in every tensor, 16 bytes of float32, so that no
        # value changes its thread.
        block = first + tile * BLOCKS + tl.arange(0, BLOCKS)
        is_block = block < blocks
        column = (block % row_blocks).to(tl.int64)[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :]
        at = tl.max_contiguous((block // row_blocks).to(tl.int64)[:, None] * width + column, [1, 4])
        inside = is_block[:, None] & (column < width)

        # 3. Load gradient, master and moments.
        gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0)
        if MASTERS == _SPLIT:
            rest = tl.load(master_ptr + at, mask=inside, other=0).to(tl.int32)
            master = (tl.load(value_ptr + at, mask=inside, other=0).to(tl.int32) << 16) + rest
            master = master.to(tl.float32, bitcast=True)
        elif MASTERS == _APART:
            master = tl.load(master_ptr + at, mask=inside, other=0.0)
        else:
            master = tl.load(value_ptr + at, mask=inside, other=0.0)
        if MOMENTS == _CODES:
            moment1 = _load_codes(moment1_ptr, scale1_ptr, numbers_ptr, at, inside, block, is_block, _SIGNED)
            moment2 = _load_codes(moment2_ptr, scale2_ptr, numbers_ptr, at, inside, block, is_block, _ROOTS)
            moment2 = moment2 * moment2
        else:
            moment1 = tl.load(moment1_ptr + at, mask=inside, other=0)
            moment2 = tl.load(moment2_ptr + at, mask=inside, other=0)
            if MOMENTS == _BFLOAT16:
                moment1, moment2 = _float_of(moment1), _float_of(moment2)

        # 4. Update, as in `update`.
        gradient = gradient * scale
        master = master - master * decay
        moment1 = moment1 * beta1 + gradient * rest1
        moment2 = moment2 * beta2 + gradient * rest2 * gradient
        divisor = tl.sqrt_rn(moment2) * root_factor + epsilon
        master = master - tl.div_rn(moment1 * step_size, divisor)

        # 5. Store moments, rounded by noise, then the gradient's zeros, master and weight. Stores before the end made
        # the kernel half as fast on an H200.
        if MOMENTS == _FLOAT32:
            tl.store(moment1_ptr + at, moment1, mask=inside)
            tl.store(moment2_ptr + at, moment2, mask=inside)
        else:
            mixed = _mixed((at.to(tl.int32) + start) * _GOLDEN + seed)
            noise1, noise2 = mixed & 0xFFFF, (mixed >> 16) & 0xFFFF
            if MOMENTS == _BFLOAT16:
                bits1, bits2 = moment1.to(tl.int32, bitcast=True), moment2.to(tl.int32, bitcast=True)
                tl.store(moment1_ptr + at, ((bits1 + noise1) >> 16).to(tl.int16), mask=inside)
                tl.store(moment2_ptr + at, ((bits2 + noise2) >> 16).to(tl.int16), mask=inside)
            else:
                _store_codes(moment1, moment1_ptr, scale1_ptr, at, inside, block, is_block, noise1, _SIGNED)
                root = tl.sqrt_rn(moment2)
                _store_codes(root, moment2_ptr, scale2_ptr, at, inside, block, is_block, noise2, _ROOTS)
        tl.store(gradient_ptr + at, tl.zeros_like(gradient), mask=inside)
        bits = master.to(tl.int32, bitcast=True)
        if MASTERS == _SPLIT:
            high = (bits + 0x8000) >> 16
            tl.store(value_ptr + at, high.to(tl.int16), mask=inside)
            tl.store(master_ptr + at, (bits - (high << 16)).to(tl.int16), mask=inside)
        elif MASTERS == _APART:  # the weight is rounded to the nearest even, in any mode of the chip
            tl.store(master_ptr + at, master, mask=inside)
            tl.store(value_ptr + at, ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).to(tl.int16), mask=inside)
        else:
            tl.store(value_ptr + at, master, mask=inside)
