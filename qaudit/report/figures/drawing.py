"""A figure as data: paths, marks, labels and boxes in pixels of a canvas 860 wide.

`svg.py` renders it for the page and for files, `png.py` for viewers that show no SVG. What a part
looks like is its `kind`: names from the table in `style.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

WIDTH = 860
Point = tuple[float, float]


@dataclass(frozen=True)
class Path:
    """A line through points, or the area inside them."""

    points: tuple[Point, ...]
    kind: str
    closed: bool = False


@dataclass(frozen=True)
class Mark:
    """A mark at a point; `tip` has the lines that are shown when it is pointed at."""

    shape: str
    x: float
    y: float
    kind: str
    tip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Label:
    """Text whose baseline starts, ends or is centred at a point."""

    text: str
    x: float
    y: float
    kind: str = ""


@dataclass(frozen=True)
class Box:
    """A filled rectangle; `strength` is its opacity where boxes of one kind differ in it."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    strength: float | None = None


@dataclass(frozen=True)
class Series:
    """Parts that a legend entry hides and shows together, and that the keyboard walks along."""

    key: str
    parts: tuple[Part, ...]


Leaf = Path | Mark | Label | Box
Part = Leaf | Series


@dataclass(frozen=True)
class Swatch:
    """An entry of a legend: a mark, on its line where it has one, and what they stand for."""

    text: str
    mark: str = ""
    kind: str = ""
    line: str = ""
    series: str | None = None


@dataclass(frozen=True)
class Drawing:
    """A figure with its title, a note on how to read it, and its legend."""

    name: str
    title: str
    alt: str
    parts: tuple[Part, ...]
    height: float
    note: str = ""
    legend: tuple[Swatch, ...] = ()


def leaves(parts: Iterable[Part]) -> Iterator[Leaf]:
    for part in parts:
        if isinstance(part, Series):
            yield from leaves(part.parts)
        else:
            yield part


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Path:
    return Path(((x1, y1), (x2, y2)), kind)


def band(high: Sequence[Point], low: Sequence[Point], kind: str) -> Path:
    return Path((*high, *reversed(low)), f"band {kind}", closed=True)
