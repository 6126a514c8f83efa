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
            "hunch.inputs.data",
            "hunch.logger",
            "hunch.logprobs",
            "hunch.lora",
            "hunch.lora.request",
            "hunch.pooling_params",
            "hunch.sampling_params",
            "hunch.sequence",
            "hunch.tokenizers",
            "hunch.transformers_utils",
            "hunch.transformers_utils.tokenizer",
            "hunch.usage",
            "hunch.usage.usage_lib",
            "hunch.utils",
            "hunch.utils.argparse_utils",
            "hunch.utils.network_utils",
            "hunch.v1",
            "hunch.v1.engine",
            "hunch.v1.engine.async_llm",
            "hunch.v1.engine.llm_engine",
            "hunch.v1.metrics",
            "hunch.v1.sample",
            "hunch.v1.sample.logits_processor",
            "hunch.v1.sample.logits_processor.builtin",
            "hunch.version",
        ),
        "hunch",
    ),
    **dict.fromkeys(
        (
            "hunch.sglang.lang",
            "hunch.sglang.lang.chat_template",
            "hunch.sglang.srt",
            "hunch.sglang.srt.conversation",
            "hunch.sglang.srt.entrypoints",
            "hunch.sglang.srt.entrypoints.engine",
            "hunch.sglang.srt.hf_transformers_utils",
            "hunch.sglang.srt.parser",
            "hunch.sglang.srt.parser.conversation",
            "hunch.sglang.srt.sampling",
            "hunch.sglang.srt.sampling.custom_logit_processor",
            "hunch.sglang.srt.sampling.sampling_params",
            "hunch.sglang.srt.server_args",
            "hunch.sglang.srt.utils",
            "hunch.sglang.srt.utils.hf_transformers_utils",
            "hunch.sglang.test",
            "hunch.sglang.test.doc_patch",
            "hunch.sglang.utils",
        ),
        "hunch.sglang",
    ),
    "hunch.beam_search": "hunch.beams",
    "hunch.utils.print_utils": "hunch.vectors",
    "hunch.v1.metrics.reader": "hunch.compat.metrics",
}
_TEXT = "hunch reads text alone"
_INSIDE = "it is inside vLLM, and hunch is built in another way"
_INSTEAD = {  # other modules, with what is below them -> why they are not here
    "hunch.assets": _TEXT,
    "hunch.multimodal": _TEXT,
    "hunch.benchmarks": "read prompts from a file of your own; `hunch bench` measures",
    "hunch.envs": "arguments of LLM(...) say what vLLM's environment variables say",
    "hunch.executor": _INSIDE,
    "hunch.forward_context": _INSIDE,
    "hunch.model_executor": _INSIDE,
    "hunch.platforms": "ask torch which devices there are",
    "hunch.plugins": "hunch has no plugins; a drafter may be any class, speculate='module:Class'",
    "hunch.profiler": "give torch.profiler the call itself",
    "hunch.reasoning": "LLM.chat gives answers with a `message`, reasoning and calls apart",
    "hunch.spec_decode": _INSIDE,
    "hunch.worker": _INSIDE,
    "hunch.v1": _INSIDE,
}


class VllmModules:
    """The last of the finders of modules; it makes those of the table, which are empty."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in _HOMES:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        for module, why in _INSTEAD.items():
            if name == module or name.startswith(module + "."):
                raise ModuleNotFoundError(f"hunch has no module {name}: {why}", name=name)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # an ordinary one

    def exec_module(self, module: ModuleType) -> None:
        home = import_module(_HOMES[module.__name__])
        module.__dict__["__getattr__"] = lambda name: getattr(home, name)
