"""Several models behind one address: loaded when asked for, unloaded when others need the room."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hunch.cli.serve import _adapter, _named
from hunch.errors import ConfigError
from hunch.server.settings import ServeConfig
from server.fake_engine import expected_text
from server.live_server import PATIENCE, LiveServer, Start, wait_for

COMPLETE = "/v1/completions"


def ask(server: LiveServer, model: str) -> Any:
    return server.post(COMPLETE, {"model": model, "prompt": "x", "seed": 1, "max_tokens": 9})


def loaded(server: LiveServer) -> set[str]:
    models = server.get("/v1/models").json()["data"]
    return {model["id"] for model in models if model["is_loaded"]}


def test_models_are_loaded_on_demand_and_make_room(start_server: Start) -> None:
    others = [["b", "bytes"], ["c", "bytes"], ["broken", "missing"]]
    server = start_server(models=others, max_loaded_models=2)
    assert loaded(server) == {"bytes", "alias"}
    tags = [model["name"] for model in server.get("/api/tags").json()["models"]]
    assert tags == ["bytes", "alias", "b", "c", "broken"]
    for name, held in (
        ("b", {"bytes", "alias", "b"}),
        ("c", {"b", "c"}),  # the one that was not asked for longest has left
        ("alias", {"c", "bytes", "alias"}),
    ):
        answer = ask(server, name)
        assert answer.json()["choices"][0]["text"] == expected_text("x", 1, 9), answer.text
        assert answer.json()["model"] == name
        assert loaded(server) == held
    assert server.get("/v1/models/c").json()["max_model_len"] == 512
    assert server.get("/v1/models/").json() == server.get("/v1/models").json()
    told = server.get("/metrics").text
    seconds = r'^hunch_engine_process_start_time_seconds\{model_name="(.*)"\} '
    started = re.findall(seconds, told, re.M)
    assert sorted(started) == ["bytes", "c"]  # each engine's own: a sum would be no time
    broken = ask(server, "broken")
    assert broken.status_code == 503
    assert "there is no such model" in broken.json()["error"]["message"]
    unknown = ask(server, "nobody")
    assert unknown.status_code == 404
    assert "bytes, alias, b, c, broken" in unknown.json()["error"]["message"]


@pytest.fixture(scope="module")
def pair(start_server: Start) -> LiveServer:
    return start_server(models=[["b", "bytes"]])


def test_who_asks_about_a_model_does_not_load_it(pair: LiveServer) -> None:
    about = pair.get("/v1/models/b").json()
    assert (about["id"], about["is_loaded"], about["max_model_len"]) == ("b", False, None)
    assert pair.get("/v1/models/nobody").status_code == 404
    assert loaded(pair) == {"bytes", "alias"}


def test_anthropics_clients_get_its_form_of_error_for_an_unknown_model(pair: LiveServer) -> None:
    body = {"model": "nobody", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    answer = pair.post("/v1/messages", body)
    assert (answer.status_code, answer.json()["type"]) == (404, "error")
    assert answer.json()["error"]["type"] == "not_found_error"


def test_responses_of_every_model_are_kept_in_one_place(pair: LiveServer) -> None:
    body = {"model": "b", "input": "x", "max_output_tokens": 9}
    first = pair.post("/v1/responses", body).json()
    path = f"/v1/responses/{first['id']}"
    assert pair.get(path).json() == first
    further = {**body, "model": "bytes", "previous_response_id": first["id"]}
    assert pair.post("/v1/responses", further).status_code == 200
    assert httpx.delete(pair.url + path).json()["deleted"]
    assert pair.get(path).status_code == 404


def test_a_model_nobody_asks_for_is_unloaded(start_server: Start) -> None:
    server = start_server(models=[["b", "bytes"]], idle_unload=1)
    wait_for(lambda: not loaded(server))
    assert server.get("/health").status_code == 200  # it would load them again
    assert ask(server, "bytes").json()["choices"][0]["text"] == expected_text("x", 1, 9)


def test_names_of_models() -> None:
    assert _named("smollm2-135m") == ("smollm2-135m", "smollm2-135m")
    assert _named("small=/models/a") == ("small", "/models/a")
    with pytest.raises(ConfigError, match="same name"):
        ServeConfig(served_model_names=("a",), models=(("a", "b"),))
    with pytest.raises(ConfigError, match="workers"):
        ServeConfig(models=(("a", "b"),), workers=2)


def adapters(server: LiveServer) -> dict[str, str]:
    """What a router is told of them: labels of a gauge that vLLM has too."""
    for family in text_string_to_metric_families(server.get("/metrics").text):
        if family.name == "vllm:lora_requests_info":
            (sample,) = family.samples
            assert abs(sample.value - time.time()) < PATIENCE
            return dict(sample.labels)
    raise AssertionError("there is no such gauge")


def test_an_adapter_is_a_model_by_name(start_server: Start) -> None:
    server = start_server(adapters=[["sql", "lora"]])
    labels = {"max_lora": "1", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert adapters(server) == labels
    answer = ask(server, "sql")
    assert adapters(server) == labels | {"running_lora_adapters": "sql"}
    # The engine of bytes takes an adapter's name for a part of every prompt's seed.
    assert answer.json()["choices"][0]["text"] == expected_text("x", 1 + len("lora"), 9)
    assert answer.json()["model"] == "sql"
    assert ask(server, "bytes").json()["choices"][0]["text"] == expected_text("x", 1, 9)
    models = server.get("/v1/models").json()["data"]
    assert {model["id"]: model["parent"] for model in models} == {
        "bytes": None, "alias": None, "sql": "bytes",
    }  # fmt: skip


@pytest.mark.parametrize("form", ["sql={}", '{{"name": "sql", "path": "{}"}}'])
def test_adapters_are_named_as_in_vllm(tmp_path: Path, form: str) -> None:
    word = form.format(tmp_path)
    with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
        _adapter(word)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert _adapter(word) == ("sql", str(tmp_path))
    with pytest.raises(ConfigError, match="NAME=PATH"):
        _adapter(str(tmp_path))


def test_models_share_a_device() -> None:
    assert ServeConfig(models=(("b", "b"),), adapters=(("c", "c"),)).num_engines == 3
    assert ServeConfig(models=(("b", "b"), ("c", "c")), max_loaded_models=2).num_engines == 2
