"""Turns payloads and sums into Prometheus metrics: on vLLM's page, or on a port of our own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from vllm_ppbalance.metrics import PREFIX, SERIES, Payload, Series

logger = logging.getLogger("vllm.ppbalance")

LABELS = ("model_name", "engine")  # vLLM's own


class Sums(Protocol):
    """What a page of our own reads."""

    def counters(self) -> Payload:
        """All counters as they stand."""

    def gauges(self) -> Payload:
        """All gauges."""


class MetricsPage:
    """The series in one process's Prometheus registry.

    Ordinary counters and gauges: with several API servers prometheus_client keeps them in files,
    sums the counters of all processes and takes the gauge that was set last.
    """

    def __init__(self, registry: Any = None) -> None:
        import prometheus_client

        registry = registry or prometheus_client.REGISTRY
        self._metrics: dict[str, Any] = {}
        for series in SERIES:
            labels = (*LABELS, series.label) if series.label else LABELS
            name = PREFIX + series.name
            if series.kind == "counter":
                metric: Any = prometheus_client.Counter(
                    name, series.text, labels, registry=registry
                )
            else:
                metric = prometheus_client.Gauge(
                    name, series.text, labels, registry=registry, multiprocess_mode="mostrecent"
                )
            self._metrics[series.name] = metric

    def update(self, model_name: str, engine: str, payload: Mapping[str, Any]) -> None:
        """Show a payload; series of another version of the plugin are passed over."""
        for series in SERIES:
            for own, value in payload.get(series.name, {}).items():
                labels = (model_name, engine, own) if series.label else (model_name, engine)
                metric = self._metrics[series.name].labels(*labels)
                if series.kind == "counter":
                    metric.inc(value)
                else:
                    metric.set(value)


@functools.cache
def shared_page() -> MetricsPage:
    """The page in vLLM's registry: a process may make several engines, names only once."""
    return MetricsPage()


class _Collector:
    """Reads the sums at each scrape: nothing is kept, no files even with several API servers."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums

    def collect(self) -> Iterator[Any]:
        values = self._sums.counters() | self._sums.gauges()
        for series in SERIES:
            if series.name in values:
                yield _family(series, values[series.name])


def _family(series: Series, values: Mapping[str, float]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
    family = kind(PREFIX + series.name, series.text, labels=[series.label] if series.label else [])
    for own, value in dict(values).items():
        family.add_metric([own] if series.label else [], value)
    return family


def serve_page(sums: Sums, port: int) -> Any:
    """Serve `sums` on a port of localhost from a thread; one warning where that fails.

    Returns the server, None on failure.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(_Collector(sums))
        server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
    except (ImportError, OSError) as error:
        logger.warning("ppbalance: no metrics on port %d: %s. Serving goes on.", port, error)
        return None
    logger.info("ppbalance: metrics also on http://127.0.0.1:%d/metrics.", port)
    return server
