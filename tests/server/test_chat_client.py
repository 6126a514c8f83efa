"""`hunch chat --server URL` against a live server."""

from __future__ import annotations

import io
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from hunch.cli import main
from server.fake_engine import expected_text
from server.live_server import LiveServer


def talk(monkeypatch: pytest.MonkeyPatch, lines: str, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    monkeypatch.delenv("HUNCH_API_KEY", raising=False)
    with pytest.raises(SystemExit) as left:
        main(["chat", *words])
    return int(left.value.code or 0)


def test_a_conversation_with_a_server(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--server", server.url, "--max-tokens", "20", "--seed", "4")
    assert talk(monkeypatch, "Hello\nAgain\n\n", *words) == 0
    first = expected_text("user: Hello\nassistant: ", 4, 20)
    history = f"user: Hello\nassistant: {first}\nuser: Again\nassistant: "
    shown = capsys.readouterr()
    assert shown.out == f"{first}\n{expected_text(history, 4, 20)}\n"
    assert "tok/s" in shown.err


def test_a_server_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "Hello\n", "--server", "http://127.0.0.1:9") == 2
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err


def test_the_servers_complaint_is_shown(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "Hello " * 400 + "\n", "--server", server.url) == 2
    assert "the prompt has more than 512 tokens" in capsys.readouterr().err


def test_the_address_may_end_as_openais_clients_want_it(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--server", f"{server.url}/v1/", "--max-tokens", "5", "--seed", "4")
    assert talk(monkeypatch, "Hello\n\n", *words) == 0
    assert capsys.readouterr().out == expected_text("user: Hello\nassistant: ", 4, 5) + "\n"
    assert talk(monkeypatch, "Hello\n", "--server", "localhost:8000") == 2
    assert "begins with http://" in capsys.readouterr().err


def test_an_address_where_no_such_server_is(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pages(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(501)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Pages) as pages:
        Thread(target=pages.serve_forever, daemon=True).start()
        assert (
            talk(monkeypatch, "Hello\n", "--server", f"http://127.0.0.1:{pages.server_port}") == 2
        )
        pages.shutdown()
    assert "the server says: 501" in capsys.readouterr().err
    assert talk(monkeypatch, "Hello\n", "--server", "http://127.0.0.1:port") == 2
    assert "nonnumeric port" in capsys.readouterr().err


def test_a_bench_of_servers_that_answer_nothing_has_failed(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "--limit", "1", "--repeats", "1", "--max-tokens", "4", "--workload", "chat"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--url", server.url, "--served-model", "none"])
    assert left.value.code == 1
    assert "1 request failed; the first: RequestError: HTTP 404" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main([*words, "--url", f"a={server.url}", "--url", f"a={server.url}"])
    assert left.value.code == 2
    assert "same name" in capsys.readouterr().err
