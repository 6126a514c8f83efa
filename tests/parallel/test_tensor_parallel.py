"""A model over several processes: the laws of one, at every size, with every kind of drafter."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_families
from builders import DictWeights, plain_logits, tiny_config, tiny_weights
from hunch import LLM, SamplingParams
from hunch.config import ModelConfig
from hunch.errors import ConfigError, EngineError, HunchError
from hunch.models.load import load_decoder
from hunch.models.native import load_native
from hunch.models.weights import open_weights
from hunch.parallel import split_backend
from hunch.parallel.executor import Ranks
from hunch.parallel.split_target import SplitTarget
from hunch.registry import DRAFTERS
from parallel.conftest import SMALL, save
from tiny_models import write_tokenizer

PROMPTS = [
    "the model and the guess",
    "fast token fast token fast token fast",
    "a",
    "to be or not to be, to be or",
]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=7),
    "rules": SamplingParams(
        temperature=0.7, repetition_penalty=1.2, min_tokens=4, max_tokens=6, seed=3
    ),
}
HEAD = "the guess of the model and a fast token in the text of the " * 4
IDS = [5, 9, 2, 40, 41, 7, 8]
RECURRENT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
# Norms of all heads at once, which ranks cannot compute.
WHOLE_NORMS = ("olmo 2", "olmo 3", "olmoe", "minimax m2")
FAMILIES = {
    **{
        name: tiny_config(*given[:1], **given[1])
        for name, given in tiny_families.FAMILIES.items()
        if name not in (*WHOLE_NORMS, "gemma 3n")
    },
    "recurrent": tiny_config("Qwen3_5ForCausalLM", **RECURRENT),
    "tied": tiny_config(tie_word_embeddings=True),
    "odd vocabulary": tiny_config(vocab_size=95),
    "three KV heads": tiny_config(
        num_attention_heads=6, num_key_value_heads=3, hidden_size=96, head_dim=16
    ),
    "one KV head": tiny_config(num_key_value_heads=1),
}
SPLIT = [name for name in FAMILIES if name != "bitnet"]  # it rounds rows by their largest number


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("name", SPLIT)
def test_ranks_give_the_scores_of_one(
    name: str, split: Callable[..., SplitTarget], tmp_path: Path
) -> None:
    weights = tiny_weights(FAMILIES[name])
    single = load_decoder(weights)
    path = save(tmp_path / "model", weights)
    model = split(path, 2, kernels="torch")
    ours, whole = plain_logits(model, IDS), plain_logits(single, IDS)
    torch.testing.assert_close(ours, whole, atol=1e-4, rtol=1e-4)
    assert model.weight_bytes < 0.9 * single.weight_bytes
    ids_C = torch.tensor([0, 94, 50, 3])
    assert model.output_rows(ids_C).equal(single.output_rows(ids_C))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_native_kernels_split_too(
    dtype: str, num_ranks: int, split: Callable[..., SplitTarget], tiny_model: Path
) -> None:
    single = load_native(open_weights(tiny_model), dtype=dtype, num_threads=1)
    assert single is not None
    model = split(tiny_model, num_ranks, dtype=dtype)
    ours, whole = plain_logits(model, IDS), plain_logits(single, IDS)
    # 8 bits: another part of a sum has other scales of its own.
    tolerance = 1e-4 if dtype == "float32" else 0.2
    torch.testing.assert_close(ours, whole, atol=tolerance, rtol=tolerance)
    assert model.backend.name == f"native on {num_ranks} ranks"
    assert model.backend.about == "the CPU's own kernels"


@pytest.mark.parametrize(
    ("num_ranks", "kernels", "names"),
    [
        (2, "auto", ("draft",)),
        pytest.param(2, "auto", ("eagle", "eagle:tree=dynamic"), marks=pytest.mark.slow),
        pytest.param(2, "torch", ("ngram",), marks=pytest.mark.slow),
        pytest.param(4, "auto", ("suffix",), marks=pytest.mark.slow),
        pytest.param(4, "torch", ("auto", "draft", "eagle3", "medusa"), marks=pytest.mark.slow),
        pytest.param(
            4,
            "auto",
            sorted({*DRAFTERS} - {"prediction", "synthetic", "off"}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_text_does_not_depend_on_the_drafter_or_the_batch(
    num_ranks: int, kernels: str, names: Sequence[str], split_llm: Callable[..., LLM]
) -> None:
    plain = split_llm(num_ranks, "off", kernels)
    expected = {kind: tokens(plain, params) for kind, params in PARAMS.items()}
    alone = [plain.generate(prompt, PARAMS["greedy"])[0].outputs[0].token_ids for prompt in PROMPTS]
    assert alone == expected["greedy"]
    for name in names:
        llm = split_llm(num_ranks, name, kernels)
        for kind, params in PARAMS.items():
            assert tokens(llm, params) == expected[kind], (name, kind)
        assert llm.stats()["drafted"] > 0 or name == "auto", name


def test_a_draft_model_has_a_size_of_its_own(split_llm: Callable[..., LLM]) -> None:
    """On one rank or over several: the text is the target's, and guesses are as good."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    plain = tokens(split_llm(4, "off"), params)
    arguments = {"max_num_batched_tokens": 9, "num_blocks": 40}
    for size in (1, 2, 4):
        llm = split_llm(4, "draft", speculative_draft_tensor_parallel_size=size, **arguments)
        assert tokens(llm, params) == plain
        assert llm.stats()["accepted"] > 5


@pytest.mark.parametrize("whole_seconds", [0.0, 9.0])
def test_a_draft_models_size_is_measured_where_nobody_names_it(
    whole_seconds: float,
    split_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {True: 1.0, False: whole_seconds}  # of models over ranks, and of whole ones
    monkeypatch.setattr(
        split_backend, "pass_seconds", lambda model: times[isinstance(model, SplitTarget)]
    )
    llm = split_llm(2, "draft:num_nodes=2")
    model = llm.engine.runner.drafter.network.method.model  # type: ignore[attr-defined]
    assert isinstance(model, SplitTarget) == (whole_seconds > 1)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert tokens(llm, params) == tokens(split_llm(2, "off"), params)


def test_what_recurrent_rows_share_is_read_once_on_every_rank(
    split_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """Rows begin with the states that others left, each rank with its own part of them."""
    sizes = {**RECURRENT, "max_position_embeddings": 256, "vocab_size": write_tokenizer(tmp_path)}
    path = save(tmp_path, tiny_weights(tiny_config("Qwen3_5ForCausalLM", **sizes), scale=2.0))
    prompts = [HEAD + tail for tail in ("model", "guess", "fast")]
    found = []
    for is_caching in (False, True):
        how = {"model": path, "enable_prefix_caching": is_caching, "block_size": 8}
        llm = split_llm(2, "suffix", "torch", **how)
        outputs = [llm.generate(one, PARAMS["seeded"])[0] for one in prompts]
        found.append([output.outputs[0].token_ids for output in outputs])
        assert (outputs[2].num_cached_tokens > 0) == is_caching
    assert found[0] == found[1]


def test_trees_move_their_kv_on_every_rank(split_llm: Callable[..., LLM]) -> None:
    plain = tokens(split_llm(2, "off"), PARAMS["greedy"])
    llm = split_llm(2, "draft:tree=dynamic")
    assert tokens(llm, PARAMS["greedy"]) == plain
    assert llm.stats()["accepted"] > 0


def test_what_cannot_be_is_refused_in_words(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="must divide tensor_parallel_size=4"):
        LLM(str(tiny_model), tensor_parallel_size=4, speculative_draft_tensor_parallel_size=3)
    weights = DictWeights(open_weights(tiny_model).config, {})
    with pytest.raises(ConfigError, match=r"weights in memory cannot be split"):
        LLM(str(tiny_model), weights=weights, tensor_parallel_size=2, **SMALL)


@pytest.mark.slow  # every day: test_captured.py
@pytest.mark.parametrize("kind", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_a_dead_rank_is_named_within_seconds(kind: str, tiny_model: Path) -> None:
    """Killed in the middle of a stream: nothing hangs, and no later request is taken."""
    arguments: Any = {**SMALL, kind: 2}
    llm = LLM(str(tiny_model), threads=1, speculate="ngram", **arguments)
    process = llm.engine.runner.target.ranks._processes[0]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    stream = llm.stream(PROMPTS[0], params)
    for _ in range(5):
        next(stream)
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        list(stream)
    with pytest.raises(EngineError, match="rank 1"):
        llm.generate("a", params)
    assert time.monotonic() - began < 300
    llm.close()
    assert process.wait(300) == -signal.SIGKILL


def test_a_model_that_does_not_load_leaves_the_ranks_well(
    ranks: Ranks, split: Callable[..., SplitTarget], tmp_path: Path
) -> None:
    weights = tiny_weights()
    good = save(tmp_path / "good", weights)
    weights.tensors.pop("lm_head.weight")
    path = save(tmp_path / "bad", weights)
    with pytest.raises(HunchError, match="lm_head"):
        SplitTarget(ranks, path, ModelConfig(model=str(path), threads=1), 2)
    for name in ("olmo 2", "gemma 3n"):
        path = tiny_families.write_family(tmp_path / name, name)
        with pytest.raises(HunchError, match="leave tensor_parallel_size at 1"):
            SplitTarget(ranks, path, ModelConfig(model=str(path), threads=1), 2)
    assert plain_logits(split(good, 2), IDS).isfinite().all()


SCRIPT = """
import sys
from hunch import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, speculate="ngram", max_model_len=256, threads=1)
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
outputs = llm.generate(["the model and the guess"] * 2, params, use_tqdm=False)
print("said", [one.outputs[0].token_ids for one in outputs])
"""


@pytest.mark.slow
def test_ranks_of_torchrun_give_the_text_of_our_own(tiny_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    said = []
    for how in ([], torchrun):  # through memory, and by messages
        words = [sys.executable, *how, str(script), str(tiny_model)]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=900, check=True)
        said.append([line for line in ran.stdout.splitlines() if line.startswith("said")])
    assert len(said[0]) == 1
    assert said[0] == said[1]
