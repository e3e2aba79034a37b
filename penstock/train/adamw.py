"""AdamW (arXiv 1711.05101) with masters of every weight, on the device or streamed from host memory.

A float32 value is its own master. A value of a smaller type is a rounded copy of its master, or the upper bits of it
(`optimizer.store_param_remainders`); moments are stored as `optimizer.moment_dtype` says
(penstock/kernels/adamw.py). An update also sets the gradients to zero. On a GPU one kernel makes it
(penstock/kernels/adamw.py); elsewhere PyTorch's fused AdamW updates float32 state, and the kernel's definition other
formats.

`FusedAdamW` has everything on the device. `StreamedAdamW` has the same interface:

    host      masters and moments, pinned                     4 to 12 bytes for each value of a bfloat16 parameter
    device    parameters, gradients, and two chunks at a time (penstock/parallel/offload.py)

A chunk is copied in, updated by the same kernels, and copied out while the next one arrives. A step costs the time to
move these bytes one way (both directions run at once), once for any number of micro-batches. A value that is its own
master (FSDP2's shards among them) stays on the device; only its moments are on the host.

Chunks are cut at rows where blocks of a row share a scale, else at multiples of the widest CPU vector, because
PyTorch's AdamW on CPUs rounds the last values of a tensor differently from full vectors. So both classes agree to the
bit.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from penstock.config.run import Optimizer
from penstock.kernels.adamw import (
    APART,
    MOMENT_DTYPES,
    ROOT_DECADES,
    SIGNED_DECADES,
    SPLIT,
    AdamWTensor,
    StateTensor,
    blocks_of_row,
    dequantize,
    join,
    launches_of,
    quantize,
    root_of,
    salt_of,
    scalars_of,
    split,
    update,
)
from penstock.kernels.language import HAS_TRITON
from penstock.layout.sharding import row_width
from penstock.parallel.offload import ALIGNMENT, CHUNK_BYTES, ChunkStream, buffer_bytes, host_tensors
from penstock.parallel.shard import StateCodec


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and stacks of matrices, not to biases, norms and mixes of streams."""
    *modules, last = name.lower().split(".")
    is_kept = any("norm" in part or "streams" in part for part in modules)
    return parameter.ndim >= 2 and "bias" not in last and not is_kept


def is_own_master(value: Tensor) -> bool:
    """Whether a value is precise enough to be updated directly."""
    return value.dtype.itemsize >= torch.float32.itemsize


@dataclass(frozen=True)
class StateShape:
    """Shape and dtype of a tensor of the state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def state_shapes(
    shape: tuple[int, ...], dtype: torch.dtype, settings: Optimizer, *, is_muon: bool = False
) -> dict[str, StateShape]:
    """State of a value by the field of `AdamWTensor`; Muon has the first moment only.

    Vectors have float32 moments instead of codes.
    """
    moments = MOMENT_DTYPES[settings.moment_dtype]
    is_coded = moments == torch.uint8 and row_width(shape) > 1
    if moments == torch.uint8 and not is_coded:
        moments = torch.float32
    numbers = "1" if is_muon else "12"
    shapes = {f"moment{number}": StateShape(shape, moments) for number in numbers}
    if is_coded:
        blocks = StateShape((*shape[:-1], blocks_of_row(shape[-1])), torch.float32)
        shapes |= {f"scale{number}": blocks for number in numbers}
    if dtype.itemsize < torch.float32.itemsize:
        shapes["master"] = StateShape(shape, torch.int16 if settings.store_param_remainders else torch.float32)
    return shapes


ROUNDED = StateCodec(decode=lambda parts: parts[0].float(), encode=lambda whole: (whole.bfloat16(),))
_PIECE = 1 << 24
"""Values that are coded at a time: their temporaries take a few hundred MB."""


def _split(whole: Tensor) -> tuple[Tensor, Tensor]:
    """`split` in pieces."""
    values, rests = (torch.cat(parts) for parts in zip(*map(split, whole.view(-1).split(_PIECE)), strict=True))
    return values.view(whole.shape), rests.view(whole.shape)


_SPLIT = StateCodec(decode=lambda both: join(both[0], both[1]), encode=_split)


def _encode(whole: Tensor, decades: int) -> tuple[Tensor, Tensor]:
    """`quantize` in pieces; roots of the values with `ROOT_DECADES`."""
    rows = whole.view(-1, whole.shape[-1])
    pieces = rows.split(max(1, _PIECE // whole.shape[-1]))
    coded = [quantize(root_of(piece) if decades == ROOT_DECADES else piece, decades) for piece in pieces]
    codes, scales = (torch.cat(parts) for parts in zip(*coded, strict=True))
    return codes.view(whole.shape), scales.view(*whole.shape[:-1], scales.shape[-1])


def _decode(codes: Tensor, scales: Tensor, decades: int) -> Tensor:
    whole = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    size = max(1, _PIECE // codes.shape[-1])
    parts = (tensor.view(-1, tensor.shape[-1]).split(size) for tensor in (whole, codes, scales))
    for values, code, scale in zip(*parts, strict=True):
        numbers = dequantize(code, scale, decades)
        values.copy_(numbers.square() if decades == ROOT_DECADES else numbers)
    return whole


def _codes(decades: int) -> StateCodec:
    return StateCodec(lambda both: _decode(both[0], both[1], decades), lambda whole: _encode(whole, decades))


_MEANS, _SQUARES = _codes(SIGNED_DECADES), _codes(ROOT_DECADES)

Stored = tuple[tuple[Tensor, ...], StateCodec | None]
"""Tensors that hold a float32 tensor, and their codec; None for the plain tensor."""


def stored_parts(tensor: StateTensor) -> dict[str, Stored]:
    """How master and moments are held, by the name in a checkpoint."""
    if tensor.masters == SPLIT:
        assert tensor.master is not None, "a split master has a rest"
        model: Stored = (tensor.value, tensor.master), _SPLIT
    else:
        model = (tensor.value if tensor.master is None else tensor.master,), None
    parts = {"model": model, "moment1": _stored_moment(tensor.moment1, tensor.scale1, _MEANS)}
    if isinstance(tensor, AdamWTensor):
        parts["moment2"] = _stored_moment(tensor.moment2, tensor.scale2, _SQUARES)
    return parts


def _stored_moment(moment: Tensor, scales: Tensor | None, codes: StateCodec) -> Stored:
    if scales is not None:
        return (moment, scales), codes
    return (moment,), ROUNDED if moment.dtype == torch.bfloat16 else None


class _Pass:
    """The update of some tensors on one device, whose addresses stay as they are."""

    def __init__(self, tensors: Iterable[AdamWTensor], settings: Optimizer) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.value.numel()]
        self._settings = settings
        device = self._tensors[0].value.device if self._tensors else torch.device("cpu")
        has_kernel = device.type == "meta" or (device.type == "cuda" and HAS_TRITON)
        self._launches = launches_of(self._tensors) if has_kernel else []
        rest = [] if has_kernel else self._tensors
        is_plain = [is_own_master(tensor.moment1) and tensor.masters != SPLIT for tensor in rest]
        self._plain = [tensor for tensor, plain in zip(rest, is_plain, strict=True) if plain]
        self._others = [tensor for tensor, plain in zip(rest, is_plain, strict=True) if not plain]

    def run(self, step: int, learning_rate: float, divisor: float) -> None:
        """Make the update with this number, from 1. The host does not wait."""
        settings = self._settings
        if self._plain:
            _torch_update(self._plain, step, learning_rate, settings, divisor)
        if not self._launches and not self._others:
            return
        scalars = scalars_of(
            step,
            learning_rate=learning_rate,
            betas=(settings.beta1, settings.beta2),
            epsilon=settings.epsilon,
            weight_decay=settings.weight_decay,
            divisor=divisor,
        )
        for launch in self._launches:
            launch.run(scalars)
        for other in self._others:
            update(other, scalars)


@torch.no_grad()
def _torch_update(
    tensors: Sequence[AdamWTensor], step: int, learning_rate: float, settings: Optimizer, divisor: float
) -> None:
    """`update` by PyTorch's fused AdamW, for float32 state."""
    for is_decayed_ in (True, False):
        group = [tensor for tensor in tensors if tensor.is_decayed is is_decayed_]
        if not group:
            continue
        if divisor != 1.0:  # here and not as `grad_scale`, which PyTorch reads in float32 only
            torch._foreach_div_([tensor.gradient for tensor in group], divisor)
        before = torch.full((), float(step - 1), device=group[0].value.device)
        adamw(
            [tensor.value if tensor.master is None else tensor.master for tensor in group],
            [tensor.gradient for tensor in group],
            [tensor.moment1 for tensor in group],
            [tensor.moment2 for tensor in group],
            [],  # maxima, of AMSGrad only
            list(before.repeat(len(group))),  # adamw increments one counter for each tensor
            fused=True,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=learning_rate,
            weight_decay=settings.weight_decay if is_decayed_ else 0.0,
            eps=settings.epsilon,
            maximize=False,
        )
    round_values(tensors)
    torch._foreach_zero_([tensor.gradient for tensor in tensors])


class FusedAdamW:
    """AdamW with all state on the device.

    `values` are updated in place; decay depends on the name, and some may be empty. Every update reads the float32
    `gradients`, of the same shapes, and sets them to zero. `starts` are places of first values in the whole tensors.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        settings: Optimizer,
        *,
        starts: Mapping[str, int] | None = None,
    ) -> None:
        device = next((value.device for value in values.values()), torch.device("cpu"))
        state = {name: device_state(value, settings) for name, value in values.items()}
        self.tensors = _tensors_of(values, gradients, state, starts or {})
        self.step = torch.zeros((), device=device)  # float32: number of updates
        self._steps = 0
        self._pass = _Pass(self.tensors.values(), settings)
        self.host_bytes = 0
        self.device_bytes, self.moment_bytes = bytes_of(self.tensors.values())

    def update(self, learning_rate: float, divisor: float = 1.0) -> None:
        """Update all masters from their gradients, divided by `divisor`, and the values with them."""
        self._steps += 1
        self._pass.run(self._steps, learning_rate, divisor)
        self.step += 1

    def settle(self) -> None:
        """Wait until host tensors may be read or filled: here they always may."""

    def loaded(self) -> None:
        """Continue from filled masters, moments and `step`: values follow their masters."""
        self._steps = int(self.step)
        round_values(self.tensors.values())


def device_state(value: Tensor, settings: Optimizer, *, is_muon: bool = False) -> dict[str, Tensor]:
    """State of zeros beside a value, by the field of `AdamWTensor`."""
    shapes = state_shapes(tuple(value.shape), value.dtype, settings, is_muon=is_muon)
    return {field: torch.zeros(shape.shape, dtype=shape.dtype, device=value.device) for field, shape in shapes.items()}


@torch.no_grad()
def _tensors_of(
    values: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    state: Mapping[str, Mapping[str, Tensor]],
    starts: Mapping[str, int],
) -> dict[str, AdamWTensor]:
    tensors = {
        name: AdamWTensor(
            value=value,
            gradient=gradients[name],
            **state[name],
            is_decayed=is_decayed(name, value),
            salt=salt_of(name),
            start=starts.get(name, 0),
        )
        for name, value in values.items()
    }
    start_masters(tensors.values())
    return tensors


def start_masters(tensors: Iterable[StateTensor]) -> None:
    """Let separate masters equal their values."""
    for tensor in tensors:
        if tensor.master is not None and tensor.masters == APART:
            tensor.master.copy_(tensor.value)


def bytes_of(tensors: Iterable[StateTensor]) -> tuple[int, int]:
    state = moments = 0
    for tensor in tensors:
        whole = sum(part.nbytes for part in tensor.state)
        state, moments = state + whole, moments + whole - (0 if tensor.master is None else tensor.master.nbytes)
    return state, moments


@torch.no_grad()
def round_values(tensors: Iterable[StateTensor]) -> None:
    """Let values follow masters that were filled."""
    apart = [
        (tensor.value, tensor.master) for tensor in tensors if tensor.master is not None and tensor.masters == APART
    ]
    if apart:
        values, masters = zip(*apart, strict=True)
        torch._foreach_copy_(values, masters)


UNIT = ALIGNMENT // torch.float32.itemsize
"""Chunks are cut at multiples of this number of values, or at rows."""


class StreamedAdamW:
    """AdamW with state in host memory; arguments and attributes as of `FusedAdamW`, with contiguous tensors.

    Separate masters and all moments are host tensors. They may be read or filled between `settle` and the next
    `update`. Gradients of `host_gradients` are host tensors too; they are read and stay as they are. `chunk_bytes` is
    the device memory of one of the two chunks, or that of a row if it is larger.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        settings: Optimizer,
        *,
        starts: Mapping[str, int] | None = None,
        host_gradients: Collection[str] = (),
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        device = next(iter(values.values())).device
        self.tensors = _tensors_of(values, gradients, _host_state(values, settings), starts or {})
        self.step = torch.zeros((), device=device)
        self._steps = 0
        self._settings = settings
        self._chunks = list(_cut(self.tensors, host_gradients, max(chunk_bytes, 1)))
        # State goes back to the host; gradients behind it only come.
        self._state = [[tensor for piece in chunk for tensor in piece.tensor.state] for chunk in self._chunks]
        self._returned = [len(state) for state in self._state]
        for state, chunk in zip(self._state, self._chunks, strict=True):
            state += [piece.tensor.gradient for piece in chunk if piece.brings_gradient]
        self._passes: dict[int, _Pass] = {}  # by chunk; the buffers of chunks stay where they are
        self._stream = ChunkStream(device)
        self.host_bytes, _ = bytes_of(self.tensors.values())
        self.device_bytes = 2 * buffer_bytes(self._state)  # one chunk is updated while another arrives or leaves
        self.moment_bytes = self.device_bytes

    def update(self, learning_rate: float, divisor: float = 1.0) -> None:
        self._steps += 1
        self._stream.run(self._state, partial(self._work, learning_rate, divisor), returned=self._returned)
        self.step += 1  # on the current stream

    def settle(self) -> None:
        """Wait until host tensors may be read or filled."""
        self._stream.finish()

    def loaded(self) -> None:
        self._steps = int(self.step)
        round_values(self.tensors.values())

    def _work(self, learning_rate: float, divisor: float, index: int, state: list[Tensor]) -> None:
        """Update one chunk, whose state is on the device."""
        if index not in self._passes:
            chunk, arrived = self._chunks[index], iter(state)
            here = [piece.tensor.with_state([next(arrived) for _ in piece.tensor.state_fields]) for piece in chunk]
            here = [
                replace(tensor, gradient=next(arrived)) if piece.brings_gradient else tensor
                for piece, tensor in zip(chunk, here, strict=True)
            ]
            self._passes[index] = _Pass(here, self._settings)
        self._passes[index].run(self._steps, learning_rate, divisor)


def _host_state(values: Mapping[str, Tensor], settings: Optimizer) -> dict[str, dict[str, Tensor]]:
    device = next(iter(values.values())).device
    places: dict[torch.dtype, list[tuple[str, str, tuple[int, ...]]]] = {}
    for name, value in values.items():
        for field, state_shape in state_shapes(tuple(value.shape), value.dtype, settings).items():
            places.setdefault(state_shape.dtype, []).append((name, field, state_shape.shape))
    state: dict[str, dict[str, Tensor]] = {name: {} for name in values}
    for dtype, fields in places.items():
        tensors = host_tensors([shape for _, _, shape in fields], dtype, device)
        for (name, field, _), tensor in zip(fields, tensors, strict=True):
            state[name][field] = tensor.zero_()
    return state


class _Slice(NamedTuple):
    """Consecutive values of a tensor, whose gradient may be on the host."""

    tensor: AdamWTensor
    brings_gradient: bool


def _cut(
    tensors: Mapping[str, AdamWTensor], host_gradients: Collection[str], chunk_bytes: int
) -> Iterator[list[_Slice]]:
    """Cut tensors into chunks of which at most so many bytes come from the host, or one unit."""
    chunk: list[_Slice] = []
    room = chunk_bytes
    for name, tensor in tensors.items():
        coming = (*tensor.state, tensor.gradient) if name in host_gradients else tensor.state
        width = UNIT if tensor.scale1 is None else tensor.value.shape[-1]  # values of a unit
        units, first = -(-tensor.value.numel() // width) if width else 0, 0
        size = sum(part.itemsize * (part.numel() * width // tensor.value.numel()) for part in coming) if units else 0
        while first < units:
            if room < size and chunk:
                yield chunk
                chunk, room = [], chunk_bytes
            end = min(units, first + max(1, room // size))
            chunk.append(_Slice(_slice(tensor, first, end, width), name in host_gradients))
            room -= (end - first) * size
            first = end
    if chunk:
        yield chunk


def _slice(tensor: AdamWTensor, first: int, end: int, width: int) -> AdamWTensor:
    """Units of a tensor, as vectors or as rows."""
    fields = {name: value for name, value in vars(tensor).items() if isinstance(value, Tensor)}
    cut: dict[str, Any]
    if tensor.scale1 is None:
        cut = {name: value.view(-1)[first * width : end * width] for name, value in fields.items()}
    else:
        cut = {name: value.view(-1, value.shape[-1])[first:end] for name, value in fields.items()}
    return replace(tensor, start=tensor.start + first * width, **cut)
