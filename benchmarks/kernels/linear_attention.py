"""The parts of linear attention beside their definitions, and flash-linear-attention.

    python -m benchmarks.kernels.linear_attention --output delta-rule-h200.json
    python -m benchmarks.kernels.linear_attention --kinds kda --output channel-delta-rule-h200.json

4 rows of 4,096 positions, 32 value heads of 128, in bfloat16, and one row alone. `gdn` has a decay for each head and 16
key heads, as Qwen3-Next; `kda` has a decay for each key feature and 32 key heads, as Kimi Linear.
flash-linear-attention (0.6.0) is timed in the same process where it is installed. From Triton 3.4 to 3.7.0 its backward
pass for `gdn` refuses Hopper, because one of its kernels gives wrong results there: that refusal is lifted for a time.
For `kda` it has a faster way for decays that are known to be at least exp(-5), `safe_gate`, which is timed too.
`errors` are by the norm against chunks in PyTorch in float32: output, then the gradients of q, k, v, g and beta.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import record
from penstock.kernels import delta_rule as definition
from penstock.kernels import head_norms
from penstock.kernels.delta_rule_launches import delta_rule_by_kernels
from penstock.kernels.short_convolution import short_convolution

try:
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda
except ImportError:
    chunk_gated_delta_rule = None

POSITIONS, CALLS, WARM = 4096, 20, 3
normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
Inputs = Sequence[Tensor]
Kind = Literal["gdn", "kda"]


def draw(kind: Kind, rows: int) -> list[Tensor]:
    """q, k, v, g and beta."""
    heads = rows, POSITIONS, 32
    q, k = (normal(rows, POSITIONS, 32 if kind == "kda" else 16, 128) for _ in range(2))
    g = -F.softplus((normal(*heads, 128) if kind == "kda" else normal(*heads)).float()).clamp(max=5)
    beta = normal(*heads).float().sigmoid()
    return [definition.unit_length(q, 128**-0.5), definition.unit_length(k), normal(*heads, 128), g, beta]


def both_passes(function: Callable[..., Tensor], inputs: Inputs) -> Callable[[], object]:
    """A call that runs forward and backward."""
    leaves = [one.detach().requires_grad_() for one in inputs]

    def call() -> object:
        output = function(*leaves)
        return torch.autograd.grad(output, leaves, torch.ones_like(output))

    return call


def microseconds(call: Callable[[], object]) -> float:
    """Of one of `CALLS` calls in a row."""
    for _ in range(WARM):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return round((time.perf_counter() - began) / CALLS * 1e6, 2)


def times_of(function: Callable[..., Tensor], inputs: Inputs) -> dict[str, float]:
    """Forward alone, and both passes."""
    with torch.no_grad():
        forward_us = microseconds(lambda: function(*inputs))
    return {"forward_us": forward_us, "both_passes_us": microseconds(both_passes(function, inputs))}


def kernels_of(call: Callable[[], object]) -> dict[str, float]:
    """Microseconds by kernel."""
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(WARM):
            call()
        torch.cuda.synchronize()
    found = {one.key: round(one.self_device_time_total / WARM, 1) for one in profiler.key_averages()}
    return {name: us for name, us in found.items() if us > 0}


def errors(inputs: Inputs, documents_BS: Tensor | None) -> list[float]:
    """Of one row."""

    def results(function: Callable[..., Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [one.to(dtype or one.dtype).requires_grad_() for one in (x.detach().clone() for x in inputs)]
        output = function(*leaves, documents_BS).float()
        weights = torch.linspace(-1, 1, output.numel(), device="cuda").view_as(output).sin()
        return [output.detach(), *(one.float() for one in torch.autograd.grad((output * weights).sum(), leaves))]

    pairs = zip(
        results(delta_rule_by_kernels, None), results(definition.chunked_delta_rule, torch.float32), strict=True
    )
    return [float((got - exact).norm() / exact.norm()) for got, exact in pairs]


def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, safe_gate: bool = False) -> Tensor:
    """flash-linear-attention's."""
    if g.ndim == 4:
        o_BSHM: Tensor = chunk_kda(q, k, v, g=g, beta=beta, scale=1.0, safe_gate=safe_gate)[0]
    else:
        o_BSHM = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, scale=1.0)[0]
    return o_BSHM


def measured(kind: Kind) -> dict[str, object]:
    """Of one kind of decay."""
    lengths = torch.tensor([1000, 3000, 96], device="cuda")
    documents_BS = torch.arange(3, device="cuda").repeat_interleave(lengths)[None]
    whole, alone = draw(kind, 4), draw(kind, 1)
    cases: dict[str, Callable[[], object]] = {
        "errors": lambda: {"one_document": errors(alone, None), "three_documents": errors(alone, documents_BS)},
        "delta_rule": lambda: times_of(delta_rule_by_kernels, whole),
        "delta_rule_of_one_row": lambda: times_of(delta_rule_by_kernels, alone),
        "kernels_us": lambda: kernels_of(both_passes(delta_rule_by_kernels, whole)),
    }
    if chunk_gated_delta_rule is not None:
        chunk_o.TRITON_ABOVE_3_7_1 = True
        cases |= {
            "flash_linear_attention": lambda: times_of(theirs, whole),
            "flash_linear_attention_of_one_row": lambda: times_of(theirs, alone),
            "flash_linear_attention_kernels_us": lambda: kernels_of(both_passes(theirs, whole)),
        }
        if kind == "kda":
            cases["flash_linear_attention_safe_gate"] = lambda: times_of(partial(theirs, safe_gate=True), whole)
    return {name: _told(f"{kind} {name}", case()) for name, case in cases.items()}


def _told(name: str, found: object) -> object:
    """Print a measurement as soon as it is there."""
    print(name, found, flush=True)
    return found


def measured_parts() -> dict[str, object]:
    """Of norms of heads and the short convolution."""
    numbers: dict[str, object] = {}
    o, gate, weight = normal(4, POSITIONS, 32, 128), normal(4, POSITIONS, 32, 128), normal(128)
    features, sizes = normal(4, POSITIONS, 8192), normal(8192, 4)
    for name, module in (("kernels", head_norms), ("definitions", definition)):
        gated = partial(module.gated_norm, epsilon=1e-6, is_silu=True)
        numbers[name] = {
            "unit_length": times_of(module.unit_length, [normal(4, POSITIONS, 16, 128)]),
            "gated_norm": times_of(gated, [o, gate, weight]),
        }
    numbers["short_convolution"] = times_of(short_convolution, [features, sizes])
    return numbers


def main() -> None:
    """Time everything, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=("gdn", "kda"), default=["gdn", "kda"])
    record.add_arguments(parser)
    options = parser.parse_args()
    torch.manual_seed(0)
    numbers: dict[str, object] = {}
    for name in options.kinds:
        numbers[name] = measured(name)
    if "gdn" in options.kinds:
        numbers["parts"] = _told("parts", measured_parts())
    record.write(options, numbers, triton=triton.__version__)


if __name__ == "__main__":
    main()
