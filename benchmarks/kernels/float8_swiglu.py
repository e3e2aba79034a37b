"""The experts' activation in 8 and in 16 bits, forward and backward, against the bandwidth of a copy.

    python -m benchmarks.kernels.float8_swiglu --output float8_swiglu.json
    python -m benchmarks.kernels.float8_swiglu --only "V2-Lite backward"
    python -m benchmarks.kernels.float8_swiglu --recipe blockwise-square         # columns of the activation in squares
    TRITON_INTERPRET=1 python -m benchmarks.kernels.float8_swiglu --tiny         # on a CPU: does it run?

Shapes are those of a rank's experts of DeepSeek-V2-Lite and V3. Backward gives the gradients by rows and by columns,
the activation by columns and the gradients of the weights, by each of `BACKWARD_LAUNCHES`; in 16 bits the gradients
and the activation. `bytes` are those that must move: every number read once, every value and scale written once; by
`passes` more are. `of copy` is the share of the bandwidth of a large copy. Before a launch is timed, what it gives for
some rows is held against the definition. Each line is printed, and all are written, when they are there.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.float8_layers import FORM, OPTION, RECIPES
from benchmarks.kernels.launches_tried import BACKWARD_LAUNCHES
from benchmarks.kernels.measure import DEVICE, DTYPE, ON_GPU, copy_bandwidth, decibels, row_of_bytes
from penstock.kernels import swiglu as in_16_bits
from penstock.kernels.float8 import operators
from penstock.kernels.float8.quantized import Recipe
from penstock.kernels.float8.reference import aligned_rows, dequantize
from penstock.kernels.float8.swiglu import swiglu, swiglu_backward
from penstock.kernels.reference import SWIGLU

CHECKED_ROWS = 1024
LEAST_DB = 30.0
"""The interpreter cuts off where chips round to 16 bits."""


class Shape(NamedTuple):
    """Experts of a rank, rows routed to them, width of an expert."""

    name: str
    experts: int
    rows: int
    width: int


SHAPES = (Shape("V2-Lite", 16, 98304, 1408), Shape("V3", 8, 32768, 2048))
TINY = Shape("tiny", 3, 200, 128)


class Inputs(NamedTuple):
    """What both passes are given."""

    gate_up_RF: Tensor
    weights_R: Tensor
    dh_RF: Tensor
    counts_e: Tensor


class Case(NamedTuple):
    """One call with inputs, the bytes that must move, and decibels over its distance from the definition."""

    name: str
    call: Callable[[Inputs], object]
    moved: int
    check: Callable[[Inputs], float] | None = None


def main() -> None:
    options = record.parser(
        __doc__,
        only=("", "cases whose name contains this"),
        tiny=(False, "one small shape, held against the definition"),
        recipe=OPTION,
    ).parse_args()
    torch.manual_seed(0)
    peak, rows = copy_bandwidth() if ON_GPU else None, []
    for shape in (TINY,) if options.tiny else SHAPES:
        for case in cases(shape, RECIPES[options.recipe]):
            if options.only not in f"{shape.name} {case.name}":
                continue
            noise = None if case.check is None else case.check(draw(shape, min(shape.rows, CHECKED_ROWS)))
            assert noise is None or noise > LEAST_DB, f"{shape.name}, {case.name}: {noise} dB, the bar is {LEAST_DB}"
            row = row_of_bytes(
                lambda case=case, shape=shape: partial(case.call, draw(shape, shape.rows)), case.moved, peak
            )
            rows.append({"model": shape.name, "case": case.name, "decibels": noise, **row})
            record.show(rows[-1])
            numbers = {"copy_bytes_per_s": peak, "recipe": options.recipe, "rows": rows}
            record.write(options, numbers, triton=triton.__version__)


def draw(shape: Shape, rows: int) -> Inputs:
    """Some rows of the experts, the last of which has none behind it."""
    gate_up_RF, dh_RF = (torch.randn(rows, wide * shape.width, device=DEVICE, dtype=DTYPE) for wide in (2, 1))
    counts_e = torch.full((shape.experts,), rows // shape.experts, device=DEVICE, dtype=torch.int32)
    counts_e[-1] += rows - rows // shape.experts * shape.experts
    return Inputs(gate_up_RF, torch.rand(rows, device=DEVICE), dh_RF, counts_e)


def cases(shape: Shape, recipe: Recipe) -> Iterator[Case]:
    """Forward and backward, 16 bits first."""
    numbers, rows = shape.rows * shape.width, 4 * shape.rows
    cells = aligned_rows(shape.rows, shape.experts) * shape.width
    quantized = numbers + numbers // 32  # bytes of numbers in 8 bits, with a float32 scale for 128
    rule = SWIGLU, recipe, FORM

    def plain_forward(x: Inputs) -> object:
        return in_16_bits.swiglu_forward(x.gate_up_RF, x.weights_R)

    def plain_backward(x: Inputs) -> object:
        return in_16_bits.swiglu_backward(x.gate_up_RF, x.weights_R, x.dh_RF, recompute=True)

    def forward(x: Inputs) -> object:
        return swiglu(x.gate_up_RF, x.weights_R, *rule, counts_e=x.counts_e)

    def check_forward(x: Inputs) -> float:
        given = x.gate_up_RF, x.weights_R, *rule
        return decibels(dequantize(swiglu(*given).rows), dequantize(operators.swiglu(*given).rows))

    def backward(name: str, x: Inputs) -> operators.SwigluForBackward:
        return swiglu_backward(*x, *rule, FORM, launch=BACKWARD_LAUNCHES[name])

    def check_backward(name: str, x: Inputs) -> float:
        """Of the worst of the three copies."""
        pairs = zip(backward(name, x)[:3], operators.swiglu_backward(*x, *rule, FORM)[:3], strict=True)
        both = [(dequantize(copy), dequantize(truth)) for copy, truth in pairs]
        return min(decibels(torch.where(truth != 0, copy, 0), truth) for copy, truth in both)  # padding is not written

    yield Case("forward, 16 bits", plain_forward, 6 * numbers + rows)
    yield Case("forward", forward, 4 * numbers + quantized + rows, check_forward)
    yield Case("backward, 16 bits", plain_backward, 12 * numbers + 2 * rows)
    # Scales of the gradients are of columns; of the activation perhaps of several.
    columns = 3 * cells + 2 * cells // 32 + cells // 32 // recipe.columns[0]
    moved = 6 * numbers + 2 * quantized + columns + 2 * rows
    for name in BACKWARD_LAUNCHES:
        yield Case(f"backward, {name}", partial(backward, name), moved, partial(check_backward, name))


if __name__ == "__main__":
    main()
