"""Initial weights. Every tensor is drawn from a generator of its own, seeded by the run's seed and the tensor's name.

So a weight does not depend on how many layers, stages or ranks stand before it: any layout starts from the same model.
A rank that holds a part of a tensor draws the whole and keeps its part; experts are drawn one by one, and only those
that the rank holds.
"""

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from penstock.layout.pieces import Cut, pieces
from penstock.models.linear import Embedding, Linear
from penstock.models.norm import RMSNorm
from penstock.moe.experts import Experts
from penstock.parallel.shard import own_rows


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))


@dataclass(frozen=True)
class Draw:
    """The values of one tensor of the whole model.

    Attributes:
        seed: of the run.
        name: of the tensor.
        std: standard deviation.
    """

    seed: int
    name: str
    std: float

    def __call__(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """All of them, float32."""
        values = torch.empty(shape, dtype=torch.float32, device=device)
        return values.normal_(0.0, self.std, generator=_generator(self.seed, self.name, device))


def _draw(local: Tensor, part_shape: tuple[int, ...], rows: tuple[int, int], cuts: tuple[Cut, ...], draw: Draw) -> None:
    """Fill what a rank holds of one tensor. Normal in float32, then rounded: bf16 and float32 start from equal numbers.

    Args:
        local: rows of the rank's part.
        part_shape: shape of the whole part.
        rows: first and last + 1 of the rows in `local`.
        cuts: of the part from the whole.
        draw: gives the whole.
    """
    shape = list(part_shape)
    for cut in cuts:
        shape[cut.dim] *= cut.count
    values = draw(tuple(shape), local.device)
    for piece in pieces(tuple(shape), cuts, rows):
        here = tuple(slice(start, start + size) for start, size in zip(piece.here, piece.sizes, strict=True))
        there = tuple(slice(start, start + size) for start, size in zip(piece.whole, piece.sizes, strict=True))
        local[here].copy_(values[there])


@torch.no_grad()
def initialize(model: nn.Module, seed: int, std: float) -> None:
    """Fill all parameters: norms with one, everything else with normal values. Buffers become zero.

    Args:
        model: on a real device, contents undefined; parameters may be parts of the whole, sharded by FSDP2 besides.
        seed: of the run.
        std: standard deviation.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            local, rows = own_rows(parameter)
            draw = Draw(seed, f"{path}.{name}", std)
            if isinstance(module, RMSNorm):
                local.fill_(1.0)
            elif isinstance(module, Experts):
                _draw_experts(local, tuple(parameter.shape), rows, module.cuts[name], draw)
            else:
                cuts = module.cuts[name] if isinstance(module, (Linear, Embedding)) else ()
                _draw(local, tuple(parameter.shape), rows, cuts, draw)
        for buffer in module.buffers(recurse=False):
            buffer.zero_()


def _draw_experts(
    local: Tensor, part_shape: tuple[int, ...], rows: tuple[int, int], cuts: tuple[Cut, ...], draw: Draw
) -> None:
    """Each expert is a tensor of its own: dim 0 counts them, and the other cuts move one dim forward."""
    group = next((cut.index for cut in cuts if cut.dim == 0), 0)
    inner = tuple(replace(cut, dim=cut.dim - 1) for cut in cuts if cut.dim > 0)
    for matrix, expert in zip(
        local, range(group * part_shape[0] + rows[0], group * part_shape[0] + rows[1]), strict=True
    ):
        own = replace(draw, name=f"{draw.name}.{expert}")
        _draw(matrix, part_shape[1:], (0, part_shape[1]), inner, own)
