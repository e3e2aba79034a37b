"""Triton's interpreter without the work whose results nobody reads; half the time of a kernel test.

`hasten()` changes this process so, and no value that a kernel computes:

- Overflow of small integers is computed for every sum and product, and then thrown away: only `debug` would tell of it.
  It is not computed.
- While a kernel runs, the functions of `triton.language` are replaced. They are looked for among all members of its
  modules at every launch, and again whenever one jitted function calls another. They are looked for once, and a launch
  replaces all that any function below it may need.
- Every tensor makes its shape anew, as several objects for each size. Tensors of one shape share it.

Written for one version of Triton, the one that `make test` brings; others interpret as they do by themselves.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from triton import language
from triton.runtime import interpreter

VERSION = "3.9."
ADDRESS = np.dtype(np.uint64)
MODULES = (language, language.core)
PLACES = (*MODULES, language.math, language.tensor, language.core.tensor_descriptor_base)


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Make interpreted kernels of this process faster until `patch` is undone."""
    options = interpreter.interpreter_builder.options
    patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
    patch.setattr(interpreter, "_patch_lang", _replace_all)
    patch.setattr(interpreter.InterpretedFunction, "__call__", _call_from_a_kernel)
    patch.setattr(language.tensor, "__init__", _begin_tensor)
    patch.setattr(language.block_type, "__init__", _begin_block_type)
    numpy_type = cache(interpreter._get_np_dtype)  # of pointers it cannot be remembered: they have no hash
    patch.setattr(
        interpreter, "_get_np_dtype", lambda kind: ADDRESS if kind.scalar.is_ptr() else numpy_type(kind.scalar)
    )


def _replace_all(kernel: Callable[..., Any]) -> interpreter._LangPatchScope:
    scope = interpreter._LangPatchScope()
    for place in PLACES:
        for name, member in _builtins_of(place):
            interpreter._patch_attr(place, name, member, None, scope)
    interpreter._patch_lang_tensor(language.tensor, scope)
    for module in MODULES:
        interpreter._patch_lang_core(module, scope)
    return scope


@cache
def _builtins_of(place: Any) -> list[tuple[str, Callable[..., Any]]]:
    """Asked for the first time when nothing has been replaced yet: at the first launch."""
    return [(name, member) for name, member in inspect.getmembers(place) if language.core.is_builtin(member)]


def _call_from_a_kernel(function: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    try:
        return function.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _begin_tensor(tensor: language.tensor, handle: interpreter.TensorHandle, kind: language.dtype) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.numel, tensor.shape = _shape_of_tensor(tuple(kind.shape.values) if kind.is_block() else ())


def _begin_block_type(block: language.block_type, element: language.dtype, shape: Any) -> None:
    sizes = tuple(size.value if isinstance(size, language.constexpr) else size for size in shape)
    block.element_ty = element
    block.shape, block.numel, text = _shape_of_block(sizes)
    block.name = f"<{text}, {element}>"


@cache
def _shape_of_tensor(shape: tuple[int, ...]) -> tuple[language.constexpr, language.tuple]:
    sizes = [language.constexpr(size) for size in shape]
    return language.constexpr(math.prod(shape)), language.core.tuple(sizes)


@cache
def _shape_of_block(shape: tuple[int, ...]) -> tuple[language.core.tuple, int, str]:
    sizes = language.core.tuple(shape)
    return sizes, language.core.validate_block_shape(sizes), str(sizes)
