"""A small target and prompts for it, and a job that takes seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from hunch import LLM, SamplingParams
from hunch.models.decoder import Decoder
from hunch.train.job import Job
from hunch.train.packs import Pack, PackInputs
from hunch.train.states import States, opinions_of, read_pack
from hunch.train.student import Student
from tiny_models import write_llama

ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 96,
    "kv_bytes": 4_000_000,
    "max_num_seqs": 16,
}
OPTIONS = {
    "steps": "24",
    "batch": "768",
    "context": "96",
    "max_tokens": "20",
    "shard": "12",
    "held_out": "4",
    "precision": "float32",
    "lr": "0.005",
}
# Options on which the answers to the prompts depend.
ANSWER_OPTIONS = {
    "context", "max_tokens", "shard", "held_out", "temperatures", "ignore_eos", "seed",
}  # fmt: skip
WORDS = ["the", "model", "guess", "fast", "token", "in", "to", "of"]


def write_target(path: Path) -> Path:
    """Four layers, of which the third hardly matters: a cut without it has something to find."""
    write_llama(path, layers=4, width=32, max_len=128)
    tensors = load_file(path / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.2.{name}.weight"] *= 0.6
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_prompts(path: Path, count: int = 36) -> Path:
    rng = np.random.default_rng(1)
    lines = [" ".join(rng.choice(WORDS, 3)) for _ in range(count)]
    records = [{"prompt": line} if i % 2 else {"turns": [line]} for i, line in enumerate(lines)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def new_job(target: Path, prompts: Path, out: Path, method: str = "draft", **options: Any) -> Job:
    given = {**OPTIONS, **{key: str(value) for key, value in options.items()}}
    return Job(method, str(target), str(prompts), out, given, dict(ENGINE))


def read_texts(
    student: Student, target: Decoder, pack: Pack
) -> tuple[PackInputs, States, torch.Tensor]:
    """A pack's inputs, and what the target says of it to a student."""
    inputs = pack.inputs(target.device)
    states = read_pack(target, inputs, student.feature_layers)
    return inputs, states, opinions_of(target, student.columns, inputs, states)


def check_no_text_changes(target: Path, *methods: str) -> None:
    """With each of them the target writes what it does by plain decoding."""
    params = SamplingParams(temperature=0, max_tokens=24)
    texts = []
    for speculate in ("off", *methods):
        with LLM(str(target), speculate=speculate, **ENGINE) as llm:
            outputs = llm.generate(["the model", "a guess"], params)
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert all(text == texts[0] for text in texts)
