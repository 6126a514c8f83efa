"""Triton's interpreter on a machine without a GPU, less what it repeats at every call.

It patches `triton.language` whenever a kernel is launched or calls another function of kernels, as
`tl.sum` is one: half a millisecond, more than most calls compute. No process of these tests
compiles a kernel, so the language is patched once and stays patched. All tensors lie on the host,
so none is copied there and back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class Unchanged:
    """What a launch undoes afterwards: nothing."""

    def restore(self) -> None:
        pass


def hasten_interpreter() -> None:
    patch_language, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor

    def patch_tensor_for_new_numpy(tensor: Any, scope: Any) -> None:
        """numpy 2.4 refuses int() of a one-element array, which Triton still asks for."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

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
    interpreter._patch_lang = patch_once
    interpreter.GridExecutor._init_args_hst = lambda self, args, named: (args, named)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
