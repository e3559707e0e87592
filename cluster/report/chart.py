"""Line, scatter and bar charts as inline SVG.

No library: a report is one file that takes its colours from the page's style sheet, so that it
follows dark mode, and that still opens in ten years. Every chart has a title and a description for
those who cannot see it; series differ by dash and marker as well as by colour.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WIDTH, HEIGHT = 680, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 14, 48
_LEGEND_LINE = 20
_MAX_POINTS = 6000
"""Of one scatter: more only make the file larger."""

NUM_COLOURS = 8
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 2", "6 2 1 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """`low` and `high` are widened to what is drawn; None takes them from it."""

    label: str
    """What it is, with its unit."""

    log: bool = False
    """Values at or below zero are then drawn at the lower edge."""

    low: float | None = None
    high: float | None = None
    tight: bool = False
    """End where the data ends, not at the next round number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points in drawing order; a point whose y is not finite breaks a line."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    kind: Literal["line", "step", "scatter"] = "line"
    colour: int = 0
    dash: int = 0
    marks: bool = False
    """A dot at each point of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One bar of parts, for `stacked`."""

    name: str
    parts: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A horizontal line at a stated value, such as a target."""

    name: str
    y: float


def chart(
    title: str,
    description: str,
    series: Sequence[Series],
    *,
    x: Axis,
    y: Axis,
    guides: Sequence[Guide] = (),
) -> str:
    """One SVG element. Without a finite point it says so instead of drawing an empty frame."""
    drawn = [each for each in series if _finite(each)]
    if not drawn:
        return _nothing(title, description)
    across = _Scale.over(x, [v for each in drawn for v in _finite_xs(each)], WIDTH, _LEFT, _RIGHT)
    legend = _Legend(drawn, guides)
    values = [v for each in drawn for v in _finite_ys(each)] + [guide.y for guide in guides]
    height = HEIGHT + legend.height
    up = _Scale.over(y, values, height, _BOTTOM + legend.height, _TOP)
    parts = [_open(title, description, height), _frame(across, up, x, y, height, legend.height)]
    for each in drawn:
        parts.append(_scatter(each, across, up) if each.kind == "scatter" else "")
    for each in drawn:
        parts.append(_line(each, across, up) if each.kind != "scatter" else "")
    for guide in guides:
        at = height - up.at(guide.y)
        parts.append(
            f'<line class="guide" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
    parts += [legend.draw(height), "</svg>"]
    return "".join(parts)


def stacked(
    title: str, description: str, stacks: Sequence[Stack], parts: Sequence[str], *, x: Axis
) -> str:
    """Horizontal bars whose pieces are `parts`, in order; every stack has one value a part."""
    totals = [sum(stack.parts) for stack in stacks]
    if not any(total > 0 for total in totals):
        return _nothing(title, description)
    left = max(_LEFT, 16 + 7 * max(len(stack.name) for stack in stacks))
    bar, gap = 26, 16
    legend = _Legend([Series(name=p, xs=(), ys=(), colour=i) for i, p in enumerate(parts)], ())
    plot = len(stacks) * (bar + gap) + gap
    height = _TOP + plot + _BOTTOM + legend.height
    across = _Scale.over(
        Axis(label=x.label, low=0.0, high=x.high), [0.0, *totals], WIDTH, left, _RIGHT
    )
    out = [_open(title, description, height)]
    bottom = _TOP + plot
    for tick in across.ticks():
        at = across.at(tick)
        out.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        out.append(_text(at, bottom + 16, number(tick), "middle"))
    out.append(_text((left + WIDTH - _RIGHT) / 2, bottom + 36, x.label, "middle"))
    for row, stack in enumerate(stacks):
        top = _TOP + gap + row * (bar + gap)
        out.append(_text(left - 8, top + bar / 2 + 4, stack.name, "end"))
        reached = 0.0
        for colour, (part, value) in enumerate(zip(parts, stack.parts, strict=True)):
            start, end = across.at(reached), across.at(reached + value)
            reached += value
            if end - start >= 0.2:
                out.append(
                    f'<rect class="f{colour % NUM_COLOURS}" x="{start:.1f}" y="{top}" '
                    f'width="{end - start:.1f}" height="{bar}"><title>'
                    f"{_escape(stack.name)}, {_escape(part)}: {number(value)}</title></rect>"
                )
    out += [legend.draw(height), "</svg>"]
    return "".join(out)


def number(value: float) -> str:
    """For a tick or a table: three significant digits, no exponent where it can be helped."""
    size = abs(value)
    if size < 1e-12 or not math.isfinite(value):
        return f"{0.0 if size < 1e-12 else value:g}"
    if size >= 1e7 or size < 1e-5:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(size)))
    text = f"{value:.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{int(text):,}" if text.lstrip("-").isdigit() and size >= 10_000 else text


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    log: bool
    start: float
    """Where `low` is drawn."""

    length: float

    @classmethod
    def over(
        cls, axis: Axis, values: Sequence[float], size: float, before: float, after: float
    ) -> _Scale:
        low, high = _limits(axis, values)
        return cls(low, high, axis.log, before, size - before - after)

    def at(self, value: float) -> float:
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + self.length * min(1.0, max(0.0, share))

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)


def _limits(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    if axis.log:
        values = [v for v in values if v > 0] or [0.1, 1.0]
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if axis.log:
        mantissas = _mantissas(low, high)
        if axis.low is None:
            low = _step_down(low, mantissas)
        if axis.high is None or high <= low:
            high = _step_up(max(high, low * 1.001), mantissas)
        return low, high
    if high <= low:
        high = low + (abs(low) or 1.0)
    if axis.high is None and not axis.tight:
        step = _step(low, high)
        high = step * math.ceil(round(high / step, 9))
    if axis.low is None:
        step = _step(low, high)
        low = step * math.floor(round(low / step, 9))
    return low, high


def _step(low: float, high: float) -> float:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)


def _ticks(low: float, high: float) -> list[float]:
    step = _step(low, high)
    first = math.ceil(round(low / step, 9))
    last = math.floor(round(high / step, 9))
    return [i * step for i in range(first, last + 1)]


def _mantissas(low: float, high: float) -> tuple[float, ...]:
    """Marks within one decade: the more, the fewer decades there are."""
    decades = math.log10(high / low) if high > low else 0.0
    if decades <= 1.0:
        return (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    return (1.0, 2.0, 5.0) if decades <= 4 else (1.0,)


def _step_down(value: float, mantissas: Sequence[float]) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max((m * power for m in mantissas if m * power <= value * 1.0001), default=power)


def _step_up(value: float, mantissas: Sequence[float]) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return min(m * power for m in (*mantissas, 10.0) if m * power >= value * 0.9999)


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    mantissas = _mantissas(low, high)
    ticks = [m * 10.0**e for e in range(first, last + 1) for m in mantissas]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def _open(title: str, description: str, height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{_escape(title)}. '
        f'{_escape(description)}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{_escape(title)}</title><desc>{_escape(description)}</desc>"
    )


def _nothing(title: str, description: str) -> str:
    return (
        _open(title, description, 60)
        + _text(WIDTH / 2, 34, "nothing was measured here", "middle")
        + "</svg>"
    )


def _frame(across: _Scale, up: _Scale, x: Axis, y: Axis, height: float, legend: float) -> str:
    bottom = height - _BOTTOM - legend
    parts: list[str] = []
    for tick in across.ticks():
        at = across.at(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(_text(at, bottom + 16, number(tick), "middle"))
    for tick in up.ticks():
        at = height - up.at(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(_text(_LEFT - 7, at + 4, number(tick), "end"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, bottom + 36, x.label, "middle"))
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        f"{_escape(y.label)}</text>"
    )
    return "".join(parts)


def _line(series: Series, across: _Scale, up: _Scale) -> str:
    height = up.start + up.length + _TOP
    path: list[str] = []
    dots: list[str] = []
    pen_down = False
    previous = 0.0
    for x, y in zip(series.xs, series.ys, strict=True):
        if not (math.isfinite(x) and math.isfinite(y)):
            pen_down = False
            continue
        at_x, at_y = across.at(x), height - up.at(y)
        if pen_down and series.kind == "step":
            path.append(f"H{at_x:.1f}")
            if at_y != previous:
                path.append(f"V{at_y:.1f}")
        else:
            path.append(f"{'L' if pen_down else 'M'}{at_x:.1f} {at_y:.1f}")
        if series.marks:
            dots.append(f"M{at_x:.1f} {at_y:.1f}h0")
        pen_down, previous = True, at_y
    dash = _DASHES[series.dash % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    colour = series.colour % NUM_COLOURS
    out = f'<path class="line s{colour}"{dashed} d="{"".join(path)}"/>'
    if dots:
        out += f'<path class="mark s{colour}" d="{"".join(dots)}"/>'
    return out


def _scatter(series: Series, across: _Scale, up: _Scale) -> str:
    """All points in one path: strokes without length whose round ends are the dots."""
    height = up.start + up.length + _TOP
    points = [
        (x, y)
        for x, y in zip(series.xs, series.ys, strict=True)
        if math.isfinite(x) and math.isfinite(y)
    ]
    if len(points) > _MAX_POINTS:
        # The extremes are what a tail is about, so they stay; the rest is thinned evenly.
        order = sorted(range(len(points)), key=lambda i: -points[i][1])
        kept = set(order[: _MAX_POINTS // 4])
        stride = math.ceil(len(points) / (_MAX_POINTS * 3 / 4))
        points = [p for i, p in enumerate(points) if i in kept or i % stride == 0]
    path = "".join(f"M{across.at(x):.1f} {height - up.at(y):.1f}h0" for x, y in points)
    return f'<path class="dot s{series.colour % NUM_COLOURS}" d="{path}"/>'


class _Legend:
    def __init__(self, series: Sequence[Series], guides: Sequence[Guide]) -> None:
        self._entries: list[tuple[str, Series | None]] = [(s.name, s) for s in series]
        self._entries += [(guide.name, None) for guide in guides]
        self._rows: list[list[tuple[float, str, Series | None]]] = [[]]
        at = float(_LEFT)
        for name, each in self._entries:
            wide = 34 + 7.0 * len(name)
            if at + wide > WIDTH and self._rows[-1]:
                self._rows.append([])
                at = float(_LEFT)
            self._rows[-1].append((at, name, each))
            at += wide

    @property
    def height(self) -> int:
        """The first line fits below the axis' label."""
        return _LEGEND_LINE * len(self._rows)

    def draw(self, height: float) -> str:
        parts: list[str] = []
        for row, entries in enumerate(self._rows):
            y = height - _LEGEND_LINE * (len(self._rows) - row) + 10
            for x, name, each in entries:
                parts.append(self._key(x, y, each))
                parts.append(_text(x + 24, y + 4, name, "start"))
        return "".join(parts)

    def _key(self, x: float, y: float, each: Series | None) -> str:
        if each is None:
            return f'<line class="guide" x1="{x}" x2="{x + 18}" y1="{y}" y2="{y}"/>'
        colour = each.colour % NUM_COLOURS
        if not each.xs and not each.ys:
            return f'<rect class="f{colour}" x="{x + 3}" y="{y - 6}" width="12" height="12"/>'
        if each.kind == "scatter":
            return f'<path class="key s{colour}" d="M{x + 9} {y}h0"/>'
        dash = _DASHES[each.dash % len(_DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        return f'<path class="line s{colour}"{dashed} d="M{x} {y}h18"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escape(text)}</text>'


def _finite_xs(series: Series) -> list[float]:
    return [x for x, y in zip(series.xs, series.ys, strict=True) if _both(x, y)]


def _finite_ys(series: Series) -> list[float]:
    return [y for x, y in zip(series.xs, series.ys, strict=True) if _both(x, y)]


def _finite(series: Series) -> bool:
    return any(_both(x, y) for x, y in zip(series.xs, series.ys, strict=True))


def _both(x: float, y: float) -> bool:
    return math.isfinite(x) and math.isfinite(y)


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
