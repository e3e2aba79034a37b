"""Triton's interpreter without the work whose results are not read; a third of the time of a kernel test.

`hasten()` changes this process so, and no value that a kernel computes:

- Overflow of small integers is computed for every sum and product, and then thrown away: only `debug` would tell of it.
  It is not computed.
- While a kernel runs, the functions of `triton.language` are replaced. They are looked for among all members of its
  modules at every launch, and again whenever one jitted function calls another. They are looked for once, and a launch
  replaces all that any function below it may need.
- Every tensor makes its shape anew, as several objects for each size. Tensors of one shape share it.
- Types of two operands are worked out and brought together in a dozen steps. Most often they are the same type, or one
  is a number that stands in the kernel; then what comes out is known. Tests hold both ways against each other
  (tests/kernels/test_interpreter.py).

Written for one version of Triton, the one that `make test` brings; others interpret as they do by themselves.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pytest
from triton import language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

VERSION = "3.9."  # of Triton; the names below are its own
ADDRESS = np.dtype(np.uint64)  # of pointers
MODULES = (language, language.core)
PLACES = (*MODULES, language.math, language.tensor, language.core.tensor_descriptor_base)
SEMANTIC = interpreter.interpreter_semantic
FLOATS = frozenset(language.dtype.FP_TYPES)
INTEGERS = frozenset(language.dtype.SINT_TYPES + language.dtype.UINT_TYPES) - {"int1"}
PLAIN = (language.tensor, int, float, bool, str, type(None))
UNWRAP = language.core._unwrap_if_constexpr
BUILTIN = language.core.add.__code__
"""Of every function that `triton.language.core.builtin` returns."""


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Make interpreted kernels of this process faster until `patch` is undone."""
    options = interpreter.interpreter_builder.options
    patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
    patch.setattr(interpreter, "_patch_lang", _replace_all)
    patch.setattr(interpreter.InterpretedFunction, "__call__", _call_from_a_kernel)
    patch.setattr(language.tensor, "__init__", _begin_tensor)
    patch.setattr(language.block_type, "__init__", _begin_block_type)
    patch.setattr(language.block_type, "with_element_ty", _with_element)
    patch.setattr(language.core, "_unwrap_if_constexpr", _unwrap)
    patch.setattr(SEMANTIC, "broadcast_impl_value", _broadcast, raising=False)
    patch.setattr(SEMANTIC, "binary_op_type_checking_impl", _bring_together, raising=False)
    numpy_type = cache(interpreter._get_np_dtype)  # of pointers it cannot be remembered: they have no hash
    patch.setattr(
        interpreter, "_get_np_dtype", lambda kind: ADDRESS if kind.scalar.is_ptr() else numpy_type(kind.scalar)
    )


def _replace_all(kernel: Callable[..., Any]) -> interpreter._LangPatchScope:
    scope = interpreter._LangPatchScope()
    for place, name, replacement in _replacements():
        scope.set_attr(place, name, replacement)
    interpreter._patch_lang_tensor(language.tensor, scope)
    for module in MODULES:
        interpreter._patch_lang_core(module, scope)
    return scope


@cache
def _replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Asked for the first time when nothing has been replaced yet: at the first launch."""
    return [
        (place, name, _interpreted(member))
        for place in PLACES
        for name, member in inspect.getmembers(place)
        if language.core.is_builtin(member)
    ]


def _interpreted(member: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the language as it is in interpreted kernels; a builtin's check for `_semantic` is left out."""
    function = inspect.unwrap(member, stop=lambda one: one.__code__ is not BUILTIN)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = SEMANTIC
        return function(*args, **kwargs)

    return call


def _call_from_a_kernel(function: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    try:
        return function.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _unwrap(value: Any) -> Any:
    """In the place of `_unwrap_if_constexpr`, which asks in another order."""
    if type(value) in PLAIN:
        return value
    return value.value if type(value) is language.constexpr else UNWRAP(value)


# Types and shapes.


def _begin_tensor(tensor: language.tensor, handle: interpreter.TensorHandle, kind: language.dtype) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.numel, tensor.shape = kind.of_tensors if kind.is_block() else _shape_of_tensor(())


def _begin_block_type(block: language.block_type, element: language.dtype, shape: Any) -> None:
    block.element_ty = element
    block.sizes = tuple(size.value if isinstance(size, language.constexpr) else size for size in shape)
    block.shape, block.numel, text = _shape_of_block(block.sizes)
    block.of_tensors = _shape_of_tensor(block.sizes)
    block.name = f"<{text}, {element}>"


def _with_element(block: language.block_type, element: language.dtype) -> language.block_type:
    return language.block_type(element, block.sizes) if element.is_ptr() else _block_of(element, block.sizes)


@cache
def _block_of(element: language.dtype, sizes: tuple[int, ...]) -> language.block_type:
    return language.block_type(element, sizes)


@cache
def _shape_of_tensor(shape: tuple[int, ...]) -> tuple[language.constexpr, language.tuple]:
    sizes = [language.constexpr(size) for size in shape]
    return language.constexpr(math.prod(shape)), language.core.tuple(sizes)


@cache
def _shape_of_block(shape: tuple[int, ...]) -> tuple[language.core.tuple, int, str]:
    sizes = language.core.tuple(shape)
    return sizes, language.core.validate_block_shape(sizes), str(sizes)


# Two operands.


def _bring_together(left: Any, right: Any, *allowed: bool, **more: bool) -> tuple[language.tensor, language.tensor]:
    """In the place of `binary_op_type_checking_impl`: operands of one type, or a number that takes the other's."""
    kinds = type(left), type(right)
    if more or len(allowed) > 2:
        pass  # a division, whose types are others
    elif kinds == (language.tensor, language.tensor):
        is_offset = left.dtype.is_ptr() and right.dtype.name in INTEGERS and allowed[:1] == (True,)
        if is_offset or (left.dtype is right.dtype and not left.dtype.is_ptr()):
            return _broadcast(left, right)
    elif kinds[0] is language.tensor:
        if _stays(left.dtype, right):
            return left, _number(right, left.type)
    elif kinds[1] is language.tensor and _stays(right.dtype, left):
        return _number(left, right.type), right
    return TritonSemantic.binary_op_type_checking_impl(SEMANTIC, left, right, *allowed, **more)


def _broadcast(left: language.tensor, right: language.tensor) -> tuple[language.tensor, language.tensor]:
    """In the place of `broadcast_impl_value`: a scalar among blocks, and blocks of one rank."""
    if left.type.is_block():
        if not right.type.is_block():
            return left, _spread(right, left.type)
        if left.type.sizes == right.type.sizes:
            return left, right
        if sizes := _sizes_of_both(left.type.sizes, right.type.sizes):
            return _stretched(left, sizes), _stretched(right, sizes)
    elif right.type.is_block():
        return _spread(left, right.type), right
    else:
        return left, right
    return TritonSemantic.broadcast_impl_value(SEMANTIC, left, right)


@cache
def _sizes_of_both(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """None if they have not one rank, or do not fit."""
    pairs = list(zip(left, right, strict=False))
    fit = len(left) == len(right) and all(one == other or 1 in (one, other) for one, other in pairs)
    return tuple(other if one == 1 else one for one, other in pairs) if fit else None


def _stretched(tensor: language.tensor, sizes: tuple[int, ...]) -> language.tensor:
    if tensor.type.sizes == sizes:
        return tensor
    data = np.broadcast_to(tensor.handle.data, sizes)
    kind = language.block_type(tensor.dtype, sizes) if tensor.dtype.is_ptr() else _block_of(tensor.dtype, sizes)
    return language.tensor(interpreter.TensorHandle(data, tensor.handle.dtype), kind)


def _spread(scalar: language.tensor, block: language.block_type) -> language.tensor:
    data = np.full(block.sizes, scalar.handle.data, dtype=scalar.handle.data.dtype)
    return language.tensor(interpreter.TensorHandle(data, scalar.handle.dtype), _with_element(block, scalar.dtype))


def _stays(kind: language.dtype, number: Any) -> bool:
    """Whether a tensor of this type and a number give one of the type."""
    return (kind.name in FLOATS and type(number) in (int, float)) or (kind.name in INTEGERS and type(number) is int)


def _number(number: float, kind: language.dtype) -> language.tensor:
    """A number of the kernel as a scalar, or as a block that has no memory but one element's."""
    # Zeros of both signs are equal.
    return _known_number(str(number), number, kind.scalar, kind.sizes if kind.is_block() else None)


@lru_cache(maxsize=4096)
def _known_number(text: str, number: float, element: language.dtype, sizes: tuple[int, ...] | None) -> language.tensor:
    scalar = SEMANTIC._cast_to_computation_type(number, element)
    if sizes is None:
        return scalar
    data = np.broadcast_to(scalar.handle.data, sizes)
    return language.tensor(interpreter.TensorHandle(data, element), _block_of(element, sizes))
