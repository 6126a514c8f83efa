"""The offline front door."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, Self, Unpack

from hunch.arguments import Arguments
from hunch.beams import BeamSearchOutput, BeamSearchParams, search_beams
from hunch.chat.turn import Wish, add_messages, chat_format, open_turn
from hunch.compat import VllmCalls, config_from_vllm, spec_from_vllm, wishes_of
from hunch.config import DEFAULT_MODEL, Config, ModelConfig, say_once
from hunch.engine_args import EngineArgs
from hunch.garbage import without_collector
from hunch.llm_engine import LLMEngine
from hunch.loading import LoadTarget, build_engine, load_target_of, load_text
from hunch.offline import OfflineRequests
from hunch.pooling import params_to_pool
from hunch.prompts import Params, Prompt, list_chats, list_prompts, params_for, progress
from hunch.text.tokenizer import Tokenizer
from hunch.types import RequestOutput, SamplingParams, recommended
from hunch.vectors import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    check_task,
    embedding_of,
    pooled_of,
)

if TYPE_CHECKING:
    from hunch.models.target import Target
    from hunch.models.weights import Weights

log = logging.getLogger("hunch")

Message = Mapping[str, Any]


class LLM(VllmCalls):
    """A model ready to generate.

    >>> llm = LLM("smollm2-135m", speculate="ngram")
    >>> llm.generate("The future of AI is")[0].outputs[0].text

    Takes vLLM's arguments by their names, and hunch's own: `speculate`, `verifier`, `threads`.
    """

    _is_advised = True  # by the model's makers, how to sample where a call does not say

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        weights: Weights | None = None,
        **arguments: Unpack[Arguments],
    ) -> None:
        """`weights`: tensors to use in place of those in the model's files."""
        load = None if weights is None else partial(load_target_of, weights=weights)
        self._is_advised = arguments.get("generation_config") != "vllm"
        self._open(config_from_vllm(model=model, **arguments), load_target=load)

    def _open(
        self,
        config: Config,
        tokenizer: Tokenizer | None = None,
        load_target: LoadTarget | None = None,
        lock: RLock | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer or load_text(config)
        self.engine = build_engine(config, self.tokenizer, load_target)
        self._requests = OfflineRequests(self.engine, self.tokenizer, lock)
        self.llm_engine = LLMEngine(config, self.engine, self._requests, self.tokenizer)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(**engine_args.given())

    def sibling(self, speculate: str, **arguments: Any) -> Self:
        """Another engine over the same copy of the weights that drafts in another way.

        >>> ngram = llm.sibling("ngram")

        It has a KV cache of its own. In several threads the two take turns, step by step.
        """
        target, lock = self.engine.runner.target, self._requests.lock  # type: ignore[attr-defined]
        spec = spec_from_vllm(speculate=speculate, **arguments)
        other = type(self).__new__(type(self))
        other._is_advised = self._is_advised
        other._open(replace(self.config, spec=spec), self.tokenizer, lambda *_: target, lock)
        return other

    @classmethod
    def over(
        cls,
        target: Target | None,
        model: str,
        *,
        text: Tokenizer | None = None,
        is_greedy: bool = False,
        **arguments: Unpack[Arguments],
    ) -> Self:
        """An engine with arguments of its own over a target that another one loaded, if any."""
        llm, config = cls.__new__(cls), config_from_vllm(model=model, **arguments)
        load = None if target is None else lambda *_: target
        llm._open(replace(config, is_greedy=is_greedy), text, load)
        return llm

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        params: Params = None,
        use_tqdm: bool | None = None,
        *,
        sampling_params: Params = None,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts: texts, token ids, or vLLM's prompt dicts.

        Without parameters they are those of `get_default_sampling_params`. `priority` has a number
        for each prompt; lower ones go first.
        """
        prompts = others.pop("prompt_token_ids", None) if prompts is None else prompts
        wishes_of("generate", others, {})
        batch = list_prompts(prompts)
        each = self.params_for(len(batch), params, sampling_params)
        return self._answer(batch, each, use_tqdm, priority)

    def _answer(
        self,
        batch: Sequence[Prompt],
        each: Sequence[SamplingParams],
        use_tqdm: bool | None,
        priorities: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        ids = self._requests.add(batch, each, stream=False, priorities=priorities)
        done: dict[str, RequestOutput] = {}
        # Steps leave no cycles behind; looking for some would stop them for a tenth of a second.
        try:
            with progress(len(ids), use_tqdm) as advance, without_collector():
                for output in self._requests.run(ids):
                    if output.finished:
                        done[output.request_id] = output
                        advance()
        finally:
            self._requests.end(ids)
        return [done[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        use_tqdm: bool | None = None,
        *,
        sampling_params: Params = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **wishes: Any,
    ) -> list[RequestOutput]:
        """One conversation, or several: each is a list of {"role", "content"}.

        `tools` are OpenAI's, `wishes` fields of hunch.chat.turn.Wish; answers have a `message`.
        """
        batch = list_chats(messages)
        each = self.params_for(len(batch), params, sampling_params)
        given = wishes_of("chat", wishes, Wish.__dataclass_fields__)
        wish = Wish(tools=tools or (), template_values=chat_template_kwargs or {}, **given)
        template = chat_template or self.config.model.chat_template
        form = chat_format(self.config.model, self.tokenizer, template)
        how = {"template": template, "add_generation_prompt": add_generation_prompt}
        pairs = zip(batch, each, strict=True)
        turns = [open_turn(form, self.tokenizer, list(m), one, wish, **how) for m, one in pairs]
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        ids, held = [t.prompt_ids for t in turns], [t.params for t in turns]
        prompts = [{"prompt": decode(one), "prompt_token_ids": one} for one in ids]
        outputs = self._answer(prompts, held, use_tqdm)
        add_messages(turns, outputs)
        return outputs

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, **others: Any
    ) -> list[BeamSearchOutput]:
        """Each prompt's likeliest answers, found as vLLM finds them: slowly, without drafts."""
        wishes_of("beam_search", others, {})
        ask, max_len = partial(self._answer, use_tqdm=False), self.engine.runner.capacity.max_len
        return search_beams(list_prompts(prompts), params, self.tokenizer, max_len, ask)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | None = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Texts as vectors: the state of each one's last token, or with "mean" of all its tokens.

        >>> llm.embed("Hello")[0].outputs.embedding

        States are those after the last norm. A model that was trained for it gives good ones.
        `pooling_params` are vLLM's, in place of `normalize`.
        """
        wishes_of("embed", others, {})
        asked = pooling_params or PoolingParams(normalize=normalize)
        outputs = self._pool(prompts, pooling, use_tqdm)
        return [embedding_of(output, asked) for output in outputs]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """`embed` as vLLM's pooling models have it: vectors are tensors, `outputs.data`."""
        wishes_of("encode", others, {})
        check_task("pooling_task", pooling_task)
        asked = pooling_params or PoolingParams()
        return [pooled_of(output, asked) for output in self._pool(prompts, "last", use_tqdm)]

    def _pool(
        self, prompts: Prompt | Sequence[Prompt], pooling: str, use_tqdm: bool | None
    ) -> list[RequestOutput]:
        batch = list_prompts(prompts)
        return self._answer(batch, params_for(len(batch), params_to_pool(pooling)), use_tqdm)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """The answer as it grows; leaving the loop early aborts the request."""
        ids = self._requests.add([prompt], self.params_for(1, params), stream=True)
        return self._requests.run(ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.render_chat(list(messages), template=self.config.model.chat_template)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.config.model.chat_template or self.tokenizer.chat_template)

    def encode_turn(self, text: str) -> list[int]:
        """A user's first turn as it is served."""
        return self.encode_messages([{"role": "user", "content": text}])

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """`encode_chat`; to a model without a template the texts alone."""
        if self.has_chat_template:
            return self.encode_chat(messages)
        say_once("this model has no chat template: prompts are given to it as they stand")
        return self.tokenizer.encode("\n\n".join(str(m["content"]) for m in messages))

    def stats(self) -> dict[str, Any]:
        """Totals since the start, with the keys every hunch tool uses."""
        return self.engine.stats()

    def reset_cache(self, *, is_held_too: bool = False) -> bool:
        """Forget every cached prefix and what drafters keep of other requests."""
        with self._requests.lock:
            return self.engine.reset_cache(is_held_too=is_held_too)

    @property
    def model_config(self) -> ModelConfig:
        return self.llm_engine.model_config

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """How the model's makers would sample: its generation_config.json.

        With vLLM's generation_config="vllm" the usual parameters of any model.
        """
        advice = self.tokenizer.generation_config if self._is_advised else {}
        return SamplingParams(**recommended(advice))

    def params_for(
        self, num_prompts: int, params: Params, vllms: Params = None
    ) -> list[SamplingParams]:
        """Each prompt's parameters as a call has them; without any, the model's."""
        return params_for(num_prompts, params, vllms, self.get_default_sampling_params())

    def close(self) -> None:
        if self._requests.is_own_process:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
