"""Measured times of operators by backend, as data in JSON files, one for each device name.

`penstock kernels tune` writes such a file; `penstock.kernels.choose` reads it and chooses by the nearest shape. Files
for measured chips come with the package; a user's own files are in ~/.config/penstock/kernels:

    {"device": "NVIDIA H200",
     "environment": {"torch": "2.11.0", "triton": "3.6.0"},
     "entries": [{"op": "swiglu", "direction": "forward", "dtype": "bf16", "skew": 0.0,
                  "shape": {"tokens": 8192, "ffn": 2816}, "microseconds": {"torch": 71.2, "triton": 30.1}}, ...]}

`skew` is the standard deviation of the logarithms of the experts' loads: 0 is balanced, with 0.6 a busy expert has
several times the rows of a quiet one.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import ConfigDict, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from penstock.base.errors import KernelError
from penstock.base.files import read_json, write_whole

PACKAGED = Path(__file__).with_name("measured_data")  # measurements that come with the package


@dataclass(frozen=True, kw_only=True)
class OperatorTimes:
    """Times of one operator in one direction on one shape."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    op: str  # as `penstock.kernels.choose` knows it
    direction: str  # `forward`, `backward`, `input_gradient` or `weight_gradient`
    dtype: str  # `bf16` or `fp32`
    skew: float  # imbalance of the experts' loads; 0 for operators that do not depend on it
    shape: Mapping[str, PositiveInt]
    microseconds: Mapping[str, PositiveFloat]  # median time of each backend that ran

    @property
    def key(self) -> tuple[object, ...]:
        return self.op, self.direction, self.dtype, self.skew, tuple(sorted(self.shape.items()))


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Times of operators on one device."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    device: str  # its name, as the driver reports it
    environment: Mapping[str, str]  # versions that the times depend on
    entries: tuple[OperatorTimes, ...]  # of two that are equally near to a shape, the first counts

    def nearest(self, op: str, direction: str, dtype: str, shape: Mapping[str, int]) -> tuple[OperatorTimes, ...]:
        """The entries, one for each skew, of the nearest measured shape; empty if there is none.

        The distance is the sum over sizes of |log(measured / wanted)|: half as many tokens are as far as twice as many.
        """
        alike = [
            entry
            for entry in self.entries
            if (entry.op, entry.direction, entry.dtype) == (op, direction, dtype) and entry.shape.keys() == shape.keys()
        ]
        if not alike:
            return ()
        best = min(alike, key=lambda entry: _distance(entry.shape, shape))
        by_skew = {entry.skew: entry for entry in reversed(alike) if entry.shape == best.shape}
        return tuple(by_skew[skew] for skew in sorted(by_skew))


def _distance(sizes: Mapping[str, int], other: Mapping[str, int]) -> float:
    return sum(abs(math.log(sizes[name] / other[name])) for name in other)


def slug(device_name: str) -> str:
    """A device's name as a file name: `NVIDIA H200` is `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def user_file(device_name: str) -> Path | None:
    """Path of a user's own measurements of a device; None for a user without a home folder."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".config" / "penstock" / "kernels" / f"{slug(device_name)}.json"


def find(device_name: str, path: Path | None = None, *, packaged: Path = PACKAGED) -> Measurements | None:
    """Measurements of a device: the user's own entries, then the package's; None if there are neither.

    `path` replaces the file in the user's home. Raises KernelError for a damaged file, and for a `path` that is missing
    or about another device.
    """
    user_path = path or user_file(device_name)
    files = [file for file in (user_path, packaged / f"{slug(device_name)}.json") if file is not None]
    measurements = [load(file) for file in files if file == path or file.exists()]
    if not measurements:
        return None
    if path is not None and slug(measurements[0].device) != slug(device_name):
        raise KernelError(f"{path} was measured on another device", got=measurements[0].device, allowed=device_name)
    return replace(measurements[0], entries=tuple(entry for part in measurements for entry in part.entries))


def load(path: Path) -> Measurements:
    """Read a file; raises KernelError if it is missing or damaged."""
    fix = "measure again with `penstock kernels tune`, or delete the file"
    try:
        return TypeAdapter(Measurements).validate_python(read_json(path))
    except OSError as error:
        raise KernelError(f"measurements {path} cannot be read", got=error.strerror, fix=fix) from error
    except ValueError as error:
        got = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            got = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise KernelError(f"measurements {path} are damaged", got=got, fix=fix) from error


def save(path: Path, measurements: Measurements) -> None:
    """Write a file atomically, one line for each entry, so that two files can be compared; raises KernelError."""
    lines = ",\n".join(f"  {json.dumps(asdict(entry))}" for entry in measurements.entries)
    head = f'"device": {json.dumps(measurements.device)},\n "environment": {json.dumps(dict(measurements.environment))}'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f'{{{head},\n "entries": [\n{lines}\n ]}}\n')
    except OSError as error:
        raise KernelError(f"measurements cannot be written to {path}", got=error.strerror) from error
