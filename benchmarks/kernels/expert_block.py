"""A whole expert block on one GPU, forward and backward: router to combine, without the router's matrix product.

    python -m benchmarks.kernels.expert_block --output expert_block.json

Ways to run it, for DeepSeek-V2-Lite at 8,192 tokens unless told otherwise:

    reference              the definitions of penstock.kernels.reference; counts come to the host
    torch, weighted sum    topk, argsort, index_select, grouped_mm, eager SwiGLU, back to slots, outputs times weights
                           in float32, as published model code has it
    torch, weighted bmm    the same with a small matrix product for each token at the end, in bfloat16
    torch, weighted early  the same with the weights on the activation, before the down projection, as ours has it
    ours                   route, order_rows, expert_ffn with the gather fused, unpermute

They take turns; times are of the device alone, medians of all rounds. `kept` is what forward leaves allocated for
backward, without the output; `peak` is what a step allocates beyond its inputs, gradients included. Logits are random
and the same for all.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks import record
from penstock.kernels import permute, reference, topk
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.reference import RouterRule


class Inputs(NamedTuple):
    """What a block is differentiated in: tokens, router logits, expert matrices."""

    x_TD: Tensor
    logits_TE: Tensor
    gate_up_EFD: Tensor
    down_EDF: Tensor


Block = Callable[[Inputs, RouterRule], Tensor]

Weighted = Literal["sum", "bmm", "early"]
"""Where plain torch applies the routing weights."""


def main() -> None:
    options = parse_arguments()
    rule = RouterRule(top_k=options.top_k)
    inputs, dy_TD = draw(options)
    blocks: dict[str, Block] = {
        "reference": reference_block,
        **{f"torch, weighted {where}": partial(torch_block, where=where) for where in get_args(Weighted)},
        "ours": our_block,
    }
    truth = blocks["reference"](inputs, rule).detach()
    measured = measure(blocks, inputs, dy_TD, rule, options.rounds)
    print(f"{'block':22} {'forward':>8} {'backward':>9} {'both ms':>8} {'kept MiB':>9} {'peak MiB':>9} {'dB':>6}")
    for name, row in measured.items():
        line = (
            f"{name:22} {row['forward_ms']:8.3f} {row['backward_ms']:9.3f} {row['ms']:8.3f}"
            f" {row['kept_mib']:9.0f} {row['peak_mib']:9.0f}"
        )
        if name != "reference":  # Its distance from itself is infinitely many decibels, which JSON cannot hold.
            noise = (blocks[name](inputs, rule).detach().double() - truth.double()).square().sum()
            row["output_db"] = (10 * torch.log10(truth.double().square().sum() / noise)).item()
            line += f" {row['output_db']:6.1f}"
        print(line)
    for name, row in measured.items():
        row["ours_times_as_fast"] = row["ms"] / measured["ours"]["ms"]
        row["ours_keeps"] = measured["ours"]["kept_mib"] / row["kept_mib"]
        print(f"ours is {row['ours_times_as_fast']:.2f} x as fast as {name} and keeps {row['ours_keeps']:.2f} of it")
    shape = {key: value for key, value in vars(options).items() if isinstance(value, int | float)}
    record.write(options, {"shape": shape, "blocks": measured}, triton=triton.__version__)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1408, help="of one expert's feed-forward network")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument(
        "--skew", type=float, default=0.0, help="standard deviation of the experts' popularity (logits)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each block")
    record.add_arguments(parser)
    return parser.parse_args()


def draw(options: argparse.Namespace) -> tuple[Inputs, Tensor]:
    """Random inputs, and the incoming gradient."""
    torch.manual_seed(0)
    T, D, E, width = options.tokens, options.hidden, options.experts, options.width
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    inputs = Inputs(
        normal(T, D),
        torch.randn(T, E, device="cuda") + options.skew * torch.randn(E, device="cuda"),
        normal(E, 2 * width, D) / D**0.5,
        normal(E, D, width) / width**0.5,
    )
    return Inputs(*(leaf.requires_grad_() for leaf in inputs)), normal(T, D)


def reference_block(inputs: Inputs, rule: RouterRule) -> Tensor:
    x_TD, logits_TE, gate_up_EFD, down_EDF = inputs
    routed = reference.route(logits_TE, None, rule, 1)
    order = reference.order_rows(routed.experts_TK, logits_TE.shape[1])
    x_RD = reference.permute(x_TD, order)
    weights_R = routed.weights_TK.flatten()[order.slots_R]
    y_RD = reference.expert_ffn(x_RD, gate_up_EFD, down_EDF, order.counts_E, weights_R)
    return reference.unpermute(y_RD, order)


def torch_block(inputs: Inputs, rule: RouterRule, *, where: Weighted) -> Tensor:
    x_TD, logits_TE, gate_up_EFD, down_EDF = inputs
    weights_TK, experts_TK = logits_TE.softmax(-1).topk(rule.top_k, dim=-1)
    slots_R = experts_TK.flatten().argsort(stable=True)
    counts_E = torch.zeros(logits_TE.shape[1], dtype=torch.int32, device=x_TD.device)
    counts_E.index_add_(0, experts_TK.flatten(), torch.ones_like(slots_R, dtype=torch.int32))
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    x_RD = x_TD.index_select(0, slots_R // rule.top_k)
    gate_RF, up_RF = F.grouped_mm(x_RD, gate_up_EFD.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
    h_RF = F.silu(gate_RF) * up_RF
    if where == "early":
        h_RF = h_RF * weights_TK.flatten().index_select(0, slots_R).to(h_RF.dtype)[:, None]
    y_RD = F.grouped_mm(h_RF, down_EDF.transpose(1, 2), offs=ends_E)
    y_TKD = torch.empty_like(y_RD).index_copy_(0, slots_R, y_RD).view(*experts_TK.shape, -1)
    if where == "early":
        return y_TKD.sum(1)
    if where == "bmm":
        return torch.bmm(weights_TK[:, None].to(y_TKD.dtype), y_TKD)[:, 0]
    return (y_TKD * weights_TK[:, :, None]).sum(1).to(y_TKD.dtype)


def our_block(inputs: Inputs, rule: RouterRule) -> Tensor:
    x_TD, logits_TE, gate_up_EFD, down_EDF = inputs
    routed = topk.route(logits_TE, None, rule, 1)
    order = permute.order_rows(routed.experts_TK, logits_TE.shape[1])
    weights_R = routed.weights_TK.flatten().index_select(0, order.slots_R)
    y_RD = expert_ffn(
        x_TD,
        gate_up_EFD,
        down_EDF,
        order.counts_E,
        weights_R,
        order.slots_R // rule.top_k,
        places_TK=order.places_TK,
    )
    return permute.unpermute(y_RD, order)


def measure(
    blocks: dict[str, Block], inputs: Inputs, dy_TD: Tensor, rule: RouterRule, rounds: int
) -> dict[str, dict[str, float]]:
    """Times and memory of each block."""
    measured: dict[str, dict[str, float]] = {}
    for name, block in blocks.items():
        for _ in range(3):
            step(block, inputs, dy_TD, rule)
        measured[name] = memory_of(block, inputs, dy_TD, rule)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in blocks}
    for _ in range(rounds):
        for name, block in blocks.items():
            times[name].append(step(block, inputs, dy_TD, rule))
    for name, pairs in times.items():
        forward, backward = (statistics.median(column) for column in zip(*pairs, strict=True))
        both = statistics.median(sum(pair) for pair in pairs)
        measured[name] |= {"forward_ms": forward, "backward_ms": backward, "ms": both}
    return measured


def step(block: Block, inputs: Inputs, dy_TD: Tensor, rule: RouterRule) -> tuple[float, float]:
    """Milliseconds of forward and of backward, by events on the stream."""
    forget_gradients(inputs)
    start, middle, stop = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    # The device is kept busy while the host queues the block, so that launches are not what is measured.
    torch.cuda._sleep(20_000_000)
    start.record()
    y_TD = block(inputs, rule)
    middle.record()
    y_TD.backward(dy_TD)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(middle), middle.elapsed_time(stop)


def memory_of(block: Block, inputs: Inputs, dy_TD: Tensor, rule: RouterRule) -> dict[str, float]:
    """MiB that forward leaves for backward, and the peak of a step."""
    forget_gradients(inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y_TD = block(inputs, rule)
    kept = torch.cuda.memory_allocated() - before - y_TD.nbytes
    y_TD.backward(dy_TD)
    torch.cuda.synchronize()
    return {"kept_mib": kept / 2**20, "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}


def forget_gradients(inputs: Inputs) -> None:
    for leaf in inputs:
        leaf.grad = None


if __name__ == "__main__":
    main()
