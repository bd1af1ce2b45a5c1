"""Progress on a terminal: a row fits its width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from qaudit.cli.bars import Bars


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_row_fits_the_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), force_terminal=True)
    bars = Bars(console)
    bars.progress.stop()
    bars.subject(3, 154, "stage2-ingredient1-step1000", 7200.0)
    bars.move("blocks", 12, 128, "stage2-ingredient1-step1000", "gptq-4bit:group=64")
    bars.download("stage2-ingredient1-step1000", 10_200_000_000, 14_600_000_000, anew=True)
    plain = Console(width=width, file=io.StringIO(), record=True)
    plain.print(bars.progress.get_renderable())
    rows = [row.rstrip() for row in plain.export_text().splitlines() if row.strip()]
    assert len(rows) == 3  # nothing is wrapped
    assert all(len(row) <= width for row in rows)
    assert "2.0 h left" in rows[0]
    assert "gptq-4bit" in rows[1]
