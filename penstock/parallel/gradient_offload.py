"""Sums of weight gradients in host memory: a layer's sums are on the device while its backward pass runs.

The device has three slots, each as large as the largest layer. Layers take them in turn, in the order of backward:

    backward   layer 3, slot 0 | layer 2, slot 1 | layer 1, slot 2 | layer 0, slot 0
    to host                    | slot 0          | slot 1          | slot 2
    from host                                    | slot 0: layer 0 | slot 1: ...

A slot comes with the sums of the earlier micro-batches of the step, kernels and autograd add to it as to any other
buffer, and it goes back. So sums are the same bits as on the device, and both directions of the link run beside
compute. In the first micro-batch of a step slots are zeroed instead of fetched. The norm of each gradient is computed
when its slot leaves.

The decoder calls `reached` when backward reaches the output of a layer (`penstock.models.decoder`).
"""

from collections import defaultdict
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from penstock.parallel.copies import DONE, CopyStream, PendingCopy, aligned, host_tensors
from penstock.parallel.data_overlap import BEFORE_LAYERS

SLOTS = 3

_ITEM = torch.float32.itemsize


def layer_of_sums(name: str) -> int | None:
    """Layer whose slot holds the sum of a parameter's gradients; None for those outside of decoder layers."""
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "blocks" else None


class GradientOffload:
    """Float32 sums of gradients of parameters that have a layer, by name.

    `totals` are views of slots on the device, valid inside the backward pass of their layer; `host` has the sums after
    `finish`.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        by_layer: dict[int, list[str]] = defaultdict(list)
        for name in shapes:
            layer = layer_of_sums(name)
            assert layer is not None, f"{name} is outside of the layers"
            by_layer[layer].append(name)
        self._layers = dict(sorted(by_layer.items(), reverse=True))  # in the order of backward
        self._slot_of = {layer: position % SLOTS for position, layer in enumerate(self._layers)}
        sizes = {name: aligned(prod(shape) * _ITEM) // _ITEM for name, shape in shapes.items()}
        largest = max(sum(sizes[name] for name in names) for names in self._layers.values())
        slots = [torch.zeros(largest, device=device) for _ in range(min(SLOTS, len(self._layers)))]
        self.totals: dict[str, Tensor] = {}
        for layer, names in self._layers.items():
            start = 0
            for name in names:
                flat = slots[self._slot_of[layer]][start : start + prod(shapes[name])]
                self.totals[name] = flat.view(shapes[name])
                start += sizes[name]
        self.host = dict(zip(shapes, host_tensors(list(shapes.values()), torch.float32, device), strict=True))
        self.device_bytes = sum(slot.nbytes for slot in slots)
        self.host_bytes = sum(tensor.nbytes for tensor in self.host.values())
        self.outward, self.inward = CopyStream(device), CopyStream(device)
        self._norms: dict[str, Tensor] = {}
        self._has_sum: set[int] = set()  # layers of this step
        self._arrivals: dict[int, PendingCopy] = {}  # by layer: its slot is free, and filled if the layer has a sum
        self._leaving: list[PendingCopy] = []
        self._open: int | None = None

    def start_step(self) -> None:
        """Forget all sums: the next pass begins new ones."""
        self.finish()
        self._has_sum.clear()

    def have_sums(self) -> None:
        """Take all layers to have sums of earlier micro-batches, for a plan."""
        self._has_sum |= set(self._layers)

    def replay_backward(self) -> None:
        """Copy as in the backward pass of a micro-batch."""
        for layer in (*self._layers, BEFORE_LAYERS):
            self.reached(layer)

    @torch.no_grad()
    def reached(self, layer: int) -> None:
        """Backward begins with a layer, and has finished the one after it."""
        if self._open is not None:
            self._send(self._open)
        self._open = None if layer == BEFORE_LAYERS else layer
        if self._open is None:
            return
        self._arrivals.pop(layer, DONE).wait()
        if layer not in self._has_sum:
            torch._foreach_zero_([self.totals[name] for name in self._layers[layer]])

    def finish(self) -> None:
        """Let the current stream wait until all sums are on the host."""
        if self._open is not None:
            self.reached(BEFORE_LAYERS)
        for copy in self._leaving:
            copy.wait()
        self._leaving.clear()

    def norms(self) -> dict[str, Tensor]:
        """2-norm of each sum, a float32 scalar on the device; parameters of layers that no pass reached have none."""
        self.finish()
        return {name: norm for name, norm in self._norms.items() if layer_of_sums(name) in self._has_sum}

    def _send(self, layer: int) -> None:
        """Send the sums of a finished layer, and fetch those of the layer that takes its slot next."""
        names = self._layers[layer]
        totals = [self.totals[name] for name in names]
        self._norms |= dict(zip(names, torch._foreach_norm(totals), strict=True))
        left = self.outward.copy([(total, self.host[name]) for name, total in zip(names, totals, strict=True)])
        self._leaving = [*self._leaving[-SLOTS:], left]  # one stream: the last copy is the last to end
        self._has_sum.add(layer)
        order = list(self._layers)
        position = order.index(layer) + SLOTS
        following = order[position] if position < len(order) else order[self._slot_of[layer]]
        self._arrivals[following] = left
        if following in self._has_sum:
            pairs = [(self.host[name], self.totals[name]) for name in self._layers[following]]
            self._arrivals[following] = self.inward.copy_early(pairs, after=left)
