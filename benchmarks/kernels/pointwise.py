"""Router, index build, unpermute, SwiGLU, norm and rotary embedding against the bandwidth of a copy.

    python -m benchmarks.kernels.pointwise --output pointwise.json

Each operator is timed forward and backward by replaying a graph of many calls, each on inputs and outputs of its own,
so that neither launches nor caches are what is measured. `bytes` are those that must move: every input read once, every
output written once. Two shares are given: `of copy` against the bandwidth of a large copy, and `of neg` against torch's
negation of as many bytes timed in the same way, which is what a small operator can be compared with. `eager` is the
time of `penstock.kernels.reference`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.measure import Call, copy_bandwidth, row_of_bytes, time_calls
from penstock.kernels import norm, permute, reference, rope, swiglu, topk
from penstock.kernels.reference import RouterRule

EPSILON = 1e-6
POSITIONS = 4096

normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)


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


@dataclass(frozen=True)
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
    options, rows = record.parser(__doc__, tokens=[8192, 65536]).parse_args(), []
    torch.manual_seed(0)
    peak = copy_bandwidth()
    for tokens in options.tokens:
        for model in (V2_LITE, V3):
            for case in cases(model, tokens):
                for row in rows_of(case, peak):
                    rows.append({"model": model.name, "tokens": tokens, **row})
                    record.show(rows[-1])
                torch.cuda.empty_cache()
    record.write(options, {"copy_bytes_per_s": peak, "rows": rows}, triton=triton.__version__)


def cases(model: Model, tokens: int) -> Iterator[Case]:
    """All operators on a model's shapes. Beyond 8,192 tokens only what is small enough to need them, and V2-Lite."""
    yield from routing_cases(model, tokens)
    if model is not V3 or tokens <= 8192:
        yield from row_cases(model, tokens)
        yield from norm_cases(model, tokens)
        yield from rope_cases(model, tokens)


def routing_cases(model: Model, tokens: int) -> Iterator[Case]:
    sequences = tokens // POSITIONS
    bias_E = torch.zeros(model.E, device="cuda") if model.rule.score == "sigmoid" else None
    how = {"bias_E": bias_E, "rule": model.rule, "sequences": sequences}
    logits, slots, sums = tokens * model.E * 4, tokens * model.K * 12, sequences * (model.E * 12 + 4)

    def draw() -> list[Tensor]:
        return [torch.randn(tokens, model.E, device="cuda")]

    fast, eager = partial(topk.route, **how), partial(reference.route, **how)
    yield Case("route", draw, fast, eager, logits + slots + sums, 2 * logits + slots + sums)
    moved = tokens * model.K * 24 + model.E * 4
    yield Case(
        "order_rows", lambda: [choices(model, tokens)], partial(permute.order_rows, experts=model.E), None, moved
    )


def choices(model: Model, tokens: int) -> Tensor:
    return torch.rand(tokens, model.E, device="cuda").topk(model.K).indices


def row_cases(model: Model, tokens: int) -> Iterator[Case]:
    order = permute.order_rows(choices(model, tokens), model.E)
    slots = tokens * model.K
    row_bytes = slots * model.D * 2
    there = tokens * model.D * 2 + row_bytes + slots * 8
    yield Case(
        "unpermute with weights",
        lambda: [normal(slots, model.D), torch.rand(tokens, model.K, device="cuda")],
        lambda y_RD, weights_TK: permute.unpermute(y_RD, order, weights_TK),
        lambda y_RD, weights_TK: reference.unpermute(y_RD, order, weights_TK),
        there + slots * 4,
        there + row_bytes + slots * 8,
    )
    narrow = slots * model.F * 2

    def activation() -> list[Tensor]:
        return [normal(slots, 2 * model.F), torch.rand(slots, device="cuda")]

    forward, backward = 3 * narrow + slots * 4, 5 * narrow + slots * 8
    yield Case("swiglu with weights", activation, swiglu.swiglu, reference.swiglu, forward, backward)
    again = partial(swiglu.swiglu_backward, recompute=True)
    moved = 6 * narrow + slots * 8
    yield Case("swiglu_backward, recompute", lambda: [*activation(), normal(slots, model.F)], again, None, moved)


def norm_cases(model: Model, tokens: int) -> Iterator[Case]:
    whole, heads = tokens * model.D * 2, tokens * model.H * model.M * 2
    plain, added = (
        tuple(partial(vars(module)[name], epsilon=EPSILON) for module in (norm, reference))
        for name in ("rms_norm", "add_rms_norm")
    )
    yield Case("rms_norm", lambda: [normal(tokens, model.D), normal(model.D)], *plain, 2 * whole, 3 * whole)
    both = (tokens, model.D)
    yield Case("add_rms_norm", lambda: [normal(*both), normal(*both), normal(model.D)], *added, 4 * whole, 4 * whole)
    of_heads = (tokens, model.H, model.M)
    yield Case("rms_norm of heads", lambda: [normal(*of_heads), normal(model.M)], *plain, 2 * heads, 3 * heads)


def rope_cases(model: Model, tokens: int) -> Iterator[Case]:
    batch, plain, heads = tokens // POSITIONS, model.N - model.P, tokens * model.H * 2

    def turned(name: str, width: int) -> tuple[Callable[..., object], Callable[..., object]]:
        angles = torch.rand(1, POSITIONS, width // 2, device="cuda")
        turn = {"cos_BSP": angles.cos(), "sin_BSP": angles.sin()}
        return partial(vars(rope)[name], **turn), partial(vars(reference)[name], **turn)

    moved = 2 * heads * model.M + POSITIONS * model.M * 4
    rows = (batch, POSITIONS)
    yield Case("rotate", lambda: [normal(*rows, model.H, model.M)], *turned("rotate", model.M), moved, moved)
    shared = tokens * model.P * 2 + POSITIONS * model.P * 4

    def latent() -> list[Tensor]:
        return [
            normal(*rows, model.H, model.N), normal(*rows, model.H, plain + model.M), normal(*rows, model.P)
        ]  # fmt: skip

    forward = heads * (3 * model.N + plain) + shared
    backward = heads * (3 * model.N + model.M + plain + model.M) + shared
    yield Case("mla_heads", latent, *turned("mla_heads", model.P), forward, backward)


def rows_of(case: Case, peak: float) -> Iterator[dict[str, Any]]:
    """Forward, then backward if there is one."""
    for name, moved, make in (
        ("forward", case.forward_bytes, forward_call),
        ("backward", case.backward_bytes, backward_call),
    ):
        if not moved:
            continue
        row = row_of_bytes(lambda make=make: make(case.fast, case.draw()), moved, peak)
        eager = None if case.eager is None else time_calls(lambda make=make: make(case.eager, case.draw()), moved)
        # torch's elementwise kernel that reads and writes as many bytes in sum
        negation = time_calls(lambda moved=moved: partial(torch.neg, normal(max(moved // 4, 1))), moved)
        row |= {"share_of_neg": negation * 1e6 / row["us"], "eager_us": None if eager is None else eager * 1e6}
        yield {"operator": case.name, "pass": name, **row}


def forward_call(operator: Callable[..., object], inputs: Sequence[Tensor]) -> Call:
    return torch.no_grad()(lambda: operator(*inputs))


def backward_call(operator: Callable[..., object], inputs: Sequence[Tensor]) -> Call:
    """Runs forward now; the call is its backward for random incoming gradients."""
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    result = operator(*inputs)
    outputs = [result] if isinstance(result, Tensor) else [x for x in result if x.requires_grad]
    incoming = [torch.randn_like(output) for output in outputs]
    return lambda: torch.autograd.grad(outputs, leaves, incoming, retain_graph=True)


if __name__ == "__main__":
    main()
