"""The operators of a piece of work in the order in which a host would give them to a device, found by running it.

The work runs on the meta device, so nothing is computed: a mode of torch's dispatcher writes down what is called. It
sees torch's own operators and collectives, launches of our kernels and places where the host would wait
(penstock/kernels/launching.py), in forward and in backward. What only makes another view of a tensor, or allocates one,
is no work of the device and is left out. `RecordedTransfers` writes down what goes to a second stream, `RecordedLane`
what goes to the host's memory and comes back.

An `RecordedOp` has the shapes and bytes of its tensors and knows nothing of any hardware: what it costs is said by
penstock/plan/costs.py.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.parallel.async_transfer import Result, TransferStream
from penstock.parallel.copies import DONE, CopyStream, PendingCopy
from penstock.parallel.weight_grad_store import Task, WeightGradStore
from penstock.plan.hardware import RankGroup

GRANULE = 512
"""Bytes that the allocator of a GPU hands out multiples of."""


@dataclass(frozen=True, kw_only=True)
class TrackedSection:
    """What happened between two marks.

    Attributes:
        name: of the work.
        start: bytes that were held when it began.
        end: bytes that were held at its end.
        peak: the most in between.
        before: what was held when it began, by the name of who allocated it.
        held: the same at its end.
        at_peak: the same at the peak.
    """

    name: str
    start: int
    end: int
    peak: int
    before: Counter[str]
    held: Counter[str]
    at_peak: Counter[str]

    @property
    def passing(self) -> int:
        """The most over what was held when it began."""
        return self.peak - self.start


class MemoryTracker(TorchDispatchMode):
    """Counts storages while it is entered.

    Attributes:
        live: bytes held at the moment.
        held: the same by the name of who allocated them.
        sections: what has been marked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.held: Counter[str] = Counter()
        self.sections: list[TrackedSection] = []
        self._names = [""]
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._start = 0
        self._peak, self._at_peak, self._before = 0, Counter[str](), Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator, and count what it returns; also for another mode that keeps this ledger."""
        for tensor in _tensors_in((args, *kwargs.values())):
            self._was_there(tensor)
        result = func(*args, **kwargs)
        for tensor in _tensors_in((result,)):
            self._count(tensor)
        return result

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """What is allocated inside is put down to `name`."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        """Begin what `leave` ends; see `named`."""
        self._names.append(name)

    def leave(self) -> None:
        """End the innermost name."""
        self._names.pop()

    def mark(self, name: str) -> TrackedSection:
        """End a section, which began at the mark before, and name it."""
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

    def _was_there(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            key = storage._cdata
            self._seen[key] = weakref.ref(storage, lambda _: self._seen.pop(key, None))

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = -(-storage.nbytes() // GRANULE) * GRANULE
        name = self._names[-1]
        self.live += size
        self.held[name] += size
        if self.live > self._peak:
            self._peak = self.live
            self._at_peak = Counter(self.held)

        def is_free(_: object) -> None:
            self._seen.pop(key, None)
            self.live -= size
            self.held[name] -= size

        self._seen[key] = weakref.ref(storage, is_free)


FORK, END, JOIN, WAIT, PUT_OFF = "fork", "end", "join", "wait", "put off"
"""Names of operators that move nothing: a second stream begins after all so far; ends; the first waits for that end;
the host waits for the device; a weight gradient is put off (penstock/parallel/weight_grad_store.py)."""

TO_HOST, FROM_HOST, ARRIVE = "to host", "from host", "arrive"
"""Names of what happens to a storage that waits in host memory: it leaves; begins its way back; must have come."""

_LIBRARY = torch.library.Library("penstock", "FRAGMENT")
_LIBRARY.define("marked(str name, int number) -> ()")
_LIBRARY.define("copied(str name, int number, int size) -> ()")


def _nothing(name: str, number: int) -> None:
    """What a mark does."""


def _no_copy(name: str, number: int, size: int) -> None:
    """What a copy does."""


_LIBRARY.impl("marked", _nothing, "CompositeExplicitAutograd")
_LIBRARY.impl("copied", _no_copy, "CompositeExplicitAutograd")

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
"""Operators of torch that give the device nothing to do, and are not views by their schema."""


class RecordedOp(NamedTuple):
    """One operator.

    Attributes:
        name: torch's without namespace and overload, a Triton kernel's, or one of this file.
        shapes: of its tensors: first those that it is given, then its results.
        sizes: bytes of each; a tensor that is changed in place stands among the first only. Of a copy, its own.
        itemsize: bytes of a number of the first tensor.
        switches: constants of a kernel that are true; the number of a mark, or of a storage.
        group: ranks of a collective.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[int, ...] = ()
    itemsize: int = 0
    switches: tuple[str, ...] = ()
    group: RankGroup | None = None

    @property
    def moved_bytes(self) -> int:
        """Every tensor once."""
        return sum(self.sizes)


RecordedOps = tuple[RecordedOp, ...]


class OpRecorder(TorchDispatchMode):
    """Writes operators down while it is entered.

    Args:
        ranks_per_node: that fast links join; 0 for all.
        ledger: that counts what the same operators return; two modes would take each operator through Python twice.
    """

    def __init__(self, ranks_per_node: int = 0, ledger: MemoryTracker | None = None) -> None:
        super().__init__()
        self._ranks_per_node = ranks_per_node
        self._ledger = ledger
        self._written: list[RecordedOp] = []

    def cut(self) -> RecordedOps:
        """What was written since the cut before."""
        work, self._written = tuple(self._written), []
        return work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs) if self._ledger is None else self._ledger.call(func, args, kwargs)
        namespace, name, is_silent = _facts(func)
        if namespace == "penstock":
            self._written.append(_ours(name, args))
        elif not is_silent:
            group = self._group(args) if namespace.startswith("c10d") else None
            self._written.append(_operator(name, [*args, *kwargs.values()], result, group))
        return result

    def _group(self, arguments: Iterable[Any]) -> RankGroup:
        (script,) = (one for one in arguments if isinstance(one, torch.ScriptObject) and _is_group(one))
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(script))
        here = self._ranks_per_node or len(ranks)
        inside = sum(rank // here == ranks[0] // here for rank in ranks)
        return RankGroup(len(ranks), inside if len(ranks) % inside == 0 else 1)


class RecordedWeightGradStore(WeightGradStore):
    """Writes down that something is put off."""

    def add(self, task: Task) -> None:
        """See `WeightGradStore`."""
        torch.ops.penstock.marked(PUT_OFF, 0)
        super().add(task)


class RecordedTransfers(TransferStream):
    """Transfers that are written down as work of a second stream."""

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
        """See `TransferStream`."""
        if end is not None:
            torch.ops.penstock.marked(JOIN, end)


@dataclass(frozen=True)
class RecordedCopy(PendingCopy):
    """A copy of a `RecordedLane`; here it is over at once.

    Attributes:
        number: of the storage.
        is_back: it comes from the host. Who waits for another one waits for room, which depends on times.
    """

    number: int = 0
    is_back: bool = False

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """See `PendingCopy`."""
        if self.is_back:
            torch.ops.penstock.marked(ARRIVE, self.number)


class RecordedLane(CopyStream):
    """Copies that are written down.

    Args:
        is_back: they come from the host.
    """

    def __init__(self, *, is_back: bool) -> None:
        super().__init__(torch.device("cpu"))
        self._is_back = is_back
        self._number = 0

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], *, after: PendingCopy = DONE) -> RecordedCopy:
        """See `CopyStream`; what comes back has the number under which it left."""
        self._number += 1
        number = after.number if isinstance(after, RecordedCopy) else self._number
        size = sum(source.nbytes for source, _ in pairs)
        torch.ops.penstock.copied(FROM_HOST if self._is_back else TO_HOST, number, size)
        return RecordedCopy(number=number, is_back=self._is_back)


def _ours(name: str, arguments: Sequence[Any]) -> RecordedOp:
    """What penstock's own operators say."""
    if name == "waited":
        return RecordedOp(WAIT)
    if name == "marked":
        return RecordedOp(arguments[0], switches=(str(arguments[1]),))
    if name == "copied":
        return RecordedOp(arguments[0], sizes=(arguments[2],), switches=(str(arguments[1]),))
    kernel, tensors, switches = arguments
    return _with_tensors(kernel, tensors, tuple(switches), None)


def _operator(name: str, arguments: Iterable[Any], result: Any, group: RankGroup | None) -> RecordedOp:
    """One of torch's."""
    given = list(_tensors_in(arguments))
    known = {tensor.untyped_storage()._cdata for tensor in given}
    made = [tensor for tensor in _tensors_in((result,)) if tensor.untyped_storage()._cdata not in known]
    return _with_tensors(name, given + made, (), group)


def _with_tensors(
    name: str, tensors: Sequence[Tensor], switches: tuple[str, ...], group: RankGroup | None
) -> RecordedOp:
    return RecordedOp(
        name=name,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        sizes=tuple(tensor.nbytes for tensor in tensors),
        itemsize=tensors[0].itemsize if tensors else 0,
        switches=switches,
        group=group,
    )


@cache
def _facts(func: Any) -> tuple[str, str, bool]:
    """Namespace and name of an operator of torch, and whether it gives a device nothing to do."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
    return namespace, name, is_view or name in _SILENT


def _is_group(script: Any) -> bool:
    return script._type().name() == "ProcessGroup"


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)
