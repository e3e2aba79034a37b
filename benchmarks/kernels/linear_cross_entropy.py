"""Output projection and loss, forward and backward: ours beside full logits (eager and compiled) and Liger.

    python -m benchmarks.kernels.linear_cross_entropy --output linear_cross_entropy.json
    python -m benchmarks.kernels.linear_cross_entropy --sweep        # the row kernel alone, under several launches

Every candidate takes bfloat16 hidden states and head and gives the mean loss and bfloat16 gradients. They take turns,
so that clocks and heat are the same for all; the time is the median of all rounds. Peak memory is what a step
allocates beyond its inputs, gradients included. Liger is left out where it is not installed. Ours is also timed with
products in 8 bits (`float8.head`), by the recipe blockwise-square.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks import record
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.recipes import BLOCKWISE_SQUARE
from penstock.kernels.float8.triton_operators import WITH_TORCH
from penstock.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_kernel
from penstock.kernels.reference import IGNORED_LABEL
from penstock.kernels.tuning import KernelLaunch

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

IN_8_BITS = Float8Rule(head=BLOCKWISE_SQUARE, operators=WITH_TORCH)

SWEEP = [
    KernelLaunch(block_rows=1, block_columns=columns, warps=warps, stages=stages)
    for columns, warps in ((2048, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32))
    for stages in (1, 2, 3, 4)
]


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    x_TD = torch.randn(options.tokens, options.hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    head_VD = torch.randn(options.vocabulary, options.hidden, device="cuda", dtype=torch.bfloat16)
    head_VD = (head_VD / options.hidden**0.5).requires_grad_()
    labels_T = torch.randint(options.vocabulary, (options.tokens,), device="cuda")

    measured = measure(
        candidates(torch.zeros_like(head_VD, dtype=torch.float32)), x_TD, head_VD, labels_T, options.rounds
    )
    compiled = measured["torch.compile, full logits"]
    flops = 6 * x_TD.shape[0] * head_VD.numel()
    print(f"{'candidate':42} {'ms':>7} {'TFLOP/s':>8} {'of compiled':>12} {'peak GiB':>9} {'loss':>9}")
    for name, row in measured.items():
        row["tflops"] = flops / row["ms"] / 1e9
        row["time_of_compiled"] = row["ms"] / compiled["ms"]
        print(
            f"{name:42} {row['ms']:7.2f} {row['tflops']:8.0f} {row['time_of_compiled']:12.3f}"
            f" {row['peak_gib']:9.2f} {row['loss']:9.5f}"
        )
    sweep: list[dict[str, Any]] = []
    for launch in SWEEP if options.sweep else []:
        sweep.append({"launch": vars(launch), **time_row_kernel(launch, options.vocabulary)})
        how = "{block_columns} columns, {warps} warps, {stages} stages".format(**vars(launch))
        print(f"row kernel, {how}: {sweep[-1]['ms']:.3f} ms, {sweep[-1]['tb_per_s']:.2f} TB/s")
    shape = {"tokens": options.tokens, "hidden": options.hidden, "vocabulary": options.vocabulary}
    numbers = {"shape": shape, "candidates": measured, "row_kernel": sweep}
    record.write(options, numbers, triton=triton.__version__)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=102400)
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each candidate")
    parser.add_argument("--sweep", action="store_true", help="also time the row kernel alone under several launches")
    record.add_arguments(parser)
    return parser.parse_args()


def full_logits(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor) -> Tensor:
    """What a model does without loss fusion; the cross entropy in float32."""
    return F.cross_entropy((x_TD @ head_VD.T).float(), labels_T, ignore_index=IGNORED_LABEL)


def full_bfloat16_logits(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor) -> Tensor:
    """The same with the cross entropy's tensors in bfloat16."""
    return F.cross_entropy(x_TD @ head_VD.T, labels_T, ignore_index=IGNORED_LABEL).float()


def ours(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor, **options: Any) -> Tensor:
    """The sum over the counted tokens, divided by a number that only the device knows, as in training."""
    return linear_cross_entropy(x_TD, head_VD, labels_T, **options) / (labels_T != IGNORED_LABEL).sum()


def liger(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor, accumulate: torch.dtype | None, growth: int) -> Tensor:
    """Liger's own operator; its arguments are positional."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    # bias, weights of words, ignored label, z-loss, smoothing, reduction, soft cap, return z-loss
    leading = (None, None, IGNORED_LABEL, 0.0, 0.0, "mean", None, False)
    # scale by token, return accuracy, return predictions, implementation, mode
    trailing = (False, False, False, None, None)
    options = (*leading, accumulate, *trailing, growth)
    return LigerFusedLinearCrossEntropyFunction.apply(x_TD, head_VD, labels_T, *options)[0]


def candidates(main_gradient_VD: Tensor) -> dict[str, Loss]:
    """Everything that is compared, by name."""
    rivals: dict[str, Loss] = {
        "full logits, float32": full_logits,
        "full logits, bfloat16": full_bfloat16_logits,
        "torch.compile, full logits": torch.compile(full_logits),
        "ours": ours,
        "ours, into a float32 main gradient": partial(ours, accumulate_into=main_gradient_VD),
        "ours, chunks of 2048": partial(ours, chunk_tokens=2048),
        "ours, chunks of 1024": partial(ours, chunk_tokens=1024),
    }
    for tokens in (2048, 4096, 8192):
        rivals[f"ours, 8 bits, chunks of {tokens}"] = partial(ours, chunk_tokens=tokens, float8=IN_8_BITS)
    if find_spec("liger_kernel"):
        # 256 tokens are its own choice at the default shape; it takes more in proportion to `growth`.
        for growth, tokens in ((1, 256), (16, 2048), (32, 4096), (64, 8192)):
            rivals[f"Liger, chunks of {tokens}"] = partial(liger, accumulate=None, growth=growth)
            rivals[f"Liger, chunks of {tokens}, float32 sum"] = partial(liger, accumulate=torch.float32, growth=growth)
    return rivals


def measure(
    rivals: dict[str, Loss], x_TD: Tensor, head_VD: Tensor, labels_T: Tensor, rounds: int
) -> dict[str, dict[str, float]]:
    """Milliseconds, peak memory and loss of each."""

    def step(loss: Loss) -> Tensor:
        x_TD.grad = head_VD.grad = None
        value = loss(x_TD, head_VD, labels_T)
        value.backward()
        return value.detach()

    measured: dict[str, dict[str, float]] = {}
    for name, loss in rivals.items():
        for _ in range(3):
            step(loss)
        x_TD.grad = head_VD.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        value = step(loss)
        measured[name] = {
            "peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
            "loss": value.item(),
        }
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, loss in rivals.items():
            times[name].append(timed(partial(step, loss)))
    for name, values in times.items():
        measured[name]["ms"] = statistics.median(values)
        measured[name]["ms_spread"] = max(values) - min(values)
    return measured


def timed(action: Callable[[], object]) -> float:
    """Milliseconds of one run, by events on the stream."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    action()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def time_row_kernel(launch: KernelLaunch, vocabulary: int, tokens: int = 4096) -> dict[str, float]:
    """The row kernel on one chunk; bandwidth counts one read and one write, which is what must move."""
    logits_TV = torch.randn(tokens, vocabulary, device="cuda", dtype=torch.bfloat16)
    labels_T = torch.randint(vocabulary, (tokens,), device="cuda")
    sums = torch.empty(2, tokens, device="cuda")

    def run() -> None:
        linear_cross_entropy_kernel[(tokens,)](
            logits_TV,
            labels_T,
            sums[0],
            sums[1],
            vocabulary,
            0,
            vocabulary,
            0.0,
            IGNORED=IGNORED_LABEL,
            STATISTICS=True,
            GRADIENT=True,
            BLOCK=launch.block_columns,
            STAGES=launch.stages,
            num_warps=launch.warps,
        )

    milliseconds = float(triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median"))
    moved = 2 * logits_TV.numel() * logits_TV.element_size()
    return {"ms": milliseconds, "tb_per_s": moved / milliseconds / 1e9}


if __name__ == "__main__":
    main()
