"""Live series of the metrics that `engine.metrics` declares, and how they leave the process.

Three ways out, all of them off the hot path:

- `Registry.render`: Prometheus text for the gateway's `/metrics`, up to the moment.
- `Registry.snapshot` and `merge`: a replica's series travel over a link, and the gateway shows them
  beside its own with the label `replica`.
- `RayExporter.export`: mirrors the series into `ray.util.metrics`, so that Ray's agents serve them.

A hot path asks for its series once and keeps it: `observe`, `inc` and `set` are then an attribute
access and an addition. Series are written by one thread; reading them from another is safe under
the interpreter's lock, though one histogram may be read between its count and its sum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

from engine.metrics import CATALOGUE, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `Registry.render` returns."""

Labels = tuple[str, ...]
"""Label values in the order of the metric's declaration."""


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Raises ValueError for a negative amount."""
        if amount < 0:
            raise ValueError(
                f"counter increment {amount}: must be 0 or more, use a gauge to go down"
            )
        self.value += amount


class Gauge:
    """A number that is what it is now."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = float(value)

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def dec(self, amount: float = 1.0) -> None:
        self.value -= amount


class Histogram:
    """Observations counted by bucket."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of each bucket by itself; the last one is above every bound."""

        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_many(self, values: Iterable[float]) -> None:
        counts, bounds, total = self.counts, self.bounds, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.sum += total

    @property
    def count(self) -> int:
        return sum(self.counts)


class CappedLabel:
    """Values of a label that clients or operators choose, kept from making series without end.

    The first `limit` values keep their names, all later ones are `other`. What got a name keeps it
    while the process lives: a series that changed hands would count two things.
    """

    OTHER = "other"

    def __init__(self, limit: int = 1000) -> None:
        """Raises ValueError for a limit below 0."""
        if limit < 0:
            raise ValueError(f"label limit {limit}: must be 0 or more")
        self._limit = limit
        self._named: set[str] = set()

    def __call__(self, value: str) -> str:
        """The label value for `value`."""
        if value in self._named:
            return value
        if len(self._named) >= self._limit:
            return self.OTHER
        self._named.add(value)
        return value


Series = Counter | Gauge | Histogram
_S = TypeVar("_S", Counter, Gauge, Histogram)

# What `snapshot` and `merge` hold of a series: its value, or [sum, count of each bucket].
_Value = float | list[float]


class Registry:
    """The series of one process, and those of the replicas it shows."""

    def __init__(
        self, catalogue: Mapping[str, Metric] = CATALOGUE, *, replica: str | None = None
    ) -> None:
        """`replica`, this process's own id, is put on its own series when they are rendered. Behind
        a balancer scrapes reach now one gateway and now another, which must not look like one."""
        self.catalogue = catalogue
        self.replica = replica
        self._own: dict[str, dict[Labels, Series]] = {}
        self._merged: dict[str, dict[str, list[tuple[Labels, _Value]]]] = {}
        self._bounds = {
            m.name: [repr(float(b)) for b in m.buckets] + ["+Inf"]
            for m in catalogue.values()
            if m.kind == "histogram"
        }

    def counter(self, name: str, /, **labels: str) -> Counter:
        """The series of a declared counter, at 0 when new.

        Raises ValueError for a name that is not declared as a counter or labels that are not its.
        """
        return self._series(Counter, name, labels)

    def gauge(self, name: str, /, **labels: str) -> Gauge:
        """The series of a declared gauge. Raises as `counter` does."""
        return self._series(Gauge, name, labels)

    def histogram(self, name: str, /, **labels: str) -> Histogram:
        """The series of a declared histogram. Raises as `counter` does."""
        return self._series(Histogram, name, labels)

    def remove(self, name: str, /, **labels: str) -> None:
        """End one series, for example of a model that was deleted. One that never was is fine."""
        metric = self._declared(name, labels)
        self._own.get(name, {}).pop(tuple(labels[key] for key in metric.labels), None)

    def _declared(self, name: str, labels: Mapping[str, str]) -> Metric:
        metric = self.catalogue.get(name)
        if metric is None:
            raise ValueError(
                f"metric {name!r} is not in the catalogue: declare it in engine.metrics"
            )
        if set(labels) != set(metric.labels):
            raise ValueError(
                f"metric {name!r} has the labels {list(metric.labels)}, not {sorted(labels)}"
            )
        return metric

    def _series(self, kind: type[_S], name: str, labels: Mapping[str, str]) -> _S:
        metric = self._declared(name, labels)
        if metric.kind != kind.__name__.lower():
            raise ValueError(f"metric {name!r} is a {metric.kind}, not a {kind.__name__.lower()}")
        values = tuple(labels[key] for key in metric.labels)
        family = self._own.setdefault(name, {})
        if values not in family:
            new = {"counter": Counter, "gauge": Gauge}.get(metric.kind)
            family[values] = new() if new else Histogram(metric.buckets)
        return cast("_S", family[values])

    def series(self) -> Iterator[tuple[Metric, Labels, Series]]:
        """This process's own series, in the order of the catalogue."""
        for metric in self.catalogue.values():
            for values, series in list(self._own.get(metric.name, {}).items()):
                yield metric, values, series

    def snapshot(self) -> list[Any]:
        """This process's own series as lists and numbers: `[name, label values, value]`."""
        return [
            [metric.name, list(values), _value(series)] for metric, values, series in self.series()
        ]

    def merge(self, replica: str, snapshot: Sequence[Sequence[Any]]) -> int:
        """Show `snapshot` under the label `replica=replica`, in place of that replica's last one.

        Returns how many of its series are left out because this process declares them differently
        or not at all, as happens between two versions during an update. Raises ValueError for what
        is no snapshot; the last one then stays.
        """
        shown: dict[str, list[tuple[Labels, _Value]]] = {}
        left_out = 0
        for name, values, value in snapshot:
            if not isinstance(name, str) or not isinstance(values, (list, tuple)):
                raise ValueError(f"snapshot of {replica}: {name!r} {values!r} is not a series")
            metric = self.catalogue.get(name)
            labels = tuple(str(v) for v in cast("Sequence[Any]", values))
            if metric is None or len(labels) != len(metric.labels) or not _fits(metric, value):
                left_out += 1
                continue
            shown.setdefault(name, []).append((labels, value))
        self._merged[replica] = shown
        return left_out

    def family(self, name: str) -> Iterator[tuple[str | None, dict[str, str], _Value]]:
        """One metric's series, this process's and those it shows: `(replica, labels, value)`.

        `replica` is None for this process's own. A histogram's value is `[sum, *bucket counts]`.
        Nothing for a name that is not declared.
        """
        metric = self.catalogue.get(name)
        if metric is None:
            return
        for values, series in list(self._own.get(name, {}).items()):
            yield None, dict(zip(metric.labels, values, strict=True)), _value(series)
        for replica, shown in list(self._merged.items()):
            for values, value in shown.get(name, ()):
                yield replica, dict(zip(metric.labels, values, strict=True)), value

    def drop(self, replica: str) -> None:
        """Stop showing a replica that is gone. Unknown ones are fine."""
        self._merged.pop(replica, None)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Replicas whose series are shown."""
        return tuple(self._merged)

    def render(self) -> bytes:
        """Everything in the Prometheus text format 0.0.4, to be sent as `CONTENT_TYPE`."""
        lines: list[str] = []
        merged = list(self._merged.items())
        mine = () if self.replica is None else (self.replica,)
        for metric in self.catalogue.values():
            name = metric.name
            own = (*metric.labels, "replica") if mine else metric.labels
            rows = [
                (_label_text(own, (*values, *mine)), _value(series))
                for values, series in list(self._own.get(name, {}).items())
            ]
            for replica, shown in merged:
                names = (*metric.labels, "replica")
                rows += [
                    (_label_text(names, (*values, replica)), value)
                    for values, value in shown.get(name, ())
                ]
            if not rows:
                continue
            lines.append(f"# HELP {name} {_escape_help(metric.help)}")
            lines.append(f"# TYPE {name} {metric.kind}")
            for labels, value in rows:
                if isinstance(value, list):
                    self._render_histogram(lines, name, labels, value)
                else:
                    lines.append(
                        f"{name}{{{labels}}} {_number(value)}"
                        if labels
                        else f"{name} {_number(value)}"
                    )
        lines.append("")
        return "\n".join(lines).encode()

    def _render_histogram(
        self, lines: list[str], name: str, labels: str, value: list[float]
    ) -> None:
        total, *counts = value
        before = f"{labels}," if labels else ""
        seen = 0
        for bound, count in zip(self._bounds[name], counts, strict=True):
            seen += int(count)
            lines.append(f'{name}_bucket{{{before}le="{bound}"}} {seen}')
        braces = f"{{{labels}}}" if labels else ""
        lines.append(f"{name}_sum{braces} {_number(total)}")
        lines.append(f"{name}_count{braces} {seen}")


def _value(series: Series) -> _Value:
    if isinstance(series, Histogram):
        return [series.sum, *series.counts]
    return series.value


def _fits(metric: Metric, value: object) -> bool:
    if metric.kind != "histogram":
        return isinstance(value, (int, float))
    if not isinstance(value, (list, tuple)):
        return False
    numbers = cast("Sequence[object]", value)
    # [sum, one count for each bound, the count above them all]
    return len(numbers) == len(metric.buckets) + 2 and all(
        isinstance(number, (int, float)) for number in numbers
    )


def _number(value: float) -> str:
    value = float(value)
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escape_value(text: str) -> str:
    if "\\" in text or '"' in text or "\n" in text:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return text


def _label_text(names: Sequence[str], values: Sequence[str]) -> str:
    return ",".join(
        f'{name}="{_escape_value(value)}"' for name, value in zip(names, values, strict=True)
    )


class _SilentCounter(Counter):
    __slots__ = ()

    def inc(self, amount: float = 1.0) -> None:
        pass


class _SilentGauge(Gauge):
    __slots__ = ()

    def set(self, value: float) -> None:
        pass

    def inc(self, amount: float = 1.0) -> None:
        pass

    def dec(self, amount: float = 1.0) -> None:
        pass


class _SilentHistogram(Histogram):
    __slots__ = ()

    def observe(self, value: float, times: int = 1) -> None:
        pass

    def observe_many(self, values: Iterable[float]) -> None:
        pass


class SilentRegistry(Registry):
    """For a process whose metrics are switched off: its series take anything and stay at 0."""

    def _series(self, kind: type[_S], name: str, labels: Mapping[str, str]) -> _S:
        self._declared(name, labels)
        return cast("_S", _SILENT[kind])


_SILENT: dict[type[Series], Series] = {
    Counter: _SilentCounter(),
    Gauge: _SilentGauge(),
    Histogram: _SilentHistogram(()),
}


class _RayMetric(Protocol):
    def set(self, value: float, tags: dict[str, str]) -> None: ...


class RayMetrics(Protocol):
    """What is used of `ray.util.metrics`."""

    def Gauge(self, name: str, description: str, tag_keys: tuple[str, ...]) -> _RayMetric: ...


class RayExporter:
    """Mirrors a registry's own series into `ray.util.metrics`. Call `export` every few seconds.

    Ray prefixes `ray_` and its agents serve what they got up to ten seconds earlier. `:` is not
    allowed in its names and becomes `_`: `vllm:num_requests_running` is served as
    `ray_vllm_num_requests_running`.

    Everything becomes gauges of Ray that hold what the series hold, set when that changed:

    - Of a counter, its total. Ray's own Counter takes only increases above 0: a counter would not
      exist before its first event, and `rate` would never see that one.
    - Of a histogram `NAME_bucket{le}`, `NAME_sum` and `NAME_count`, cumulative, so that
      `histogram_quantile(q, rate(ray_NAME_bucket[1m]))` works as usual. Ray's own Histogram takes
      single observations, ships only bucket counts to the agent and rebuilds the sum from the
      middles of the buckets: slower here and wrong there.

    Ray repeats the last value while the process lives and forgets it two reporting intervals later.
    What it got before its agent listened is lost, and an agent on a busy machine may take a minute
    to listen: of the first `EARLY_EXPORTS` each `REPEAT_EARLY`th says all of them, so that sums
    that belong together begin together; from then on each repeats one series in `REPEAT_EVERY`.

    tags: put on every series; name the replica here, as Ray's agent keeps processes apart only by
    worker id. Not to be called on the hot path: a few microseconds a changed series or bucket.
    """

    REPEAT_EVERY = 12
    REPEAT_EARLY = 3
    EARLY_EXPORTS = 24

    def __init__(
        self, registry: Registry, tags: Mapping[str, str], ray_metrics: RayMetrics | None = None
    ) -> None:
        self._registry = registry
        self._exports = 0
        self._again = False
        self._tags = dict(tags)
        self._ray = ray_metrics or cast("RayMetrics", import_module("ray.util.metrics"))
        self._metrics: dict[str, _RayMetric] = {}
        self._exported: dict[tuple[str, Labels], float] = {}

    def export(self) -> None:
        """Bring Ray's figures up to date with the registry."""
        self._exports = turn = self._exports + 1
        early = turn <= self.EARLY_EXPORTS
        for number, (metric, values, series) in enumerate(self._registry.series()):
            turns = turn % self.REPEAT_EARLY if early else (number - turn) % self.REPEAT_EVERY
            self._again = turns == 0
            if isinstance(series, Histogram):
                self._export_histogram(metric, values, series)
            else:
                self._set(metric, metric.name, metric.labels, values, series.value)

    def _export_histogram(self, metric: Metric, values: Labels, series: Histogram) -> None:
        name, labels = metric.name, metric.labels
        seen = 0
        counts = list(series.counts)
        for bound, count in zip((*map(repr, series.bounds), "+Inf"), counts, strict=True):
            seen += count
            self._set(metric, f"{name}_bucket", (*labels, "le"), (*values, bound), seen)
        self._set(metric, f"{name}_sum", labels, values, series.sum)
        self._set(metric, f"{name}_count", labels, values, seen)

    def _set(self, metric: Metric, name: str, labels: Labels, values: Labels, value: float) -> None:
        if not self._again and self._exported.get((name, values)) == value:
            return
        found = self._gauge(metric, name, labels)
        found.set(value, self._tags_of(labels, values))
        self._exported[name, values] = value

    def _tags_of(self, labels: Labels, values: Labels) -> dict[str, str]:
        return {**self._tags, **dict(zip(labels, values, strict=True))}

    def _gauge(self, metric: Metric, name: str, labels: Labels) -> _RayMetric:
        found = self._metrics.get(name)
        if found is None:
            keys = tuple(dict.fromkeys((*self._tags, *labels)))
            found = self._ray.Gauge(name.replace(":", "_"), metric.help, keys)
            self._metrics[name] = found
        return found
