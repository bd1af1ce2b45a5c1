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
from qaudit.report.format import printable, shortened, wrapped
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

WIDTH, LONGEST_NAME = 8.6, 26
LINE = 0.17  # inches between lines of text
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "text.color": INK,
    "font.size": 8.6,
    "figure.titleweight": "bold",
    "figure.labelsize": 8.6,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "axes.titlesize": 8.6,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.15,
    "xtick.bottom": False,
    "xtick.labelcolor": INK,
    "ytick.left": False,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}
Point = tuple[float, Interval, str]
"""A place, what is there, and the lines of the tip."""


class Chart:
    """A figure between a title and a note, with what is shown at its marks."""

    def __init__(self, title: str, note: str, height: float) -> None:
        """Make a figure of so many inches beside title and note."""
        from matplotlib.figure import Figure

        self.title, self.note = title, note
        self.tips: dict[str, list[str]] = {}  # by group
        self.names: dict[str, str] = {}  # of series that can be hidden
        lines = wrapped(printable(note), 120)
        tall = height + LINE * (4 + lines.count("\n"))
        self.figure = Figure((WIDTH, tall), layout="constrained")
        self.figure.suptitle(printable(title), x=0.01, ha="left")
        self.figure.supxlabel(lines, x=0.01, ha="left", color=FAINT)

    def panels(self, *heights: float, **shared: Any) -> list[Axes]:
        """Return axes above each other, each with its share of the height."""
        axes = self.figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights, **shared)
        return list(axes[:, 0])

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
            style = look | {"ls": "none", "mew": 0.7, "mfc": fill}
            axes.plot(x, y, gid=group, clip_on=False, zorder=4, **style)

    def curve(self, axes: Axes, series: str, points: Sequence[Point], **look: Any) -> None:
        """Draw a line through estimates with its marks, and the band of their intervals."""
        x, color = [x for x, _, _ in points], look["color"]
        low, high = bounds([interval for _, interval, _ in points])
        axes.fill_between(x, low, high, color=color, alpha=0.15, lw=0, gid=self.group(series))
        marks = [(x, interval.estimate, tip) for x, interval, tip in points]
        estimates = [y for _, y, _ in marks]
        axes.plot(x, estimates, gid=self.group(series), zorder=3, color=color, ls=look["ls"])
        self.marks(axes, series, marks, **look)

    def whiskers(
        self, axes: Axes, series: str, points: Sequence[Point], *, across: bool = False, **look: Any
    ) -> None:
        """Draw marks with intervals, which are upright or, in rows downwards, across."""
        low, high = bounds([interval for _, interval, _ in points])
        lines = axes.hlines if across else axes.vlines
        style = {"color": look["color"], "lw": look.pop("lw", 0.7)}
        lines([at for at, _, _ in points], low, high, gid=self.group(series), zorder=3, **style)
        marks = ((at, interval.estimate, tip) for at, interval, tip in points)
        turned = ((y, x, tip) if across else (x, y, tip) for x, y, tip in marks)
        self.marks(axes, series, turned, **look)

    def legend(self, looks: Mapping[str, Mapping[str, Any]]) -> None:
        """Explain looks on the right, from above."""
        from matplotlib.lines import Line2D

        handles = [Line2D([], [], label=name_of(name), **look) for name, look in looks.items()]
        self.figure.legend(handles=handles, loc="outside right upper")

    def svg(self, name: str, alt: str) -> str:
        """Return the light variant."""
        from matplotlib import rc_context

        out = BytesIO()
        with rc_context({"svg.hashsalt": name}):  # keeps what it refers to apart from other figures
            self.figure.savefig(out, format="svg", metadata={"Date": None})
        return _slim(out.getvalue(), alt, self)

    def png(self) -> bytes:
        out = BytesIO()
        self.figure.savefig(out, format="png", dpi=160, metadata={"Software": None})
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
        scheme: {
            "color": COLOURS[k % len(COLOURS)],
            "marker": MARKERS[(k + n // len(LINES) * len(methods)) % len(MARKERS)],
            "ls": LINES[n % len(LINES)],
        }
        for k, members in enumerate(methods.values())
        for n, scheme in enumerate(members)
    }


def look_of(k: int) -> dict[str, Any]:
    marker, line = MARKERS[k % len(MARKERS)], LINES[k % len(LINES)]
    return {"color": COLOURS[k % len(COLOURS)], "marker": marker, "ls": line}


def name_of(text: str, width: int = LONGEST_NAME) -> str:
    return shortened(printable(text), width)


def bounds(intervals: Sequence[Interval]) -> tuple[list[float], list[float]]:
    """Return lower and upper bounds that can be drawn: of no interval, the estimate."""
    low = [i.low if math.isfinite(i.low) else i.estimate for i in intervals]
    return low, [i.high if math.isfinite(i.high) else i.estimate for i in intervals]


# ------------------------------------------------------------------ the SVG

NAMESPACE = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"
_LONG = re.compile(r"-?\d+\.\d{2,}")
_FONT = re.compile(r"(?:(?P<weight>\d+|bold) )?(?P<size>[\d.]+px) ")
_ELEMENTS = frozenset(
    ("svg", "g", "defs", "path", "use", "text", "clipPath", "rect", "title", "desc")
)
_ATTRIBUTE = re.compile(
    r"id|class|d|x|y|width|height|viewBox|href|role|transform|clip-path|opacity|text-anchor|"
    r"(fill|stroke|font|data)(-[a-z]+)?"
)


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
    """Leave out what no figure needs, and groups that only group."""
    for name in list(element.attrib):
        if not _ATTRIBUTE.fullmatch(name):
            del element.attrib[name]
    if not element.get("href", "#").startswith("#"):
        del element.attrib["href"]
    kept: list[Element] = []
    for child in element:
        tag = child.tag.removeprefix(f"{{{NAMESPACE}}}")
        if tag in _ELEMENTS:
            _clean(child)
            child.tail = None
            kept += [child] if tag != "g" or child.attrib else child
    element[:] = kept
    if kept:
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
        series = group.split("/")[1]
        element.attrib |= {"class": "series", "data-series": series}
        if series in chart.names:
            element.set("data-name", printable(chart.names[series]))
        marks = element.iter(f"{{{NAMESPACE}}}use")
        for mark, tip in zip(marks, chart.tips[group], strict=False):
            mark.set("class", "mark")
            title = ElementTree.SubElement(mark, f"{{{NAMESPACE}}}title")
            title.text = "\n".join(map(printable, tip.split("\n")))
    _clean(root)
    root.attrib |= {"role": "img", "font-family": FONT, "stroke-linejoin": "round"}
    title, desc = Element(f"{{{NAMESPACE}}}title"), Element(f"{{{NAMESPACE}}}desc")
    title.text, desc.text = printable(alt), printable(f"{chart.title}. {chart.note}")
    root[:0] = [title, desc]
    return f"{_text_of(root)}\n"


def _make_attributes(element: Element) -> None:
    """Make attributes of the style, and round numbers."""
    style = element.attrib.pop("style", "")
    element.attrib |= dict(part.split(": ", 1) for part in style.split("; ") if part)
    if font := _FONT.match(element.attrib.pop("font", "")):
        fonts = font.groupdict().items()
        element.attrib |= {f"font-{name}": value for name, value in fonts if value}
    if _LINK in element.attrib:
        element.set("href", element.attrib.pop(_LINK))
    for name in {"d", "x", "y", "transform", "stroke-width"} & set(element.attrib):
        short = _LONG.sub(lambda n: f"{float(n[0]):.1f}".removesuffix(".0"), element.attrib[name])
        element.set(name, " ".join(short.split()))


def _text_of(root: Element) -> str:
    ElementTree.register_namespace("", NAMESPACE)
    return ElementTree.tostring(root, "unicode")
