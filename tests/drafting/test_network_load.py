"""Networks on a CPU follow the load: the more requests run, the fewer nodes each token costs.

Times are made up, so that what is chosen is the same on every machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafters import NETWORKS, TEXTS, speculate_for
from hunch import LLM, SamplingParams
from hunch.drafting.costs import CostCurve
from hunch.drafting.policy import HostPolicy
from tiny_models import write_llama

FREE = 8  # packed tokens that a pass takes for the price of one
SMALL: dict[str, Any] = {
    "max_num_seqs": 16, "max_model_len": 128, "dtype": "float32", "threads": 1,
}  # fmt: skip
DAILY = ("draft", "medusa")
NAMES = [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS]


@pytest.fixture
def made_up_times(monkeypatch: pytest.MonkeyPatch) -> None:
    record = CostCurve.record

    def record_made_up(curve: CostCurve, num_tokens: int, seconds: float) -> None:
        record(curve, num_tokens, max(1.0, num_tokens / FREE))

    monkeypatch.setattr(CostCurve, "record", record_made_up)
    monkeypatch.setattr(HostPolicy, "timed", lambda *_: None)  # a level costs what it is taken to


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("load") / "model")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("made_up_times")
def test_nodes_per_token_fall_as_requests_come(name: str, model: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    speculate = speculate_for(f"{name}:adaptive=true", model, tmp_path)
    nodes = []
    for num_requests in (1, 4, 16):
        with LLM(str(model), speculate=speculate, **SMALL) as llm:
            llm.generate([TEXTS[1]] * num_requests, params)
            stats = llm.stats()
            nodes.append(stats["drafted"] / (24 * num_requests))
    assert nodes[0] > 1.5 * nodes[1] > 3 * nodes[2], nodes
