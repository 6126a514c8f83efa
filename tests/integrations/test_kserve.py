"""The files for KServe and llm-d: what they say must be what the server understands.

No cluster is at hand. KServe's own models of its resources read the files where its package is
installed; that pods start with these words, and answer at these paths, is checked without it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hunch.cli.serve import run
from hunch.config import Config
from hunch.server.settings import ServeConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
PROBES = {"/health", "/ready"}  # paths of the server that need no key


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


@pytest.mark.parametrize("name", ["kserve/serving-runtime.yaml", "llm-d/inference-pool.yaml"])
def test_pods_start_a_server_that_answers_their_probes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = documents(name)[0]["spec"]
    (container,) = spec.get("template", {}).get("spec", spec)["containers"]
    started: list[tuple[Config, ServeConfig]] = []
    monkeypatch.setattr(
        "hunch.server.run.serve", lambda config, settings: started.append((config, settings)) or 0
    )
    command, *words = [word.replace("{{.Name}}", "mine") for word in container["args"]]
    assert command == "serve"
    assert run(words) == 0
    ((_, settings),) = started
    (port,) = container["ports"]
    assert settings.port == port["containerPort"]
    assert not settings.is_local
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in PROBES
        assert asked["port"] == settings.port


def test_the_pool_finds_its_pods() -> None:
    deployment, pool = documents("llm-d/inference-pool.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert pool["spec"]["targetPorts"] == [{"number": container["ports"][0]["containerPort"]}]


def test_the_service_names_the_runtime_and_its_format() -> None:
    (runtime,), (service,) = map(
        documents, ("kserve/serving-runtime.yaml", "kserve/inference-service.yaml")
    )
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = {item["name"] for item in runtime["spec"]["supportedModelFormats"]}
    assert model["modelFormat"]["name"] in formats


def check(value: Any, kind: str, known: Callable[[str], Any]) -> None:
    """Whether a model of KServe's or Kubernetes' has every field that is given."""
    if kind.startswith("list["):
        for item in value:
            check(item, kind[len("list[") : -1], known)
    elif (model := known(kind)) is not None:
        kinds = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
        for name, inner in value.items():
            assert name in kinds, f"{kind} has no {name}"
            check(inner, kinds[name], known)


def test_kserve_knows_every_field() -> None:
    models = pytest.importorskip("kserve.models")
    import kubernetes.client

    def known(kind: str) -> Any:
        found = getattr(models, kind, None) or getattr(kubernetes.client, kind, None)
        return found if hasattr(found, "openapi_types") else None

    for name, kind in (
        ("kserve/serving-runtime.yaml", "V1alpha1ServingRuntime"),
        ("kserve/inference-service.yaml", "V1beta1InferenceService"),
    ):
        (given,) = documents(name)
        check(given, kind, known)
    deployment, _ = documents("llm-d/inference-pool.yaml")
    check(deployment, "V1Deployment", known)
    with pytest.raises(AssertionError, match="has no ports"):
        check({"spec": {"ports": 1}}, "V1Deployment", known)
