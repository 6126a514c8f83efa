"""The drafter of docs/adding-a-drafter.md, as printed there: it drafts, and changes no token."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hunch import LLM, SamplingParams, Speculation
from tiny_models import write_llama

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-drafter.md"
PROMPTS = [[5, 6, 7, 8] * 6, [9, 4], [7, 7, 7, 7, 7], [3, 1, 4, 1, 5, 9, 2, 6]]
ECHO = "documented.echo:EchoDrafter:num_nodes=3"
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PARAMS = [GREEDY, SamplingParams(temperature=1.1, seed=3, max_tokens=20, top_k=12)]
SMALL: dict[str, Any] = {"kv_bytes": 4_000_000, "max_model_len": 128, "block_size": 4}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    blocks = re.findall(r"```python\n# drafting/(\w+).py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["echo", "gpu_echo"]
    (tmp_path / "documented").mkdir()
    (tmp_path / "documented" / "__init__.py").touch()
    for name, code in blocks:
        (tmp_path / "documented" / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("documented.echo", "documented.gpu_echo", "documented"):
        sys.modules.pop(name, None)


@pytest.fixture
def on_device(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter has its device form, and steps check all of a draft, whether it pays or not."""
    pytest.importorskip("triton")
    echo, gpu_echo = map(import_module, ("documented.echo", "documented.gpu_echo"))

    def on_device(drafter: Any) -> Any:
        num_nodes = drafter.config.num_nodes
        return gpu_echo.DeviceEcho(name="echo", num_nodes=num_nodes, is_adaptive=False)

    monkeypatch.setattr(echo.EchoDrafter, "on_device", on_device, raising=False)


def answers(llm: LLM, params: Any) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)]


def compare(model: Path, **given: Any) -> None:
    with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL, **given) as llm:
        plain = [answers(llm, params) for params in PARAMS]
    with LLM(str(model), speculate=ECHO, **SMALL, **given) as llm:
        assert [answers(llm, params) for params in PARAMS] == plain
        assert llm.stats()["drafted"] > 0


@pytest.mark.usefixtures("package")
def test_on_a_cpu(tmp_path: Path) -> None:
    compare(write_llama(tmp_path / "model", width=32, layers=2), device="cpu")


@pytest.mark.gpu
@pytest.mark.usefixtures("package")
def test_on_a_gpu(tmp_path: Path) -> None:
    compare(write_llama(tmp_path / "model", width=64), device="cuda", dtype="bfloat16")


@pytest.mark.gpu
@pytest.mark.usefixtures("on_device")
def test_on_a_gpu_in_captured_steps(tmp_path: Path) -> None:
    compare(write_llama(tmp_path / "model", width=64), device="cuda", dtype="bfloat16")


@pytest.mark.usefixtures("on_device")
def test_in_captured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stand_in import lead_noted, stand_in

    stand_in(monkeypatch)
    by_host = lead_noted(monkeypatch)
    compare(write_llama(tmp_path / "model", width=32, layers=2), device="cpu")
    assert all(work.num_nodes == 0 for plan in by_host for work in plan.work)


@pytest.mark.skipif(find_spec("triton") is None, reason="captured steps need Triton")
@pytest.mark.usefixtures("package")
def test_rows_without_it_take_captured_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hunch.step.host_step import HostStep
    from stand_in import lead_by_host, stand_in

    stand_in(monkeypatch)
    model = write_llama(tmp_path / "model", width=32, layers=2)
    with LLM(str(model), speculate="off", max_num_seqs=1, device="cpu", **SMALL) as llm:
        lead_by_host(llm.engine.runner)
        plain = answers(llm, GREEDY)
    lead, led = HostStep.run, [0] * len(PROMPTS)

    def note(host: HostStep, plan: Any) -> Any:
        for work in plan.work:
            led[PROMPTS.index(host.rows.requests[work.row].prompt_ids)] += 1
        return lead(host, plan)

    monkeypatch.setattr(HostStep, "run", note)
    off = replace(GREEDY, speculation=Speculation(mode="off"))
    with LLM(str(model), speculate=ECHO, device="cpu", **SMALL) as llm:
        assert answers(llm, [GREEDY, off, GREEDY, off]) == plain
    assert led[1] == led[3] == 1  # the prompt
    assert led[0] > 1
    assert led[2] > 1
