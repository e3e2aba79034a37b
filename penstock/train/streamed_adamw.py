"""AdamW whose masters and moments live in host memory and pass through the device during a step.

    host      masters and moments, float32, pinned            12 bytes for each value of a bfloat16 parameter
    device    parameters, gradients, and two chunks at a time (penstock/parallel/copies.py)

A chunk comes, is updated from the gradients and rounded into its parameters by the kernels of
`penstock.train.adamw.FusedAdamW`, and leaves, while the next one comes. So a step costs the time to move 12 bytes for
each value one way (both ways run at once), once for any number of micro-batches.

A value that is its own master (a float32 parameter, FSDP2's shards among them) stays where modules and FSDP2 read it;
of such a one only the moments are on the host, 8 bytes for each value.

Chunks are cut at multiples of the widest vector of a processor: PyTorch's AdamW on CPUs rounds the last values of a
tensor another way than those that fill a vector. So results are those of `FusedAdamW` to the bit. On a CPU the host's
memory is the device's; the same code runs, and gains nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.config.training import Optimizer
from penstock.parallel.copies import (
    ALIGNMENT,
    CHUNK_BYTES,
    ChunkStream,
    TensorSlice,
    buffer_bytes,
    cut_into_chunks,
    host_tensors,
)
from penstock.train.adamw import Update, is_decayed, is_own_master, update_all

BYTES = 12
"""On the way for one value: master and two moments."""

UNIT = ALIGNMENT // torch.float32.itemsize
"""Values; chunks are cut at multiples of it."""


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """Consecutive values of one tensor, as they wait for their turn.

    Attributes:
        value: on the device; its own master if `state` has none.
        gradient: on the device.
        state: on the host: moments, then the master.
        is_decayed: whether weight decay applies.
    """

    value: Tensor
    gradient: Tensor
    state: tuple[Tensor, ...]
    is_decayed: bool

    def update(self, state: Sequence[Tensor]) -> Update:
        """What to do once its state has come to the device."""
        moment1, moment2, *master = state
        return Update(
            master=master[0] if master else self.value,
            gradient=self.gradient,
            moment1=moment1,
            moment2=moment2,
            is_decayed=self.is_decayed,
        )


class StreamedAdamW:
    """The update of some tensors; arguments and attributes as of `FusedAdamW`.

    Masters that are not the values themselves, and all moments, are host tensors. They may be read or filled after
    `settle` and until the next `update`.

    Args:
        values: contiguous.
        gradients: contiguous.
        settings: of AdamW.
        chunk_bytes: of device memory for one chunk; there are two.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        settings: Optimizer,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        device = next(iter(values.values())).device
        apart = [name for name, value in values.items() if not is_own_master(value)]
        shapes = [values[name].shape for name in (*apart, *values, *values)]
        host = iter(host_tensors(shapes, torch.float32, device))
        own = dict(zip(apart, host, strict=False))
        self.masters = {name: own.get(name, value) for name, value in values.items()}
        self.moments1 = {name: next(host).zero_() for name in values}
        self.moments2 = {name: next(host).zero_() for name in values}
        for name, master in own.items():
            master.copy_(values[name])
        self.step = torch.zeros((), device=device)
        self._settings = settings
        self._rounded = {name: values[name] for name in apart}
        self._chunks = list(self._cut(values, gradients, max(1, chunk_bytes // (BYTES * UNIT))))
        self._state = [[tensor for one in chunk for tensor in one.state] for chunk in self._chunks]
        self._stream = ChunkStream(device)
        self.host_bytes = sum(
            tensor.nbytes for tensor in (*own.values(), *self.moments1.values(), *self.moments2.values())
        )
        self.device_bytes = 2 * buffer_bytes(self._state)

    def update(self, learning_rate: float, divisor: float = 1.0) -> None:
        """Update every master from its gradient, once that is divided by `divisor`, and the values with it."""
        self._stream.run(self._state, partial(self._work, learning_rate, divisor))
        self.step += 1

    def settle(self) -> None:
        """Wait until masters and moments may be read or filled on the host."""
        self._stream.finish()

    @torch.no_grad()
    def loaded(self) -> None:
        """Go on from masters, moments and a `step` that somebody has filled: values follow their masters."""
        for name, value in self._rounded.items():
            value.copy_(self.masters[name])

    def _cut(self, values: Mapping[str, Tensor], gradients: Mapping[str, Tensor], units: int) -> Iterator[list[_Slice]]:
        """Cut all tensors into chunks of so many units."""
        names = list(values)
        flat = {name: value.detach().view(-1) for name, value in values.items()}
        for chunk in cut_into_chunks([-(-flat[name].numel() // UNIT) for name in names], units):
            yield [self._slice(names[piece.index], flat, gradients, piece) for piece in chunk]

    def _slice(
        self, name: str, flat: Mapping[str, Tensor], gradients: Mapping[str, Tensor], piece: TensorSlice
    ) -> _Slice:
        """The values of a piece, which is counted in units."""
        part = slice(piece.start * UNIT, piece.stop * UNIT)
        state = [self.moments1[name], self.moments2[name]]
        if name in self._rounded:
            state.append(self.masters[name])
        return _Slice(
            value=flat[name][part],
            gradient=gradients[name].view(-1)[part],
            state=tuple(tensor.view(-1)[part] for tensor in state),
            is_decayed=is_decayed(name, self.masters[name]),
        )

    @torch.no_grad()
    def _work(self, learning_rate: float, divisor: float, index: int, state: list[Tensor]) -> None:
        """Update one chunk, whose state is on the device."""
        slices, arrived = self._chunks[index], iter(state)
        updates = [one.update([next(arrived) for _ in one.state]) for one in slices]
        update_all(updates, self.step, learning_rate, self._settings, divisor)
        rounded = [
            (one.value, update.master)
            for one, update in zip(slices, updates, strict=True)
            if update.master is not one.value
        ]
        if rounded:
            values, masters = zip(*rounded, strict=True)
            torch._foreach_copy_(values, masters)
