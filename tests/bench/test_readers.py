"""Prompt files in the forms people have, made here in the same form; and the built-in workloads."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest

from hunch.bench.readers import READERS, read_file, read_workloads
from hunch.bench.workloads import WORKLOADS, built_in, cycle, length_of
from hunch.cli.options import read_prompts
from hunch.errors import HunchError, RequestError

FORMS: dict[str, list[dict[str, Any]]] = {
    "hunch": [{"id": "x", "turns": ["first", "second"]}, {"prompt": "raw"},
              {"messages": [{"role": "user", "content": "hi"}], "prediction": "hello"}],
    "spec-bench": [{"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]}],
    "mt-bench": [{"question_id": 82, "category": "math", "turns": ["Add."], "reference": ["2"]}],
    "speed-bench": [{"question_id": "q1", "category": "coding", "sub_category": "python",
                     "turns": ["Sort."], "source": "s", "src_id": "1", "difficulty": "low",
                     "multiturn": False}],
    "humaneval": [{"task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "entry_point": "add",
                   "canonical_solution": "    return a + b\n", "test": "assert add(1, 1) == 2"}],
    "gsm8k": [{"question": "How many?", "answer": "Two. #### 2"}],
    "cnn-dm": [{"id": "c1", "article": "News.", "highlights": "Short."}],
    "vllm": [{"prompt": "Tell me.", "output_tokens": 12}],
}  # fmt: skip


@pytest.mark.parametrize("form", sorted(FORMS))
def test_json_lines_are_read_and_recognised(form: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, FORMS[form])) + "\n\n")
    named, seen = read_file(path, form), read_file(path)
    assert named == seen
    assert len(named) == len(FORMS[form])
    assert all(prompt.messages or prompt.text for prompt in named)


def test_what_is_asked(tmp_path: Path) -> None:
    def first(form: str) -> Any:
        path = tmp_path / f"{form}.jsonl"
        path.write_text(json.dumps(FORMS[form][0]))
        return read_workloads(f"{form}:{path}")[0]

    assert first("spec-bench").messages == (("user", "Compose."),)
    assert first("spec-bench").id == "81"
    assert first("spec-bench").later == ("Rewrite.",)  # asked after the model's own answer
    assert first("hunch").later == ("second",)
    assert first("humaneval").text == "def add(a, b):\n"  # completed as it is, not chatted about
    assert first("gsm8k").messages == (("user", "How many?"),)
    assert first("cnn-dm").messages[0][1].endswith("News.")
    assert first("vllm").max_tokens == 12


def test_sharegpt_is_one_list_and_silent_conversations_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([
        {"id": "a", "conversations": [{"from": "human", "value": "Q"},
                                      {"from": "gpt", "value": "A"}]},
        {"id": "b", "conversations": [{"from": "gpt", "value": "A"}]},
    ]))  # fmt: skip
    (prompt,) = read_file(path)
    assert prompt.messages == (("user", "Q"),)


def test_messages_may_have_their_text_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "messages.jsonl"
    parts = [{"type": "text", "text": "Good "}, {"type": "text", "text": "day."}]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    assert read_file(path)[0].messages == (("user", "Good day."),)


def test_a_question_in_every_line_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("What is ice?\n\n  List three fruits.\n", encoding="utf-8")
    prompts = read_workloads(str(path))
    asked = [prompt.messages for prompt in prompts]
    assert asked == [(("user", "What is ice?"),), (("user", "List three fruits."),)]
    path.write_text('{"turns": ["a"]}\n', encoding="utf-8")
    assert read_workloads(str(path))[0].messages == (("user", "a"),)
    other = tmp_path / "mine.md"
    other.write_text("What is ice?\n", encoding="utf-8")
    with pytest.raises(RequestError, match=r"line 1: not JSON .*is called NAME\.txt"):
        read_workloads(str(other))


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "cnn.csv"
    path.write_text('id,article,highlights\n1,"One, two.",Short\n')
    assert read_file(path)[0].messages[0][1].endswith("One, two.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ('{"text": "a"}', "none of the known forms"),
        ("", "no prompts"),
        ("[1]", "must be an object"),
        ('{"turns": []}', "line 1"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "of the type text",
        ),
        ('{"messages": [{"role": "user", "content": 3}]}', "of the type text"),
        ('{"prompt": "a"}\n{"prompt": ""}', "line 2.*its prompt is empty"),
        ('{"task_id": 1, "prompt": "a"}\n{"task_id": 2}', "line 2.*it has no 'prompt'"),
    ],
)
def test_a_broken_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(HunchError, match=message):
        read_file(path)


def test_a_limit_takes_of_every_category(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    kinds = [kind for kind in ("writing", "translation", "rag") for _ in range(4)]
    path.write_text("".join(
        json.dumps({"question_id": number, "category": kind, "turns": ["Go."]}) + "\n"
        for number, kind in enumerate(kinds)
    ))  # fmt: skip
    some = read_workloads(f"spec-bench:{path}", limit=6)
    assert (
        sorted(prompt.category for prompt in some)
        == ["rag"] * 2 + ["translation"] * 2 + ["writing"] * 2
    )


def test_ids_are_distinct_over_files(tmp_path: Path) -> None:
    """Answers are compared by them: of two prompts with one id, one would seem changed."""
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path in paths:
        path.write_text('{"prompt": "x"}\n{"prompt": "y", "id": "1"}\n')
    ids = [prompt.id for prompt in read_workloads(",".join(map(str, paths)))]
    assert len(set(ids)) == 4
    assert ids[0] == "1"


def test_a_packed_file_and_one_with_a_mark_at_its_start(tmp_path: Path) -> None:
    text = json.dumps(FORMS["humaneval"][0]) + "\n"
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert read_workloads(str(path))[0].id == "HumanEval/0"
    for broken in (path.read_bytes()[:-9], b"plain text"):
        path.write_bytes(broken)
        with pytest.raises(RequestError, match=r"damaged|gzip"):
            read_workloads(str(path))
    path = path.with_suffix(".xz")
    path.write_bytes(lzma.compress(text.encode()))
    assert read_workloads(str(path))[0].id == "HumanEval/0"
    path.write_bytes(b"plain text")
    with pytest.raises(RequestError, match="damaged"):
        read_workloads(str(path))
    rows = tmp_path / "questions.csv.gz"
    rows.write_bytes(gzip.compress(b'prompt\r\n"two\r\nlines"\r\n'))
    assert [prompt.text for prompt in read_workloads(str(rows))] == ["two\r\nlines"]
    marked = tmp_path / "list.json"
    marked.write_text(" \n[" + text + "]", encoding="utf-8-sig")
    assert read_workloads(str(marked))[0].id == "HumanEval/0"


def test_a_file_of_any_name_is_read_and_an_unknown_form_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("questions", "chat"):
        Path(name).write_text('{"prompt": "a"}')
    assert read_workloads("questions")[0].text == "a"
    assert len(read_workloads("chat")) > 1  # the built-in one
    with pytest.raises(RequestError, match="'gsm9k' is not one of hunch, spec-bench"):
        read_workloads("gsm9k:questions")


def test_built_in_workloads_are_whole_and_differ() -> None:
    for name in WORKLOADS:
        prompts = built_in(name)
        assert len(prompts) >= 3, name
        assert len({prompt.id for prompt in prompts}) == len(prompts)
        assert prompts == built_in(name)  # the same every time
    assert all(prompt.prediction for prompt in built_in("rewrite"))
    assert all(prompt.schema for prompt in built_in("json"))
    assert {p.conversation for p in built_in("multi-turn")} == {"office"}
    size = len(built_in("long:8k")[0].messages[0][1])
    assert 3 * 8192 < size < 4 * 8192
    with pytest.raises(HunchError, match="chat"):
        built_in("chta")


def test_lengths() -> None:
    assert (length_of("2k"), length_of("32k"), length_of("3000")) == (2048, 32768, 3000)
    with pytest.raises(HunchError, match="2k"):
        length_of("long")


def test_several_workloads_and_repeats() -> None:
    prompts = read_workloads("chat,code", limit=2)
    assert [p.category for p in prompts] == ["chat", "chat", "code", "code"]
    many = cycle(prompts, 6)
    assert many[4].messages == prompts[0].messages
    assert len({p.id for p in many}) == 6
    assert set(READERS) >= set(FORMS)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    for read in (read_file, read_prompts):
        with pytest.raises(RequestError, match="not UTF-8 text"):
            read(path, limit=1)


def test_a_path_that_leads_to_no_file_is_told_apart(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in ((tmp_path, "is a directory"), (pipe, "pipe"), (tmp_path / "x", "no such")):
        with pytest.raises(RequestError, match=why):
            read_file(path)
        with pytest.raises(RequestError, match=why):
            read_prompts(path, None)
