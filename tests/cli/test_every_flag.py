"""Every flag of `serve` has its effect or a word; options that mean nothing together are refused.

The options of the other commands are walked in test_every_option.py.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hunch.cli.flags import make_parser
from hunch.cli.serve import run
from hunch.config import Config, say_once
from hunch.errors import ConfigError, HunchError
from hunch.server.settings import ServeConfig
from tiny_models import write_llama

SERVE_VALUES = {  # flags whose sample value is not plain
    "dtype": "bfloat16", "device": "cpu", "kernels": "torch", "log_format": "json",
    "log_level": "error", "logprobs_mode": "processed_logprobs", "chat_template": "{{ x }}",
    "verifier": "block", "speculate": "suffix", "speculative_config": '{"method": "ngram"}',
    "speculative_model": "[ngram]", "depth": "1", "gpu_memory_utilization": "0.5",
    "spec_decoding_acceptance_method": "strict", "enable_prefix_caching": "--no",
}  # fmt: skip
SERVE_TOGETHER = {
    "num_speculative_tokens": ["--speculative-model", "[ngram]"],
    "ngram_prompt_lookup_max": ["--speculative-model", "[ngram]"],
    "ngram_prompt_lookup_min": ["--speculative-model", "[ngram]"],
}


# What they ask for with these values is what happens anyway.
QUIET_FLAGS = {
    "--use-v2-block-manager",
    "--enable-chunked-prefill",
    "--enable-lora",
    "--skip-server-warmup",
    "--spec-decoding-acceptance-method",
}


def test_every_flag_of_serve_changes_something_or_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[Config, ServeConfig]] = []

    def keep(config: Config, settings: ServeConfig, **_: Any) -> int:
        calls.append((config, settings))
        return 0

    monkeypatch.setattr("hunch.server.run.serve", keep)
    say_once.cache_clear()  # another test may have heard the word
    silent = []
    without: dict[tuple[str, ...], Any] = {}  # what arrives without a flag
    for action in make_parser()._actions:
        if action.dest == "help" or action.dest == "model":
            continue
        words = list(SERVE_TOGETHER.get(action.dest, []))
        if tuple(words) not in without:
            run(words)
            without[tuple(words)] = calls[-1]
        before = without[tuple(words)]
        flag = action.option_strings[0]
        value = SERVE_VALUES.get(action.dest, "7")
        if value == "--no":
            words += [flag.replace("--", "--no-")]
        else:
            words += [flag] if action.nargs == 0 else [flag, value]
        caplog.clear()
        try:
            run(words)
        except HunchError:
            continue  # refused, with a reason
        (config, settings), (plain, defaults) = calls[-1], before
        if (config, settings) == (plain, defaults) and not caplog.messages:
            silent.append(flag)
        elif config.given - plain.given and settings == defaults and not caplog.messages:
            parts = ("model", "cache", "schedule", "spec", "parallel")
            if all(getattr(config, part) == getattr(plain, part) for part in parts):
                silent.append(flag)
    assert [flag for flag in silent if flag not in QUIET_FLAGS] == []


def test_flags_that_say_the_opposite_are_refused() -> None:
    with pytest.raises(ConfigError, match="contradict"):
        run(["--disable-log-stats", "--stats-interval", "5"])
    with pytest.raises(ConfigError, match="two models"):
        run(["one/model", "--model", "another/model"])


def test_help_names_every_flag_and_help_all_has_a_word_for_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            run([flag])
        said[flag] = capsys.readouterr().out
    assert max(map(len, said["--help"].splitlines())) <= 80
    flags = {flag for action in make_parser()._actions for flag in action.option_strings}
    listed = set(re.findall(r"--[a-z0-9-]+", said["--help"]))
    hidden = {"--trust-request-chat-template"}  # vLLM's name of a flag that is listed
    assert {flag for flag in flags if flag[:2] == "--" and "--no-" not in flag} - hidden <= listed
    idle = said["--help"].partition("without effect here:")[2]
    assert "--enforce-eager" in idle
    assert "--speculative-config" not in idle
    whole = "".join(said["--help-all"].split())  # lines break anywhere, after a hyphen too
    for action in make_parser(is_whole=True)._actions:
        if hidden.isdisjoint(action.option_strings):
            assert "".join(str(action.help).split()) in whole, action.option_strings


# --- options that mean nothing together ---------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One without a chat template, as base models are."""
    path = write_llama(tmp_path_factory.mktemp("flags") / "model")
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("doctor --target x", "--target goes with --drafter"),
        ("doctor --drafter x --speculate ngram", "--speculate goes without --drafter"),
        ("doctor --skip-model --prompts x.jsonl", "--skip-model leaves out"),
        ("chat --server http://x --dtype int8 --threads 2", "--threads, --dtype: a server has"),
        ("verify --samples 100", "--samples is for verifiers"),
        ("bench --burstiness 2", "--burstiness: goes with requests per second"),
        ("bench --rate 2 --concurrency 3", "--concurrency: --rate is in its place"),
        ("bench --url http://x --dtype int8", "--dtype: a server has its own"),
        ("bench --served-model x", "--served-model: goes with --url"),
        ("bench --show --json", "--show: prints answers"),
        ("bench --limit 2 sweep", "--limit: write it after sweep"),
        ("bench --prompts x.jsonl --workload code", "--workload: --prompts are asked"),
        ("bench sweep --contexts 2k --workload code", "--contexts brings prompts"),
        ("bench peers --quick --repeats 3", "--repeats: --quick has its own"),
        ("plan --price 2", "--price: goes with --rps"),
        ("plan --pp 2", "--pp: goes with --link"),
        ("plan --link nvlink4 --draft 1B", "--draft: --link says"),
        ("plan --list-gpus --tp 2", "--tp: --list-gpus prints"),
        ("models list x", "models list takes no name"),
        ("drafters list x", "takes no directory"),
        ("train draft --force --out x", "--force: goes without a method"),
    ],
)
def test_what_would_be_ignored_is_refused(shell: Callable, words: str, text: str) -> None:
    code, out, err = shell(*words.split())
    assert (code, out) == (2, "")
    assert text in err


@pytest.mark.parametrize("line", ['{"turns": []}', '{"turns": [3]}', '{"prompt": ""}', "[1]", "{}"])
@pytest.mark.parametrize("command", ["verify", "doctor"])
def test_a_record_without_text_is_named(
    shell: Callable, model: str, tmp_path: Path, command: str, line: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(line + "\n")
    code, _, err = shell(command, "--model", model, "--prompts", str(prompts))
    assert code == 2
    assert "Traceback" not in err
    assert "prompts.jsonl" in err


def test_a_job_that_goes_on_keeps_its_target_and_folder(shell: Callable, tmp_path: Path) -> None:
    job = {"method": "draft", "target": "one", "prompts": "p", "options": {}}
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "job.json").write_text(json.dumps(job))
    for words, text in (
        (["--target", "another"], "its target is one, not another"),
        (["--out", str(tmp_path / "else")], "goes on in its own folder"),
    ):
        code, _, err = shell("train", "draft", "--resume", str(tmp_path), *words)
        assert code == 2
        assert text in err


def test_generate_gives_the_trace_as_json_too(shell: Callable, model: str) -> None:
    words = ("generate", "a a a a a a", "--model", model, "--max-tokens", "9")
    _, out, _ = shell(*words, "--trace", "--json", "--speculate", "ngram")
    trace = json.loads(out)["trace"]
    assert any(step["tokens"] for step in trace)
    assert "trace" not in json.loads(shell(*words, "--json")[1])


# --- models without a chat template -------------------------------------------------------------


def test_commands_take_models_without_a_chat_template(
    shell: Callable, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["the model and the model"]}\n')
    say_once.cache_clear()
    common = ("--model", model, "--dtype", "float32")
    more = ("--prompts", str(prompts), "--json")
    for words in (
        ("doctor", "--speculate", "ngram"),
        ("verify", "--speculate", "ngram", "--max-tokens", "9"),
        ("bench", "--speculate", "ngram", "--max-tokens", "9", "--repeats", "1"),
    ):
        code, out, _ = shell(words[0], *common, *words[1:], *more)
        assert code == 0, words
        assert json.loads(out)
    assert caplog.text.count("no chat template: prompts are given to it as they stand") == 1


def test_doctor_looks_at_the_prompts_it_was_given(
    shell: Callable, model: str, tmp_path: Path
) -> None:
    counts = []
    for text in ("a b c d e f g h i j k l m n o p q", "fast token fast token fast token"):
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(json.dumps({"prompt": text}) + "\n")
        _, out, _ = shell(
            "doctor", "--model", model, "--speculate", "ngram:adaptive=false", "--dtype", "float32",
            "--prompts", str(prompts), "--json",
        )  # fmt: skip
        counts.append(json.loads(out)["model"]["drafted"])
    assert counts[0] != counts[1]
