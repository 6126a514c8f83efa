"""Sampling written straight from its definition, in plain numpy, for tests to compare with."""

from __future__ import annotations

import numpy as np

from hunch.kernels.noise import TARGET, philox_ref
from hunch.types import Request


def with_history(logits: np.ndarray, request: Request, output: list[int]) -> np.ndarray:
    """Logits after every processor that looks at history, before temperature."""
    params = request.params
    x = logits.astype(np.float32).copy()
    if params.allowed_token_ids is not None:
        banned = [t for t in range(len(x)) if t not in set(params.allowed_token_ids)]
        x[banned] = -np.inf
    for word in request.bad_word_ids:
        prefix = list(word[:-1])
        if not prefix or output[-len(prefix) :] == prefix:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[list(request.stop_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    for token in set(request.prompt_ids) | set(output):
        rep = np.float32(params.repetition_penalty)
        x[token] = x[token] / rep if x[token] > 0 else x[token] * rep
    for token in set(output):
        x[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        x[token] -= np.float32(params.presence_penalty)
    return x


def filtered(x: np.ndarray, request: Request) -> np.ndarray:
    """x / T with -inf for what min-p, then top-k, then top-p removes."""
    params = request.params
    if params.temperature == 0:
        return x
    z = (x / np.float32(params.temperature)).astype(np.float32)
    order = sorted(range(len(z)), key=lambda t: (-z[t], t))
    weight = np.exp(z.astype(np.float64) - z.max())
    kept = [t for t in order if weight[t] >= params.min_p]
    if params.top_k:
        kept = kept[: params.top_k]
    total, before, nucleus = sum(weight[t] for t in kept), 0.0, []
    for token in kept:
        if params.top_p == 1 or before < params.top_p * total:
            nucleus.append(token)
        before += weight[token]
    out = np.full_like(z, -np.inf)
    out[nucleus] = z[nucleus]
    return out


def gumbel(seed: int, index: int, pos: int, vocab_size: int) -> np.ndarray:
    key = (seed & 0xFFFFFFFF, seed >> 32)
    words = [philox_ref((t >> 2, pos, index, TARGET), key)[t & 3] for t in range(vocab_size)]
    v = np.minimum((np.float32(words) + np.float32(0.5)) * np.float32(2.0**-32), 1 - 2.0**-24)
    return -np.log(-np.log1p(-v.astype(np.float64)))


def choose(logits: np.ndarray, request: Request, output: list[int]) -> int:
    """The token plain decoding takes after prompt + output."""
    z = filtered(with_history(logits, request, output), request)
    if request.params.temperature == 0:
        return int(z.argmax())
    pos = len(request.prompt_ids) + len(output)
    return int((z + gumbel(request.seed, request.sample_index, pos, len(z))).argmax())
