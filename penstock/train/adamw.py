"""AdamW (arXiv 1711.05101) with float32 masters, on the device or streamed from host memory.

A float32 value is its own master. A value of a smaller type is a rounded copy of its master.

`FusedAdamW` has everything on the device and updates in one pass over memory. `StreamedAdamW` has the same interface:

    host      masters and moments, float32, pinned            12 bytes for each value of a bfloat16 parameter
    device    parameters, gradients, and two chunks at a time (penstock/parallel/copies.py)

A chunk is copied in, updated by the same kernels, and copied out while the next one arrives. A step costs the time to
move 12 bytes for each value one way (both directions run at once), once for any number of micro-batches. A value that
is its own master (FSDP2's shards among them) stays on the device; only its moments are on the host, 8 bytes each.

Chunks are cut at multiples of the widest CPU vector, because PyTorch's AdamW on CPUs rounds the last values of a tensor
differently from full vectors. So both classes agree to the bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim.adamw import adamw

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


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and stacks of matrices, not to biases and norms."""
    *modules, last = name.lower().split(".")
    return parameter.ndim >= 2 and "bias" not in last and not any("norm" in part for part in modules)


def is_own_master(value: Tensor) -> bool:
    """Whether a value is precise enough to be updated directly."""
    return value.dtype.itemsize >= torch.float32.itemsize


@dataclass(frozen=True, kw_only=True)
class AdamWUpdate:
    """Tensors of one shape on one device for an update; `master` and the moments are updated in place."""

    master: Tensor
    gradient: Tensor
    moment1: Tensor
    moment2: Tensor
    is_decayed: bool


@torch.no_grad()
def update_all(
    updates: Sequence[AdamWUpdate], step: Tensor, learning_rate: float, settings: Optimizer, divisor: float = 1.0
) -> None:
    """Make one step of AdamW, on tensors with elements. The host does not wait.

    `step` is a float32 scalar on the same device, the number of earlier steps; unchanged. Gradients are divided by
    `divisor` in place, in the same pass over memory.
    """
    # Filled on the device: a copy from the host would wait for the device.
    scale = None if divisor == 1.0 else torch.full_like(step, divisor)
    for is_decayed_ in (True, False):
        group = [update for update in updates if update.is_decayed is is_decayed_]
        if not group:
            continue
        # Fused on CPUs too: it is deterministic, since values are independent, and passes over memory once.
        adamw(
            [update.master for update in group],
            [update.gradient for update in group],
            [update.moment1 for update in group],
            [update.moment2 for update in group],
            [],  # maxima, of AMSGrad only
            # adamw increments one counter for each tensor, so it gets views of one temporary vector.
            list(step.repeat(len(group))),
            fused=True,
            grad_scale=scale,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=learning_rate,
            weight_decay=settings.weight_decay if is_decayed_ else 0.0,
            eps=settings.epsilon,
            maximize=False,
        )


class FusedAdamW:
    """AdamW with all state on the device.

    `values` are updated in place; decay depends on the name, and some may be empty. Every update reads the float32
    `gradients`, of the same shapes.
    """

    def __init__(self, values: Mapping[str, Tensor], gradients: Mapping[str, Tensor], settings: Optimizer) -> None:
        self.masters = {name: one if is_own_master(one) else one.float() for name, one in values.items()}
        self.moments1 = {name: torch.zeros_like(master) for name, master in self.masters.items()}  # mean of gradients
        self.moments2 = {name: torch.zeros_like(master) for name, master in self.masters.items()}  # of their squares
        self.step = torch.zeros((), device=next(iter(values.values())).device)  # float32: number of updates
        self._settings = settings
        self._updates = [
            AdamWUpdate(
                master=master,
                gradient=gradients[name],
                moment1=self.moments1[name],
                moment2=self.moments2[name],
                is_decayed=is_decayed(name, master),
            )
            for name, master in self.masters.items()
            if master.numel()
        ]
        self._rounded = {name: one for name, one in values.items() if not is_own_master(one)}
        self.host_bytes = 0
        apart = [self.masters[name] for name in self._rounded]  # masters that are no parameters
        self.device_bytes = sum(tensor.nbytes for tensor in (*apart, *self.moments1.values(), *self.moments2.values()))

    def update(self, learning_rate: float, divisor: float = 1.0) -> None:
        """Update every master from its gradient, divided by `divisor`, and the values with it."""
        update_all(self._updates, self.step, learning_rate, self._settings, divisor)
        self.step += 1
        self._round()

    def settle(self) -> None:
        """Wait until host tensors may be read or filled."""

    def loaded(self) -> None:
        """Continue from filled masters, moments and `step`: values follow their masters."""
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        if self._rounded:
            torch._foreach_copy_(list(self._rounded.values()), [self.masters[name] for name in self._rounded])


BYTES = 12
"""Master and two moments of one value."""

UNIT = ALIGNMENT // torch.float32.itemsize
"""Chunks are cut at multiples of this number of values."""


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """Consecutive values of one tensor."""

    value: Tensor  # on the device; its own master if `state` has none
    gradient: Tensor  # on the device
    state: tuple[Tensor, ...]  # on the host: moments, then the master
    is_decayed: bool

    def update(self, state: Sequence[Tensor]) -> AdamWUpdate:
        """The update, with the state on the device."""
        moment1, moment2, *master = state
        return AdamWUpdate(
            master=master[0] if master else self.value,
            gradient=self.gradient,
            moment1=moment1,
            moment2=moment2,
            is_decayed=self.is_decayed,
        )


class StreamedAdamW:
    """AdamW with state in host memory; arguments and attributes as of `FusedAdamW`, with contiguous tensors.

    Separate masters and all moments are host tensors. They may be read or filled between `settle` and the next
    `update`. `chunk_bytes` is the device memory of one of the two chunks.
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
        self.device_bytes = 2 * buffer_bytes(self._state)  # one chunk is updated while another arrives or leaves

    def update(self, learning_rate: float, divisor: float = 1.0) -> None:
        """See `FusedAdamW.update`."""
        self._stream.run(self._state, partial(self._work, learning_rate, divisor))
        self.step += 1  # on the current stream, behind the updates that read it

    def settle(self) -> None:
        """Wait until host tensors may be read or filled."""
        self._stream.finish()

    @torch.no_grad()
    def loaded(self) -> None:
        """See `FusedAdamW.loaded`."""
        for name, value in self._rounded.items():
            value.copy_(self.masters[name])

    def _cut(self, values: Mapping[str, Tensor], gradients: Mapping[str, Tensor], units: int) -> Iterator[list[_Slice]]:
        """Cut all tensors into chunks of at most this number of units."""
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
