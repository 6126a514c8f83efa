"""Loads: when requests come, and what is written down of them, by an engine and by a server."""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from hunch import LLM, SamplingParams
from hunch.bench import peers
from hunch.bench.energy import EnergyMeter
from hunch.bench.environment import cpu_seconds, local_servers
from hunch.bench.loads import Load
from hunch.bench.measure import make_jobs
from hunch.bench.offline import EngineSubject
from hunch.bench.remote import UrlSubject
from hunch.bench.served import cost
from hunch.bench.workloads import Prompt
from hunch.errors import ConfigError, EngineError, RequestError
from server.live_server import LiveServer, free_port
from tiny_models import write_llama

PROMPTS = [Prompt(f"p{n}", "all", text="fast token " * (n + 2)) for n in range(4)]
PARAMS = {"max_tokens": 12, "temperature": 0.0, "seed": 0, "ignore_eos": True}


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    moments = Load(rate=5.0, seed=3).arrivals(4000)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert pstdev(gaps) == pytest.approx(0.2, rel=0.1)  # as long as the mean: exponential
    assert moments == Load(rate=5.0, seed=3).arrivals(4000)
    assert moments != Load(rate=5.0, seed=4).arrivals(4000)


def test_bursts_have_the_same_rate_and_a_wider_spread() -> None:
    moments = Load(rate=5.0, burstiness=0.25).arrivals(8000)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.1)
    assert pstdev(gaps) == pytest.approx(0.4, rel=0.1)  # 1 / sqrt(0.25) times the mean


@pytest.mark.parametrize("given", [{}, {"rate": 1.0, "concurrency": 1}, {"rate": 0.0}])
def test_a_load_is_open_or_closed(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Load(**given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    model = write_llama(tmp_path_factory.mktemp("loads") / "model")
    return LLM(str(model), speculate="ngram:adaptive=false", max_num_seqs=4, threads=1)


def test_an_open_load_on_an_engine_skips_idle_time(llm: LLM) -> None:
    subject = EngineSubject("ngram", llm, EnergyMeter(rapl=Path("/nonexistent")))
    jobs = make_jobs(PROMPTS, lambda p: llm.tokenizer.encode(p.text), PARAMS, 6)
    load = Load(rate=0.002, num_warmup=2)  # one in 500 seconds
    began = time.perf_counter()
    found = subject.drive(jobs, load)
    assert time.perf_counter() - began < 300 < found.seconds
    assert [a.id for a in found.answers] == ["p0", "p1", "p2", "p3", "p0#1", "p1#1"]
    assert [a.is_warmup for a in found.answers] == [True, True, False, False, False, False]
    assert [a.start for a in found.answers] == load.arrivals(6)
    assert all(0 < (a.first_token or 0) <= a.end_to_end < 300 for a in found.answers)
    assert found.answers[4].digest == found.answers[0].digest  # the same prompt, the same text
    assert found.counts["generation_tokens"] == 6 * 12
    assert found.counts["drafted"] == sum(a.drafted or 0 for a in found.answers) > 0
    assert found.joules is None


def test_a_closed_load_keeps_so_many_under_way(llm: LLM) -> None:
    subject = EngineSubject("ngram", llm)
    jobs = make_jobs(PROMPTS, lambda p: llm.tokenizer.encode(p.text), PARAMS, 6)
    found = subject.drive(jobs, Load(concurrency=2))
    spans = [(a.start, a.start + a.end_to_end) for a in found.answers]
    for start, _ in spans:
        assert sum(s <= start < e for s, e in spans) <= 2
    assert max(end for _, end in spans) <= found.seconds + 1e-3


TALK = Prompt.turns("talk", "chat", ["fast token fast", "and the model?", "why?"])


@pytest.mark.parametrize("load", [Load(concurrency=1), Load(concurrency=2), Load(rate=50.0)])
def test_later_turns_follow_the_models_own_answers(llm: LLM, load: Load) -> None:
    talks = [TALK, PROMPTS[0], replace(TALK, id="again")]
    messages = [{"role": role, "content": content} for role, content in TALK.messages]
    jobs = make_jobs(
        talks,
        lambda p: llm.encode_messages(messages) if p.messages else llm.tokenizer.encode(p.text),
        PARAMS,
    )
    texts: dict[str, str] = {}
    subject = EngineSubject("ngram", llm)
    found = subject.drive(jobs, load, lambda name, out: texts.update({name: out.outputs[0].text}))
    names = ["talk", "talk, turn 2", "talk, turn 3"]
    again = [name.replace("talk", "again") for name in names]
    assert [a.id for a in found.answers] == [*names, "p0", *again]
    said = [dict(message) for message in messages]
    for name, question in zip(names, [*TALK.later, ""], strict=True):
        expected = llm.chat(said, SamplingParams(**PARAMS), use_tqdm=False)[0].outputs[0].text
        assert texts[name] == expected
        said += [
            {"role": "assistant", "content": texts[name]},
            {"role": "user", "content": question},
        ]
    first, second, third = found.answers[:3]
    assert second.start == pytest.approx(first.start + first.end_to_end, abs=1e-6)
    assert third.num_prompt_tokens > second.num_prompt_tokens > first.num_prompt_tokens + 12


def test_a_turn_that_has_no_room_is_an_answer_with_an_error(llm: LLM) -> None:
    long = replace(TALK, later=("fast " * 600,))
    jobs = make_jobs([long], lambda p: llm.tokenizer.encode("fast"), PARAMS)
    found = EngineSubject("ngram", llm).drive(jobs, Load(concurrency=1))
    assert [a.error is None for a in found.answers] == [True, False]
    assert "does not fit the context" in (found.answers[1].error or "")


def test_only_a_conversation_finds_its_own_prefix(tmp_path: Path) -> None:
    asked = replace(TALK, messages=(("user", "fast token " * 40),))
    model = str(write_llama(tmp_path / "model"))
    with LLM(model, speculate="off", threads=1, enable_prefix_caching=True) as llm:

        def found(prompts: list[Prompt]) -> int:
            before = llm.engine.stats()["prefix_hits"]
            ids = llm.encode_messages([{"role": "user", "content": "fast token " * 40}])
            jobs = make_jobs(prompts, lambda p: ids, PARAMS)
            EngineSubject("off", llm).drive(jobs, Load(concurrency=1))
            return int(llm.engine.stats()["prefix_hits"] - before)

        assert found([replace(asked, id=name, later=()) for name in "ab"]) == 0
        assert found([asked]) > 0


@pytest.mark.parametrize(("kernels", "num_driven"), [("triton", 1), ("cpu", 0)])
def test_a_gpu_learns_its_steps_under_an_open_load_before_the_first_round(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kernels: str, num_driven: int
) -> None:
    subject, driven = EngineSubject("ngram", llm), []
    monkeypatch.setattr(subject, "drive", lambda jobs, load: driven.append((len(jobs), load)))
    capacity = replace(llm.engine.capacity, kernels=kernels)
    monkeypatch.setattr(type(llm.engine), "capacity", capacity)
    jobs = make_jobs(PROMPTS, lambda p: llm.tokenizer.encode(p.text), PARAMS, 6)
    subject.warm(jobs, Load(concurrency=2))
    assert not driven
    subject.warm(jobs, Load(rate=5.0))
    assert driven == [(6, Load(rate=5.0))] * num_driven


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    live = LiveServer(tmp_path_factory.mktemp("server") / "log", {})
    yield live  # type: ignore[misc]
    live.stop()


def test_a_server_is_measured_over_http(server: LiveServer) -> None:
    subject = UrlSubject("here", server.url)
    assert len(local_servers([f"here={server.url}", "http://example.org"])) == 1
    assert subject.model == "bytes"
    chat = Prompt.chat("chat", "chat", "hello")
    jobs = make_jobs([*PROMPTS[:2], chat], None, {**PARAMS, "ignore_eos": False}, 6)
    subject.warm(jobs, Load(concurrency=3))
    closed = subject.drive(jobs, Load(concurrency=3))
    assert [a.error for a in closed.answers] == [None] * 6
    for answer in closed.answers:
        assert answer.num_prompt_tokens > 0
        assert 0 < answer.num_tokens <= 12
        assert 0 < (answer.first_token or 0) <= answer.end_to_end
        assert answer.num_passes is not None  # hunch tells; others need not
    assert closed.answers[0].digest == closed.answers[3].digest
    rate = subject.drive(jobs, Load(rate=50.0))
    assert [a.start for a in rate.answers] == Load(rate=50.0).arrivals(6)


def test_later_turns_are_asked_of_a_server(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, bodies = UrlSubject("here", server.url), []
    stream = subject.server.stream
    monkeypatch.setattr(
        subject.server, "stream", lambda body, more: bodies.append(body) or stream(body, more)
    )
    jobs = make_jobs([TALK], None, {**PARAMS, "ignore_eos": False})
    for load in (Load(concurrency=1), Load(rate=50.0)):
        bodies.clear()
        found = subject.drive(jobs, load)
        assert [a.error for a in found.answers] == [None] * 3
        assert [a.id for a in found.answers] == ["talk", "talk, turn 2", "talk, turn 3"]
        assert [len(body["messages"]) for body in bodies] == [1, 3, 5]
        roles = [message["role"] for message in bodies[2]["messages"]]
        assert roles == ["user", "assistant", "user", "assistant", "user"]
        assert bodies[1]["messages"][1]["content"]
        assert found.answers[1].start >= found.answers[0].start + found.answers[0].end_to_end


def test_a_refused_request_is_an_answer_with_an_error(server: LiveServer) -> None:
    subject = UrlSubject("here", server.url, "no-such-model")
    jobs = make_jobs(PROMPTS[:1], None, PARAMS)
    found = subject.drive(jobs, Load(concurrency=1))
    assert "404" in (found.answers[0].error or "")


def test_no_server_is_said_in_one_line() -> None:
    with pytest.raises(RequestError, match="no answer"):
        UrlSubject("here", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(RequestError, match="address"):
        UrlSubject("here", "localhost:8000")


def test_energy_is_read_from_rapl(tmp_path: Path) -> None:
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    (package / "max_energy_range_uj").write_text("1000000000")
    (package / "energy_uj").write_text("999000000")
    meter = EnergyMeter(rapl=tmp_path)
    assert meter.sources == ["RAPL"]
    meter.start()
    (package / "energy_uj").write_text("4000000")  # it began again at zero
    assert meter.stop() == pytest.approx(5.0)


def test_what_serving_costs_is_measured_in_turn(
    server: LiveServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = write_llama(tmp_path_factory.mktemp("served") / "model")
    (found,) = cost(str(model), "off", server.url, [2], 8, 3, threads=1)
    assert found["streams"] == 2
    assert found["offline"] > 0 < found["served"]
    assert found["low"] <= found["cost"] <= found["high"]


def test_the_peers_are_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"xllamacpp"}
    monkeypatch.setattr(peers, "find_spec", lambda name: name if name in there else None)

    def names(**more: Any) -> list[str]:
        found = peers.peers(Path("a.gguf"), threads=2, **more)
        return [name for peer in found for name in peer.addresses("http://x")]

    assert "ik_llama.cpp off" not in names()
    assert "transformers assisted" not in names()
    assert "transformers assisted" in names(draft=Path("draft"))
    there.add("ik_llama_cpp")
    assert "ik_llama.cpp off" in names()
    assert names(skip=["hunch", "llama.cpp", "transformers"]) == ["ik_llama.cpp off"]
    mine = peers.peers(Path("a.gguf"), threads=2, skip=peers.KNOWN, binaries=["ik=./server -fa"])
    assert mine[0].command[:2] == ("./server", "-fa")
    there.clear()
    with pytest.raises(ConfigError, match="pip install xllamacpp"):
        names()


ANSWERS = """
import http.server, sys, time
time.sleep(float(sys.argv[2]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == sys.argv[3] + "/v1/models" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_peers_start_together_and_one_that_fails_is_left_out() -> None:
    def peer(name: str, code: str, path: str = "", methods: tuple[str, ...] = ()) -> peers.Peer:
        command = (sys.executable, "-c", code, "{port}", "0.3", path)
        return peers.Peer(name, command, methods)

    broken = peer("broken", "raise SystemExit('no such file')")
    two = peer("two", ANSWERS, "/a", methods=("a", "b"))
    said: list[str] = []
    with peers.running([broken, peer("one", ANSWERS), two], said.append) as places:
        assert [place.name for place in places] == ["one", "two a", "two b"]
        assert places[2].url.endswith("/b")
        assert cpu_seconds(places[0].pid) is not None
    assert "broken ended by itself with code 1" in said[0]
    assert "no such file" in said[0]
    assert said[1].startswith("[2 of 3] one answers")
    with pytest.raises(EngineError, match="no such file"), peers.running([broken]):
        pass
    with pytest.raises(EngineError, match="broken"), peers.running([broken], said.append):
        pass
