"""Causal attention in 8 bits beside 16 bits through cuDNN, forward and backward, with its error.

    python -m benchmarks.kernels.float8_attention --output float8_attention.json
    python -m benchmarks.kernels.float8_attention --sweep      # also the kernels under several launches
    python -m benchmarks.kernels.float8_attention --tiny       # on a CPU: errors of the definition only

Candidates take turns, so that clocks and heat are the same for all; times are medians of all rounds, with quantization.
TFLOP/s count the products that attention is, half of the square: 2 forward and 5 backward, whatever is computed again.

Errors are signal to noise in decibels, of the output and of the three gradients, against float32 on the same bfloat16
inputs: normal numbers; the same around means that all positions of a head share, as those of trained models do; and
with queries that look at the first key almost alone.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.attention import (
    NAMES,
    SHAPES,
    Attention,
    Shape,
    decibels,
    draw,
    in_16_bits,
    in_float32,
    medians,
    passes,
    step,
)
from penstock.kernels.float8 import attention, attention_reference
from penstock.kernels.float8.attention import Launches
from penstock.kernels.float8.formats import format_on
from penstock.kernels.tuning import Launch, target_of

TIMED = (
    *(shape for shape in SHAPES if shape.name in ("V2-Lite", "V3", "Qwen3-30B")),
    Shape(name="Qwen3-30B, long", B=1, S=32768, H=8, G=1),
)
JUDGED = Shape(name="errors", B=1, S=2048, H=4, G=4, N=192)
JUDGED_TINY = replace(JUDGED, S=320, H=2, G=2)

SWEEP: Mapping[str, Sequence[Launch]] = {
    "forward": [
        Launch(block_rows=queries, block_columns=keys, warps=warps, stages=stages)
        for queries, keys, warps in ((128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4))
        for stages in (2, 3, 4)
    ],
    "queries": [
        Launch(block_rows=queries, block_columns=keys, warps=warps, stages=stages)
        for queries, keys, warps in ((128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4))
        for stages in (1, 2, 3)
    ],
    "keys": [
        Launch(block_rows=queries, block_columns=keys, warps=warps, stages=stages)
        for queries, keys, warps in ((64, 64, 8), (64, 64, 4), (32, 64, 4), (64, 128, 8), (128, 64, 8))
        for stages in (1, 2, 3)
    ],
}


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    numbers: dict[str, Any] = {"errors": print_errors(options.tiny), "times": {}, "sweep": []}
    for shape in () if options.tiny else TIMED:
        numbers["times"][shape.name] = print_times(shape, options.rounds)
    for shape in TIMED[::2] if options.sweep else ():
        numbers["sweep"] += sweep(shape)
    record.write(options, numbers, triton=triton.__version__)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each candidate")
    parser.add_argument("--sweep", action="store_true", help="also time the kernels under several launches")
    parser.add_argument("--tiny", action="store_true", help="errors only, of a small shape by the definition, on a CPU")
    record.add_arguments(parser)
    return parser.parse_args()


def around_means(inputs: list[Tensor]) -> list[Tensor]:
    """The same with means of 1, 3 and 1 of queries, keys and values in each column of a head."""
    factors = (1.0, 3.0, 1.0, 0.0)
    return [x + factor * torch.randn_like(x[:, :1]) for x, factor in zip(inputs, factors, strict=True)]


def at_first_key(inputs: list[Tensor]) -> list[Tensor]:
    """The same with queries that look at the first key."""
    q, k, v, do = inputs
    first = k[:, :1].repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return [q + 10 * first / first.norm(dim=-1, keepdim=True), k, v, do]


def print_errors(tiny: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Decibels of every candidate on every kind of input, in a table each."""
    device, shape = ("cpu", JUDGED_TINY) if tiny else ("cuda", JUDGED)
    target = target_of(torch.device(device))
    rivals = {"16 bits, math": partial(in_16_bits, backend="math"), "E4M3, definition": by_definition(target)}
    rivals["E5M2 gradients, definition"] = by_definition(target, gradient="e5m2")
    if not tiny:
        rivals |= {"16 bits, cuDNN": partial(in_16_bits, backend="cudnn"), "E4M3": in_8_bits(target)}
    plain = draw(shape, device)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind, inputs in {"normal": plain, "means": around_means(plain), "first key": at_first_key(plain)}.items():
        expected = passes(in_float32, [x.float() for x in inputs])
        print(f"{'dB, ' + kind:28}" + "".join(f"{name:>8}" for name in NAMES))
        found[kind] = {}
        for name, rival in rivals.items():
            got = passes(rival, inputs)
            row = {part: decibels(*pair) for part, *pair in zip(NAMES, got, expected, strict=True)}
            print(f"{name:28}" + "".join(f"{value:8.1f}" for value in row.values()))
            found[kind][name] = row
    return found


def in_8_bits(target: str, launches: Launches | None = None) -> Attention:
    """Our kernels."""
    form = format_on("e4m3", target)

    def attend(q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor) -> Tensor:
        scale = q_BSHN.shape[-1] ** -0.5
        how = {"scale": scale, "forward": form, "gradient": form, "launches": launches}
        return attention.attention(q_BSHN, k_BSGN, v_BSGM, **how)

    return attend


def by_definition(target: str, gradient: str = "e4m3") -> Attention:
    """With all scores in memory."""
    forward = format_on("e4m3", target)
    form = format_on("e5m2", target) if gradient == "e5m2" else forward

    def attend(q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor) -> Tensor:
        scale = q_BSHN.shape[-1] ** -0.5
        return attention_reference.attention(q_BSHN, k_BSGN, v_BSGM, scale=scale, forward=forward, gradient=form)

    return attend


def print_times(shape: Shape, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds and TFLOP/s of both passes of every candidate, and what quantization takes of ours."""
    target = target_of(torch.device("cuda"))
    inputs = draw(shape, "cuda")
    rivals: dict[str, Attention] = {"16 bits, cuDNN": partial(in_16_bits, backend="cudnn"), "E4M3": in_8_bits(target)}
    print(f"{shape.name:28}{'fwd ms':>9}{'bwd ms':>9}{'TFLOP/s':>9}{'TFLOP/s':>9}{'of 16 bits':>12}")
    found: dict[str, dict[str, float]] = {}
    for name, (forward, backward) in medians(rivals, inputs, rounds).items():
        found[name] = row = {"forward_ms": forward, "backward_ms": backward}
        row["forward_tflops"], row["backward_tflops"] = (
            flops / ms / 1e9 for flops, ms in ((shape.forward_flops, forward), (shape.backward_flops, backward))
        )
        row["speed_of_16_bits"] = sum(next(iter(found.values()))[key] for key in ("forward_ms", "backward_ms"))
        row["speed_of_16_bits"] /= forward + backward
        print(f"{name:28}" + "".join(f"{row[key]:9.3f}" for key in ("forward_ms", "backward_ms")), end="")
        print(f"{row['forward_tflops']:9.0f}{row['backward_tflops']:9.0f}{row['speed_of_16_bits']:12.2f}")
    found["quantization"] = quantization(inputs, target)
    print(f"{'of these, quantization':28}" + "".join(f"{ms:9.3f}" for ms in found["quantization"].values()))
    return found


def quantization(inputs: Sequence[Tensor], target: str) -> dict[str, float]:
    """Milliseconds of what is not the long kernels."""
    form = format_on("e4m3", target)
    q, k, v, do_BSHM = inputs
    kept = [attention.quantize_heads(x, form) for x in (q, k)]

    def forward() -> None:
        attention.quantize_heads(q, form)
        attention.quantize_heads(k, form)
        attention.quantize_heads(v, form, columns=True)

    def backward() -> None:
        attention.quantize_output_gradient(do_BSHM, do_BSHM, form)
        for one in kept:
            attention.with_columns(one)

    bench = partial(triton.testing.do_bench, warmup=10, rep=50, return_mode="median")
    return {"forward_ms": float(bench(forward)), "backward_ms": float(bench(backward))}


def sweep(shape: Shape) -> list[dict[str, Any]]:
    """Both passes with one kernel cut in other ways; what does not fit on the chip is left out."""
    target = target_of(torch.device("cuda"))
    table = attention.TABLE.get(target, attention.SMALL)
    inputs, found = draw(shape, "cuda"), []
    for kernel, launches in SWEEP.items():
        for launch in launches:
            attend = in_8_bits(target, replace(table, **{kernel: launch}))
            try:
                pairs = [step(attend, inputs) for _ in range(8)][3:]
            except triton.runtime.errors.OutOfResources:
                continue
            forward, backward = (statistics.median(column) for column in zip(*pairs, strict=True))
            found.append({"shape": shape.name, "kernel": kernel, "launch": vars(launch)})
            found[-1]["ms"] = forward if kernel == "forward" else backward
            how = f"{launch.block_rows} x {launch.block_columns}, {launch.warps} warps, {launch.stages} stages"
            print(f"{shape.name:16} {kernel:8} {how}: forward {forward:.3f} ms, backward {backward:.3f} ms")
    return found


if __name__ == "__main__":
    main()
