"""The command line, as a shell sees it: output, exit codes, messages."""

import io
import json
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hunch import LLM, CompletionOutput
from hunch.cli import main
from hunch.cli.generate import is_over_at_once
from hunch.compat import from_llama_cli
from hunch.hub.drafters import TrainedDrafter
from hunch.models.native import NativeDecoder
from hunch.registry import VERIFIERS
from hunch.verify.base import RowDraft, TargetChoices, Verifier
from hunch.verify.exact import walk
from tiny_models import write_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_llama(tmp_path_factory.mktemp("cli") / "model"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"id": "x", "turns": ["fast token fast token"]}\n'
        '{"prompt": "the model and the model and"}\n'
    )
    return str(path)


def take_the_guess(draft: RowDraft, target: TargetChoices) -> tuple[list[int], list[int]]:
    """A planted fault: the first guess is taken."""
    tokens, path = walk(draft, target)
    return [*draft.tokens[:1], *tokens[len(draft.tokens[:1]) :]], path


believes_everything = Verifier(take_the_guess)


def test_generate_json(shell: Callable, model: str) -> None:
    code, out, _ = shell("generate", "the model", "--model", model, "--max-tokens", "8", "--json")
    answer = json.loads(out)
    assert code == 0
    assert set(answer) == {"text", "token_ids", "finish_reason", "seed", "stats"}
    assert set(answer["stats"]) >= {
        "tokens_per_second", "steps", "drafted", "accepted", "acceptance_rate", "tokens_per_pass",
        "per_position", "draft_seconds", "target_seconds", "draft_overhead",
        "memory_bound_speedup", "speedup", "cost_per_token", "drafter_bytes", "latency_ms",
    }  # fmt: skip
    assert set(answer["stats"]["latency_ms"]) == {"p50", "p95", "p99"}


def test_an_answer_that_is_over_at_once_is_noticed() -> None:
    over = CompletionOutput(index=0, text=" ", finish_reason="stop")
    assert is_over_at_once(over)
    assert not is_over_at_once(replace(over, text="Paris"))
    assert not is_over_at_once(replace(over, stop_reason="\n"))
    assert not is_over_at_once(replace(over, finish_reason="length"))


def test_generate_prints_text_and_a_seed_repeats_it(shell: Callable, model: str) -> None:
    words = ("generate", "the model", "--model", model, "--temperature", "1", "--seed", "3")
    first, second = shell(*words, "--max_tokens", "12"), shell(*words, "--max-tokens=12")
    assert first[0] == 0
    assert first[1] == second[1] != "\n"
    assert "tokens per pass" in first[2]


def test_generate_takes_the_flags_of_llama_cli(shell: Callable, model: str) -> None:
    ours = ("--max-tokens", "6", "--temperature", "0.5", "--seed", "2", "--threads", "1")
    theirs = ("-n", "6", "--temp", "0.5", "-s", "2", "-t=1", "-ngl", "99", "-c", "64", "-no-cnv")
    want = shell("generate", "the model", "-m", model, *ours)
    code, out, _ = shell("generate", "-m", model, "-p", "the model", *theirs)
    assert (code, out) == (0, want[1])
    code, out, _ = shell("generate", "--model", model, "--prompt=the model", *ours)
    assert (code, out) == (0, want[1])
    assert shell("chat", "-m", model, "-p", "the model")[0] == 2  # it asks for its messages
    assert from_llama_cli(["generate", "-n", "-1", "-ngl", "0", "--", "-n", "8"]) == [
        "generate", "--device", "cpu", "--", "-n", "8",
    ]  # fmt: skip
    assert from_llama_cli(["verify", "-n", "2"]) == ["verify", "-n", "2"]


def test_generate_takes_a_system_message(
    shell: Callable, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def encode_chat(_: LLM, messages: Any, **__: Any) -> list[int]:
        seen.append(messages)
        return [1, 2]

    monkeypatch.setattr(LLM, "encode_chat", encode_chat)
    monkeypatch.setattr(LLM, "has_chat_template", True)
    short = ("-m", model, "--max-tokens", "2")
    assert shell("generate", "-p", "hi", "--chat", "-sys", "be brief", *short)[0] == 0
    system = {"role": "system", "content": "be brief"}
    assert seen == [[system, {"role": "user", "content": "hi"}]]
    code, _, err = shell("generate", "hi", "--system", "be brief", *short)
    assert code == 2
    assert "--system needs --chat" in err


def test_an_empty_prompt_is_for_the_model_to_refuse(
    shell: Callable, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ("-m", model, "--max-tokens", "2")
    assert "give at least one token" in shell("generate", "", *short)[2]
    monkeypatch.setattr("hunch.text.tokenizer.Tokenizer.encode", lambda *_, **__: [1])
    assert shell("generate", "", *short)[0] == 0  # as where texts begin with a mark


def test_generate_says_what_was_not_guessed_and_what_a_model_lacks(
    shell: Callable, model: str, tmp_path: Path
) -> None:
    words = ("the model", "--max-tokens", "3", "--speculate", "off")
    assert "nothing guessed" in shell("generate", *words, "-m", model)[2]
    bare = write_llama(tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    code, _, err = shell("generate", *words, "--chat", "-m", str(bare))
    assert code == 2
    assert "has no chat template; without it the text is continued" in err.replace("\n", " ")


def test_a_drafter_is_not_written_over_its_target(shell: Callable, model: str) -> None:
    for method in ([], ["medusa"]):
        code, _, err = shell("train", *method, "--target", model, "--out", f"{model}/../model")
        assert code == 2
        assert "the target is there" in err.replace("\n", " ")


def test_training_needs_some_time(shell: Callable, model: str, tmp_path: Path) -> None:
    for name in ("--target", "--model", "-m"):
        words = ("train", name, model, "--out", str(tmp_path / "out"), "--minutes", "0")
        code, _, err = shell(*words)
        assert code == 2
        assert "--minutes" in err


def test_trace_shows_guesses(shell: Callable, model: str) -> None:
    code, out, _ = shell(
        "generate", "fast token fast token", "-m", model, "--trace", "--max-tokens", "24",
        "--speculate", "ngram:adaptive=false",
    )  # fmt: skip
    assert code == 0
    assert "accepted" in out
    assert "rejected" in out
    assert "   1  " in out


def test_long_names_are_shown_whole(
    shell: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are 80 columns wide in a pipe; what a next command asks for is not cut off."""
    path = "/models/" + 80 * "q"
    drafter = TrainedDrafter(
        target="MODEL.gguf", digest="", method="phrases", path=path, device="cpu",
        speedup=1.5, tokens_per_pass=1.5,
    )  # fmt: skip
    monkeypatch.setattr("hunch.hub.drafters.trained_drafters", lambda: [drafter])
    counts = SimpleNamespace(steps=1, drafted=1, accepted=1)
    run = SimpleNamespace(
        method=f"draft:{path}", temperature=0.0, batch=1, counts=counts, is_good=True,
        agreement=None, equality=None,
    )  # fmt: skip
    shown = [shell("drafters")[1]]
    for command, given in (("doctor", ["model", {"model": path}]), ("verify", [[run], "exact"])):
        import_module(f"hunch.cli.{command}")._show(*given)
        shown.append(capsys.readouterr().out)
    for text in shown:
        assert text.count("q") == 80, text


def test_verify_says_equal(shell: Callable, model: str, prompts: str) -> None:
    code, out, _ = shell(
        "verify", model, "--prompts", prompts, "--speculate",
        "ngram:adaptive=false,suffix:adaptive=false", "--max-tokens", "40", "--json",
    )  # fmt: skip
    report = json.loads(out)
    assert (code, report["equal"]) == (0, True)
    for method in report["methods"].values():
        assert method["equal"]
        assert method["num_prompts"] == 2
        assert method["drafted"] > 0
        assert method["first_difference"] is None


def test_verify_sees_a_verifier_that_accepts_everything(
    shell: Callable, model: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "exact", f"{__name__}:believes_everything")
    monkeypatch.setattr(f"{__name__}.believes_everything", believes_everything, raising=False)
    words = ("verify", "-m", model, "--prompts", prompts, "--speculate", "ngram:adaptive=false")
    code, out, _ = shell(*words, "--json")
    report = json.loads(out)
    assert (code, report["equal"]) == (1, False)
    (method,) = report["methods"].values()
    assert set(method["first_difference"]) == {"id", "position", "plain", "speculative", "margin"}
    code, out, _ = shell(*words)
    assert code == 1
    assert "NO" in out


def test_doctor_on_a_model(shell: Callable, model: str) -> None:
    code, out, told = shell("doctor", "-m", model, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["model"]["identical"]
    assert found["machine"]["torch"]
    assert not told


def test_doctor_says_what_it_does_and_loads_no_model_twice(
    shell: Callable, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = NativeDecoder.__init__

    def noted(self: NativeDecoder, spec: Any, weights: Any, dtype: str, *rest: Any, **more: Any):
        loaded.append(dtype)
        load(self, spec, weights, dtype, *rest, **more)

    monkeypatch.setattr(NativeDecoder, "__init__", noted)
    code, out, told = shell("doctor", "-m", model, "--dtype", "int8", "--speculate", "ngram")
    assert code == 0
    assert "KL to float32" in out
    assert loaded == ["int8", "float32"]
    assert "--speculate off\n" in told
    assert "--speculate ngram\n" in told
    assert "comparing with float32 on 256 tokens" in told


def test_doctor_names_a_missing_compiler() -> None:
    from hunch.cli.doctor import _advice, _machine

    machine = _machine()
    assert machine["threads"] >= 1
    assert machine["memory"].endswith("GiB")
    found = {"identical": True, "drafted": 0, "speculate": "off"}
    assert _advice(found, {**machine, "cpu_kernels": "NEON"}) == ["all is well"]
    (advice,) = _advice(found, {**machine, "cpu_kernels": "none", "cuda": None})
    assert "apt install g++" in advice


def test_doctor_says_that_nothing_was_guessed() -> None:
    from hunch.cli.doctor import _advice

    found = {"identical": True, "drafted": 0, "speculate": "draft"}
    (advice,) = _advice(found, {"cpu_kernels": "NEON", "cuda": None})
    assert advice.startswith("draft checked no guess")
    assert "--always-draft" in advice


def test_doctor_examines_the_drafter_that_comes_with_a_model(
    shell: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"  # by its name
    file.touch()
    examined: list[tuple[Path, str]] = []
    monkeypatch.setattr(
        import_module("hunch.cli.doctor"),
        "_examine",
        lambda path, model, *_: examined.append((path, model)),
    )
    assert shell("doctor", str(file), "--speculate", "draft:num_nodes=3")[0] == 0
    ((path, model),) = examined
    assert (path / "config.json").is_file()
    assert (path.name, model) == ("draft", str(file))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "hi", "--model", "no-such-model"), "no-such-model"),
        (("generate", "hi", "--speculate", "ngrm"), "ngram"),
        (("verify", "--prompts", "missing.jsonl"), "missing.jsonl"),
        (("pull", "no-such-model"), "no-such-model"),
        (("verify", "--batch", ","), "--batch ',' must be numbers"),
        (("verify", "--speculate", ","), "names no method"),
        (("bench", "sweep", "--rates", "nan"), "above 0"),
        (("bench", "--model", "no-such-model", "--speculate", "ngrm"), "ngram"),
        (("bench", "sweep", "--temperatures", "0,-1"), "0 or more"),
    ],
)
def test_mistakes_get_one_line(shell: Callable, words: tuple[str, ...], message: str) -> None:
    code, _, err = shell(*words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_the_log_level_is_written_in_any_case_and_a_wrong_one_is_named(
    shell: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUNCH_LOG", "info")
    assert shell("plan", "--json")[0] == 0
    monkeypatch.setenv("HUNCH_LOG", "loud")
    code, _, err = shell("plan", "--json")
    assert code == 2
    assert "HUNCH_LOG='LOUD' must be one of debug, info" in err


def test_a_broken_prompt_file_names_its_line(shell: Callable, model: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    code, _, err = shell("verify", "-m", model, "--prompts", str(path))
    assert code == 2
    assert "line 2" in err


@pytest.mark.parametrize("words", [("--memory", "-1"), ("--tflops", "nan"), ("--layers", "0")])
def test_a_plan_needs_numbers_above_zero(shell: Callable, words: tuple[str, str]) -> None:
    code, _, said = shell("plan", *words)
    assert code == 2
    assert f"{words[0]} {words[1]} must be a number above 0" in said


def test_a_plan_takes_a_model_for_its_size(shell: Callable, model: str, tmp_path: Path) -> None:
    found = [json.loads(shell("plan", "--json", "--target", one)[1]) for one in (model, "1M")]
    speeds = [one["by_load"][0]["plain_tokens_per_second"] for one in found]
    assert found[0]["target"].endswith("M")
    assert speeds[0] > 1.5 * speeds[1]  # its own layers, not those of a known model
    shutil.copy(Path(model) / "config.json", tmp_path)  # the weights are not needed
    assert json.loads(shell("plan", "--json", "--target", str(tmp_path))[1]) == found[0]
    code, _, err = shell("plan", "--target", "8Bananas")
    assert code != 0
    assert "no model is known as '8Bananas'" in err


def test_a_model_in_a_methods_place(shell: Callable, model: str) -> None:
    code, _, err = shell("train", model)
    assert code == 2
    assert f"hunch train --target {model}" in err


def test_a_port_in_use(shell: Callable, model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = shell("serve", model, "--port", str(port))
    assert code == 2
    assert err.strip().endswith("; give another --port")


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_a_wrong_parser_is_told_before_a_model_is_loaded(
    shell: Callable, model: str, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr("hunch.server.run.new_engine", lambda *_: pytest.fail("it is loaded"))
    code, _, err = shell("serve", model, "--port", "0", flag, "mistrale")
    assert code == 2
    assert "did you mean 'mistral'?" in err


def test_ctrl_c_while_modules_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from hunch.__main__ import main as hunch

    class Interrupted:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "hunch.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "hunch.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as left:
        hunch()
    assert left.value.code == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("buffering", [1, 65536])
def test_output_that_does_not_fit_the_disk_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, buffering: int
) -> None:
    with open("/dev/full", "w", buffering=buffering) as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as left:
            main(["plan", "--list-gpus"])
    assert left.value.code == 2
    assert capsys.readouterr().err == "error: no room left on the disk for the output\n"


def test_a_terminal_without_a_character_shows_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    said = CompletionOutput(index=0, text="caf\u00e9", finish_reason="length")
    llm = SimpleNamespace(
        has_chat_template=False, stream=lambda *_: [SimpleNamespace(outputs=[said])]
    )
    monkeypatch.setattr("hunch.cli.options.open_llm", lambda *_, **__: llm)
    monkeypatch.setattr("hunch.cli.trace.show_stats", lambda _: None)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as left:
        main(["generate", "x", "--ignore-eos"])
    assert not left.value.code
    assert out.buffer.getvalue() == b"caf?\n"  # type: ignore[attr-defined]


def test_a_prompt_that_is_not_utf_8_names_the_byte(
    shell: Callable, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", given)
    code, _, err = shell("generate", "-", "--model", model)
    assert code == 2
    assert "the byte 0xe9 at character 3 could not be decoded; give UTF-8" in err


def test_a_closed_output_is_no_fault(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after >&-
    with pytest.raises(SystemExit) as left:
        main(["generate", "the model", "--model", model, "--max-tokens", "2"])
    assert not left.value.code
    sys.stdout.close()


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        (("generate",), "generate [OPTIONS] PROMPT\n"),
        (("chat",), "chat [OPTIONS] [MODEL]\n"),
        (("train",), "train [OPTIONS] [METHOD] [KEY=VALUE]...\n"),
        (("bench", "compare"), "bench compare [OPTIONS] BEFORE AFTER\n"),
    ],
)
def test_usage_writes_arguments_in_capitals(
    shell: Callable, command: tuple[str, ...], usage: str
) -> None:
    code, out, _ = shell(*command, "--help")
    assert code == 0
    assert usage in out


def test_a_place_where_nothing_can_be_written(
    shell: Callable, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    for out in (file, file / "drafter"):
        code, _, err = shell("train", "--target", model, "--out", str(out))
        assert code == 2
        assert f"{file} is no directory" in err
    monkeypatch.setattr("os.access", lambda *_: False)
    code, _, err = shell("train", "--target", model, "--out", str(tmp_path / "drafter"))
    assert code == 2
    assert f"nothing may be written in {tmp_path}" in err
