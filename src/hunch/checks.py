"""What a request's values must be; a mistake is an error of ours that says what is allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hunch.errors import RequestError

MAX_SEED = 2**63 - 1
POOLINGS = ("last", "mean")  # of a prompt's states: the last token's, or the mean of all


def known_names(what: str, kind: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is given, where all its names are fields of `kind`."""
    known = kind.__dataclass_fields__
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(f"{what}: {name!r} is none of {', '.join(known)}{hint}")
    return given


def as_row(value: Any) -> Any:
    """A list, a set and the like as a tuple; what is none stays, for a rule to name."""
    is_row = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    return tuple(value) if is_row else value


def is_number(value: object) -> bool:
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and math.isfinite(value)  # type: ignore[arg-type]


def is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def are_texts(values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(v, str) and v for v in values)


def are_ids(values: Any) -> bool:
    return isinstance(values, tuple) and all(is_whole(value, 0) for value in values)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_text_or_ids(value: Any) -> bool:
    return value is None or isinstance(value, str) or are_ids(value)


SAMPLING_RULES: list[tuple[str, Callable[[Any], bool], str]] = [
    ("n", lambda v: is_whole(v, 1), "a whole number, 1 or more"),
    ("temperature", lambda v: is_number(v) and v >= 0, "0 or more (0 means greedy)"),
    ("top_p", lambda v: is_number(v) and 0 < v <= 1, "above 0 and at most 1"),
    ("top_k", lambda v: is_whole(v, 0), "a whole number: -1, 0 (all tokens) or more"),
    ("min_p", lambda v: is_number(v) and 0 <= v <= 1, "from 0 to 1"),
    ("repetition_penalty", lambda v: is_number(v) and 0.01 <= v <= 100, "from 0.01 to 100"),
    ("presence_penalty", lambda v: is_number(v) and -2 <= v <= 2, "from -2 to 2"),
    ("frequency_penalty", lambda v: is_number(v) and -2 <= v <= 2, "from -2 to 2"),
    ("max_tokens", lambda v: v is None or is_whole(v, 1), "a whole number, 1 or more"),
    ("min_tokens", lambda v: is_whole(v, 0), "a whole number, 0 or more"),
    ("logprobs", lambda v: v is None or is_whole(v, 0), "a whole number, 0 or more"),
    ("prompt_logprobs", lambda v: v is None or is_whole(v, 0), "a whole number"),
    ("seed", lambda v: v is None or is_whole(v, 0), "a whole number from 0 to 2**63 - 1"),
    ("seed", lambda v: v is None or v <= MAX_SEED, "a whole number from 0 to 2**63 - 1"),
    ("stop", are_texts, "strings that are not empty"),
    ("bad_words", are_texts, "strings that are not empty"),
    ("stop_token_ids", are_ids, "token ids"),
    (
        "allowed_token_ids",
        lambda v: v is None or (v and are_ids(v)),
        "token ids, not none",
    ),
    ("prediction", is_text_or_ids, "a text, or token ids"),
    ("logit_bias", lambda v: v is None or isinstance(v, Mapping), "a dict of token ids to bias"),
    ("include_stop_str_in_output", is_flag, "true or false"),
    ("skip_special_tokens", is_flag, "true or false"),
    ("ignore_eos", is_flag, "true or false"),
    ("pooling", lambda v: v in (None, *POOLINGS), "one of " + ", ".join(POOLINGS)),
]
