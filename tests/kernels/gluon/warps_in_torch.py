"""Run a warp-specialized Hopper kernel on a CPU: the parts of Gluon that `gluon_in_torch` lacks.

    launched = launched_on_cpu(monkeypatch, grouped_gemm, grouped_gemm_kernels, "weight_gradient_kernel")

Each partition of a program is a thread. Asynchronous operations finish as late as allowed: products when they are
waited for, copies out of shared memory too, and copies of threads when they arrive at their barrier. A thread that
frees memory lets all others run as far as they can, so memory that is freed too early changes the result. A deadlock is
an error.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.gluon.gluon_in_torch import (
    BITS,
    Language,
    Layout,
    Pointer,
    Shared,
    interpreted,
    launch,
    load,
    memory_of,
    value,
)

PATIENCE = 20.0  # seconds that a thread waits for the others


class Memory(Shared):
    """Shared memory whose blocks can be looked at in other shapes."""

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def index(self, place: Any) -> "Memory":
        assert 0 <= int(place) < len(self.x), f"no slot {place}"
        return Memory(self.x[int(place)])

    def reshape(self, shape: Sequence[int]) -> "Memory":
        return Memory(self.x.view(*shape))

    def permute(self, dims: Sequence[int]) -> "Memory":
        return Memory(self.x.permute(*dims))


@dataclass(eq=False)
class Barrier:
    """A phase ends after all arrivals and all expected bytes; a wait for a parity returns once that phase is over."""

    arrivals: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def is_over(self, parity: int) -> bool:
        return self.phase % 2 != parity

    def change(self, arrivals: int, count: int) -> None:
        with TURN:
            self.pending -= arrivals
            self.bytes += count
            assert self.pending >= 0, "more arrivals than a phase has"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.arrivals
            TURN.notify_all()


@dataclass
class Sums:
    """Of products that were started, of which so many are not made yet."""

    x: Tensor
    waiting: int = 0


@dataclass(frozen=True)
class Descriptor:
    """Blocks of memory, as the host describes them; zeros outside of the shape."""

    memory: Tensor
    shape_of: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: list[int]
    layout: object = None

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def places(self, place: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Of a block's numbers in memory, and which of them are inside."""
        first = [int(one) for one in place]
        # Strides of ragged descriptors undo each other modulo 2**64.
        start = sum(one * stride for one, stride in zip(first, self.strides, strict=True)) % 2**64
        start -= 2**64 if start >= 2**63 else 0
        places, inside = torch.full(self.block_shape, start), torch.ones(self.block_shape, dtype=torch.bool)
        for dim, (one, length) in enumerate(zip(first, self.block_shape, strict=True)):
            steps = torch.arange(length).view([-1 if other == dim else 1 for other in range(len(first))])
            if length > 1:
                places = places + steps * self.strides[dim]
            inside = inside & (one + steps >= 0) & (one + steps < self.shape_of[dim])
        assert bool(((places >= 0) & (places < len(self.memory)) | ~inside).all()), "a place outside of the memory"
        return places, inside


def in_memory(argument: Any) -> Any:
    """A kernel's argument as `launch` takes it: a host's descriptor becomes one of ours."""
    if not hasattr(argument, "block_shape"):
        return argument
    return Descriptor(
        memory_of(argument.base), tuple(argument.shape), tuple(argument.strides), list(argument.block_shape)
    )


TURN = threading.Condition()
BARRIERS: dict[int, Barrier] = {}  # by address
WAITS: dict[int, Callable[[], bool]] = {}  # by number of a thread, what it waits for
BUSY: set[int] = set()  # threads that do not stand still
FAILURES: list[BaseException] = []  # of threads; the first is the cause of the others
# A thread's `number`, and what it has begun and not seen the end of: `copies` out of shared memory, `loads`, which are
# its own copies into it, and `products`.
MINE = threading.local()


def init(barrier: Memory, count: int) -> None:
    BARRIERS[barrier.x.data_ptr()] = Barrier(count, count)


def wait(barrier: Memory, phase: Any) -> None:
    held, parity = BARRIERS[barrier.x.data_ptr()], int(phase)
    with TURN:
        WAITS[MINE.number] = partial(held.is_over, parity)
        _stand_still(WAITS[MINE.number])
        del WAITS[MINE.number]
        assert held.is_over(parity), "everybody waits"


def _stand_still(until: Callable[[], bool]) -> None:
    """This thread, until something is so, or another one has failed, or patience ends."""
    BUSY.remove(MINE.number)
    TURN.notify_all()
    TURN.wait_for(lambda: until() or FAILURES, PATIENCE)
    BUSY.add(MINE.number)


def expect(barrier: Memory, count: int) -> None:
    BARRIERS[barrier.x.data_ptr()].change(1, count)


def arrive(barrier: Memory, *, count: int = 1, pred: Any = True) -> None:
    if bool(pred):
        BARRIERS[barrier.x.data_ptr()].change(count, 0)
        with TURN:
            _stand_still(lambda: not BUSY and not any(is_over() for is_over in WAITS.values()))


def copy_in(source: Descriptor, place: Sequence[Any], barrier: Memory, slot: Memory) -> None:
    places, inside = source.places(place)
    assert slot.x.shape == places.shape and slot.x.dtype == source.dtype
    # torch picks no numbers of 8 bits out.
    bits = BITS[source.dtype.itemsize]
    slot.x.view(bits).copy_(torch.where(inside, source.memory.view(bits)[torch.where(inside, places, 0)], 0))
    BARRIERS[barrier.x.data_ptr()].change(0, -slot.x.numel() * slot.x.itemsize)


def copy_by_threads(slot: Memory, source: Pointer) -> None:
    MINE.loads.append((slot, source))


def arrive_behind_copies(barrier: Memory, *, increment_count: bool) -> None:
    """Of the threads of one warp, when what each of them copies has landed."""
    assert not increment_count
    while MINE.loads:
        slot, source = MINE.loads.pop(0)
        slot.store(load(source))
    BARRIERS[barrier.x.data_ptr()].change(32, 0)


def copy_out(target: Descriptor, place: Sequence[Any], slot: Memory) -> None:
    MINE.copies.append((target, [int(one) for one in place], slot, False))


def add_out(target: Descriptor, place: Sequence[Any], slot: Memory) -> None:
    MINE.copies.append((target, [int(one) for one in place], slot, True))


def store_wait(left: int) -> None:
    while len(MINE.copies) > left:
        target, place, slot, is_sum = MINE.copies.pop(0)
        places, inside = target.places(place)
        numbers = slot.x + target.memory[torch.where(inside, places, 0)] if is_sum else slot.x
        assert numbers.dtype == target.dtype
        target.memory[places[inside]] = numbers[inside]


def warpgroup_mma(a: Memory, b: Memory, sums: Any, *, is_async: bool, use_acc: bool = True) -> Sums:
    assert is_async
    sums = sums if isinstance(sums, Sums) else Sums(torch.as_tensor(sums).as_subclass(Tensor))
    assert use_acc or not sums.x.any(), "sums that are given are left out"
    sums.waiting += 1
    MINE.products.append((sums, a, b))
    return sums


def warpgroup_mma_wait(left: int, deps: Sequence[Any]) -> Any:
    while len(MINE.products) > left:
        sums, a, b = MINE.products.pop(0)
        sums.x, sums.waiting = sums.x + a.x.float() @ b.x.float(), sums.waiting - 1
    (awaited,) = deps
    return awaited if isinstance(awaited, Tensor) or awaited.waiting else value(awaited.x)


def warp_specialize(parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *warps: Sequence[int]) -> None:
    FAILURES.clear()
    WAITS.clear()
    BUSY.update(range(len(parts)))

    def run(number: int, part: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        MINE.number, MINE.copies, MINE.loads, MINE.products = number, [], [], []
        part(*arguments)
        assert not MINE.copies, "the program ends before its memory has been read"
        assert not MINE.loads and not MINE.products, "an operation is started that is never waited for"

    def tell_others(number: int, done: Future[None]) -> None:
        with TURN:
            BUSY.remove(number)
            WAITS.pop(number, None)
            if done.exception() is not None:
                FAILURES.append(done.exception())
            TURN.notify_all()

    with ThreadPoolExecutor(len(parts)) as threads:
        for number, part in enumerate(parts):
            threads.submit(run, number, *part).add_done_callback(partial(tell_others, number))
    if FAILURES:
        raise FAILURES[0]


class HoppersLanguage(Language):
    """Gluon's, with what warps of their own trades need."""

    NVMMADistributedLayout = type(
        "NVMMADistributedLayout", (Layout,), {"__init__": lambda self, **k: Layout.__init__(self)}
    )
    warp_specialize = staticmethod(warp_specialize)
    permute = staticmethod(torch.permute)
    to_tensor = staticmethod(lambda x: value(x, torch.int32))
    cdiv = staticmethod(lambda x, by: (x + by - 1) // by)
    zeros = staticmethod(lambda shape, dtype, layout: value(torch.zeros(shape, dtype=dtype)))
    full = staticmethod(lambda shape, x, dtype, layout: value(torch.as_tensor(x, dtype=dtype).expand(*shape)))

    @staticmethod
    def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Memory:
        filler = float("nan") if dtype.is_floating_point else 0
        return Memory(torch.full(tuple(shape), filler, dtype=dtype))


def interpret_trades(*names: str) -> ModuleType:
    """The last of some modules of ours, executed where Triton is what stands here; `hopper_ring` is there before."""
    root = "triton.experimental.gluon.language"
    core, nvidia, hopper, ampere = (ModuleType(name) for name in ("_core", "nvidia", "hopper", "ampere"))
    mbarrier, tma, async_copy = (ModuleType(name) for name in ("mbarrier", "tma", "async_copy"))
    # The one builtin of our own speaks to the compiler.
    vars(core).update(builtin=lambda function: {"add_out": add_out}[function.__name__], ir=None)
    vars(mbarrier).update(init=init, wait=wait, expect=expect, arrive=arrive, MBarrierLayout=Layout)
    vars(tma).update(async_load=copy_in, async_store=copy_out, store_wait=store_wait)
    vars(hopper).update(mbarrier=mbarrier, tma=tma, fence_async_shared=lambda: None)
    vars(hopper).update(warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait)
    vars(async_copy).update(async_load=copy_by_threads, mbarrier_arrive=arrive_behind_copies)
    vars(ampere).update(async_copy=async_copy)
    vars(nvidia).update(hopper=hopper, ampere=ampere)
    more = {f"{root}._core": core, f"{root}.nvidia": nvidia}
    more |= {f"{root}.nvidia.{module.__name__}": module for module in (hopper, ampere)}
    ring = "penstock.kernels.gluon.grouped_gemm_kernels"
    return interpreted(ring, *names, language=HoppersLanguage("language"), more=more)[-1]


def launched_on_cpu(
    monkeypatch: pytest.MonkeyPatch, launcher: ModuleType, module: ModuleType, *names: str
) -> list[Mapping[str, Any]]:
    """Let torch run kernels of `module` where `launcher` starts them; their options come into the list."""
    if torch.cuda.is_available():
        pytest.skip("tables of tiles are made on the GPU that there is")
    interpreted_module = interpret_trades(module.__name__)
    kernels = {getattr(module, name): getattr(interpreted_module, name) for name in names}
    found: list[Mapping[str, Any]] = []

    in_triton = launcher.start_kernel  # of kernels that are not named

    def start_kernel(started: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if started not in kernels:
            in_triton(started, grid, *arguments, **constants)
            return
        found.append({"programs": grid[0], **constants})
        constants = {name: value for name, value in constants.items() if name.isupper()}
        assert list(started.arg_names[len(arguments) :]) == list(constants), "constants follow the arguments"
        launch(kernels[started], grid, *map(in_memory, arguments), **constants)

    monkeypatch.setattr(launcher, "start_kernel", start_kernel)
    return found
