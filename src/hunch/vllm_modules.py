"""vLLM's modules by their paths under `hunch`, so that only a program's `vllm` must be renamed.

`from hunch.sampling_params import SamplingParams` is `from hunch import SamplingParams`. SGLang's
modules, under `hunch.sglang`, say what to use in place of what they have.
"""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_HOMES = {  # module -> the one that has its names
    **dict.fromkeys(
        (
            "hunch.distributed",
            "hunch.distributed.parallel_state",
            "hunch.engine.arg_utils",
            "hunch.engine.async_llm_engine",
            "hunch.engine.llm_engine",
            "hunch.entrypoints.llm",
            "hunch.inputs",
            "hunch.lora",
            "hunch.lora.request",
            "hunch.sampling_params",
            "hunch.usage",
            "hunch.usage.usage_lib",
            "hunch.utils",
            "hunch.utils.argparse_utils",
            "hunch.v1",
            "hunch.v1.engine",
            "hunch.v1.engine.async_llm",
            "hunch.v1.engine.llm_engine",
            "hunch.v1.metrics",
            "hunch.v1.sample",
            "hunch.v1.sample.logits_processor",
            "hunch.v1.sample.logits_processor.builtin",
        ),
        "hunch",
    ),
    **dict.fromkeys(
        (
            "hunch.sglang.srt",
            "hunch.sglang.srt.server_args",
            "hunch.sglang.test",
            "hunch.sglang.test.doc_patch",
            "hunch.sglang.utils",
        ),
        "hunch.sglang",
    ),
    "hunch.beam_search": "hunch.beams",
    "hunch.utils.print_utils": "hunch.pooling",
    "hunch.v1.metrics.reader": "hunch.compat.metrics",
}


class VllmModules:
    """The last of the finders of modules; it makes those of the table, which are empty."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in _HOMES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # an ordinary one

    def exec_module(self, module: ModuleType) -> None:
        home = import_module(_HOMES[module.__name__])
        module.__dict__["__getattr__"] = lambda name: getattr(home, name)
