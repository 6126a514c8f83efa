"""Trained heads draft in the engine exactly what an offline replay of the same head drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import head_files
import plain_blocks
import plain_heads
from head_files import Study
from hunch import LLM, RequestOutput, SamplingParams, Speculation
from hunch.errors import ConfigError, ModelFormatError
from tiny_models import write_llama

SMALL = {
    "always_draft": True,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "kv_bytes": 8_000_000,
    "dtype": "float32",
}
TRACED = SamplingParams(
    temperature=0, max_tokens=32, ignore_eos=True, speculation=Speculation(trace=True)
)
Chain = Callable[[list[int], Tensor, list[Tensor], int, int], list[int]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "target", layers=4, width=32)


@pytest.fixture(scope="module")
def texts(target: Path) -> Study:
    return head_files.study(target, num_texts=4, length=36)


def step_chain(head: plain_heads.StepHead, layers: tuple[int, ...] = ()) -> Chain:
    def chain(
        tokens: list[int], hidden: Tensor, features: list[Tensor], known: int, depth: int
    ) -> list[int]:
        h = head.fuse(hidden[None], [features[layer][None] for layer in layers])[0]
        return plain_heads.replay(head, h, tokens, known, depth)

    return chain


def block_chain(head: plain_blocks.PlainBlocks, layers: Iterable[int]) -> Chain:
    layers = list(layers)

    def chain(
        tokens: list[int], hidden: Tensor, features: list[Tensor], known: int, depth: int
    ) -> list[int]:
        taps = torch.cat([features[layer] for layer in layers], dim=-1)
        return head.chain(taps, tokens[:known], depth)

    return chain


def mlp_chain(head: plain_heads.MlpHead) -> Chain:
    def chain(
        tokens: list[int], hidden: Tensor, features: list[Tensor], known: int, depth: int
    ) -> list[int]:
        fed = [torch.tensor([tokens[known - 1]])]
        for _ in range(depth):
            fed.append(head.logits(hidden[known - 2 : known - 1], fed)[-1].argmax(-1))
        return [int(token) for token in fed[1:]]

    return chain


def medusa_chain(head: plain_heads.MedusaHead) -> Chain:
    def chain(
        tokens: list[int], hidden: Tensor, features: list[Tensor], known: int, depth: int
    ) -> list[int]:
        return [int(logits.argmax()) for logits in head.logits(hidden[known - 2])][:depth]

    return chain


def make(name: str, s: Study, path: Path) -> tuple[str, Chain]:
    if name == "eagle":
        return name, step_chain(head_files.make_eagle(s, path))
    if name == "eagle3":
        head, _ = head_files.make_eagle3(s, path, draft_vocab=150)
        return name, step_chain(head, (2, 2, 1))
    if name == "eagle3, speculators":
        head, _ = head_files.make_eagle3(
            s, path, is_speculators=True, norm_before_residual=True, norm_output=True
        )
        return "eagle3", step_chain(head, (2, 2, 1))
    if name.startswith("mtp"):
        return "mtp", step_chain(head_files.make_mtp(s, path, name.removeprefix("mtp ")))
    if name == "mlp":
        return name, mlp_chain(head_files.make_mlp(s, path))
    return name, medusa_chain(head_files.make_medusa(s, path))


def compare(output: RequestOutput, chain: Chain, s: Study) -> tuple[int, int, int]:
    """Steps that drafted, those that drafted what the replay says, and tokens accepted."""
    answer = output.outputs[0]
    tokens = [*output.prompt_token_ids, *answer.token_ids]
    hidden, features = head_files.states_of(s.target, tokens)
    known, num_steps, num_same, num_accepted = len(output.prompt_token_ids), 0, 0, 0
    for step in answer.trace:
        if step.tokens:
            expected = chain(tokens, hidden, features, known, len(step.tokens))
            # Accepted is what agrees with the text, up to the first guess that does not.
            pairs = zip(expected, tokens[known:], strict=False)
            right = next((i for i, (a, b) in enumerate(pairs) if a != b), len(expected))
            num_steps += 1
            num_same += expected == step.tokens and len(step.accepted) == right
            num_accepted += len(step.accepted)
        known += len(step.accepted) + 1
    return num_steps, num_same, num_accepted


NAMES = ["eagle", "eagle3", "eagle3, speculators", "mtp mimo", "mtp qwen", "mtp deepseek"]


# Other names in the files; tests of networks read those each day.
LATER = {"mtp mimo", "mtp qwen"}
DAILY = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in LATER))
    for name in [*NAMES, "mlp", "medusa"]
]


@pytest.mark.parametrize("name", DAILY)
def test_the_engine_drafts_what_the_replay_drafts(
    name: str, target: Path, texts: Study, tmp_path: Path
) -> None:
    method, chain = make(name, texts, tmp_path)
    prompts = texts.tokens[:3, :9].tolist()
    total = torch.zeros(3)
    for chunk in (512, 5):  # a prompt in one piece, and in several
        llm = LLM(
            str(target), speculate=f"{method}:{tmp_path}", max_num_batched_tokens=chunk, **SMALL
        )
        for output in llm.generate(prompts, TRACED):
            total += torch.tensor(compare(output, chain, texts))
        llm.close()
    num_steps, num_same, num_accepted = total.tolist()
    assert num_steps > 20
    assert num_same >= 0.995 * num_steps
    assert num_accepted > 0.3 * num_steps  # it learned something


@pytest.mark.parametrize("name", ["eagle3", "mlp", "medusa"])
def test_the_method_and_the_number_of_tokens_come_from_the_files(
    name: str, target: Path, texts: Study, tmp_path: Path
) -> None:
    """speculative_model=PATH, and nothing else."""
    if name == "eagle3":
        head_files.make_eagle3(texts, tmp_path, is_speculators=True, num_steps=0)
    else:
        getattr(head_files, f"make_{name}")(texts, tmp_path, num_steps=0)
    llm = LLM(str(target), speculative_model=str(tmp_path), **SMALL)
    (output,) = llm.generate(texts.tokens[:1, :9].tolist(), TRACED)
    assert len(output.outputs[0].trace[1].tokens) == 3


def test_more_tokens_than_the_file_can_guess(target: Path, texts: Study, tmp_path: Path) -> None:
    head_files.make_mlp(texts, tmp_path, num_steps=0)
    with pytest.raises(ConfigError, match="predicts at most 3 tokens"):
        LLM(str(target), speculate=f"mlp:{tmp_path}:num_nodes=4", **SMALL)


@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_a_head_of_short_context_goes_on_past_it(name: str, target: Path, tmp_path: Path) -> None:
    """A prompt of several windows: what came before the window is not even processed."""
    target = head_files.make_draft(target, tmp_path / "local")
    head_files.look_less_far(target)
    texts = head_files.study(target, num_texts=4, length=36)
    getattr(head_files, f"make_{name}")(texts, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = texts.tokens[:3].flatten().tolist()  # four windows long
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    expected = LLM(str(target), speculate="off", **SMALL).generate([prompt], params)
    for chunk in (512, 20):
        llm = LLM(
            str(target), speculate=f"{name}:{tmp_path}", max_num_batched_tokens=chunk, **SMALL
        )
        (output,) = llm.generate([prompt], params)
        assert output.outputs[0].token_ids == expected[0].outputs[0].token_ids
        stats = output.outputs[0].stats
        assert stats["drafted"] > 20
        assert stats["accepted"] > 0.4 * stats["drafted"]
        llm.close()


@pytest.mark.parametrize("name", ["eagle3", "medusa", "mlp"])
def test_a_head_needs_a_path(name: str, target: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name}:PATH"):
        LLM(str(target), speculate=name, **SMALL)


def test_a_stranger_is_named(target: Path, texts: Study, tmp_path: Path) -> None:
    head_files.make_eagle(texts, tmp_path / "head", num_steps=0)
    wide = write_llama(tmp_path / "wide", width=2 * texts.width)
    with pytest.raises(ModelFormatError, match=f"hidden size {texts.width}, this target has"):
        LLM(str(wide), speculate=f"eagle:{tmp_path / 'head'}", **SMALL)
