"""SGLang's Engine, over hunch: `import hunch.sglang as sgl` in place of `import sglang as sgl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hunch.compat import config_from_sglang, sampling_from_sglang
from hunch.llm import LLM
from hunch.types import RequestOutput, SamplingParams

__all__ = ["Engine"]


class Engine(LLM):
    """Takes SGLang's arguments and answers with its dicts."""

    def __init__(self, **arguments: Any) -> None:
        self._open(config_from_sglang(**arguments))

    def generate(  # type: ignore[override]
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        prompts: Any = prompt if prompt is not None else input_ids
        params: SamplingParams | list[SamplingParams]
        if sampling_params is None or isinstance(sampling_params, Mapping):
            params = sampling_from_sglang(sampling_params)
        else:
            params = [sampling_from_sglang(each) for each in sampling_params]
        answers = [_answer(output) for output in super().generate(prompts, params)]
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        return answers[0] if is_one else answers

    def shutdown(self) -> None:
        self.close()


def _answer(output: RequestOutput) -> dict[str, Any]:
    first = output.outputs[0]
    return {
        "text": first.text,
        "output_ids": first.token_ids,
        "meta_info": {
            "id": output.request_id,
            "finish_reason": {"type": first.finish_reason},
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(first.token_ids),
            "hunch": first.stats,
        },
    }
