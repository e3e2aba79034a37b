"""Initial weights. Every tensor is drawn from a generator of its own, seeded by the run's seed and the tensor's name.

So a weight does not depend on how many layers, stages or ranks stand before it: any layout starts from the same model.
A rank that holds a part of a tensor draws the whole and keeps its part; experts are drawn one by one, and only those
that the rank holds.

Values are drawn in float32. A bfloat16 parameter starts from the rounded value, its master from the value itself: from
a rounded one, it would have to move by half a step of bfloat16 before the first weight changes, and a layout whose
weights are their own masters (FSDP2) would learn otherwise than one with rounded copies.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.layout.sharding import LocalSlice, global_shape, local_slices
from penstock.models.norm import Norm
from penstock.models.parameters import cuts_of
from penstock.moe.experts import GroupedExperts
from penstock.moe.router import TopKRouter
from penstock.parallel.shard import ShardedTensor, own_rows


@dataclass(frozen=True, kw_only=True)
class ParamInit:
    """The values of one parameter of the whole model.

    Attributes:
        seed: of the run.
        name: of the parameter.
        std: standard deviation.
        device: where to draw; a CPU and a GPU draw other numbers.
        constant: this value instead, for all of them.
        by_row: dim 0 counts tensors that are drawn one by one (experts).
    """

    seed: int
    name: str
    std: float
    device: torch.device
    constant: float | None = None
    by_row: bool = False

    def fill(self, part: ShardedTensor) -> None:
        """Put the values of a part in place."""
        if self.constant is not None:
            part.tensor.fill_(self.constant)
        elif self.by_row:
            for row, own in _by_row(part.pieces):
                values = self._values(f"{self.name}.{row}", part.shape[1:])
                for place, piece in own:
                    part.tensor[place][_region(piece.here[1:], piece)].copy_(values[_region(piece.whole[1:], piece)])
        else:
            values = self._values(self.name, part.shape)
            for piece in part.pieces:
                part.tensor[_region(piece.here, piece)].copy_(values[_region(piece.whole, piece)])

    def _values(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """All of a tensor, float32."""
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "big"))
        return torch.empty(shape, device=self.device).normal_(0.0, self.std, generator=generator)


def _by_row(rectangles: Iterable[LocalSlice]) -> Iterator[tuple[int, list[tuple[int, LocalSlice]]]]:
    """Each row of the whole that is here, with the local row and the rectangle of each of its pieces."""
    rows: dict[int, list[tuple[int, LocalSlice]]] = {}
    for piece in rectangles:
        for offset in range(piece.sizes[0]):
            rows.setdefault(piece.whole[0] + offset, []).append((piece.here[0] + offset, piece))
    yield from rows.items()


def _region(offsets: tuple[int, ...], piece: LocalSlice) -> tuple[slice, ...]:
    """A rectangle's place; without dim 0 if `offsets` are."""
    sizes = piece.sizes[len(piece.sizes) - len(offsets) :]
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


@torch.no_grad()
def initialize(model: nn.Module, seed: int, std: float) -> None:
    """Fill all parameters: norms with one, biases with zero, all else with normal values. Buffers become zero.

    Args:
        model: on a real device, contents undefined; parameters may be parts of the whole, sharded by FSDP2 besides.
        seed: of the run.
        std: standard deviation.
    """
    for module, name, parameter, draw in _draws(model, seed, std):
        local, rows = own_rows(parameter)
        cuts = cuts_of(module, name)
        shape = global_shape(tuple(parameter.shape), cuts)
        draw.fill(ShardedTensor(tensor=local, shape=shape, pieces=local_slices(shape, cuts, rows)))
    for buffer in model.buffers():
        buffer.zero_()


@torch.no_grad()
def initialize_masters(models: Iterable[nn.Module], parts: Mapping[str, ShardedTensor], seed: int, std: float) -> None:
    """Give masters the values that bfloat16 parameters were rounded from.

    Args:
        models: initialized.
        parts: float32 masters by `model.NAME`, perhaps rows of parameters, on any device.
        seed: of the run.
        std: standard deviation.
    """
    for model in models:
        for _, _, parameter, draw in _draws(model, seed, std):
            if parameter.dtype != torch.float32:
                draw.fill(parts[f"model.{draw.name}"])


def _draws(model: nn.Module, seed: int, std: float) -> Iterator[tuple[nn.Module, str, nn.Parameter, ParamInit]]:
    """Every parameter, with its module, its name there, and its values."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            draw = ParamInit(
                seed=seed,
                name=f"{path}.{name}",
                std=std,
                device=parameter.device,
                constant=_constant(module, name),
                by_row=isinstance(module, GroupedExperts),
            )
            yield module, name, parameter, draw


def _constant(module: nn.Module, name: str) -> float | None:
    """What a parameter begins with if it is not drawn. A router's bias is: its experts must not begin alike."""
    if isinstance(module, Norm):
        return 1.0
    return 0.0 if "bias" in name and not isinstance(module, TopKRouter) else None
