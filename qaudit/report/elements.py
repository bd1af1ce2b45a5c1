"""Elements of HTML and SVG, made so that no text can become an element.

`Html` is for a browser, `str` is text of any origin; the type checker keeps them apart, and `text`
is the only way from one to the other.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import NewType

from qaudit.report.format import printable

Html = NewType("Html", str)
Value = str | int | float | None

EMPTY = Html("")
_VOID = frozenset({"meta", "br"})
_LEAVES = frozenset({"path", "line", "rect", "circle"})  # of SVG, which may close themselves


def text(words: str) -> Html:
    """Escape words and their control characters."""
    return Html(html.escape(printable(words)))


def element(tag: str, *inner: Html, **attributes: Value) -> Html:
    """Return an element; `class_` is written `class`, `data_x` is `data-x`, None is left out."""
    opened = tag + "".join(_attribute(k, v) for k, v in attributes.items() if v is not None)
    if tag in _VOID:
        return Html(f"<{opened}>")
    if tag in _LEAVES and not inner:
        return Html(f"<{opened}/>")
    return Html(f"<{opened}>{''.join(inner)}</{tag}>")


def joined(parts: Iterable[Html], between: str = "") -> Html:
    return Html(between.join(parts))


def unseen(words: str) -> Html:
    """Return words for screen readers alone."""
    return element("span", text(words), class_="unseen")


def _attribute(name: str, value: Value) -> str:
    key = name.rstrip("_").replace("_", "-")
    number = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return f' {key}="{text(number)}"'
