"""Times every backend of every operator on this GPU, for the shapes of one run: `penstock kernels tune`.

Parts and sizes are those of `penstock.kernels.backends`. Experts are loaded evenly in one case and unevenly in another,
with a lognormal popularity. A case draws new inputs for each call, and the timer alternates between several calls whose
inputs are together several times the L2 cache. `GpuCallTimer` keeps the device busy while the host queues the calls, so
it measures the device and not Python; a backend that waits for the host is charged for that.

This is not part of a training step, because a search in the first step is slow and differs between ranks and runs.
`write_result` writes measurements, of ladders too, in the form of benchmarks/results.
"""

import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.base.files import write_whole
from penstock.base.origin import commit_of_code, version_of
from penstock.config.run import Run
from penstock.kernels import reference
from penstock.kernels.backends import BACKENDS, CHOICE_POINTS, Shapes, TimedPart, has, shape_of
from penstock.kernels.choose import Measurements, OperatorTimes, obstacle
from penstock.kernels.delta_rule import unit_length
from penstock.kernels.operators import Operators
from penstock.kernels.reference import RouterRule
from penstock.kernels.tuning import DeviceFacts
from penstock.models.kernels import shapes_of
from penstock.moe.router import router_rule
from penstock.parallel.launch.process import device_name

# Standard deviations of the logarithm of an expert's popularity: even load, and that of early training.
SKEWS = (0.0, 0.6)

Tensors = tuple[Tensor, ...]
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of a model's step for the operators."""

    shapes: Shapes
    rule: RouterRule | None  # of the router; None for a dense model
    sequences: int  # rows of the micro-batch
    epsilon: float
    dtype: torch.dtype
    device: torch.device

    def normal(self, *size: int) -> Tensor:
        """Random numbers in the compute dtype."""
        return torch.randn(*size, device=self.device, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One part of an operator under one load."""

    part: TimedPart
    shape: dict[str, int]  # sizes by which the result is looked up
    skew: float  # one of `SKEWS`
    backends: tuple[str, ...]
    draw: Callable[[], Tensors]  # returns new inputs, the same for every backend
    bind: Callable[[str, Tensors], Call]  # the call of a backend on such inputs; untimed preparation has run


def workload_of(run: Run, device: torch.device) -> Workload:
    """The workload of a run's micro-batch."""
    return Workload(
        shapes=shapes_of(run),
        rule=None if run.model.moe is None else router_rule(run.model.moe),
        sequences=run.training.micro_batch,
        epsilon=run.model.rms_norm_eps,
        dtype=torch.bfloat16 if run.training.precision == "bf16" else torch.float32,
        device=device,
    )


def cases(work: Workload, facts: DeviceFacts) -> Iterator[Case]:
    for question in CHOICE_POINTS:
        able = [name for name, backend in BACKENDS.items() if question.op in backend.ops]
        able = [name for name in able if obstacle(question.op, name, facts, work.shapes) is None]
        # The products are taken from `penstock.kernels.expert_ffn`, which imports Triton.
        if question.op == "experts" and not facts.has_triton:
            continue
        for part in question.parts:
            if not has(part.op, work.shapes):
                continue
            for skew in SKEWS if part.op in _LOADED else SKEWS[:1]:
                draw, bind = (_product if question.op == "experts" else _operator)(work, part, skew)
                shape = shape_of(part.op, work.shapes)
                yield Case(part=part, shape=shape, skew=skew, backends=tuple(able), draw=draw, bind=bind)


def draw_choices(tokens: int, experts: int, top_k: int, skew: float, device: torch.device) -> Tensor:
    """experts_TK: `top_k` different experts of each token; with skew 0 all experts have equally many tokens."""
    if skew == 0:
        shuffled_T1 = torch.randperm(tokens, device=device)[:, None]
        return (shuffled_T1 * top_k + torch.arange(top_k, device=device)) % experts
    # The largest of log popularity plus Gumbel noise are a draw by popularity without replacement.
    popularity_E = skew * torch.randn(experts, device=device)
    gumbel_TE = -torch.empty(tokens, experts, device=device).exponential_().log()
    return (popularity_E + gumbel_TE).topk(top_k).indices


_DrawAndBind = tuple[Callable[[], Tensors], Callable[[str, Tensors], Call]]  # of a case


def _operator(work: Workload, part: TimedPart, skew: float) -> _DrawAndBind:
    """A whole operator in one of its two passes."""
    draw, apply, with_gradients = _OPERATORS[part.op]

    def bind(backend: str, inputs: Tensors) -> Call:
        call = partial(apply, BACKENDS[backend].operators, work, inputs)
        if part.direction == "forward":
            return torch.no_grad()(call)
        leaves = [x.requires_grad_() for x in inputs[:with_gradients]]
        result = call()  # forward runs once, untimed; each timed call walks its graph again
        outputs = [x for x in ((result,) if isinstance(result, Tensor) else result) if x.requires_grad]
        incoming = [torch.randn_like(output) for output in outputs]
        return lambda: torch.autograd.grad(outputs, leaves, incoming, retain_graph=True)

    return partial(draw, work, skew), bind


def _product(work: Workload, part: TimedPart, skew: float) -> _DrawAndBind:
    """One grouped product of the experts. All of them share one tile table, which is not timed."""
    sizes, gathers = work.shapes, part.op == "gate_up"
    columns, depth = (2 * sizes.ffn, sizes.hidden) if gathers else (sizes.hidden, sizes.ffn)
    rows = sizes.tokens * sizes.top_k
    operands: dict[str, tuple[int, ...]] = {
        "x": (sizes.tokens if gathers else rows, depth),  # the first product gathers its rows of the tokens
        "w": (sizes.experts, columns, depth),
        "dy": (rows, columns),
    }
    needed = {"forward": ("x", "w"), "input_gradient": ("dy", "w"), "weight_gradient": ("dy", "x")}[part.direction]

    def draw() -> Tensors:
        experts_TK = draw_choices(sizes.tokens, sizes.experts, sizes.top_k, skew, work.device)
        order = reference.order_rows(experts_TK, sizes.experts)
        return order.counts_E, order.slots_R // sizes.top_k, *(work.normal(*operands[name]) for name in needed)

    def bind(backend: str, inputs: Tensors) -> Call:
        kernels = BACKENDS[backend].expert_kernels
        counts_e, index_R, first, second = inputs
        tiles = kernels.tile_table(counts_e, rows)
        product = vars(kernels)[part.direction]
        gathered = () if part.direction == "input_gradient" else (index_R if gathers else None,)
        return lambda: product(first, second, counts_e, *gathered, tiles=tiles)

    return draw, bind


def _draw_choices(work: Workload, skew: float) -> Tensors:
    sizes = work.shapes
    return (draw_choices(sizes.tokens, sizes.experts, sizes.top_k, skew, work.device),)


def _draw_rows(work: Workload, skew: float) -> Tensors:
    order = reference.order_rows(_draw_choices(work, skew)[0], work.shapes.experts)
    return (work.normal(len(order.slots_R), work.shapes.hidden), *order)


def _draw_hidden(work: Workload, skew: float, *, states: int) -> Tensors:
    tokens, hidden = work.shapes.tokens, work.shapes.hidden
    return (*(work.normal(tokens, hidden) for _ in range(states)), work.normal(hidden))


def _draw_latent_heads(work: Workload, skew: float) -> Tensors:
    sizes = work.shapes
    kv_BSHN = _heads(work, sizes.head_dim - sizes.rotary_dim + sizes.value_dim)
    k_rope_BSP = work.normal(work.sequences, sizes.tokens // work.sequences, sizes.rotary_dim)
    return _heads(work, sizes.head_dim), kv_BSHN, k_rope_BSP, *_angles(work)


def _draw_linear_heads(work: Workload, skew: float) -> Tensors:
    sizes, rows = work.shapes, (work.sequences, work.shapes.tokens // work.sequences)
    keys = sizes.linear_key_heads, sizes.linear_key_dim
    q, k = unit_length(work.normal(*rows, *keys), sizes.linear_key_dim**-0.5), unit_length(work.normal(*rows, *keys))
    by_feature = [sizes.linear_decays] if sizes.linear_decays > 1 else []
    decays, betas = (work.normal(*rows, sizes.linear_value_heads, *more).float() for more in (by_feature, []))
    v = work.normal(*rows, sizes.linear_value_heads, sizes.linear_value_dim)
    return q, k, v, -F.softplus(decays), betas.sigmoid()


def _heads(work: Workload, width: int) -> Tensor:
    return work.normal(work.sequences, work.shapes.tokens // work.sequences, work.shapes.heads, width)


def _angles(work: Workload) -> tuple[Tensor, Tensor]:
    positions, pairs = work.shapes.tokens // work.sequences, work.shapes.rotary_dim // 2
    angles_BSP = torch.rand(1, positions, pairs, device=work.device)
    return angles_BSP.cos(), angles_BSP.sin()


def _route(operators: Operators, work: Workload, inputs: Tensors) -> Any:
    assert work.rule is not None, "a model with experts has a rule"
    return operators.route(inputs[0], None, work.rule, work.sequences)


# How the model calls an operator: its inputs for a skew, the call, and how many first inputs have gradients.
_OPERATORS: dict[
    str, tuple[Callable[[Workload, float], Tensors], Callable[[Operators, Workload, Tensors], Any], int]
] = {
    "route": (
        lambda work, skew: (torch.randn(work.shapes.tokens, work.shapes.experts, device=work.device),),
        _route,
        1,
    ),
    "order_rows": (_draw_choices, lambda ops, work, inputs: ops.order_rows(inputs[0], work.shapes.experts), 0),
    "unpermute": (_draw_rows, lambda ops, work, inputs: ops.unpermute(inputs[0], reference.RowOrder(*inputs[1:])), 1),
    "swiglu": (
        lambda work, skew: (work.normal(work.shapes.tokens, 2 * work.shapes.dense_ffn),),
        lambda ops, work, inputs: ops.swiglu(*inputs),
        1,
    ),
    "rms_norm": (partial(_draw_hidden, states=1), lambda ops, work, inputs: ops.rms_norm(*inputs, work.epsilon), 2),
    "add_rms_norm": (
        partial(_draw_hidden, states=2),
        lambda ops, work, inputs: ops.add_rms_norm(*inputs, work.epsilon),
        3,
    ),
    "rotate": (
        lambda work, skew: (_heads(work, work.shapes.head_dim), *_angles(work)),
        lambda ops, work, inputs: ops.rotate(*inputs),
        1,
    ),
    "delta_rule": (_draw_linear_heads, lambda ops, work, inputs: ops.delta_rule(*inputs), 5),
    "mla_heads": (_draw_latent_heads, lambda ops, work, inputs: ops.mla_heads(*inputs), 3),
}

_LOADED = ("order_rows", "unpermute", "gate_up", "down")  # parts whose time depends on the load of the experts
MOST_COPIES = 16  # maximum number of input sets
MOST_BUSY_SECONDS = 0.02  # maximum time that the device is kept busy; slower calls wait for the host anyway


class CallTimer(Protocol):
    """Times calls that do the same on different inputs."""

    rotation: int  # total bytes of the inputs of all calls

    def __call__(self, calls: Sequence[Call]) -> float: ...


class GpuCallTimer:
    """Times calls on the current GPU by events of its stream."""

    rotation = 2**28  # several times a GPU's L2 cache

    def __init__(self, rounds: int = 7, least_ms: float = 2.0, most_calls: int = 32) -> None:
        self._rounds = rounds  # the result is their median
        self._least_ms = least_ms  # minimum device time of a round
        self._most_calls = most_calls  # of a round, limited by the device's queue

    def __call__(self, calls: Sequence[Call]) -> float:
        for call in (*calls, *calls):  # compile, and let the device reach its clock rate
            call()
        calls = [*calls] * math.ceil(4 / len(calls))
        queued, least = self._round(calls, busy_seconds=0.0)
        repeats = min(math.ceil(self._least_ms / least), self._most_calls // len(calls)) or 1
        busy_seconds = min(1.5 * queued * repeats, MOST_BUSY_SECONDS)  # half as long again as the host queues
        times = [self._round([*calls] * repeats, busy_seconds)[1] for _ in range(self._rounds)]
        return median(times) / len(calls) / repeats * 1e3  # milliseconds of a round to microseconds of a call

    def _round(self, calls: Sequence[Call], busy_seconds: float) -> tuple[float, float]:
        """Seconds to queue the calls on the host, and milliseconds to run them on the device."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        # The argument is cycles; no GPU runs at more than 3 GHz, so it sleeps at least this long.
        torch.cuda._sleep(int(busy_seconds * 3e9))
        start.record()
        began = time.perf_counter()
        for call in calls:
            call()
        queued = time.perf_counter() - began
        stop.record()
        stop.synchronize()
        return queued, start.elapsed_time(stop)


def measure(work: Workload, facts: DeviceFacts, clock: CallTimer) -> Iterator[OperatorTimes]:
    """Time every case of a workload; a generator, so that the caller can report progress."""
    for case in cases(work, facts):
        times = {backend: _time(case, backend, clock) for backend in case.backends}
        yield OperatorTimes(
            op=case.part.op,
            direction=case.part.direction,
            dtype=facts.dtype,
            skew=case.skew,
            shape=case.shape,
            microseconds={backend: round(time, 2) for backend, time in times.items() if time is not None},
        )


def _time(case: Case, backend: str, clock: CallTimer) -> float | None:
    """Microseconds, or None if the device runs out of memory."""
    try:
        torch.manual_seed(0)  # each backend gets the same inputs
        first = case.draw()
        copies = math.ceil(clock.rotation / sum(x.nbytes for x in first))
        inputs = [first, *(case.draw() for _ in range(min(copies, MOST_COPIES) - 1))]
        return clock([case.bind(backend, tensors) for tensors in inputs])
    except torch.OutOfMemoryError:
        return None


def environment() -> dict[str, str]:
    """Versions that the times depend on."""
    # On AMD Triton has another name, whose version is torch's.
    return {"torch": torch.__version__, "triton": version_of("triton") or "with torch"}


def merged(old: Measurements | None, new: Measurements) -> Measurements:
    """New results and old ones of other shapes, if those are from the same device and versions."""
    if old is None or (old.device, old.environment) != (new.device, new.environment):
        return new
    keys = {entry.key for entry in new.entries}
    kept = [entry for entry in old.entries if entry.key not in keys]
    return replace(old, entries=(*kept, *new.entries))


def winner(entry: OperatorTimes) -> str:
    return min(entry.microseconds, key=lambda backend: entry.microseconds[backend])


def write_result(
    path: Path, *, command: str, commit: str, environment: Mapping[str, Any], numbers: Mapping[str, Any]
) -> None:
    """Write a measurement atomically; an empty commit asks git. Raises a ConfigError if it cannot be written."""
    result = {
        "command": command,
        "commit": commit or commit_of_code(),
        "environment": dict(environment),
        "numbers": dict(numbers),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def describe_machine(*, on_gpu: bool) -> dict[str, Any]:
    """The machine and the versions that decide speed."""
    return {
        "device": device_name(torch.device("cuda" if on_gpu else "cpu")),
        "devices": torch.cuda.device_count() if on_gpu else 0,
        **environment(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": platform.python_version(),
    }
