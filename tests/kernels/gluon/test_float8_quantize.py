"""Hopper's own kernels that quantize: rows with their transposed copy, and the activation's gradients.

On a CPU `gluon_in_torch` runs their source. They round where the definition does, so bytes and scales are equal.
"""

import math
import re
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.launches_tried import BACKWARD_LAUNCHES, TRANSPOSING_LAUNCHES
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.float8 import operators, quantize, reference, swiglu
from penstock.kernels.float8.operators import SwigluForBackward
from penstock.kernels.float8.quantize import BACKWARD_DEFAULT, quantize_groups, quantize_rows
from penstock.kernels.float8.quantized import (
    BLOCKWISE,
    BLOCKWISE_SQUARE,
    E4M3,
    E5M2,
    MXFP8,
    Format,
    Quantized,
    Recipe,
    as_quantized,
    row_bytes,
)
from penstock.kernels.float8.reference import pack_rows
from penstock.kernels.float8.swiglu import swiglu_backward
from penstock.kernels.gluon.support import HAS_GLUON
from penstock.kernels.reference import SWIGLU, ExpertRule
from penstock.kernels.tuning import KernelLaunch
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, Compiled, compile_launches, on_meta
from tests.kernels.float8.draw_quantized import assert_all_same, assert_same, draw_activation, transposed, without_tail
from tests.kernels.gluon.gluon_in_torch import quantizing_in_torch

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="no Gluon that the kernels know")

SPILLED_BY_TRITON_3_9 = 16  # bytes; Triton 3.6 makes all fit
CPU = torch.device("cpu")
LAUNCHES = {name: launch for name, launch in TRANSPOSING_LAUNCHES.items() if launch.engine == "gluon"}
GLUON = TRANSPOSING_LAUNCHES["gluon"]
every_recipe = pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE], ids=lambda recipe: recipe.name)
every_launch = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Grids of the kernel, which torch runs whenever it is launched, on a CPU that is taken for a Hopper."""
    return quantizing_in_torch(monkeypatch, quantize)


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
    x_RD[2, 3], x_RD[1, 200], x_RD[0, 5], x_RD[0, 6] = math.nan, math.inf, -0.0, 2.0**-130  # the last is subnormal
    how = {"columns": recipe.columns, "counts_e": None if counts is None else torch.tensor(counts)}
    found = quantize_rows(x_RD, recipe, form, **how, launch=GLUON)
    expected = reference.quantize_rows(x_RD, recipe, form, **how)
    assert_same(found.rows, expected.rows)
    assert_same(without_tail(found.columns, how["counts_e"]), without_tail(expected.columns, how["counts_e"]))
    assert launched == [(2, expected.columns.values.shape[1] // 128)]  # tiles of 128 x 128


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
    for x_RD in (wide[:130], wide[:, :144].contiguous(), wide.float()):  # tiles hold 128 rows and columns of bfloat16
        found = quantize_rows(x_RD, BLOCKWISE, E4M3, columns=BLOCKWISE.columns, launch=GLUON)
        expected = reference.quantize_rows(x_RD, BLOCKWISE, E4M3, columns=BLOCKWISE.columns)
        assert_same(found.columns, expected.columns)
    weight = quantize.quantize_weight(wide, BLOCKWISE_SQUARE, E4M3, launch=GLUON)
    assert_same(weight.forward, reference.quantize_weight(wide, BLOCKWISE_SQUARE, E4M3).forward)
    assert not launched


def test_what_the_kernels_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, squares = (1, 128), (128, 128)
    for target, dtype, width, blocks, problem in (
        ("sm_90", torch.bfloat16, 256, (lines, lines), "None"),
        ("sm_90", torch.bfloat16, 256, (lines, squares), "None"),
        ("sm_100", torch.bfloat16, 256, (lines, lines), "sm_100"),
        ("sm_90", torch.bfloat16, 256, ((1, 32), (1, 32)), "recipe"),
        ("sm_90", torch.bfloat16, 256, (squares, squares), "recipe"),
        ("sm_90", torch.float32, 256, (lines, lines), "float32"),
        ("sm_90", torch.bfloat16, 200, (lines, lines), "200"),
    ):
        monkeypatch.setattr(quantize, "target_of", lambda device, target=target: target)
        x_RD = torch.zeros(1, width, dtype=dtype)
        assert problem in str(quantize.hopper_obstacle(x_RD, width, blocks, BLOCKWISE.scaling, [E4M3])), problem


@pytest.mark.gpu
@every_launch
@every_recipe
@pytest.mark.parametrize("counts", [(700, 0, 3, 1025, 256), (0, 0), (4000, 1, 901)], ids=str)
def test_a_hopper_gives_the_copies_of_the_definition(
    counts: tuple[int, ...], recipe: Recipe, launch: KernelLaunch, hopper: torch.device
) -> None:
    used, counts_e = sum(counts), torch.tensor(counts, device=hopper)
    x_RD = rows(used + 9, 1408, hopper)
    x_RD[used:] = math.nan
    for form in (E4M3, E5M2):
        how = {"columns": recipe.columns, "counts_e": counts_e}
        found = quantize_rows(x_RD, recipe, form, **how, launch=launch)
        expected = reference.quantize_rows(x_RD, recipe, form, **how)
        assert_same(found.rows, expected.rows, used)
        assert_same(without_tail(found.columns, counts_e), without_tail(expected.columns, counts_e))
    source = reference.quantize_rows(rows(512, 1408, hopper), recipe, E4M3).rows
    how = {"counts_e": counts_e, "index_R": torch.randint(0, 512, (used + 9,), device=hopper)}
    found_columns = quantize_groups(source, recipe=recipe, form=E4M3, **how, launch=launch)
    expected_columns = reference.quantize_groups(source, recipe=recipe, form=E4M3, **how)
    assert_same(without_tail(found_columns, counts_e), without_tail(expected_columns, counts_e))


def compiled(launch: KernelLaunch, kind: str, *, square: bool) -> Compiled:
    recipe, counts_e = BLOCKWISE_SQUARE if square else BLOCKWISE, on_meta(63, dtype=torch.int32)
    x_RD, given = on_meta(8192, 2048), (counts_e, recipe, E4M3)
    if kind == "16 bits":
        launches = partial(quantize_rows, x_RD, recipe, E4M3, columns=recipe.columns, counts_e=counts_e, launch=launch)
    elif kind == "8 bits":
        rows, index_R = quantize_rows(x_RD, recipe, E4M3).rows, on_meta(8192, dtype=torch.int64)
        launches = partial(quantize_groups, rows, *given, index_R, launch=launch)
    else:
        packed = on_meta(8192, row_bytes(2048, recipe), dtype=torch.uint8)
        launches = partial(quantize_groups, as_quantized(packed, 2048, recipe, E4M3), *given, launch=launch)
    return compile_launches("sm_90", launches)[-1]


@pytest.mark.often("8 bits-True-gluon_128")
@every_launch
@pytest.mark.parametrize(
    ("kind", "square"),
    [*((kind, square) for kind in ("16 bits", "8 bits") for square in (False, True)), ("8 bits that travelled", False)],
)
def test_tiles_are_moved_in_wide_pieces_by_as_many_registers_as_there_are(
    kind: str, launch: KernelLaunch, square: bool
) -> None:
    eight, found = kind != "16 bits", compiled(launch, kind, square=square)
    assert found.spills <= SPILLED_BY_TRITON_3_9 and found.registers <= launch.registers, found.summary
    numbers = 128 * 128 // (32 * launch.warps)  # of one thread in a tile
    loads = r"ld\.global(?:\.\w+)*\.v2\.b32" if eight else r"ld\.global(?:\.\w+)*\.v4\.b32"
    assert len(re.findall(loads, found.asm)) >= numbers // 8
    stores = re.findall(r"st\.global(?:\.\w+)*\.v2\.b64|st\.global(?:\.\w+)*\.v4\.b32", found.asm)
    assert len(stores) >= numbers // 16, "of columns"
    assert found.shared_bytes == 32 * 1024, found.summary  # a tile in 16 bits


WEIGHTED_INPUTS = ExpertRule(weighs_input=True)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizing_in_torch(monkeypatch, swiglu)


in_torch_only = pytest.mark.usefixtures("in_torch")


draw = partial(draw_activation, dtype=torch.bfloat16)


def share_of_equal(found: Quantized, expected: Quantized, rows: slice = slice(None)) -> float:
    """Of bytes; scales are equal."""
    assert found.values.dtype == expected.values.dtype and found.values.shape == expected.values.shape
    assert torch.equal(found.scales[rows], expected.scales[rows])
    return (found.values.view(torch.uint8)[rows] == expected.values.view(torch.uint8)[rows]).float().mean().item()


def share_of_equal_columns(found: SwigluForBackward, expected: SwigluForBackward, counts_e: Tensor) -> float:
    """Of bytes, in the transposed copy that has fewer."""
    pairs = zip(transposed(found, counts_e), transposed(expected, counts_e), strict=True)
    return min(share_of_equal(*pair) for pair in pairs)


@pytest.mark.often("weighted inputs", "squares")
@pytest.mark.parametrize(
    ("counts", "width", "rule", "gradient", "is_weighed", "recipe"),
    [
        ((3, 0, 130), 256, SWIGLU, E4M3, True, BLOCKWISE),
        ((128, 5), 640, WEIGHTED_INPUTS, E5M2, True, BLOCKWISE),
        ((0, 140), 256, SWIGLU, E4M3, False, BLOCKWISE),
        ((3, 0, 130), 256, SWIGLU, E5M2, True, BLOCKWISE_SQUARE),
    ],
    ids=["weighted", "weighted inputs", "without weights", "squares"],
)
@in_torch_only
def test_copies_are_those_of_the_definition_byte_for_byte(
    counts: tuple[int, ...], width: int, rule: ExpertRule, gradient: Format, is_weighed: bool, recipe: Recipe
) -> None:
    """Five tiles side by side and six programs: the next tile of a program stands elsewhere."""
    gate_up_RF, weights_R, dh_RF, counts_e = draw(counts, width, CPU)
    given = (gate_up_RF, weights_R if is_weighed else None, dh_RF, counts_e, rule, recipe, E4M3, gradient)
    found, expected = swiglu_backward(*given), operators.swiglu_backward(*given)
    assert share_of_equal(found.d_gate_up, expected.d_gate_up, slice(sum(counts))) > 0.9999
    assert share_of_equal_columns(found, expected, counts_e) > 0.9999
    if is_weighed:
        used = slice(sum(counts))
        assert_close(found.dweights_R[used], expected.dweights_R[used], tolerance=1e-5)
        assert not found.dweights_R[sum(counts) :].any()


def kept(gate_up_RF: Tensor, used: int, before: int) -> SavedRows:
    """The rows among others, which are no numbers."""
    rows_SF = gate_up_RF.new_full((before + len(gate_up_RF) + 3, gate_up_RF.shape[1]), math.nan)
    rows_SF[before : before + used] = gate_up_RF[:used]
    return SavedRows(rows_SF, torch.tensor([before], device=gate_up_RF.device), len(gate_up_RF))


def assert_same_gradients(found: SwigluForBackward, expected: SwigluForBackward, counts_e: Tensor) -> None:
    """Bit for bit."""
    assert share_of_equal(found.d_gate_up, expected.d_gate_up, slice(int(counts_e.sum()))) == 1
    assert share_of_equal_columns(found, expected, counts_e) == 1
    assert torch.equal(found.dweights_R, expected.dweights_R)


@in_torch_only
def test_kept_rows_are_read_where_they_stand_and_nothing_behind_the_last_row() -> None:
    gate_up_RF, weights_R, dh_RF, counts_e = draw((3, 0, 130), 256, CPU)
    rest = (weights_R, dh_RF, counts_e, SWIGLU, BLOCKWISE, E4M3, E4M3)
    found, expected = (swiglu_backward(rows, *rest) for rows in (kept(gate_up_RF, 133, 37), gate_up_RF))
    assert_same_gradients(found, expected, counts_e)
    # The last row of an odd number is the lower one of a pair; a read behind it is an error here.
    gate_up_RF, weights_R, dh_RF, counts_e = draw((2, 1), 128, CPU, tail=0)
    swiglu_backward(gate_up_RF, weights_R, dh_RF, counts_e, SWIGLU, BLOCKWISE, E4M3, E4M3)


@pytest.mark.often("blockwise-square")
@every_recipe
@in_torch_only
def test_nan_and_infinity_are_visible_in_their_row_and_block_of_columns(recipe: Recipe) -> None:
    gate_up_RF, weights_R, dh_RF, counts_e = draw((20,), 128, CPU)
    dh_RF[7, 3], dh_RF[12, 100], gate_up_RF[5, 50] = math.nan, math.inf, math.nan
    given = (gate_up_RF, weights_R, dh_RF, counts_e, SWIGLU, recipe, E4M3, E4M3)
    found, expected = swiglu_backward(*given), operators.swiglu_backward(*given)
    assert_same(found.d_gate_up, expected.d_gate_up, 20)
    assert_all_same(transposed(found, counts_e), transposed(expected, counts_e))
    assert found.d_gate_up.scales[7, 0].isnan() and found.d_gate_up.scales[12, 0].isinf()


@pytest.mark.slow
def test_triton_replaces_the_activations_kernel_where_it_cannot_run(device: torch.device) -> None:
    """Another recipe, another dtype; here also another chip."""
    gate_up_RF, weights_R, dh_RF, counts_e = draw((30,), 128, device)
    for dtype, recipe in ((torch.bfloat16, MXFP8), (torch.float32, BLOCKWISE)):
        given = (gate_up_RF.to(dtype), weights_R, dh_RF.to(dtype), counts_e, SWIGLU, recipe, E4M3, E4M3)
        found = swiglu_backward(*given)
        expected = swiglu_backward(*given, launch=BACKWARD_LAUNCHES["triton"])
        assert share_of_equal_columns(found, expected, counts_e) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(700, 0, 3, 1025, 256), (0, 0), (4000, 1, 900)], ids=str)
@pytest.mark.parametrize(
    ("rule", "gradient", "recipe"),
    [(SWIGLU, E4M3, BLOCKWISE), (SWIGLU, E4M3, BLOCKWISE_SQUARE), (WEIGHTED_INPUTS, E5M2, BLOCKWISE)],
    ids=["SwiGLU", "squares", "on inputs"],
)
def test_a_hopper_gives_the_activations_gradients_of_the_definition(
    counts: tuple[int, ...], rule: ExpertRule, gradient: Format, recipe: Recipe, hopper: torch.device
) -> None:
    gate_up_RF, weights_R, dh_RF, counts_e = draw(counts, 1408, hopper)
    given = (gate_up_RF, weights_R, dh_RF, counts_e, rule, recipe, E4M3, gradient)
    found, expected = swiglu_backward(*given), operators.swiglu_backward(*given)
    used = slice(sum(counts))

    def parts(made: SwigluForBackward) -> list[Tensor]:
        both = (made.d_gate_up.values[used], made.d_gate_up.scales[used]), *(x[:2] for x in transposed(made, counts_e))
        return [one for values, scales in both for one in (values.view(torch.uint8), scales)]

    for mine, other in zip(parts(found), parts(expected), strict=True):
        # An exponential's last place now and then decides how a number rounds to 16 bits, and so another scale.
        same = (mine == other).float()
        assert not same.numel() or same.mean() > 0.999
    assert_close(found.dweights_R[used], expected.dweights_R[used], tolerance=1e-3)
    assert not found.dweights_R[sum(counts) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("before", [37, 2**31 // 2816 + 5], ids=["near", "behind 2**31 numbers"])
def test_a_hopper_reads_kept_rows_where_they_stand(before: int, hopper: torch.device) -> None:
    gate_up_RF, weights_R, dh_RF, counts_e = draw((700, 0, 3, 1025, 256), 1408, hopper)
    rest, used = (weights_R, dh_RF, counts_e, SWIGLU, BLOCKWISE, E4M3, E4M3), 1984
    found, expected = (swiglu_backward(rows, *rest) for rows in (kept(gate_up_RF, used, before), gate_up_RF))
    assert_same_gradients(found, expected, counts_e)


def compiled_swiglu(
    rule: ExpertRule = SWIGLU, gradient: Format = E4M3, *, square: bool = False, is_kept: bool = False
) -> Compiled:
    recipe, counts_e = BLOCKWISE_SQUARE if square else BLOCKWISE, on_meta(63, dtype=torch.int32)
    place = SavedRows(on_meta(99_999, 2816), on_meta(1, dtype=torch.int64), 8192)
    given = place if is_kept else on_meta(8192, 2816), on_meta(8192, dtype=torch.float32), on_meta(8192, 1408)
    given += counts_e, rule, recipe, E4M3, gradient
    return compile_launches("sm_90", lambda: swiglu_backward(*given))[-1]


@pytest.mark.often("True-True", "False-False")
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("square", [False, True])
def test_two_programs_share_a_multiprocessor_and_nothing_spills(square: bool, is_kept: bool) -> None:
    found, launch = compiled_swiglu(square=square, is_kept=is_kept), BACKWARD_DEFAULT
    assert found.spills == 0, found.summary
    assert found.registers * 32 * launch.warps * launch.residency <= 64 * 1024, found.summary  # a multiprocessor's
    assert (found.shared_bytes + 1024) * launch.residency <= TARGETS["sm_90"].shared_bytes + 1024, found.summary
    # Each thread's part of gate, up and dh in two rows; of four columns of each of three copies.
    assert len(re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", found.asm)) >= 6
    assert len(re.findall(r"st\.global(?:\.\w+)*\.v2\.b64|st\.global(?:\.\w+)*\.v4\.b32", found.asm)) >= 12


def test_weights_on_inputs_and_wide_gradients_spill_nothing_either() -> None:
    found = compiled_swiglu(WEIGHTED_INPUTS, E5M2)
    assert found.spills == 0 and "e5m2x2" in found.asm and "e4m3x2" in found.asm, found.summary
