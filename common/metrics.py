"""Counters, gauges and histograms of one process: kept by prometheus-client, scraped over HTTP, sent in heartbeats."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

EXPOSITION_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """One registry a process (or, in tests, a service)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}

    def counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
        """The counter of that name (without the _total that exposition adds), made on first use."""
        if name not in self._counters:
            self._counters[name] = Counter(f"dualpath_{name}", help, labels, registry=self.registry)
        return self._counters[name]

    def gauge(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Gauge:
        """The gauge of that name, made on first use."""
        if name not in self._gauges:
            self._gauges[name] = Gauge(f"dualpath_{name}", help, labels, registry=self.registry)
        return self._gauges[name]

    def histogram(self, name: str, help: str, bounds: Sequence[float], labels: tuple[str, ...] = ()) -> Histogram:
        """A new histogram with these upper bounds."""
        return Histogram(f"dualpath_{name}", help, labels, buckets=bounds, registry=self.registry)

    def observe_process(self, name: str, role: str, node: str) -> None:
        """CPU, memory and file descriptors of this process, and who it is."""
        ProcessCollector(registry=self.registry)
        self.gauge("process_info", "Who this process is", ("name", "role", "node")).labels(name, role, node).set(1)

    def exposition(self) -> bytes:
        """Everything, for Prometheus to scrape."""
        return generate_latest(self.registry)

    def snapshot(self) -> dict[str, float]:
        """Every value by its sample name without the dualpath_ prefix; labels follow in braces. Of a histogram the sum
        and the count."""
        values = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name.endswith(("_created", "_bucket")):
                    continue
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                name = sample.name.removeprefix("dualpath_")
                values[f"{name}{{{labels}}}" if labels else name] = sample.value
        return values
