"""Texts to token ids; what the tokenizers library raises becomes an error that says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from hunch.errors import RequestError

MOST_CHARS = 4  # per token: a longer text is looked at in pieces before it is encoded
PIECE_CHARS = 8192


def encode_text(backend: Backend, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        if len(text) < PIECE_CHARS:
            return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # Only batches are encoded without the interpreter's lock.
        (one,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(one.ids)
    except BaseException as error:
        raise _told(error, text) from None


def encode_texts(backend: Backend, texts: Sequence[str]) -> list[list[int]]:
    """The same for many, on all cores; none of them gets special tokens."""
    try:
        return [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=False)]
    except BaseException as error:
        _told(error, "")  # raises what is no failure of the library
    return [encode_text(backend, text, add_special_tokens=False) for text in texts]  # says which


def check_length(backend: Backend, text: str, max_tokens: int) -> None:
    """Refuse a text that clearly has more tokens, mostly unread.

    Cutting a text makes a token or two more of it at each cut, so there is some leeway.
    """
    if not isinstance(text, str) or len(text) <= MOST_CHARS * max_tokens:
        return
    num_tokens, most = 0, max_tokens + max_tokens // 4 + 64
    for start in range(0, len(text), PIECE_CHARS):
        piece = text[start : start + PIECE_CHARS]
        num_tokens += len(encode_text(backend, piece, add_special_tokens=False))
        if num_tokens > most:
            raise RequestError(
                f"the prompt has more than {num_tokens} tokens; the context of {max_tokens} "
                "must hold it and at least one new token"
            )


def _told(error: BaseException, text: Any) -> RequestError:
    """The library raises nothing narrower than Exception, and panics where a regex gives up."""
    if isinstance(error, (UnicodeEncodeError, TypeError)):
        return RequestError(_why_not_text(text) or f"cannot be encoded: {error}")
    if type(error) is Exception or type(error).__name__ == "PanicException":
        return RequestError(f"this model's tokenizer cannot read the text: {error}")
    raise error


def _why_not_text(text: Any) -> str | None:
    """What keeps a text from being one: half of a character, as in names of files on disk."""
    if not isinstance(text, str):
        return f"a text is needed; {type(text).__name__} {text!r:.60} given"
    at = next((at for at, one in enumerate(text) if "\ud800" <= one <= "\udfff"), None)
    if at is None:
        return None
    if "\udc80" <= text[at] <= "\udcff":  # as Python keeps a byte that it could not decode
        return (
            f"the text is no Unicode: the byte 0x{ord(text[at]) - 0xDC00:02x} at character {at} "
            "could not be decoded; give UTF-8, in a locale of UTF-8 (LANG=C.UTF-8)"
        )
    return f"the text is no Unicode: {text[at]!r} at character {at} is half of a character"
