"""Every code in the source is in the one table of rules, and says what it says there."""

from __future__ import annotations

import re
from pathlib import Path

import qaudit
from qaudit.types import CODES, metrics
from qaudit.types.metrics import METRICS

SOURCES = sorted(Path(qaudit.__file__).parent.rglob("*.py"))


def test_every_code_that_is_used_is_in_the_table() -> None:
    used = {
        code for path in SOURCES for code in re.findall(r'"(QA\d{3})"', path.read_text("utf-8"))
    }
    assert used
    assert used <= set(CODES)


def test_no_code_means_two_things() -> None:
    text = Path(metrics.__file__).read_text(encoding="utf-8")
    of_audits = re.findall(r'^    "(QA\d{3})": Code\(', text, re.MULTILINE)
    every = [*of_audits, *{metric.code for metric in METRICS.values()}]
    assert len(of_audits) > 10
    assert sorted(every) == sorted(CODES)


def test_codes_stand_in_order_and_titles_are_sentences_without_an_end() -> None:
    assert list(CODES) == sorted(CODES)
    assert all(rule.title and not rule.title.endswith(".") for rule in CODES.values())
    assert all(rule.help.endswith(".") for rule in CODES.values())
