"""Colours, lines and markers of schemes, the same in every picture and on the page.

Colours are Okabe and Ito's, darkened until lines in them can be seen, and stay apart for people
with any common colour vision. No picture needs colour: the marker says the method, too, and the
line which of its schemes, so that a grey copy tells as much. Lines are spelled as matplotlib
does, which is not loaded here.
"""

from __future__ import annotations

import math

from qaudit.report.format import printable
from qaudit.report.width import shortened

Line = str | tuple[int, tuple[int, ...]]

GROUND, INK, FAINT = "#fbfbf8", "#222222", "#70706c"
METHOD_COLOURS = ("#004f9e", "#d05500", "#00906a", "#b0528c", "#202020")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")  # a star is a soup
LINES: tuple[Line, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
LONGEST_NAME = 24

VERDICT_LOOKS = {  # colour, marker, filled
    "a_better": (METHOD_COLOURS[0], "o", True),
    "b_better": (METHOD_COLOURS[1], "s", True),
    "equivalent": (INK, "D", True),
    "inconclusive": (INK, "D", False),
}


def name(text: str, width: int = LONGEST_NAME) -> str:
    """Return a name as it is written into a picture."""
    return shortened(printable(text), width)


def styles(schemes: tuple[str, ...]) -> dict[str, tuple[str, Line, str]]:
    """Give each scheme its method's colour and marker, and within the method its own line.

    A method with more schemes than there are lines goes on with the markers of nobody else.
    """
    methods: dict[str, list[str]] = {}
    for scheme in schemes:
        methods.setdefault(scheme.partition("-")[0], []).append(scheme)
    found: dict[str, tuple[str, Line, str]] = {}
    for k, members in enumerate(methods.values()):
        for n, scheme in enumerate(members):
            marker = MARKERS[(k + n // len(LINES) * len(methods)) % len(MARKERS)]
            found[scheme] = (METHOD_COLOURS[k % len(METHOD_COLOURS)], LINES[n % len(LINES)], marker)
    return found


def stage_look(k: int) -> tuple[str, str]:
    """Return the colour and the marker of the k-th stage."""
    return METHOD_COLOURS[k % len(METHOD_COLOURS)], MARKERS[k % len(MARKERS)]


def bound(value: float) -> float:
    """Return a bound in percent; one that is infinite is not drawn."""
    return 100 * drawable(value)


def drawable(value: float) -> float:
    """Return a number; one that is infinite is not drawn."""
    return value if math.isfinite(value) else math.nan
