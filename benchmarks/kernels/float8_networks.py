"""One network in 16 and in 8 bits, forward and backward: held against float32, then timed by replayed graphs.

Forward is captured alone and together with backward, because backward needs what forward keeps; its own time is the
difference. Gradients of matrices are added to float32 sums, as in a run. Dense networks stand behind a norm, which
leaves its rows in 8 bits, by rows and by columns, and nothing in 16 (`penstock.kernels.float8.norm`); SwiGLU leaves the
activation and its gradient so. What quantizes alone there is the gradient of the output, once in each network.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.float8_layers import FORM, HAS_TORCH, RECIPES, TOKENS
from benchmarks.kernels.measure import DEVICE, DTYPE, Ways, decibels, replay_in_turns
from penstock.kernels import norm, reference, swiglu
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import Recipe
from penstock.kernels.float8.triton_operators import TRITON, WITH_TORCH
from penstock.models.linear import Float8Weight, float8_linear, float8_network, linear_into, recipe_of

PLAIN = "16 bits"
"""The way that the others are compared with."""

EPSILON = 1e-6

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

    def both(self, way: str) -> Tensor:
        """Both passes. Returns the gradient of the input; those of matrices are in the sums."""
        y = self.ways[way]()
        dx, *_ = torch.autograd.grad(y, self.leaves, self.dy, allow_unused=True)
        return dx

    def check(self, way: str, expected: list[Tensor]) -> dict[str, float]:
        """Decibels of the output and of each gradient over its distance from float32; overwrites the sums."""
        for total in self.sums.values():
            total.zero_()
        y = self.ways[way]()
        dx, *_ = torch.autograd.grad(y, self.leaves, self.dy, allow_unused=True)
        results = {"y": y.detach()[: self.rows], "dx": dx} | dict(self.sums)
        noise = {name: decibels(*pair) for name, *pair in zip(results, results.values(), expected, strict=True)}
        assert min(noise.values()) > LEAST_DB, f"{self.name}, {way}: {noise} dB, the bar is {LEAST_DB}"
        return noise


def measure(network: Network, rounds: int) -> dict[str, Any]:
    """Decibels, milliseconds and TFLOP/s of each way, and how many times as fast as 16 bits it is."""
    expected = network.exact()
    noise = {name: network.check(name, expected) for name in network.ways}
    del expected
    both = {name: partial(network.both, name) for name in network.ways}
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


def normal(generator: torch.Generator, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=generator, device=DEVICE).to(DTYPE)


# Name, rows, hidden size and width of a matrix behind a norm; a network's matrix is gate and up, and one narrows again.
DENSE = (
    ("V3 norm, query and key down", TOKENS, 7168, 2112),
    ("V3 norm, dense network", TOKENS, 7168, 36864),
)
TINY = (("tiny norm, product", 40, 128, 64), ("tiny norm, network", 40, 128, 256))


@dataclass(frozen=True)
class Operands:
    """Input, scale of the norm, the matrix and perhaps the one that narrows again, and sums of gradients."""

    x_TD: Tensor
    scale_D: Tensor
    matrices: tuple[Tensor, ...]
    sums: tuple[Tensor, ...]


def dense_network(name: str, tokens: int, hidden: int, width: int) -> Network:
    """A product or a SwiGLU network behind a norm, in 16 bits and by each recipe."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    sizes = [(width, hidden), *([(hidden, width // 2)] if name.endswith("network") else [])]
    operands = Operands(
        x_TD=normal(generator, tokens, hidden).requires_grad_(),
        scale_D=(1 + 0.1 * normal(generator, hidden)).requires_grad_(),
        matrices=tuple((normal(generator, *size) / size[1] ** 0.5).requires_grad_() for size in sizes),
        sums=tuple(torch.zeros(size, device=DEVICE) for size in sizes),
    )
    dy_TF = normal(generator, tokens, sizes[-1][0])
    ways: Ways = {PLAIN: partial(in_16_bits, operands)}
    for recipe in RECIPES.values():
        ways[recipe.name] = partial(in_8_bits, operands, *_weights(operands, recipe))
    return Network(
        name=name,
        rows=tokens,
        flops=2.0 * tokens * sum(matrix.numel() for matrix in operands.matrices),
        leaves=(operands.x_TD, operands.scale_D, *operands.matrices),
        sums=dict(zip(("gate-up", "down") if len(sizes) > 1 else ("weight",), operands.sums, strict=True)),
        dy=dy_TF,
        ways=ways,
        exact=partial(exact, operands, dy_TF),
    )


def in_16_bits(operands: Operands) -> Tensor:
    """Norm, cuBLAS's products, SwiGLU between them; gradients of matrices go to the sums."""
    y = linear_into(operands.sums[0], norm.rms_norm(operands.x_TD, operands.scale_D, EPSILON), operands.matrices[0])
    if len(operands.matrices) == 1:
        return y
    return linear_into(operands.sums[1], swiglu.swiglu(y), operands.matrices[1])


def in_8_bits(operands: Operands, *weights: Float8Weight) -> Tensor:
    """The same by what a layer in 8 bits calls."""
    rule = weights[0].rule
    given = operands.x_TD, None, operands.scale_D, EPSILON, recipe_of(rule), rule.forward
    normed_TD, _, both = rule.operators.rms_norm(*given, columns=True, keep_plain=False)
    network = float8_linear if len(weights) == 1 else float8_network
    return network(normed_TD, *weights, x_float8=both)


def _weights(operands: Operands, recipe: Recipe) -> Iterator[Float8Weight]:
    """The matrices with copies that are made once, as once an optimizer step."""
    rule = Float8Rule(dense=recipe, forward=FORM, gradient=FORM, operators=WITH_TORCH if HAS_TORCH else TRITON)
    for parameter, total in zip(operands.matrices, operands.sums, strict=True):
        cached = rule.operators.quantize_weight(parameter.detach(), recipe, FORM)
        yield Float8Weight(parameter_FD=parameter, cached=cached, main_grad=total, weight_grads=None, rule=rule)


def exact(operands: Operands, dy_TF: Tensor) -> list[Tensor]:
    """Output and gradients of the input and the matrices by the definitions, in float32."""
    leaves = [leaf.detach().float().requires_grad_() for leaf in (operands.x_TD, *operands.matrices)]
    y = F.linear(reference.rms_norm(leaves[0], operands.scale_D.detach().float(), EPSILON), leaves[1])
    if len(leaves) > 2:
        y = F.linear(reference.swiglu(y), leaves[2])
    return [y.detach(), *torch.autograd.grad(y, leaves, dy_TF.float())]
