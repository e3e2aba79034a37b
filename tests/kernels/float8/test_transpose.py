"""The transposed copy of a weight is made of its bytes, on every chip."""

import re

import pytest
import torch

from penstock.base.errors import KernelError
from penstock.kernels.float8 import reference
from penstock.kernels.float8.quantize import TRANSPOSE_BLOCK, TRANSPOSE_WARPS, transpose_weight
from penstock.kernels.float8.quantize_kernels import transpose_kernel
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.float8.recipes import BLOCKWISE, E4M3
from tests.kernels.ahead_of_time import TARGETS, Target, compile_for


@pytest.mark.parametrize("shape", [(144, 48), (3, 16, 272)])
def test_transposed_bytes_equal_the_quantized_transpose(shape: tuple[int, ...], device: torch.device) -> None:
    copies = reference.quantize_weight(torch.randn(shape, device=device), BLOCKWISE, E4M3)
    memory = torch.full_like(copies.backward.values.view(torch.uint8), 7, memory_format=torch.contiguous_format)
    transpose_weight(copies.forward, Quantized(memory.view(E4M3.dtype), copies.backward.scales, BLOCKWISE.weights))
    assert torch.equal(memory, copies.backward.values.view(torch.uint8))
    assert torch.equal(copies.forward.scales.transpose(-1, -2), copies.backward.scales)


def test_a_matrix_that_is_a_part_of_another_is_refused(device: torch.device) -> None:
    weight = reference.quantize_weight(torch.randn(32, 32, device=device), BLOCKWISE, E4M3).forward
    part = Quantized(weight.values[:, :16], weight.scales, weight.block)
    with pytest.raises(KernelError, match="contiguous"):
        transpose_weight(part, part)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_every_chip_moves_wide_words_without_spilling(target: Target) -> None:
    signature = {"x_ptr": "*u8:16", "out_ptr": "*u8:16", "rows": "i32:16", "columns": "i32:16"}
    compiled = compile_for(transpose_kernel, signature, {"BLOCK": TRANSPOSE_BLOCK}, target, num_warps=TRANSPOSE_WARPS)
    assert compiled.spills == 0, compiled.summary
    for move in ("ld", "st") if target.backend == "cuda" else ("load", "store"):
        assert re.search(rf"{move}\.global\.v4\.b32|_{move}_dwordx4", compiled.asm), f"{move} of less than 16 bytes"
