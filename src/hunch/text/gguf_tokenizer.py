"""A tokenizer built from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from hunch.errors import ModelFormatError, UnsupportedModelError

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)

_MARKS_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_WORDS_AND_ACCENTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# DeepSeek's classes: letters with cases, but those that came into Unicode later; a mark and a word.
_LATER = (
    (0x560, 0x588), (0x10C7, 0x10CD), (0x10D0, 0x10FF), (0x1C80, 0x1C88), (0x2D00, 0x2D2D),
    (0xA790, 0xA7FA), (0xAB30, 0xAB68), (0x10570, 0x105BC), (0x16E40, 0x16E7F), (0x1D400, 0x1D7CB),
    (0x1DF00, 0x1DF1E),
)  # fmt: skip
_NO_CASED = "".join(f"{chr(first)}-{chr(last)}" for first, last in _LATER)
_DEEPSEEK = (
    r"[\r\n]", rf"\s?(?:(?![{_NO_CASED}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}])+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}+",
)  # fmt: skip
_DEEPSEEK_CODER = (
    r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}",
)  # fmt: skip
_DEEPSEEK3 = (
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip
_MARKS, _TRIPLES = r"[\p{P}\$\+<=>\^~\|]+", r"[0-9][0-9][0-9]"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, _TRIPLES)
_SEED = _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _byte_level(use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Split:
    """How one family cuts text before merging: a value of tokenizer.ggml.pre."""

    steps: Callable[[], list[Any]]
    has_bos: bool = False  # where the file does not say
    is_nfc: bool = False
    ignore_merges: bool = False  # a word that is a token is taken whole


def _by(*patterns: str) -> _Split:
    """Cut by one pattern after the other."""
    return _Split(steps=lambda: [*map(_split, patterns), _byte_level(False)])


_GPT2 = _Split(steps=lambda: [_byte_level(True)])
_OLD = _by(_MARKS, _GPT2_WORDS, r"\p{N}+", _TRIPLES)  # llama.cpp's for files older than the key
_DIGITS = _Split(steps=lambda: [pre_tokenizers.Digits(individual_digits=True), _byte_level(True)])
_THREE_DIGITS = _by(_WORDS + r"|\p{N}{1,3}" + _MARKS_AND_SPACE)
_LLAMA3 = replace(_THREE_DIGITS, has_bos=True, ignore_merges=True)
_ONE_DIGIT = _by(_WORDS + r"|\p{N}" + _MARKS_AND_SPACE)
_QWEN2 = replace(_ONE_DIGIT, is_nfc=True)
_SPLITS = {
    "default": _OLD,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4", "mpt", "granite-docling"), _GPT2),
    **dict.fromkeys(("command-r", "exaone", "smollm", "starcoder", "refact"), _DIGITS),
    **dict.fromkeys(("falcon3", "pixtral", "lfm2", "llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("glm4", "chatglm-bpe", "dbrx"), _THREE_DIGITS),  # dbrx: Phi-4
    **dict.fromkeys(("stablelm2", "hunyuan", "megrez"), _ONE_DIGIT),
    "deepseek-llm": _by(*_DEEPSEEK),
    "deepseek-coder": _by(*_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _by(*_DEEPSEEK3)),
    "falcon": _by(*_FALCON),
    "seed-coder": _by(_SEED),
    # gpt-4o: Phi-4-mini, gpt-oss
    **dict.fromkeys(("minimax-m2", "gpt-4o", "llama4"), _by(_O200K)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": replace(_by(_WORDS_AND_ACCENTS + r"|\s+(?!\S)|\s+"), is_nfc=True),
    "tekken": replace(_by(_TEKKEN), has_bos=True, ignore_merges=True),
}


class _Reader:
    """Typed access to the tokenizer's metadata."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata = metadata
        self.where = where

    def get(self, key: str, value_type: type, default: Any = None) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not None and type(value) is not value_type:
            raise ModelFormatError(
                f"{self.where}: tokenizer.ggml.{key} is not a {value_type.__name__}"
            )
        return value

    def list(self, key: str, value_type: type, length: int | None = None) -> list[Any]:
        items: list[Any] = self.get(key, list, [])
        if not set(map(type, items)) <= {value_type} or length not in (None, len(items)):
            raise ModelFormatError(f"{self.where}: tokenizer.ggml.{key} is damaged; download again")
        return items


def build_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer of a GGUF file; `where` names the file in errors."""
    read = _Reader(metadata, where)
    tokenizer_type = read.get("model", str)
    builders = {"gpt2": _build_bpe, "llama": _build_spm, "gemma4": _build_spm}
    if tokenizer_type not in builders:
        raise UnsupportedModelError(
            f"{where} has a tokenizer of type {tokenizer_type!r}; known are {', '.join(builders)}"
        )
    tokens = read.list("tokens", str)
    vocab = {token: index for index, token in enumerate(tokens)}
    if not tokens or len(vocab) != len(tokens):
        raise ModelFormatError(f"{where}: its vocabulary is empty or names a token twice")
    types = (
        read.list("token_type", int, len(tokens)) if "tokenizer.ggml.token_type" in metadata else []
    )
    try:
        tokenizer, has_bos = builders[tokenizer_type](read, vocab, types)
        _add_special(tokenizer, tokens, types)
        _add_bos(tokenizer, read, tokens, has_bos)
    except (ModelFormatError, UnsupportedModelError):
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelFormatError(f"{where}: no tokenizer can be built from it ({error})") from error
    return tokenizer


def _build_bpe(read: _Reader, vocab: dict[str, int], types: list[int]) -> tuple[Tokenizer, bool]:
    name = read.get("pre", str, "default")
    if name not in _SPLITS:
        raise UnsupportedModelError(
            f"{read.where} cuts text like {name!r}; known are {', '.join(_SPLITS)}"
        )
    split = _SPLITS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in read.list("merges", str)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=split.ignore_merges))
    if split.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split.steps())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.has_bos


def _build_spm(read: _Reader, vocab: dict[str, int], types: list[int]) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE, by the file's merges where it has them."""
    if read.get("model", str) == "gemma4":
        merges = [(left, right) for left, right in map(_cut, read.list("merges", str))]
    else:
        merges = _ranked_merges(read, vocab, types)
    unknown = next((t for t, i in vocab.items() if types and types[i] == _UNKNOWN), None)
    has_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    )
    has_prefix = read.get("add_space_prefix", bool, True)
    mark = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*mark, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _cut(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _ranked_merges(read: _Reader, vocab: dict[str, int], types: list[int]) -> list[tuple[str, str]]:
    """Merges of neighbours whose union is a token, the best score first."""
    scores = read.list("scores", float, len(vocab))
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in vocab.items():
        if types and types[index] not in (_NORMAL, _USER, _UNUSED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_special(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    added = [
        AddedToken(token, special=token_type != _USER, normalized=False)
        for token, token_type in zip(tokens, types, strict=False)
        if token_type in (_CONTROL, _USER, _UNKNOWN) and token
    ]
    tokenizer.add_tokens(added)


def _add_bos(tokenizer: Tokenizer, read: _Reader, tokens: list[str], has_bos: bool) -> None:
    single: list[str] = ["$A"]
    used: dict[str, int] = {}
    for key, is_default, place in (("bos", has_bos, 0), ("eos", False, 1)):
        index = read.get(f"{key}_token_id", int)
        if not read.get(f"add_{key}_token", bool, is_default) or index is None:
            continue
        if not 0 <= index < len(tokens):
            raise ModelFormatError(
                f"{read.where}: its {key} token {index} is not in the vocabulary"
            )
        single.insert(place * len(single), tokens[index])
        used[tokens[index]] = index
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=list(used.items())
        )
