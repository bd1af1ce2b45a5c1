"""The gate as a badge, `quantization | 4-bit ship | 3-bit undecided`: as SVG or for shields.io.

It has what ships of each bit class that the policy asks for. Where nothing does, schemes are named
by their bits, each with the worst of its checks that count. No font is loaded:
widths are estimated, and `textLength` makes the text fit. The answer is in words and in the title,
never in the color alone.
"""

from __future__ import annotations

import re

from qaudit.errors import QauditError
from qaudit.report.elements import element
from qaudit.report.elements import text as words
from qaudit.report.format import pixels_of, printable
from qaudit.report.gate.standing import NO_ANSWER, standing, worst_first
from qaudit.saved.codec import text_of
from qaudit.types import Check, Gate

LABEL = "quantization"
COLORS = {  # each dark enough for white text: a contrast of 4.5 and more
    "pass": "#2e7d32",
    "fail": "#b3261e",
    "inconclusive": "#8a5a00",
    "incomplete": "#8a5a00",
    "error": "#5f6368",
}
_WORDS = {"missing": "not measured"}
_BITS = re.compile(r"(?:^|[^0-9])([2-8])bit|(?:nf|fp|int)([2-8])(?![0-9])")
FONT = "Verdana,Geneva,DejaVu Sans,sans-serif"
_HEIGHT, _PADDING = 20, 6


def render(gate: Gate) -> str:
    """Draw the answer."""
    return draw(message(gate), COLORS[gate.verdict])


def render_failure(error: QauditError) -> str:
    """Draw that there is no answer."""
    return draw(NO_ANSWER, COLORS["error"])


def render_endpoint(gate: Gate) -> str:
    """Write the badge as JSON that shields.io fetches and draws."""
    return text_of(_endpoint(message(gate), COLORS[gate.verdict]))


def render_endpoint_of_failure(error: QauditError) -> str:
    """Write JSON for shields.io that there is no answer."""
    return text_of({**_endpoint(NO_ANSWER, COLORS["error"]), "isError": True})


def _endpoint(text: str, color: str) -> dict[str, object]:
    return {"schemaVersion": 1, "label": LABEL, "message": text, "color": color}


def message(gate: Gate) -> str:
    """Return the answer for each number of bits, the most bits first, and what was ignored."""
    asked = [one for one in gate.classes if one.level != "off"]
    parts = [f"{one.bit_class}-bit {one.status}" for one in asked] or _by_scheme(gate)
    deciding = {one.status for one in asked if one.level == "error"}
    status = {"pass": "ship", "fail": "hold"}.get(gate.verdict, "undecided")
    if asked and status not in deciding:  # by a check of no class: documents, a subject left out
        parts.append(f"overall {status}")
    if ignored := sum(standing(check) == "ignored" for check in worst_first(gate)):
        parts.append(f"{ignored} ignored")
    return " | ".join(parts)


def _by_scheme(gate: Gate) -> list[str]:
    worst: dict[str, str] = {}
    for check in worst_first(gate):
        if check.scheme:
            worst.setdefault(bits_of(check.scheme), _standing(check))
    parts = [f"{bits} {worst[bits]}" for bits in sorted(worst, reverse=True)]
    answer = "not measured" if gate.verdict == "incomplete" else gate.verdict
    if answer not in worst.values():  # by a check of no scheme: documents, a subject left out
        parts.append(answer if not parts else f"overall {answer}")
    return parts


def _standing(check: Check) -> str:
    """Return how a check stands; an unmet warning without a breach is not called a warning."""
    stands = standing(check)
    if stands == "warning" and check.outcome != "fail":
        stands = check.outcome
    return "pass" if stands == "ignored" else _WORDS.get(stands, stands)


def bits_of(scheme: str) -> str:
    """Return `4-bit` for `gptq-4bit` and `bnb-nf4`, or the name of a scheme without bits in it."""
    bits = _BITS.search(scheme)
    return f"{bits[1] or bits[2]}-bit" if bits else printable(scheme)


def draw(text: str, color: str) -> str:
    """Draw a badge with a text beside the label."""
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
