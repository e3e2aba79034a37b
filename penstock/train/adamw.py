"""AdamW (arXiv 1711.05101) with float32 masters on the device, fused into one pass over memory.

This is the only place that masters and moments are reached through. Whoever keeps them elsewhere
(`penstock/train/adamw.py`) has the same face: three mappings by name, a step count, `update`, `settle` and
`loaded`.

A float32 value is its own master. One of a smaller type is a rounded copy of its master, and follows it.
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
    """Whether weight decay applies: to matrices and stacks of matrices, not to biases and norms.

    Args:
        name: dotted path of the parameter.
        parameter: of any shape.
    """
    *modules, last = name.lower().split(".")
    return parameter.ndim >= 2 and "bias" not in last and not any("norm" in part for part in modules)


def is_own_master(value: Tensor) -> bool:
    """Whether a value is precise enough to be updated itself."""
    return value.dtype.itemsize >= torch.float32.itemsize


@dataclass(frozen=True, kw_only=True)
class AdamWUpdate:
    """Tensors of one shape on one device that the update of some elements needs.

    Attributes:
        master: updated in place.
        gradient: left as it is, but for the divisor.
        moment1: updated in place.
        moment2: updated in place.
        is_decayed: whether weight decay applies.
    """

    master: Tensor
    gradient: Tensor
    moment1: Tensor
    moment2: Tensor
    is_decayed: bool


@torch.no_grad()
def update_all(
    updates: Sequence[AdamWUpdate], step: Tensor, learning_rate: float, settings: Optimizer, divisor: float = 1.0
) -> None:
    """Do one step of AdamW. The host does not wait.

    Args:
        updates: what to update; none is empty.
        step: float32 scalar on the same device: steps done before; left as it is.
        learning_rate: of this step.
        settings: everything else.
        divisor: gradients are divided by it first, where they stand, in the same pass over memory.
    """
    # Filled on the device: a copy from the host would wait for it.
    scale = None if divisor == 1.0 else torch.full_like(step, divisor)
    for is_decayed_ in (True, False):
        group = [update for update in updates if update.is_decayed is is_decayed_]
        if not group:
            continue
        # Fused on CPUs too: each value is computed by itself, so it is deterministic, and it passes over memory once.
        adamw(
            [update.master for update in group],
            [update.gradient for update in group],
            [update.moment1 for update in group],
            [update.moment2 for update in group],
            [],
            # It counts one for each tensor: views of one vector, which are used up.
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
    """The update of some tensors.

    Args:
        values: what is updated, in place, by name; decay goes by name. All on one device. Some may be empty.
        gradients: float32, of the same shapes; the very same tensors are read by every update.
        settings: everything but the learning rate, which comes with each update.

    Attributes:
        masters: the values themselves, or float32 copies of those that are too coarse.
        moments1: mean of the gradients.
        moments2: mean of their squares.
        step: float32 scalar on the device: updates done.
        host_bytes: of memory outside the device.
        device_bytes: of masters that are not the values themselves, moments, and whatever else stays on the device.
    """

    def __init__(self, values: Mapping[str, Tensor], gradients: Mapping[str, Tensor], settings: Optimizer) -> None:
        self.masters = {name: one if is_own_master(one) else one.float() for name, one in values.items()}
        self.moments1 = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.moments2 = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.step = torch.zeros((), device=next(iter(values.values())).device)
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
        apart = [self.masters[name] for name in self._rounded]
        self.device_bytes = sum(tensor.nbytes for tensor in (*apart, *self.moments1.values(), *self.moments2.values()))

    def update(self, learning_rate: float, divisor: float = 1.0) -> None:
        """Update every master from its gradient, once that is divided by `divisor`, and the values with it."""
        update_all(self._updates, self.step, learning_rate, self._settings, divisor)
        self.step += 1
        self._round()

    def settle(self) -> None:
        """Wait until masters and moments may be read or filled on the host, where they are there."""

    def loaded(self) -> None:
        """Go on from masters, moments and a `step` that somebody has filled: values follow their masters."""
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        if self._rounded:
            torch._foreach_copy_(list(self._rounded.values()), [self.masters[name] for name in self._rounded])


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

    def update(self, state: Sequence[Tensor]) -> AdamWUpdate:
        """What to do once its state has come to the device."""
        moment1, moment2, *master = state
        return AdamWUpdate(
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
