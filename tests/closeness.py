"""The one comparison of computed numbers: by a tensor's largest magnitude or by its norm, never element by element.

Sums differ in their last bits with the processor, the number of threads and the order of ranks. An element that is
small because large summands cancel carries the rounding of those summands, so its error says something only beside the
size of its whole tensor. Bits that are promised are compared with `torch.equal` or `assert_equal`.

Every tensor is measured by its own size: compare parameters one by one, not joined, or what is small goes unseen.

A bound holds on every processor if the error here is far below it. With PENSTOCK_CLOSENESS=FILE every comparison
appends its error and its bound to the file, and `python -m tests.closeness FILE...` prints the largest shares.
"""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

By = Literal["largest", "norm"]

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.float8_e4m3fn: 0.13,
    torch.float8_e5m2: 0.26,
}
"""Largest relative error that passes by dtype: two steps of 16-bit formats, one of 8-bit ones, many of wider ones."""

FLOAT_TOLERANCE = 1e-6
"""Of Python's floats, which are often results in float32."""

RECORD = os.environ.get("PENSTOCK_CLOSENESS")
NEAR = 1 / 3
"""Share of its bound from which the error of a comparison is printed."""

Leaf = Tensor | np.ndarray | float | None


def assert_close(
    actual: object,
    expected: object,
    *,
    tolerance: float | None = None,
    by: By = "largest",
    least: float = 0.0,
    same_dtype: bool = True,
    what: str = "",
) -> None:
    """Assert that every tensor of `actual` is near its counterpart in `expected`.

    Shapes, dtypes, integers, and the places of NaN and of each infinity must be equal.

    Args:
        actual: a tensor, an array, a number, None, or mappings and sequences of them, nested at will.
        expected: the same structure. A number stands for a tensor or an array without dimensions of any dtype.
        tolerance: largest error that passes, as a share of the size of `expected`; None takes the dtype's of
            `TOLERANCES`, of two dtypes the coarser one's.
        by: "largest" compares the largest deviation with the largest magnitude of `expected`, "norm" the norm of the
            difference with the norm of `expected`.
        least: the size of `expected` counts as at least this, for what is zero but for rounding.
        same_dtype: False lets dtypes of floats differ.
        what: name of the compared thing in the failure's message.

    Raises:
        AssertionError: they are not near each other; says which, where and by how much.
    """
    for name, one, other in _pairs(actual, expected, what):
        _check(name, one, other, tolerance=tolerance, by=by, least=least, same_dtype=same_dtype)


def assert_equal(actual: object, expected: object, *, what: str = "") -> None:
    """Assert that every value is the same, where NaN equals NaN; structures, shapes and dtypes as in `assert_close`."""
    assert_close(actual, expected, tolerance=0.0, what=what)


def assert_within(found: Mapping[str, float], bounds: Mapping[str, float], *, what: str = "") -> None:
    """Assert that every figure, a relative error, is at most its bound; NaN is not."""
    for name, error in found.items():
        if RECORD and error <= bounds[name]:
            _record(name, error, bounds[name])
    too_large = {name: error for name, error in found.items() if not error <= bounds[name]}
    assert not too_large, _said(what, f"{too_large}; allowed: {dict(bounds)}")


def is_close(
    actual: object, expected: object, *, tolerance: float | None = None, by: By = "largest", least: float = 0.0
) -> bool:
    """Whether `assert_close` passes."""
    try:
        assert_close(actual, expected, tolerance=tolerance, by=by, least=least)
    except AssertionError:
        return False
    return True


def relative_error(actual: Leaf, expected: Leaf, *, by: By = "largest", least: float = 0.0) -> float:
    """Deviation as a share of the size of `expected`, which has the same shape; see `assert_close` for the rest.

    Infinite where that size is zero and they differ, and where values that are not finite differ.
    """
    one, other = _wide(_tensor(actual)), _wide(_tensor(expected))
    assert one.shape == other.shape, f"shape {tuple(one.shape)}, expected {tuple(other.shape)}"
    apart = one - other
    is_finite = one.isfinite() & other.isfinite()
    if not torch.equal(one[~is_finite].nan_to_num(math.pi), other[~is_finite].nan_to_num(math.pi)):
        return math.inf
    deviation, size = _size(apart[is_finite], by), max(_size(other, by), least)
    if deviation == 0:
        return 0.0
    return deviation / size if size else math.inf


def decibels(actual: Tensor, expected: Tensor) -> float:
    """Signal to noise by norm: 20 more is ten times closer, infinity is the same."""
    error = relative_error(actual, expected, by="norm")
    return -20 * math.log10(error) if error else math.inf


def _pairs(actual: object, expected: object, what: str) -> Iterator[tuple[str, Leaf, Leaf]]:
    """Name and both sides of each leaf."""
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping) or actual.keys() != expected.keys():
            got = sorted(map(str, actual)) if isinstance(actual, Mapping) else type(actual).__name__
            raise AssertionError(_said(what, f"got {got}, expected the keys {sorted(map(str, expected))}"))
        for key, value in expected.items():
            yield from _pairs(actual[key], value, f"{what}[{key!r}]" if what else str(key))
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        if not isinstance(actual, Sequence) or len(actual) != len(expected):
            got = f"{len(actual)} items" if isinstance(actual, Sequence) else type(actual).__name__
            raise AssertionError(_said(what, f"got {got}, expected {len(expected)} items"))
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            yield from _pairs(one, other, f"{what}[{index}]")
    elif all(isinstance(side, Tensor | np.ndarray | np.generic | float | int | None) for side in (actual, expected)):
        yield what, actual, expected  # type: ignore[misc]
    else:
        raise AssertionError(_said(what, f"got {type(actual).__name__}, expected {type(expected).__name__}"))


def _check(
    what: str, actual: Leaf, expected: Leaf, *, tolerance: float | None, by: By, least: float, same_dtype: bool
) -> None:
    if actual is None or expected is None:
        if actual is not expected:
            raise AssertionError(_said(what, f"got {_kind(actual)}, expected {_kind(expected)}"))
        return
    one, other = _tensor(actual), _tensor(expected)
    are_numbers = [isinstance(side, float | int) for side in (actual, expected)]
    both_floats = one.is_floating_point() and other.is_floating_point()
    if one.shape != other.shape:
        raise AssertionError(_said(what, f"shape {tuple(one.shape)}, expected {tuple(other.shape)}"))
    if one.dtype != other.dtype and not any(are_numbers) and (same_dtype or not both_floats):
        raise AssertionError(_said(what, f"dtype {_kind(one)}, expected {_kind(other)}"))
    wide, wide_other = _wide(one), _wide(other)
    if both_floats or any(are_numbers):
        _check_what_is_not_finite(what, wide, wide_other)
        # A number has no dtype of its own beside a tensor.
        sides = zip((one, other), are_numbers, strict=True)
        tolerances = [TOLERANCES.get(side.dtype, 0.0) for side, is_number in sides if not is_number]
        allowed = max(tolerances, default=FLOAT_TOLERANCE) if tolerance is None else tolerance
    else:
        allowed = 0.0  # integers are equal or wrong
    error = relative_error(wide, wide_other, by=by, least=least)
    if RECORD and 0 < error <= allowed:
        _record(what, error, allowed, _step(one, other))
    if not error <= allowed:
        raise AssertionError(_said(what, _deviation(one, wide, wide_other, f"{error:.3g} by {by}", allowed)))


def _check_what_is_not_finite(what: str, actual: Tensor, expected: Tensor) -> None:
    for name, value in (("NaN", math.nan), ("infinity", math.inf), ("minus infinity", -math.inf)):
        places, wanted = (side.isnan() if math.isnan(value) else side == value for side in (actual, expected))
        if not torch.equal(places, wanted):
            at = tuple((places != wanted).nonzero()[0].tolist())  # the first place that differs
            problem = f"{name} at {int(places.sum())} places, expected at {int(wanted.sum())}; "
            problem += f"first difference at {at}: {actual[at].item()} instead of {expected[at].item()}"
            raise AssertionError(_said(what, problem))


def _deviation(actual: Tensor, wide: Tensor, expected: Tensor, error: str, allowed: float) -> str:
    """Says how far, where, and what else is needed to judge it."""
    apart = (wide - expected).nan_to_num(0.0, 0.0, 0.0).abs()
    at = tuple(int(index) for index in np.unravel_index(int(apart.argmax()), apart.shape))
    beyond = int((apart > allowed * _size(expected, "largest")).sum())
    return (
        f"relative error {error}, at most {allowed:.3g}; largest deviation at {at}: {wide[at].item():.9g} instead of "
        f"{expected[at].item():.9g}, where the largest magnitude is {_size(expected, 'largest'):.4g}; "
        f"{beyond} of {apart.numel()} values of {_kind(actual)}{list(actual.shape)} are beyond that share of it"
    )


def _tensor(leaf: Leaf) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu()
    return torch.from_numpy(np.asarray(leaf))


def _wide(tensor: Tensor) -> Tensor:
    """In 64 bits; through 32 where PyTorch has no direct way."""
    return tensor.float().double() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor.double()


def _size(wide: Tensor, by: By) -> float:
    """Norm or largest magnitude of the finite values; 0 of nothing."""
    finite = wide[wide.isfinite()]
    if not finite.numel():
        return 0.0
    return (finite.norm() if by == "norm" else finite.abs().max()).item()


def _kind(leaf: Leaf) -> str:
    return str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, Tensor) else type(leaf).__name__


def _said(what: str, problem: str) -> str:
    return f"{what}: {problem}" if what else problem


def _record(what: str, error: float, allowed: float, step: float = 0.0) -> None:
    frame = sys._getframe(1)
    while Path(frame.f_code.co_filename).name in ("closeness.py", "parity.py") and frame.f_back is not None:
        frame = frame.f_back
    line = {
        "at": f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}",
        "test": os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)"),
        "what": what,
        "error": error,
        "allowed": allowed,
        "share": error / allowed,
        "is_format": error <= step,
    }
    with Path(RECORD or os.devnull).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")  # one write of less than a page: processes may share the file


def _step(*sides: Tensor) -> float:
    """Relative size of a step of the coarser dtype of 16 bits or fewer; 0 of wider ones."""
    return max(torch.finfo(side.dtype).eps if side.is_floating_point() and side.itemsize < 4 else 0.0 for side in sides)


def main(files: Sequence[str]) -> None:
    """Print the comparison with the largest share of its bound at each line of a test, and by how much that share
    differs between the files. An error within one step of a 16-bit result is left out: every processor rounds alike.
    """
    recorded = [[json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()] for file in files]
    largest = [{line["at"]: line for line in sorted(lines, key=lambda line: line["share"])} for lines in recorded]
    shares = {at: [run[at]["share"] for run in largest if at in run] for run in largest for at in run}
    worst = {at: max((run[at] for run in largest if at in run), key=lambda line: line["share"]) for at in shares}
    near = [line for line in worst.values() if line["share"] > NEAR and not line["is_format"]]
    print(f"{sum(map(len, recorded))} comparisons at {len(worst)} lines; over a third of the bound at {len(near)}:")
    for line in sorted(near, key=lambda line: -line["share"]):
        spread = max(shares[line["at"]]) - min(shares[line["at"]])
        print(f"{line['share']:.2f} (spread {spread:.2f}) {line['at']} ", end="")
        print(f"{line['error']:.2e} of {line['allowed']:.2e} {line['what']} {line['test']}")


if __name__ == "__main__":
    main(sys.argv[1:])
