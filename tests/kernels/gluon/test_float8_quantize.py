"""Hopper's own kernel for rows and their transposed copy: bit for bit the definition, and what it takes of a chip.

On a CPU its source is run by `gluon_in_torch`.
"""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.float8 import quantize, reference
from penstock.kernels.float8.launches import TRANSPOSING_LAUNCHES, TileLaunch
from penstock.kernels.float8.quantize import quantize_groups, quantize_rows
from penstock.kernels.float8.quantized import Quantized, as_quantized
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, E4M3, E5M2, MXFP8, Format, Recipe
from penstock.kernels.float8.reference import pack_rows
from penstock.kernels.gluon import float8_launches
from penstock.kernels.gluon.support import HAS_GLUON
from penstock.kernels.tuning import target_of
from tests.kernels.ahead_of_time import TARGETS, Compiled, compile_for
from tests.kernels.float8.draw_quantized import assert_same, without_tail
from tests.kernels.gluon.gluon_in_torch import QUANTIZING, interpreted, launch

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="no Gluon that the kernels know")

if HAS_GLUON:
    from penstock.kernels.gluon.float8_quantize_kernels import quantize_kernel

SPILLED_BY_TRITON_3_9 = 16
"""Bytes. Triton 3.6 makes all fit."""

CPU = torch.device("cpu")
LAUNCHES = {name: launch for name, launch in TRANSPOSING_LAUNCHES.items() if launch.engine == "gluon"}
GLUON = TRANSPOSING_LAUNCHES["gluon"]
every_recipe = pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE], ids=lambda recipe: recipe.name)
every_launch = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Grids of the kernel, which torch runs whenever it is launched, on a CPU that is taken for a Hopper."""
    if torch.cuda.is_available():
        pytest.skip("tables of tiles are made on the GPU that there is")
    found = []
    module = interpreted(*QUANTIZING)[-1]

    def start_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        assert kernel is quantize_kernel
        found.append(grid)
        constants = {name: value for name, value in constants.items() if name.isupper()}
        launch(module.quantize_kernel, grid, *arguments, **constants)

    monkeypatch.setattr(float8_launches, "start_kernel", start_kernel)
    monkeypatch.setattr(quantize, "target_of", lambda device: "sm_90")
    return found


def rows(count: int, width: int, device: torch.device) -> Tensor:
    """Of very different sizes."""
    return (torch.randn(count, width, device=device) * torch.randn(count, 1, device=device).mul(4).exp()).bfloat16()


@pytest.mark.often("counts2-e4m3-blockwise", "counts1-e5m2-blockwise-square", "None-e4m3-blockwise-square")
@every_recipe
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
@pytest.mark.parametrize("counts", [None, (3, 0, 130), (129,)])
def test_rows_in_16_bits_give_both_copies(
    counts: tuple[int, ...] | None, form: Format, recipe: Recipe, launched: list[tuple[int, ...]]
) -> None:
    """Without experts a multiple of 128 rows; those of experts end with the last one's, an odd number in all."""
    x_RD = rows(256 if counts is None else sum(counts), 256, CPU)
    x_RD[2, 3], x_RD[1, 200], x_RD[0, 5], x_RD[0, 6] = math.nan, math.inf, -0.0, 2.0**-130
    how = {"columns": recipe.columns, "counts_e": None if counts is None else torch.tensor(counts)}
    found = quantize_rows(x_RD, recipe, form, **how, launch=GLUON)
    expected = reference.quantize_rows(x_RD, recipe, form, **how)
    assert_same(found.rows, expected.rows)
    assert_same(without_tail(found.columns, how["counts_e"]), without_tail(expected.columns, how["counts_e"]))
    assert launched == [(2, expected.columns.values.shape[1] // 128)]


@pytest.mark.often("16 bits-False-blockwise", "8 bits-True-blockwise-square", "8 bits that travelled-False-blockwise")
@every_recipe
@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("kind", ["16 bits", "8 bits", "8 bits that travelled"])
def test_gathered_rows_give_the_transposed_copy(
    kind: str, is_gathered: bool, recipe: Recipe, launched: list[tuple[int, ...]]
) -> None:
    source: Tensor | Quantized = rows(40, 256, CPU)
    if kind == "8 bits":
        source = reference.quantize_rows(source, recipe, E4M3).rows
    elif kind != "16 bits":
        source = as_quantized(pack_rows(source, recipe, E4M3), 256, recipe, E4M3)
    index_R = torch.randint(0, 40, (45,)) if is_gathered else None
    how = {"counts_e": torch.tensor([7, 0, 33]), "recipe": recipe, "form": E4M3, "index_R": index_R}
    copies = quantize_groups(source, **how, launch=GLUON), reference.quantize_groups(source, **how)
    assert_same(*(without_tail(copy, how["counts_e"]) for copy in copies))
    assert len(launched) == 1


def test_triton_replaces_the_kernel_where_it_cannot_run(launched: list[tuple[int, ...]]) -> None:
    """An odd number of rows, an odd width, 32 bits; a weight, which is squares by rows too."""
    wide = rows(256, 256, CPU)
    for x_RD in (wide[:130], wide[:, :144].contiguous(), wide.float()):
        found = quantize_rows(x_RD, BLOCKWISE, E4M3, columns=BLOCKWISE.columns, launch=GLUON)
        expected = reference.quantize_rows(x_RD, BLOCKWISE, E4M3, columns=BLOCKWISE.columns)
        assert_same(found.columns, expected.columns)
    weight = quantize.quantize_weight(wide, BLOCKWISE_SQUARE, E4M3, launch=GLUON)
    assert_same(weight.forward, reference.quantize_weight(wide, BLOCKWISE_SQUARE, E4M3).forward)
    assert not launched


def test_on_another_chip_triton_does_all() -> None:
    for recipe, target, problem in (
        (BLOCKWISE, "sm_90", "None"),
        (BLOCKWISE_SQUARE, "sm_90", "None"),
        (BLOCKWISE, "sm_100", "sm_100"),
        (MXFP8, "sm_90", "recipe"),
    ):
        blocks = recipe.rows, recipe.columns
        assert problem in str(float8_launches.quantize_obstacle(blocks, recipe.scaling, [E4M3], 256, target))
    squares = [BLOCKWISE.weights, BLOCKWISE.weights]
    assert "recipe" in str(float8_launches.quantize_obstacle(squares, BLOCKWISE.scaling, [E4M3], 256, "sm_90"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_launch
@every_recipe
@pytest.mark.parametrize("counts", [(700, 0, 3, 1025, 256), (0, 0), (4000, 1, 901)], ids=str)
def test_a_hopper_gives_the_copies_of_the_definition(
    counts: tuple[int, ...], recipe: Recipe, launch: TileLaunch, device: torch.device
) -> None:
    if target_of(device) != "sm_90":
        pytest.skip("the kernel is Hopper's")
    used, counts_e = sum(counts), torch.tensor(counts, device=device)
    x_RD = rows(used + 9, 1408, device)
    x_RD[used:] = math.nan
    for form in (E4M3, E5M2):
        how = {"columns": recipe.columns, "counts_e": counts_e}
        found = quantize_rows(x_RD, recipe, form, **how, launch=launch)
        expected = reference.quantize_rows(x_RD, recipe, form, **how)
        assert_same(found.rows, expected.rows, used)
        assert_same(without_tail(found.columns, counts_e), without_tail(expected.columns, counts_e))
    source = reference.quantize_rows(rows(512, 1408, device), recipe, E4M3).rows
    how = {"counts_e": counts_e, "index_R": torch.randint(0, 512, (used + 9,), device=device)}
    found_columns = quantize_groups(source, recipe=recipe, form=E4M3, **how, launch=launch)
    expected_columns = reference.quantize_groups(source, recipe=recipe, form=E4M3, **how)
    assert_same(without_tail(found_columns, counts_e), without_tail(expected_columns, counts_e))


def compiled(launch: TileLaunch, *, eight: bool, square: bool, travelled: bool = False) -> Compiled:
    pointers = {
        "x_ptr": "*fp8e4nv:16" if eight else "*bf16:16",
        "x_scales_ptr": "*fp32:16" if eight else None,
        "index_ptr": "*i64:16" if eight and not travelled else None,
        "tiles_ptr": "*i32:16",
        "rows_ptr": None if eight else "*i8:16",
        "row_scales_ptr": None if eight else "*fp32:16",
        "columns_ptr": "*i64:16",
        "column_scales_ptr": "*fp32:16",
    }
    numbers = dict.fromkeys(("x_stride", "rows_stride", "columns_stride", "D"), "i32:16")
    numbers["x_scales_outer"] = "i32" if travelled else "i32:16"
    return compile_for(
        quantize_kernel,
        {name: kind for name, kind in pointers.items() if kind} | numbers | {"R": "i32", "x_scales_depth": "i32"},
        {name: None for name, kind in pointers.items() if not kind} | {"LARGEST": 448.0, "SQUARE": square},
        TARGETS["sm_90"],
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )


@pytest.mark.often("8 bits-True-gluon_128")
@every_launch
@pytest.mark.parametrize(
    ("kind", "square"),
    [*((kind, square) for kind in ("16 bits", "8 bits") for square in (False, True)), ("8 bits that travelled", False)],
)
def test_tiles_are_moved_in_wide_pieces_by_as_many_registers_as_there_are(
    kind: str, launch: TileLaunch, square: bool
) -> None:
    eight = kind != "16 bits"
    found = compiled(launch, eight=eight, square=square, travelled=kind.endswith("travelled"))
    assert found.spills <= SPILLED_BY_TRITON_3_9 and found.registers <= launch.registers, found.summary
    numbers = 128 * 128 // (32 * launch.warps)
    loads = r"ld\.global(?:\.\w+)*\.v2\.b32" if eight else r"ld\.global(?:\.\w+)*\.v4\.b32"
    assert len(re.findall(loads, found.asm)) >= numbers // 8
    stores = re.findall(r"st\.global(?:\.\w+)*\.v2\.b64|st\.global(?:\.\w+)*\.v4\.b32", found.asm)
    assert len(stores) >= numbers // 16, "of columns"
    assert found.shared_bytes == 32 * 1024, found.summary
