"""SGLang's Engine, over hunch: `import hunch.sglang as sgl` in place of `import sglang as sgl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hunch.compat import config_from_sglang, sampling_from_sglang
from hunch.errors import RequestError
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
        **others: Any,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """One dict for one prompt, else a list; of n samples each has its own dict."""
        if asked := [name for name, value in others.items() if value not in (None, False)]:
            raise RequestError(f"{', '.join(asked)}: not known here; LLM.stream gives a stream")
        if (prompt is None) == (input_ids is None):
            raise RequestError("give either prompt or input_ids")
        prompts: Any = prompt if prompt is not None else input_ids
        params: SamplingParams | list[SamplingParams]
        if sampling_params is None or isinstance(sampling_params, Mapping):
            params = sampling_from_sglang(sampling_params)
        else:
            params = [sampling_from_sglang(each) for each in sampling_params]
        outputs = super().generate(prompts, params)
        answers = [_answer(output, index) for output in outputs for index in _samples(output)]
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        return answers[0] if is_one and len(answers) == 1 else answers

    def shutdown(self) -> None:
        self.close()


def _samples(output: RequestOutput) -> range:
    return range(len(output.outputs))


def _answer(output: RequestOutput, index: int) -> dict[str, Any]:
    answer = output.outputs[index]
    return {
        "text": answer.text,
        "output_ids": answer.token_ids,
        "meta_info": {
            "id": output.request_id,
            "finish_reason": {"type": answer.finish_reason},
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(answer.token_ids),
            "hunch": answer.stats,
        },
    }
