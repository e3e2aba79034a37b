"""Causal attention in 16 bits by each backend that is here, forward and backward, with its error.

    python -m benchmarks.kernels.attention --output attention.json
    python -m benchmarks.kernels.attention --tiny       # on a CPU: errors of what runs there

TFLOP/s count the products that attention is, half of the square: 2 forward and 5 backward, whatever is computed again.
Errors are signal to noise in decibels, of the output and of the three gradients, against float32 on the same bfloat16
inputs of normal numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.measure import DEVICE, ON_GPU, decibels, passes_in_turns
from penstock.kernels import attention
from penstock.kernels.attention import causal_attention
from penstock.kernels.tuning import FLASH_4, extras

Attention = Callable[..., Tensor]
Figures = dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows, positions, heads of queries and of keys, and the widths of keys and values."""

    name: str
    B: int
    S: int
    H: int
    G: int
    N: int = 128
    M: int = 128


SHAPES = (
    Shape(name="V2-Lite", B=4, S=4096, H=16, G=16, N=192),
    Shape(name="V2-Lite, long", B=1, S=32768, H=16, G=16, N=192),
    Shape(name="V3", B=1, S=4096, H=128, G=128, N=192),
    Shape(name="Qwen3-30B", B=4, S=4096, H=32, G=4),
    Shape(name="Llama-4", B=2, S=8192, H=40, G=8),
    Shape(name="heads of 64", B=4, S=4096, H=64, G=8, N=64, M=64),
)
JUDGED = (
    Shape(name="192 and 128 wide", B=2, S=2048, H=4, G=4, N=192),
    Shape(name="shared keys", B=2, S=2048, H=8, G=2),
)


def main() -> None:
    tiny = (False, "errors only, of a small shape, on a CPU")
    options = record.parser(__doc__, rounds=(20, "timed steps of each candidate"), tiny=tiny).parse_args()
    torch.manual_seed(0)
    judged = [replace(shape, S=320, H=2 * shape.H // shape.G, G=2) if options.tiny else shape for shape in JUDGED]
    errors = {}
    for shape in judged:
        scale = shape.N**-0.5
        in_float32 = partial(causal_attention, scale=scale, allowed_BSS=None, backend="math")
        errors[shape.name] = errors_of(shape, rivals_for(shape), in_float32)
    times = {}
    for shape in () if options.tiny else SHAPES:
        times[shape.name] = times_of(shape, rivals_for(shape), shape.B * shape.S**2 / 2, options.rounds)
        first = next(iter(times[shape.name].values()))["ms"]
        for name, way in times[shape.name].items():
            way["speed_of_first"] = first / way["ms"]
            record.show({"shape": shape.name, "way": name, **way})
    record.write(options, {"errors": errors, "times": times}, **{"flash_attn_4": version(FLASH_4)} if extras() else {})


def rivals_for(shape: Shape) -> dict[str, Attention]:
    """What runs here; torch's flash backend only where it need not pad."""
    flash = ["flash"] if shape.N == shape.M else []
    names = ["cudnn", *flash, *([attention.FLASH_4_NAME] if extras() else [])] if ON_GPU else flash
    return {name: partial(causal_attention, scale=shape.N**-0.5, allowed_BSS=None, backend=name) for name in names}


def draw(shape: Shape) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, in bfloat16."""
    heads = ((shape.H, shape.N), (shape.G, shape.N), (shape.G, shape.M), (shape.H, shape.M))
    return [torch.randn(shape.B, shape.S, *size, device=DEVICE, dtype=torch.bfloat16) for size in heads]


def passes(attend: Attention, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Output and gradients."""
    *leaves, do_BSHM = (x.detach() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    o_BSHM = attend(*leaves)
    gradients = torch.autograd.grad(o_BSHM, leaves, do_BSHM)
    return dict(zip(("output", "dq", "dk", "dv"), (o_BSHM.detach(), *gradients), strict=True))


def errors_of(shape: Shape, rivals: Mapping[str, Attention], exact: Attention) -> Figures:
    """Decibels of every candidate."""
    inputs = draw(shape)
    expected = passes(exact, [x.float() for x in inputs])
    errors = {}
    for name, rival in rivals.items():
        errors[name] = {part: decibels(x, expected[part]) for part, x in passes(rival, inputs).items()}
        record.show({"shape": shape.name, "way": name, "dB": errors[name]})
    return errors


def times_of(shape: Shape, rivals: Mapping[str, Attention], pairs: float, rounds: int) -> Figures:
    """Milliseconds, TFLOP/s and memory of both passes of every candidate; `pairs` of queries and keys of one head."""
    *heads, do_BSHM = draw(shape)
    leaves = [x.requires_grad_() for x in heads]
    ways = {name: partial(rival, *leaves) for name, rival in rivals.items()}
    widths = {"forward": shape.N + shape.M, "backward": 3 * shape.N + 2 * shape.M}
    times = {}
    for name, row in passes_in_turns(ways, leaves, do_BSHM, rounds).items():
        ms = {way: row[f"{way}_ms"] for way in widths}
        times[name] = {f"{way}_ms": value for way, value in ms.items()}
        times[name] |= {f"{way}_tflops": 2e-9 * pairs * shape.H * widths[way] / ms[way] for way in widths}
        times[name] |= {"ms": sum(ms.values()), "peak_gb": row["peak_gib"] * 2**30 / 1e9}
    return times


if __name__ == "__main__":
    main()
