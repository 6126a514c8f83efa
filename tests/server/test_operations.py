"""What operators look at: metrics by vLLM's names, and the report behind the page's charts."""

from __future__ import annotations

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urljoin

from prometheus_client.parser import text_string_to_metric_families

from server.live_server import LiveServer, Start, wait_for

COMPLETE = "/v1/completions"
NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_success",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "spec_decode_draft_seconds",
    "spec_decode_time_saved_seconds",
    "drafter_memory_bytes",
]


def read(server: LiveServer) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> labels besides model and engine -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            rest = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found.setdefault(sample.name, {})[tuple(rest.values())] = sample.value
    return found


def test_metrics_have_vllms_names_and_count_what_happened(start_server: Start) -> None:
    server = start_server()
    families = {f.name for f in text_string_to_metric_families(server.get("/metrics").text)}
    assert {f"hunch:{name}" for name in NAMES} <= families
    for seed in range(3):
        body = {"prompt": "hello", "seed": seed, "max_tokens": 20}
        assert server.post(COMPLETE, body).status_code == 200
    server.post(COMPLETE, {"prompt": "hello", "max_tokens": -2})
    server.wait_idle()
    now = read(server)
    assert now["hunch:prompt_tokens_total"][()] == 15
    assert now["hunch:generation_tokens_total"][()] == 60
    assert now["hunch:request_success_total"][("length",)] == 3
    assert now["vllm:request_max_num_generation_tokens_sum"][()] == 60
    assert now["hunch:time_to_first_token_seconds_count"][()] == 3
    assert now["hunch:inter_token_latency_seconds_count"][()] == 57
    assert now["hunch:http_requests_total"][(COMPLETE, "200")] == 3
    assert now["hunch:http_requests_total"][(COMPLETE, "400")] == 1
    accepted = now["hunch:spec_decode_num_accepted_tokens_total"][()]
    assert 0 < accepted <= now["hunch:spec_decode_num_draft_tokens_total"][()]
    positions = now["hunch:spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(positions.values()) == accepted
    assert now["hunch:num_requests_running"][()] == 0
    assert now["hunch:spec_decode_drafter_accepted_tokens_total"] == {("oracle",): accepted}
    assert now["hunch:request_refused_total"] == {("invalid_request",): 1}
    assert now["hunch:http_request_duration_seconds_count"][(COMPLETE,)] == 4
    assert now["process_resident_memory_bytes"][()] > 1e6
    assert now["hunch_engine_process_resident_memory_bytes"][()] > 1e6


def test_routers_of_clusters_find_the_queue_and_the_kv_memory(start_server: Start) -> None:
    """The names and labels that llm-d and the Gateway API's inference extension look for."""
    room = {"max_model_len": 30_000, "max_num_seqs": 2, "drain_timeout": 0}
    server = start_server(**room, env={"FAKE_STEP_SECONDS": "0.05"})
    body = {"prompt": "hello", "max_tokens": 20_000, "seed": 1}
    server.post(COMPLETE, {**body, "max_tokens": 2})  # one that is over has a count of its own
    with ThreadPoolExecutor(5) as pool:
        for _ in range(5):
            pool.submit(server.post, COMPLETE, body)
        wait_for(lambda: read(server)["vllm:num_requests_waiting"][()] == 3)
        now = read(server)
        said = server.get("/metrics").text
        server.process.send_signal(signal.SIGTERM)  # nobody waits for the answers
    assert now["vllm:num_requests_running"][()] == 2
    assert 0 < now["vllm:kv_cache_usage_perc"][()] < 1
    assert now["vllm:gpu_cache_usage_perc"] == now["vllm:kv_cache_usage_perc"]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert now[f"hunch:{name}"] == now[f"vllm:{name}"]
    shown = {"e2e_request_latency_seconds_count", "time_per_output_token_seconds_bucket"}
    shown |= {"prompt_tokens_total", "request_success_total", "request_prompt_tokens_sum"}
    shown |= {"prefix_cache_hits_total", "spec_decode_num_accepted_tokens_total"}
    # What vLLM's own dashboards show.
    assert {f"vllm:{name}" for name in shown} <= set(now)
    (family,) = [
        family
        for family in text_string_to_metric_families(said)
        if family.name == "vllm:cache_config_info"
    ]
    (sample,) = family.samples
    assert sample.value == 1
    assert sample.labels["block_size"] == "16"
    assert sample.labels["num_gpu_blocks"] == "4096"


def test_latencies_count_requests_and_unstreamed_answers_have_a_first_token(
    server: LiveServer,
) -> None:
    before = read(server)
    body = {"prompt": "hello", "max_tokens": 200, "n": 3, "user": "counted"}
    body["speculation"] = {"mode": "off"}
    answer = server.post(COMPLETE, body)
    server.wait_idle()
    now = read(server)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        key = f"hunch:{name}_seconds_count"
        assert now[key][()] - before[key][()] == 1, name
    lines = [json.loads(line) for line in server.log().splitlines()]
    (line,) = [x for x in lines if x.get("id", "").startswith(answer.json()["id"])]
    assert line["first_token_seconds"] > 0
    assert line["seconds"] - line["first_token_seconds"] > 0.199  # each other step takes 1 ms


def test_the_dashboard_asks_only_for_metrics_that_exist(server: LiveServer) -> None:
    path = Path(__file__).parents[2] / "dashboards" / "grafana.json"
    text = path.read_text()
    board = json.loads(text)
    asked = set(re.findall(r"hunch:[a-z0-9_]+", text))
    known = set(re.findall(r"hunch:[a-z0-9_]+", server.get("/metrics").text))
    known |= {f"{name}_bucket" for name in known}
    assert len(asked) > 12
    assert "hunch:spec_decode_drafter_accepted_tokens_total" in asked
    assert asked <= known
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    corners = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(corners) == len(set(corners))


def test_health_version_and_the_report(server: LiveServer) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").status_code == 200
    assert "version" in server.get("/version").json()
    report = server.stats()
    assert report["model"] == "bytes"
    assert {"num_running", "num_waiting", "kv_usage", "per_position"} <= set(report["engine"])


def test_a_proxy_may_leave_its_prefix_in_the_path(start_server: Start) -> None:
    """Keys, limits and counts know a path by its name, with the prefix and without."""
    server = start_server(root_path="/llm/", api_keys=["key"])
    key = {"Authorization": "Bearer key"}
    for mount in ("", "/llm"):
        assert server.get(f"{mount}/health").status_code == 200
        page = server.get(f"{mount}/")
        assert page.status_code == 200
        for link in re.findall(r'(?:src|href)="([^"#]+)"', page.text):
            assert server.get(urljoin(f"{mount}/", link)).status_code == 200
        assert server.get(f"{mount}/v1/models").status_code == 401
        assert server.get(f"{mount}/v1/models", headers=key).status_code == 200
        chat = f"{mount}/v1/chat/completions"
        form = {**key, "Content-Type": "text/plain"}
        assert server.post(chat, content=b"{}", headers=form).status_code == 415
        assert server.post(chat, "x" * 5_000_000, headers=key).status_code == 413
        assert "type" in server.post(chat, {}, headers=key).json()["error"]
        assert server.post(f"{chat}/", {}, headers=key).status_code == 400  # and not sent elsewhere
    counted = server.get("/metrics", headers=key).text
    assert re.search(r'http_requests_total{[^}]*path="/v1/models",status="401"} 2.0', counted)


def test_the_page_is_served_with_a_strict_policy(server: LiveServer) -> None:
    page = server.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    asked = {"/static/app.js", "/static/style.css", "/favicon.ico"}
    while asked:
        path = asked.pop()
        answer = server.get(path)
        assert answer.status_code == 200, path
        asked |= {f"/static/{name}" for name in re.findall(r'from "\./(\w+\.js)"', answer.text)}
