"""Pieces of an HTML page. Every text is escaped; ``Html`` marks what is HTML already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML and must not be escaped again."""


def text(value: object) -> Html:
    return value if isinstance(value, Html) else Html(escape(str(value)))


def tag(name: str, *content: object, css: str = "", **attributes: str) -> Html:
    """``<name class=css …>content</name>``."""
    if css:
        attributes["class"] = css
    given = "".join(
        f' {key.replace("_", "-")}="{escape(value)}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>{''.join(map(text, content))}</{name}>")


def join(parts: Iterable[object]) -> Html:
    return Html("".join(map(text, parts)))


def table(head: Sequence[object], rows: Iterable[Html], css: str = "") -> Html:
    """``rows`` are whole ``<tr>``s; the first column is a text, the others are numbers."""
    header = tag("tr", *(tag("th", cell, scope="col") for cell in head))
    body = tag("table", tag("thead", header), tag("tbody", *rows), css=css)
    return tag("div", body, css="scroll")


def row(first: object, *cells: object, css: str = "") -> Html:
    return tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in cells), css=css)


def section(title: str, *content: object, anchor: str, note: object = "") -> Html:
    lead = tag("p", note, css="note") if note else Html()
    return tag("section", tag("h2", title), lead, *content, id=anchor)


def figure(svg: str, caption: str) -> Html:
    """``svg`` without its XML header; the caption is what screen readers say, too."""
    picture = Html(svg.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1))
    return tag("figure", picture, tag("figcaption", caption))
