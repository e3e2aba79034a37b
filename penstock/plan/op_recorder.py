"""Record the operators of a computation, and the bytes that it holds, by running it under torch's dispatcher.

`MemoryTracker` counts a storage from the operator that returns it until its last tensor is gone. So what autograd
saves, what recomputation frees and temporary tensors need no rule of their own. Storages that existed before, such as
parameters, do not count; memory that a kernel or library allocates inside one operator is not visible. The bytes are
the same on the meta device and with memory, which is how the tracker is tested.

`OpRecorder` writes down what the host gives to the device, in order: torch's operators and collectives, launches of
our kernels, and points where the host waits (penstock/kernels/language.py), in forward and backward. Views and plain
allocations are left out. `RecordedTransferStream` marks work of a second stream, `RecordedCopyStream` copies
to and from host memory. A `RecordedOp` depends on no hardware; penstock/plan/costs.py gives it a time.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.parallel.async_transfer import Result, Task, TransferStream, WeightGradStore
from penstock.parallel.offload import DONE, CopyStream, PendingCopy
from penstock.plan.hardware import RankGroup, group_of

GRANULE = 512  # the allocator of a GPU hands out multiples of so many bytes

FORK, END, JOIN, WAIT, PUT_OFF = "fork", "end", "join", "wait", "put off"
"""Names of operators that move nothing: a second stream begins after all work so far; it ends; the first stream waits
for that end; the host waits for the device; a weight gradient is put off (penstock/parallel/async_transfer.py)."""

TO_HOST, FROM_HOST, ARRIVE = "to host", "from host", "arrive"
"""A storage starts its copy to host memory; starts its copy back; must be back on the device."""

SLOT_TO_HOST, SLOT_FROM_HOST = "slot to host", "slot from host"
"""A slot (penstock/parallel/offload.py) starts its copy to host memory; is filled again, after that copy."""

COPIES = (TO_HOST, FROM_HOST, SLOT_TO_HOST, SLOT_FROM_HOST)

_LIBRARY = torch.library.Library("penstock", "FRAGMENT")
_LIBRARY.define("marked(str name, int number) -> ()")
_LIBRARY.define("copied(str name, int number, int size) -> ()")
_LIBRARY.impl("marked", lambda name, number: None, "CompositeExplicitAutograd")
_LIBRARY.impl("copied", lambda name, number, size: None, "CompositeExplicitAutograd")

_SILENT = frozenset(
    {
        "empty",
        "new_empty",
        "empty_like",
        "empty_strided",
        "new_empty_strided",
        "promote_types",
        "_unsafe_view",
        "detach",
    }
)
"""Operators of torch that give the device nothing to do and are not views by their schema."""

_SHAPED_LIKE = frozenset({"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"})
"""Operators of torch that take shape, dtype or device of an argument, and do not read it."""


@dataclass(frozen=True, kw_only=True)
class TrackedSection:
    """Memory between two marks, in bytes."""

    name: str
    start: int
    end: int
    peak: int
    before: Counter[str]  # held at the start, by the label of the allocating module
    held: Counter[str]  # held at the end, by label
    at_peak: Counter[str]  # held at the peak, by label

    @property
    def passing(self) -> int:
        """The peak over the start."""
        return self.peak - self.start


class _Mode(TorchDispatchMode):
    """A mode that is never compiled: torch need not guard each of its calls, which takes 4 % of a meta run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class MemoryTracker(_Mode):
    """Counts storages while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0  # bytes held now
        self.held: Counter[str] = Counter()  # the same by the label of the allocating module
        self.sections: list[TrackedSection] = []
        self._labels = [""]
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._start = 0
        self._peak, self._at_peak, self._before = 0, Counter[str](), Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return self.call(func, args, kwargs, _tensors_in((*args, *kwargs.values())))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], arguments: Sequence[Tensor]) -> Any:
        """Call an operator and count its results; an `OpRecorder` with this tracker calls it too.

        `arguments` are the tensors in `args` and `kwargs`.
        """
        seen = self._seen
        for tensor in arguments:
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in seen:
                # An argument that was not counted existed before the tracker was entered.
                seen[key] = weakref.ref(storage, partial(_forget, seen, key))
        result = _called(func, args, kwargs, arguments)
        for tensor in _tensors_in((result,)):
            self._count(tensor)
        return result

    @contextmanager
    def named(self, label: str) -> Iterator[None]:
        """Allocations inside get this label."""
        self.enter(label)
        try:
            yield
        finally:
            self.leave()

    def enter(self, label: str) -> None:
        """Start a label, which `leave` ends."""
        self._labels.append(label)

    def leave(self) -> None:
        """End the innermost label."""
        self._labels.pop()

    def mark(self, name: str) -> TrackedSection:
        """End the section that began at the mark before, and name it."""
        held = +self.held
        section = TrackedSection(
            name=name,
            start=self._start,
            end=self.live,
            peak=self._peak,
            before=self._before,
            held=held,
            at_peak=+self._at_peak,
        )
        self.sections.append(section)
        self._start = self._peak = self.live
        self._before, self._at_peak = held, Counter(held)
        return section

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        # As the caching allocator rounds.
        size = -(-storage.nbytes() // GRANULE) * GRANULE
        label = self._labels[-1]
        self.live += size
        self.held[label] += size
        if self.live > self._peak:
            self._peak = self.live
            self._at_peak = Counter(self.held)

        def is_freed(_: object) -> None:
            self._seen.pop(key, None)
            self.live -= size
            self.held[label] -= size

        self._seen[key] = weakref.ref(storage, is_freed)


class RecordedOp(NamedTuple):
    """One operator.

    `switches` are constants of a kernel that are true, and its notes; or the number of a mark or of a storage.
    """

    name: str  # torch's without namespace and overload, a Triton kernel's, or a constant of this file
    shapes: tuple[tuple[int, ...], ...] = ()  # of the arguments' tensors, then of the results'
    sizes: tuple[int, ...] = ()  # bytes of each; a tensor that is changed in place appears once
    itemsize: int = 0  # bytes of an element of the first tensor
    switches: tuple[str, ...] = ()
    group: RankGroup | None = None

    @property
    def moved_bytes(self) -> int:
        return sum(self.sizes)

    def times(self, count: int) -> "RecordedOp":
        """One operator that moves the memory of so many like this one, which compute little."""
        shapes = tuple((count * shape[0], *shape[1:]) if shape else shape for shape in self.shapes)
        return self._replace(shapes=shapes, sizes=tuple(count * size for size in self.sizes))


RecordedOps = tuple[RecordedOp, ...]


class OpRecorder(_Mode):
    """Records operators while it is entered.

    `ranks_per_node` ranks are joined by fast links and `ranks_per_pod` at the network's full bandwidth; 0 means all.
    `tracker` counts the results of the same operators, because two dispatch modes would run Python twice for each.
    """

    def __init__(self, ranks_per_node: int = 0, ranks_per_pod: int = 0, tracker: MemoryTracker | None = None) -> None:
        super().__init__()
        self._ranks_per_node, self._ranks_per_pod = ranks_per_node, ranks_per_pod
        self._tracker = tracker
        self._recorded: list[RecordedOp] = []

    def cut(self) -> RecordedOps:
        """The operators since the cut before."""
        ops, self._recorded = tuple(self._recorded), []
        return ops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        namespace, name, is_silent, is_view = _facts(func)
        if is_view:  # Its result has the storage of its argument.
            return func(*args, **kwargs)
        if namespace == "penstock":  # It gives nothing.
            self._recorded.append(_own_op(name, args))
            return None
        arguments = _tensors_in((*args, *kwargs.values()))
        call = _called if self._tracker is None else self._tracker.call
        result = call(func, args, kwargs, arguments)
        if not is_silent:
            group = self._group(args) if namespace.startswith("c10d") else None
            # A result in an argument's storage appears once.
            known = {tensor.untyped_storage()._cdata for tensor in arguments}
            read = () if name in _SHAPED_LIKE else arguments
            made = (tensor for tensor in _tensors_in((result,)) if tensor.untyped_storage()._cdata not in known)
            self._recorded.append(_op_of(name, (*read, *made), (), group))
        return result

    def _group(self, arguments: Iterable[Any]) -> RankGroup:
        (script,) = (
            argument
            for argument in arguments
            if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup"  # type: ignore[attr-defined]
        )
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(script))
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        return group_of(len(ranks), self._ranks_per_node, self._ranks_per_pod, stride)


class RecordedWeightGradStore(WeightGradStore):
    """Records each weight gradient that is put off."""

    def add(self, task: Task) -> bool:
        if self.is_collecting:
            torch.ops.penstock.marked(PUT_OFF, 0)
        return super().add(task)


class RecordedTransferStream(TransferStream):
    """Transfers that are recorded as work of a second stream."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._number = 0

    def fork(self, label: str, work: Callable[[], Result]) -> tuple[Result, Any]:
        """See `TransferStream`; the end is a number."""
        self._number += 1
        number = self._number
        torch.ops.penstock.marked(FORK, number)
        result = work()
        torch.ops.penstock.marked(END, number)
        return result, number

    def join(self, label: str, end: Any) -> None:
        if end is not None:
            torch.ops.penstock.marked(JOIN, end)


@dataclass(frozen=True)
class RecordedCopy(PendingCopy):
    """A copy of a `RecordedCopyStream`, which takes no time while it is recorded."""

    number: int = 0
    is_back: bool = False  # from the host; a wait for a copy to the host is a wait for room

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        if self.is_back:
            torch.ops.penstock.marked(ARRIVE, self.number)


class RecordedCopyStream(CopyStream):
    """A copy stream that records its copies under a name, such as `TO_HOST`.

    Copies have the numbers 1, 2, ...; those of one pass over `slots` that take turns have the numbers of their slots,
    -1, -2, ...
    """

    def __init__(self, name: str, slots: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self._name, self._slots = name, slots
        self._copies = 0

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], *, after: PendingCopy = DONE) -> RecordedCopy:
        """See `CopyStream`; a copy back has the number of the copy out."""
        self._copies += 1
        copy_number = -1 - (self._copies - 1) % self._slots if self._slots else self._copies
        number = after.number if isinstance(after, RecordedCopy) else copy_number
        size = sum(source.nbytes for source, _ in pairs)
        torch.ops.penstock.copied(self._name, number, size)
        return RecordedCopy(number=number, is_back=self._name in (FROM_HOST, SLOT_FROM_HOST))


_Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides and dtype of a tensor on the meta device


def _called(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], arguments: Sequence[Tensor]) -> Any:
    """The result of an operator; `arguments` are the tensors among what it is called with.

    Torch computes shapes of many operators in Python. Operators without views and side effects give new tensors of the
    same shapes when they are called with the same shapes. Those that write into one argument give that argument.
    """
    known, written = _results_of(func)
    if known is None or (key := _key_of((*args, *kwargs.items()))) is None:
        return func(*args, **kwargs)
    if (specs := known.get(key)) is None:
        result = func(*args, **kwargs)
        made = result if isinstance(result, tuple) else (result,)
        given = {argument.untyped_storage()._cdata for argument in arguments}
        if written is not None:
            # An output of another size was resized.
            if _key_of((*args, *kwargs.items())) == key:
                known[key] = ()
        elif all(
            isinstance(tensor, Tensor) and tensor.is_meta and tensor.untyped_storage()._cdata not in given
            for tensor in made
        ):
            known[key] = tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in made)
        return result
    if written is not None:
        return kwargs[written] if isinstance(written, str) else args[written]
    made = tuple(torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in specs)
    return made if len(func._schema.returns) > 1 else made[0]


@cache
def _results_of(func: Any) -> tuple[dict[Any, tuple[_Spec, ...]] | None, int | str | None]:
    """Results of an operator by what it was called with, filled by `_called`; None if it may give other tensors.

    And the place or name of the one argument that it writes into and gives.
    """
    schema = func._schema
    values = [*schema.arguments, *schema.returns]
    is_fit = schema.name.startswith("aten::") and all(str(result.type) == "Tensor" for result in schema.returns)
    aliased = [value for value in values if value.alias_info is not None]
    if is_fit and not aliased:
        return {}, None
    # `set_` gives the argument another storage.
    writes_one = [value.alias_info.is_write for value in aliased] == [True, True] and schema.name != "aten::set_"
    if not is_fit or len(schema.returns) > 1 or not writes_one:
        return None, None
    at = schema.arguments.index(aliased[0])
    return {}, aliased[0].name if aliased[0].kwarg_only else at


def _forget(seen: dict[int, Any], key: int, _: object) -> None:
    seen.pop(key, None)


def _key_of(values: Iterable[Any]) -> tuple[Any, ...] | None:
    """What the result's shapes depend on; None if a tensor is not on the meta device."""
    keys: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_meta:
                return None
            keys.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (tuple, list)):
            if (inner := _key_of(value)) is None:
                return None
            keys.append(inner)
        else:
            keys.append((type(value), value))
    return tuple(keys)


def _own_op(name: str, arguments: Sequence[Any]) -> RecordedOp:
    """An operator of the `penstock` library: a wait, a mark, a copy, or a kernel launch."""
    if name == "waited":
        return RecordedOp(WAIT)
    if name == "marked":
        return RecordedOp(arguments[0], switches=(str(arguments[1]),))
    if name == "copied":
        return RecordedOp(arguments[0], sizes=(arguments[2],), switches=(str(arguments[1]),))
    kernel, tensors, switches = arguments
    return _op_of(kernel, tensors, tuple(switches), None)


def _op_of(name: str, tensors: Sequence[Tensor], switches: tuple[str, ...], group: RankGroup | None) -> RecordedOp:
    return RecordedOp(
        name=name,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        sizes=tuple(tensor.nbytes for tensor in tensors),
        itemsize=tensors[0].itemsize if tensors else 0,
        switches=switches,
        group=group,
    )


@cache
def _facts(func: Any) -> tuple[str, str, bool, bool]:
    """Namespace and name of an operator of torch, whether it gives the device nothing to do, and if it is a view."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    return namespace, name, is_view or name in _SILENT, is_view


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors += _tensors_in(value)
    return tensors
