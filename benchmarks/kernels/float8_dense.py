"""Dense products behind a norm in 16 and in 8 bits, as a layer has them: part of `benchmarks.kernels.float8_ffn`.

The norm leaves its rows in 8 bits, by rows and by columns, and nothing in 16 (`penstock.kernels.float8.norm`); SwiGLU
leaves the activation and its gradient so. What quantizes alone is the gradient of the output, once in each network.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.float8_layers import DEVICE, FORM, HAS_TORCH, ON_GPU, RECIPES, TOKENS, Ways
from benchmarks.kernels.float8_networks import PLAIN, Network
from penstock.kernels import norm, reference, swiglu
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.recipes import Recipe
from penstock.kernels.float8.triton_operators import TRITON, WITH_TORCH
from penstock.models.float8_linear import Float8Weight, float8_linear, float8_network, recipe_of
from penstock.models.linear import linear_into

EPSILON = 1e-6


@dataclass(frozen=True)
class Shape:
    """A matrix behind a norm; with `narrow` a SwiGLU network, whose gate and up are the matrix."""

    name: str
    tokens: int
    hidden: int
    width: int
    narrow: bool = False


SHAPES = (
    Shape("V3 norm, query and key down", TOKENS, 7168, 2112),
    Shape("V3 norm, dense network", TOKENS, 7168, 36864, narrow=True),
)
TINY = (Shape("tiny norm, product", 40, 128, 64), Shape("tiny norm, network", 40, 128, 256, narrow=True))


@dataclass(frozen=True)
class Operands:
    """Input, scale of the norm, the matrix and perhaps the one that narrows again, and sums of gradients."""

    x_TD: Tensor
    scale_D: Tensor
    matrices: tuple[Tensor, ...]
    sums: tuple[Tensor, ...]


def networks(options: argparse.Namespace) -> Iterator[Network]:
    """Those whose name is asked for."""
    for shape in TINY if options.tiny else SHAPES:
        if options.only in shape.name:
            yield network_of(shape)


def network_of(shape: Shape) -> Network:
    """Random operands, in 16 bits and by each recipe."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float32

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=DEVICE).to(dtype)

    sizes = [(shape.width, shape.hidden)]
    if shape.narrow:
        sizes.append((shape.hidden, shape.width // 2))
    operands = Operands(
        x_TD=normal(shape.tokens, shape.hidden).requires_grad_(),
        scale_D=(1 + 0.1 * normal(shape.hidden)).requires_grad_(),
        matrices=tuple((normal(*size) / size[1] ** 0.5).requires_grad_() for size in sizes),
        sums=tuple(torch.zeros(size, device=DEVICE) for size in sizes),
    )
    dy_TF = normal(shape.tokens, sizes[-1][0])
    ways: Ways = {PLAIN: partial(in_16_bits, operands)}
    for recipe in RECIPES.values():
        ways[recipe.name] = partial(in_8_bits, operands, *_weights(operands, recipe))
    return Network(
        name=shape.name,
        rows=shape.tokens,
        flops=2.0 * shape.tokens * sum(one.numel() for one in operands.matrices),
        leaves=(operands.x_TD, operands.scale_D, *operands.matrices),
        sums=dict(zip(("gate-up", "down") if shape.narrow else ("weight",), operands.sums, strict=True)),
        dy=dy_TF,
        ways=ways,
        exact=partial(exact, operands, dy_TF),
    )


def in_16_bits(operands: Operands) -> Tensor:
    """Norm, cuBLAS's products, SwiGLU between them; gradients of matrices go to the sums."""
    normed_TD = norm.rms_norm(operands.x_TD, operands.scale_D, EPSILON)
    if len(operands.matrices) == 1:
        return linear_into(operands.sums[0], normed_TD, operands.matrices[0])
    gate_up_T2F = linear_into(operands.sums[0], normed_TD, operands.matrices[0])
    return linear_into(operands.sums[1], swiglu.swiglu(gate_up_T2F), operands.matrices[1])


def in_8_bits(operands: Operands, *weights: Float8Weight) -> Tensor:
    """The same by what a layer in 8 bits calls."""
    rule = weights[0].rule
    given = operands.x_TD, None, operands.scale_D, EPSILON, recipe_of(rule), rule.forward
    normed_TD, _, both = rule.operators.rms_norm(*given, columns=True, keep_plain=False)
    network = float8_linear if len(weights) == 1 else float8_network
    return network(normed_TD, *weights, x_float8=both)


def _weights(operands: Operands, recipe: Recipe) -> list[Float8Weight]:
    """The matrices with copies that are made once, as once an optimizer step."""
    rule = Float8Rule(dense=recipe, forward=FORM, gradient=FORM, operators=WITH_TORCH if HAS_TORCH else TRITON)
    return [
        Float8Weight(
            parameter_FD=parameter,
            cached=rule.operators.quantize_weight(parameter.detach(), recipe, FORM),
            main_grad=total,
            weight_grads=None,
            rule=rule,
        )
        for parameter, total in zip(operands.matrices, operands.sums, strict=True)
    ]


def exact(operands: Operands, dy_TF: Tensor) -> list[Tensor]:
    """Output and gradients of the input and the matrices by the definitions, in float32."""
    leaves = [one.detach().float().requires_grad_() for one in (operands.x_TD, *operands.matrices)]
    y = F.linear(reference.rms_norm(leaves[0], operands.scale_D.detach().float(), EPSILON), leaves[1])
    if len(leaves) > 2:
        y = F.linear(reference.swiglu(y), leaves[2])
    return [y.detach(), *torch.autograd.grad(y, leaves, dy_TF.float())]
