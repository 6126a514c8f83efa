"""hunch: language models generate faster, and not one token of their text changes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hunch.vllm_modules import VllmModules

if TYPE_CHECKING:
    from hunch.async_llm import AsyncLLM as AsyncLLM
    from hunch.beams import BeamSearchParams as BeamSearchParams
    from hunch.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from hunch.engine_args import EngineArgs as EngineArgs
    from hunch.engine_args import FlexibleArgumentParser as FlexibleArgumentParser
    from hunch.engine_args import UsageContext as UsageContext
    from hunch.errors import HunchError as HunchError
    from hunch.llm import LLM as LLM
    from hunch.llm_engine import LLMEngine as LLMEngine
    from hunch.loading import get_tokenizer as get_tokenizer
    from hunch.offline import cleanup_dist_env_and_memory as cleanup_dist_env_and_memory
    from hunch.offline import init_logger as init_logger
    from hunch.offline import random_uuid as random_uuid
    from hunch.outputs import RequestMetrics as RequestMetrics
    from hunch.outputs import RequestOutputKind as RequestOutputKind
    from hunch.prompts import Prompt as Prompt
    from hunch.prompts import TextPrompt as TextPrompt
    from hunch.prompts import TokensPrompt as TokensPrompt
    from hunch.types import CompletionOutput as CompletionOutput
    from hunch.types import Logprob as Logprob
    from hunch.types import RequestOutput as RequestOutput
    from hunch.types import SamplingParams as SamplingParams
    from hunch.types import Speculation as Speculation
    from hunch.types import StructuredOutput as StructuredOutput
    from hunch.vectors import EmbeddingOutput as EmbeddingOutput
    from hunch.vectors import EmbeddingRequestOutput as EmbeddingRequestOutput
    from hunch.vectors import PoolingOutput as PoolingOutput
    from hunch.vectors import PoolingParams as PoolingParams
    from hunch.vectors import PoolingRequestOutput as PoolingRequestOutput

    AsyncLLMEngine = AsyncLLM
    GuidedDecodingParams = StructuredOutput
    PromptType = SingletonPrompt = Prompt
    StructuredOutputsParams = StructuredOutput

__version__ = "0.1.0"

if not any(isinstance(finder, VllmModules) for finder in sys.meta_path):
    sys.meta_path.append(VllmModules())  # asked for modules that nobody else has

_HOMES = {
    "AsyncEngineArgs": "hunch.engine_args",
    "AsyncLLM": "hunch.async_llm",
    "BeamSearchParams": "hunch.beams",
    "EngineArgs": "hunch.engine_args",
    "FlexibleArgumentParser": "hunch.engine_args",
    "LLM": "hunch.llm",
    "LLMEngine": "hunch.llm_engine",
    "UsageContext": "hunch.engine_args",
    "SamplingParams": "hunch.types",
    "Speculation": "hunch.types",
    "StructuredOutput": "hunch.types",
    "RequestOutput": "hunch.types",
    "CompletionOutput": "hunch.types",
    "TextPrompt": "hunch.prompts",
    "TokensPrompt": "hunch.prompts",
    "HunchError": "hunch.errors",
    "EmbeddingOutput": "hunch.vectors",
    "EmbeddingRequestOutput": "hunch.vectors",
    "PoolingOutput": "hunch.vectors",
    "PoolingParams": "hunch.vectors",
    "PoolingRequestOutput": "hunch.vectors",
    "Logprob": "hunch.types",
    "Prompt": "hunch.prompts",
    "RequestMetrics": "hunch.outputs",
    "RequestOutputKind": "hunch.outputs",
    "cleanup_dist_env_and_memory": "hunch.offline",
    "get_tokenizer": "hunch.loading",
    "init_logger": "hunch.offline",
    "random_uuid": "hunch.offline",
}
# vLLM's names of what has another one here.
_ALIASES = {
    "AsyncLLMEngine": "AsyncLLM",
    "GuidedDecodingParams": "StructuredOutput",
    "PromptType": "Prompt",
    "SingletonPrompt": "Prompt",
    "StructuredOutputsParams": "StructuredOutput",
}
_CHOICES = "logit_bias, bad_words, allowed_token_ids and structured_outputs say what may be chosen"
_RANKS = "tensor_parallel_size=N starts ranks by itself; a program for each device answers its part"
_TASKS = "hunch generates and embeds (LLM.generate, LLM.chat, LLM.embed)"
# vLLM's names of what is not here, and what to do instead.
_INSTEAD = {
    **dict.fromkeys(("LogitsProcessor", "AdapterLogitsProcessor"), _CHOICES),
    **dict.fromkeys(("RequestLogitsProcessor", "BatchUpdate", "MoveDirectionality"), _CHOICES),
    "process_dict_updates": _CHOICES,
    "LoRARequest": "LLM(lora=PATH) merges an adapter into the weights",
    "ModelRegistry": "every family is a file in hunch/models/families",
    **dict.fromkeys(("ClassificationOutput", "ClassificationRequestOutput"), _TASKS),
    **dict.fromkeys(("ScoringOutput", "ScoringRequestOutput"), _TASKS),
    **dict.fromkeys(("initialize_ray_cluster", "get_ip", "get_open_port"), _RANKS),
    "destroy_model_parallel": "LLM.close() gives a model's memory back",
}
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "CompletionOutput",
    "HunchError",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "StructuredOutput",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name in _INSTEAD:  # `from hunch import NAME` shows no other error's words
        raise ImportError(f"hunch has no {name}: {_INSTEAD[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module 'hunch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
