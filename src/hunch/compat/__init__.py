"""vLLM's and SGLang's argument names, translated to our config. All knowledge of them is here."""

from hunch.compat.calls import VllmCalls, wishes_of
from hunch.compat.llama_cli import from_llama_cli
from hunch.compat.server_flags import (
    dashed,
    flags_as_arguments,
    json_or_text,
    number,
    translate_flags,
)
from hunch.compat.sglang import (
    Scores,
    answer_of,
    config_from_sglang,
    known_to_sglang,
    sampling_from_sglang,
    wants_no_answer,
    without_answer,
    words_of_sglang,
)
from hunch.compat.vllm import (
    config_from_vllm,
    known_arguments,
    known_names,
    spec_from_vllm,
    unused_arguments,
    without_effect,
)

__all__ = [
    "Scores",
    "VllmCalls",
    "answer_of",
    "config_from_sglang",
    "config_from_vllm",
    "dashed",
    "flags_as_arguments",
    "from_llama_cli",
    "json_or_text",
    "known_arguments",
    "known_names",
    "known_to_sglang",
    "number",
    "sampling_from_sglang",
    "spec_from_vllm",
    "translate_flags",
    "unused_arguments",
    "wants_no_answer",
    "wishes_of",
    "without_answer",
    "without_effect",
    "words_of_sglang",
]
