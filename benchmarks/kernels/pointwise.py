"""Router, index build, unpermute, SwiGLU, norm and rotary embedding against the bandwidth of a copy.

    python -m benchmarks.kernels.pointwise --output pointwise.json

Each operator is timed forward and backward by replaying a graph of many calls, each on inputs and outputs of its own,
so that neither launches nor caches are what is measured. `bytes` are those that must move: every input read once, every
output written once. Two shares are given: `of copy` against the bandwidth of a large copy, and `of neg` against torch's
negation of as many bytes timed in the same way, which is what a small operator can be compared with. `eager` is the
time of `penstock.kernels.reference`.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from benchmarks import record
from penstock.kernels import norm, permute, reference, rope, swiglu, topk
from penstock.kernels.reference import RouterRule

LARGE = 2**30
"""Bytes of the copy that stands for the peak, read and written."""

ROTATION = 2**28
"""Bytes over which calls rotate: several times the L2 cache."""

EPSILON = 1e-6
POSITIONS = 4096

normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shapes of a model, by the letters of penstock/base/shapes.py."""

    name: str
    D: int
    E: int
    K: int
    F: int
    H: int
    rule: RouterRule
    N: int = 192
    P: int = 64
    M: int = 128


V2_LITE = Model(name="V2-Lite", D=2048, E=64, K=6, F=1408, H=16, rule=RouterRule(top_k=6))
V3_RULE = RouterRule(top_k=8, score="sigmoid", groups=8, topk_group=4, group_score="top2", normalize=True, scale=2.5)
V3 = Model(name="V3", D=7168, E=256, K=8, F=2048, H=128, rule=V3_RULE)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operator on one shape.

    Attributes:
        draw: makes inputs; floating ones are differentiated.
        fast, eager: the operator and its reference (None if it waits for the host and so cannot be in a graph).
        forward_bytes, backward_bytes: that must move; backward 0 for none.
    """

    name: str
    draw: Callable[[], Sequence[Tensor]]
    fast: Callable[..., object]
    eager: Callable[..., object] | None
    forward_bytes: int
    backward_bytes: int = 0


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    peak = copy_bandwidth()
    print(f"copy: {peak / 1e12:.2f} TB/s")
    print(f"{'operator':34} {'tokens':>6} {'pass':8} {'MB':>7} {'us':>8} {'of copy':>8} {'of neg':>8} {'eager us':>9}")
    rows = []
    for tokens in options.tokens:
        for model in (V2_LITE, V3):
            for case in cases(model, tokens):
                for row in measure(case, peak):
                    rows.append({"model": model.name, "tokens": tokens, **row})
                    print(line(rows[-1]))
                torch.cuda.empty_cache()
    record.write(options, {"copy_bytes_per_s": peak, "rows": rows}, triton=triton.__version__)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 65536])
    record.add_arguments(parser)
    return parser.parse_args()


def line(row: dict[str, object]) -> str:
    eager = f"{row['eager_us']:9.1f}" if row["eager_us"] else f"{'-':>9}"
    return (
        f"{row['model'] + ' ' + row['operator']:34} {row['tokens']:6} {row['pass']:8} {row['bytes'] / 1e6:7.1f}"
        f" {row['us']:8.1f} {row['share_of_copy']:8.2f} {row['share_of_neg']:8.2f} {eager}"
    )


def cases(model: Model, tokens: int) -> Iterator[Case]:
    """All operators on a model's shapes. Beyond 8,192 tokens only what is small enough to need them, and V2-Lite."""
    yield router_case(model, tokens)
    yield order_case(model, tokens)
    if model is V3 and tokens > 8192:
        return
    yield from permute_cases(model, tokens)
    yield from swiglu_cases(model, tokens)
    yield from norm_cases(model, tokens)
    yield from rope_cases(model, tokens)


def router_case(model: Model, tokens: int) -> Case:
    sequences = tokens // POSITIONS
    bias_E = torch.zeros(model.E, device="cuda") if model.rule.score == "sigmoid" else None
    call = {"bias_E": bias_E, "rule": model.rule, "sequences": sequences}
    logits, slots, sums = tokens * model.E * 4, tokens * model.K * 12, sequences * (model.E * 12 + 4)
    return Case(
        name="route",
        draw=lambda: [torch.randn(tokens, model.E, device="cuda")],
        fast=partial(topk.route, **call),
        eager=partial(reference.route, **call),
        forward_bytes=logits + slots + sums,
        backward_bytes=2 * logits + slots + sums,
    )


def choices(model: Model, tokens: int) -> Tensor:
    return torch.rand(tokens, model.E, device="cuda").topk(model.K).indices


def order_case(model: Model, tokens: int) -> Case:
    return Case(
        name="order_rows",
        draw=lambda: [choices(model, tokens)],
        fast=partial(permute.order_rows, experts=model.E),
        eager=None,
        forward_bytes=tokens * model.K * 24 + model.E * 4,
    )


def permute_cases(model: Model, tokens: int) -> Iterator[Case]:
    order = permute.order_rows(choices(model, tokens), model.E)
    slots = tokens * model.K
    token_bytes, row_bytes = tokens * model.D * 2, slots * model.D * 2
    there = token_bytes + row_bytes + slots * 8
    yield Case(
        name="unpermute with weights",
        draw=lambda: [normal(slots, model.D), torch.rand(tokens, model.K, device="cuda")],
        fast=lambda y_RD, weights_TK: permute.unpermute(y_RD, order, weights_TK),
        eager=lambda y_RD, weights_TK: reference.unpermute(y_RD, order, weights_TK),
        forward_bytes=there + slots * 4,
        backward_bytes=there + row_bytes + slots * 8,
    )


def swiglu_cases(model: Model, tokens: int) -> Iterator[Case]:
    rows = tokens * model.K
    narrow = rows * model.F * 2
    yield Case(
        name="swiglu with weights",
        draw=lambda: [normal(rows, 2 * model.F), torch.rand(rows, device="cuda")],
        fast=swiglu.swiglu,
        eager=reference.swiglu,
        forward_bytes=3 * narrow + rows * 4,
        backward_bytes=5 * narrow + rows * 8,
    )
    yield Case(
        name="swiglu_backward, recompute",
        draw=lambda: [normal(rows, 2 * model.F), torch.rand(rows, device="cuda"), normal(rows, model.F)],
        fast=partial(swiglu.swiglu_backward, recompute=True),
        eager=None,
        forward_bytes=6 * narrow + rows * 8,
    )


def norm_cases(model: Model, tokens: int) -> Iterator[Case]:
    whole = tokens * model.D * 2
    rms_norm = {"fast": partial(norm.rms_norm, epsilon=EPSILON), "eager": partial(reference.rms_norm, epsilon=EPSILON)}
    yield Case(
        name="rms_norm",
        draw=lambda: [normal(tokens, model.D), normal(model.D)],
        **rms_norm,
        forward_bytes=2 * whole,
        backward_bytes=3 * whole,
    )
    yield Case(
        name="add_rms_norm",
        draw=lambda: [normal(tokens, model.D), normal(tokens, model.D), normal(model.D)],
        fast=partial(norm.add_rms_norm, epsilon=EPSILON),
        eager=partial(reference.add_rms_norm, epsilon=EPSILON),
        forward_bytes=4 * whole,
        backward_bytes=4 * whole,
    )
    heads = tokens * model.H * model.M * 2
    yield Case(
        name="rms_norm of heads",
        draw=lambda: [normal(tokens, model.H, model.M), normal(model.M)],
        **rms_norm,
        forward_bytes=2 * heads,
        backward_bytes=3 * heads,
    )


def rope_cases(model: Model, tokens: int) -> Iterator[Case]:
    batch, plain = tokens // POSITIONS, model.N - model.P
    heads = tokens * model.H * 2
    angles = torch.rand(1, POSITIONS, model.M // 2, device="cuda")
    turn = {"cos_BSP": angles.cos(), "sin_BSP": angles.sin()}
    moved = 2 * heads * model.M + POSITIONS * model.M * 4
    yield Case(
        name="rotate",
        draw=lambda: [normal(batch, POSITIONS, model.H, model.M)],
        fast=partial(rope.rotate, **turn),
        eager=partial(reference.rotate, **turn),
        forward_bytes=moved,
        backward_bytes=moved,
    )
    angles = torch.rand(1, POSITIONS, model.P // 2, device="cuda")
    shared_turn = {"cos_BSP": angles.cos(), "sin_BSP": angles.sin()}
    shared = tokens * model.P * 2 + POSITIONS * model.P * 4
    yield Case(
        name="mla_heads",
        draw=lambda: [
            normal(batch, POSITIONS, model.H, model.N),
            normal(batch, POSITIONS, model.H, plain + model.M),
            normal(batch, POSITIONS, model.P),
        ],
        fast=partial(rope.mla_heads, **shared_turn),
        eager=partial(reference.mla_heads, **shared_turn),
        forward_bytes=heads * (3 * model.N + plain) + shared,
        backward_bytes=heads * (3 * model.N + model.M + plain + model.M) + shared,
    )


def measure(case: Case, peak: float) -> Iterator[dict[str, object]]:
    """Forward, then backward if there is one."""
    for name, moved, make in (
        ("forward", case.forward_bytes, forward_call),
        ("backward", case.backward_bytes, backward_call),
    ):
        if not moved:
            continue
        seconds = time_calls(lambda make=make: make(case.fast, case.draw()), moved)
        eager = None if case.eager is None else time_calls(lambda make=make: make(case.eager, case.draw()), moved)
        yield {
            "operator": case.name,
            "pass": name,
            "bytes": moved,
            "us": seconds * 1e6,
            "share_of_copy": moved / seconds / peak,
            "share_of_neg": time_negation(moved) / seconds,
            "eager_us": None if eager is None else eager * 1e6,
        }


def forward_call(operator: Callable[..., object], inputs: Sequence[Tensor]) -> Call:
    return torch.no_grad()(lambda: operator(*inputs))


def backward_call(operator: Callable[..., object], inputs: Sequence[Tensor]) -> Call:
    """Runs forward now; the call is its backward for random incoming gradients."""
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    result = operator(*inputs)
    outputs = [result] if isinstance(result, Tensor) else [x for x in result if x.requires_grad]
    incoming = [torch.randn_like(output) for output in outputs]
    return lambda: torch.autograd.grad(outputs, leaves, incoming, retain_graph=True)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large device-to-device copy."""
    source, target = torch.randn(2, LARGE // 8, device="cuda")
    times = []
    for _ in range(20):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return LARGE / statistics.median(times)


def time_negation(moved: int) -> float:
    """Seconds of torch's elementwise kernel that reads and writes `moved` bytes in sum."""

    def make() -> Call:
        return partial(torch.neg, normal(max(moved // 4, 1)))

    return time_calls(make, moved)


def time_calls(make: Callable[[], Call], moved: int, repeats: int = 7) -> float:
    """Seconds of one call: `make` makes as many as the rotation needs, one graph runs them in turn.

    Results are kept while the graph is captured, so that every call writes to memory of its own.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls = [make() for _ in range(min(max(2, math.ceil(ROTATION / moved)), 64))]
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]
    replays = max(2, round(1e10 / (moved * len(calls))))
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / replays / len(calls))
    del kept
    return statistics.median(times)


if __name__ == "__main__":
    main()
