"""What tests leave out of Triton's interpreter changes no value: kernels give the same bits with it and without."""

import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests import interpreter, warm

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or not triton.__version__.startswith(interpreter.VERSION),
    reason="kernels are not interpreted, or not by the version that is hastened",
)

ROWS, COLUMNS = 8, 16


@triton.jit
def floats_kernel(x_ptr, y_ptr, out_ptr, R: tl.constexpr, D: tl.constexpr):
    rows, columns = tl.arange(0, R)[:, None], tl.arange(0, D)[None, :]
    x = tl.load(x_ptr + rows * D + columns)
    y = tl.load(y_ptr + columns, mask=columns < D - 3, other=-0.0)
    out = x * y + 2 - 0.5 * x
    out = tl.where(x > 0, out, -0.0 * y)
    out += tl.maximum(x, 1) / (3 + tl.abs(y)) + tl.minimum(0.25, y)
    out = out.to(tl.float32) * tl.load(y_ptr)
    for step in range(3):
        out = out + step * x - 1 / (step + 1.5)
    tl.store(out_ptr + rows * D + columns, out)


@triton.jit
def integers_kernel(x_ptr, bytes_ptr, out_ptr, count, R: tl.constexpr, D: tl.constexpr):
    rows, columns = tl.arange(0, R)[:, None], tl.arange(0, D)[None, :]
    places = count.to(tl.int64) * 0 + rows * D + columns
    x = tl.load(x_ptr + places)
    small = tl.load(bytes_ptr + places, mask=(columns > 1) & (rows != count), other=7)
    out = (x << 2) ^ (small >> 1) | (x % 5)
    out += tl.where((x < 0) | (small == 3), x // 3, 100 - small)
    out = out * (small > 4) + (count + 1) * tl.sum(small.to(tl.int32), 1)[:, None]
    tl.store(out_ptr + places, out + tl.cumsum(x, 1))


def results(is_hastened: bool) -> list[Tensor]:
    """What the kernels compute from values of every type."""
    if is_hastened:
        interpreter.hasten(pytest.MonkeyPatch())
    torch.manual_seed(0)
    found = []
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        x, y, out = (torch.randn(ROWS, COLUMNS).to(kind) for _ in range(3))
        x[0, :3] = torch.tensor([0.0, -0.0, float("nan")])
        floats_kernel[(1,)](x, y, out, R=ROWS, D=COLUMNS)
        found.append(out.view(torch.uint8))
    for kind in (torch.int32, torch.int64, torch.int8):
        x = torch.randint(-100, 100, (ROWS, COLUMNS)).to(kind)
        small, out = torch.randint(9, (ROWS, COLUMNS)).to(torch.uint8), torch.zeros(ROWS, COLUMNS, dtype=torch.int64)
        integers_kernel[(1,)](x, small, out, 3, R=ROWS, D=COLUMNS)
        found.append(out)
    return found


def test_kernels_give_the_same_bits_whether_the_interpreter_is_hastened_or_not() -> None:
    with ProcessPoolExecutor(max_workers=1, mp_context=warm.CONTEXT) as processes:  # where nothing else has run
        found = [processes.submit(results, is_hastened).result() for is_hastened in (False, True)]
    for plain, hastened in zip(*found, strict=True):
        assert plain.any() and torch.equal(plain, hastened)
