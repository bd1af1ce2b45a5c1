"""The gate as a badge, `quantization | 4-bit ship | 3-bit undecided`: as SVG or for shields.io.

No font is loaded:
widths are estimated, and `textLength` makes the text fit. The answer is in words and in the title,
never in the color alone.
"""

from __future__ import annotations

from qaudit.errors import QauditError
from qaudit.judge.gate import verdict_of
from qaudit.report.elements import element
from qaudit.report.elements import text as words
from qaudit.report.format import pixels_of, printable
from qaudit.report.gate.standing import NO_ANSWER, standing, worst_first
from qaudit.saved.codec import text_of
from qaudit.types import Gate

LABEL = "quantization"
COLORS = {  # each dark enough for white text: a contrast of 4.5 and more
    "pass": "#2e7d32",
    "fail": "#b3261e",
    "inconclusive": "#8a5a00",
    "incomplete": "#8a5a00",
    "error": "#5f6368",
}
FONT = "Verdana,Geneva,DejaVu Sans,sans-serif"
_HEIGHT, _PADDING = 20, 6


def render(gate: Gate) -> str:
    return draw(message(gate), COLORS[gate.verdict])


def render_failure(error: QauditError) -> str:
    return draw(NO_ANSWER, COLORS["error"])


def render_endpoint(gate: Gate) -> str:
    """Write the badge as JSON that shields.io fetches and draws."""
    return text_of(_endpoint(message(gate), COLORS[gate.verdict]))


def render_endpoint_of_failure(error: QauditError) -> str:
    return text_of({**_endpoint(NO_ANSWER, COLORS["error"]), "isError": True})


def _endpoint(text: str, color: str) -> dict[str, object]:
    return {"schemaVersion": 1, "label": LABEL, "message": text, "color": color}


def message(gate: Gate) -> str:
    """Return the status of each bit class, the most bits first, and what was ignored."""
    parts = [
        f"{_short(decision.bit_class)} {decision.status}"
        for decision in gate.classes
        if decision.level != "off"
    ]
    status = verdict_of(gate, "loss").status
    counted = [decision.status for decision in gate.classes if decision.level == "error"]
    if status not in counted:  # by a check of no class: documents, a subject left out
        parts.append(f"overall {status}" if parts else status)
    if ignored := sum(standing(check) == "ignored" for check in worst_first(gate)):
        parts.append(f"{ignored} ignored")
    return " | ".join(parts)


def _short(bit_class: str) -> str:
    return f"{bit_class}-bit" if bit_class.isdecimal() else printable(bit_class)


def draw(text: str, color: str) -> str:
    left, right = (round(pixels_of(part, 11)) + 2 * _PADDING for part in (LABEL, text))
    title = f"{LABEL}: {text}"
    letters = (
        element("text", words(part), x=start + _PADDING, y=14, textLength=width - 2 * _PADDING)
        for part, start, width in ((LABEL, 0, left), (text, left, right))
    )
    svg = element(
        "svg",
        element("title", words(title)),
        element("clipPath", element("rect", width=left + right, height=_HEIGHT, rx=3), id="r"),
        element(
            "g",
            element("rect", width=left, height=_HEIGHT, fill="#444"),
            element("rect", x=left, width=right, height=_HEIGHT, fill=color),
            clip_path="url(#r)",
        ),
        element("g", *letters, fill="#fff", font_family=FONT, font_size=11),
        xmlns="http://www.w3.org/2000/svg",
        width=left + right,
        height=_HEIGHT,
        role="img",
        aria_label=title,
    )
    return f"{svg}\n"
