"""Run a kernel of Hopper's whose warps have trades of their own on a CPU: what `gluon_in_torch` lacks for that.

    launched = launched_on_cpu(monkeypatch, hopper_weight_gradient, "weight_gradient_kernel")

Each partition of a program is a thread. What the hardware does behind a program's back is done as late as it may be:
products when they are waited for, copies out of shared memory too. So memory that is given away too early shows in the
result. Threads that wait for each other are a mistake, and end.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.float8.gluon_in_torch import Language, Layout, Shared, Value, interpreted, launch, value

PATIENCE = 20.0
"""Seconds that a thread waits for the others."""


class Memory(Shared):
    """Shared memory whose blocks can be looked at in other shapes."""

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def index(self, place: Any) -> "Memory":
        assert 0 <= int(place) < len(self.x), f"no slot {place}"
        return Memory(self.x[int(place)])

    def reshape(self, shape: Sequence[int]) -> "Memory":
        return Memory(self.x.view(*shape))

    def permute(self, dims: Sequence[int]) -> "Memory":
        return Memory(self.x.permute(*dims))


@dataclass
class Barrier:
    """So many arrivals and all expected bytes end a phase; who waits for a parity goes on once that phase is over."""

    arrivals: int
    pending: int
    bytes: int = 0
    phase: int = 0

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
    """Of products that were started, the last of which may not be made yet."""

    x: Tensor
    waiting: list[tuple[Memory, Memory]] = field(default_factory=list)


@dataclass(frozen=True)
class Descriptor:
    """Blocks of memory, as the host describes them; zeros outside of the shape."""

    memory: Tensor
    shape_of: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
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
    assert argument.base.is_contiguous()
    shapes = (tuple(one) for one in (argument.shape, argument.strides, argument.block_shape))
    return Descriptor(argument.base.view(-1), *shapes)


TURN = threading.Condition()
BARRIERS: dict[int, Barrier] = {}
FAILURES: list[BaseException] = []
"""Of threads; the first is the cause of the others."""
MINE = threading.local()
"""What a thread's copies out of shared memory are, that have not been made."""


def init(barrier: Memory, count: int) -> None:
    BARRIERS[barrier.x.data_ptr()] = Barrier(count, count)


def wait(barrier: Memory, phase: Any) -> None:
    held, parity = BARRIERS[barrier.x.data_ptr()], int(phase)
    with TURN:
        TURN.wait_for(lambda: held.phase % 2 != parity or FAILURES, PATIENCE)
        assert held.phase % 2 != parity, "everybody waits"


def expect(barrier: Memory, count: int) -> None:
    BARRIERS[barrier.x.data_ptr()].change(1, count)


def arrive(barrier: Memory, *, count: int = 1, pred: Any = True) -> None:
    if bool(pred):
        BARRIERS[barrier.x.data_ptr()].change(count, 0)
        # Whoever waits for this may act before the next line does.
        time.sleep(0.0002)


def copy_in(source: Descriptor, place: Sequence[Any], barrier: Memory, slot: Memory) -> None:
    places, inside = source.places(place)
    assert slot.x.shape == places.shape and slot.x.dtype == source.dtype
    slot.x.copy_(torch.where(inside, source.memory[torch.where(inside, places, 0)], 0))
    BARRIERS[barrier.x.data_ptr()].change(0, -slot.x.numel() * slot.x.itemsize)


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


def warpgroup_mma(a: Memory, b: Memory, sums: Any, *, is_async: bool) -> Sums:
    assert is_async
    sums = sums if isinstance(sums, Sums) else Sums(torch.as_tensor(sums).as_subclass(Tensor))
    return Sums(sums.x, [*sums.waiting, (a, b)])


def warpgroup_mma_wait(left: int, deps: Sequence[Any]) -> Any:
    (sums,) = deps
    if isinstance(sums, Tensor):
        return sums
    made = len(sums.waiting) - left
    for a, b in sums.waiting[: max(made, 0)]:
        sums = Sums(sums.x + a.x.float() @ b.x.float(), sums.waiting[1:])
    return sums if sums.waiting else value(sums.x)


def warp_specialize(parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *warps: Sequence[int]) -> None:
    FAILURES.clear()

    def run(part: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        MINE.copies = []
        part(*arguments)
        assert not MINE.copies, "the program ends before its memory has been read"

    def tell_others(done: Future[None]) -> None:
        if done.exception() is not None:
            with TURN:
                FAILURES.append(done.exception())
                TURN.notify_all()

    with ThreadPoolExecutor(len(parts)) as threads:
        work = [threads.submit(run, *part) for part in parts]
        for one in work:
            one.add_done_callback(tell_others)
    if FAILURES:
        raise FAILURES[0]


class HoppersLanguage(Language):
    """Gluon's, with what warps of their own trades need."""

    NVMMADistributedLayout = type(
        "NVMMADistributedLayout", (Layout,), {"__init__": lambda self, **k: Layout.__init__(self)}
    )
    warp_specialize = staticmethod(warp_specialize)
    reshape = staticmethod(lambda x, shape: x.reshape(shape))
    permute = staticmethod(lambda x, dims: x.permute(dims))
    split = staticmethod(lambda x: x.unbind(-1))
    to_tensor = staticmethod(lambda x: value(x, torch.int32))
    cdiv = staticmethod(lambda x, by: (x + by - 1) // by)

    @staticmethod
    def zeros(shape: Sequence[int], dtype: torch.dtype, layout: object) -> Value:
        return value(torch.zeros(shape, dtype=dtype))

    @staticmethod
    def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Memory:
        filler = float("nan") if dtype.is_floating_point else 0
        return Memory(torch.full(tuple(shape), filler, dtype=dtype))


def interpret_trades(*names: str) -> ModuleType:
    """The last of some modules of ours, executed where Triton is what stands here; `hopper_ring` is there before."""
    root = "triton.experimental.gluon.language"
    core, nvidia, hopper = ModuleType("_core"), ModuleType("nvidia"), ModuleType("hopper")
    mbarrier, tma = ModuleType("mbarrier"), ModuleType("tma")
    # The one builtin of our own speaks to the compiler.
    vars(core).update(builtin=lambda function: {"add_out": add_out}[function.__name__], ir=None)
    vars(mbarrier).update(init=init, wait=wait, expect=expect, arrive=arrive, MBarrierLayout=Layout)
    vars(tma).update(async_load=copy_in, async_store=copy_out, store_wait=store_wait)
    vars(hopper).update(mbarrier=mbarrier, tma=tma, fence_async_shared=lambda: None)
    vars(hopper).update(warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait)
    vars(nvidia).update(hopper=hopper)
    more = {f"{root}._core": core, f"{root}.nvidia": nvidia, f"{root}.nvidia.hopper": hopper}
    ring = "penstock.kernels.hopper_ring"
    return interpreted(ring, *names, language=HoppersLanguage("language"), more=more)[-1]


def launched_on_cpu(monkeypatch: pytest.MonkeyPatch, launcher: ModuleType, name: str) -> list[Mapping[str, Any]]:
    """Let torch run the kernel of a module that launches it; what it was launched with comes into the list."""
    if torch.cuda.is_available():
        pytest.skip("tables of tiles are made on the GPU that there is")
    kernel, source = getattr(launcher, name), interpret_trades(f"{launcher.__name__}_kernel")
    found: list[Mapping[str, Any]] = []

    def start_kernel(started: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        assert started is kernel
        found.append({"programs": grid[0], **constants})
        constants = {name: value for name, value in constants.items() if name.isupper()}
        launch(getattr(source, name), grid, *map(in_memory, arguments), **constants)

    monkeypatch.setattr(launcher, "start_kernel", start_kernel)
    return found
