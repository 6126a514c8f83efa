"""Checks a user's request against the model, and fills in limits and seeds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from hunch.config import Config
from hunch.errors import CapacityError, RequestError
from hunch.types import (
    Capacity,
    Request,
    SamplingParams,
    StructuredOutput,
    TextCodec,
    new_seed,
)


@dataclass(slots=True, kw_only=True)
class Asked:
    """A checked request: one Request per sample."""

    id: str
    prompt: str | None
    prompt_ids: list[int]
    requests: list[Request]
    is_streaming: bool
    handle: int = -1  # its number in Engine.take_tokens; -1: its tokens come with `step`


class Intake:
    """Checks requests. It changes nothing but its counter, so any thread may use it."""

    def __init__(
        self,
        config: Config,
        capacity: Capacity,
        codec: TextCodec,
        compile_grammar: Callable[[StructuredOutput], Any] | None = None,
    ) -> None:
        self._compile_grammar = compile_grammar
        self._codec = codec
        # A tokenizer may have more tokens than the model, as some were added and never trained, and
        # a model more than its tokenizer, as its matrices were padded: those can be chosen too.
        self._vocab_size = capacity.vocab_size or codec.vocab_size
        self._eos_ids = tuple(self._known(codec.eos_ids))
        self._methods = ("auto", "off", *(m for m in capacity.methods if m not in ("auto", "off")))
        self._base_seed = config.model.seed
        self._max_len = min(config.model.max_model_len or capacity.max_len, capacity.max_len)
        self._max_slots = capacity.max_slots
        self._numbers = count()

    def check(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        stream: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        handle: int = -1,
    ) -> Asked:
        """Raise RequestError, or CapacityError for a request that can never fit into KV memory."""
        ids = list(prompt_ids)
        self._check_values(ids, params)
        params = self._with_counts(params)
        grammar = self._grammar(params.structured_outputs)
        # A grammar decides where the text may end, and nothing can follow its end.
        is_ignored = params.ignore_eos and grammar is None
        eos_ids = () if is_ignored else self._eos_ids
        seed = params.seed
        if seed is None:
            seed = new_seed(self._base_seed, next(self._numbers))
        first = Request(
            id=request_id,
            prompt_ids=ids,
            params=params,
            seed=seed,
            max_tokens=self._max_tokens(len(ids), params),
            stop_ids=tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids))),
            eos_ids=eos_ids,
            bad_word_ids=self._bad_words(params.bad_words),
            grammar=grammar,
            prediction_ids=self._prediction(params.prediction),
            priority=priority,
            cache_salt=cache_salt,
        )
        requests = [first]
        if params.n > 1:
            others = replace(params, prompt_logprobs=None)  # one sample scores the prompt for all
            requests += [
                replace(first, id=f"{request_id}#{index}", sample_index=index, params=others)
                for index in range(1, params.n)
            ]
        return Asked(
            id=request_id,
            prompt=prompt,
            prompt_ids=ids,
            requests=requests,
            is_streaming=stream,
            handle=handle,
        )

    def _check_values(self, ids: list[int], params: SamplingParams) -> None:
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        self._check_ids("prompt", ids)
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("stop_token_ids", params.stop_token_ids)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self._vocab_size:
                raise RequestError(f"{name}={value} is more than the {self._vocab_size} tokens")
        mode = params.speculation.mode
        if mode != "default" and mode not in self._methods:
            raise RequestError(
                f"speculation.mode={mode!r} must be one of {', '.join(self._methods)}: only these "
                "are loaded"
            )

    def _with_counts(self, params: SamplingParams) -> SamplingParams:
        """-1 log-probabilities are those of all tokens."""
        names = [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1]
        counts: dict[str, Any] = dict.fromkeys(names, self._vocab_size)
        return replace(params, **counts) if counts else params

    def _grammar(self, asked: StructuredOutput | None) -> Any:
        if asked is None:
            return None
        if self._compile_grammar is None:
            raise RequestError("structured_outputs: this engine was given no grammar compiler")
        return self._compile_grammar(asked)

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        if not ids or (
            set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) < self._vocab_size
        ):
            return
        for token in ids:  # which of them
            if not isinstance(token, int) or not 0 <= token < self._vocab_size:
                more = self._codec.vocab_size - self._vocab_size
                why = f": the tokenizer's last {more} tokens are unknown to the model"
                raise RequestError(
                    f"{name}: token id {token!r} must be from 0 to {self._vocab_size - 1}"
                    f"{why if more > 0 else ''}"
                )

    def _known(self, ids: Collection[int]) -> list[int]:
        """The ids that the model has."""
        return [token for token in ids if 0 <= token < self._vocab_size]

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        if num_prompt >= self._max_len:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; the context of {self._max_len} must hold it "
                "and at least one new token"
            )
        max_tokens = self._max_len - num_prompt
        if params.max_tokens is not None:
            max_tokens = min(max_tokens, params.max_tokens)
        elif num_prompt < self._max_slots:
            max_tokens = min(max_tokens, self._max_slots - num_prompt)
        if num_prompt + max_tokens > self._max_slots:
            raise CapacityError(
                f"{num_prompt} prompt tokens and max_tokens={max_tokens} need more KV memory than "
                f"the {self._max_slots} tokens there is room for; ask for fewer tokens, or give "
                "the cache more memory"
            )
        return max_tokens

    def _prediction(self, expected: str | Sequence[int] | None) -> tuple[int, ...]:
        """The prediction's token ids, as many as the longest answer could use."""
        if expected is None:
            return ()
        if isinstance(expected, str):
            ids = self._known(self._codec.encode(expected, add_special_tokens=False))
            return tuple(ids[: self._max_len])
        self._check_ids("prediction", expected)
        return tuple(expected[: self._max_len])

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is written at the start of a text and after a space."""
        found: list[tuple[int, ...]] = []
        for word in words:
            bare = word.lstrip()
            if not bare:
                raise RequestError(f"bad_words: {word!r} has nothing but spaces")
            plain = tuple(self._codec.encode(bare, add_special_tokens=False))
            spaced = tuple(self._codec.encode(" " + bare, add_special_tokens=False))
            found.append(plain)
            # If the space is a token of its own, `plain` is already the form after it.
            is_other = len(spaced) == len(plain) and spaced[0] != plain[0]
            if is_other or word.startswith(" "):
                found.append(spaced)
        return tuple(ids for ids in found if len(self._known(ids)) == len(ids))
