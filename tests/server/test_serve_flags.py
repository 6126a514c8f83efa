"""The serve command's flags, hunch's and vLLM's, with '-' and with '_'."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from hunch.cli import main
from hunch.cli.flags import make_parser
from hunch.cli.serve import run
from hunch.compat import config_from_vllm, llamacpp, server_flags
from hunch.compat.flags_by_prefix import unused_flag
from hunch.compat.server_words import MANY, NOTHING, NOTHING_VALUED, REFUSED
from hunch.config import Config
from hunch.errors import ConfigError
from hunch.server.settings import ServeConfig

Started = list[tuple[Config, ServeConfig]]  # what the command would have served


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    calls: Started = []

    def serve(config: Config, settings: ServeConfig, **_: Any) -> int:
        calls.append((config, settings))
        return 0

    monkeypatch.setattr("hunch.server.run.serve", serve)
    for name in ("HUNCH_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return calls


EXAMPLE = (
    "--host 0.0.0.0 --port 8000 --model NAME --seed 42 -tp 1 --speculative_model [ngram] "
    "--use-v2-block-manager --num_speculative_tokens 5 --gpu_memory_utilization 0.8"
)


@pytest.mark.parametrize(
    "words", [EXAMPLE, EXAMPLE.replace("_", "-"), EXAMPLE.replace("k-m", "k_m")]
)
def test_vllms_documented_command_line_is_taken(started: Started, words: str) -> None:
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


VLLM = """NAME --allowed-origins ["https://a.example","https://b.example"] --api-server-count 2
  --uvicorn-log-level warning --max-model-len 25.6k --kv-cache-memory-bytes 1000000
  --speculative-config.method ngram --speculative-config.num_speculative_tokens=3
  --async-scheduling --task generate --no-enable-log-requests --enable-prompt-tokens-details
  --guided-decoding-backend xgrammar --max-num-seqs 8 --response-role=assistant -O3"""
SGLANG = """--model-path NAME --speculative-algorithm EAGLE3 --speculative-draft-model-path HEAD
  --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16
  --mem-fraction-static 0.7 --context-length 4K --max-running-requests 6 --dp-size 2 --tp 1
  --disable-radix-cache --cuda-graph-max-bs 2 --random-seed 9"""


def test_flags_pasted_from_vllms_docs(started: Started) -> None:
    run(VLLM.split())
    ((config, settings),) = started
    assert settings.cors_origins == ("https://a.example", "https://b.example")
    assert (settings.workers, settings.log_level, settings.disable_log_requests) == (
        2, "warning", True,
    )  # fmt: skip
    assert (config.model.model, config.model.max_model_len) == ("NAME", 25_600)
    assert (config.cache.kv_bytes, config.schedule.max_num_seqs) == (1_000_000, 8)
    assert (config.spec.method, config.spec.options["num_nodes"]) == ("ngram", "3")
    run(["NAME", "--data-parallel-size", "3", "--max-model-len", "auto"])
    config, settings = started[1]
    assert (settings.replicas, config.model.max_model_len) == (3, None)


def test_flags_pasted_from_sglangs_docs(started: Started) -> None:
    run(SGLANG.split())
    ((config, settings),) = started
    assert (config.model.model, config.model.seed, config.model.max_model_len) == ("NAME", 9, 4096)
    assert (config.spec.method, config.spec.path) == ("eagle3", "HEAD")
    assert config.spec.options["depth"] == "3"
    assert config.spec.options["num_nodes"] == "15"
    assert config.cache.gpu_memory_utilization == 0.7
    assert config.cache.enable_prefix_caching is False
    assert (config.schedule.max_num_seqs, settings.replicas) == (6, 2)


MORE = """NAME --dtype half --kv-cache-memory-bytes 1G --scheduling-policy priority -q awq
  --cudagraph-capture-sizes 1 2 4 --shutdown-timeout 7 --enable-reasoning --reasoning-parser qwen3
  --override-generation-config {"temperature":0.25} --default-chat-template-kwargs {"a":1}
  --enable-force-include-usage --attention-config.backend FLASH_ATTN -O.level=3 -O 3
  --hf-overrides {} --max-cudagraph-capture-size 64 --enable-eplb --disable-sliding-window"""


def test_further_flags_of_vllm(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    run([*MORE.split(), "--hf-token", "secret"])
    ((config, settings),) = started
    assert (config.model.dtype, config.model.quantization) == ("float16", "awq")
    assert (config.cache.kv_bytes, settings.drain_timeout) == (1 << 30, 7)
    assert settings.models == ()  # sizes of graphs are no models
    assert settings.sampling == {"temperature": 0.25}
    assert settings.template_values == {"a": 1}
    assert settings.force_usage
    assert os.environ["HF_TOKEN"] == "secret"
    run(["--model-path", "NAME", "--sampling-defaults", "openai", "--decode-log-interval", "4"])
    assert started[1][1].generation_config == "off"


NEWEST = """NAME --spec-method eagle3 --spec-model HEAD --spec-tokens=4 --uds /tmp/x.sock
  --device-memory-utilization 0.5 --max-num-queued-reqs 7 --sse-keep-alive-interval 15
  --numa-bind --mm-processor-cache-type lru --enable-flashinfer-autotune --watermark 0.1
  --no-enable-log-deltas --jit-monitor-mode off --dcp-q-replicate --prefix-match-unit 32
  --stream-interval 20"""
NEWEST_OF_SGLANG = """--model-path NAME --speculative-algorithm NGRAM --hicache-write-policy x
  --speculative-use-rejection-sampling --cuda-graph-bs-decode 1 2 4 --enable-torch-symm-mem
  --stream-response-default-include-usage --ep 1 --prompt-tokens-buckets default --mamba-backend t
  --disable-flashinfer-autotune --prefill-delayer-max-delay-ms 5 --weight-loader-disable-mmap"""


def test_flags_of_vllms_and_sglangs_newest_releases(started: Started) -> None:
    run(NEWEST.split())
    config, settings = started.pop()
    assert (config.spec.method, config.spec.path) == ("eagle3", "HEAD")
    assert config.spec.options["num_nodes"] == "4"
    assert (settings.uds, settings.max_queue, settings.models) == ("/tmp/x.sock", 7, ())
    assert (config.cache.gpu_memory_utilization, settings.sse_keep_alive_interval) == (0.5, 15)
    run(NEWEST_OF_SGLANG.split())
    config, settings = started.pop()
    assert (config.model.model, config.spec.verifier) == ("NAME", "rejection")
    assert (settings.force_usage, settings.models) == (True, ())


def test_flags_known_by_their_prefix_hide_none_of_ours() -> None:
    known = {word for action in make_parser()._actions for word in action.option_strings}
    exact = {*NOTHING, *NOTHING_VALUED, *REFUSED}
    known = {flag for flag in known if not {flag, flag.replace("--no-", "--", 1)} & exact}
    assert [flag for flag in known if unused_flag(flag)] == []


@pytest.mark.parametrize(
    "words",
    [
        "--disable-log-outputs --no-tokens-only --no-enable-scale-out --disable-scale-out",
        "--disable-prompt-embeds --no-numa-bind --enable-cascade-attn --no-language-model-only",
        "--no-dllm-fdfo --enable-fastapi-docs --disable-expert-parallel -ep -dcp 1 -dpr 0 -dpb mp",
    ],
)
def test_the_opposite_of_a_switch_without_a_meaning_asks_for_nothing(
    started: Started, words: str
) -> None:
    run(["NAME", *words.split()])
    ((config, settings),) = started
    assert (config.model.model, settings.models) == ("NAME", ())


def test_vllms_words_for_switching_off(started: Started) -> None:
    words = "--disable-prefix-caching --disable-force-include-usage --enable-custom-all-reduce"
    run(["NAME", *words.split(), "--disable-lora", "--disable-auto-tool-choice"])
    ((config, settings),) = started
    assert config.cache.enable_prefix_caching is False
    assert settings.force_usage is False
    with pytest.raises(ConfigError, match="--tokens-only: one engine"):
        run(["NAME", "--tokens-only"])


def test_llama_servers_defaults_ask_for_nothing(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    words = "-m NAME -t -1 -np -1 --seed -1 -mg 0 -sm layer --yarn-ext-factor -1.00 --rope-scale 1"
    run([*words.split(), "--draft-max", "16", "--yarn-orig-ctx", "0"])
    ((config, settings),) = started
    assert (config.model.threads, config.spec.method, settings.models) == (None, "auto", ())
    assert "--draft-max 16 has no effect without -md or --spec-type" in caplog.text
    for wrong in ("-sm row", "-mg 1", "--yarn-ext-factor 1", "-cmoed"):
        with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES|--hf-overrides"):
            run(["-m", "NAME", *wrong.split()])


def test_flags_of_sglangs_0_5_23(started: Started) -> None:
    words = "--speculative-algorithm NGRAM --speculative-use-block-verification --attn-dp-size 1"
    words += (
        " --monokernel-backend amd --enable-hicache --ple-offload-embedding --qsa-indexer-dtype"
    )
    run(["--model-path", "NAME", *words.split(), "auto", "--return-output-ids"])
    ((config, settings),) = started
    assert (config.spec.verifier, settings.models) == ("block", ())
    with pytest.raises(ConfigError, match="/tokenize gives the ids"):
        run(["--model-path", "NAME", "--return-input-ids"])


def test_flags_of_others_as_arguments_of_an_engine() -> None:
    given = {"spec_method": "ngram", "spec_tokens": 3, "hicache_io_backend": "x", "numa_bind": True}
    config = config_from_vllm(model="NAME", **given)
    assert (config.spec.method, config.spec.options["num_nodes"]) == ("ngram", "3")
    with pytest.raises(ConfigError, match="dllm_algorithm='x': hunch writes from left"):
        config_from_vllm(model="NAME", dllm_algorithm="x")


def test_no_flag_has_two_meanings() -> None:
    tables = [NOTHING, NOTHING_VALUED, REFUSED, server_flags._ONLY, server_flags._RENAMED]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    assert set(NOTHING_VALUED) >= MANY


def test_sglangs_way_to_start_it(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, port in (([], 30000), (["--port=7"], 7)):
        monkeypatch.setattr(sys, "argv", ["launch_server", "--model-path", "NAME", *words])
        with pytest.raises(SystemExit):
            runpy.run_module("hunch.launch_server", run_name="__main__")
        assert started[-1][1].port == port


def test_keys_of_the_environment(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a,b")
    run(["NAME"])
    monkeypatch.setenv("HUNCH_API_KEY", "c,d")
    run(["NAME"])
    assert [settings.api_keys for _, settings in started] == [("a,b",), ("c", "d")]


def test_flags_from_a_file(started: Started, tmp_path: Path) -> None:
    """vLLM's --config."""
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: NAME\nport: 9000\nenable_prefix_caching: false\nallowed-origins: [https://a]\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 2}\n"
        "served_model_name: [a, b]\n"
    )
    run(["--config", str(file), "--max-num-seqs", "4"])
    ((config, settings),) = started
    assert (config.model.model, settings.port, config.schedule.max_num_seqs) == ("NAME", 9000, 4)
    assert (settings.cors_origins, settings.served_model_names) == (("https://a",), ("a", "b"))
    assert config.spec.options["num_nodes"] == "2"
    assert not config.cache.enable_prefix_caching
    file.write_text("- a list")
    with pytest.raises(ConfigError, match="a mapping of flags"):
        run(["--config", str(file)])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--task score", "task='score' is not supported; only 'generate' or 'auto'"),
        ("--ssl-keyfile x", "go together"),
        ("--ssl-keyfile x --ssl-certfile y", "ssl_keyfile='x' is not a file"),
        ("--config nowhere.yaml", "No such file"),
        ("--middleware a.b", "--middleware: hunch never runs code"),
        ("--hf-overrides [1]", "--hf-overrides \\[1\\]: a JSON object is needed"),
        ("--hf-config-path x", "write it into config.json"),
        ("--disaggregation-transfer-backend nixl", "one engine reads prompts"),
        ("--watermark-config {}", "texts carry no watermark"),
        ("--ssl-ciphers x", "--ssl-ciphers: let a proxy"),
        ("--uds x --workers 2", "uds: a socket"),
        ("--default-chat-template-kwargs [1]", "is not a JSON object"),
        ('--default-chat-template-kwargs {"tools":[]}', "tools is for requests to say"),
        ("--override-generation-config x", "is not JSON"),
    ],
)
def test_what_cannot_be_is_refused(started: Started, words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run(words.split())
    assert not started


LLAMACPP = """-m NAME.gguf -c 4096 -np 4 -b 256 -t 2 -ngl 99 -fa on -cb --jinja --no-webui --alias x
  -md DRAFT.gguf --draft-max 6 --draft-min 1 --temp 0.5 --top-k 40 -n 128 --host 0.0.0.0 -to 60
  --mlock --metrics -ctk f16 -ctv f16 --reasoning-format none -fa"""


def test_flags_pasted_from_llama_cpps_docs(started: Started) -> None:
    run(LLAMACPP.split())
    config, settings = started.pop()
    assert (config.model.model, config.model.max_model_len, config.model.threads) == (
        "NAME.gguf", 4096, 2
    )  # fmt: skip
    assert config.model.reasoning_parser == "none"
    assert (config.schedule.max_num_seqs, config.schedule.max_num_batched_tokens) == (4, 256)
    assert (config.spec.path, config.spec.options["num_nodes"]) == ("DRAFT.gguf", "6")
    assert (settings.host, settings.request_timeout, settings.has_page) == ("0.0.0.0", 60, False)
    assert settings.served_model_names == ("x",)
    assert settings.sampling == {"temperature": 0.5, "top_k": 40, "max_new_tokens": 128}
    run(["-hf", "org/name:Q4_K_M", "-c", "0", "-n", "-1", "-ngl", "0"])
    config, settings = started.pop()
    assert (config.model.model, config.model.max_model_len) == ("org/name:Q4_K_M", None)
    assert (config.model.device, settings.sampling) == ("cpu", {})


@pytest.mark.parametrize(
    ("words", "method", "num_nodes"),
    [
        ("--spec-type ngram-simple --spec-ngram-size-n 12 --draft-max 64", "ngram", "64"),
        ("--spec-type ngram-mod --draft-min 48 --draft-max 48", "suffix", "48"),
        ("--spec-type draft-mtp --spec-draft-n-max 3 --spec-draft-p-min 0.5", "mtp", "3"),
        ("--spec-type none --draft-max 16", "off", None),
        ("--spec-type none -hfd org/name --draft-max 16", "auto", "16"),
        ("--spec-default", "suffix", None),
    ],
)
def test_llama_cpps_ways_to_say_what_drafts(
    started: Started, words: str, method: str, num_nodes: str | None
) -> None:
    run(["-m", "a", *words.split()])
    config, _ = started.pop()
    assert (config.spec.method, config.spec.options.get("num_nodes")) == (method, num_nodes)


def test_further_flags_of_llama_cpp(started: Started, tmp_path: Path) -> None:
    words = "-m a -s 42 --reasoning-budget 0 --no-slots --samplers top_k --mirostat 0 -lv 3"
    run(words.split())
    config, settings = started.pop()
    assert config.model.seed == 42
    assert json.loads(settings.default_chat_template_kwargs) == {"enable_thinking": False}
    keys = tmp_path / "keys"
    keys.write_text("one\n\ntwo\n")
    words = """-m a --no-jinja --no-cache-prompt --no-ui --sse-ping-interval 30 -dev none -fit off
      --dry-base 1.75 --reasoning on --log-jsonl -Cr 0-3 --models-max 2 --api-key-file"""
    run([*words.split(), str(keys)])
    config, settings = started.pop()
    assert (config.model.device, config.cache.enable_prefix_caching) == ("cpu", False)
    assert (settings.has_page, settings.sse_keep_alive_interval) == (False, 30)
    assert (settings.api_keys, settings.log_format) == (("one", "two"), "json")
    assert (settings.max_loaded_models, settings.template_values) == (2, {"enable_thinking": True})
    for words, values in (
        ("--reasoning-effort low", {"reasoning_effort": "low"}),
        ("--reasoning-effort default -rea auto", {}),
        ("-rea true", {"enable_thinking": True}),
        ("--reasoning 0", {"enable_thinking": False}),
    ):
        run(["-m", "a", *words.split()])
        assert started.pop()[1].template_values == values
    with pytest.raises(ConfigError, match="--reasoning high is not one of on, "):
        run(["-m", "a", "--reasoning", "high"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("-m a --spec-type psychic", "--spec-type psychic is not one of none, ngram-simple"),
        ("-m a --xtc-probability 0.1", "--xtc-probability 0.1: hunch has no such sampler"),
        ("-m a --presence-penalty 0.5", "--presence-penalty 0.5: send it with a request"),
        ("-m a --log-file b", "--log-file: the log goes to standard error"),
        ("-m a --mmproj b", "--mmproj: only text"),
        ("-m a -ts 1,1", "-ts: set CUDA_VISIBLE_DEVICES"),
        ("-m a -ctk q4_0", "-ctk q4_0 is not supported; only f16"),
        ("-m a --gpt-oss-20b-default", "give -hf MODEL"),
        ("-m a --tools all", "the server runs no tools"),
        ("-m a --api-key-file nowhere", "nowhere: No such file"),
        ("-m a --temp warm", "--temp warm: a number is needed"),
    ],
)
def test_what_llama_cpp_does_and_hunch_does_not_is_refused(words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run(words.split())


def test_flags_of_llama_cpp_hide_no_others() -> None:
    known = {word for action in make_parser()._actions for word in action.option_strings}
    theirs = llamacpp._VALUED | {*llamacpp._NOTHING, *llamacpp._REFUSED, *llamacpp._SWITCHES}
    vllms = {*NOTHING, *NOTHING_VALUED, *REFUSED, *server_flags._RENAMED, *server_flags._ONLY}
    assert not theirs & (known | vllms)


def test_log_probabilities_without_a_limit(started: Started) -> None:
    run(["m", "--max-logprobs", "-1"])
    _, settings = started.pop()
    assert settings.limits.max_logprobs > 10**6
    with pytest.raises(ConfigError, match="max_logprobs=-2 must be 1 or more"):
        run(["m", "--max-logprobs", "-2"])


def test_values_in_place_of_config_jsons(started: Started) -> None:
    words = ["m", "--hf-overrides", '{"a": 1}', "--rope-theta", "5000"]
    words += ["--rope-scaling", '{"rope_type": "yarn", "factor": 4.0}', "--hf-overrides.b=2"]
    run([*words, "--json-model-override-args", '{"c": 3}'])
    config, _ = started.pop()
    rope = {"rope_type": "yarn", "factor": 4.0}
    wanted = {"a": 1, "rope_theta": 5000, "rope_scaling": rope, "b": 2, "c": 3}
    assert json.loads(config.model.hf_overrides) == wanted


def test_our_own_flags(started: Started, tmp_path: Path) -> None:
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


def test_chat_templates_have_no_names() -> None:
    with pytest.raises(ConfigError, match="templates have no names here"):
        run(["some/model", "--chat-template", "chatml"])


def test_keys_may_come_from_the_environment(
    started: Started, monkeypatch: pytest.MonkeyPatch
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
        (["--quantization", "hqq"], "quantization"),
    ],
)
def test_what_cannot_work_is_named(started: Started, words: list[str], text: str) -> None:
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
