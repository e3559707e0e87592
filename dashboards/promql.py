"""What a PromQL expression reads: its metrics, and the labels it relies on.

No parser, a reader: it takes valid PromQL, which promtool and Prometheus judge in the tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<variable>\$\{?\w+\}?)
    | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    | (?P<number>[0-9.]+(?:e[+-]?[0-9]+)?[a-z]*)
    | (?P<mark>=~|!~|!=|==|>=|<=|.)
    """,
    re.VERBOSE,
)
_RANGE = re.compile(r"\[[^\]]*\]")
_GROUPING = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan", "Inf", "NaN"})
_AGGREGATIONS = frozenset(
    {
        *("sum", "min", "max", "avg", "count", "stddev", "stdvar", "group", "topk", "bottomk"),
        *("quantile", "count_values"),
    }
)


@dataclass(frozen=True, slots=True)
class Selector:
    """One `name{label="value", ...}`."""

    name: str
    labels: tuple[tuple[str, str], ...]
    """`(label, value as written)`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one expression reads."""

    selectors: tuple[Selector, ...]
    grouping: frozenset[str]
    """Labels that it groups or matches by."""


def read(expr: str) -> Reading:
    """Raises ValueError for a selector without a name."""
    tokens = [
        (match.lastgroup or "", match.group())
        for match in _TOKEN.finditer(_RANGE.sub("", expr))
        if not match.group().isspace()
    ]
    selectors: list[Selector] = []
    grouping: set[str] = set()
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        at += 1
        following = tokens[at][1] if at < len(tokens) else ""
        if kind == "name" and text in _GROUPING:
            if following == "(":
                end = _closing(tokens, at)
                grouping.update(t for k, t in tokens[at:end] if k == "name")
                at = end + 1
        elif kind == "name" and text not in _WORDS and text not in _AGGREGATIONS:
            if following == "(":
                continue  # a function
            matchers: list[tuple[str, str]] = []
            if following == "{":
                end = next(i for i in range(at, len(tokens)) if tokens[i][1] == "}")
                inside = tokens[at + 1 : end]
                matchers = [
                    (inside[i][1], inside[i + 2][1][1:-1])
                    for i in range(0, len(inside), 4)
                    if inside[i][0] == "name"
                ]
                at = end + 1
            selectors.append(Selector(text, tuple(matchers)))
        elif text == "{":
            raise ValueError(f"{expr}: a selector without a metric name")
    return Reading(tuple(selectors), frozenset(grouping))


def _closing(tokens: list[tuple[str, str]], opening: int) -> int:
    depth = 0
    for i in range(opening, len(tokens)):
        depth += {"(": 1, ")": -1}.get(tokens[i][1], 0)
        if depth == 0:
            return i
    raise ValueError("a parenthesis is not closed")
