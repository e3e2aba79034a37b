"""Quantization to 8 bits against the bandwidth of a copy.

    python -m benchmarks.kernels.float8_quantize --output float8_quantize.json
    python -m benchmarks.kernels.float8_quantize --launches           # what transposes, cut in several ways
    python -m benchmarks.kernels.float8_quantize --recipe blockwise-square     # columns of activations in squares
    TRITON_INTERPRET=1 python -m benchmarks.kernels.float8_quantize --tiny       # on a CPU: does it run?

Shapes are those of DeepSeek-V2-Lite and V3. `bytes` are those that must move: every number of the source read once,
every value and scale written once; gathered rows count each time, a second pass does not. `of copy` is the share of the
bandwidth of a large copy. Before anything is timed, what a case gives is held against the definition.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.float8_layers import FORM, OPTION, RECIPES
from benchmarks.kernels.launches_tried import TRANSPOSING_LAUNCHES
from benchmarks.kernels.measure import DEVICE, copy_bandwidth, row_of_bytes
from penstock.kernels.float8 import reference
from penstock.kernels.float8.quantize import quantize_groups, quantize_rows, quantize_weight
from penstock.kernels.float8.quantized import MXFP8, ROWWISE, TENSORWISE, Quantized, Recipe
from penstock.kernels.tuning import KernelLaunch

normal = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)


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

Copies = Sequence[Quantized | None]


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
    draw: Callable[[], tuple[Any, ...]]
    call: Callable[..., Copies]
    truth: Callable[..., Copies]
    read: int
    used: int | None = None


def main() -> None:
    options = record.parser(
        __doc__,
        launches=(False, "only what transposes, with each of some launches"),
        tiny=(False, "one small model, held against the definition but not timed"),
        recipe=OPTION,
    ).parse_args()
    torch.manual_seed(0)
    peak, rows = None if options.tiny else copy_bandwidth(), []
    for model in (TINY,) if options.tiny else MODELS:
        for case in (launch_cases if options.launches else cases)(model, RECIPES[options.recipe]):
            moved = case.read + judge(case)
            row = row_of_bytes(lambda case=case: partial(case.call, *case.draw()), moved, peak)
            rows.append({"model": model.name, "case": case.name, **row})
            record.show(rows[-1])
            numbers = {"copy_bytes_per_s": peak, "recipe": options.recipe, "rows": rows}
            record.write(options, numbers, triton=triton.__version__)


def cases(model: Model, recipe: Recipe) -> Iterator[Case]:
    """Dense rows, experts' rows, weights; then what other recipes cost on dense rows. Experts' rows are gradients."""
    rows, counts_e = (model.tokens, model.hidden), counts_of(model)
    yield rows_case("rows", rows, recipe)
    yield rows_case("rows, columns", rows, recipe, columns=recipe.columns)
    for name, width in (("hidden", model.hidden), ("gate-up", 2 * model.width)):
        case = f"experts' rows, columns, {name}"
        yield rows_case(case, (model.rows, width), recipe, columns=recipe.rows, counts_e=counts_e)
    yield from gathered_cases(model, recipe)
    for dtype in (torch.bfloat16, torch.float32):
        yield weight_case(model, dtype, recipe)
    for other in (MXFP8, ROWWISE, TENSORWISE):
        yield rows_case(f"rows, columns, {other.name}", rows, other, columns=other.columns)


def launch_cases(model: Model, recipe: Recipe) -> Iterator[Case]:
    rows, counts_e = (model.tokens, model.hidden), counts_of(model)
    for name, launch in TRANSPOSING_LAUNCHES.items():
        experts = {"columns": recipe.rows, "counts_e": counts_e}
        for case in (
            rows_case("rows, columns", rows, recipe, launch, columns=recipe.columns),
            rows_case("experts' rows, columns", (model.rows, model.hidden), recipe, launch, **experts),
            *gathered_cases(model, recipe, launch),
        ):
            yield replace(case, name=f"{case.name}, {name}")


def counts_of(model: Model) -> Tensor:
    """The last expert has no row behind it."""
    return torch.full((model.experts,), model.rows // model.experts - 1, device=DEVICE)


def rows_case(
    name: str, shape: tuple[int, int], recipe: Recipe, launch: KernelLaunch | None = None, **how: Any
) -> Case:
    counts_e = how.get("counts_e")
    how |= {"recipe": recipe, "form": FORM}
    return Case(
        name=name,
        draw=lambda: (normal(*shape),),
        call=partial(quantize_rows, **how, launch=launch),
        truth=partial(reference.quantize_rows, **how),
        read=2 * shape[0] * shape[1],
        used=None if counts_e is None else int(counts_e.sum()),
    )


def gathered_cases(model: Model, recipe: Recipe, launch: KernelLaunch | None = None) -> Iterator[Case]:
    """Rows of tokens, from 16 bits and from 8, in the order of the experts and transposed."""
    index_R = torch.randint(0, model.tokens, (model.rows,), device=DEVICE)
    how = {"counts_e": counts_of(model), "recipe": recipe, "form": FORM, "index_R": index_R}

    def draw() -> tuple[Tensor]:
        return (normal(model.tokens, model.hidden),)

    plain = Case(
        name="gathered columns of 16 bits",
        draw=draw,
        call=lambda x: (quantize_groups(x, **how, launch=launch),),
        truth=lambda x: (reference.quantize_groups(x, **how),),
        read=2 * model.rows * model.hidden,
    )
    yield plain
    in_8_bits = {"name": "gathered columns of 8 bits", "read": plain.read // 2}
    yield replace(plain, draw=lambda: (quantize_rows(*draw(), recipe, FORM).rows,), **in_8_bits)


def weight_case(model: Model, dtype: torch.dtype, recipe: Recipe) -> Case:
    """Gate and up of all experts, into copies that are there, as after an optimizer step."""
    shape = (model.experts, 2 * model.width, model.hidden)

    def draw() -> tuple[Any, ...]:
        w_eFD = normal(*shape, dtype=dtype)
        return w_eFD, quantize_weight(w_eFD, recipe, FORM)

    return Case(
        name=f"weights of {torch.finfo(dtype).bits} bits",
        draw=draw,
        call=lambda w_eFD, into: quantize_weight(w_eFD, recipe, FORM, into),
        truth=lambda w_eFD, _: reference.quantize_weight(w_eFD, recipe, FORM),
        read=dtype.itemsize * model.experts * 2 * model.width * model.hidden,
    )


def judge(case: Case) -> int:
    """Bytes that are written, which must be those of the definition but for rows that no expert has."""
    inputs, written = case.draw(), 0
    pairs = zip(case.call(*inputs), case.truth(*inputs), strict=True)
    for number, (copy, truth) in enumerate(pairs):
        if copy is None or truth is None:
            continue
        rows = case.used if number == 0 else None
        expected = reference.dequantize(truth)[:rows]
        numbers = torch.where(expected != 0, reference.dequantize(copy)[:rows], 0)  # padding is not written
        assert torch.equal(numbers, expected), f"{case.name}: copy {number} differs from the definition"
        written += copy.values.nbytes + copy.scales.nbytes
    return written


if __name__ == "__main__":
    main()
