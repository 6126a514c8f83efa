"""SGLang's Engine, over hunch: `import hunch.sglang as sgl` in place of `import sglang as sgl`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from hunch.async_llm import AsyncLLM
from hunch.compat import (
    Scores,
    answer_of,
    config_from_sglang,
    sampling_from_sglang,
    wants_no_answer,
    without_answer,
)
from hunch.engine_args import ServerArgs, arguments_of
from hunch.errors import RequestError
from hunch.llm import LLM
from hunch.pooling import params_to_pool
from hunch.prompts import Prompt, list_prompts, params_for
from hunch.types import RequestOutput, SamplingParams
from hunch.vectors import PoolingParams, embedding_of

__all__ = ["Engine", "ServerArgs", "async_stream_and_merge", "stream_and_merge"]
__path__: list[str] = []  # its submodules are those of vllm_modules.py

_TEXT = "only text is read"
_INSIDE = "features and choices of experts stay inside; embed() gives a text as a vector"
_SESSION = "send the whole text: what was read before is found in the prefix cache"
_INSTEAD = {  # arguments of a call -> what to do in their place
    **dict.fromkeys(("image_data", "audio_data", "video_data", "input_embeds"), _TEXT),
    "lora_path": "give the engine lora=PATH, which merges one adapter",
    **dict.fromkeys(("return_hidden_states", "return_routed_experts"), _INSIDE),
    "custom_logit_processor": "logit_bias, allowed_token_ids and grammars say what may be chosen",
    "token_ids_logprob": "give top_logprobs_num, for the likeliest tokens",
    **dict.fromkeys(("session_params", "session_id"), _SESSION),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port"), "one engine reads prompts and answers"),
    "require_reasoning": "Engine.chat tells reasoning and answer apart",
    "dimensions": "cut the vectors, and make their length 1 again",
    "external_trace_header": "only a server writes traces",
}
_UNUSED = ("data_parallel_rank", "routed_dp_rank")  # there is one engine

Sampling = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
Answer = dict[str, Any]


class Engine(LLM):
    """Takes SGLang's arguments and answers with its dicts."""

    def __init__(self, **arguments: Any) -> None:
        self._async: AsyncLLM | None = None
        given = arguments_of(arguments)
        self.server_args = ServerArgs(**given)
        self._open(config_from_sglang(**given))

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
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: bool = False,
        **others: Any,
    ) -> Answer | list[Answer] | Iterator[Answer]:
        """One dict for one prompt, else a list; of n samples each has its own dict.

        With `stream`, each dict holds all of an answer so far, and its `index` where there are
        several. `others` are SGLang's further arguments.
        """
        asked = _read(prompt, input_ids, sampling_params, others)
        if not stream:
            return asked.answers(self._answer(asked.prompts, asked.params, None, asked.priorities))
        if self._async is not None:
            raise RequestError("stream=True after async_generate: go on with async_generate")
        how: dict[str, Any] = {"stream": True, "priorities": asked.priorities}
        ids = self._requests.add(asked.prompts, asked.params, **how)
        grown, outputs = _Grown(asked), self._requests.run(ids)
        return (one for output in outputs for one in grown.of(ids.index(output.request_id), output))

    def _answer(
        self,
        batch: Sequence[Prompt],
        each: Sequence[SamplingParams],
        use_tqdm: bool | None,
        priorities: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        if self._async is None:
            return super()._answer(batch, each, use_tqdm, priorities)
        return asyncio.run(self._gather(batch, each, priorities or [0] * len(batch)))

    def encode(self, prompt: str | Sequence[str], **others: Any) -> Any:  # type: ignore[override]
        """Texts as vectors; see `embed`. One prompt's is no list."""
        asked = _to_embed(prompt, others)
        return asked.vectors(self._answer(asked.prompts, asked.params, None))

    async def async_encode(self, prompt: str | Sequence[str], **others: Any) -> Any:
        """`encode` for asyncio."""
        asked = _to_embed(prompt, others)
        return asked.vectors(await self._gather(asked.prompts, asked.params, asked.priorities))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Sampling = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: bool = False,
        **others: Any,
    ) -> Answer | list[Answer] | AsyncIterator[Answer]:
        """`generate` for asyncio: calls of one moment share steps. With `stream` an async iterator
        of answers as they grow."""
        asked = _read(prompt, input_ids, sampling_params, others)
        if stream:
            return self._stream(asked)
        return asked.answers(await self._gather(asked.prompts, asked.params, asked.priorities))

    async def _stream(self, asked: _Asked) -> AsyncIterator[Answer]:
        engine, grown = self._asynchronous(), _Grown(asked)
        queue: asyncio.Queue[list[Answer] | Exception | None] = asyncio.Queue(maxsize=1)

        async def feed(at: int) -> None:
            ask = partial(engine.generate, asked.prompts[at], asked.params[at])
            try:
                async for output in ask(priority=asked.priorities[at]):
                    await queue.put(list(grown.of(at, output)))
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(feed(at)) for at in range(len(asked.prompts))]
        num_open = len(tasks)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                num_open -= item is None
                for answer in item or ():
                    yield answer
        finally:
            for task in tasks:  # a caller who leaves early ends the requests
                task.cancel()

    async def _gather(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
    ) -> list[RequestOutput]:
        engine = self._asynchronous()

        async def last(prompt: Prompt, params: SamplingParams, priority: int) -> RequestOutput:
            async for output in engine.generate(prompt, params, priority=priority):
                newest = output
            return newest

        each = zip(prompts, params, priorities, strict=True)
        return await asyncio.gather(*(last(*one) for one in each))

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What a call asks for; the lists have an entry for each prompt."""

    prompts: list[Prompt]
    params: list[SamplingParams]
    are_unanswered: list[bool]  # only the prompt's scores are wanted
    names: list[str | None]  # for the answers, where the call has some
    priorities: list[int]
    scores: Scores | None
    is_one: bool  # one prompt that stands alone, with one answer

    def answers(self, outputs: Sequence[RequestOutput]) -> Answer | list[Answer]:
        found = [
            self.answer(at, output, sample)
            for at, output in enumerate(outputs)
            for sample in range(len(output.outputs))
        ]
        return found[0] if self.is_one else found

    def vectors(self, outputs: Sequence[RequestOutput]) -> Answer | list[Answer]:
        found = [
            {
                "embedding": embedding_of(output, PoolingParams()).outputs.embedding,
                "meta_info": {
                    "id": name or output.request_id,
                    "prompt_tokens": len(output.prompt_token_ids),
                },
            }
            for output, name in zip(outputs, self.names, strict=True)
        ]
        return found[0] if self.is_one else found

    def answer(self, at: int, output: RequestOutput, sample: int) -> Answer:
        if self.are_unanswered[at]:
            output = without_answer(output)
        found = answer_of(output, sample, self.scores)
        if name := self.names[at]:
            found["meta_info"]["id"] = name
        return found


class _Grown:
    """Answers that have grown since they were last given; an output holds all of a prompt's."""

    def __init__(self, asked: _Asked) -> None:
        self._asked = asked
        self._given: dict[int, tuple[int, str | None]] = {}  # length and finish reason
        counts = [params.n for params in asked.params]
        self._firsts = [sum(counts[:at]) for at in range(len(counts))]

    def of(self, at: int, output: RequestOutput) -> Iterator[Answer]:
        for sample, now in enumerate(output.outputs):
            index = self._firsts[at] + sample
            length = len(now.token_ids), now.finish_reason
            if self._given.get(index) == length:
                continue
            self._given[index] = length
            answer = self._asked.answer(at, output, sample)
            yield answer if self._asked.is_one else {**answer, "index": index}


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


def _read(prompt: Any, input_ids: Any, sampling: Sampling, others: dict[str, Any]) -> _Asked:
    """What a call asks for, of which `others` are SGLang's further arguments."""
    if (prompt is None) == (input_ids is None):
        raise RequestError("give either prompt or input_ids")
    prompts = list_prompts(input_ids if prompt is None else prompt)
    scores, names = _scores(others), _names(others, len(prompts))
    salts = _each("cache_salt", others, len(prompts))
    priority = others.pop("priority", None) or 0
    _check_nothing(others)
    each: Sequence[Mapping[str, Any] | None]
    if sampling is None or isinstance(sampling, Mapping):
        each = [sampling] * len(prompts)
    else:
        each = sampling
    params = params_for(len(prompts), [sampling_from_sglang(one) for one in each])
    if scores is not None:
        of_prompt = scores.num_top if scores.first >= 0 else None
        params = [
            replace(one, logprobs=scores.num_top, prompt_logprobs=of_prompt) for one in params
        ]
    return _Asked(
        prompts=[_salted(*pair) for pair in zip(prompts, salts, strict=True)],
        params=params,
        are_unanswered=[wants_no_answer(one) for one in each],
        names=names,
        priorities=[priority] * len(prompts),
        scores=scores,
        is_one=_is_one(prompt, input_ids) and params[0].n == 1,
    )


def _to_embed(prompt: Any, others: dict[str, Any]) -> _Asked:
    prompts = list_prompts(prompt)
    names = _names(others, len(prompts))
    _check_nothing(others)
    return _Asked(
        prompts=prompts,
        params=params_for(len(prompts), params_to_pool("last")),
        are_unanswered=[False] * len(prompts),
        names=names,
        priorities=[0] * len(prompts),
        scores=None,
        is_one=_is_one(prompt, None),
    )


def _salted(prompt: Prompt, salt: str | None) -> Prompt:
    if salt is None:
        return prompt
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": salt}


def _names(others: dict[str, Any], num_prompts: int) -> list[str | None]:
    """Of the requests; one name for several is counted on."""
    if isinstance(others.get("rid"), str) and num_prompts > 1:
        others["rid"] = [f"{others['rid']}_{at}" for at in range(num_prompts)]
    return _each("rid", others, num_prompts)


def _each(name: str, others: dict[str, Any], num_prompts: int) -> list[str | None]:
    """One text for all prompts or one for each, taken out of `others`."""
    given = others.pop(name, None)
    each = list(given) if isinstance(given, (list, tuple)) else [given] * num_prompts
    if len(each) != num_prompts or not all(isinstance(one, str | None) for one in each):
        raise RequestError(f"{name}={given!r}: give a text, or one for each of the prompts")
    return each


def _check_nothing(others: Mapping[str, Any]) -> None:
    """Arguments that mean something in SGLang alone may ask for nothing."""
    for name, value in others.items():
        parts = value if isinstance(value, (list, tuple, Mapping)) else [value]
        is_nothing = all(one is None or one is False for one in parts)
        if not is_nothing and name not in _UNUSED:
            raise RequestError(f"{name}: {_INSTEAD.get(name, 'not known here')}")


def _is_one(prompt: Any, input_ids: Any) -> bool:
    if prompt is not None:
        return isinstance(prompt, str)
    return len(input_ids) > 0 and isinstance(input_ids[0], int)


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
_CHAT = "Engine.chat renders a chat by the model's own template"
_IT_HAS = "call it of an Engine"
_OTHERS = {  # SGLang's names of what is not here -> what to do instead
    **dict.fromkeys(("function", "gen", "select", "user", "assistant", "system"), _SPOKEN),
    **dict.fromkeys(("gen_int", "gen_string", "separate_reasoning"), _SPOKEN),
    **dict.fromkeys(("system_begin", "system_end", "user_begin", "user_end"), _SPOKEN),
    **dict.fromkeys(("assistant_begin", "assistant_end", "set_default_backend"), _SPOKEN),
    **dict.fromkeys(("image", "video", "load_image"), _TEXT),
    **dict.fromkeys(("flush_cache", "get_server_info"), _IT_HAS),
    **dict.fromkeys(("chat_templates", "get_chat_template"), _CHAT),
    "get_chat_template_by_model_path": _CHAT,
    "CustomLogitProcessor": _INSTEAD["custom_logit_processor"],
    "SamplingParams": "sampling_params is a dict",
    **dict.fromkeys(("Runtime", "RuntimeEndpoint", "launch_server"), _SERVER),
    **dict.fromkeys(("execute_shell_command", "launch_server_cmd", "wait_for_server"), _SERVER),
    **dict.fromkeys(("print_highlight", "terminate_process"), _SERVER),
}


def __getattr__(name: str) -> Any:
    if name == "get_tokenizer":
        from hunch.loading import get_tokenizer

        return get_tokenizer
    if name in _OTHERS:  # `from hunch.sglang import NAME` shows no other error's words
        raise ImportError(f"hunch.sglang has no {name}: {_OTHERS[name]}")
    raise AttributeError(f"module 'hunch.sglang' has no attribute {name!r}")
