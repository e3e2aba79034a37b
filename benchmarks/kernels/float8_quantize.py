"""Quantization to 8 bits against the bandwidth of a copy.

    python -m benchmarks.kernels.float8_quantize --output float8_quantize.json
    python -m benchmarks.kernels.float8_quantize --launches           # what transposes, cut in several ways
    python -m benchmarks.kernels.float8_quantize --recipe blockwise-square     # columns of activations in squares
    TRITON_INTERPRET=1 python -m benchmarks.kernels.float8_quantize --tiny       # on a CPU: does it run?

Shapes are those of DeepSeek-V2-Lite and V3. `bytes` are those that must move: every number of the source read once,
every value and scale written once; gathered rows count each time, a second pass does not. `of copy` is the share of the
bandwidth of a large copy. Before anything is timed, what a case gives is held against the definition.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.float8_layers import RECIPES, add_argument
from benchmarks.kernels.launches_tried import TRANSPOSING_LAUNCHES
from benchmarks.kernels.pointwise import copy_bandwidth, time_calls
from penstock.kernels.float8 import reference
from penstock.kernels.float8.quantize import quantize_groups, quantize_rows, quantize_weight
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.float8.recipes import MXFP8, ROWWISE, TENSORWISE, Block, Recipe, format_on
from penstock.kernels.tuning import KernelLaunch, target_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORM = format_on("e4m3", target_of(DEVICE))


@dataclass(frozen=True, kw_only=True)
class Model:
    """Hidden size, width of an expert, experts of a rank, rows routed to them, tokens of a rank."""

    name: str
    hidden: int
    width: int
    experts: int
    rows: int
    tokens: int


MODELS = (
    Model(name="V2-Lite", hidden=2048, width=1408, experts=16, rows=49152, tokens=32768),
    Model(name="V3", hidden=7168, width=2048, experts=8, rows=32768, tokens=16384),
)
TINY = Model(name="tiny", hidden=256, width=64, experts=3, rows=200, tokens=70)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    Attributes:
        draw: makes its inputs.
        call: gives copies.
        truth: gives those of the definition.
        read: bytes.
        used: rows of the first copy that experts have; None for all.
    """

    name: str
    draw: Callable[[], tuple[object, ...]]
    call: Callable[..., tuple[Quantized | None, ...]]
    truth: Callable[..., tuple[Quantized | None, ...]]
    read: int
    used: int | None = None


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    peak = None if options.tiny else copy_bandwidth()
    if peak is not None:
        print(f"copy: {peak / 1e12:.2f} TB/s")
    print(f"{'case':58} {'MB':>8} {'us':>8} {'TB/s':>6} {'of copy':>8}")
    rows, recipe = [], RECIPES[options.recipe]
    for model in (TINY,) if options.tiny else MODELS:
        for case in chosen_cases(options, model, recipe):
            rows.append({"model": model.name, **measure(case, peak)})
            print(line(rows[-1]), flush=True)
            numbers = {"copy_bytes_per_s": peak, "recipe": recipe.name, "rows": rows}
            record.write(options, numbers, triton=triton.__version__)


def chosen_cases(options: argparse.Namespace, model: Model, recipe: Recipe) -> Iterator[Case]:
    return (launch_cases if options.launches else cases)(model, recipe)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", action="store_true", help="only what transposes, with each of some launches")
    parser.add_argument(
        "--tiny", action="store_true", help="one small model, held against the definition but not timed"
    )
    add_argument(parser)
    record.add_arguments(parser)
    return parser.parse_args()


def line(row: dict[str, object]) -> str:
    name = f"{row['model']} {row['case']}"
    if row["us"] is None:
        return f"{name:58} {row['bytes'] / 1e6:8.3f}  equals the definition"
    return (
        f"{name:58} {row['bytes'] / 1e6:8.1f} {row['us']:8.1f} {row['bytes'] / row['us'] / 1e6:6.2f}"
        f" {row['share_of_copy']:8.2f}"
    )


def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, device=DEVICE, dtype=dtype)


def cases(model: Model, recipe: Recipe) -> Iterator[Case]:
    """Dense rows, experts' rows, weights; then what other recipes cost on dense rows. Experts' rows are gradients."""
    yield rows_case("rows", (model.tokens, model.hidden), recipe)
    yield rows_case("rows, columns", (model.tokens, model.hidden), recipe, recipe.columns)
    counts_e = torch.full((model.experts,), model.rows // model.experts - 1, device=DEVICE)
    for name, width in (("hidden", model.hidden), ("gate-up", 2 * model.width)):
        case = f"experts' rows, columns, {name}"
        yield rows_case(case, (model.rows, width), recipe, recipe.rows, counts_e=counts_e)
    yield from gathered_cases(model, counts_e, recipe)
    for dtype in (torch.bfloat16, torch.float32):
        yield weight_case(model, dtype, recipe)
    for other in (MXFP8, ROWWISE, TENSORWISE):
        yield rows_case(f"rows, columns, {other.name}", (model.tokens, model.hidden), other, other.columns)


def launch_cases(model: Model, recipe: Recipe) -> Iterator[Case]:
    counts_e = torch.full((model.experts,), model.rows // model.experts - 1, device=DEVICE)
    for name, launch in TRANSPOSING_LAUNCHES.items():
        for case in (
            rows_case("rows, columns", (model.tokens, model.hidden), recipe, recipe.columns, launch=launch),
            rows_case(
                "experts' rows, columns",
                (model.rows, model.hidden),
                recipe,
                recipe.rows,
                counts_e=counts_e,
                launch=launch,
            ),
            *gathered_cases(model, counts_e, recipe, launch),
        ):
            yield replace(case, name=f"{case.name}, {name}")


def rows_case(
    name: str,
    shape: tuple[int, int],
    recipe: Recipe,
    columns: Block | None = None,
    *,
    counts_e: Tensor | None = None,
    launch: KernelLaunch | None = None,
) -> Case:
    how = {"recipe": recipe, "form": FORM, "columns": columns, "counts_e": counts_e}
    return Case(
        name=name,
        draw=lambda: (normal(*shape),),
        call=partial(quantize_rows, **how, launch=launch),
        truth=partial(reference.quantize_rows, **how),
        read=2 * shape[0] * shape[1],
        used=None if counts_e is None else int(counts_e.sum()),
    )


def gathered_cases(
    model: Model, counts_e: Tensor, recipe: Recipe, launch: KernelLaunch | None = None
) -> Iterator[Case]:
    """Rows of tokens, from 16 bits and from 8, in the order of the experts and transposed."""
    index_R = torch.randint(0, model.tokens, (model.rows,), device=DEVICE)
    how = {"counts_e": counts_e, "recipe": recipe, "form": FORM, "index_R": index_R}
    plain = Case(
        name="gathered columns of 16 bits",
        draw=lambda: (normal(model.tokens, model.hidden),),
        call=lambda x: (quantize_groups(x, **how, launch=launch),),
        truth=lambda x: (reference.quantize_groups(x, **how),),
        read=2 * model.rows * model.hidden,
    )
    yield plain
    yield replace(
        plain,
        name="gathered columns of 8 bits",
        draw=lambda: (quantize_rows(normal(model.tokens, model.hidden), recipe, FORM).rows,),
        read=plain.read // 2,
    )


def weight_case(model: Model, dtype: torch.dtype, recipe: Recipe) -> Case:
    """Gate and up of all experts, into copies that are there, as after an optimizer step."""
    shape = (model.experts, 2 * model.width, model.hidden)

    def draw() -> tuple[object, ...]:
        w_eFD = normal(*shape, dtype=dtype)
        return w_eFD, quantize_weight(w_eFD, recipe, FORM)

    return Case(
        name=f"weights of {torch.finfo(dtype).bits} bits",
        draw=draw,
        call=lambda w_eFD, into: quantize_weight(w_eFD, recipe, FORM, into),
        truth=lambda w_eFD, _: reference.quantize_weight(w_eFD, recipe, FORM),
        read=dtype.itemsize * model.experts * 2 * model.width * model.hidden,
    )


def measure(case: Case, peak: float | None) -> dict[str, object]:
    inputs = case.draw()
    found = [copy for copy in case.call(*inputs) if copy is not None]
    judge(case, inputs, found)
    written = sum(tensor.numel() * tensor.element_size() for copy in found for tensor in (copy.values, copy.scales))
    moved = case.read + written
    del inputs, found
    seconds = None if peak is None else time_calls(lambda: partial(case.call, *case.draw()), moved)
    return {
        "case": case.name,
        "bytes": moved,
        "us": None if seconds is None else seconds * 1e6,
        "share_of_copy": None if seconds is None else moved / seconds / peak,
    }


def judge(case: Case, inputs: tuple[object, ...], found: list[Quantized]) -> None:
    """Numbers of 8 bits and scales must be those of the definition, but for rows that no expert has."""
    expected = [copy for copy in case.truth(*inputs) if copy is not None]
    for place, copies in enumerate(zip(found, expected, strict=True)):
        mine, other = ([copy.values.view(torch.uint8), copy.scales.float()] for copy in copies)
        rows = case.used if place == 0 else None
        for one, truth in zip(mine, other, strict=True):
            assert torch.equal(one[:rows], truth[:rows]), f"{case.name}: copy {place} differs from the definition"


if __name__ == "__main__":
    main()
