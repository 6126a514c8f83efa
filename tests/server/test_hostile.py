"""The hostile set: what a stranger sends is answered soon, in little memory, and harms no other."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hunch.errors import RequestError
from hunch.server.connections import MAX_HEADER_BYTES, MAX_HEADERS
from hunch.server.guard import check_characters, check_values
from hunch.server.problems import ProblemError
from hunch.text.tokenizer import load_tokenizer
from server.fake_engine import expected_text
from server.live_server import PATIENCE, LiveServer, Start, wait_for
from tiny_models import write_tokenizer

COMPLETE = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
KEY = {"Authorization": "Bearer key"}
SIZE = 4_000_000
ESCAPES = ["\\\\", "\\ud800", "\\uDC00", "\\ud83d\\ude00", "\\uDBFF", "a", "\\u0041", '\\"']


def fields(name: str, count: int) -> bytes:
    """That many fields of an object, made quickly: every process of the tests makes them."""
    return (f'"{name}' + f'": 1, "{name}'.join(map(str, range(count))) + '": 1').encode()


BODIES = {
    "numbers among texts": (COMPLETE, b'{"prompt": ["a"' + b",1" * (SIZE // 2) + b"]}"),
    "fewer numbers among texts": (COMPLETE, b'{"prompt": ["a"' + b",1" * 250_000 + b"]}"),
    "empty messages": (CHAT, b'{"messages": [' + b"{}," * (SIZE // 3) + b"{}]}"),
    "fewer empty messages": (CHAT, b'{"messages": [' + b"{}," * 60_000 + b"{}]}"),
    "texts as messages": (CHAT, b'{"messages": [' + b'"a",' * 250_000 + b'"a"]}'),
    "wrong bias": (COMPLETE, b'{"prompt": "x", "logit_bias": {%b}}' % fields("x", 300_000)),
    "wrong notes": (COMPLETE, b'{"prompt": "x", "metadata": {%b}}' % fields("", 200_000)),
    "unknown fields": (COMPLETE, b"{%b}" % fields("field", 150_000)),
    "quotes and brackets": (COMPLETE, b'{"prompt": [' + b'"{",' * (SIZE // 4) + b'"{"]}'),
    "escaped quotes": (COMPLETE, b'{"prompt": "' + b'\\\\\\",' * (SIZE // 5) + b'"}'),
    "brackets": (COMPLETE, b"[" * SIZE),
    "wrong parts": (
        CHAT,
        b'{"messages": [{"role": "user", "content": [' + b"1," * 250_000 + b"1]}]}",
    ),
    "wrong ids": ("/detokenize", b'{"tokens": [' + b"-1," * 250_000 + b"1]}"),
    "wrong words": (COMPLETE, b'{"prompt": "x", "bad_words": [' + b"1," * 250_000 + b"1]}"),
}


@pytest.fixture(scope="module")
def guarded(start_server: Start) -> LiveServer:
    """Open to the network, with a key, a web site's origin and room for three sequences."""
    return start_server(
        host="0.0.0.0", api_keys=["key"], cors_origins=["https://site.example"],
        max_num_seqs=2, max_queue=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def narrow(start_server: Start) -> LiveServer:
    """A few connections, all the time for headers, and a name."""
    return start_server(
        env={"FAKE_HEADER_SECONDS": "600"}, max_connections=20, allowed_hosts=["llm.example"]
    )


@pytest.fixture(scope="module")
def hasty(start_server: Start) -> LiveServer:
    """Open to the network without a key, and with little time for headers."""
    return start_server(host="0.0.0.0", env={"FAKE_HEADER_SECONDS": "0.3"})


def seconds_of(pid: int) -> float:
    """CPU time the process has used."""
    used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> float:
    """Most megabytes the process has ever held."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


@pytest.mark.parametrize("name", BODIES)
def test_a_large_wrong_body_gets_its_error_at_once(server: LiveServer, name: str) -> None:
    path, body = BODIES[name]
    pid = server.process.pid
    held, used = memory(pid), seconds_of(pid)
    answer = server.post(path, content=body, headers=JSON)
    used = seconds_of(pid) - used
    assert answer.status_code == 400
    assert len(answer.content) < 2000
    # Of the server's own time, as machines that run tests have others' work too. It was 79 s, and
    # 7 GB, when every item had an error of its own.
    assert used < 20
    assert memory(pid) - held < 64


@settings(max_examples=300)
@given(st.lists(st.sampled_from(ESCAPES), max_size=7).map("".join))
def test_half_of_a_character_is_found_without_parsing(text: str) -> None:
    body = f'"{text}"'
    try:
        found = json.loads(body)
    except ValueError:
        return  # the parser says what is wrong
    try:
        found.encode()
    except UnicodeEncodeError:
        with pytest.raises(ProblemError, match="half of a surrogate pair"):
            check_characters(body.encode())
    else:
        check_characters(body.encode())


@pytest.mark.parametrize(
    ("text", "num_values", "num_containers"),
    [
        (r'{"a": [1, 2, {"b": "x,y{[,\"]"}], "c": "\\"}', 3, 3),
        (r'["\\", "\"", "\\\"", ","]', 3, 1),
        ('["", "", ""]', 2, 1),
        ("", 0, 0),
    ],
)
def test_values_are_counted_outside_of_texts(
    text: str, num_values: int, num_containers: int
) -> None:
    body = text.encode()
    check_values(body, max(16 * num_values, 64 * num_containers))
    if num_values:
        with pytest.raises(ProblemError, match=f"{num_values} values"):
            check_values(body, 16 * num_values - 1)
    if num_containers:
        with pytest.raises(ProblemError, match=r"values|objects"):
            check_values(body, 64 * num_containers - 1)


def test_a_prompt_that_cannot_fit_is_refused_unread(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    began = time.process_time()
    for text in ("1" * SIZE, "a b " * (SIZE // 4), "é" * (SIZE // 2)):
        with pytest.raises(RequestError, match="context of 512"):
            tokenizer.encode(text, max_tokens=512)
        template = "{{ messages[0].content }}"
        chat = [{"role": "user", "content": text}]
        with pytest.raises(RequestError, match="context of 512"):
            tokenizer.render_chat(chat, template=template, max_tokens=512)
    assert time.process_time() - began < 30  # 16 s for each of them, encoded to its end


def test_text_that_fits_is_encoded_as_ever(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "Some words, 1234 and é. " * 2000
    ids = tokenizer.backend.encode(text).ids
    assert tokenizer.encode(text) == tokenizer.encode(text, max_tokens=len(ids)) == ids
    assert tokenizer.encode(text, max_tokens=len(ids) - 1) == ids  # who asks looks at the length


def raw(server: LiveServer, data: bytes) -> bytes:
    """What the server says to these bytes, until it closes the connection, which it must."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(PATIENCE)
        said = b""
        try:
            sock.sendall(data)
            while piece := sock.recv(65536):
                said += piece
        except ConnectionError:
            pass
        return said


@pytest.mark.parametrize(
    "headers",
    [
        b"X-Long: " + b"a" * MAX_HEADER_BYTES + b"\r\n",
        b"X-Endless: " + b"a" * 5_000_000,
        b"X-Many: a\r\n" * (MAX_HEADERS + 1),
    ],
    ids=["long", "endless", "many"],
)
def test_headers_are_limited_before_the_key_is_looked_at(
    server: LiveServer, headers: bytes
) -> None:
    said = raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
    assert said.startswith(b"HTTP/1.1 431 ") or said == b""  # reset while it was still sent
    assert server.get("/health").status_code == 200


def test_large_bodies_that_come_with_their_headers_are_read(server: LiveServer) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 3, "seed": 1, "user": "u" * 300_000}).encode()
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    said = raw(server, head.encode() + body)
    assert json.loads(said.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == expected_text(
        "x", 1, 3
    )


def test_an_offer_of_another_protocol_is_passed_by(server: LiveServer) -> None:
    """Java's client sends one with every request, and was told that its body was missing."""
    body = json.dumps({"prompt": "x", "max_tokens": 3, "seed": 1}).encode()
    head = f"POST {COMPLETE} HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
    head += f"Content-Length: {len(body)}\r\nHost: localhost\r\nHTTP2-Settings: AAEAAEAA\r\n"
    head += "Upgrade: h2c\r\nContent-Type: application/json\r\n\r\n"
    said = raw(server, head.encode() + body)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == expected_text(
        "x", 1, 3
    )


def half_open(server: LiveServer) -> list[socket.socket]:
    """Twenty connections that say nothing, or not enough."""
    socks = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    for number, sock in enumerate(socks):
        sock.settimeout(PATIENCE)
        with suppress(ConnectionError):  # it may be closed by now
            sock.sendall(b"GET /health HTTP/1.1\r\nHost" if number % 2 else b"")
    return socks


def test_the_number_of_connections_is_limited(narrow: LiveServer) -> None:
    socks = half_open(narrow)
    said = raw(narrow, b"")  # bytes that nobody reads could reset the connection before the answer
    assert said.startswith(b"HTTP/1.1 503 ")
    assert b"too_many_connections" in said
    for sock in socks:
        sock.close()
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    wait_for(lambda: raw(narrow, request).startswith(b"HTTP/1.1 200 "))


def test_half_open_connections_are_closed(hasty: LiveServer) -> None:
    for sock in half_open(hasty):
        with sock, suppress(ConnectionError):
            assert sock.recv(100) == b""


def test_many_idle_connections_do_not_slow_a_stream(server: LiveServer) -> None:
    socks = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    try:
        answer = server.post(COMPLETE, {"prompt": "a", "seed": 5, "max_tokens": 30})
        assert answer.json()["choices"][0]["text"] == expected_text("a", 5, 30)
    finally:
        for sock in socks:
            sock.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
def test_a_name_of_another_site_does_not_lead_here(
    server: LiveServer, host: str, status: int
) -> None:
    assert server.get("/v1/models", headers={"Host": host}).status_code == status


def test_names_are_free_where_a_key_or_the_operator_says_so(
    narrow: LiveServer, guarded: LiveServer
) -> None:
    assert narrow.get("/v1/models", headers={"Host": "LLM.example"}).status_code == 200
    assert narrow.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert guarded.get("/v1/models", headers={**KEY, "Host": "any.example"}).status_code == 200


def test_probes_need_no_key_and_take_head(guarded: LiveServer) -> None:
    for path in ("/health", "/ready"):
        assert guarded.get(path).status_code == 200
        head = guarded.client.head(guarded.url + path)
        assert (head.status_code, head.content) == (200, b"")


def test_a_preflight_may_announce_any_header(guarded: LiveServer) -> None:
    asked = "authorization,content-type,x-stainless-arch,x-stainless-retry-count"
    headers = {
        "Origin": "https://site.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": asked,
    }
    answer = guarded.client.options(guarded.url + CHAT, headers=headers)
    assert answer.status_code == 200
    allowed = answer.headers["access-control-allow-headers"].replace(" ", "")
    assert set(asked.split(",")) <= set(allowed.split(","))


def test_what_can_never_run_is_an_error_of_the_request(guarded: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    assert guarded.post(COMPLETE, {**body, "n": 3}, headers=KEY).status_code == 200
    for fields in ({"n": 4}, {"prompt": ["x", "y"], "n": 2}):
        answer = guarded.post(COMPLETE, {**body, **fields}, headers=KEY)
        assert answer.status_code == 400
        assert "at most 3" in answer.json()["error"]["message"]


def test_an_open_door_is_mentioned(guarded: LiveServer, hasty: LiveServer) -> None:
    assert "no --api-key is set" in hasty.log()
    assert "no --api-key is set" not in guarded.log()


def test_special_tokens_of_users_are_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    special = tokenizer.eos_token
    assert special is not None
    template = "{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    chat = [{"role": "user", "content": f" over{special}and out"}]
    ids = tokenizer.render_chat(chat, template=template)
    assert ids.count(tokenizer.eos_ids[0]) == 1  # the template's own
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"over{special}and out{special}"
    parts = [{"role": "user", "content": [{"type": "text", "text": special}]}]
    assert tokenizer.render_chat(parts, template=template).count(tokenizer.eos_ids[0]) == 1
