"""The comparison of numbers sees what is wrong, passes what is rounding, and says what it saw."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import closeness
from tests.closeness import TOLERANCES, assert_close, assert_equal, assert_within, is_close, relative_error


def test_a_small_element_may_differ_by_the_rounding_of_the_largest() -> None:
    expected = torch.tensor([62.0, 1e-3])
    assert_close(expected + torch.tensor([0.0, 2e-4]), expected)
    assert_close(expected + torch.tensor([0.0, 2e-4]), expected, by="norm")


@pytest.mark.parametrize("by", ["largest", "norm"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_four_tolerances_of_the_largest_element_are_too_much_in_every_dtype(dtype: torch.dtype, by: str) -> None:
    expected = torch.tensor([[1.0, -0.5], [0.25, 0.5]]).to(dtype)
    wrong = (expected.double() * (1 + 4 * TOLERANCES[dtype])).to(dtype)
    assert_close(expected.clone(), expected, by=by)
    assert not is_close(wrong, expected, by=by)
    assert TOLERANCES[dtype] >= torch.finfo(dtype).eps, "one step of the format passes"


def test_a_dropped_row_swapped_rows_and_an_element_of_typical_size_off_by_one_hundredth_are_seen() -> None:
    rows = torch.randn(64, 32)
    dropped, swapped, scaled = rows.clone(), rows.clone(), rows.clone()
    dropped[17] = 0
    swapped[[3, 4]] = rows[[4, 3]]
    scaled[5, 5] = 1.01 * rows.abs().mean()
    expected = rows.clone()
    expected[5, 5] = rows.abs().mean()
    for wrong, right in ((dropped, rows), (swapped, rows), (scaled, expected)):
        for by in ("largest", "norm"):
            with pytest.raises(AssertionError, match=f"by {by}"):
                assert_close(wrong, right, by=by)


def test_the_message_names_the_tensor_the_place_the_values_and_both_measures() -> None:
    expected = {"layer": [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), None]}
    wrong = {"layer": [torch.tensor([[1.0, 2.5], [3.0, 4.0]]), None]}
    with pytest.raises(AssertionError) as failure:
        assert_close(wrong, expected, what="gradients")
    assert str(failure.value) == (
        "gradients['layer'][0]: relative error 0.125 by largest, at most 1e-05; largest deviation at (0, 1): 2.5 "
        "instead of 2, where the largest magnitude is 4; 1 of 4 values of float32[2, 2] are beyond that share of it"
    )


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), r"shape \(2, 3\), expected \(3, 2\)"),
        (torch.zeros(1), torch.zeros(()), r"shape \(1,\), expected \(\)"),
        (torch.zeros(2).double(), torch.zeros(2), "dtype float64, expected float32"),
        (torch.zeros(2).int(), torch.zeros(2), "dtype int32, expected float32"),
        ([1.0], [1.0, 2.0], "got 1 items, expected 2 items"),
        ({"a": 1.0}, {"b": 1.0}, r"got \['a'\], expected the keys \['b'\]"),
        (torch.zeros(2), None, "got float32, expected NoneType"),
        (torch.zeros(2), [0.0, 0.0], "got Tensor, expected 2 items"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), r"largest deviation at \(1,\)"),
        (torch.tensor([True]), torch.tensor([False]), "relative error"),
        (torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0]), "NaN at 1 places, expected at 0"),
        (torch.tensor([1.0, 1.0]), torch.tensor([1.0, math.nan]), r"NaN at 0 places, expected at 1.*\(1,\)"),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), "infinity at 1 places, expected at 0"),
        (torch.tensor([1e-9]), torch.tensor([0.0]), "relative error inf"),
        (1.0, 1.1, "relative error"),
        (math.nan, 1.0, "NaN"),
        ("text", 1.0, "got str, expected float"),
    ],
)
def test_what_differs_in_kind_fails_whatever_the_tolerance(actual: object, expected: object, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close(actual, expected)


def test_what_is_not_finite_passes_where_it_is_the_same_and_does_not_count_as_size() -> None:
    same = torch.tensor([math.nan, math.inf, -math.inf, 2.0])
    assert_close(same.clone(), same)
    assert_equal(same.clone(), same)
    assert not is_close(same + torch.tensor([0.0, 0.0, 0.0, 1.0]), same)


def test_zeros_may_have_a_size_below_which_nothing_counts() -> None:
    assert_close(torch.tensor([1e-9]), torch.tensor([0.0]), least=1e-3)
    assert not is_close(torch.tensor([1e-7]), torch.tensor([0.0]), least=1e-3)


def test_dtypes_may_differ_if_asked_and_the_coarser_one_decides() -> None:
    exact = torch.randn(8, 8)
    assert_close(exact.bfloat16(), exact, same_dtype=False)
    assert_close(exact, exact.bfloat16(), same_dtype=False)
    assert not is_close(exact.bfloat16(), exact)


def test_numbers_and_arrays_are_tensors_too() -> None:
    assert_close(torch.tensor(0.1), 0.1)
    assert_close(np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    assert_close({"losses": [3.0, 4.0]}, {"losses": (3.0, 4.0 + 1e-7)})
    assert not is_close([1e-3, 1000.0], [1.1e-3, 1000.0]), "each number has its own size"
    assert_close(torch.zeros(0, 3), torch.zeros(0, 3))


def test_equal_means_every_value() -> None:
    assert_equal([torch.tensor([1.0, math.nan])], [torch.tensor([1.0, math.nan])])
    with pytest.raises(AssertionError, match="x: relative error"):
        assert_equal(torch.tensor([1.0, 1e-8]), torch.tensor([1.0, 0.0]), what="x")


def test_the_error_by_norm_is_that_of_the_whole_tensor() -> None:
    assert relative_error(torch.tensor([3.0, 4.0 + 0.5]), torch.tensor([3.0, 4.0]), by="norm") == 0.1
    assert relative_error(torch.tensor([3.0, 4.0 + 0.5]), torch.tensor([3.0, 4.0])) == 0.125


def test_the_largest_share_of_a_bound_at_each_line_is_recorded_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(closeness, "RECORD", str(tmp_path / "shares"))
    assert_close(2.0, 2.0, tolerance=0.1)
    for error in (0.05, 0.09, 0.01):
        assert_close(1.0 + error, 1.0, tolerance=0.1, what="near")
    assert_within({"far": 1e-3}, {"far": 1.0})
    with pytest.raises(AssertionError, match=r"worst: \{'a': nan\}; allowed"):
        assert_within({"a": math.nan}, {"a": 1.0}, what="worst")
    closeness.main([str(tmp_path / "shares")])
    first, line = capsys.readouterr().out.splitlines()
    assert first == "4 comparisons at 2 lines; over a third of the bound at 1:"
    assert line.startswith("0.90 (spread 0.00) ") and "9.00e-02 of 1.00e-01 near tests/test_closeness.py::" in line
