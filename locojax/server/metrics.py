"""Prometheus metrics: what the HTTP side counts itself, and what the engine reports, as text.

The text format, its escaping and its content negotiation come from prometheus_client (pure Python, 60 kB, no
dependencies) with a registry of our own: the library's global one would be shared by every server of a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counts requests, and turns the service's status into metrics when asked.

    Args:
      status: `Service.status`.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]]):
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "locojax_requests", "HTTP requests answered", ["route", "method", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "locojax_request_seconds",
            "Time to answer, long polls included",
            ["route"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(_StatusCollector(status))

    def count(self, route: str, method: str, status: int, seconds: float) -> None:
        """A request was answered. `route` is the template, not the path: ids would make endless series."""
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """(body, content type) in the format that `accept` asks for."""
        encode, content_type = choose_encoder(accept or "")
        return encode(self._registry), content_type


class _StatusCollector:
    """The service's status, read anew at each scrape."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]):
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        engine = status["engine"]
        ready = GaugeMetricFamily("locojax_engine_ready", "1 when the engine process answers")
        ready.add_metric([], float(engine["state"] == "ready"))
        yield ready
        restarts = CounterMetricFamily("locojax_engine_restarts", "Starts of the engine process after the first")
        restarts.add_metric([], engine["num_restarts"])
        yield restarts
        yield _labelled("locojax_futures", "Futures by state", "state", status["futures"])
        yield _labelled("locojax_engine", "Gauges of the engine process", "name", engine["gauges"])
        yield _labelled("locojax_queued_operations", "Operations waiting, by model", "model", engine["queues"])
        yield _labelled("locojax_engine_events", "Running totals of the engine", "name", engine["totals"], total=True)
        yield _labelled(
            "locojax_engine_phase_seconds", "Time of the engine by phase", "phase", engine["seconds"], total=True
        )
        for name in ("sessions", "models"):
            gauge = GaugeMetricFamily(f"locojax_{name}", f"Live {name}")
            gauge.add_metric([], len(status[name]))
            yield gauge

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask the service, which may not have started."""
        return []


def _labelled(
    name: str, help: str, label: str, values: Mapping[str, float], *, total: bool = False
) -> GaugeMetricFamily | CounterMetricFamily:
    family = (CounterMetricFamily if total else GaugeMetricFamily)(name, help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
