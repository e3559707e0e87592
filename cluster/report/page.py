"""One self-contained HTML page: text, tables and charts, nothing fetched from anywhere."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell with an interval or a judgement beside its text."""

    text: str
    below: str = ""
    kind: str = ""
    """`good`, `bad` or nothing."""


Row = Sequence["str | Cell"]


@dataclass(slots=True)
class Page:
    """Collects the parts of a page in order."""

    title: str
    parts: list[str] = field(default_factory=list[str])

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{escape(text)}</h2>")

    def subheading(self, text: str) -> None:
        self.parts.append(f"<h3>{escape(text)}</h3>")

    def paragraph(self, text: str, kind: str = "") -> None:
        """`kind` is `note`, `soft` or nothing."""
        attribute = f' class="{kind}"' if kind else ""
        self.parts.append(f"<p{attribute}>{escape(text)}</p>")

    def bullets(self, lines: Sequence[str]) -> None:
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        self.parts.append(f"<ul>{items}</ul>")

    def table(self, head: Sequence[str], rows: Sequence[Row], *, caption: str = "") -> None:
        self.parts.append(table(head, rows, caption=caption))

    def words(self, head: Sequence[str], rows: Sequence[Row], *, broad: bool = False) -> None:
        """A table of text rather than numbers."""
        self.parts.append(table(head, rows, kind="words broad" if broad else "words"))

    def code(self, text: str) -> None:
        self.parts.append(f"<pre><code>{escape(text)}</code></pre>")

    def folded(self, summary: str, inner: str) -> None:
        """`inner` is HTML."""
        self.parts.append(f"<details><summary>{escape(summary)}</summary>{inner}</details>")

    def figures(self, figures: Sequence[str]) -> None:
        self.parts.append(f'<div class="charts">{"".join(figures)}</div>')

    def render(self) -> str:
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_style()}</style></head>"
            f"<body><main><h1>{escape(self.title)}</h1>\n" + "\n".join(self.parts) + "\n"
            "</main></body></html>\n"
        )


def figure(title: str, svg: str, caption: str, head: Sequence[str], rows: Sequence[Row]) -> str:
    """A chart, what to see in it, and its numbers for those who cannot see it."""
    numbers = (
        f"<details><summary>Figures of this plot</summary>{table(head, rows)}</details>"
        if rows
        else ""
    )
    return (
        f'<figure><h3>{escape(title)}</h3><div class="plot" tabindex="0">{svg}</div>'
        f"<figcaption>{escape(caption)}</figcaption>{numbers}</figure>"
    )


def table(head: Sequence[str], rows: Sequence[Row], *, caption: str = "", kind: str = "") -> str:
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(
        "<tr>" + "".join(_cell(cell, first=not column) for column, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    captioned = f"<caption>{escape(caption)}</caption>" if caption else ""
    attribute = f' class="{kind}"' if kind else ""
    return (
        f'<div class="wide" tabindex="0"><table{attribute}>{captioned}<thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def escape(text: str) -> str:
    return html.escape(text, quote=True)


def _cell(cell: str | Cell, *, first: bool) -> str:
    tag, scope = ("th", ' scope="row"') if first else ("td", "")
    if isinstance(cell, str):
        return f"<{tag}{scope}>{escape(cell)}</{tag}>"
    kind = f' class="{cell.kind}"' if cell.kind else ""
    below = f'<span class="low-high">{escape(cell.below)}</span>' if cell.below else ""
    return f"<{tag}{scope}{kind}>{escape(cell.text)}{below}</{tag}>"


def _style() -> str:
    return Path(__file__).with_name("page.css").read_text()
