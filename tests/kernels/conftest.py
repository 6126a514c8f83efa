"""Triton's interpreter stands in for a GPU where there is none."""

import importlib.util
import os

import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_for_new_numpy(tensor, scope):
        """numpy 2.4 refuses int() of a one-element array, which Triton 3.6 still asks for."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_for_new_numpy
