"""AdamW with float32 masters, and gradients that add up in float32.

Every trained parameter has a master (float32, what AdamW updates), a gradient (float32, one buffer for the whole run)
and two moments. A float32 parameter is its own master. A bfloat16 parameter is a rounded copy of its master:

    backward     a hook on the parameter adds its bfloat16 gradient to the float32 buffer and frees it
    step         AdamW updates the master, which is then rounded into the parameter

So a gradient that is summed over many micro-batches loses nothing, and neither does an update that is smaller than a
bfloat16 can tell. A kernel that makes weight gradients itself may add to the buffer (`gradient_of`) and leave the
parameter's own gradient alone.

A parameter that took no part in a step has a gradient of zeros, not none: its moments fade, and it decays. This is what
happens to it inside a larger tensor or a shard, so results do not depend on how parameters are laid out. Nothing here
waits for the device.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from penstock.config.training import Optimizer


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and stacks of matrices, not to biases and norms.

    Args:
        name: dotted path of the parameter.
        parameter: of any shape.
    """
    *modules, last = name.lower().split(".")
    return parameter.ndim >= 2 and "bias" not in last and not any("norm" in part for part in modules)


class MasterAdamW:
    """AdamW (arXiv 1711.05101) over named parameters that all live on one device.

    Args:
        parameters: names and parameters; those that need no gradient are left out. No parameter may come twice.
        settings: everything but the learning rate, which comes with each step.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], settings: Optimizer) -> None:
        trained = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        assert trained, "an optimizer needs a parameter that is trained"
        self._masters = {name: _master_of(parameter) for name, parameter in trained.items()}
        self._gradients = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        self._moments1 = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        self._moments2 = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        self._rounded = {name: parameter for name, parameter in trained.items() if parameter is not self._masters[name]}
        for name, master in self._masters.items():
            master.grad = self._gradients[name]
        for name, parameter in self._rounded.items():
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, self._gradients[name]))

        decayed = [master for name, master in self._masters.items() if is_decayed(name, master)]
        others = [master for name, master in self._masters.items() if not is_decayed(name, master)]
        # Fused on CPUs too: each value is computed by itself, so it is deterministic, and it passes over memory once.
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )
        # AdamW makes its state at the first step. Made here, a checkpoint can be loaded before there is one. It wants a
        # step count for each parameter; they are views of one tensor and always equal.
        self._steps = torch.zeros(len(self._masters), device=next(iter(self._masters.values())).device)
        for index, (name, master) in enumerate(self._masters.items()):
            self._adamw.state[master] = {
                "step": self._steps[index],
                "exp_avg": self._moments1[name],
                "exp_avg_sq": self._moments2[name],
            }

    def gradient_of(self, name: str) -> Tensor:
        """The float32 buffer of a parameter's gradient, of the parameter's shape; it stays the same tensor for good."""
        return self._gradients[name]

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Names of parameters and their float32 gradients as summed since `zero_gradients`."""
        yield from self._gradients.items()

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """2-norm of all gradients together: float32 scalar on the device."""
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(self._gradients.values()))))

    @torch.no_grad()
    def clip(self, norm: Tensor, limit: float) -> None:
        """Scale gradients down so that their norm is at most `limit`.

        Args:
            norm: what `gradient_norm` returned.
            limit: 0 does not clip.
        """
        if limit > 0.0:
            # At a norm below the limit the factor is exactly 1 and no gradient changes.
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(list(self._gradients.values()), factor)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every parameter from the gradients, which stay as they are."""
        for name, master in self._masters.items():
            assert master.grad is self._gradients[name], f"somebody took away the gradient buffer of {name}"
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._round_masters()

    @torch.no_grad()
    def zero_gradients(self) -> None:
        """Begin a new sum. Use this instead of `model.zero_grad`, which would take the buffers away."""
        torch._foreach_zero_(list(self._gradients.values()))

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint needs of the optimizer, in float32, by name.

        `master.*` (only where it is not the parameter itself), `moment1.*` and `moment2.*` are its very own tensors;
        `step` is a scalar copy of the count.
        """
        return {
            "step": self._steps[0].clone(),
            **{f"master.{name}": self._masters[name] for name in self._rounded},
            **{f"moment1.{name}": moment for name, moment in self._moments1.items()},
            **{f"moment2.{name}": moment for name, moment in self._moments2.items()},
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` returned, here or in another process, and round masters into their parameters.

        Float32 parameters belong to the model and are not touched.

        Args:
            tensors: may hold more than the optimizer's, and its very own tensors, filled in place.
        """
        for name, own in self.tensors().items():
            if own is not tensors[name]:
                own.copy_(tensors[name])
        self._steps.fill_(tensors["step"])
        self._round_masters()

    def _round_masters(self) -> None:
        if self._rounded:
            torch._foreach_copy_(list(self._rounded.values()), [self._masters[name] for name in self._rounded])


def _master_of(parameter: nn.Parameter) -> Tensor:
    """The parameter itself if it is precise enough, else a float32 copy."""
    if parameter.dtype.itemsize >= torch.float32.itemsize:
        return parameter
    return parameter.detach().to(torch.float32)


def _move_gradient(total: Tensor, parameter: Tensor) -> None:
    """Add the parameter's gradient, which one backward pass has just finished, to the float32 sum."""
    assert parameter.grad is not None, "autograd calls this hook after it has set the gradient"
    total.add_(parameter.grad)
    parameter.grad = None
