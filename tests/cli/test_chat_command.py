"""hunch chat: commands, long messages, a Ctrl-C that stops the answer and not the program."""

import io
import json

import pytest

from hunch.cli import main
from hunch.cli.chat import Conversation
from tiny_models import write_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_llama(tmp_path_factory.mktemp("chat") / "target"))


def talk(monkeypatch, capsys, model, text, *words):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    main(["chat", "--model", model, "--max-tokens", "4", *words])
    return capsys.readouterr()


def test_commands_and_messages(monkeypatch, capsys, model, tmp_path):
    file = tmp_path / "talk.json"
    text = '/help\n/temperature 0.5\n/temperature hot\nfirst \\\nsecond\n"""\na\n\nb\n"""\n'
    text += f"/save {file}\n/save {file}\n/reset\n/nonsense\n/speculate ngram\n/quit\nnot read\n"
    with pytest.raises(SystemExit) as stop:
        talk(monkeypatch, capsys, model, text, "--system", "Be short.")
    assert not stop.value.code
    err = capsys.readouterr().err
    for words in ("/save FILE", "temperature 0.5", "error: could not convert", "saved 5 messages"):
        assert words in err
    for words in ("exists; choose another", "a new conversation", "no command /nonsense"):
        assert words in err
    assert "speculate ngram" in err
    said = json.loads(file.read_text())
    assert [one["content"] for one in said if one["role"] != "assistant"] == [
        "Be short.",
        "first \nsecond",
        "a\n\nb",
    ]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(monkeypatch, capsys):
    conversation = Conversation({}, None, "m", "off", None)

    def local(self, messages, show):
        show("half an")
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversation, "_local", local)
    conversation.answer("question")
    assert conversation.messages[-1] == {"role": "assistant", "content": "half an"}
    assert "(stopped)" in capsys.readouterr().err


def test_a_model_that_is_not_there_leaves_the_old_one(monkeypatch, capsys, model):
    with pytest.raises(SystemExit):
        talk(monkeypatch, capsys, model, "/model ./nothing\n/model\nhi\n")
    captured = capsys.readouterr()
    assert "no such file or directory" in captured.err
    assert f"model {model}" in captured.err
    assert captured.out.strip()


def test_a_model_by_its_place(shell, monkeypatch, model):
    monkeypatch.setattr("sys.stdin", io.StringIO("/model\n"))
    code, _, err = shell("chat", model, "--max-tokens", "4")
    assert code == 0
    assert model in err
    code, _, err = shell("chat", model, "--model", "other")
    assert code == 2
    assert "two models given" in err


def test_a_model_without_a_chat_template_says_what_it_is_for(monkeypatch, capsys, tmp_path):
    base = write_llama(tmp_path / "base")
    settings = base / "tokenizer_config.json"
    kept = json.loads(settings.read_text())
    del kept["chat_template"]
    settings.write_text(json.dumps(kept))
    with pytest.raises(SystemExit) as stop:
        talk(monkeypatch, capsys, str(base), "hello\n")
    assert stop.value.code == 2
    assert f"hunch generate TEXT --model {base}" in capsys.readouterr().err
