"""Small tokenizers of each kind."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hunch.text.gguf_tokenizer import build_tokenizer
from hunch.text.tokenizer import Tokenizer

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "Ġwo r", "Ġwor l", "Ġworl d", "Ġ Ġ"]


def byte_level_metadata(pre: str = "smollm") -> dict[str, Any]:
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [merge.replace(" ", "") for merge in MERGES]
    special = ["<|begin|>", "<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *special, "<tool>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 4],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }


def byte_level() -> Tokenizer:
    metadata = byte_level_metadata()
    return Tokenizer(
        build_tokenizer(metadata, "test"),
        bos_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_ids=[metadata["tokenizer.ggml.eos_token_id"]],
    )


def sentence_piece_metadata() -> dict[str, Any]:
    pieces = ["▁", "▁▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello"]
    pieces += ["▁w", "or", "▁wor", "ld", "▁world", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces), 0, -1)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentence_piece() -> Tokenizer:
    backend = build_tokenizer(sentence_piece_metadata(), "test")
    return Tokenizer(backend, bos_id=1, eos_ids=[2])


def words() -> Tokenizer:
    """A vocabulary of whole words, without a decoder: they are joined by spaces."""
    vocab = {"[unk]": 0, "one": 1, "two": 2, "three": 3}
    backend = Backend(models.WordLevel(vocab, unk_token="[unk]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_tokens([AddedToken("[end]", special=True)])
    return Tokenizer(backend, eos_ids=[4])


def metaspace() -> Tokenizer:
    vocab = {"▁": 0, "▁a": 1, "a": 2, "b": 3, "▁b": 4, "▁ab": 5}
    backend = Backend(models.BPE(vocab, [("▁", "a"), ("▁", "b"), ("▁a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)
