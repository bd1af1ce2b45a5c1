"""What figures look like: colours for light and dark, kinds of parts, looks of schemes.

Colours are Okabe and Ito's, darkened (or lightened, on dark) until lines in them stand out from
the ground; they stay apart under every common colour vision. No figure needs colour: the marker
tells the method, too, and the line which of its schemes.

One table gives both the style of the page, where colours are variables that follow the reader's
theme, and that of files, where they are fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qaudit.report.format import pixels_of, printable, shortened, width_of

Palette = Mapping[str, str]
METHODS = ("c0", "c1", "c2", "c3", "c4")
LIGHT: Palette = {
    "ground": "#ffffff",
    "ink": "#222222",
    "faint": "#5d5d59",
    **dict(zip(METHODS, ("#004f9e", "#d05500", "#00906a", "#b0528c", "#202020"), strict=True)),
}
DARK: Palette = {
    "ground": "#0d1117",
    "ink": "#e8e8e4",
    "faint": "#aaaaa4",
    **dict(zip(METHODS, ("#86aef8", "#ef9a3c", "#2fbf80", "#dd8fbd", "#e8e8e4"), strict=True)),
}
FONT = "system-ui, 'Noto Sans', 'DejaVu Sans', sans-serif"
LONGEST_NAME = 24

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")  # a star is a soup
LINES = ("", "d1", "d2", "d3", "d4", "d5")

Rule = dict[str, str]


def _stroke(colour: str, width: str = "1", **more: str) -> Rule:
    return {"fill": "none", "stroke": colour, "stroke-width": width, **more}


KINDS: dict[str, Rule] = {  # "c" is the colour that another kind of the same part names
    "axis": _stroke("faint"),
    "grid": _stroke("faint", opacity="0.3"),
    "zero": _stroke("faint", opacity="0.8"),
    "stage": _stroke("faint", **{"stroke-dasharray": "4 3"}),
    "leader": _stroke("faint", "0.75", opacity="0.6"),
    "front": _stroke("faint"),
    "ring": _stroke("ink"),
    "line": _stroke("c", "1.6"),
    "whisker": _stroke("c"),
    "bold": {"stroke-width": "2"},
    "d1": {"stroke-dasharray": "6 3"},
    "d2": {"stroke-dasharray": "2 2"},
    "d3": {"stroke-dasharray": "7 2 2 2"},
    "d4": {"stroke-dasharray": "7 2 2 2 2 2"},
    "d5": {"stroke-dasharray": "2 5"},
    "band": {"fill": "c", "opacity": "0.15"},
    "falls": {"fill": "faint", "opacity": "0.1"},
    "strip": {"fill": "c", "opacity": "0.6"},
    "square": {"fill": "c0"},
    "ground": {"fill": "ground"},
    "mark": {"fill": "c", "stroke": "c"},
    "hollow": {"fill": "ground"},
    "quiet": {"opacity": "0"},
    "end": {"text-anchor": "end"},
    "middle": {"text-anchor": "middle"},
    "strong": {"font-weight": "600"},
    "bare": {"stroke": "none"},  # text without a ground
    "title": {"font-size": "14px", "font-weight": "600"},
}
TEXT: Rule = {
    "fill": "c",
    "font": f"12px {FONT}",
    "stroke": "ground",
    "stroke-width": "6px",
    "paint-order": "stroke",
}


def resolved(kind: str, palette: Palette) -> Rule:
    names = kind.split()
    ink = next((name for name in names if name in palette and name != "ground"), "ink")
    rule: Rule = {}
    for name in names:
        rule |= TEXT if name == "text" else KINDS.get(name, {})
    return {key: palette.get(ink if value == "c" else value, value) for key, value in rule.items()}


def page_css() -> str:
    """Return the style of figures on the page, whose variables have the palette's names."""
    names = {**dict.fromkeys(LIGHT), "c": None}

    def body(rule: Rule) -> str:
        values = ((key, f"var(--{v})" if v in names else v) for key, v in rule.items())
        return "; ".join(f"{key}: {value}" for key, value in values)

    lines = [".chart svg { --c: var(--ink); }"]
    lines += [f".chart .{name} {{ --c: var(--{name}); }}" for name in LIGHT if name != "ground"]
    lines += [f".chart text {{ {body(TEXT)}; }}"]
    lines += [f".chart .{name} {{ {body(rule)}; }}" for name, rule in KINDS.items()]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Look:
    """How a scheme or a stage is drawn."""

    colour: str
    marker: str
    line: str = ""

    @property
    def stroke(self) -> str:
        return f"line {self.colour} {self.line}".rstrip()


def looks(schemes: Sequence[str]) -> dict[str, Look]:
    """Give each scheme its method's colour and marker, and within the method a line of its own.

    A method with more schemes than there are lines goes on with markers that no other has.
    """
    methods: dict[str, list[str]] = {}
    for scheme in schemes:
        methods.setdefault(scheme.partition("-")[0], []).append(scheme)
    return {
        scheme: Look(
            METHODS[k % len(METHODS)],
            MARKERS[(k + n // len(LINES) * len(methods)) % len(MARKERS)],
            LINES[n % len(LINES)],
        )
        for k, members in enumerate(methods.values())
        for n, scheme in enumerate(members)
    }


def look_of(k: int) -> Look:
    return Look(METHODS[k % len(METHODS)], MARKERS[k % len(MARKERS)], LINES[k % len(LINES)])


def name(text: str, width: int = LONGEST_NAME) -> str:
    return shortened(printable(text), width)


def fitted(text: str, room: float) -> str:
    """Return a name cut in its middle so that it fits into so many pixels."""
    safe = printable(text)
    widths = range(width_of(safe), 4, -1)
    return next((s for w in widths if pixels_of(s := shortened(safe, w)) <= room), safe[:2])
