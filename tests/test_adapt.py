"""Phrases counted from served answers: taken between steps, and no token changes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import hunch.adapt
from hunch import LLM, SamplingParams
from hunch.adapt import PhraseAdapter
from hunch.cli.serve import _adapting, run
from hunch.config import Config, SpecConfig
from hunch.errors import ConfigError
from hunch.kernels.phrases import PhraseTable, load_phrases
from hunch.server.run import hiding
from hunch.server.settings import ServeConfig
from hunch.train.phrases import count_bytes
from tiny_models import write_llama

ENGINE = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "kv_bytes": 8_000_000}
PROMPTS = ["the model", "a guess", "fast token", "to the"]
GREEDY = SamplingParams(temperature=0, max_tokens=48)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("adapt"))


def answers(llm: LLM) -> tuple[list[list[int]], float]:
    """Token ids, and tokens per pass."""
    outputs = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS]
    steps = sum(output.stats["steps"] for output in outputs)
    return [output.token_ids for output in outputs], sum(
        map(len, (o.token_ids for o in outputs))
    ) / steps


def test_answers_make_later_guesses_better_and_change_no_text(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the lowest priority it would wait for all that a busy machine does meanwhile.
    start = hunch.adapt._START.replace("os.nice(19)", "")
    monkeypatch.setattr(hunch.adapt, "_START", start)
    with LLM(str(target), speculate="off", **ENGINE) as llm:
        plain, _ = answers(llm)
    speculate = "suffix:num_nodes=4:adaptive=false:adapt=true"
    with LLM(str(target), speculate=speculate, enable_prefix_caching=False, **ENGINE) as llm:
        (adapter,) = llm.engine.adapter.several
        assert isinstance(adapter, PhraseAdapter)
        adapter._next = 150  # tokens, so that one round of answers is enough
        adapter._pause = 0.0
        first, before = answers(llm)
        adapter.wait(300.0)
        second, after = answers(llm)
        assert adapter.num_taken == 1
    assert first == second == plain
    assert after > before + 0.1


def test_work_that_is_cut_short_by_closing_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(hunch.adapt, "_COUNTER", "sleeper")
    adapter = PhraseAdapter(lambda table: None, 50, first=1, pause=0.0)
    adapter.add([1, 2], [3, 4])
    ends = time.monotonic() + 300
    while adapter._process is None and time.monotonic() < ends:
        time.sleep(0.01)
    adapter.close()
    assert adapter._process is not None
    assert adapter._process.returncode != 0
    assert not caplog.records
    adapter.apply()
    adapter.add([1, 2], [3, 4])  # nothing begins after it
    adapter.wait(300.0)
    assert adapter._process.poll() is not None


def test_counting_waits_for_requests_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busy.py").write_text("while True: pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(hunch.adapt, "_COUNTER", "busy")
    adapter = PhraseAdapter(lambda table: None, 50, first=1, pause=0.0)

    def await_state(states: str, *, has_steps: bool) -> None:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            if has_steps:
                adapter.apply()
            process = adapter._process
            if process is not None:
                stat = Path(f"/proc/{process.pid}/stat").read_text()
                if stat.rpartition(")")[2].split()[0] in states:
                    return
            time.sleep(0.01)
        pytest.fail(f"the process is not in one of the states {states}")

    try:
        adapter.add([1, 2], [3, 4])
        await_state("T", has_steps=True)  # stopped
        await_state("RS", has_steps=False)  # there was nothing to serve for a while
        await_state("T", has_steps=True)
        adapter.patience = 0.0
        await_state("RS", has_steps=True)  # it has waited enough
    finally:
        adapter.close()


def texts_of(count: int, vocab_size: int = 50) -> bytes:
    import io

    stored, rng = io.BytesIO(), np.random.default_rng(0)
    tokens = np.tile(rng.integers(0, vocab_size, 40), count).astype(np.uint32)
    offset = np.arange(count + 1) * 40
    np.savez(
        stored, tokens=tokens, offset=offset, prompt_len=np.full(count, 5), vocab_size=vocab_size
    )
    return stored.getvalue()


def test_a_counted_table_is_read_back_and_joined_to_another() -> None:
    table = load_phrases(count_bytes(texts_of(12)), 50)
    assert len(table.hash_E) > 10
    other = PhraseTable(
        **{
            **{name: getattr(table, name) for name in table.__dataclass_fields__ if name[0] != "_"},
            "hash_E": np.array([1, table.hash_E[0]], dtype=np.uint32),
            "token_E": np.array([7, 8], dtype=np.int32),
            "level_E": np.array([3, 4], dtype=np.uint8),
        }
    )
    both = table.with_more(other)
    assert len(both.hash_E) == len(table.hash_E) + 1
    assert (np.diff(both.hash_E.astype(np.int64)) > 0).all()
    assert both.token_E[np.searchsorted(both.hash_E, table.hash_E[0])] == 8


def test_only_the_newest_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hunch.adapt.MAX_TOKENS", 100)
    adapter = PhraseAdapter(lambda table: None, 50, first=10**9)
    for _ in range(20):
        adapter.add([1] * 10, [2] * 10)
    assert adapter._num_tokens <= 100
    adapter.add([1], [])
    assert len(adapter._texts) == 5


def test_a_counter_that_fails_is_told_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hunch.adapt._COUNTER", "hunch.no_such_module")
    taken: list[PhraseTable] = []
    adapter = PhraseAdapter(taken.append, 50, first=1, pause=0.0)
    adapter.add([1], [2, 3])
    adapter.wait(300.0)
    end = time.monotonic() + 300
    while adapter._thread is not None and time.monotonic() < end:
        adapter.apply()
    assert taken == []
    assert "could not be counted" in caplog.text


@pytest.mark.parametrize("given", ["soon", "0", "-5", "1.5"])
def test_a_wrong_variable_is_named(
    given: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUNCH_ADAPT_AFTER", given)
    with pytest.raises(ConfigError, match=r"HUNCH_ADAPT_AFTER.*whole number"):
        LLM(str(target), speculate="suffix:adapt=true", **ENGINE)


def test_serve_takes_the_flag() -> None:
    adapting = _adapting(Config(spec=SpecConfig.parse("auto:num_nodes=4")))
    assert adapting.spec.options == {"num_nodes": "4", "adapt": "true"}
    with pytest.raises(ConfigError, match="use auto or one of"):
        run(["--adapt", "--speculate", "ngram"])
    two = ServeConfig(api_keys=("a", "b"))
    assert hiding(adapting, two).hides_guesses
    assert not hiding(Config(), two).hides_guesses
