"""Hopper's own kernel for the activation's gradients: what it computes, instruction by instruction, and what it takes.

On a CPU its source is run by `gluon_in_torch`. It rounds where the definition does, so bytes and scales are equal.
"""

import math
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.float8 import operators, swiglu
from penstock.kernels.float8.launches import BACKWARD_DEFAULT, BACKWARD_LAUNCHES
from penstock.kernels.float8.operators import SwigluForBackward
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, E4M3, E5M2, MXFP8, Format, Recipe
from penstock.kernels.float8.swiglu import swiglu_backward
from penstock.kernels.gluon import float8_launches
from penstock.kernels.gluon.support import HAS_GLUON
from penstock.kernels.reference import SWIGLU, ExpertRule
from penstock.kernels.tuning import target_of
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, Compiled, compile_for
from tests.kernels.float8.draw_quantized import without_tail
from tests.kernels.gluon.gluon_in_torch import QUANTIZING, interpreted, launch

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="no Gluon that the kernels know")

if HAS_GLUON:
    from penstock.kernels.gluon.float8_quantize_kernels import swiglu_backward_float8_kernel

TAIL = 9
"""Rows behind the last expert's."""
WEIGHTED_INPUTS = ExpertRule(weighs_input=True)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernel's module, run by torch whenever the kernel is launched, on a CPU that is taken for a Hopper."""
    if torch.cuda.is_available():
        pytest.skip("tables of tiles are made on the GPU that there is")
    module = interpreted(*QUANTIZING)[-1]

    def start_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        assert kernel is swiglu_backward_float8_kernel
        constants = {name: value for name, value in constants.items() if name.isupper()}
        launch(module.swiglu_backward_float8_kernel, grid, *arguments, **constants)

    monkeypatch.setattr(float8_launches, "start_kernel", start_kernel)
    monkeypatch.setattr(swiglu, "target_of", lambda device: "sm_90")
    return module


def draw(
    counts: tuple[int, ...], width: int, device: torch.device, tail: int = TAIL
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gate and up, weights, gradient and counts; NaN behind the last expert's rows."""
    rows = sum(counts) + tail
    drawn = torch.randn(rows, 2 * width) * 2, torch.rand(rows), torch.randn(rows, width) * torch.randn(rows, 1).exp()
    for tensor in drawn:
        tensor[sum(counts) :] = math.nan
    gate_up_RF, weights_R, dh_RF = (tensor.to(device) for tensor in drawn)
    return gate_up_RF.bfloat16(), weights_R, dh_RF.bfloat16(), torch.tensor(counts, dtype=torch.int32, device=device)


def share_of_equal(found: Quantized, expected: Quantized, rows: slice = slice(None)) -> float:
    """Of bytes; scales are equal."""
    assert found.values.dtype == expected.values.dtype and found.values.shape == expected.values.shape
    assert torch.equal(found.scales[rows], expected.scales[rows])
    return (found.values.view(torch.uint8)[rows] == expected.values.view(torch.uint8)[rows]).float().mean().item()


def share_of_equal_columns(found: SwigluForBackward, expected: SwigluForBackward, counts_e: Tensor) -> float:
    """Of bytes, in the transposed copy that has fewer."""
    pairs = (found.d_gate_up_columns, expected.d_gate_up_columns), (found.h_columns, expected.h_columns)
    return min(share_of_equal(*(without_tail(copy, counts_e) for copy in pair)) for pair in pairs)


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
def test_copies_are_those_of_the_definition_byte_for_byte(
    counts: tuple[int, ...],
    width: int,
    rule: ExpertRule,
    gradient: Format,
    is_weighed: bool,
    recipe: Recipe,
    in_torch: ModuleType,
) -> None:
    """Five tiles side by side and six programs: the next tile of a program stands elsewhere."""
    gate_up_RF, weights_R, dh_RF, counts_e = draw(counts, width, torch.device("cpu"))
    given = (gate_up_RF, weights_R if is_weighed else None, dh_RF, counts_e, rule, recipe, E4M3, gradient)
    found, expected = swiglu_backward(*given), operators.swiglu_backward(*given)
    assert share_of_equal(found.d_gate_up, expected.d_gate_up, slice(sum(counts))) > 0.9999
    assert share_of_equal_columns(found, expected, counts_e) > 0.9999
    if is_weighed:
        assert found.dweights_R is not None and expected.dweights_R is not None
        used = slice(sum(counts))
        assert_close(found.dweights_R[used], expected.dweights_R[used], tolerance=1e-5)
        assert not found.dweights_R[sum(counts) :].any()


def kept(gate_up_RF: Tensor, used: int, before: int) -> SavedRows:
    """The rows among others, which are no numbers."""
    rows_SF = gate_up_RF.new_full((before + len(gate_up_RF) + 3, gate_up_RF.shape[1]), math.nan)
    rows_SF[before : before + used] = gate_up_RF[:used]
    return SavedRows(rows_SF, torch.tensor([before], device=gate_up_RF.device), len(gate_up_RF))


def assert_same(found: SwigluForBackward, expected: SwigluForBackward, counts_e: Tensor) -> None:
    """Bit for bit."""
    assert share_of_equal(found.d_gate_up, expected.d_gate_up, slice(int(counts_e.sum()))) == 1
    assert share_of_equal_columns(found, expected, counts_e) == 1
    assert found.dweights_R is not None and expected.dweights_R is not None
    assert torch.equal(found.dweights_R, expected.dweights_R)


def test_kept_rows_are_read_where_they_stand(in_torch: ModuleType) -> None:
    gate_up_RF, weights_R, dh_RF, counts_e = draw((3, 0, 130), 256, torch.device("cpu"))
    rest = (weights_R, dh_RF, counts_e, SWIGLU, BLOCKWISE, E4M3, E4M3)
    found, expected = (swiglu_backward(rows, *rest) for rows in (kept(gate_up_RF, 133, 37), gate_up_RF))
    assert_same(found, expected, counts_e)


def test_nothing_is_read_or_written_behind_the_last_row(in_torch: ModuleType) -> None:
    """The last row of an odd number is the lower one of a pair."""
    gate_up_RF, weights_R, dh_RF, counts_e = draw((2, 1), 128, torch.device("cpu"), tail=0)
    swiglu_backward(gate_up_RF, weights_R, dh_RF, counts_e, SWIGLU, BLOCKWISE, E4M3, E4M3)


@pytest.mark.often("blockwise-square")
@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE], ids=lambda recipe: recipe.name)
def test_nan_and_infinity_are_visible_in_their_row_and_block_of_columns(recipe: Recipe, in_torch: ModuleType) -> None:
    gate_up_RF, weights_R, dh_RF, counts_e = draw((20,), 128, torch.device("cpu"))
    dh_RF[7, 3], dh_RF[12, 100], gate_up_RF[5, 50] = math.nan, math.inf, math.nan
    given = (gate_up_RF, weights_R, dh_RF, counts_e, SWIGLU, recipe, E4M3, E4M3)
    found, expected = swiglu_backward(*given), operators.swiglu_backward(*given)
    d_columns, h_columns = (
        [without_tail(copy, counts_e) for copy in pair]
        for pair in ((found.d_gate_up_columns, expected.d_gate_up_columns), (found.h_columns, expected.h_columns))
    )
    for mine, other in (
        (found.d_gate_up.scales[:20], expected.d_gate_up.scales[:20]),
        (found.d_gate_up.values[:20].float(), expected.d_gate_up.values[:20].float()),
        [copy.scales for copy in d_columns],
        [copy.values.float() for copy in d_columns],
        [copy.scales for copy in h_columns],
        [copy.values.float() for copy in h_columns],
    ):
        assert torch.equal(mine.isnan(), other.isnan())
        assert torch.equal(mine[~mine.isnan()], other[~other.isnan()])
    assert found.d_gate_up.scales[7, 0].isnan() and found.d_gate_up.scales[12, 0].isinf()


@pytest.mark.slow
def test_triton_replaces_the_kernel_where_it_cannot_run(device: torch.device) -> None:
    """Another recipe, another dtype; here also another chip."""
    gate_up_RF, weights_R, dh_RF, counts_e = draw((30,), 128, device)
    for dtype, recipe in ((torch.bfloat16, MXFP8), (torch.float32, BLOCKWISE)):
        given = (gate_up_RF.to(dtype), weights_R, dh_RF.to(dtype), counts_e, SWIGLU, recipe, E4M3, E4M3)
        found = swiglu_backward(*given)
        expected = swiglu_backward(*given, launch=BACKWARD_LAUNCHES["triton"])
        assert share_of_equal_columns(found, expected, counts_e) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("counts", [(700, 0, 3, 1025, 256), (0, 0), (4000, 1, 900)], ids=str)
@pytest.mark.parametrize(
    ("rule", "gradient", "recipe"),
    [(SWIGLU, E4M3, BLOCKWISE), (SWIGLU, E4M3, BLOCKWISE_SQUARE), (WEIGHTED_INPUTS, E5M2, BLOCKWISE)],
    ids=["SwiGLU", "squares", "on inputs"],
)
def test_a_hopper_gives_the_copies_of_the_definition(
    counts: tuple[int, ...],
    rule: ExpertRule,
    gradient: Format,
    recipe: Recipe,
    device: torch.device,
) -> None:
    if target_of(device) != "sm_90":
        pytest.skip("the kernel is Hopper's")
    gate_up_RF, weights_R, dh_RF, counts_e = draw(counts, 1408, device)
    given = (gate_up_RF, weights_R, dh_RF, counts_e, rule, recipe, E4M3, gradient)
    found, expected = swiglu_backward(*given), operators.swiglu_backward(*given)
    used = slice(sum(counts))
    pairs = (
        (found.d_gate_up, expected.d_gate_up, used),
        *(
            (*(without_tail(copy, counts_e) for copy in pair), slice(None))
            for pair in ((found.d_gate_up_columns, expected.d_gate_up_columns), (found.h_columns, expected.h_columns))
        ),
    )
    for mine, other, rows in pairs:
        # An exponential's last place now and then decides how a number rounds to 16 bits, and so another scale.
        same_scales = (mine.scales[rows] == other.scales[rows]).float()
        same = (mine.values.view(torch.uint8)[rows] == other.values.view(torch.uint8)[rows]).float()
        assert not same.numel() or (same_scales.mean() > 0.999 and same.mean() > 0.999)
    assert found.dweights_R is not None and expected.dweights_R is not None
    assert_close(found.dweights_R[used], expected.dweights_R[used], tolerance=1e-3)
    assert not found.dweights_R[sum(counts) :].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("before", [37, 2**31 // 2816 + 5], ids=["near", "behind 2**31 numbers"])
def test_a_hopper_reads_kept_rows_where_they_stand(before: int, device: torch.device) -> None:
    if target_of(device) != "sm_90":
        pytest.skip("the kernel is Hopper's")
    gate_up_RF, weights_R, dh_RF, counts_e = draw((700, 0, 3, 1025, 256), 1408, device)
    rest, used = (weights_R, dh_RF, counts_e, SWIGLU, BLOCKWISE, E4M3, E4M3), 1984
    rows = kept(gate_up_RF, used, before)
    found, expected = (swiglu_backward(one, *rest) for one in (rows, gate_up_RF))
    assert_same(found, expected, counts_e)


def compiled(
    rule: ExpertRule = SWIGLU,
    largest: float = 448.0,
    *,
    square: bool = False,
    is_kept: bool = False,
) -> Compiled:
    signature = {
        **dict.fromkeys(("gate_up_ptr", "dh_ptr"), "*bf16:16"),
        **dict.fromkeys(("weights_ptr", "products_ptr"), "*fp32:16"),
        **dict.fromkeys(("d_row_scales_ptr", "d_column_scales_ptr", "h_column_scales_ptr"), "*fp32:16"),
        "tiles_ptr": "*i32:16",
        "d_rows_ptr": "*i8:16",
        **dict.fromkeys(("d_columns_ptr", "h_columns_ptr"), "*i64:16"),
        **dict.fromkeys(("rows_stride", "columns_stride", "F"), "i32:16"),
        **dict.fromkeys(("R", "tiles"), "i32"),
    }
    signature |= {"first_ptr": "*i64:16"} if is_kept else {}
    constants = {"LARGEST": largest, "H_LARGEST": 448.0, "WEIGHS_INPUT": rule.weighs_input}
    constants["SQUARE"] = square
    return compile_for(
        swiglu_backward_float8_kernel,
        signature,
        constants,
        TARGETS["sm_90"],
        num_warps=BACKWARD_DEFAULT.warps,
        maxnreg=BACKWARD_DEFAULT.registers,
    )


@pytest.mark.often("True-True", "False-False")
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("square", [False, True])
def test_two_programs_share_a_multiprocessor_and_nothing_spills(square: bool, is_kept: bool) -> None:
    found, launch = compiled(square=square, is_kept=is_kept), BACKWARD_DEFAULT
    assert found.spills == 0, found.summary
    assert found.registers * 32 * launch.warps * launch.residency <= 64 * 1024, found.summary
    assert (found.shared_bytes + 1024) * launch.residency <= TARGETS["sm_90"].shared_bytes + 1024, found.summary
    # Each thread's part of gate, up and dh in two rows; of four columns of each of three copies.
    assert len(re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", found.asm)) >= 6
    assert len(re.findall(r"st\.global(?:\.\w+)*\.v2\.b64|st\.global(?:\.\w+)*\.v4\.b32", found.asm)) >= 12


def test_weights_on_inputs_and_wide_gradients_spill_nothing_either() -> None:
    found = compiled(WEIGHTED_INPUTS, 57344.0)
    assert found.spills == 0 and "e5m2x2" in found.asm and "e4m3x2" in found.asm, found.summary
