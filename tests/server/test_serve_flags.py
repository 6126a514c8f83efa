"""The serve command's flags, hunch's and vLLM's, with '-' and with '_'."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hunch.cli import main
from hunch.cli.serve import run
from hunch.config import Config
from hunch.errors import ConfigError
from hunch.server.settings import ServeConfig


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, ServeConfig]]:
    """What the command would have served."""
    calls: list[tuple[Config, ServeConfig]] = []

    def serve(config: Config, settings: ServeConfig, **_: Any) -> int:
        calls.append((config, settings))
        return 0

    monkeypatch.setattr("hunch.server.run.serve", serve)
    monkeypatch.delenv("HUNCH_API_KEY", raising=False)
    return calls


EXAMPLE = (
    "--host 0.0.0.0 --port 8000 --model NAME --seed 42 -tp 1 --speculative_model [ngram] "
    "--use-v2-block-manager --num_speculative_tokens 5 --gpu_memory_utilization 0.8"
)


@pytest.mark.parametrize(
    "words", [EXAMPLE, EXAMPLE.replace("_", "-"), EXAMPLE.replace("k-m", "k_m")]
)
def test_vllms_documented_command_line_is_taken(
    started: list[tuple[Config, ServeConfig]], words: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", *words.split()])
    assert left.value.code == 0
    ((config, settings),) = started
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)
    assert config.model.model == "NAME"
    assert config.model.seed == 42
    assert config.parallel.tensor_parallel_size == 1
    assert config.spec.method == "ngram"
    assert config.spec.options["num_nodes"] == "5"
    assert config.cache.gpu_memory_utilization == 0.8
    assert settings.served_model_names == ("NAME",)


def test_our_own_flags(started: list[tuple[Config, ServeConfig]], tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    words = ["some/model", "--served-model-name", "a", "b", "--api-key", "k1", "--api-key", "k2"]
    words += ["--max-model-len", "2048", "--dtype", "float32", "--enforce-eager"]
    words += [f"--chat-template={template}", "--speculate", "suffix", "--verifier", "exact"]
    words += ["--max-n", "4", "--max_body_bytes", "1000", "--no-page", "--log-format", "json"]
    words += ["--cors-origins", "https://a.example", "--max-queue", "7", "--drain-timeout", "3"]
    words += ["--max-num-seqs", "8", "--no-enable-prefix-caching"]
    assert run(words) == 0
    ((config, settings),) = started
    assert settings.served_model_names == ("a", "b")
    assert settings.api_keys == ("k1", "k2")
    assert settings.limits.max_n == 4
    assert settings.limits.max_body_bytes == 1000
    assert settings.cors_origins == ("https://a.example",)
    assert (settings.max_queue, settings.drain_timeout) == (7, 3.0)
    assert not settings.has_page
    assert config.model.max_model_len == 2048
    assert config.model.chat_template == "{{ messages }}"
    assert config.spec.method == "suffix"
    assert config.schedule.max_num_seqs == 8
    assert not config.cache.enable_prefix_caching


def test_keys_may_come_from_the_environment(
    started: list[tuple[Config, ServeConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUNCH_API_KEY", "secret-1,secret-2")
    run([])
    assert started[0][1].api_keys == ("secret-1", "secret-2")
    assert "secret" not in repr(started[0][1])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--speculate", "nonsense"], "nonsense"),
        (["--port", "99999"], "port"),
        (["--max-n", "0"], "max_n"),
        (["--chat-template", "/no/such/file"], "chat_template"),
        (["--quantization", "bitsandbytes"], "quantization"),
    ],
)
def test_what_cannot_work_is_named(
    started: list[tuple[Config, ServeConfig]], words: list[str], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        run(words)
    assert started == []


def test_an_unknown_flag_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run(["--no-such-flag"])
    assert left.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        run(["--prot", "8000"])
    assert left.value.code == 2
    assert "did you mean --port?" in capsys.readouterr().err


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hunch.server.run", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"uvicorn.*\[serve\]"):
        run([])
