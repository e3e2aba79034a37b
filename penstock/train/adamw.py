"""AdamW (arXiv 1711.05101) with float32 masters on the device, fused into one pass over memory.

This is the only place that masters and moments are reached through. Whoever keeps them elsewhere
(`penstock/train/streamed_adamw.py`) has the same face: three mappings by name, a step count, `update`, `settle` and
`loaded`.

A float32 value is its own master. One of a smaller type is a rounded copy of its master, and follows it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from penstock.config.training import Optimizer


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
class Update:
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
    updates: Sequence[Update], step: Tensor, learning_rate: float, settings: Optimizer, divisor: float = 1.0
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
            Update(
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
