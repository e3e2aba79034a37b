"""What one rank holds of the parameters, said once for gradients, norms, optimizer and checkpoints.

A parameter of the whole model reaches a rank in three steps:

    cuts      tensor and expert parallelism give the rank a part of it (penstock/layout/sharding.py)
    data      ranks on this axis hold the same part and see different tokens; they may divide its rows ("shard")
    partial   ranks on these axes hold the same part too, and each has only a part of its gradient: a norm's weight
              under tensor parallelism (each rank sees some positions), an embedding that two pipeline stages use

The gradient of the global batch is therefore the sum over `data` and over every axis of `partial`.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from penstock.layout.sharding import Cut, LocalSlice, local_shape, local_slices
from penstock.parallel.axes import Axis


@dataclass(frozen=True, kw_only=True)
class ParamShard:
    """One trained parameter, as this rank holds it.

    Attributes:
        name: in the whole model; the same on every rank and layout.
        parameter: as its module has it: the local part as a plain tensor, or as FSDP2's DTensor over `data`.
        shape: of the whole parameter.
        cuts: which part of it is ours, before `data` divides it.
        data: ranks that hold the same part and see different tokens.
        partial: further axes over which the gradient is summed.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    data: Axis
    partial: tuple[Axis, ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of our part, before `data` divides it."""
        return local_shape(self.shape, self.cuts)

    def pieces(self, rows: tuple[int, int] | None = None) -> tuple[LocalSlice, ...]:
        """Where our part, or some of its rows, lies in the whole."""
        return local_slices(self.shape, self.cuts, rows)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor of a checkpoint, as this rank holds it.

    Attributes:
        tensor: the local values; plain, on any device.
        shape: of the whole tensor.
        pieces: the rectangles of `tensor` and their places in the whole; together they are all of `tensor`.
        writes: this rank saves it; of the ranks that hold the same values one does. All of them load it.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    pieces: tuple[LocalSlice, ...]
    writes: bool = True


def whole(tensor: Tensor, *, writes: bool = True) -> Part:
    """A tensor that this rank holds whole."""
    shape = tuple(tensor.shape)
    return Part(tensor=tensor, shape=shape, pieces=local_slices(shape, ()), writes=writes)
