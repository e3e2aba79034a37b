"""AdamW (arXiv 1711.05101) on float32 tensors that stay on the device, fused into one pass over memory.

This is the only place that masters and moments are reached through, so whoever keeps them elsewhere replaces this
class: three mappings by name, a step count, `update` and `loaded`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.config.training import Optimizer


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and stacks of matrices, not to biases and norms.

    Args:
        name: dotted path of the parameter.
        parameter: of any shape.
    """
    *modules, last = name.lower().split(".")
    return parameter.ndim >= 2 and "bias" not in last and not any("norm" in part for part in modules)


class FusedAdamW:
    """The update of some tensors.

    Args:
        masters: what is updated, in place, by name; decay goes by name. All on one device. Some may be empty.
        gradients: of the same shapes; the very same tensors are read by every update.
        settings: everything but the learning rate, which comes with each update.

    Attributes:
        masters: as given.
        moments1: mean of the gradients.
        moments2: mean of their squares.
        step: float32 scalar on the device: updates done.
    """

    def __init__(self, masters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], settings: Optimizer) -> None:
        self.masters = dict(masters)
        self.moments1 = {name: torch.zeros_like(master) for name, master in masters.items()}
        self.moments2 = {name: torch.zeros_like(master) for name, master in masters.items()}
        self.step = torch.zeros((), device=next(iter(masters.values())).device)
        present = [name for name, master in masters.items() if master.numel()]
        decayed = [masters[name] for name in present if is_decayed(name, masters[name])]
        others = [masters[name] for name in present if not is_decayed(name, masters[name])]
        # Fused on CPUs too: each value is computed by itself, so it is deterministic, and it passes over memory once.
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )
        # AdamW makes its state at the first step. Made here, a checkpoint can be loaded before there is one. It wants a
        # step count for each tensor; they are views of one vector and always equal.
        self._steps = torch.zeros(len(present), device=self.step.device)
        for index, name in enumerate(present):
            self.masters[name].grad = gradients[name]
            self._adamw.state[self.masters[name]] = {
                "step": self._steps[index],
                "exp_avg": self.moments1[name],
                "exp_avg_sq": self.moments2[name],
            }

    @torch.no_grad()
    def update(self, learning_rate: float) -> None:
        """Update every master from its gradient, which stays as it is."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.step += 1

    @torch.no_grad()
    def loaded(self) -> None:
        """Take over a `step` that somebody has filled."""
        self._steps.copy_(self.step)
