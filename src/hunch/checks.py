"""What a request's values must be; a mistake is an error of ours that says what is allowed."""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import FrozenInstanceError, fields
from typing import Any, TypeVar

from hunch.errors import GrammarError, RequestError

T = TypeVar("T")
MAX_SEED = 2**63 - 1
MAX_ANSWERS = 16_384  # to one prompt: each is a request of its own
MAX_GRAMMAR_BYTES = 256 * 1024  # of a schema, regex or grammar
_ELSEWHERE = {  # names that transformers and others have for it
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "do_sample": "temperature",
    "num_return_sequences": "n",
    "best_of": "n",
    "stop_strings": "stop",
}
_BEAMS = "LLM.beam_search(prompts, BeamSearchParams(...)) searches; n gives sampled answers"
VLLMS_SAMPLING: dict[str, tuple[tuple[Any, ...], str]] = {
    # vLLM's fields -> values that ask for what hunch does anyway, and what to do in place of others
    "best_of": ((None, 1), "ask for n answers and choose among them"),
    "use_beam_search": ((False,), _BEAMS),
    "length_penalty": ((1.0,), _BEAMS),
    "early_stopping": ((False,), _BEAMS),
    "detokenize": ((True, False), "answers always have their text"),
    "skip_clone": ((True, False), "a call always copies what it is given"),
    "repetition_detection": ((None,), "repetition_penalty and stop strings keep texts from it"),
    "spaces_between_special_tokens": ((True,), "texts are as the tokenizer decodes them"),
    "logits_processors": ((None, ()), "logit_bias, bad_words, allowed_token_ids and "
                          "structured_outputs say what may be chosen"),
    "truncate_prompt_tokens": ((None,), "give the last tokens of the prompt alone"),
    "extra_args": ((None, {}), "speculation= and prediction= are hunch's own"),
    "flat_logprobs": ((False,), "logprobs are a dict for each token"),
    "thinking_token_budget": ((None,), "LLM.chat takes it"),
    "watermarking": ((None, False), "texts carry no watermark"),
    "stream_interval": ((None, 1), "an output comes with every step"),
    "skip_reading_prefix_cache": ((None, False), "LLM(enable_prefix_caching=False) reads none"),
    "logprob_token_ids": ((None,), "logprobs=N gives the likeliest tokens; -1 all"),
    "prompt_logprob_token_ids": ((None,), "prompt_logprobs=N gives the likeliest tokens; -1 all"),
    "prompt_logprob_start": ((None, 0), "prompt_logprobs has an entry for every token"),
    "trace_decode_token_ids": ((None,), "prediction= is drafted from and checked"),
    "routed_experts_prompt_start": ((None, 0), "features stay inside"),
}  # fmt: skip
_BACKENDS = (None, *(
    name + option
    for name in ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")
    for option in ("", ":no-fallback", ":disable-any-whitespace", ":no-additional-properties")
))  # fmt: skip
VLLMS_FORMS: dict[str, tuple[tuple[Any, ...], str]] = {  # the same of structured outputs
    "backend": (_BACKENDS, "llguidance reads every grammar"),
    "disable_fallback": ((True, False), "there is one grammar engine"),
    "disable_any_whitespace": ((True, False), "whitespace=True lets JSON be laid out freely"),
    "whitespace_pattern": ((None,), "whitespace=True lets JSON be laid out freely"),
    "disable_additional_properties": ((True, False), "additionalProperties: true allows others"),
}
POOLINGS = ("last", "mean")  # of a prompt's states: the last token's, or the mean of all


def plain_only(
    what: str, given: Mapping[str, Any], table: Mapping[str, tuple[tuple[Any, ...], str]]
) -> dict[str, Any]:
    """What is given without the names in `table`: these may only ask for what is done anyway."""
    for name in given.keys() & table.keys():
        values, instead = table[name]
        if not any(given[name] is value or given[name] == value for value in values):
            raise RequestError(f"{what}: {name}={given[name]!r} is not supported: {instead}")
    return {name: value for name, value in given.items() if name not in table}


def takes_vllms_names(
    what: str, others: Mapping[str, tuple[tuple[Any, ...], str]]
) -> Callable[[type[T]], type[T]]:
    """A class that also takes vLLM's other fields, as long as they ask for nothing."""

    def extend(cls: type[T]) -> type[T]:
        is_frozen = cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
        make: Any = cls.__init__ if is_frozen else setting_what_is_given(cls)

        @functools.wraps(cls.__init__)
        def __init__(self: T, **given: Any) -> None:  # noqa: N807
            make(self, **known_names(what, cls, plain_only(what, given, others)))

        def __setattr__(self: T, name: str, value: Any) -> None:  # noqa: N807
            instead = f"dataclasses.replace(params, {name}={value!r}) gives changed ones"
            raise FrozenInstanceError(f"{cls.__name__} cannot be changed: {instead}")

        cls.__init__ = __init__  # type: ignore[assignment, method-assign]
        if is_frozen:
            cls.__setattr__ = __setattr__  # type: ignore[assignment, method-assign]
        return cls

    return extend


def setting_what_is_given(cls: Any) -> Callable[..., None]:
    """An `__init__` for a dataclass that checks fields as they are set: its defaults need none."""
    usual, names = cls(), [f.name for f in fields(cls)]
    defaults = [(name, getattr(cls, name).__set__, getattr(usual, name)) for name in names]
    others = {n: f.default for n, f in cls.__dataclass_fields__.items() if n not in names}

    def __init__(self: Any, **given: Any) -> None:  # noqa: N807
        for name, put, default in defaults:
            value = given.pop(name, default)
            if value is default or (type(value) is type(default) and value == default):
                put(self, default.copy() if isinstance(default, list) else default)
            else:
                setattr(self, name, value)
        self.__post_init__(**{**others, **given})

    return __init__


def known_names(what: str, options_class: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is given, where all its names are fields of `options_class`."""
    known = options_class.__dataclass_fields__
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(_ELSEWHERE.get(str(name), str(name)), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(f"{what}: {name!r} is none of {', '.join(known)}{hint}")
    return given


USUAL_SAMPLING: Mapping[str, Any] = {  # where neither a request nor its model says otherwise
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
_RANGES: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda v: 0 <= v <= 100,
    "top_p": lambda v: 0 < v <= 1,
    "top_k": lambda v: isinstance(v, int) and v >= 0,
    "min_p": lambda v: 0 <= v <= 1,
    "repetition_penalty": lambda v: 0.01 <= v <= 100,
}


def recommended(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling fields of a generation_config.json, under our names; what is odd is left out."""
    found = dict(USUAL_SAMPLING)
    for name, allowed in _RANGES.items():
        value = generation_config.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and allowed(value):
            found[name] = value
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    if isinstance(most := generation_config.get("max_new_tokens"), int) and most > 0:
        found["max_tokens"] = most
    return found


def as_row(value: Any) -> Any:
    """A tuple, a set and the like as a list of its own; what is none stays, for a rule to name."""
    is_row = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    return list(value) if is_row else value


def is_number(value: object) -> bool:
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and math.isfinite(value)  # type: ignore[arg-type]


def is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, str) and v for v in values)


def are_ids(values: Any) -> bool:
    return isinstance(values, list) and all(is_whole(value, 0) for value in values)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_text_or_ids(value: Any) -> bool:
    return value is None or isinstance(value, str) or are_ids(value)


def is_seed(value: Any) -> bool:
    return value is None or (is_whole(value, 0) and value <= MAX_SEED)


def _number_of_scores(value: Any) -> Any:
    return 1 if value is True else value


def _bias(value: Any) -> Any:
    """Token ids may be written as text, as JSON has them."""
    if not isinstance(value, Mapping):
        return value
    return {
        int(token) if isinstance(token, str) and token.isdecimal() else token: bias
        for token, bias in value.items()
    }


_IN_OUR_TYPES: dict[str, Callable[[Any], Any]] = {
    "top_k": lambda v: 0 if v == -1 else v,
    "seed": lambda v: None if v == -1 else v,
    "logprobs": _number_of_scores,
    "prompt_logprobs": _number_of_scores,
    "logit_bias": _bias,
    "stop": lambda v: [v] if isinstance(v, str) else as_row(v or ()),
    "bad_words": lambda v: as_row(v or ()),
    "stop_token_ids": lambda v: as_row(v or ()),
    "allowed_token_ids": as_row,
    "prediction": as_row,
    "output_kind": lambda v: v or 0,
}
_SAMPLING_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda v: is_whole(v, 1) and v <= MAX_ANSWERS, f"a whole number from 1 to {MAX_ANSWERS}"),
    "temperature": (lambda v: is_number(v) and 0 <= v <= 100, "from 0 (greedy) to 100"),
    "top_p": (lambda v: is_number(v) and 0 < v <= 1, "above 0 and at most 1"),
    "top_k": (lambda v: is_whole(v, 0), "a whole number: -1, 0 (all tokens) or more"),
    "min_p": (lambda v: is_number(v) and 0 <= v <= 1, "from 0 to 1"),
    "repetition_penalty": (lambda v: is_number(v) and 0.01 <= v <= 100, "from 0.01 to 100"),
    "presence_penalty": (lambda v: is_number(v) and -2 <= v <= 2, "from -2 to 2"),
    "frequency_penalty": (lambda v: is_number(v) and -2 <= v <= 2, "from -2 to 2"),
    "max_tokens": (lambda v: v is None or is_whole(v, 1), "a whole number, 1 or more"),
    "min_tokens": (lambda v: is_whole(v, 0), "a whole number, 0 or more"),
    "logprobs": (lambda v: v is None or is_whole(v, -1), "a whole number, or -1 for all tokens"),
    "prompt_logprobs": (lambda v: v is None or is_whole(v, -1), "a whole number, or -1 for all"),
    "seed": (is_seed, "a whole number from 0 to 2**63 - 1"),
    "stop": (are_texts, "strings that are not empty"),
    "bad_words": (are_texts, "strings that are not empty"),
    "stop_token_ids": (are_ids, "token ids"),
    "allowed_token_ids": (lambda v: v is None or (v and are_ids(v)), "token ids, not none"),
    "prediction": (is_text_or_ids, "a text, or token ids"),
    "logit_bias": (lambda v: v is None or isinstance(v, Mapping), "a dict of token ids to bias"),
    "include_stop_str_in_output": (is_flag, "true or false"),
    "skip_special_tokens": (is_flag, "true or false"),
    "ignore_eos": (is_flag, "true or false"),
    "output_kind": (lambda v: v in (0, 1, 2), "one of RequestOutputKind"),
    "pooling": (lambda v: v in (None, *POOLINGS), "one of " + ", ".join(POOLINGS)),
}


def sampling_value(name: str, value: Any) -> Any:
    """What a field of the sampling parameters holds once it was given this."""
    if convert := _IN_OUR_TYPES.get(name):
        value = convert(value)
    if rule := _SAMPLING_RULES.get(name):
        is_good, allowed = rule
        if not is_good(value):
            raise RequestError(f"{name}={value!r} must be {allowed}")
    if name == "logit_bias":
        for token, bias in (value or {}).items():
            if not (is_whole(token, 0) and is_number(bias) and -100 <= bias <= 100):
                raise RequestError(f"logit_bias[{token!r}]={bias!r} must be from -100 to 100")
    return value


def json_of(schema: Any, name: str = "json") -> str:
    """A schema as JSON; `name` is the field of structured_outputs that holds it.

    It is written piece by piece, and refused as soon as it is too large: a small one that holds the
    same part twice at each of many levels would come to gigabytes.
    """
    pieces: list[str] = []
    room = MAX_GRAMMAR_BYTES
    schema = dict(schema) if isinstance(schema, Mapping) else schema
    for piece in json.JSONEncoder().iterencode(schema):
        pieces.append(piece)
        room -= len(piece)  # JSON is written in ASCII
        if room < 0:
            raise GrammarError(
                f"structured_outputs.{name} has more than {MAX_GRAMMAR_BYTES:,} bytes, the limit"
            )
    return "".join(pieces)
