"""A target with heads of every kind beside it, and what they draft in captured steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import head_files
from drafting.test_heads_replay import Chain, block_chain, medusa_chain, mlp_chain, step_chain
from head_files import Study
from hunch import LLM, SamplingParams
from hunch.kernels.step import DRAFTED, KNOWN, TOKENS
from hunch.step.runner import Runner
from stand_in import lead_by_host, stand_in
from tiny_models import write_llama

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "stops": SamplingParams(temperature=1.2, max_tokens=12, seed=3, stop_token_ids=[9, 21, 40]),
    "filters": SamplingParams(temperature=0.9, top_p=0.9, top_k=20, max_tokens=12, seed=5),
    "penalties": SamplingParams(temperature=0.8, presence_penalty=0.7, max_tokens=10, seed=8),
}
SMALL: dict[str, Any] = {
    "device": "cpu", "kv_bytes": 4_000_000, "max_model_len": 128, "block_size": 4,
}  # fmt: skip


@dataclass
class World:
    """A target, its heads beside it on disk, and what each is to say."""

    model: Path
    study: Study
    heads: dict[str, Chain]  # how each drafts
    prompts: list[list[int]]
    plain: dict[str, list[list[int]]]  # the answers


def make_world(folder: Path) -> World:
    model = write_llama(folder / "model", width=32, layers=4)
    study = head_files.study(model, num_texts=5, length=40)
    eagle3, _ = head_files.make_eagle3(study, folder / "eagle3", draft_vocab=150)
    heads = {
        "eagle": step_chain(head_files.make_eagle(study, folder / "eagle")),
        "eagle3": step_chain(eagle3, (2, 2, 1)),
        "mtp": step_chain(head_files.make_mtp(study, folder / "mtp", "deepseek")),
        "dspark": block_chain(
            head_files.make_dspark(study, folder / "dspark", num_steps=150), range(1, 5)
        ),
        "medusa": medusa_chain(head_files.make_medusa(study, folder / "medusa")),
        "mlp": mlp_chain(head_files.make_mlp(study, folder / "mlp")),
    }
    prompts = [text[: 5 + 3 * i] for i, text in enumerate(study.tokens.tolist())]
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)  # one request at a time, every step by the host, on the same products
        with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL) as llm:
            lead_by_host(llm.engine.runner)
            plain = {name: tokens(llm, prompts, params) for name, params in PARAMS.items()}
    return World(model, study, heads, prompts, plain)


def tokens(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params)]


def load(model: Path, name: str, options: str = "", **given: Any) -> LLM:
    speculate = f"{name}:{model.parent / name}{options}"
    llm = LLM(str(model), speculate=speculate, **{**SMALL, **given})
    assert isinstance(llm.engine.runner, Runner)
    return llm


class Drafts:
    """What was drafted in captured steps, by text so far."""

    def __init__(self, llm: LLM, patch: pytest.MonkeyPatch) -> None:
        self.runner = llm.engine.runner
        self.found: list[tuple[list[int], list[int]]] = []
        self.by_host: list[list[int]] = []  # rows of each step that the host packs
        self.learn, self.run = self.runner.captured.policy.learn, self.runner._run_on_host
        patch.setattr(self.runner.captured.policy, "learn", self.note)
        patch.setattr(self.runner, "_run_on_host", self.note_host)
        self.launch = self.runner.prompts.launch
        patch.setattr(self.runner.prompts, "launch", self.note_prompts)

    def note(self, row_R: np.ndarray, lines: list[list[int]], graph: Any) -> list[str] | None:
        rows, state = self.runner.rows, self.runner.captured.device_rows.state
        end = graph.columns.draft
        for row, line in zip(row_R.tolist(), lines, strict=True):
            if rows.requests[row] is not None and line[TOKENS]:
                guesses = line[end - self.runner.captured.steps.num_guesses : end]
                text = state.tokens_XL[row, : line[KNOWN]].tolist()
                self.found.append((text, guesses[: line[DRAFTED]]))
        return self.learn(row_R, lines, graph)

    def note_host(self, plan: Any) -> Any:
        self.by_host.append([work.row for work in plan.work])
        return self.run(plan)

    def note_prompts(self, plan: Any, receive: Any) -> Any:
        self.by_host.append([work.row for work in plan.work])
        return self.launch(plan, receive)

    def check(self, chain: Chain, study: Study, least: int = 10, share: float = 0.99) -> None:
        """Nearly all as replayed, as the last bits of two computations differ."""
        num_drafts = num_same = 0
        for text, guesses in self.found:
            if guesses:
                hidden, features = head_files.states_of(study.target, text)
                expected = chain(text, hidden, features, len(text), len(guesses))
                num_drafts, num_same = num_drafts + 1, num_same + (expected == guesses)
        assert num_drafts >= least
        assert num_same >= share * num_drafts, (num_same, num_drafts)
