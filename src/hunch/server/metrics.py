"""What Prometheus scrapes: vLLM's metric names under the prefix `hunch:`.

What vLLM has too stands there a second time under its own prefix, which dashboards and routers of
clusters (llm-d, the Gateway API's inference extension) look for unless told otherwise.
Requests' sizes and ends are counted here. Everything about time and speculation comes from the
engine's own report, whose totals only grow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from hunch.server.prompts import AnyEngine
from hunch.server.replicas import Replicas
from hunch.types import SamplingParams

PREFIX = "hunch:"
VLLM = "vllm:"
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
SEQUENCES = (1, 2, 5, 10, 20)
SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# name, key of the engine's report, help
_GAUGES = (
    ("num_requests_running", "num_running", "Sequences being generated."),
    ("num_requests_waiting", "num_waiting", "Sequences waiting for a row."),
    ("kv_cache_usage_perc", "kv_usage", "Share of KV blocks in use; 1 is all of them."),
    ("lossy_verifier", "is_lossy", "1: the verifier is LOSSY and may change the text (typical)."),
    ("synthetic_drafts", "is_synthetic", "1: drafts are SYNTHETIC, made up for a benchmark."),
    ("drafter_memory_bytes", "drafter_bytes", "Memory held by drafters."),
    (  # drafting that did not pay makes it fall
        "spec_decode_time_saved_seconds",
        "time_saved_seconds",
        "Seconds plain decoding would have taken on top for the same tokens; may fall.",
    ),
)
_REPLICAS = (  # with --replicas
    ("num_replicas", "num_replicas", "Engines that share the requests."),
    ("num_replicas_up", "num_replicas_up", "Engines that can answer now."),
)
_MOVED = "Requests that began or went on in another engine because theirs had died."
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens taken in."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_hits", "Prompt tokens found in the prefix cache."),
    ("num_preemptions", "num_preemptions", "Sequences sent back to the queue for lack of blocks."),
    ("engine_steps", "num_steps", "Passes of the target."),
    ("spec_decode_num_drafts", "num_drafts", "Drafts that were verified."),
    ("spec_decode_num_draft_tokens", "drafted", "Drafted nodes that were verified."),
    ("spec_decode_num_accepted_tokens", "accepted", "Drafted nodes that were accepted."),
    ("spec_decode_draft_seconds", "draft_seconds", "Seconds spent drafting."),
    ("target_seconds", "target_seconds", "Seconds spent in the target."),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "ttft", "From arrival to the first token."),
    ("inter_token_latency_seconds", "inter_token", "Between tokens; a step's are spread evenly."),
    ("e2e_request_latency_seconds", "e2e", "From arrival to the last token."),
    ("request_queue_time_seconds", "queue", "From arrival to a row."),
    ("request_prefill_time_seconds", "prefill", "From a row to the first token."),
    ("request_decode_time_seconds", "decode", "From the first token to the last."),
    ("request_inference_time_seconds", "inference", "From a row to the last token."),
)
# What vLLM has under the same name, and what it once called it.
_AS_VLLM = frozenset(
    {name for name, *_ in _HISTOGRAMS}
    | {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"}
    | {"prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"}
    | {"num_preemptions", "spec_decode_num_drafts", "spec_decode_num_draft_tokens"}
    | {"spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"}
    | {"request_prompt_tokens", "request_generation_tokens", "request_params_n"}
    | {"request_params_max_tokens", "request_success", "request_max_num_generation_tokens"}
)
_OLDER = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}

Labels = tuple[tuple[str, str], ...]
Samples = list[tuple[str, Labels, float]]
Family = tuple[tuple[str, str, str], Samples]  # name, help and type


class Metrics:
    """Counts and histograms of one server."""

    def __init__(self, model_name: str, engine: AnyEngine, num_workers: int = 1) -> None:
        self.registry = CollectorRegistry()  # what all processes would tell alike
        self._own = CollectorRegistry()  # what this one has counted
        self._process = CollectorRegistry()  # what this one takes of the machine
        self._engine, self._num_workers = engine, num_workers
        self.model_name = model_name
        self._labels = {"model_name": model_name, "engine": "0"}
        self.registry.register(EngineCollector(engine, self._labels))
        self._prompt_size = self._histogram("request_prompt_tokens", TOKENS)
        self._output_size = self._histogram("request_generation_tokens", TOKENS)
        self._longest = self._histogram("request_max_num_generation_tokens", TOKENS)
        self._params_n = self._histogram("request_params_n", SEQUENCES)
        self._params_max_tokens = self._histogram("request_params_max_tokens", TOKENS)
        self._success = self._counter("request_success", "Requests by end.", "finished_reason")
        self._refused = self._counter(
            "request_refused", "Requests answered with an error, by reason.", "reason"
        )
        self._http = self._counter("http_requests", "HTTP answers.", "path", "status")
        self._seconds = PrometheusHistogram(
            PREFIX + "http_request_duration_seconds",
            "From the headers of a request to the last byte of its answer.",
            [*self._labels, "path"],
            buckets=SECONDS,
            registry=self._own,
        )
        # Under the names every program has: process_resident_memory_bytes and such.
        ProcessCollector(registry=self._process)

    def exposition(self) -> bytes:
        """The text Prometheus reads."""
        # The other processes that serve the same engine told theirs at most a second ago.
        own = self._engine.info.index
        others = [counts for index, counts in self._engine.counts.items() if index != own]
        families = [family for counts in (self.families(), *others) for family in counts]
        return generate_latest(_Sum([*_plain(self.registry), *self.of_engines(), *families]))

    def families(self) -> list[Family]:
        """What this process has counted and takes, as plain values."""
        # A sum of times of starts or of limits would mean nothing: each worker has its own.
        labels = (("worker", str(self._engine.info.index)),) if self._num_workers > 1 else ()
        return [*_plain(self._own), *_plain(self._process, labels)]

    def of_engines(self, labels: Labels = ()) -> list[Family]:
        """What the engines' processes take of the machine."""
        engine, found = self._engine, list[Family]()
        engines = engine.engines if isinstance(engine, Replicas) else [engine]
        for place, one in enumerate(engines):
            process = ProcessCollector("hunch_engine", pid=partial(int, one.pid), registry=None)
            own = (("replica", str(place)),) if len(engines) > 1 else ()
            found += _plain(process, (*labels, *own))
        return found

    def answered(self, path: str, status: int, seconds: float) -> None:
        self._http.labels(**self._labels, path=path, status=str(status)).inc()
        self._seconds.labels(**self._labels, path=path).observe(seconds)

    def refused(self, reason: str) -> None:
        """A request got an error for an answer."""
        self._refused.labels(**self._labels, reason=reason).inc()

    def finished(
        self, num_prompt: int, lengths: Sequence[int], params: SamplingParams, reason: str
    ) -> None:
        """A request that was begun ended, whichever way. `lengths`: of its answers."""
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._prompt_size.observe(num_prompt)
        self._output_size.observe(sum(lengths))
        self._longest.observe(max(lengths, default=0))
        self._params_n.observe(params.n)
        if params.max_tokens is not None:
            self._params_max_tokens.observe(params.max_tokens)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> PrometheusHistogram:
        help_text = name.replace("_", " ").capitalize() + "."
        histogram = PrometheusHistogram(
            PREFIX + name, help_text, list(self._labels), buckets=buckets, registry=self._own
        )
        return histogram.labels(**self._labels)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        names = [*self._labels, *labels]
        return Counter(PREFIX + name, help_text, names, registry=self._own)


def joined(all_metrics: Sequence[Metrics], further: Sequence[Family] = ()) -> bytes:
    """The text of several models' metrics; of the process itself the first one tells."""
    families: list[Family] = [*further]
    for number, metrics in enumerate(all_metrics):
        name = ("model_name", metrics.model_name)
        found = [*_plain(metrics.registry), *metrics.of_engines((name,)), *metrics.families()]
        families += [one for one in found if not number or not one[0][0].startswith("process_")]
    return generate_latest(_Sum(families))


def adapters_family(loaded: Sequence[str], waiting: Sequence[str], most: int) -> Family:
    """Which adapters can answer at once, for routers that send requests where theirs is loaded."""
    name = VLLM + "lora_requests_info"
    labels = (
        ("max_lora", str(most)),
        ("running_lora_adapters", ",".join(loaded)),
        ("waiting_lora_adapters", ",".join(waiting)),
    )
    return (name, "Adapters; the value is the time.", "gauge"), [(name, labels, time.time())]


def _plain(registry: CollectorRegistry | Collector, labels: Labels = ()) -> list[Family]:
    return [
        (
            (metric.name, metric.documentation, metric.type),
            [(s.name, (*s.labels.items(), *labels), s.value) for s in metric.samples],
        )
        for metric in registry.collect()
    ]


def _for_vllm(family: Family) -> Iterator[Family]:
    """The same under the names that vLLM has for it."""
    (name, text, metric_type), samples = family
    own = name.removeprefix(PREFIX)
    if own == name or own not in _AS_VLLM:
        return
    for theirs in (own, _OLDER.get(own)):
        if theirs is not None:
            renamed = [
                (VLLM + theirs + sample.removeprefix(name), labels, value)
                for sample, labels, value in samples
            ]
            yield (VLLM + theirs, text, metric_type), renamed


class _Sum:
    """Families of several processes as one."""

    def __init__(self, families: list[Family]) -> None:
        self._families = [*families, *(one for family in families for one in _for_vllm(family))]

    def collect(self) -> Iterator[Metric]:
        sums: dict[tuple[str, str, str], dict[tuple[str, Labels], float]] = {}
        for head, samples in self._families:
            found = sums.setdefault(head, {})
            for name, labels, value in samples:
                found[name, labels] = found.get((name, labels), 0.0) + value
        for (name, text, metric_type), values in sums.items():
            metric = Metric(name, text, metric_type)
            for (sample, labels), value in values.items():
                if not sample.endswith("_created"):
                    metric.add_sample(sample, dict(labels), value)
            yield metric


class BothNames(Collector):
    """What a collector tells, also under the names that vLLM has for it."""

    def __init__(self, own: Collector) -> None:
        self._own = own

    def collect(self) -> Iterator[Metric]:
        yield from _Sum(_plain(self._own)).collect()


class EngineCollector(Collector):
    """The engine's own report, at the moment of the scrape."""

    def __init__(self, engine: AnyEngine, labels: Mapping[str, str]) -> None:
        self._engine = engine
        self._names = list(labels)
        self._values = list(labels.values())

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, key, text in _GAUGES:
            yield self._one(GaugeMetricFamily, name, text, stats.get(key))
        if "num_replicas" in stats:
            for name, key, text in _REPLICAS:
                yield self._one(GaugeMetricFamily, name, text, stats[key])
            yield self._one(CounterMetricFamily, "requests_moved", _MOVED, stats["num_moved"])
        yield self._cache_config()
        for name, key, text in _COUNTERS:
            yield self._one(CounterMetricFamily, name, text, stats.get(key))
        for name, key, text in _HISTOGRAMS:
            yield self._histogram(name, text, (stats.get("histograms") or {}).get(key))
        yield self._by_position(stats)
        yield from self._by_drafter(stats)

    def _one(
        self,
        family: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        value: float | None,
    ) -> Metric:
        metric = family(PREFIX + name, text, labels=self._names)
        metric.add_metric(self._values, float(value or 0))
        return metric

    def _cache_config(self) -> Metric:
        info = self._engine.info
        sizes = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
        text = "The size of the KV memory, in its labels."
        gauge = GaugeMetricFamily(PREFIX + "cache_config_info", text, labels=[*self._names, *sizes])
        gauge.add_metric([*self._values, *sizes.values()], 1.0)
        return gauge

    def _histogram(self, name: str, text: str, snapshot: Mapping[str, Any] | None) -> Metric:
        metric = HistogramMetricFamily(PREFIX + name, text, labels=self._names)
        if snapshot is not None:
            bounds = [*map(floatToGoString, snapshot["bounds"]), "+Inf"]
            buckets = list(zip(bounds, accumulate(snapshot["counts"]), strict=True))
            metric.add_metric(self._values, buckets, sum_value=snapshot["sum"])
        return metric

    def _by_position(self, stats: Mapping[str, Any]) -> Metric:
        name = PREFIX + "spec_decode_num_accepted_tokens_per_pos"
        text = "Accepted nodes by their depth in the draft."
        metric = CounterMetricFamily(name, text, labels=[*self._names, "position"])
        for position, accepted in enumerate(stats.get("accepted_per_position") or ()):
            metric.add_metric([*self._values, str(position)], float(accepted))
        return metric

    def _by_drafter(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        drafters: Mapping[str, Mapping[str, float]] = stats.get("drafters") or {}
        for key, text in (
            ("drafted", "Drafted nodes that were verified, by drafter."),
            ("accepted", "Drafted nodes that were accepted, by drafter."),
        ):
            name = f"{PREFIX}spec_decode_drafter_{key}_tokens"
            metric = CounterMetricFamily(name, text, labels=[*self._names, "drafter"])
            for drafter, counts in drafters.items():
                metric.add_metric([*self._values, drafter], float(counts.get(key, 0)))
            yield metric
