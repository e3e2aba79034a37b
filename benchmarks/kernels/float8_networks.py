"""One network in 16 and in 8 bits, forward and backward: held against float32, then timed by replayed graphs.

Forward is captured alone and together with backward, because backward needs what forward keeps; its own time is the
difference. Gradients of matrices are added to float32 sums, as in a run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.float8_layers import Ways, decibels
from benchmarks.kernels.replays import replay_in_turns

PLAIN = "16 bits"
"""The way that the others are compared with."""

LEAST_DB = 20.0
"""Less than of one product (`float8_layers.LEAST_DB`): the second reads what the first gave, quantized once more, and
SwiGLU between them multiplies two numbers of the first, so their errors add up; gradients pass by a third product."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network with its rows.

    Attributes:
        name: for tables.
        rows: that hold something; those of the output behind them are not looked at.
        flops: of a forward pass; a backward pass has twice as many.
        leaves: what has gradients, the input first.
        sums: float32, what backward adds the gradients of matrices to, by the name of the gradient.
        dy: gradient of the output.
        ways: to compute the output, from the leaves.
        exact: the output, the gradient of the input and those in `sums` by float32 arithmetic, in this order.
    """

    name: str
    rows: int
    flops: float
    leaves: tuple[Tensor, ...]
    sums: Mapping[str, Tensor]
    dy: Tensor
    ways: Ways
    exact: Callable[[], list[Tensor]]


def measure(network: Network, rounds: int) -> dict[str, object]:
    """Decibels, milliseconds and TFLOP/s of each way, and how many times as fast as 16 bits it is."""
    expected = network.exact()
    noise = {name: check(network, name, expected) for name in network.ways}
    del expected
    both = {name: partial(forward_and_backward, network, name) for name in network.ways}
    # A pass takes milliseconds: what a replay costs beside it does not count.
    forward_ms, not_captured = replay_in_turns(network.ways, rounds, calls=1)
    both_ms, not_captured_whole = replay_in_turns(both, rounds, calls=1)
    return {
        "network": network.name,
        "rows": network.rows,
        "decibels": noise,
        "forward_ms": forward_ms,
        "backward_ms": {name: both_ms[name] - forward_ms[name] for name in network.ways},
        "both_ms": both_ms,
        "tflops": {name: 3 * network.flops / ms / 1e9 for name, ms in both_ms.items()},
        "speed": {name: both_ms[PLAIN] / ms for name, ms in both_ms.items()},
        "not_captured": not_captured | not_captured_whole,
    }


def forward_and_backward(network: Network, way: str) -> Tensor:
    """Both passes. Returns the gradient of the input; those of matrices are in the sums."""
    y = network.ways[way]()
    dx, *_ = torch.autograd.grad(y, network.leaves, network.dy, allow_unused=True)
    return dx


def check(network: Network, way: str, expected: list[Tensor]) -> dict[str, float]:
    """Decibels of the output and of each gradient over its distance from float32.

    Args:
        network: its sums are overwritten.
        way: which is checked.
        expected: what `exact` gave.
    """
    for total in network.sums.values():
        total.zero_()
    y = network.ways[way]()
    dx, *_ = torch.autograd.grad(y, network.leaves, network.dy, allow_unused=True)
    got = {"y": y.detach()[: network.rows], "dx": dx} | dict(network.sums)
    found = {name: decibels(*pair) for name, *pair in zip(got, got.values(), expected, strict=True)}
    assert min(found.values()) > LEAST_DB, f"{network.name}, {way}: {found} dB, the bar is {LEAST_DB}"
    return found


def print_row(row: dict) -> None:
    """One line for each way."""
    for way, found in row["decibels"].items():
        worst = min(found, key=found.__getitem__)
        print(
            f"{row['network']:40} {way:32} {row['forward_ms'][way]:8.3f} {row['backward_ms'][way]:8.3f}"
            f" {row['tflops'][way]:8.0f} {row['speed'][way]:6.2f}   least {found[worst]:.1f} dB ({worst})",
            flush=True,
        )
    for way, reason in row["not_captured"].items():
        print(f"    {way}: launched from Python, no graph holds it: {reason}", flush=True)


def print_head() -> None:
    """Of those lines."""
    print(f"{'':40} {'':32} {'forward':>8} {'backward':>8} {'TFLOP/s':>8} {'speed':>6}", flush=True)
