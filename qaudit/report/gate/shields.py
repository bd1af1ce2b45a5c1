"""The gate for shields.io's endpoint badge: a JSON file that it fetches and draws."""

from __future__ import annotations

from typing import Any

from qaudit.errors import QauditError
from qaudit.report.gate import badge
from qaudit.report.gate.standing import NO_ANSWER
from qaudit.saved.codec import text_of
from qaudit.types import Gate


def render(gate: Gate) -> str:
    """Write the badge's text and color."""
    return text_of(_endpoint(badge.message(gate), badge.COLORS[gate.verdict]))


def render_failure(error: QauditError) -> str:
    """Write a badge that says that there is no answer."""
    return text_of({**_endpoint(NO_ANSWER, badge.COLORS["error"]), "isError": True})


def _endpoint(message: str, color: str) -> dict[str, Any]:
    return {"schemaVersion": 1, "label": badge.LABEL, "message": message, "color": color}
