"""Pages of metrics as a vLLM server gives them, made of pretend requests whose counts are known.

The text is prometheus_client's own (a registry for each server); names, labels and buckets are
those of vLLM's ``v1/metrics/loggers.py``. Nothing of the workbench is used: what the monitor says
is compared with what was counted here, request by request.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter as Counts
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
             10.0, 20.0, 40.0, 80.0)  # fmt: skip
LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
           240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5) if m * 10**e <= 131072)
REASONS = ("stop", "length", "abort", "error", "repetition")
# What the monitor does not look at and a page has nevertheless.
FURTHER_HISTOGRAMS = {
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_prefill_kv_computed_tokens": TOKENS,
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_params_n": (1, 2, 5, 10, 20),
}
FURTHER_COUNTERS = (
    "external_prefix_cache_queries", "external_prefix_cache_hits", "mm_cache_queries",
    "mm_cache_hits", "prompt_tokens_cached", "prompt_tokens_recomputed", "corrupted_requests",
    "estimated_flops_per_gpu", "estimated_read_bytes_per_gpu", "estimated_write_bytes_per_gpu",
    "kv_offload_load_bytes", "kv_offload_store_bytes", "lora_loads",
)  # fmt: skip


@dataclass
class Counted:
    """What happened on one engine, counted by hand."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    runs: Counts[int] = field(default_factory=Counts)  # accepted run -> events
    finished: Counts[str] = field(default_factory=Counts)
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)

    def accepted_at(self, slots: int) -> tuple[int, ...]:
        return tuple(sum(n for run, n in self.runs.items() if run > i) for i in range(slots))


class PretendServer:
    """A server with engines that does requests when told to."""

    def __init__(
        self,
        *,
        engines: Sequence[str] = ("0",),
        model: str = "beam-tiny",
        slots: int = 3,
        process: bool = True,
        further: bool = True,
    ) -> None:
        self.engines, self.model, self.slots = tuple(engines), model, slots
        self.counted = {engine: Counted() for engine in engines}
        self.registry = CollectorRegistry()
        if process:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)
            GCCollector(registry=self.registry)
        self._metrics: dict[str, Any] = {}
        labels = ("model_name", "engine")
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            self._make(Gauge, name, labels)
        self._make(Gauge, "num_requests_waiting_by_reason", (*labels, "reason"), ("capacity",))
        self._make(Gauge, "engine_sleep_state", (*labels, "sleep_state"), ("awake", "discard_all"))
        self._make(Gauge, "cache_config_info", (*labels, "block_size"), ("16",))
        for name in ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions",
                     "prompt_tokens", "generation_tokens",
                     *(FURTHER_COUNTERS if further else ())):  # fmt: skip
            self._make(Counter, name, labels)
        self._make(Counter, "request_success", (*labels, "finished_reason"), REASONS)
        if slots:
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
                self._make(Counter, f"spec_decode_{name}", labels)
            self._make(
                Counter, "spec_decode_num_accepted_tokens_per_pos", (*labels, "position"),
                tuple(map(str, range(slots))),
            )  # fmt: skip
        for name, buckets in (("time_to_first_token_seconds", TTFT),
                              ("inter_token_latency_seconds", PER_TOKEN),
                              ("request_time_per_output_token_seconds", PER_TOKEN),
                              ("e2e_request_latency_seconds", LATENCY),
                              *(FURTHER_HISTOGRAMS.items() if further else ())):  # fmt: skip
            self._make(Histogram, name, labels, buckets=buckets)

    def _make(
        self, kind: Any, name: str, labels: Sequence[str], values: Sequence[str] = (), **more: Any
    ) -> None:
        metric = kind(f"vllm:{name}", f"About {name}.", labels, registry=self.registry, **more)
        self._metrics[name] = metric
        for engine in self.engines:
            for value in values or [None]:
                metric.labels(self.model, engine, *([] if value is None else [value]))

    def _of(self, name: str, engine: str, *extra: str) -> Any:
        return self._metrics[name].labels(self.model, engine, *extra)

    def request(
        self,
        accepted: Sequence[int] = (),
        *,
        engine: str | None = None,
        prompt: int = 10,
        cached: int = 0,
        ttft: float = 0.05,
        step: float = 0.02,
        finish: str = "stop",
    ) -> None:
        """A whole request: its prefill gives a token, each step ``accepted[i]`` drafts and one."""
        engine = self.engines[0] if engine is None else engine
        seen = self.counted[engine]
        tokens = 1 + len(accepted) + sum(accepted)
        self._count(engine, "prompt_tokens", "prompt_tokens", prompt)
        self._count(engine, "generation_tokens", "generation_tokens", tokens)
        self._count(engine, "prefix_queries", "prefix_cache_queries", prompt)
        self._count(engine, "prefix_hits", "prefix_cache_hits", cached)
        if self.slots:
            self._count(engine, "drafts", "spec_decode_num_drafts", len(accepted))
            self._count(engine, "draft_tokens", "spec_decode_num_draft_tokens",
                        self.slots * len(accepted))  # fmt: skip
            self._count(engine, "accepted_tokens", "spec_decode_num_accepted_tokens",
                        sum(accepted))  # fmt: skip
            for run in accepted:
                seen.runs[run] += 1
                for slot in range(run):
                    self._of("spec_decode_num_accepted_tokens_per_pos", engine, str(slot)).inc()
        self._observe(engine, "ttft", "time_to_first_token_seconds", ttft)
        for _ in accepted:
            self._observe(engine, "itl", "inter_token_latency_seconds", step)
        if tokens > 1:
            self._observe(engine, "tpot", "request_time_per_output_token_seconds",
                          step * len(accepted) / (tokens - 1))  # fmt: skip
        self._observe(engine, "e2e", "e2e_request_latency_seconds", ttft + step * len(accepted))
        self._of("request_success", engine, finish).inc()
        seen.finished[finish] += 1

    def preempt(self, times: int = 1, *, engine: str | None = None) -> None:
        engine = self.engines[0] if engine is None else engine
        self._count(engine, "preemptions", "num_preemptions", times)

    def set(self, *, running: float = 0, waiting: float = 0, cache: float = 0.0,
            engine: str | None = None) -> None:  # fmt: skip
        engine = self.engines[0] if engine is None else engine
        self._of("num_requests_running", engine).set(running)
        self._of("num_requests_waiting", engine).set(waiting)
        self._of("kv_cache_usage_perc", engine).set(cache)

    def page(self) -> str:
        return generate_latest(self.registry).decode()

    def _count(self, engine: str, name: str, metric: str, amount: int) -> None:
        seen = self.counted[engine]
        setattr(seen, name, getattr(seen, name) + amount)
        self._of(metric, engine).inc(amount)

    def _observe(self, engine: str, name: str, metric: str, seconds: float) -> None:
        getattr(self.counted[engine], name).append(seconds)
        self._of(metric, engine).observe(seconds)


def bucketed(values: Sequence[float], bounds: Sequence[float]) -> list[int]:
    """How many values lie in each bucket (above the one bound, up to the next), the open one last:
    counted value by value."""
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[bisect.bisect_left(list(bounds), value)] += 1
    return counts


def realistic(engines: Sequence[str] = ("0",), slots: int = 7) -> PretendServer:
    """A server that has been at work for a while: about 43 metrics of vllm: a page."""
    server = PretendServer(engines=engines, slots=slots)
    for engine in engines:
        for n in range(40):
            server.request([n % (slots + 1), 3 % (slots + 1), 0], engine=engine, prompt=100 + n,
                           cached=n, ttft=0.004 * (n + 1), step=0.003 * (n % 9 + 1),
                           finish=REASONS[n % 2])  # fmt: skip
        server.set(running=12, waiting=3, cache=0.42, engine=engine)
        server.preempt(2, engine=engine)
    return server


def families(page: str) -> set[str]:
    """Names of the vllm: metrics of a page, as its TYPE lines have them, ``_created`` left out."""
    names = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE vllm:")}
    return {name for name in names if not name.endswith("_created")}


def wait_until(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)
