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

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.float8_layers import RECIPES, add_argument
from benchmarks.kernels.launches_tried import BACKWARD_LAUNCHES
from benchmarks.kernels.pointwise import copy_bandwidth, time_calls
from penstock.kernels import swiglu as in_16_bits
from penstock.kernels.float8 import operators
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.float8.recipes import Recipe, format_on
from penstock.kernels.float8.reference import aligned_rows, dequantize
from penstock.kernels.float8.swiglu import swiglu, swiglu_backward
from penstock.kernels.reference import SWIGLU
from penstock.kernels.tuning import target_of

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
FORM = format_on("e4m3", target_of(DEVICE))
CHECKED_ROWS = 1024
LEAST_DB = 30.0
"""The interpreter cuts off where chips round to 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Experts of a rank, rows routed to them, width of an expert."""

    name: str
    experts: int
    rows: int
    width: int


SHAPES = (
    Shape(name="V2-Lite", experts=16, rows=98304, width=1408),
    Shape(name="V3", experts=8, rows=32768, width=2048),
)
TINY = Shape(name="tiny", experts=3, rows=200, width=128)


@dataclass(frozen=True)
class Inputs:
    """What both passes are given."""

    gate_up_RF: Tensor
    weights_R: Tensor
    dh_RF: Tensor
    counts_e: Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    Attributes:
        call: with inputs.
        moved: bytes.
        check: decibels of what it gives over its distance from the definition, or None.
    """

    name: str
    call: Callable[[Inputs], object]
    moved: int
    check: Callable[[Inputs], float] | None = None


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    peak = copy_bandwidth() if ON_GPU else None
    if peak is not None:
        print(f"copy: {peak / 1e12:.2f} TB/s", flush=True)
    print(f"{'case':44} {'dB':>5} {'MB':>8} {'us':>8} {'TB/s':>6} {'of copy':>8}", flush=True)
    rows: list[dict] = []
    recipe = RECIPES[options.recipe]
    for shape in (TINY,) if options.tiny else SHAPES:
        for case in cases(shape, recipe):
            if options.only in f"{shape.name} {case.name}":
                rows.append({"model": shape.name, **measure(case, shape, peak)})
                print(line(rows[-1]), flush=True)
                numbers = {"copy_bytes_per_s": peak, "recipe": recipe.name, "rows": rows}
                record.write(options, numbers, triton=triton.__version__)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="one small shape, held against the definition")
    add_argument(parser)
    record.add_arguments(parser)
    return parser.parse_args()


def draw(shape: Shape, rows: int) -> Inputs:
    """Some rows of the experts, the last of which has none behind it."""
    # Triton's interpreter cuts bfloat16 off.
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    gate_up_RF, dh_RF = (torch.randn(rows, wide * shape.width, device=DEVICE, dtype=dtype) for wide in (2, 1))
    counts_e = torch.full((shape.experts,), rows // shape.experts, device=DEVICE, dtype=torch.int32)
    counts_e[-1] += rows - rows // shape.experts * shape.experts
    return Inputs(gate_up_RF, torch.rand(rows, device=DEVICE), dh_RF, counts_e)


def cases(shape: Shape, recipe: Recipe) -> Iterator[Case]:
    """Forward and backward, 16 bits first."""
    numbers, rows = shape.rows * shape.width, 4 * shape.rows
    places = aligned_rows(shape.rows, shape.experts) * shape.width
    quantized = numbers + numbers // 32
    """Bytes of numbers in 8 bits, with a float32 scale for 128."""
    yield Case(
        name="forward, 16 bits",
        call=lambda x: in_16_bits.swiglu_forward(x.gate_up_RF, x.weights_R),
        moved=6 * numbers + rows,
    )
    yield Case(
        name="forward",
        call=lambda x: swiglu(x.gate_up_RF, x.weights_R, SWIGLU, recipe, FORM, counts_e=x.counts_e),
        moved=4 * numbers + quantized + rows,
        check=partial(check_forward, recipe),
    )
    yield Case(
        name="backward, 16 bits",
        call=lambda x: in_16_bits.swiglu_backward(x.gate_up_RF, x.weights_R, x.dh_RF, recompute=True),
        moved=12 * numbers + 2 * rows,
    )
    # Scales of the gradients are of columns; of the activation perhaps of several.
    columns = 3 * places + 2 * places // 32 + places // 32 // recipe.columns[0]
    for name in BACKWARD_LAUNCHES:
        yield Case(
            name=f"backward, {name}",
            call=partial(backward, recipe, name),
            moved=6 * numbers + 2 * quantized + columns + 2 * rows,
            check=partial(check_backward, recipe, name),
        )


def backward(recipe: Recipe, name: str, x: Inputs) -> operators.SwigluForBackward:
    given = x.gate_up_RF, x.weights_R, x.dh_RF, x.counts_e, SWIGLU, recipe, FORM, FORM
    return swiglu_backward(*given, launch=BACKWARD_LAUNCHES[name])


def check_forward(recipe: Recipe, x: Inputs) -> float:
    given = x.gate_up_RF, x.weights_R, SWIGLU, recipe, FORM
    return decibels(swiglu(*given).rows, operators.swiglu(*given).rows)


def check_backward(recipe: Recipe, name: str, x: Inputs) -> float:
    """Of the worst of the three copies."""
    given = x.gate_up_RF, x.weights_R, x.dh_RF, x.counts_e, SWIGLU, recipe, FORM, FORM
    found, expected = backward(recipe, name, x), operators.swiglu_backward(*given)
    return min(decibels(*pair) for pair in zip(found[:3], expected[:3], strict=True))


def decibels(found: Quantized, expected: Quantized) -> float:
    mine, other = dequantize(found).double(), dequantize(expected).double()
    noise = (mine - other).square().sum().clamp(min=1e-30)
    return 10 * torch.log10(other.square().sum() / noise).item()


def measure(case: Case, shape: Shape, peak: float | None) -> dict[str, object]:
    found = None if case.check is None else case.check(draw(shape, min(shape.rows, CHECKED_ROWS)))
    assert found is None or found > LEAST_DB, f"{shape.name}, {case.name}: {found:.1f} dB, the bar is {LEAST_DB}"
    seconds = None
    if peak is None:
        case.call(draw(shape, shape.rows))
    else:
        seconds = time_calls(lambda: partial(case.call, draw(shape, shape.rows)), case.moved)
    return {
        "case": case.name,
        "decibels": found,
        "bytes": case.moved,
        "us": None if seconds is None else seconds * 1e6,
        "share_of_copy": None if seconds is None or peak is None else case.moved / seconds / peak,
    }


def line(row: dict) -> str:
    found = "" if row["decibels"] is None else f"{row['decibels']:.0f}"
    start = f"{row['model'] + ' ' + row['case']:44} {found:>5} {row['bytes'] / 1e6:8.1f}"
    if row["us"] is None:
        return start
    return f"{start} {row['us']:8.1f} {row['bytes'] / row['us'] / 1e6:6.2f} {row['share_of_copy']:8.2f}"


if __name__ == "__main__":
    main()
