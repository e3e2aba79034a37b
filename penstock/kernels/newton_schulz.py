"""Orthogonalization by the quintic Newton-Schulz iteration of Muon (https://kellerjordan.github.io/posts/muon).

For a matrix with singular values U S V^T, the result is about U V^T. After division by the Frobenius norm, each step is

    X <- a X + (b G + c G G) X        G = X X^T

which maps singular values by a s + b s^3 + c s^5. The coefficients raise small values fast and keep all of them
between 0.68 and 1.14 at the end; they do not converge to 1. A matrix with more rows than columns is transposed first.
Two of the three products are symmetric; on GPUs a kernel computes half of them (penstock/kernels/gram.py).
"""

import torch
from torch import Tensor

from penstock.kernels.gram import gram, has_kernel

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7  # least norm that a matrix is divided by


@torch.no_grad()
def orthogonalize(x_EFD: Tensor, steps: int) -> Tensor:
    """Orthogonalize each F x D matrix of a stack, in the dtype of x."""
    if x_EFD.shape[-2] > x_EFD.shape[-1]:
        return orthogonalize(x_EFD.mT, steps).mT
    if x_EFD.device.type == "cpu" and len(x_EFD) > 1:  # bits of a result do not depend on the rest of the stack
        return torch.cat([orthogonalize(matrix[None], steps) for matrix in x_EFD])
    a, b, c = COEFFICIENTS
    norm_E = torch.linalg.vector_norm(x_EFD, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x_EFD = x_EFD / norm_E.clamp(min=EPSILON).to(x_EFD.dtype)
    for _ in range(steps):
        if has_kernel(x_EFD):
            gram_EFF = gram(x_EFD)
            factor_EFF = gram(gram_EFF, addend_EFF=gram_EFF, scale=c, addend_scale=b)
        else:
            gram_EFF = x_EFD @ x_EFD.mT
            factor_EFF = torch.baddbmm(gram_EFF, gram_EFF, gram_EFF, beta=b, alpha=c)
        x_EFD = torch.baddbmm(x_EFD, factor_EFF, x_EFD, beta=a)
    return x_EFD
