"""Parts of layers whose work is the same in every pass, as graphs of the device: two for each, forward and backward.

    outputs = parts.run(layer, function, x)      first call: the forward graph is captured, then replayed
    ...                                          eager work, with a host that may wait
    backward reaches it                          first time: the backward graph is captured, then replayed

Autograd sees one node, whose inputs and outputs are those of `function`. Inside, the function is recorded once as a
graph of its own over leaves that stay where they are; the backward graph is the walk through it. What the function
writes besides, in forward or backward, it writes where it always does: counts of a meter, sums of weight gradients, by
a product or by a parameter's hook. So parameters are no inputs, and give the outside no gradients.

Addresses. A graph reads its inputs from memory of its own, into which each call copies them, all in one launch; except
what another graph has written, which is where it was. What all parts read of a micro-batch is copied once (`hold`).
Incoming gradients of the same shape share memory over all parts: a graph reads them right after they were copied.

Pool. All graphs share one pool of memory (`penstock.parallel.graphs.one_pool`), and only one pass is under way. Then
what a capture may take for new are blocks that nobody held at that time, and a replay overwrites what they hold:
    what a forward graph keeps for backward is held by the recorded graph until its backward graph has been captured,
        so only graphs behind that one can have taken it; they are replayed behind it too
    outputs, and gradients of inputs, are held for good, so no graph takes them; what is eager reads them
        after the replay that wrote them and before the next pass
    all else that a graph allocates it has freed at its end; the next one overwrites it when nobody reads it
Captures follow each other as the parts of a pass do, forward from the first and backward from the last, so replays do.

Out of memory. A part that finds none for its forward graph runs eagerly. One that finds none for its backward graph
walks eagerly through what its forward graph has kept, which is all there. `obstacle` then says why; the pass is right,
and whoever owns the parts gives them up behind it.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.parallel.graphs import Capture, Replayable

Function = Callable[..., tuple[Tensor, ...]]
"""Tensors -> tensors. It does the same to the same shapes, and the host never waits in it."""


class Parts:
    """The parts of one rank's layers; for one pass at a time.

    Args:
        capture: of one part in one direction; all share a pool.

    Attributes:
        obstacle: why there is no memory for a part; empty as long as there is.
    """

    def __init__(self, capture: Capture) -> None:
        self.obstacle = ""
        self._capture = capture
        self._graphs: list[Replayable] = []
        self._parts: dict[Hashable, _Part] = {}
        self._copies: dict[Hashable, Tensor] = {}
        self._facts: dict[str, object] = {}
        self._written: set[Hashable] = set()
        self._anchor = torch.empty(0, requires_grad=True)

    @property
    def pool_bytes(self) -> int:
        """Device memory that they keep: the pool, and what is copied for them."""
        own = sum(tensor.nbytes for tensor in self._copies.values())
        return sum(graph.pool_bytes for graph in self._graphs) + own

    @property
    def seconds(self) -> float:
        """Time that all captures took."""
        return sum(graph.seconds for graph in self._graphs)

    @property
    def count(self) -> int:
        """Graphs that there are."""
        return len(self._graphs)

    def run(self, key: Hashable, function: Function, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`function(*inputs)`, replayed from the first call on.

        Args:
            key: of the part; the same in every pass.
            function: what it closes over is the same in every pass, or is held here.
            inputs: their gradients are given back.
        """
        part = self._parts.get(key) or self._made(key, function, inputs)
        if part is None:
            return function(*inputs)
        outputs: tuple[Tensor, ...] = _Replay.apply(part, self._anchor, *inputs)
        return outputs

    @torch.no_grad()
    def hold(self, name: str, value: Tensor) -> Tensor:
        """The same values where every pass has them; for what has no gradient."""
        own = self._copies.get(name)
        if own is None:
            own = self._copies[name] = torch.empty_like(value)
        _check_geometry(name, own, value)
        return own.copy_(value)

    def check(self, name: str, fact: object) -> None:
        """Make sure that what became part of the graphs is the same in every pass."""
        captured = self._facts.setdefault(name, fact)
        assert captured == fact, f"{name} of a graph is {captured}, and {fact} came"

    def release(self) -> None:
        """Give all memory back; nothing can be replayed any more."""
        self._parts.clear()
        self._copies.clear()
        self._written.clear()
        for graph in self._graphs:
            graph.release()
        self._graphs.clear()

    def captured(self, work: Callable[[], object]) -> Replayable | None:
        """A graph of some work; None if there is no memory for it."""
        try:
            graph = self._capture(work)
        except torch.OutOfMemoryError as error:
            self.obstacle = str(error).partition(". ")[0]
            return None
        self._graphs.append(graph)
        return graph

    def inlet(self, given: Tensor, room: Hashable) -> "_Inlet":
        """Where a graph reads a tensor: where it is, if another graph has written it; else a copy.

        Args:
            given: of the first call.
            room: name of the memory for the copy.
        """
        if _place(given) in self._written:
            return _Inlet(given.detach(), is_copy=False)
        if room not in self._copies:
            self._copies[room] = torch.empty_like(given.detach())
        return _Inlet(self._copies[room], is_copy=True)

    def written(self, tensors: Iterable[Tensor]) -> None:
        """Graphs write these; somebody holds them from now on."""
        self._written.update(map(_place, tensors))

    def _made(self, key: Hashable, function: Function, inputs: tuple[Tensor, ...]) -> "_Part | None":
        if self.obstacle:
            return None
        part = _Part(self, key, function, inputs)
        if not part.is_captured:
            return None
        self._parts[key] = part
        return part


class _Part:
    """One part: its two graphs, and the tensors through which they are spoken with.

    Attributes:
        results: what the function gave: always the same addresses.
    """

    def __init__(self, parts: Parts, key: Hashable, function: Function, inputs: tuple[Tensor, ...]) -> None:
        self.results: tuple[Tensor, ...] = ()
        self._parts = parts
        self._function = function
        self._inlets = tuple(parts.inlet(one, (key, place)) for place, one in enumerate(inputs))
        pairs = zip(self._inlets, inputs, strict=True)
        # By `data`, because a copy to the inlet is no change to what was recorded: autograd must not count it as one.
        self._leaves = tuple(inlet.tensor.data.requires_grad_(given.requires_grad) for inlet, given in pairs)
        self._is_under_way = False
        self._gradient_inlets: tuple[_Inlet | None, ...] | None = None
        self._back: Replayable | None = None
        self._forth = parts.captured(self._run)

    @property
    def is_captured(self) -> bool:
        """Whether there was memory for the forward graph."""
        return self._forth is not None

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs; the next pass overwrites them."""
        assert not self._is_under_way, "a part that is a graph begins a pass before the last one was differentiated"
        assert self._forth is not None, "a part without a forward graph is no part"
        self._is_under_way = True
        _fill(self._inlets, inputs)
        self._forth.replay()
        if self._gradient_inlets is None:
            self._parts.written(self.results)
        return tuple(result.detach() for result in self.results)

    def backward(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs, from those of the outputs."""
        assert self._is_under_way, "a part that is a graph is differentiated once for each pass"
        self._is_under_way = False
        is_first = self._gradient_inlets is None
        if self._gradient_inlets is None:
            self._gradient_inlets = self._open(gradients)
        _fill(self._gradient_inlets, gradients)
        if is_first:
            self._back = self._parts.captured(self._run_back)
        if self._back is None:
            self._run_back()
        else:
            self._back.replay()
        found = tuple(leaf.grad for leaf in self._leaves)
        if is_first:  # What was recorded has served: its memory is for the graphs that come.
            self.results = tuple(result.detach() for result in self.results)
            self._parts.written(gradient for gradient in found if gradient is not None)
        return found

    def _open(self, gradients: tuple[Tensor | None, ...]) -> "tuple[_Inlet | None, ...]":
        return tuple(
            None if one is None else self._parts.inlet(one, ("gradient", place, one.shape, one.dtype))
            for place, one in enumerate(gradients)
        )

    def _run(self) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            self.results = self._function(*self._leaves)
        return self.results

    def _run_back(self) -> tuple[Tensor, ...]:
        assert self._gradient_inlets is not None, "gradients come before the way back"
        for leaf in self._leaves:
            leaf.grad = None
        known = [
            (result, inlet.tensor)
            for result, inlet in zip(self.results, self._gradient_inlets, strict=True)
            if inlet is not None
        ]
        # A capture that ends in the middle must leave all of it for another walk.
        torch.autograd.backward([result for result, _ in known], [value for _, value in known], retain_graph=True)
        return tuple(leaf.grad for leaf in self._leaves if leaf.grad is not None)


@dataclass(frozen=True)
class _Inlet:
    """Where a graph reads a tensor.

    Attributes:
        tensor: there.
        is_copy: each call copies it there; else it is there.
    """

    tensor: Tensor
    is_copy: bool


class _Replay(torch.autograd.Function):
    """A part as one node; the anchor lets it have a way back if no input has one, because weights have."""

    @staticmethod
    def forward(ctx: Any, part: _Part, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        del anchor
        ctx.part = part
        ctx.set_materialize_grads(False)
        outputs = part.forward(inputs)
        pairs = zip(outputs, part.results, strict=True)
        ctx.mark_non_differentiable(*(output for output, result in pairs if not result.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.part.backward(gradients)


def _fill(inlets: "tuple[_Inlet | None, ...]", given: tuple[Tensor | None, ...]) -> None:
    """Bring tensors to where a graph reads them."""
    targets, sources = [], []
    for place, (inlet, one) in enumerate(zip(inlets, given, strict=True)):
        assert (inlet is None) == (one is None), f"tensor {place} of a graph was or was not there when it was captured"
        if inlet is None or one is None:
            continue
        _check_geometry(f"tensor {place}", inlet.tensor, one)
        if inlet.is_copy:
            targets.append(inlet.tensor)
            sources.append(one.detach())
        else:
            assert inlet.tensor.data_ptr() == one.data_ptr(), f"tensor {place} of a graph was another graph's"
    if targets:
        torch._foreach_copy_(targets, sources)


def _check_geometry(name: str, own: Tensor, given: Tensor) -> None:
    assert (given.shape, given.dtype) == (own.shape, own.dtype), (
        f"{name} of a graph is {own.dtype} {tuple(own.shape)}, and {given.dtype} {tuple(given.shape)} came"
    )


def _place(tensor: Tensor) -> Hashable:
    """Equal for tensors that are the same memory, read in the same way."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
