"""Run a kernel written in Gluon on a CPU, by torch, because Triton's interpreter knows no Gluon.

`interpreted(*modules)` executes the sources of modules again with this module's stand-ins for Triton and its languages,
and returns them; `launch` runs a kernel of one of them. Layouts are ignored, and pointers are a tensor's memory with
places in it. Inline assembly is interpreted instruction by instruction, by PTX's definitions, without approximations.

    module = interpreted(*QUANTIZING)[-1]
    launch(module.some_kernel, (3,), x, 16, LARGEST=448.0)

Loads and stores outside of a tensor, and missing masks, are errors.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from penstock.kernels.float8 import quantize

# Modules of the kernels that quantize tiles, in the order of their imports.
QUANTIZING = (
    "penstock.kernels.float8.quantize_kernels",
    "penstock.kernels.gluon.float8_quantize_kernels",
    "penstock.kernels.gluon.float8_quantize_kernels",
)

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by size in bytes
GRID: list[int] = []
PROGRAM: list[int] = []  # which one runs; there is one at a time


class Value(Tensor):
    """A tensor, or a number of no dims, of a program."""

    def to(self, dtype: torch.dtype, *, bitcast: bool = False) -> Tensor:
        return self.view(dtype) if bitcast else super().to(dtype)

    # Names are bound anew, and what they stood for before stays.
    def __iadd__(self, other: Any) -> Tensor:
        return self + other

    def __imul__(self, other: Any) -> Tensor:
        return self * other


def value(x: Any, dtype: torch.dtype | None = None) -> Value:
    return torch.as_tensor(x, dtype=dtype).as_subclass(Value)


@dataclass(frozen=True)
class Pointer:
    """Memory, and places in it."""

    memory: Tensor
    places: Any

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.places + other)

    def chosen(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Places, and which of them are meant; those must exist."""
        places = torch.as_tensor(self.places).long()
        meant = torch.ones_like(places, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        places, meant = torch.broadcast_tensors(places, meant)
        inside = (places >= 0) & (places < len(self.memory))
        assert bool((inside | ~meant).all()), "a place outside of the memory"
        return places, meant


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Value:
    places, meant = pointer.chosen(mask)
    assert not other, "zero is what we ask for, and has no bits in any type"
    # torch picks no numbers of 8 bits out.
    bits = pointer.memory.view(BITS[pointer.memory.itemsize])[torch.where(meant, places, 0)]
    return value(torch.where(meant, bits, 0).to(bits.dtype).view(pointer.memory.dtype))


def store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    places, meant = pointer.chosen(mask)
    numbers = torch.as_tensor(x, dtype=pointer.memory.dtype).broadcast_to(places.shape)
    pointer.memory[places[meant]] = numbers[meant].as_subclass(Tensor)


class Shared:
    """Shared memory, NaN or garbage before something is stored."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def index(self, place: Any) -> "Shared":
        return Shared(self.x[int(place)])

    def load(self, layout: object) -> Value:
        return value(self.x.clone())

    def store(self, x: Tensor) -> None:
        assert self.x.shape == x.shape and self.x.dtype == x.dtype, f"{x.dtype} {x.shape} for {self.x.dtype}"
        self.x.copy_(x)


def reduce(x: Tensor, dim: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    while x.shape[dim] > 1:
        x = combine(*x.chunk(2, dim))
    return x.squeeze(dim)


class Layout:
    def __init__(self, *arguments: object) -> None:
        self.value = self


def same(x: Any = None, **options: object) -> Any:
    """Stands for decorators and for the compiler's constants."""
    if x is None:
        return same
    if callable(x) and not isinstance(x, type):
        x.fn = x
    return x


def inline_asm(asm: str, constraints: str, arguments: Sequence[Tensor], dtype: Any, is_pure: bool, pack: int) -> Any:
    """Instructions on each group of `pack` neighbours of the last dim."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    arguments = torch.broadcast_tensors(*arguments)
    shape = arguments[0].shape
    registers: list[Tensor] = []
    for x in arguments:
        per_register = max(4 // x.itemsize, 1)
        groups = x.as_subclass(Tensor).reshape(-1, pack // min(per_register, pack), min(per_register, pack))
        registers += [_joined(groups[:, place]) for place in range(groups.shape[1])]
    outputs = constraints.count("=")
    found = run_ptx(asm, outputs, registers)
    results = []
    for one in dtypes:
        each = outputs // len(dtypes)
        mine, found = found[:each], found[each:]
        numbers = torch.stack([_parted(x, one, pack // each) for x in mine], 1)
        results.append(value(numbers.reshape(shape)))
    return tuple(results) if isinstance(dtype, tuple) else results[0]


def _joined(numbers: Tensor) -> Tensor:
    """Neighbours in one register, the first lowest."""
    bits, whole = BITS[numbers.itemsize], BITS[numbers.itemsize * numbers.shape[1]]
    return numbers.contiguous().view(bits).view(whole).reshape(-1)


def _parted(register: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    return register.reshape(-1, 1).view(torch.uint8)[:, : dtype.itemsize * count].contiguous().view(dtype)


def run_ptx(asm: str, outputs: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Registers $0 and on behind some instructions, from those of the inputs."""
    held = {f"${outputs + place}": register for place, register in enumerate(inputs)}
    # Of vectors of numbers of 32 bits only, which lie over the threads one by one.
    held["%laneid"] = torch.arange(len(inputs[0]), dtype=torch.int32) % 32
    # Braces of a scope go, those of `mov` stay.
    body = re.sub(r"^\{|\}$", "", asm.strip())
    for statement in filter(None, (part.strip() for part in body.split(";"))):
        if statement.startswith(".reg"):
            continue
        name, rest = statement.split(maxsplit=1)
        target, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        held[target] = _INSTRUCTIONS[name](*(_operand(held, source) for source in sources))
    return [held[f"${place}"] for place in range(outputs)]


def _operand(held: dict[str, Tensor], text: str) -> Any:
    if text.startswith("{"):
        return [held[name.strip()] for name in text[1:-1].split(",")]
    if text.startswith("0f"):
        return torch.tensor(int(text[2:], 16)).to(torch.uint32).view(torch.float32)
    if text in held:
        return held[text]
    number = int(text, 0)
    return number - 2**32 if number >= 2**31 else number


def _permuted(one: Tensor, other: Tensor, chosen: int) -> Tensor:
    """Four of the eight bytes of two registers, the first one's lower; each digit says which, the lowest first."""
    both = torch.stack([one, other], 1).view(torch.int8)
    return _joined(both[:, [chosen >> 4 * place & 7 for place in range(4)]])


def _float(register: Tensor) -> Tensor:
    return register if register.dtype == torch.float32 else register.view(torch.float32)


def _pair(register: Tensor) -> Tensor:
    """Lower and upper half as bfloat16."""
    return register.reshape(-1, 1).view(torch.bfloat16)


def _word(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.int32).reshape(-1)


def _larger(one: Tensor, other: Tensor) -> Tensor:
    """`xorsign.abs`: the larger magnitude, under the signs' exclusive or."""
    a, b = _pair(one), _pair(other)
    sign = torch.signbit(a) ^ torch.signbit(b)
    size = torch.maximum(a.abs(), b.abs())
    return _word(torch.where(sign, -size, size))


def _to_8_bits(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """The first operand becomes the upper byte; what is too large becomes the largest, NaN stays."""
    largest = torch.finfo(dtype).max

    def convert(upper: Tensor, lower: Tensor) -> Tensor:
        numbers = torch.stack([_float(lower), _float(upper)], 1)
        return numbers.clamp(-largest, largest).to(dtype).view(torch.int16).reshape(-1)

    return convert


_INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "prmt.b32": _permuted,
    "shl.b32": lambda a, count: a << count,
    "add.s32": lambda a, b: a + b,
    "mov.u32": lambda a: a,
    "and.b32": lambda a, mask: a & mask,
    "mov.b32": lambda parts: _joined(torch.stack(parts, 1)),
    "mov.b64": lambda parts: _joined(torch.stack(parts, 1)),
    "mul.f32": lambda a, b: _float(a) * b,
    "add.f32": lambda a, b: _float(a) + b,
    "ex2.approx.ftz.f32": lambda a: a.exp2(),
    "rcp.approx.ftz.f32": lambda a: a.reciprocal(),
    "cvt.rn.bf16x2.f32": lambda upper, lower: _word(torch.stack([_float(lower), _float(upper)], 1).bfloat16()),
    "mul.rn.bf16x2": lambda a, b: _word(_pair(a) * _pair(b)),
    "max.NaN.xorsign.abs.bf16x2": _larger,
    "cvt.rn.satfinite.e4m3x2.f32": _to_8_bits(torch.float8_e4m3fn),
    "cvt.rn.satfinite.e5m2x2.f32": _to_8_bits(torch.float8_e5m2),
}


class Language(ModuleType):
    """`triton.language`, and Gluon's."""

    int8, int16, int32, int64 = torch.int8, torch.int16, torch.int32, torch.int64
    bfloat16, float32 = torch.bfloat16, torch.float32
    constexpr = staticmethod(same)
    BlockedLayout = SliceLayout = SharedLinearLayout = SwizzledSharedLayout = Layout
    static_range = range
    static_assert = staticmethod(lambda *arguments: None)
    shared_memory_descriptor_type = distributed_type = Layout
    bank_conflicts = staticmethod(lambda *arguments: 0)
    load, store, reduce = staticmethod(load), staticmethod(store), staticmethod(reduce)
    inline_asm_elementwise = staticmethod(inline_asm)
    expand_dims = staticmethod(torch.unsqueeze)
    convert_layout = staticmethod(lambda x, layout: x)
    reshape = staticmethod(torch.reshape)
    split = staticmethod(lambda x: x.unbind(-1))
    sum, exp2 = staticmethod(torch.sum), staticmethod(torch.exp2)
    num_warps = staticmethod(lambda: 8)
    program_id = staticmethod(lambda dim: value(PROGRAM[dim], torch.int32))
    num_programs = staticmethod(lambda dim: value(GRID[dim], torch.int32))

    @staticmethod
    def arange(start: int, end: int, layout: object = None) -> Value:
        return value(torch.arange(start, end, dtype=torch.int32))

    @staticmethod
    def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
        return Shared(torch.full(tuple(shape), 0x7FC07FC0, dtype=dtype))  # of bfloat16 that is NaN

    @staticmethod
    def where(condition: Any, one: Any, other: Any) -> Value:
        return value(torch.where(torch.as_tensor(condition), one, other))

    @staticmethod
    def minimum(one: Any, other: Any) -> Value:
        return value(torch.minimum(torch.as_tensor(one), torch.as_tensor(other)))

    @staticmethod
    def maximum(one: Tensor, other: Any) -> Value:
        return value(torch.maximum(one, torch.as_tensor(other, dtype=one.dtype)))


def _in_place_of_triton(language: Language) -> dict[str, ModuleType]:
    """Stand-ins by the names of modules."""
    root, gluon, ours = ModuleType("triton"), ModuleType("gluon"), ModuleType("language")
    vars(root).update(jit=same, constexpr_function=same, language=language)
    vars(root)["knobs"] = type("Knobs", (), {"runtime": type("Runtime", (), {"interpret": False})})
    vars(gluon).update(jit=same, language=language)
    vars(ours).update(triton=root, tl=language)
    experimental = ModuleType("experimental")
    vars(experimental)["gluon"] = gluon
    return {
        "penstock.kernels.language": ours,
        "triton": root,
        "triton.language": language,
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": language,
    }


def interpreted(
    *names: str, language: Language | None = None, more: Mapping[str, ModuleType] | None = None
) -> list[ModuleType]:
    """Modules of ours, executed in this order with the stand-ins of this module; each sees those before it.

    `language` replaces Triton's languages, `more` further modules by name.
    """
    found = []
    language = language or Language("language")
    # Looked for before, because that imports packages.
    specs: list[ModuleSpec | None] = [find_spec(name) for name in names]
    with patch.dict(sys.modules, _in_place_of_triton(language) | (more or {})):
        for name, spec in zip(names, specs, strict=True):
            assert spec is not None and spec.loader is not None, name
            module = sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(module)
            found.append(module)
    return found


def memory_of(x: Tensor) -> Tensor:
    """From its first number to its last one, and what lies between them."""
    size = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((size,), (1,)) if x.numel() else x.reshape(-1)


def launch(kernel: Callable[..., None], grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
    """Run all programs of a kernel, one after the other; tensors are pointers to their memory."""
    given = [Pointer(memory_of(one), 0) if isinstance(one, Tensor) else one for one in arguments]
    given = [value(one, torch.int32) if isinstance(one, int) else one for one in given]
    GRID[:] = grid
    for PROGRAM[:] in product(*(range(size) for size in grid)):
        kernel(*given, **constants)


def quantizing_in_torch(monkeypatch: pytest.MonkeyPatch, caller: ModuleType) -> list[tuple[int, ...]]:
    """Grids of the launched kernels that quantize. Torch runs them, and `caller` takes the CPU for a Hopper."""
    if torch.cuda.is_available():
        pytest.skip("tables of tiles are made on the GPU that there is")
    launched, module, in_triton = [], interpreted(*QUANTIZING)[-1], caller.start_kernel

    def start_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if kernel.fn.__module__ != QUANTIZING[-1]:
            in_triton(kernel, grid, *arguments, **constants)
            return
        launched.append(grid)
        constants = {name: value for name, value in constants.items() if name.isupper()}
        # A pointer to some of the columns has all memory behind it, from their first number on.
        source, *rest = arguments
        if isinstance(source, Tensor):
            whole = source.as_strided((source.untyped_storage().nbytes() // source.itemsize,), (1,), 0)
            source = whole[source.storage_offset() :]
        launch(getattr(module, kernel.fn.__name__), grid, source, *rest, **constants)

    monkeypatch.setattr(caller, "start_kernel", start_kernel)
    monkeypatch.setattr(quantize, "target_of", lambda device: "sm_90")
    return launched
