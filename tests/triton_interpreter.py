"""Triton's interpreter on a machine without a GPU, less what it repeats at every call.

It patches `triton.language` whenever a kernel is launched or calls another function of kernels, as
`tl.sum` is one: half a millisecond, more than most calls compute. No process of these tests
compiles a kernel, so the language is patched once and stays patched. All tensors lie on the host,
so none is copied there and back.

Most of the rest of its time goes into the types of values, not into values. Types are the same at
every call of a kernel, so what follows from one is found once and kept. Overflows are not looked
for: without Triton's debug option, which the interpreter never sets, it would compute every sum and
product again in 64 bits, compare, and not read the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.core import block_type, dtype
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class Unchanged:
    """What a launch undoes afterwards: nothing."""

    def restore(self) -> None:
        pass


def hasten_interpreter() -> None:
    _patch_once()
    _keep_types()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.GridExecutor._init_args_hst = lambda self, args, named: (args, named)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None


def _patch_once() -> None:
    patch_language, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor

    def patch_tensor_for_new_numpy(tensor: Any, scope: Any) -> None:
        """numpy 2.4 refuses int() of a one-element array, which Triton still asks for."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """A builtin of the language, given the interpreter's semantics whoever calls it."""
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return member(*args, **named)

        scope.set_attr(owner, name, call)

    patched: set[Any] = set()

    @cache
    def patch_once(function: Callable[..., Any]) -> Unchanged:
        known = function.__globals__.values()
        modules = {module for module in (tl, tl.core) if any(module is one for one in known)}
        if not modules <= patched:
            patched.update(modules)
            patch_language(function)
        return Unchanged()

    interpreter._patch_lang_tensor = patch_tensor_for_new_numpy
    interpreter._patch_attr = patch_attr
    interpreter._patch_lang = patch_once


def _keep_types() -> None:
    """Keep what follows from a type: numpy's name of it, its shape, blocks of other elements."""
    find_numpy_type, make_tensor = interpreter._get_np_dtype, tl.tensor.__init__
    make_block, of_element = block_type.__init__, block_type.with_element_ty
    is_equal, broadcast = dtype.__eq__, TritonSemantic.broadcast_impl_value
    numpy_types: dict[str, np.dtype[Any]] = {}
    blocks: dict[tuple[Any, ...], Any] = {}  # the first block of each shape

    def numpy_type(of: Any) -> np.dtype[Any]:
        name = of.scalar.name
        if name not in numpy_types:
            numpy_types[name] = find_numpy_type(of)
        return numpy_types[name]

    def init_block(block: Any, element: Any, shape: Any) -> None:
        key = tuple(shape)
        first = blocks.get(key)
        if first is None:
            make_block(block, element, shape)
            first = blocks[key] = block
            block.text = str(block.shape)
        block.element_ty, block.shape, block.numel = element, first.shape, first.numel
        block.name, block.first = f"<{first.text}, {element}>", first

    def init_tensor(tensor: Any, handle: Any, of: Any) -> None:
        first = of.first if of.is_block() else of
        if not hasattr(first, "of_tensor"):
            make_tensor(tensor, handle, first)
            first.of_tensor = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, of, of.scalar
        tensor.shape, tensor.numel = first.of_tensor

    def with_element(block: Any, element: Any) -> Any:
        kept = vars(block).setdefault("kept_blocks", {block.element_ty.name: block})
        if element.name not in kept:
            kept[element.name] = of_element(block, element)
            kept[element.name].kept_blocks = kept
        return kept[element.name]

    def broadcast_unless_alike(semantic: Any, one: Any, other: Any) -> tuple[Any, Any]:
        is_alike = one.shape is other.shape  # kept: one tuple for every shape
        return (one, other) if is_alike else broadcast(semantic, one, other)

    interpreter._get_np_dtype = numpy_type
    tl.tensor.__init__ = init_tensor
    block_type.__init__ = init_block
    block_type.with_element_ty = with_element
    block_type.to_ir = lambda block, builder: block  # the interpreter's types are the language's
    dtype.__eq__ = lambda one, other: one is other or is_equal(one, other)
    TritonSemantic.broadcast_impl_value = broadcast_unless_alike
