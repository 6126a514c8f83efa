"""A random model over a handful of tokens: small enough to know the chance of every text."""

import json
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from hunch import LLM, SamplingParams
from tiny_models import write_llama

TOKENS = ["a", "b", "c", "d", "<|end|>"]
PROMPT = [0, 1, 2, 3, 0, 1, 3, 2, 4, 1, 0, 2, 4]  # every token occurred: a lookup always guesses


def write_target(path: Path) -> Path:
    """The target: its distributions are uneven, but nothing is rare."""
    write_llama(path, seed=3)
    vocab = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    tensors = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][: len(TOKENS)].clone()
    tensors["lm_head.weight"] *= 0.35
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"vocab_size": len(TOKENS), "eos_token_id": len(TOKENS) - 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_drafter(target: Path, path: Path, *, wrong: float) -> Path:
    """A draft model: the target with another head, so far off it (0: not at all, 1: a stranger)."""
    path.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((target / name).read_bytes())
    tensors = load_file(target / "model.safetensors")
    head = tensors["lm_head.weight"]
    other = torch.randn(head.shape, generator=torch.Generator().manual_seed(15)) * head.std()
    tensors["lm_head.weight"] = (1 - wrong) * head + 5 * wrong * other
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def joint_chances(llm: LLM, temperature: float, length: int) -> dict[tuple[int, ...], float]:
    """The chance of every continuation of PROMPT, from the target's scores of all of them."""
    size = len(TOKENS)
    score = SamplingParams(max_tokens=1, prompt_logprobs=size, ignore_eos=True)
    prefixes = list(product(range(size), repeat=length - 1))
    outputs = llm.generate([[*PROMPT, *prefix, 0] for prefix in prefixes], score, use_tqdm=False)
    joint: dict[tuple[int, ...], float] = {}
    for prefix, output in zip(prefixes, outputs, strict=True):
        chance = 1.0
        for depth, token in enumerate([*prefix, None]):
            scores = output.prompt_logprobs[len(PROMPT) + depth]
            logits = torch.tensor([scores[t].logprob for t in range(size)], dtype=torch.float64)
            p = (logits / temperature).softmax(0).tolist()
            if token is not None:
                chance *= p[token]
        for last in range(size):
            joint[(*prefix, last)] = chance * p[last]
    return joint
