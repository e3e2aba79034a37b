"""Causal attention in 16 bits by each backend that is here, forward and backward, with its error.

    python -m benchmarks.kernels.attention --output attention.json
    python -m benchmarks.kernels.attention --tiny       # on a CPU: errors of what runs there

Candidates take turns, so that clocks and heat are the same for all; times are medians of all rounds. TFLOP/s count the
products that attention is, half of the square: 2 forward and 5 backward, whatever is computed again.

Errors are signal to noise in decibels, of the output and of the three gradients, against float32 on the same bfloat16
inputs of normal numbers.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from penstock.kernels import flash_4
from penstock.kernels.attention import causal_attention
from penstock.kernels.device_facts import FLASH_4, extras

Attention = Callable[..., Tensor]
NAMES = ("output", "dq", "dk", "dv")


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

    @property
    def forward_flops(self) -> float:
        """Of both products, half of the square each."""
        return self.B * self.H * self.S**2 * (self.N + self.M)

    @property
    def backward_flops(self) -> float:
        """Scores, dQ and dK; dP and dV."""
        return self.B * self.H * self.S**2 * (3 * self.N + 2 * self.M)


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
    options = parse_arguments()
    torch.manual_seed(0)
    judged = [replace(shape, S=320, H=2 * shape.H // shape.G, G=2) if options.tiny else shape for shape in JUDGED]
    numbers: dict[str, Any] = {"errors": {shape.name: print_errors(shape) for shape in judged}, "times": {}}
    for shape in () if options.tiny else SHAPES:
        numbers["times"][shape.name] = print_times(shape, options.rounds)
    record.write(options, numbers, **{"flash_attn_4": version(FLASH_4)} if extras() else {})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each candidate")
    parser.add_argument("--tiny", action="store_true", help="errors only, of a small shape, on a CPU")
    record.add_arguments(parser)
    return parser.parse_args()


def rivals_for(shape: Shape) -> dict[str, Attention]:
    """What runs here; torch's flash backend only where it need not pad."""
    if not torch.cuda.is_available():
        return {"flash": partial(in_16_bits, backend="flash")} if shape.N == shape.M else {}
    names = ["cudnn", *(["flash"] if shape.N == shape.M else []), *([flash_4.NAME] if extras() else [])]
    return {name: partial(in_16_bits, backend=name) for name in names}


def draw(shape: Shape, device: str) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, in bfloat16."""
    heads = ((shape.H, shape.N), (shape.G, shape.N), (shape.G, shape.M), (shape.H, shape.M))
    return [torch.randn(shape.B, shape.S, *size, device=device, dtype=torch.bfloat16) for size in heads]


def in_float32(q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor) -> Tensor:
    """All scores in memory."""
    scale = q_BSHN.shape[-1] ** -0.5
    return causal_attention(q_BSHN, k_BSGN, v_BSGM, scale=scale, allowed_BSS=None, backend="math")


def in_16_bits(q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, backend: str) -> Tensor:
    """Causal attention as a run computes it."""
    scale = q_BSHN.shape[-1] ** -0.5
    return causal_attention(q_BSHN, k_BSGN, v_BSGM, scale=scale, allowed_BSS=None, backend=backend)


def passes(attend: Attention, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients."""
    *leaves, do_BSHM = (x.detach() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    o_BSHM = attend(*leaves)
    return [o_BSHM.detach(), *torch.autograd.grad(o_BSHM, leaves, do_BSHM)]


def decibels(got: Tensor, expected: Tensor) -> float:
    """Signal to noise."""
    noise = (got.double() - expected.double()).square().sum().item()
    return 10 * math.log10(expected.double().square().sum().item() / noise) if noise else math.inf


def step(attend: Attention, inputs: Sequence[Tensor]) -> tuple[float, float]:
    """Milliseconds of forward and of backward, by events on the stream."""
    *leaves, do_BSHM = (x.detach() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    start, middle, stop = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    # The device is kept busy while the host queues both, so that launches are not what is measured.
    torch.cuda._sleep(20_000_000)
    start.record()
    o_BSHM = attend(*leaves)
    middle.record()
    torch.autograd.grad(o_BSHM, leaves, do_BSHM)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(middle), middle.elapsed_time(stop)


def medians(rivals: dict[str, Attention], inputs: Sequence[Tensor], rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of forward and of backward of each candidate; they take turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
    for turn in range(rounds + 3):
        for name, rival in rivals.items():
            pair = step(rival, inputs)
            if turn >= 3:
                times[name].append(pair)
    return {
        name: (statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs))
        for name, pairs in times.items()
    }


def print_errors(shape: Shape) -> dict[str, dict[str, float]]:
    """Decibels of every candidate."""
    inputs = draw(shape, "cuda" if torch.cuda.is_available() else "cpu")
    expected = passes(in_float32, [x.float() for x in inputs])
    print(f"{'dB, ' + shape.name:28}" + "".join(f"{name:>8}" for name in NAMES))
    found = {}
    for name, rival in rivals_for(shape).items():
        got = passes(rival, inputs)
        found[name] = {part: decibels(*pair) for part, *pair in zip(NAMES, got, expected, strict=True)}
        print(f"{name:28}" + "".join(f"{value:8.1f}" for value in found[name].values()))
    return found


def print_times(shape: Shape, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds and TFLOP/s of both passes of every candidate."""
    print(f"{shape.name:28}{'fwd ms':>9}{'bwd ms':>9}{'TFLOP/s':>9}{'TFLOP/s':>9}{'of the first':>14}")
    found: dict[str, dict[str, float]] = {}
    for name, (forward, backward) in medians(rivals_for(shape), draw(shape, "cuda"), rounds).items():
        found[name] = {
            "forward_ms": forward,
            "backward_ms": backward,
            "forward_tflops": shape.forward_flops / forward / 1e9,
            "backward_tflops": shape.backward_flops / backward / 1e9,
        }
        first = next(iter(found.values()))
        found[name]["speed_of_first"] = (first["forward_ms"] + first["backward_ms"]) / (forward + backward)
        rates = "".join(f"{found[name][f'{direction}_tflops']:9.0f}" for direction in ("forward", "backward"))
        print(f"{name:28}{forward:9.3f}{backward:9.3f}{rates}{found[name]['speed_of_first']:14.2f}")
    return found


if __name__ == "__main__":
    main()
