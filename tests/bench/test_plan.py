"""The calculator: by hand, and against what was measured on an H200 (docs/benchmarks.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import expert_models
from bench.test_analysis import made
from hunch.bench import session
from hunch.bench.calibration import calibrate
from hunch.bench.device.named import size_from
from hunch.bench.gpus import GPUS, find, of_device
from hunch.bench.plan import Choice, Planner, Workload
from hunch.bench.records import Answer, Report, Round, Run
from hunch.bench.roofline import BYTES, Machine, Size
from hunch.cli import main
from hunch.errors import ConfigError, ModelFormatError, RequestError
from hunch.models.load import load_decoder
from hunch.models.weights import open_weights
from tiny_families import write_family

H200 = Machine.of(find("H200"))
SEVEN = Size(7.4e9, 32, 131_072.0, 14.8e9)
SMALL = Size(0.135e9, 30, 23_040.0, 0.27e9)
# The shipped draft: 4 layers of its own, the target's embedding.
DRAFT = Size(42e6, 4, 3_072.0, 84e6)
WITHIN = 0.15

# Milliseconds of a pass at 300 tokens of context, by rows (the table of the decoder's pass alone).
PASSES_7B = {1: 4.32, 8: 4.37, 32: 5.15, 64: 5.51, 128: 8.60, 256: 12.41, 512: 23.28}
PASSES_135M = {1: 0.77, 8: 0.89, 32: 0.95, 64: 0.95, 128: 1.16, 256: 1.75, 512: 2.68}
# Tokens per second of plain decoding through the engine; 128 tokens, prompts read with them.
ENGINE_7B = {1: 245, 8: 1875, 64: 8191, 256: 11835}


@pytest.mark.parametrize("rows", sorted(PASSES_7B))
def test_passes_of_a_7b_geometry_are_within_15_percent(rows: int) -> None:
    found = 1e3 * H200.step_seconds(SEVEN, rows, 1, 300)
    assert found == pytest.approx(PASSES_7B[rows], rel=WITHIN)


@pytest.mark.parametrize("rows", sorted(PASSES_135M))
def test_passes_of_a_135m_geometry_are_within_15_percent(rows: int) -> None:
    found = 1e3 * H200.step_seconds(SMALL, rows, 1, 300)
    assert found == pytest.approx(PASSES_135M[rows], rel=WITHIN)


@pytest.mark.parametrize("rows", sorted(ENGINE_7B))
def test_the_engine_on_a_7b_cost_target_is_within_15_percent(rows: int) -> None:
    prompt, answer = 227, 128  # 14,549 tokens of 64 prompts
    seconds = answer * H200.step_seconds(SEVEN, rows, 1, prompt + answer / 2)
    if rows > 1:
        seconds += H200.prefill_seconds(SEVEN, rows * prompt)
    assert rows * answer / seconds == pytest.approx(ENGINE_7B[rows], rel=WITHIN)


def test_a_chain_of_seven_on_a_7b_cost_target_is_within_15_percent() -> None:
    """Measured: 2.42 times plain decoding with 2.94 tokens per pass, one request."""
    planner = Planner(H200, SEVEN, DRAFT, 0.7, Workload(227, 128))
    choice = planner.choice(1, 7)
    speedup = 2.94 * choice.plain_seconds / choice.pass_seconds
    assert speedup == pytest.approx(2.42, rel=WITHIN)


def test_by_hand_where_only_memory_counts() -> None:
    """1 TB/s, nothing else: a target of 10 GB takes 10 ms, a draft of 1 GB takes 1 ms."""
    machine = Machine("hand", 1e12, 1e30, 1e30, 1e15, layer_seconds=0.0)
    target, draft = Size(5e9, 1, 0.0, 10e9), Size(5e8, 1, 0.0, 1e9)
    target = Size(5e9, 1, 1e-6, 10e9)
    choice = Planner(machine, target, draft, 0.5, Workload(1, 1)).choice(1, 3)
    assert choice.tokens_per_pass == pytest.approx(1.875)  # 1 + 1/2 + 1/4 + 1/8
    assert choice.pass_seconds == pytest.approx(13e-3, rel=1e-3)
    assert choice.speedup == pytest.approx(1.875 * 10 / 13, rel=1e-3)


def test_more_load_pays_less_and_costs_in_the_end() -> None:
    planner = Planner(Machine.of(find("H100")), Size.parse("8B"), Size.parse("1B"), 0.7, Workload())
    speedups = [planner.best(rows).speedup for rows in (1, 8, 32, 128)]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[0] > 1.5
    assert all(speedup >= 1.0 for speedup in speedups)  # zero nodes are an ordinary answer
    inversion = planner.inversion(7)
    assert inversion is not None
    assert planner.choice(inversion, 7).speedup < 1 <= planner.choice(inversion - 1, 7).speedup


# An open load of 1.2 seconds (docs/benchmarks.md), by requests per second: tokens of a prompt; then
# by draft length milliseconds per token (the mean over requests) and tokens per pass.
UNDER_LOAD = {
    8: (52, {0: (4.22, 1.0), 3: (2.27, 1.98), 7: (2.22, 2.23)}),
    24: (165, {0: (4.85, 1.0), 3: (2.51, 2.14), 7: (2.44, 2.47)}),
    48: (165, {0: (6.21, 1.0), 3: (3.21, 2.16), 7: (3.62, 2.50)}),
    96: (166, {0: (10.23, 1.0), 3: (6.90, 2.16), 7: (7.91, 2.49)}),
}


@pytest.mark.parametrize("length", [0, 3, 7])
@pytest.mark.parametrize("rate", sorted(UNDER_LOAD))
def test_an_open_load_on_a_7b_cost_target_is_within_15_percent(rate: int, length: int) -> None:
    prompt, measured = UNDER_LOAD[rate]
    milliseconds, tokens_per_pass = measured[length]
    planner = Planner(H200, SEVEN, DRAFT, 0.55, Workload(prompt, 64, float(rate), 1.2))

    def choose(rows: int) -> Choice:
        return replace(planner.choice(rows, length), tokens_per_pass=tokens_per_pass)

    took = planner.answers_at(float(rate), choose)
    assert 1e3 * sum(took) / len(took) / 63 == pytest.approx(milliseconds, rel=WITHIN)


def test_littles_law_holds_at_a_rate() -> None:
    work = Workload(512, 256, rate=5.0)
    planner = Planner(Machine.of(find("H100")), Size.parse("8B"), None, 0.6, work)
    for is_plain in (True, False):
        load = planner.at_rate(is_plain)
        assert load.machines == 1
        assert load.rows == pytest.approx(5.0 * load.seconds, rel=0.1)
    assert planner.at_rate(False).seconds < planner.at_rate(True).seconds


def test_a_report_calibrates() -> None:
    report = made()
    for run in report.runs:
        run.point = {"concurrency": int(run.point["rate"])}
        for one in run.rounds:
            one.counts |= {"num_drafts": 10, "drafted": 30, "accepted": 15}
    machine, acceptance = calibrate(report, H200, SEVEN)
    measured = (0.5 - 0.1) / 39  # seconds per token of the report's plain decoding
    middle = sorted(measured / H200.step_seconds(SEVEN, rows, 1, 28) for rows in (1, 4, 16))[1]
    assert machine.scale == pytest.approx(middle, rel=1e-3)
    # 3 guesses a pass, 1.5 of them right: x + x^2 + x^3 = 1.5.
    assert acceptance is not None
    assert acceptance + acceptance**2 + acceptance**3 == pytest.approx(1.5, rel=1e-3)
    for run in report.runs:  # a lookup that found something in one of three passes
        for one in run.rounds:
            one.counts |= {"steps": 30}
    _, seldom = calibrate(report, H200, SEVEN)
    assert seldom is not None
    assert seldom + seldom**2 + seldom**3 == pytest.approx(0.5, rel=1e-3)
    with pytest.raises(RequestError, match="--speculate off,auto --concurrency 1,8"):
        calibrate(made({"suffix": (1.0,)}), H200, SEVEN)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_report_of_open_loads_calibrates(scale: float) -> None:
    """Played step by step on a machine of known speed, which is found again."""
    machine = replace(H200, scale=scale)
    runs = []
    for rate in (8.0, 24.0, 48.0):
        planner = Planner(machine, SEVEN, None, 0.5, Workload(160, 64, rate / scale, 4.0 * scale))
        took = planner.answers_at(rate / scale, lambda rows, p=planner: p.choice(rows, 0))
        answers = [
            Answer(str(n), "chat", 160, 64, n * scale / rate, 0.0, seconds)
            for n, seconds in enumerate(took)
        ]
        runs.append(Run("off", {"rate": rate / scale}, [Round(4.0 * scale, answers)]))
    found, acceptance = calibrate(Report("sweep", {}, {}, runs), H200, SEVEN)
    assert found.scale == pytest.approx(scale, rel=0.15)
    assert acceptance is None


def run_on(machine: Machine, method: str, length: int, per_pass: float, rows: int) -> Run:
    """40 tokens after a first one, in passes that check so many guesses."""
    seconds = 40 * machine.step_seconds(SMALL, rows, 1 + length, 28.5) / per_pass
    steps = 40 / per_pass
    counts = {
        "num_drafts": steps if length else 0, "steps": steps, "drafted": length * steps,
        "accepted": (per_pass - 1) * steps,
    }  # fmt: skip
    answer = Answer("p", "chat", 8, 41, 0.0, 0.1, 0.1 + seconds, num_passes=round(steps))
    return Run(method, {"concurrency": rows}, [Round(seconds, [answer], counts)])


def test_what_a_further_token_costs_is_read_from_a_report() -> None:
    slow = replace(H200, scale=20.0, token_cost=200.0)
    plain = [run_on(slow, "off", 0, 1.0, rows) for rows in (1, 4)]
    checked = [run_on(slow, "suffix:num_nodes=3", 3, 2.0, rows) for rows in (1, 4)]
    drafted = run_on(slow, "draft", 4, 3.2, 1)
    wished = run_on(slow, "synthetic:tokens_per_pass=8", 7, 8.0, 1)
    where = {"cpu": "hand", "size": asdict(SMALL)}
    report = Report("sweep", {}, where, [*plain, *checked, drafted, wished])
    machine, lookups = calibrate(report, H200, SMALL)
    _, network = calibrate(report, H200, SMALL, has_draft=True)
    assert machine.scale == pytest.approx(20, rel=0.2)
    assert machine.token_cost == pytest.approx(200, rel=0.2)
    for run in report.runs:  # the plan says what was measured
        rows, counts = run.point["concurrency"], run.counts()
        tokens = 1 + counts["drafted"] / counts["steps"]
        seconds = run.rounds[0].seconds / counts["steps"]
        assert machine.step_seconds(SMALL, rows, tokens, 28.5) == pytest.approx(seconds, rel=0.1)
    # What was wished for tells nothing of guesses: lookups have x + x^2 + x^3 = 1 of them right.
    assert lookups is not None
    assert network is not None
    assert lookups + lookups**2 + lookups**3 == pytest.approx(1.0, rel=1e-3)
    assert network > lookups
    work = Workload(8, 41)
    here, there = (Planner(one, SMALL, None, lookups, work).best(4) for one in (machine, H200))
    assert here.speedup < 1.3 < 1.8 < there.speedup


def test_a_plan_from_a_report_is_for_the_model_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, path = made(), tmp_path / "report.json"
    for run in report.runs:
        run.point = {"concurrency": int(run.point["rate"])}
    report.save(path)
    with pytest.raises(SystemExit):  # nobody knows how large it is
        main(["plan", "--from", str(path)])
    assert "give --target" in capsys.readouterr().err
    report.environment["size"] = asdict(SMALL)
    report.save(path)
    scales = []
    for words in ([], ["--target", "8B"]):
        with pytest.raises(SystemExit):
            main(["plan", "--from", str(path), "--json", *words])
        found = json.loads(capsys.readouterr().out)
        scales.append(found["scale"])
        assert found["target"] == (words[-1] if words else "135M")
        assert found["machine"] == "hand"  # the report's CPU
    assert scales[0] == scales[1]  # the machine's, whatever is planned for it


@pytest.mark.parametrize("case", ["qwen2-moe", "mixtral"])
def test_a_report_says_how_much_of_a_model_are_experts(case: str, tmp_path: Path) -> None:
    theirs = expert_models.make(case, tmp_path)
    counts = {name: one.numel() for name, one in theirs.named_parameters()}
    target = load_decoder(open_weights(tmp_path))
    llm = SimpleNamespace(engine=SimpleNamespace(runner=SimpleNamespace(target=target)))
    size = Size(**session._size(cast(Any, llm)))
    in_experts = sum(count for name, count in counts.items() if ".experts." in name)
    assert size.params * size.expert_share == pytest.approx(in_experts)
    assert size.params == pytest.approx(sum(counts.values()))
    assert size.weight_bytes == target.weight_bytes
    assert size.asked == 0.5  # 3 of 6, 2 of 4


def test_gpus_have_sources_and_plausible_figures() -> None:
    for gpu in GPUS.values():
        assert gpu.source
        assert 10 < 1e3 * gpu.bf16_tflops / gpu.bandwidth_gbs < 450  # operations per byte
    assert find("nvidia h100 pcie").name == "H100-PCIe"
    for said, name in {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100-PCIe"}.items():
        assert (card := of_device(said)) is not None
        assert card.name == name
    assert of_device("NVIDIA Tegra") is None
    with pytest.raises(ConfigError, match="H100"):
        find("H10")
    with pytest.raises(ConfigError, match="8B"):
        Size.parse("big")
    assert set(BYTES) >= {"bf16", "fp8", "int4"}


@pytest.fixture
def run(shell: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    return partial(shell, "plan")


def test_what_stages_exchange_fits_a_terminal(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("--link", "ndr", "--tp", "4", "--pp", "2")
    assert code == 0
    for word in ("exchange", "weights", "all rows", "stages", "235B MoE", "50%"):
        assert word in out


def test_the_command(run: Callable[..., tuple[int, str, str]]) -> None:
    words = ("--target", "8B", "--draft", "1B", "--gpu", "H100", "--rps", "5", "--price", "2")
    code, out, _ = run(*words, "--json")
    found = json.loads(out)
    assert code == 0
    plain, drafts = found["at_rate"]["plain"], found["at_rate"]["speculative"]
    # 5 requests of 256 tokens a second: a million tokens take 781 s of one machine.
    assert plain["gpu_hours_per_million_tokens"] == pytest.approx(1e6 / 1280 / 3600)
    assert plain["cost_per_million_tokens"] == pytest.approx(2 * 1e6 / 1280 / 3600)
    assert drafts["ms_per_token"] < plain["ms_per_token"]
    two = json.loads(run(*words, "--tp", "2", "--json")[1])["at_rate"]["plain"]
    assert two["machines"] == 1  # of two GPUs, each of which costs its hour
    assert two["cost_per_million_tokens"] == pytest.approx(2 * plain["cost_per_million_tokens"])
    code, out, _ = run(*words)
    assert code == 0
    assert "speed-up" in out
    assert "cost per million tokens" in out
    lookups = json.loads(run("--target", "8B", "--json")[1])
    assert lookups["by_load"][0]["speedup"] < 2  # they find less than a draft model guesses
    assert run("--list-gpus")[0] == 0
    for words in (("--target", "70B"), ("--target", "1B", "--draft", "70B")):
        code, _, err = run(*words, "--gpu", "L4")
        assert code == 2
        assert "--tp" in err.replace("\n", " ")
    assert run("--target", "8B", "--rps", "0")[0] == 2


def test_a_pass_reads_the_experts_its_tokens_ask():
    dense, machine = Size(30e9, 48, 98_304.0, 60e9), Machine.of(find("H100"))
    sparse = replace(dense, expert_share=0.9, asked=1 / 16)
    assert sparse.active == pytest.approx(30e9 * (0.1 + 0.9 / 16))
    one, many = (sparse.seen(tokens) for tokens in (1, 1000))
    assert one == pytest.approx(0.1 + 0.9 / 16)
    assert many == pytest.approx(1.0)
    steps = [machine.step_seconds(size, 1, 1, 512) for size in (sparse, dense)]
    assert steps[0] < 0.3 * steps[1]
    assert machine.most_rows(sparse, 512) == machine.most_rows(dense, 512)  # all are in memory


@pytest.mark.parametrize("config", [b"{", b"\xff", b"[]", b"[" * 100_000])
def test_a_broken_config_is_told_of(tmp_path, config):
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        size_from(str(tmp_path), "bf16")


def test_experts_are_counted_by_the_config(tmp_path):
    write_family(tmp_path, "qwen3-moe")  # 6 experts of three matrices, 64 x 32, in two layers
    size = size_from(str(tmp_path), "bf16")
    assert size.expert_share * size.params == pytest.approx(2 * 6 * 3 * 64 * 32)
    assert size.asked == pytest.approx(2 / 6)
