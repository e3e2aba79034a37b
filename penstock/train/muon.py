"""Muon (arXiv 2502.16982) for matrices of hidden layers, with the state and formats of AdamW's first moment.

    momentum    M <- m M + (1 - m) G                         on the rows that a rank updates
    direction   U = m M + (1 - m) G, or M                    with and without Nesterov
    update      O = Newton-Schulz(U)                         of whole matrices (penstock/parallel/matrix_exchange.py)
    step        W <- W - rate (decay W + s sqrt(max(A, B)) O)    rows again; W is the float32 master, A x B the matrix

Newton-Schulz does not see the scale of U, so this is also Muon with M <- m M + G. The buffer of gradients holds U, then
O: there is no further memory of their size. On CPUs products and sums are separate operations, because fused ones
round the last values of a tensor differently there: so any division of the rows gives the same bits.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from penstock.config.run import Optimizer
from penstock.kernels.adamw import (
    SPLIT,
    StateTensor,
    first_moment_of,
    master_of,
    noise,
    salt_of,
    seed_of,
    store_first_moment,
    store_master,
)
from penstock.layout.sharding import Matrices
from penstock.parallel.axes import Axes
from penstock.parallel.matrix_exchange import MatrixExchange, MatrixShard
from penstock.train.adamw import bytes_of, device_state, is_own_master, round_values, start_masters


@dataclass(frozen=True, kw_only=True)
class MuonTensor(StateTensor):
    """Rows of a parameter with their state."""

    scale: float  # of the orthogonal factor


def update_scale(matrices: Matrices, update_rms: float) -> float:
    """Factor of an orthogonal A x B matrix, whose root mean square is 1 over the root of max(A, B)."""
    return update_rms * sqrt(max(matrices.rows, matrices.columns))


class ShardedMuon:
    """Muon over the matrices of one rank, on the device; the interface is that of `penstock.train.adamw.FusedAdamW`.

    `shards` have the gradients, which are orthogonalized in place. `step` is the number of updates that a checkpoint
    holds.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        shards: Mapping[str, MatrixShard],
        settings: Optimizer,
        axes: Axes,
        *,
        starts: Mapping[str, int],
        step: Tensor,
        values_per_round: int | None = None,
    ) -> None:
        self._settings, self._step, self._steps = settings, step, 0
        self.tensors = {
            name: MuonTensor(
                value=value,
                gradient=shards[name].part.tensor,
                **device_state(value, settings, is_muon=True),
                is_decayed=True,
                salt=salt_of(name),
                start=starts.get(name, 0),
                scale=update_scale(shards[name].matrices, settings.muon.update_rms),
            )
            for name, value in values.items()
        }
        start_masters(self.tensors.values())
        tensors = [tensor for tensor in self.tensors.values() if tensor.value.numel()]
        self._defined = [tensor for tensor in tensors if not _is_fused(tensor)]
        self._fused: dict[float, list[MuonTensor]] = defaultdict(list)  # by their scale
        for tensor in tensors:
            if _is_fused(tensor):
                self._fused[tensor.scale].append(tensor)
        self._exchange = MatrixExchange(
            list(shards.values()),
            axes,
            dtype=torch.bfloat16 if settings.muon.precision == "bf16" else torch.float32,
            steps=settings.muon.iterations,
            values_per_round=values_per_round,
        )
        self.device_bytes, self.moment_bytes = bytes_of(self.tensors.values())

    @torch.no_grad()
    def update(self, learning_rate: float, divisor: float = 1.0) -> None:
        """Update all masters from their gradients, divided by `divisor`, and the values with them.

        The ranks of a pipeline stage call it together. The host does not wait.
        """
        self._steps += 1
        self._move_momenta(1.0 / divisor)
        self._exchange.run()
        decay = learning_rate * self._settings.weight_decay
        for tensor in self._defined:
            master = master_of(tensor)
            change = tensor.gradient.mul_(learning_rate * tensor.scale)
            store_master(tensor, master - master * decay - change)
            tensor.gradient.zero_()
        for scale, group in self._fused.items():
            masters, gradients = [master_of(tensor) for tensor in group], [tensor.gradient for tensor in group]
            torch._foreach_mul_(masters, 1.0 - decay)
            torch._foreach_add_(masters, gradients, alpha=-learning_rate * scale)
            torch._foreach_zero_(gradients)
            round_values(group)

    def loaded(self) -> None:
        self._steps = int(self._step)
        round_values(self.tensors.values())

    def _move_momenta(self, scale: float) -> None:
        """The new momenta; gradients become directions."""
        muon = self._settings.muon
        for tensor in self._defined:
            gradient = tensor.gradient.mul_(scale).mul_(1.0 - muon.momentum)
            momentum = first_moment_of(tensor) * muon.momentum + gradient
            rounds = not is_own_master(tensor.moment1)
            noise_ = noise(momentum, tensor.start, seed_of(self._steps, tensor.salt))[0] if rounds else None
            store_first_moment(tensor, momentum, noise_)
            if muon.nesterov:
                gradient.add_(momentum.mul_(muon.momentum))
            else:
                gradient.copy_(momentum)
        for group in self._fused.values():
            gradients, momenta = [tensor.gradient for tensor in group], [tensor.moment1 for tensor in group]
            if scale != 1.0:
                torch._foreach_mul_(gradients, scale)
            torch._foreach_lerp_(momenta, gradients, 1.0 - muon.momentum)
            if muon.nesterov:
                torch._foreach_lerp_(gradients, momenta, muon.momentum)
            else:
                torch._foreach_copy_(gradients, momenta)


def _is_fused(tensor: MuonTensor) -> bool:
    """Whether PyTorch's kernels for lists of tensors update it: float32 state on a GPU, where they round all alike."""
    return tensor.value.device.type != "cpu" and tensor.moment1.dtype == torch.float32 and tensor.masters != SPLIT
