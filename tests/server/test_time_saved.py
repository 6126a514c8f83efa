"""The seconds an engine says it saved, against the same requests without speculation."""

from __future__ import annotations

import math
import time
from statistics import stdev

import pytest

from hunch import LLM
from hunch.bench import analysis
from hunch.bench.loads import Load
from hunch.bench.measure import Cell, make_jobs, measure
from hunch.bench.offline import EngineSubject
from hunch.bench.readers import read_workloads
from hunch.bench.records import Report
from hunch.bench.workloads import Prompt
from hunch.hub import ModelFiles

METHODS, NUM_ROUNDS = ("ngram", "suffix", "auto"), 3


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_time_saved_agrees_with_an_a_b_run(
    default_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 5%, and twice what the A/B itself is uncertain by, as its rounds differ.

    In the process's own seconds, so that it holds on a busy machine too.
    """
    for module in ("step.host_step", "step.calibrate", "bench.offline"):
        monkeypatch.setattr(f"hunch.{module}.perf_counter", time.process_time)
    options = {"max_model_len": 1024, "max_num_seqs": 1, "enable_prefix_caching": False}
    with LLM("smollm2-135m", speculate="off", threads=1, **options) as llm:
        subjects = [EngineSubject("off", llm)]
        subjects += [EngineSubject(name, llm.sibling(name)) for name in METHODS]
        for subject in subjects:
            monkeypatch.setattr(subject.llm.engine, "_clock", time.process_time)
        params = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True, "seed": 0}
        prompts = read_workloads("code,math,chat", 2)

        def encode(prompt: Prompt) -> list[int]:
            if not prompt.messages:
                return llm.tokenizer.encode(prompt.text)
            return llm.encode_chat([{"role": role, "content": c} for role, c in prompt.messages])

        jobs = make_jobs(prompts, encode, params)
        report = Report("bench", {"urls": []}, {})
        measure(subjects, [Cell({"concurrency": 1}, Load(concurrency=1), jobs)], NUM_ROUNDS, report)
        for subject in subjects[1:]:
            subject.close()
    plain = report.runs[0]
    for run in report.runs[1:]:
        found = analysis.time_saved(report, run)
        assert found is not None
        by_engine, by_clock = found["by_engine"], found["by_clock"]
        assert by_engine is not None
        assert by_clock is not None
        pairs = zip(plain.rounds, run.rounds, strict=True)
        error = math.sqrt(NUM_ROUNDS) * stdev(one.seconds - two.seconds for one, two in pairs)
        print(f"{run.method}: engine {by_engine:.3f} s, clock {by_clock:.3f} s ± {error:.3f}")
        assert by_engine == pytest.approx(by_clock, abs=0.05 * by_clock + 2 * error)
        assert error < 0.1 * by_clock, "too noisy to tell"
