"""One figure: matplotlib draws it, and what it wrote becomes a small SVG, light or dark, or a PNG.

Colours are Okabe and Ito's, darkened (or lightened, on dark) until lines in them stand out from
the ground; they stay apart under every common colour vision. No figure needs colour: the marker
tells the method, too, and the line which of its schemes.

A figure is saved in its light colours. The dark file has others in their place, and the page
variables that follow its theme. The SVG has no style of its own, which the page's policy would
refuse, and one group for each artist that the page may hide, with the tips of its marks.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from qaudit.errors import MachineError
from qaudit.report.format import pixels_of, printable, shortened, width_of, wrapped
from qaudit.support.keys import INSTALL
from qaudit.types import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = {  # the variable of the page: its light and its dark colour
    "ground": ("#ffffff", "#0d1117"),
    "ink": ("#222222", "#e8e8e4"),
    "faint": ("#5d5d59", "#aaaaa4"),
    "c0": ("#004f9e", "#86aef8"),
    "c1": ("#d05500", "#ef9a3c"),
    "c2": ("#00906a", "#2fbf80"),
    "c3": ("#b0528c", "#dd8fbd"),
    "c4": ("#202020", "#e8e8e4"),
}
GROUND, INK, FAINT, *COLOURS = (light for light, _ in PALETTE.values())
MARKERS = "os^DvPX<>p"  # a star is a soup
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (7, 2, 2, 2, 2, 2)), (0, (2, 5)))
FONT = "system-ui, 'Noto Sans', 'DejaVu Sans', sans-serif"
FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Hiragino Sans", "PingFang SC", "Yu Gothic")
"""Fonts for scripts that the usual one of a PNG lacks, each used where it is installed."""

WIDTH, NAME_HEIGHT, LONGEST_NAME = 860, 15.0, 24
MARGIN = 14.0
DOTS = 100  # pixels of an inch
POINT = 72 / DOTS  # of a pixel
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "text.color": INK,
    "font.size": 12 * POINT,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.linewidth": POINT,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "grid.linewidth": POINT,
    "lines.linewidth": 1.6 * POINT,
    "lines.markersize": 7 * POINT,
    "xtick.bottom": False,
    "xtick.labelcolor": INK,
    "ytick.left": False,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}


class Chart:
    """A figure in pixels from its upper left corner, with what is shown at its marks.

    The height it is made with is that beneath title and note.
    """

    def __init__(self, title: str, note: str, height: float) -> None:
        from matplotlib.figure import Figure
        from matplotlib.transforms import Affine2D

        notes = wrapped(note, 128).splitlines()
        self.title, self.note = title, note
        self.top = MARGIN + 26 + 17 * len(notes)
        self.height = height + self.top
        self.tips: dict[str, list[str]] = {}  # by group
        self.names: dict[str, str] = {}  # of series that can be hidden
        self.figure = Figure((WIDTH / DOTS, self.height / DOTS), dpi=DOTS)
        flip = Affine2D().scale(1 / WIDTH, -1 / self.height).translate(0, 1)
        self._pixels = flip + self.figure.transFigure
        self.text(MARGIN, MARGIN + 13, title, fontsize=14 * POINT, fontweight="bold")
        for k, line in enumerate(notes):
            self.text(MARGIN, MARGIN + 33 + 17 * k, line, color=FAINT)

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        """Write a text with its baseline at a height."""
        self.figure.text(x, y, printable(text), transform=self._pixels, **style)

    def axes(
        self, left: float, right: float, top: float, bottom: float, name: str = "", **shared: Any
    ) -> Axes:
        """Add axes between pixels beneath the title; the name of what is upwards is above them."""
        top, bottom = self.top + top, self.top + bottom
        place = (left / WIDTH, 1 - bottom / self.height)
        size = ((right - left) / WIDTH, (bottom - top) / self.height)
        axes = self.figure.add_axes((*place, *size), facecolor="none", **shared)
        if name:
            self.text(MARGIN, top - 12, name, color=FAINT)
        return axes

    def group(self, series: str) -> str:
        """Return the name of another group of a series, which the page hides by its name."""
        group = f"series/{series}/{len(self.tips)}"
        self.tips[group] = []
        return group

    def marks(
        self,
        axes: Axes,
        series: str,
        points: Iterable[tuple[float, float, str]],
        *,
        filled: bool = True,
        **look: Any,
    ) -> None:
        """Draw marks, each with the lines of its tip; those that are not finite are left out."""
        finite = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
        if finite:
            group = self.group(series)
            x, y, self.tips[group] = map(list, zip(*finite, strict=True))
            fill = look.get("mfc", look["color"]) if filled else GROUND
            style = look | {"ls": "none", "mew": POINT, "mfc": fill}
            axes.plot(x, y, gid=group, clip_on=False, zorder=4, **style)

    def curve(
        self, axes: Axes, series: str, points: Sequence[tuple[float, Interval]], **look: Any
    ) -> None:
        """Draw a line through estimates and the band of their intervals."""
        style = {name: look[name] for name in ("color", "ls") if name in look}
        x, intervals = [x for x, _ in points], [interval for _, interval in points]
        low, high = bounds(intervals)
        band = {"color": look["color"], "alpha": 0.15, "lw": 0, "gid": self.group(series)}
        axes.fill_between(x, low, high, **band)
        estimates = [interval.estimate for interval in intervals]
        axes.plot(x, estimates, gid=self.group(series), zorder=3, **style)

    def whiskers(
        self, axes: Axes, series: str, points: Sequence[tuple[float, Interval]], **style: Any
    ) -> None:
        """Draw intervals as upright lines."""
        if points:
            x = [x for x, _ in points]
            low, high = bounds([interval for _, interval in points])
            axes.vlines(x, low, high, gid=self.group(series), lw=POINT, zorder=3, **style)

    def names_at(self, axes: Axes, x: float, values: Mapping[str, float]) -> None:
        """Name lines at their ends, where they end and apart from each other."""
        from matplotlib.lines import Line2D

        (left, _), (low, high) = axes.get_xlim(), axes.get_ylim()
        ends = {}
        for name, value in values.items():
            at = axes.transData.transform((left, min(max(value, low), high)))
            ends[name] = self.height * float(1 - at[1] / self.figure.bbox.height)
        style: dict[str, Any] = {"color": FAINT, "lw": 0.75 * POINT, "alpha": 0.6}
        for name, y in spread_out(ends, NAME_HEIGHT, self.top).items():
            line = Line2D((x + 4, x + 20), (ends[name], y), transform=self._pixels, **style)
            self.figure.add_artist(line)
            text = fitted(name, WIDTH - MARGIN - x - 24)
            self.text(x + 24, y + 4, text, fontweight="bold")

    def legend(self, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Draw marks and their meaning beneath the note, as many as fit into a line."""
        from matplotlib.lines import Line2D

        x = MARGIN
        for text, look in entries:
            if x + 26 + pixels_of(text) > WIDTH:
                break
            mark = Line2D([x + 6], [self.top + 4], transform=self._pixels, lw=0, **look)
            self.figure.add_artist(mark)
            self.text(x + 18, self.top + 8, text)
            x += 36 + pixels_of(text)

    def svg(self, name: str, alt: str) -> str:
        """Return the light variant."""
        from matplotlib import rc_context

        out = BytesIO()
        with rc_context({"svg.hashsalt": name}):  # keeps what it refers to apart from other figures
            self.figure.savefig(out, format="svg", metadata={"Date": None})
        return _slim(out.getvalue(), alt, self)

    def png(self) -> bytes:
        out = BytesIO()
        self.figure.savefig(out, format="png", dpi=1.6 * DOTS, metadata={"Software": None})
        return out.getvalue()


@contextmanager
def drawing() -> Iterator[None]:
    """Load matplotlib, give it our style, and keep it from complaining about letters.

    It is imported without MPLBACKEND: a backend that is not installed fails the import.
    """
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        matplotlib = importlib.import_module("matplotlib")
        fonts = importlib.import_module("matplotlib.font_manager")
    except ImportError as error:
        raise MachineError(
            f"pictures need matplotlib, which cannot be imported: {error}",
            hint=INSTALL,
        ) from error
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    installed = set(fonts.get_font_names())
    families = ["DejaVu Sans", *(font for font in FONTS if font in installed)]
    with matplotlib.rc_context({**STYLE, "font.family": families}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def looks(schemes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Give each scheme its method's colour and marker, and within the method a line of its own.

    A method with more schemes than there are lines goes on with markers that no other has.
    """
    methods: dict[str, list[str]] = {}
    for scheme in schemes:
        methods.setdefault(scheme.partition("-")[0], []).append(scheme)
    return {
        scheme: look_of(k, k + n // len(LINES) * len(methods), n)
        for k, members in enumerate(methods.values())
        for n, scheme in enumerate(members)
    }


def look_of(k: int, marker: int | None = None, line: int | None = None) -> dict[str, Any]:
    """Return a colour with a marker and a line, of the same number where none is given."""
    return {
        "color": COLOURS[k % len(COLOURS)],
        "marker": MARKERS[(k if marker is None else marker) % len(MARKERS)],
        "ls": LINES[(k if line is None else line) % len(LINES)],
    }


def name_of(text: str, width: int = LONGEST_NAME) -> str:
    return shortened(printable(text), width)


def fitted(text: str, room: float) -> str:
    """Return a name cut in its middle so that it fits into so many pixels."""
    whole = printable(text)
    names = (shortened(whole, width) for width in range(width_of(whole), 3, -1))
    return next((name for name in names if pixels_of(name) <= room), whole[:3])


def bounds(intervals: Sequence[Interval]) -> tuple[list[float], list[float]]:
    """Return lower and upper bounds that can be drawn: of no interval, the estimate."""
    low = [i.low if math.isfinite(i.low) else i.estimate for i in intervals]
    return low, [i.high if math.isfinite(i.high) else i.estimate for i in intervals]


def spread_out(
    heights: Mapping[str, float], gap: float, top: float = -math.inf
) -> dict[str, float]:
    """Move heights apart until neighbours differ by a gap, and keep their order and middle."""
    blocks: list[tuple[float, list[str]]] = []
    for name in sorted(heights, key=heights.__getitem__):
        middle, names = heights[name], [name]
        while blocks and middle - gap * (len(names) - 1) / 2 < (
            blocks[-1][0] + gap * (len(blocks[-1][1]) + 1) / 2
        ):
            names = blocks.pop()[1] + names
            middle = sum(heights[n] for n in names) / len(names)
        blocks.append((middle, names))
    placed = {
        name: middle + gap * (k - (len(names) - 1) / 2)
        for middle, names in blocks
        for k, name in enumerate(names)
    }
    down = max(0.0, top + gap / 2 - min(placed.values(), default=math.inf))
    return {name: y + down for name, y in placed.items()}


# ------------------------------------------------------------------ the SVG

NAMESPACE = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"
_LONG = re.compile(r"-?\d+\.\d{2,}")
_FONT = re.compile(r"(?:(?P<weight>\d+|bold) )?(?P<size>[\d.]+)px ")
_ELEMENTS = frozenset(
    ("svg", "g", "defs", "path", "use", "text", "clipPath", "rect", "title", "desc")
)
_ATTRIBUTE = re.compile(
    r"id|class|d|x|y|width|height|viewBox|href|role|transform|clip-path|opacity|text-anchor|"
    r"(fill|stroke|font|data)(-[a-z]+)?"
)
_SHARED = ("fill", "stroke", "stroke-width")  # by all marks of a group


def dark(svg: str) -> str:
    """Return a light figure in the colours of dark pages."""
    return _recoloured(svg, dict(PALETTE.values()))


def on_page(svg: str, alt: str) -> str:
    """Return a saved figure for the page, whose variables are its colours; of none, nothing.

    Others may have written the file, so nothing is kept that a figure does not need.
    """
    try:
        root = ElementTree.fromstring(svg)
    except ElementTree.ParseError:
        return ""
    if root.tag != f"{{{NAMESPACE}}}svg":
        return ""
    _clean(root)
    for title in root.findall(f"{{{NAMESPACE}}}title"):
        root.remove(title)  # a browser would show it over all of the figure
    root.set("aria-label", printable(alt))
    variables = {light: f"var(--{name})" for name, (light, _) in PALETTE.items()}
    return _recoloured(_text_of(root), variables).replace(f' xmlns="{NAMESPACE}"', "", 1)


def _recoloured(svg: str, colours: Mapping[str, str]) -> str:
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: colours.get(found[0], found[0]), svg)


def _clean(element: Element) -> None:
    """Leave out what no figure needs, groups that only group, and what cannot be seen."""
    for name in list(element.attrib):
        if not _ATTRIBUTE.fullmatch(name):
            del element.attrib[name]
    if not element.get("href", "#").startswith("#"):
        del element.attrib["href"]
    kept: list[Element] = []
    for child in element:
        tag = child.tag.removeprefix(f"{{{NAMESPACE}}}")
        if tag not in _ELEMENTS:
            continue
        _clean(child)
        child.tail = None
        if tag == "g" and not child.attrib:
            kept += list(child)
        elif (len(child) or tag not in ("g", "defs")) and (
            child.get("fill") != "none" or "stroke" in child.attrib
        ):
            kept.append(child)
    element[:] = kept
    if len(element):
        element.text = None


def _slim(svg: bytes, alt: str, chart: Chart) -> str:
    """Return what matplotlib wrote without what it does not need, and with series and tips."""
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        _make_attributes(element)
    for element in root.iter(f"{{{NAMESPACE}}}g"):
        group = element.attrib.pop("id", "")
        if group not in chart.tips:
            continue
        series, tips = group.split("/")[1], chart.tips[group]
        element.attrib |= {"class": "series", "data-series": series}
        if series in chart.names:
            element.set("data-name", printable(chart.names[series]))
        marks = list(element.iter(f"{{{NAMESPACE}}}use"))
        for mark, tip in zip(marks, tips, strict=False):
            mark.set("class", "mark")
            title = ElementTree.SubElement(mark, f"{{{NAMESPACE}}}title")
            title.text = "\n".join(map(printable, tip.split("\n")))
        for name in _SHARED if tips else ():
            if name in marks[0].attrib and len({mark.get(name) for mark in marks}) == 1:
                element.set(name, marks[0].attrib[name])
                for mark in marks:
                    del mark.attrib[name]
    _clean(root)
    root.attrib |= {"role": "img", "font-family": FONT, "font-size": f"{12 * POINT:g}px"}
    root.set("stroke-linejoin", "round")
    title, desc = Element(f"{{{NAMESPACE}}}title"), Element(f"{{{NAMESPACE}}}desc")
    title.text, desc.text = printable(alt), printable(f"{chart.title}. {chart.note}")
    root[:0] = [title, desc]
    return f"{_text_of(root)}\n"


def _make_attributes(element: Element) -> None:
    """Make attributes of the style, and round numbers."""
    style = dict(
        (part.split(": ", 1)) for part in element.attrib.pop("style", "").split("; ") if part
    )
    if font := style.pop("font", ""):
        weight, size = _FONT.match(f"{font} ").groups()  # type: ignore[union-attr]
        style |= {"font-size": f"{size}px"} | ({"font-weight": weight} if weight else {})
    if style.get("font-size") == f"{12 * POINT:g}px":
        del style["font-size"]
    style.pop("stroke-linejoin", None)
    element.attrib |= style
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    if _LINK in element.attrib:
        element.set("href", element.attrib.pop(_LINK))
    for name in {"d", "x", "y", "transform", "stroke-width"} & set(element.attrib):
        short = _LONG.sub(lambda n: f"{float(n[0]):.1f}".removesuffix(".0"), element.attrib[name])
        element.set(name, " ".join(short.split()))


def _text_of(root: Element) -> str:
    ElementTree.register_namespace("", NAMESPACE)
    return ElementTree.tostring(root, "unicode")
