"""SGLang's Engine, over hunch: `import hunch.sglang as sgl` in place of `import sglang as sgl`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from hunch.async_llm import AsyncLLM
from hunch.compat import Scores, answer_of, config_from_sglang, sampling_from_sglang
from hunch.engine_args import ServerArgs, arguments_of
from hunch.errors import RequestError
from hunch.llm import LLM
from hunch.prompts import Prompt, list_prompts, params_for
from hunch.types import RequestOutput, SamplingParams

__all__ = ["Engine", "ServerArgs", "async_stream_and_merge", "stream_and_merge"]
__path__: list[str] = []  # its submodules are those of vllm_modules.py

_TEXT = "only text is read"
_INSTEAD = {  # arguments of a call -> what to do in their place
    **dict.fromkeys(("image_data", "audio_data", "video_data", "input_embeds"), _TEXT),
    "lora_path": "give the engine lora=PATH, which merges one adapter",
    "return_hidden_states": "features stay inside; embed() gives a text as a vector",
    "custom_logit_processor": "logit_bias, allowed_token_ids and grammars say what may be chosen",
    "token_ids_logprob": "give top_logprobs_num, for the likeliest tokens",
    "session_params": "send the whole text: what was read before is found in the prefix cache",
}
_UNUSED = ("rid", "priority", "data_parallel_rank")  # names and orders for several at once

Sampling = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
Answer = dict[str, Any]


class Engine(LLM):
    """Takes SGLang's arguments and answers with its dicts."""

    def __init__(self, **arguments: Any) -> None:
        self._async: AsyncLLM | None = None
        self._open(config_from_sglang(**arguments_of(arguments)))

    def flush_cache(self) -> None:
        self.reset_cache()

    @property
    def tokenizer_manager(self) -> Self:
        """SGLang's scripts ask for `engine.tokenizer_manager.tokenizer`."""
        return self

    def get_server_info(self) -> dict[str, Any]:
        return self.stats()

    def generate(  # type: ignore[override]
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Sampling = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **others: Any,
    ) -> Answer | list[Answer] | Iterator[Answer]:
        """One dict for one prompt, else a list; of n samples each has its own dict.

        With `stream` the answer to one prompt as it grows, all of it so far each time. `others`
        are SGLang's arguments for log-probabilities.
        """
        scores = _scores(others)
        prompts, params = _read(prompt, input_ids, sampling_params, others, scores)
        if stream:
            if self._async is not None:
                raise RequestError("stream=True after async_generate: go on with async_generate")
            outputs = self.stream(_only(prompts), params[0])
            return (answer_of(output, 0, scores) for output in outputs)
        return _answers(self._answer(prompts, params, None), _is_one(prompt, input_ids), scores)

    def _answer(
        self, batch: Sequence[Prompt], each: Sequence[SamplingParams], use_tqdm: bool | None
    ) -> list[RequestOutput]:
        if self._async is None:
            return super()._answer(batch, each, use_tqdm)
        return asyncio.run(self._gather(batch, each))

    def encode(self, prompt: str | Sequence[str]) -> Answer | list[Answer]:
        """Texts as vectors; see `embed`."""
        found = [
            {
                "embedding": output.outputs.embedding,
                "meta_info": {
                    "id": output.request_id,
                    "prompt_tokens": len(output.prompt_token_ids),
                },
            }
            for output in self.embed(prompt)
        ]
        return found[0] if isinstance(prompt, str) else found

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Sampling = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **others: Any,
    ) -> Answer | list[Answer] | AsyncIterator[Answer]:
        """`generate` for asyncio: calls of one moment share steps. With `stream` an async iterator
        of the answer as it grows."""
        scores = _scores(others)
        prompts, params = _read(prompt, input_ids, sampling_params, others, scores)
        if stream:
            outputs = self._asynchronous().generate(_only(prompts), params[0])
            return (answer_of(output, 0, scores) async for output in outputs)
        whole = await self._gather(prompts, params)
        return _answers(whole, _is_one(prompt, input_ids), scores)

    async def _gather(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        engine = self._asynchronous()

        async def last(prompt: Prompt, params: SamplingParams) -> RequestOutput:
            async for output in engine.generate(prompt, params):
                newest = output
            return newest

        pairs = zip(prompts, params, strict=True)
        return await asyncio.gather(*(last(*pair) for pair in pairs))

    def _asynchronous(self) -> AsyncLLM:
        """The same engine in a thread of its own; from the first call on it stays there."""
        if self._async is None:
            inner = LLM.__new__(LLM)
            inner.__dict__.update(self.__dict__)
            self._async = AsyncLLM.from_llm(inner)
        return self._async

    def close(self) -> None:
        if self._async is None:
            super().close()
        else:
            self._async.shutdown()

    def shutdown(self) -> None:
        self.close()


def _scores(others: dict[str, Any]) -> Scores | None:
    """What the arguments for log-probabilities ask for; they are taken out of `others`."""
    is_asked = others.pop("return_logprob", None)
    numbers = [others.pop(name, None) for name in ("top_logprobs_num", "logprob_start_len")]
    has_text = others.pop("return_text_in_logprobs", None)
    if not is_asked:
        return None
    for number in numbers:
        if not isinstance(number, int | None):
            raise RequestError("top_logprobs_num and logprob_start_len: give one number for all")
    num_top, first = numbers
    first = -1 if first is None else first
    return Scores(num_top=num_top or 0, first=first, has_text=bool(has_text))


def _read(
    prompt: Any,
    input_ids: Any,
    sampling: Sampling,
    others: Mapping[str, Any],
    scores: Scores | None,
) -> tuple[list[Prompt], list[SamplingParams]]:
    for name, value in others.items():
        if value not in (None, False) and name not in _UNUSED:
            raise RequestError(f"{name}: {_INSTEAD.get(name, 'not known here')}")
    if (prompt is None) == (input_ids is None):
        raise RequestError("give either prompt or input_ids")
    prompts = list_prompts(input_ids if prompt is None else prompt)
    if sampling is None or isinstance(sampling, Mapping):
        params = params_for(len(prompts), sampling_from_sglang(sampling))
    else:
        params = params_for(len(prompts), [sampling_from_sglang(each) for each in sampling])
    if scores is not None:
        of_prompt = scores.num_top if scores.first >= 0 else None
        params = [
            replace(one, logprobs=scores.num_top, prompt_logprobs=of_prompt) for one in params
        ]
    return prompts, params


def _is_one(prompt: Any, input_ids: Any) -> bool:
    if prompt is not None:
        return isinstance(prompt, str)
    return len(input_ids) > 0 and isinstance(input_ids[0], int)


def _only(prompts: list[Prompt]) -> Prompt:
    if len(prompts) != 1:
        raise RequestError(f"stream=True takes one prompt; {len(prompts)} given")
    return prompts[0]


def _answers(
    outputs: Sequence[RequestOutput], is_one: bool, scores: Scores | None
) -> Answer | list[Answer]:
    answers = [
        answer_of(output, at, scores) for output in outputs for at in range(len(output.outputs))
    ]
    return answers[0] if is_one and len(answers) == 1 else answers


def stream_and_merge(engine: Engine, prompt: str, sampling_params: Sampling = None) -> str:
    """SGLang's: the whole text of an answer that was streamed."""
    chunks: Any = engine.generate(prompt, sampling_params, stream=True)
    return str([chunk["text"] for chunk in chunks][-1])


async def async_stream_and_merge(
    engine: Engine, prompt: str, sampling_params: Sampling = None
) -> AsyncIterator[str]:
    """SGLang's: what is new of the text, each time."""
    chunks: Any = await engine.async_generate(prompt, sampling_params, stream=True)
    length = 0
    async for chunk in chunks:
        yield chunk["text"][length:]
        length = len(chunk["text"])


_SERVER = "`hunch serve` starts a server, and GET /ready says when it answers"
_SPOKEN = "write prompts as texts, Engine.generate"
_OTHERS = {  # SGLang's names of what is not here -> what to do instead
    **dict.fromkeys(("function", "gen", "select", "user", "assistant", "system"), _SPOKEN),
    "set_default_backend": _SPOKEN,
    **dict.fromkeys(("Runtime", "RuntimeEndpoint", "launch_server"), _SERVER),
    **dict.fromkeys(("execute_shell_command", "launch_server_cmd", "wait_for_server"), _SERVER),
    **dict.fromkeys(("print_highlight", "terminate_process"), _SERVER),
}


def __getattr__(name: str) -> Any:
    if name in _OTHERS:  # `from hunch.sglang import NAME` shows no other error's words
        raise ImportError(f"hunch.sglang has no {name}: {_OTHERS[name]}")
    raise AttributeError(f"module 'hunch.sglang' has no attribute {name!r}")
