"""MXFP4 beside a search among all its numbers and the reader of `transformers`; the kernel beside its definition."""

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.kernels.mxfp4 import BLOCK, E2M1, pack_mxfp4, to_mxfp4, to_mxfp4_triton
from penstock.models.huggingface.weight_folder import from_mxfp4
from tests.closeness import assert_equal
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def _weights(dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks of all magnitudes down to the least of float32, of zeros, and with every number and middle of E2M1."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-44, 37, 35)[:, None, None]
    random_EFD = torch.randn(35, 3, 2 * BLOCK, generator=generator) * scales
    random_EFD[0, 0] *= 0.0  # of both signs
    numbers = torch.tensor(E2M1[:8])
    sizes = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([7.0, 7.9])))
    random_EFD[20, 1, : len(sizes)] = sizes  # a block whose scale is 1: 7.9 is its largest magnitude
    random_EFD[20, 1, len(sizes) : BLOCK] = -sizes[: BLOCK - len(sizes)]
    random_EFD[21, 1] = 2.0**-9 * random_EFD[20, 1]
    return random_EFD.to(dtype)


def _assert_same_bits(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert_equal(got.view(_BITS[got.dtype]), expected.view(_BITS[got.dtype]))


@DTYPES
def test_a_weight_becomes_the_nearest_number_of_four_bits_and_an_even_one_between_two(dtype: torch.dtype) -> None:
    blocks = _weights(dtype).double().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-125)  # the least exponent of a scale is -127
    scale = torch.exp2(amax.log2().floor() - 2)
    distance = (blocks.abs() / scale)[..., None] - torch.tensor(E2M1[:8], dtype=torch.float64)
    # Between two neighbours the one with an even number in the table, whose last bit of the mantissa is 0.
    cost = distance.abs() + 1e-9 * (torch.arange(8) % 2)
    nearest = torch.tensor(E2M1[:8], dtype=torch.float64)[cost.argmin(-1)]
    assert_equal(to_mxfp4(_weights(dtype)).double(), (torch.copysign(nearest, blocks) * scale).flatten(-2))


@DTYPES
def test_bytes_hold_the_same_numbers_for_every_reader_and_are_made_of_them_again(dtype: torch.dtype) -> None:
    weights_EFD = _weights(dtype)
    rounded_EFD = to_mxfp4(weights_EFD)
    blocks, scales = pack_mxfp4(weights_EFD)
    assert (blocks.shape, scales.shape) == ((35, 3, 2, 16), (35, 3, 2))
    _assert_same_bits(convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT.contiguous(), rounded_EFD)
    _assert_same_bits(from_mxfp4(blocks, scales).mT.contiguous(), rounded_EFD.bfloat16())
    for again, before in zip(pack_mxfp4(rounded_EFD), (blocks, scales), strict=True):
        assert_equal(again, before)


def test_numbers_that_others_packed_are_kept_whatever_scale_they_chose() -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (4, 5, 3, 16), generator=generator, dtype=torch.uint8)
    blocks[0] &= 0b00110011  # of magnitudes up to 1.5
    read_EDF = from_mxfp4(blocks, torch.randint(100, 140, (4, 5, 3), generator=generator, dtype=torch.uint8))
    _assert_same_bits(to_mxfp4(read_EDF.mT), read_EDF.mT.contiguous())


@DTYPES
@pytest.mark.filterwarnings("ignore:overflow encountered")  # of infinity over its scale, in Triton's interpreter
def test_the_kernel_gives_the_bits_of_the_definition(dtype: torch.dtype, device: torch.device) -> None:
    first = 3 if dtype == torch.bfloat16 else 0  # subnormal numbers in bfloat16 are others in Triton's interpreter
    weights_EFD = _weights(dtype)[first:].to(device)
    weights_EFD[3, 0, 5], weights_EFD[4, 0, 40] = torch.nan, -torch.inf  # which stay
    rounded_EFD = to_mxfp4_triton(weights_EFD)
    assert rounded_EFD[3, 0, 5].isnan() and rounded_EFD[4, 0, 40] == -torch.inf
    _assert_same_bits(rounded_EFD.nan_to_num(1e30), to_mxfp4(weights_EFD).nan_to_num(1e30))
    part_EFD = weights_EFD[5:, :, :BLOCK]  # which is not contiguous
    _assert_same_bits(to_mxfp4_triton(part_EFD), to_mxfp4(part_EFD))
    assert to_mxfp4_triton(weights_EFD[:0]).shape == (0, 3, 2 * BLOCK)


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles_without_spills(target: str) -> None:
    (compiled,) = compile_without_spills(target, lambda: to_mxfp4_triton(on_meta(8, 2816, 2048)))
    assert compiled.kernel == "mxfp4_kernel"
