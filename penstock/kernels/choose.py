"""Which implementation of each operator runs, and why: a pure function of config, device, shapes and measurements.

Both passes of an operator share one choice, because one autograd function holds them. Only the experts' three products
(forward, input gradient, weight gradient) are chosen separately. The rules, in order:

    1. A backend named in the config (`kernels.norm`, or `kernels.all`) is taken, or refused with a reason.
    2. Backends that cannot run are left out: no GPU, not installed, an unsupported dtype or width.
    3. With measurements of this chip: the fastest at the nearest shape; balanced and skewed loads count the same.
    4. Without: Triton, torch, reference; Triton's products come last on chips and in dtypes without a launch table.

`penstock kernels list` prints the reasons. Nothing here touches a device.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ConfigDict, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from penstock.base.errors import KernelError
from penstock.base.files import read_json, write_whole
from penstock.kernels import attention, bounded_attention
from penstock.kernels.backends import (
    BACKENDS,
    CHOICE_POINTS,
    FIELDS,
    ChoicePoint,
    Direction,
    Shapes,
    TimedPart,
    experts_of,
    has,
    shape_of,
)
from penstock.kernels.operators import REFERENCE, Operators
from penstock.kernels.tuning import FLASH_4, GROUPED_GEMM, DeviceFacts

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
    """Times of operators on one device.

    `penstock kernels tune` writes such a file; `penstock.kernels.choose` reads it and chooses by the nearest shape.
    Files for measured chips come with the package; a user's own files are in ~/.config/penstock/kernels:

        {"device": "NVIDIA H200",
         "environment": {"torch": "2.11.0", "triton": "3.6.0"},
         "entries": [{"op": "swiglu", "direction": "forward", "dtype": "bf16", "skew": 0.0,
                      "shape": {"tokens": 8192, "ffn": 2816}, "microseconds": {"torch": 71.2, "triton": 30.1}}, ...]}

    `skew` is the standard deviation of the logarithms of the experts' loads: 0 is balanced, with 0.6 a busy expert has
    several times the rows of a quiet one.
    """

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


AUTO = "auto"
MASKED = "masked attention"  # over documents, windows and chunks
NOT_THERE = "the model has none"  # reason of an operator that the model never calls
MOST_LATENT, MOST_ROTARY = 512, 64  # widest rows of sparse attention's kernels
_IN_16_BITS = ("flash", "cudnn")  # torch's backends without float32 on a GPU
MOST_COLUMNS = 1024  # widest tile of logits of Triton's router, which keeps an expert's number in ten bits


@dataclass(frozen=True)
class Choice:
    """The chosen backend of an operator, and the reason."""

    op: str  # from `penstock.kernels.backends.FIELDS`, or `attention`, `MASKED` or `loss`
    direction: Direction
    backend: str  # from `penstock.kernels.backends.BACKENDS`; for attention, a value of `kernels.attention`
    reason: str  # a short sentence without a full stop


def choose(
    wanted: Mapping[str, str], device: DeviceFacts, shapes: Shapes, measured: Measurements | None
) -> tuple[Choice, ...]:
    """Choose a backend for every operator. Raises KernelError if a backend that is asked for cannot run.

    `wanted` has a backend or `auto` by knob of the section `kernels`; `all` is for knobs that are `auto` or missing.
    """
    answers = [
        Choice(point.op, point.direction, *_answer(point, wanted, device, shapes, measured)) for point in CHOICE_POINTS
    ]
    _refuse_mixture_without_triton(answers, device)
    # The loss has one form for a GPU and one for a CPU.
    no_kernel = "no GPU" if device.kind == "cpu" else None if device.has_triton else "Triton is not installed"
    others = {
        "attention": _attention(wanted, device),
        MASKED: _masked_attention(wanted, device, shapes),
        "loss": ("torch", no_kernel) if no_kernel else ("triton", "its only form on a GPU"),
    }
    return (*answers, *(Choice(op, "both", *answer) for op, answer in others.items() if answer is not None))


def operators(choices: Sequence[Choice]) -> Operators:
    """The operators of a model, assembled from the chosen backends."""
    backends = {choice.op: choice.backend for choice in choices}
    parts: dict[str, Any] = {"attention_backend": backends["attention"]}
    if backends.get(MASKED) == "triton":
        parts["bounded_attention"] = BACKENDS["triton"].operators.bounded_attention
    for op in FIELDS.keys() - {"experts"}:
        source = vars(BACKENDS[backends[op]].operators)
        parts |= {field: source[field] for field in FIELDS[op]}
    products: dict[str, str] = {choice.direction: choice.backend for choice in choices if choice.op == "experts"}
    return replace(REFERENCE, **experts_of(products), **parts)


def summary(choices: Sequence[Choice]) -> str:
    """The choice in one line: `triton: experts, route; torch: norm; cuDNN first: attention`."""
    there = [choice for choice in choices if choice.reason != NOT_THERE]
    operators_by_backend: dict[str, dict[str, None]] = {}
    for choice in there:
        backend = "torch" if choice.backend == "default" else shown(choice)
        operators_by_backend.setdefault(backend, {})[choice.op] = None
    return "; ".join(f"{backend}: {', '.join(ops)}" for backend, ops in operators_by_backend.items())


def shown(choice: Choice) -> str:
    """Name of a choice's backend for people."""
    if choice.op != "attention":
        return choice.backend
    return {AUTO: choice.reason.partition(",")[0], "default": "torch's choice"}.get(choice.backend, choice.backend)


def obstacle(op: str, backend: str, device: DeviceFacts, shapes: Shapes) -> str | None:
    """Reason why a backend cannot run an operator, or None."""
    needs = BACKENDS[backend]
    if needs.gpu_only and device.kind == "cpu":
        return "no GPU"
    if needs.package and needs.package not in device.packages:
        return f"{needs.package.capitalize()} is not installed"
    if op == "experts" and backend in ("triton", "torch"):
        return _product_obstacle(backend, device, shapes)
    if op == "route" and backend == "triton" and shapes.experts:
        return _router_obstacle(shapes)
    return _sparse_obstacle(device, shapes) if op == "sparse" and backend == "triton" else None


def _sparse_obstacle(device: DeviceFacts, shapes: Shapes) -> str | None:
    """A program holds whole rows of the latent in shared memory."""
    if device.dtype != "bf16":
        return "float32: rows of the latent do not fit into shared memory"
    wide = shapes.latent_dim > MOST_LATENT or shapes.rotary_dim > MOST_ROTARY
    return f"a latent of {shapes.latent_dim} + {shapes.rotary_dim} numbers does not fit" if wide else None


def _product_obstacle(backend: str, device: DeviceFacts, shapes: Shapes) -> str | None:
    """Both libraries copy rows in blocks of 16 bytes; torch's supports one dtype on a GPU."""
    if backend == "torch" and device.kind == "cuda" and device.dtype != "bf16":
        return "float32: torch promises its grouped_mm in bfloat16 only on a GPU"
    item = 2 if device.dtype == "bf16" else 4
    narrow = [width for width in (shapes.hidden, shapes.ffn) if width * item % 16]
    return f"rows of {narrow[0]} numbers are no multiple of 16 bytes" if narrow else None


def _router_obstacle(shapes: Shapes) -> str | None:
    """A tile has a power of two of groups, and of columns for each group."""
    columns = 1
    for size in (shapes.expert_groups, -(-shapes.experts // shapes.expert_groups)):
        columns *= 2 ** (size - 1).bit_length()
    return f"{shapes.experts} experts are more than {MOST_COLUMNS} columns" if columns > MOST_COLUMNS else None


def _answer(
    point: ChoicePoint, wanted: Mapping[str, str], device: DeviceFacts, shapes: Shapes, measured: Measurements | None
) -> tuple[str, str]:
    op = point.op
    obstacles = {name: obstacle(op, name, device, shapes) for name in BACKENDS if op in BACKENDS[name].ops}
    # The most specific knob that names a backend decides.
    knob = next((knob for knob in (*point.knobs, "all") if wanted.get(knob, AUTO) != AUTO), None)
    if knob == "all" and obstacles.get(wanted[knob]) is not None and not _is_there(point, shapes):
        return "reference", NOT_THERE
    if knob is not None:
        return _as_asked(op, knob, wanted[knob], obstacles)
    if op == "sparse" and shapes.index_heads:
        problem = obstacles["triton"]
        return ("reference", problem) if problem else ("triton", "no squares of positions")
    return _by_time(point, obstacles, device, shapes, measured)


def _by_time(
    point: ChoicePoint,
    obstacles: Mapping[str, str | None],
    device: DeviceFacts,
    shapes: Shapes,
    measured: Measurements | None,
) -> tuple[str, str]:
    """The fastest backend, where no knob names one."""
    # Only parts that the model has count, such as mla_heads for latent attention.
    parts = [part for part in point.parts if has(part.op, shapes)]
    if not parts:
        return "reference", NOT_THERE
    possible = [name for name, problem in obstacles.items() if problem is None]
    fastest = None if measured is None else _fastest(parts, possible, device, shapes, measured)
    if fastest is not None:
        return fastest
    unknown = "no measurement for this chip" if measured is None else f"not measured in {device.dtype}"
    return _unmeasured(point.op, obstacles, device, unknown)


def _is_there(point: ChoicePoint, shapes: Shapes) -> bool:
    return bool(shapes.index_heads) if point.op == "sparse" else any(has(part.op, shapes) for part in point.parts)


def _unmeasured(op: str, obstacles: Mapping[str, str | None], device: DeviceFacts, unknown: str) -> tuple[str, str]:
    """Backend and reason without measurements: the first that can run, except for untuned products."""
    possible = [name for name, problem in obstacles.items() if problem is None]
    hindered = [problem for problem in obstacles.values() if problem is not None]
    # Without a table of launches for this chip, and in float32, Triton's products run in a small tile that fits
    # anywhere. On an H200 that took 1.2 to 4 times as long as a loop over the experts.
    has_launches = device.dtype == "bf16" and device.target in GROUPED_GEMM
    if op == "experts" and "triton" in possible and not has_launches:
        other = next(name for name in possible if name != "triton")
        return other, f"no launches of Triton's products for {device.dtype} on {device.target}"
    return possible[0], "; ".join(hindered) or f"{unknown}: {possible[0].capitalize()} by default"


def _as_asked(op: str, knob: str, backend: str, obstacles: Mapping[str, str | None]) -> tuple[str, str]:
    if knob == "all" and backend not in obstacles:
        return "reference", f"kernels.all={backend}, which has no {op} of its own"
    if obstacles[backend] is not None:
        possible = [name for name, problem in obstacles.items() if problem is None]
        what, allowed = f"kernels.{knob}={backend} cannot be had for {op}", ", ".join((AUTO, *possible))
        raise KernelError(what, got=obstacles[backend], allowed=allowed, fix=f"kernels.{knob}={AUTO}")
    return backend, f"kernels.{knob}={backend}"


def _fastest(
    parts: Sequence[TimedPart], possible: Sequence[str], device: DeviceFacts, shapes: Shapes, measured: Measurements
) -> tuple[str, str] | None:
    """Backend and reason of the lowest sum over the parts; None if a part is not measured."""
    sums = dict.fromkeys(possible, 0.0)  # microseconds; backends without a time for some part fall out
    nearest: Sequence[OperatorTimes] = ()
    for part in parts:
        nearest = measured.nearest(part.op, part.direction, device.dtype, shape_of(part.op, shapes))
        sums = {
            name: total + fmean(entry.microseconds[name] for entry in nearest)
            for name, total in sums.items()
            if nearest and all(name in entry.microseconds for entry in nearest)
        }
    if not sums:
        return None
    best, *others = sorted(sums, key=lambda name: sums[name])
    where = f"on {measured.device} at {_place(nearest[0].shape)}"
    if not others:
        return best, f"the only one measured {where}"
    return best, f"measured {sums[others[0]] / sums[best]:.2f}x faster than {others[0]} {where}"


def _place(shape: Mapping[str, int]) -> str:
    if "ffn" in shape:
        return f"{shape['experts']} experts x {shape['tokens'] * shape['top_k'] // shape['experts']} rows"
    return f"{shape['tokens']} tokens"


def _refuse_mixture_without_triton(choices: Sequence[Choice], device: DeviceFacts) -> None:
    """The autograd function that combines products of several backends imports Triton."""
    products = {choice.direction: choice.backend for choice in choices if choice.op == "experts"}
    if len(set(products.values())) > 1 and not device.has_triton:
        raise KernelError(
            "the experts' products can only be mixed where Triton is installed",
            got=", ".join(f"kernels.experts_{direction}={backend}" for direction, backend in products.items()),
            fix="one kernels.experts for all three",
        )


def _attention(wanted: Mapping[str, str], device: DeviceFacts) -> tuple[str, str]:
    """Choose flash-attn-4, or which of torch's backends is first; raises KernelError if it cannot run."""
    named, problem = wanted.get("attention", AUTO), _flash_4_obstacle(device)
    if named == attention.FLASH_4_NAME and problem is not None:
        fix = f"pip install {FLASH_4}, or kernels.attention=auto"
        raise KernelError(f"kernels.attention={named} cannot run", got=problem, fix=fix)
    if named not in (AUTO, bounded_attention.NAME):
        if named in _IN_16_BITS and device.kind == "cuda" and device.dtype != "bf16":
            fix = "training.precision=bf16, or kernels.attention=auto"
            raise KernelError(f"kernels.attention={named} cannot run on a GPU", got="float32", fix=fix)
        return named, f"kernels.attention={named}"
    if wanted.get("all", AUTO) == "reference":
        return "default", "kernels.all=reference: the order is torch's own"
    if device.kind == "cpu":
        return "default", "no GPU"
    if problem is None and device.target in attention.FLASH_4_MEASURED:
        return attention.FLASH_4_NAME, f"{FLASH_4} is installed; cuDNN for unsupported calls"
    has_cudnn = not device.target.startswith("gfx")
    return (
        AUTO,
        "cuDNN first, then flash, efficient, math" if has_cudnn else "flash first, then efficient, math: no cuDNN",
    )


def _masked_attention(wanted: Mapping[str, str], device: DeviceFacts, shapes: Shapes) -> tuple[str, str] | None:
    """Choose between our kernel and torch's masks on a GPU; raises KernelError if the kernel cannot run."""
    named, problem = wanted.get("attention", AUTO), _bounded_obstacle(device, shapes)
    is_measured = device.target in bounded_attention.MEASURED
    if named == bounded_attention.NAME:
        if problem is not None:
            fix = f"kernels.attention={AUTO}"
            raise KernelError(f"kernels.attention={named} cannot run", got=problem, fix=fix)
        return "triton", f"kernels.attention={named}"
    if device.kind == "cpu":
        return None
    if named not in (AUTO, attention.FLASH_4_NAME):
        problem = f"kernels.attention={named}"
    elif wanted.get("all", AUTO) == "reference":
        problem = "kernels.all=reference"
    elif problem is None and not is_measured and not shapes.has_window:
        problem = "no measurement for this chip"
    if problem is not None:
        return "torch", problem
    return (
        "triton",
        f"measured faster than masks on {device.target}" if is_measured else "a window has no mask of the square",
    )


def _bounded_obstacle(device: DeviceFacts, shapes: Shapes) -> str | None:
    if device.kind == "cpu":
        return "no GPU"
    if not device.has_triton:
        return "Triton is not installed"
    if device.dtype != "bf16":
        return "float32"
    widths = shapes.head_dim, shapes.value_dim
    return None if bounded_attention.has_kernel(*widths) else f"heads of {widths[0]} and {widths[1]} columns"


def _flash_4_obstacle(device: DeviceFacts) -> str | None:
    if FLASH_4 not in device.packages:
        return f"{FLASH_4} is not installed"
    if device.kind == "cpu" or device.target not in attention.FLASH_4_WIDEST:
        return f"it has no kernels for {device.name}"
    return None
