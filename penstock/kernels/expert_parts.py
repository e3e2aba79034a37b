"""Parts that the experts' networks in 16 and in 8 bits share, and rows that several layers save in one buffer.

A layer saves as many rows for backward as tokens came to its experts. Layers differ: the fullest of 26 may have twice
the even share, while all together hardly have more than it. With one buffer for all layers, the buffer needs space for
the sum instead of the worst case of each. The first row of a layer is a number on the device, which the kernels that
write or read saved rows load (`SavedRows`):

    buffer   | layer 0 | layer 1 .... | layer 2 | free
    first    0         cursor after 0            cursor now

A layer that does not fit is counted and overwrites the first layers: the pass is invalid then and has to be repeated
with a larger buffer (penstock/moe/dispatch/row_capacity.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.kernels.language import counts_on_host, start_kernel, tl, triton
from penstock.kernels.operators import torch_add_bias
from penstock.kernels.tile_table import TileTable


class ReplicaSlots(Protocol):
    """The replicas of one micro-batch in one layer. All ranks of the axis make the same calls in the same order.

    The rows of a rank are those of its own experts, then those of its replicas; `counts_e` counts both. Slots hold the
    weights of replicas for one call of the network. Nothing of them is saved for backward, which fetches them again by
    the same plan:

        forward     fetch, products of own experts, products of replicas
        backward    fetch, input gradients; weight gradients, of which those of replicas go home in float32

    A fetch may begin earlier, while rows travel to the experts, or gradients of their outputs.

    Kernels read a `SlottedWeight` as two stacks of matrices, one launch for each (`penstock.kernels.tile_table`), and
    write gradients so; backends of torch join them.
    """

    @property
    def slots(self) -> int:
        """Replicas that a rank can hold; also the last entries of `counts_e`."""
        ...

    def begin(self, *parameters: Tensor) -> None:
        """Begin the next `fetch`, of the same parameters, beside what follows.

        If other slots begin or fetch before it, as in recomputation, that fetch sends the weights again.
        """
        ...

    def fetch(self, *parameters: Tensor) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        """Send own experts' parameters to the ranks with replicas of them; returns those of our slots.

        `parameters` are matrices, then biases (e x ...), results X x ..., valid until the next call. A slot without a
        replica holds anything. Also returns a function that makes the current stream wait until all are here.
        """
        ...

    def gradient_sums(self, index: int, weight_e: Tensor) -> Tensor:
        """Float32 sums for the gradient of our slots, X x the shape of one expert's `weight_e`.

        `index` is that of the parameter among those of `fetch`. Slots with a replica are zero, others hold anything.
        """
        ...

    def give_back(
        self, index: int, gradients: Sequence[Tensor], totals: Sequence[Tensor], *, aside: bool = False
    ) -> None:
        """Send float32 gradients of our slots home, and add those of our experts' replicas to the totals (e x ...).

        They are those of the parameters from `index` on, and are added in the order of ranks and slots, and rounded
        once if a total has 16 bits. With `aside` nothing reads the totals before the layer's backward pass is over.
        """
        ...


def already_here() -> None:
    """What `ReplicaSlots.fetch` returns if the weights are there in the order of the stream."""


class SlottedWeight(NamedTuple):
    """A weight, or its gradient, in two places: that of own experts, and that of replicas. Tensors, or quantized."""

    own: Any  # of a gradient's sum: None if the gradient is not added to one
    slots: Any
    wait: Callable[[], None] = already_here  # to be called before the slots are read

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of both as one stack."""
        return (len(self.own) + len(self.slots), *self.own.shape[1:])


@dataclass(frozen=True)
class WeightPart:
    """One launch of a product: the weight, the table of its experts, and which of all experts they are."""

    weight: Any
    tiles: TileTable
    experts: slice


def weight_parts(weight: Any, tiles: TileTable) -> Iterator[WeightPart]:
    """The launches of a product: one, or one for each part of a `SlottedWeight`, which waits for its slots between.

    A dry run has the first launch only, whose rows are all.
    """
    if not isinstance(weight, SlottedWeight):
        yield WeightPart(weight, tiles, slice(None))
        return
    assert tiles.parts is not None, "a weight in two places needs tables of both"
    local_experts = tiles.parts[0].starts_e.numel() - 1
    yield WeightPart(weight.own, tiles.parts[0], slice(local_experts))
    if tiles.starts_e.is_meta:
        return
    weight.wait()
    yield WeightPart(weight.slots, tiles.parts[1], slice(local_experts, None))


def joined(weight: Tensor | SlottedWeight) -> Tensor:
    if not isinstance(weight, SlottedWeight):
        return weight
    weight.wait()
    return torch.cat((weight.own, weight.slots))


GATE_UP, DOWN = range(2)  # indices of the matrices among the parameters

# Takes a task, which computes the gradient of a matrix, to be run later; False if it must run now.
DeferGradient = Callable[[Callable[[], None]], bool]


@dataclass(frozen=True)
class SavedRows:
    """Rows of one layer in a buffer of several layers."""

    rows_SF: Tensor  # the buffer, contiguous
    first: Tensor  # int64 [1], on the device: the layer's first row
    room: int  # most rows that the layer can have


# (used, room, like) -> place for at most `room` rows with width, dtype and device of `like`; `used` (int32) exist.
SaveRows = Callable[[Tensor, int, Tensor], SavedRows]


class WeightedBias(NamedTuple):
    """A bias that is added to each row times the row's weight."""

    bias_eF: Tensor
    weights_R: Tensor  # float32
    dweights_R: Tensor  # float32 gradient of the weights so far, contiguous; the bias's part is added in place


def bias_gradient_by_definition(
    dy_RF: Tensor,
    counts_e: Tensor,
    weighted: WeightedBias | None = None,
    *,
    accumulate_into: Tensor | None = None,
    tiles: object = None,
) -> Tensor:
    """Definition of `penstock.kernels.expert_kernels.bias_gradient`; the counts are copied to the host."""
    counts = counts_on_host(counts_e, dy_RF.shape[0])
    rows_RF = dy_RF[: sum(counts)].float()
    if weighted is not None:
        bias_eF, weights_R, dweights_R = weighted
        pieces = zip(rows_RF.split(counts), bias_eF.float(), strict=True)
        dweights_R[: len(rows_RF)] += torch.cat([rows @ bias_F for rows, bias_F in pieces])
        rows_RF = rows_RF * weights_R[: len(rows_RF), None]
    sums_eF = torch.stack([rows.sum(0) for rows in rows_RF.split(counts)])
    return add_or_return(sums_eF.to(dy_RF.dtype) if accumulate_into is None else sums_eF, accumulate_into)


def bias_gradient_in_torch(
    dy_RF: Tensor,
    counts_e: Tensor,
    weighted: WeightedBias | None = None,
    *,
    accumulate_into: Tensor | None = None,
    tiles: object = None,
) -> Tensor:
    """`bias_gradient_by_definition` by autograd through the addition of the bias; the counts stay on the device."""
    dy_RF = used(dy_RF, counts_e)
    bias_eF = dy_RF.new_zeros(counts_e.numel(), dy_RF.shape[1]) if weighted is None else weighted.bias_eF
    with torch.enable_grad():
        inputs = [bias_eF := bias_eF.detach().requires_grad_()]
        weights_R = None
        if weighted is not None:
            inputs.append(weights_R := weighted.weights_R.detach().requires_grad_())
        rows_RF = torch_add_bias(torch.zeros_like(dy_RF), bias_eF, counts_e, weights_R)
    dbias_eF, *rest = torch.autograd.grad(rows_RF, inputs, dy_RF)
    if weighted is not None:
        weighted.dweights_R.add_(rest[0])
    return add_or_return(dbias_eF, accumulate_into)


def used(rows_RD: Tensor, counts_e: Tensor) -> Tensor:
    """The rows with those past the last expert's set to zero."""
    is_used_R = torch.arange(rows_RD.shape[0], device=rows_RD.device) < counts_e.sum()
    return torch.where(is_used_R[:, None], rows_RD, 0)


def add_or_return(dw_eFD: Tensor, accumulate_into: Tensor | SlottedWeight | None) -> Any:
    """The gradient, or the sum to which it was added."""
    if isinstance(accumulate_into, SlottedWeight):
        own_eFD, slots_XFD = dw_eFD.split((len(dw_eFD) - len(accumulate_into.slots), len(accumulate_into.slots)))
        return SlottedWeight(add_or_return(own_eFD, accumulate_into.own), accumulate_into.slots.add_(slots_XFD))
    return dw_eFD if accumulate_into is None else accumulate_into.add_(dw_eFD)


def gradient_in_parts(
    gradient: Callable[..., Any], counts_e: Tensor, sums: SlottedWeight, tiles: TileTable | None
) -> SlottedWeight:
    """A gradient of weights in two places, by one product for each: `gradient(counts_e, accumulate_into, tiles)`."""
    assert tiles is not None, "gradients in two places need tables of both"
    parts = weight_parts(sums, tiles)
    gradients = [gradient(counts_e[part.experts], accumulate_into=part.weight, tiles=part.tiles) for part in parts]
    return SlottedWeight(gradients[0], sums.slots)


def no_tile_table(counts_e: Tensor, rows: int) -> None:
    """Stand-in for `tile_table`: only Triton's products share one."""


def claim_rows(cursor: Tensor, used: Tensor, capacity: int, meter: Tensor) -> Tensor:
    """Reserve a layer's rows in the buffer and return the first one, int64 [1].

    `cursor`, int64 [1], has the rows reserved so far, also by layers that did not fit; `used`, int32 [1], the layer's,
    at most `capacity`, the S rows of the buffer. Of `meter`, int64 [2], rows that did not fit are added to the first,
    and the second becomes the most rows reserved.
    """
    first = torch.empty_like(cursor)
    # One program: layers claim their rows one after the other, in the order of the stream.
    start_kernel(claim_rows_kernel, (1,), cursor, used, first, meter, capacity, num_warps=1)
    return first


@triton.jit(do_not_specialize=["capacity"])
def claim_rows_kernel(cursor_ptr, used_ptr, first_ptr, meter_ptr, capacity):
    """Example: cursor 5, 3 rows, capacity 7 give cursor 8, first row 0, and 1 row that did not fit."""
    begin = tl.load(cursor_ptr)
    end = begin + tl.load(used_ptr)
    tl.store(cursor_ptr, end)
    tl.store(first_ptr, tl.where(end <= capacity, begin, 0))  # overwrites the first layers if it does not fit
    missing = tl.maximum(end - tl.maximum(begin, capacity), 0)
    tl.store(meter_ptr, tl.load(meter_ptr) + missing)
    tl.store(meter_ptr + 1, tl.maximum(tl.load(meter_ptr + 1), end))
