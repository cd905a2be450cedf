"""Prometheus metrics: the core's counters at the moment of a scrape, and the server's own counts.

Streams observe a value for every token or so, and all of them do it on the event loop's thread.
Hence the histograms here, which are a list and a sum without locks, instead of those of
prometheus_client, which renders them.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from stoop.server import metric_names as names
from stoop.server.hooks import Metrics
from stoop.server.metric_names import Metric
from stoop.version import __version__

NAME_SETS = ("stoop", "vllm")  # of --metrics-names


class Core(Protocol):
    """What is read of an `AsyncLLM`."""

    config: Any

    def metrics(self) -> dict[str, Any]: ...

    @property
    def num_open(self) -> int: ...

    @property
    def healthy(self) -> bool: ...

    @property
    def state(self) -> str: ...


class Times(Protocol):
    """A request's moments, in seconds on one clock. None: it did not come to that."""

    @property
    def arrival(self) -> float: ...

    @property
    def admitted(self) -> float | None: ...

    @property
    def first_token(self) -> float | None: ...

    @property
    def last_token(self) -> float | None: ...

    @property
    def finished(self) -> float | None: ...


class Histogram:
    """Counts by bucket, and the sum of what was observed."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds  # upper ones, included in their bucket
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus has them: each bucket includes all smaller ones."""
        total, found = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class CoreCounts:
    """The core's counters over all its processes: a restart begins at 0, but they must not fall.

    What a process counted after the last scrape before its end is lost.
    """

    def __init__(self) -> None:
        self._before: dict[Any, float] = {}  # sums of processes that ended
        self._now: dict[Any, float] = {}  # of the process that is counted now
        self._process: object = None

    def take(self, found: Mapping[str, Any], ready: bool) -> dict[Any, float]:
        """Totals by key, or by (key, label) of groups; `found` may lack all of them.

        Until a process is `ready`, the numbers are those of the one before it.
        """
        process = found.get("core_pid", self._process) if ready else self._process
        if process != self._process:
            for key, value in self._now.items():
                self._before[key] = self._before.get(key, 0) + value
            self._now = {}
        self._process = process
        for key, value in _flat(found).items():
            # Tokens that a stop string dropped are taken back after they were counted.
            self._now[key] = max(value, self._now.get(key, 0))
        keys = self._before.keys() | self._now.keys()
        return {key: self._before.get(key, 0) + self._now.get(key, 0) for key in keys}


def _flat(found: Mapping[str, Any]) -> dict[Any, float]:
    """The counters of a snapshot; those of a list or dictionary by (key, label)."""
    flat: dict[Any, float] = {
        metric.key: found[metric.key] for metric in names.CORE_COUNTERS if metric.key in found
    }
    for metric in names.CORE_COUNTER_GROUPS:
        group = found.get(metric.key, ())
        items: Iterable[tuple[Any, float]] = enumerate(group)
        if isinstance(group, Mapping):  # whose keys are labels as they are
            items = ((str(label), count) for label, count in group.items())
        flat.update({(metric.key, label): count for label, count in items})
    return flat


class ServerMetrics(Metrics):
    """What the server counts, and how it is shown. Used on the event loop's thread only."""

    def __init__(self, llm: Core, model_name: str, vllm_names: bool = False) -> None:
        self.llm = llm
        self.num_requests = 0
        self.num_cached_tokens = 0
        self.http_open: Callable[[], int] = lambda: 0  # HTTP requests being answered
        self.num_finished = dict.fromkeys(names.FINISH_REASONS, 0)
        self.num_refused: dict[int, int] = {}
        self.histograms = {
            metric.key: Histogram(tuple(metric.buckets)) for metric in names.HISTOGRAMS
        }
        self._first_token = self.histograms["first_token"]
        self._inter_token = self.histograms["inter_token"]
        self._registry = CollectorRegistry()
        self._registry.register(_Exposition(self, model_name, vllm_names))
        ProcessCollector(registry=self._registry)  # memory, CPU time and files of the server

    def request_arrived(self) -> None:
        self.num_requests += 1

    def refused(self, code: int) -> None:
        self.num_refused[code] = self.num_refused.get(code, 0) + 1

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def inter_token(self, seconds: float, count: int = 1) -> None:
        if count > 0:
            self._inter_token.observe(seconds / count, count)

    def observe(
        self,
        times: Times,
        *,
        num_prompt: int,
        num_cached: int | None,
        num_output: int,
        finish_reason: str,
        n: int = 1,
        max_tokens: int | None = None,
    ) -> None:
        self.num_finished[finish_reason] = self.num_finished.get(finish_reason, 0) + 1
        self.num_cached_tokens += num_cached or 0
        seen = self.histograms
        seen["num_prompt"].observe(num_prompt)
        seen["num_output"].observe(num_output)
        seen["params_n"].observe(n)
        if max_tokens is not None:
            seen["params_max_tokens"].observe(max_tokens)
        for key, seconds in intervals(times).items():
            seen[key].observe(seconds)
        decode = intervals(times).get("decode")
        if decode is not None and num_output > n:
            seen["per_output_token"].observe(decode * n / (num_output - n))

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


def intervals(times: Times) -> dict[str, float]:
    """The seconds of each part of a request that it came to; traces show them, too."""
    start, admitted = times.arrival, times.admitted
    found = {
        "e2e": (start, times.finished),
        "queue": (start, admitted),
        "prefill": (admitted, times.first_token),
        "decode": (times.first_token, times.last_token),
        "inference": (admitted, times.last_token),
    }
    return {
        key: max(end - begin, 0.0)
        for key, (begin, end) in found.items()
        if begin is not None and end is not None
    }


class _Exposition(Collector):
    """Turns the counts into metric families, at every scrape."""

    def __init__(self, metrics: ServerMetrics, model_name: str, vllm: bool) -> None:
        self._metrics = metrics
        self._vllm = vllm
        self._labels = {"model_name": model_name} | ({"engine": "0"} if vllm else {})
        self._counts = CoreCounts()
        self._num_restarts = 0

    def describe(self) -> list[Any]:
        return []  # else registering would scrape

    def collect(self) -> Iterator[Any]:
        llm, vllm = self._metrics.llm, self._vllm
        try:
            found = llm.metrics()
        except Exception:  # a scrape must work while the core is down
            found = {}
        for metric in names.CORE_GAUGES:
            if found.get(metric.key) is not None:
                yield from self._gauge(metric, float(found[metric.key]))
        totals = self._counts.take(found, llm.state == "ready")
        for metric in names.CORE_COUNTERS:
            yield from self._counter(metric, {None: totals.get(metric.key, 0)})
        first = 0 if vllm else 1
        for metric in names.CORE_COUNTER_GROUPS:
            chosen = {key[1]: value for key, value in totals.items() if key[0] == metric.key}
            yield from self._counter(
                metric,
                {
                    label + first if isinstance(label, int) else label: value
                    for label, value in chosen.items()
                },
            )
        self._num_restarts = max(self._num_restarts, found.get("num_restarts", 0))
        yield from self._counter(names.RESTARTS, {None: self._num_restarts})
        yield from self._gauge(names.HEALTHY, float(bool(llm.healthy)))
        yield from self._gauge(names.OPEN, float(llm.num_open))
        yield from self._own()
        yield from self._info(found)

    def _own(self) -> Iterator[Any]:
        """What the server counted itself."""
        counts = self._metrics
        yield from self._gauge(names.HTTP_OPEN, float(counts.http_open()))
        yield from self._counter(names.REQUESTS, {None: counts.num_requests})
        yield from self._counter(names.CACHED, {None: counts.num_cached_tokens})
        yield from self._counter(names.FINISHED, counts.num_finished)
        yield from self._counter(names.REFUSED, counts.num_refused)
        for metric in names.HISTOGRAMS:
            histogram = counts.histograms[metric.key]
            for name in metric.names(self._vllm):
                family = HistogramMetricFamily(name, metric.help, labels=list(self._labels))
                family.add_metric(
                    list(self._labels.values()), histogram.cumulative(), histogram.sum
                )
                yield family

    def _gauge(self, metric: Metric, value: float, **labels: str) -> Iterator[Any]:
        labels = self._labels | labels
        for name in metric.names(self._vllm):
            family = GaugeMetricFamily(name, metric.help, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family

    def _counter(self, metric: Metric, values: Mapping[Any, float]) -> Iterator[Any]:
        label = metric.label_name(self._vllm)
        labels = [*self._labels, *([label] if label else [])]
        for name in metric.names(self._vllm):
            family = CounterMetricFamily(name, metric.help, labels=labels)
            for key, value in values.items():
                family.add_metric(
                    [*self._labels.values(), *([str(key)] if label else [])], float(value)
                )
            yield family

    def _info(self, found: Mapping[str, Any]) -> Iterator[Any]:
        config = self._metrics.llm.config
        cache, device, spec = config.cache, config.device, config.spec
        yield from self._gauge(
            names.CACHE_INFO,
            1.0,
            block_size=str(cache.block_size),
            num_gpu_blocks=str(found.get("kv_cache_blocks", "")),
            cache_dtype=device.kv_dtype,
            enable_prefix_caching=str(cache.enable_prefix_caching),
            gpu_memory_utilization=str(cache.gpu_memory_utilization),
        )
        yield from self._gauge(
            names.INFO,
            1.0,
            version=__version__,
            device=device.device,
            dtype=device.dtype,
            attention_backend=config.attention_backend,
            graph_mode=config.graph.mode,
            spec_method=spec.method if spec else "none",
            num_speculative_tokens=str(spec.num_drafts if spec else 0),
        )
        policy = found.get(names.POLICY_INFO.key)
        if policy is not None:
            yield from self._gauge(names.POLICY_INFO, 1.0, policy=policy)
