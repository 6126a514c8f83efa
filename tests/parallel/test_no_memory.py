"""A rank that runs out of memory in the middle of a step: no request is lost, no text changes.

Failures are planted on rank 0 or on the other one, in steps of several rows.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from builders import plain_logits, tiny_config, tiny_weights
from hunch import LLM, SamplingParams
from hunch.compat import config_from_vllm
from hunch.config import ModelConfig
from hunch.kernels.kv_store import KVCache, zero_kv
from hunch.kernels.recurrence import RecurrentStates
from hunch.parallel import executor
from hunch.parallel.executor import Ranks, start_ranks
from hunch.parallel.follower import Follower
from hunch.parallel.group import NearGroup
from hunch.parallel.orders import Op
from hunch.parallel.split_target import SplitTarget
from hunch.step.host_step import HostStep
from parallel.conftest import save
from parallel.failing_rank import PLANTED, Planted
from parallel.test_tensor_parallel import FAMILIES, IDS, RECURRENT, SPLIT
from tiny_models import write_llama, write_tokenizer

TESTS = Path(__file__).parents[1]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PARAMS = [
    GREEDY,
    replace(GREEDY, temperature=0.8, presence_penalty=0.9, seed=8),
    replace(GREEDY, repetition_penalty=1.1, logprobs=2, max_tokens=16),
]
PROMPTS = [[5, 6, 7, 8] * 3, [9, 4], list(range(10, 31))]
SMALL: dict[str, Any] = {
    "max_num_seqs": 4, "max_model_len": 128, "kv_bytes": 4_000_000, "block_size": 4,
    "dtype": "float32", "max_num_batched_tokens": 12,
}  # fmt: skip
TREE = "draft:{}:tree=dynamic:depth=3:num_nodes=12:adaptive=false"


class TwoRanks:
    """Engines over two ranks, of which either can be told to fail."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.ranks, self.file = ranks, folder / "planted"
        sizes = {**RECURRENT, "max_position_embeddings": 256}
        (folder / "recurrent").mkdir()
        sizes["vocab_size"] = write_tokenizer(folder / "recurrent")
        config = tiny_config("Qwen3_5ForCausalLM", **sizes)
        self.models = {
            "dense": write_llama(folder / "dense", width=32, layers=3),
            "recurrent": save(folder / "recurrent", tiny_weights(config, scale=2.0)),
        }
        self.targets: dict[tuple[str, int], SplitTarget] = {}

    def target(self, name: str, num_stages: int) -> SplitTarget:
        key = name, num_stages
        if key not in self.targets:
            model = ModelConfig(
                model=str(self.models[name]), threads=1, dtype="float32", kernels="torch"
            )
            split = 2 // num_stages, num_stages
            self.targets[key] = SplitTarget(self.ranks, self.models[name], model, *split)
        return self.targets[key]

    def llm(self, name: str, num_stages: int, speculate: str, **more: Any) -> LLM:
        config = config_from_vllm(
            model=str(self.models[name]),
            speculate=speculate,
            tensor_parallel_size=2 // num_stages,
            pipeline_parallel_size=num_stages,
            kernels="torch",
            threads=1,
            **SMALL,
            **more,
        )
        llm = LLM.__new__(LLM)
        llm._open(config, None, lambda *_: self.target(name, num_stages))
        return llm

    def plant(self, place: str, every: int) -> None:
        """On rank 1."""
        self.file.write_text(f"{place} {every}")
        self.file.with_suffix(".failed").write_text("")

    @property
    def num_failed(self) -> int:
        return len(self.file.with_suffix(".failed").read_text().splitlines())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    folder = tmp_path_factory.mktemp("memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "FOLLOWER", "parallel.failing_rank")
        patch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, [*sys.path, str(TESTS)])))
        patch.setenv(PLANTED, str(folder / "planted"))
        (folder / "planted").write_text("nowhere 1")
        ranks = start_ranks(2, "cpu", 1)
    yield TwoRanks(folder, ranks)
    ranks.close()


@pytest.fixture(scope="module")
def plain(two: TwoRanks) -> Callable[[str, int], list[list[int]]]:
    """Every answer without a failure."""
    found: dict[tuple[str, int], list[list[int]]] = {}

    def of(name: str, num_stages: int) -> list[list[int]]:
        if (name, num_stages) not in found:
            two.plant("nowhere", 1)
            found[name, num_stages] = answers(two.llm(name, num_stages, "off"))
        return found[name, num_stages]

    return of


def answers(llm: LLM) -> list[list[int]]:
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
    assert {output.finish_reason for output in outputs} == {"length"}
    return [output.token_ids for output in outputs]


def plant_here(patch: pytest.MonkeyPatch, place: str, every: int) -> Planted:
    """On rank 0."""
    planted = Planted()
    planted.place, planted.every = place, every
    planted.everywhere(patch)
    finish = HostStep.finish

    def noted(own: HostStep, begun: Any) -> Any:
        before, planted.num_rows = planted.num_rows, len(begun.plan.work)
        try:
            return finish(own, begun)
        finally:
            planted.num_rows = before

    patch.setattr(HostStep, "finish", noted)
    return planted


def slow(*given: Any) -> Any:
    return pytest.param(*given, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "num_stages", "rank", "place"),
    [
        ("dense", 1, 0, "layer"),
        ("dense", 1, 1, "layer"),
        slow("dense", 1, 0, "logits"),
        ("dense", 1, 1, "logits"),
        slow("dense", 1, 0, "move"),
        slow("dense", 2, 0, "layer"),
        ("dense", 2, 1, "layer"),
        slow("dense", 2, 0, "logits"),
        slow("recurrent", 1, 0, "layer"),
        slow("recurrent", 1, 1, "layer"),
        slow("recurrent", 2, 0, "layer"),
        slow("recurrent", 2, 1, "layer"),
    ],
)
def test_no_request_is_lost(
    name: str,
    num_stages: int,
    rank: int,
    place: str,
    two: TwoRanks,
    plain: Callable[[str, int], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = plain(name, num_stages)
    method = TREE.format(two.models[name]) if place == "move" else "ngram:adaptive=false"
    llm = two.llm(name, num_stages, method)
    every = {"layer": 3, "logits": 2, "move": 1}[place]
    planted = plant_here(monkeypatch, place if rank == 0 else "nowhere", every)
    two.plant(place if rank else "nowhere", every)
    for _ in range(2):  # the second time with prefixes that are found
        assert answers(llm) == expected
    assert (two.num_failed if rank else planted.num_failed) > 0
    assert llm.stats()["kv_usage"] == 0
    scheduler: Any = llm.engine._scheduler
    assert len(scheduler._free_rows) == scheduler.max_rows
    for kv in llm.engine.runner.host.kv:  # type: ignore[attr-defined]
        assert not kv.k_LCMH.isnan().any()
    two.plant("nowhere", 1)
    assert answers(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_draft_model_over_ranks_may_lack_memory(
    rank: int,
    two: TwoRanks,
    plain: Callable[[str, int], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes of either model fail: rows go on without drafts, or steps are repeated."""
    expected, path = plain("dense", 1), two.models["dense"]
    how = {"speculative_draft_tensor_parallel_size": 2}
    llm = two.llm("dense", 1, f"draft:{path}:num_nodes=3:adaptive=false", **how)
    planted = plant_here(monkeypatch, "layer" if rank == 0 else "nowhere", 4)
    two.plant("layer" if rank else "nowhere", 4)
    for _ in range(2):
        assert answers(llm) == expected
    assert (two.num_failed if rank else planted.num_failed) > 0
    two.plant("nowhere", 1)
    planted.place = "nowhere"
    assert answers(llm) == expected
    assert llm.stats()["accepted"] > 0


def test_while_memory_is_there_nothing_more_is_sent(
    two: TwoRanks, plain: Callable[[str, int], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order for each pass and one for its logits, and the exchanges of the model."""
    expected, orders = plain("dense", 1), Counter[Op]()
    llm, target = two.llm("dense", 1, "ngram:adaptive=false"), two.target("dense", 1)
    send = Ranks.send

    def noted(own: Ranks, numbers: Any) -> None:
        orders[Op(int(numbers[0]))] += 1
        send(own, numbers)

    monkeypatch.setattr(Ranks, "send", noted)
    group = target._part.group
    before = group.num_made
    assert answers(llm) == expected
    assert set(orders) == {Op.FORWARD, Op.LOGITS}
    per_pass = len(target._part.withdrawals(1))
    assert per_pass == 2 * 3  # attention and MLP of each layer
    assert group.num_made - before == orders[Op.FORWARD] * per_pass + 2 * orders[Op.LOGITS]


def test_moves_for_which_memory_lacks_are_made_before_the_next_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens are committed: their KV must not stay where it was."""
    link: Any = SimpleNamespace(device=torch.device("cpu"))
    follower, kv = Follower(link), zero_kv([(1, 1, 4)], 8, torch.float32, link.device)
    kv.k_LCMH += torch.arange(8)[None, :, None, None]
    follower.kv[3] = kv
    planted = Planted()
    planted.place, planted.num_rows, planted.every = "move", 2, 3
    planted.at(monkeypatch, KVCache, "move", "move")
    for source, target in ((5, 4), (7, 5), (6, 1)):  # the last one fails at first
        follower._note_moves(3, torch.tensor([[source], [target]]))
    with pytest.raises(torch.OutOfMemoryError):
        follower._move(3)
    follower._move(3)
    follower._move(3)
    assert planted.num_failed == 1
    assert kv.k_LCMH[0, :, 0, 0].tolist() == [0, 6, 2, 3, 5, 7, 6, 7]


@pytest.mark.parametrize("num_layers", [0, 2])
def test_rows_lose_the_states_that_other_ranks_have(num_layers: int) -> None:
    """Also if this rank's stage has no recurrent layers."""
    size = num_layers, 3
    states = RecurrentStates(*(torch.zeros(size, dtype=torch.int64) for _ in range(3)))
    states.lose([1])
    assert [states.is_ahead(row, 5) for row in range(3)] == [False, True, False]
    assert not states.is_ahead(1, 0)  # it begins again


def test_a_model_that_computes_no_numbers_is_not_short_of_memory(two: TwoRanks) -> None:
    target = two.target("dense", 1)
    weight_D = target._part.model.final_norm.weight_D  # type: ignore[attr-defined]
    kept = weight_D.clone()
    try:
        weight_D[0] = torch.nan
        assert plain_logits(target, IDS).isnan().all()
    finally:
        weight_D.copy_(kept)


@pytest.mark.parametrize("name", SPLIT)
def test_passes_exchange_what_their_model_says(
    name: str,
    split: Callable[..., SplitTarget],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of this a rank without memory knows what others wait for."""
    model = split(save(tmp_path / "model", tiny_weights(FAMILIES[name])), 2, kernels="torch")
    made = exchanges_of(monkeypatch)
    plain_logits(model, IDS)
    part: Any = model._part.model
    said = [*part.exchanges(len(IDS)), part.logit_exchange(len(IDS))]
    assert made == [(one.num_numbers, one.dtype) for one in said]


def test_native_passes_exchange_what_they_say(
    split: Callable[..., SplitTarget], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their kernels call a sum that they were given."""
    model = split(tiny_model, 2, dtype="float32")
    part: Any = model._part.model
    reduce, made = part.network._reduce, list[tuple[int, torch.dtype]]()
    add_up = reduce._reduce

    def noted(sum_of: torch.Tensor) -> torch.Tensor:
        made.append((sum_of.numel(), sum_of.dtype))
        return add_up(sum_of)

    monkeypatch.setattr(reduce, "_reduce", noted)
    plain_logits(model, IDS)
    assert made == [(one.num_numbers, one.dtype) for one in part.exchanges(len(IDS))]


def exchanges_of(patch: pytest.MonkeyPatch) -> list[tuple[int, torch.dtype]]:
    """What rank 0 exchanges from now on, but for what it broadcasts."""
    made: list[tuple[int, torch.dtype]] = []
    for name in ("all_reduce", "gather", "all_slices"):
        call = getattr(NearGroup, name)

        def noted(own: NearGroup, part: torch.Tensor, *sizes: Any, call: Any = call) -> Any:
            width = max(sizes[0]) if sizes else part.shape[-1]
            made.append((part.numel() // part.shape[-1] * width, part.dtype))
            return call(own, part, *sizes)

        patch.setattr(NearGroup, name, noted)
    return made


def test_ranks_have_left_before_their_line_breaks() -> None:
    """What rank 0 sent ahead may be on its way when it closes."""
    ranks = start_ranks(2, "cpu", 1)
    ranks.link.is_ahead = True
    (process,) = ranks._processes
    pipe, codes = process.stdin, list[int | None]()
    process.stdin = cast(Any, SimpleNamespace(close=lambda: codes.append(process.poll())))
    ranks.close()
    assert pipe is not None
    pipe.close()
    assert codes == [0]
