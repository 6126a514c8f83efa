"""hunch verify over temperatures, batch sizes and verifiers; faults of every kind are reported."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chi2

from hunch.bench.distribution import chi_square, upper_tail
from hunch.verify import rejection
from tiny_vocab import write_drafter, write_target


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("verify")
    target = write_target(folder / "target")
    return str(target), str(write_drafter(target, folder / "drafter", wrong=0.2))


@pytest.fixture
def run(shell: Callable, files: tuple[str, str], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "x", "prompt": "a b c a b d a b"}\n')

    def call(*words: str) -> tuple[int, str]:
        given = ("-m", files[0], "--prompts", str(prompts), "--threads", "1")
        return shell("verify", *given, *words)[:2]

    return call


def test_temperatures_and_batch_sizes(run: Callable, files: tuple[str, str]) -> None:
    code, out = run(
        "--speculate", f"ngram,draft:{files[1]}", "--temperature", "0,0.9", "--batch", "1,4",
        "--max-tokens", "24", "--n", "3", "--json",
    )  # fmt: skip
    report = json.loads(out)
    assert (code, report["equal"]) == (0, True)
    for method in report["methods"].values():
        assert [(r["temperature"], r["batch"]) for r in method["runs"]] == [
            (0.0, 1), (0.9, 1), (0.0, 4), (0.9, 4),
        ]  # fmt: skip
        assert all(r["test"] == "equality" and r["drafted"] > 0 for r in method["runs"])


def test_prompts_that_do_not_fit_are_left_out(
    files: tuple[str, str], tmp_path: Path, shell: Callable
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": "long", "prompt": "a b " * 3000}, {"id": "x", "prompt": "a b c a b d a b"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    words = ("verify", "-m", files[0], "--prompts", str(prompts), "--threads", "1", "--json")
    code, out, err = shell(*words, "--speculate", "ngram", "--max-tokens", "8")
    assert code == 0
    assert json.loads(out)["methods"]["ngram"]["num_prompts"] == 1
    assert "1 of 2 prompts left out: longer than" in err
    code, _, err = shell(*words, "--limit", "1")
    assert code == 2
    assert "no prompt fits" in err
    code, _, err = shell(*words, "--limit", "1", "--speculate", "ngram,bogus")
    assert code == 2
    assert "bogus" in err


@pytest.mark.parametrize("verifier", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
def test_other_verifiers_are_checked_by_chances(
    verifier: str, run: Callable, files: tuple[str, str]
) -> None:
    words = ("--speculate", f"draft:{files[1]}:num_nodes=3", "--verifier", verifier)
    code, out = run(*words, "--temperature", "0,1.2", "--samples", "200", "--json")
    report = json.loads(out)
    assert (code, report["equal"], report["verifier"]) == (0, True, verifier)
    ((greedy, sampled),) = (method["runs"] for method in report["methods"].values())
    assert greedy["test"] == "equality"
    assert sampled["test"] == "chi-square"
    assert sampled["drafted"] > 200
    assert 1e-4 < sampled["p_value"] < 1


def test_tokens_that_only_the_model_has_are_chances_too(
    tmp_path: Path, shell: Callable, files: tuple[str, str]
) -> None:
    """Matrices are often padded beyond the tokenizer's size."""
    path = write_target(tmp_path / "wide")
    tensors = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], tensors[name][:3] * 0.9])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 8}))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a b c a b d a b"}')
    words = ("--speculate", "ngram", "--verifier", "rejection", "--temperature", "1")
    code, out, _ = shell(
        "verify", "-m", str(path), "--prompts", str(prompts), "--threads", "1", "--samples", "200",
        *words, "--json",
    )  # fmt: skip
    assert (code, json.loads(out)["equal"]) == (0, True)


def test_a_wrong_rule_is_reported(
    run: Callable, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, "chance", lambda p_V, q_V, token: 0.9)
    words = ("--speculate", f"draft:{files[1]}:num_nodes=3", "--verifier", "rejection")
    code, out = run(*words, "--temperature", "1", "--samples", "300", "--json")
    report = json.loads(out)
    assert (code, report["equal"]) == (1, False)
    ((found,),) = (method["runs"] for method in report["methods"].values())
    assert found["p_value"] < 1e-6


def test_typical_is_called_lossy(run: Callable, files: tuple[str, str]) -> None:
    words = ("--speculate", f"draft:{files[1]}:num_nodes=3", "--verifier", "typical")
    code, out = run(*words, "--temperature", "1.5", "--samples", "300")
    assert code == 1
    assert "LOSSY" in out
    assert "NO" in out


def test_penalties_that_count_the_output_cannot_be_weighed(run: Callable) -> None:
    words = ("--speculate", "ngram", "--verifier", "block", "--temperature", "1")
    assert run(*words, "--presence-penalty", "0.5")[0] == 2


@pytest.mark.parametrize("words", [("--temperature", "hot"), ("--batch", "0"), ("--batch", "x")])
def test_lists_are_checked(words: tuple[str, str], run: Callable) -> None:
    assert run(*words)[0] == 2


def test_chi_square_by_hand() -> None:
    counts = Counter({0: 60, 1: 30, 2: 8, 3: 2})
    statistic, degrees = chi_square(counts, {0: 0.5, 1: 0.4, 2: 0.07, 3: 0.02, 4: 0.01})
    # 50, 40 and 10 are expected: the rare ones share the smallest cell
    assert degrees == 2
    assert statistic == pytest.approx(100 / 50 + 100 / 40 + 0)
    assert chi_square(Counter({9: 1}), {0: 1.0}) == (float("inf"), 1)
    for value, df in ((12.0, 10), (150.0, 100), (60.0, 100), (400.0, 300)):
        assert upper_tail(value, df) == pytest.approx(chi2.sf(value, df), rel=0.05)
