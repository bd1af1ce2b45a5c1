"""The one command that decides what is undecided."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace
from typing import Any

from qaudit.report.card import render, render_terminal
from qaudit.report.verdict import _folder, next_step
from qaudit.types import AuditRecord, NextStep
from tests.support import sample
from tests.support.verdicts import class_verdict, verdict, with_verdict


def step(audit: AuditRecord, **more: Any) -> NextStep | None:
    settings = {"needed_documents": 240, **more}
    return next_step(audit, [class_verdict("8"), class_verdict("4", "undecided", **settings)])


def test_the_command_measures_what_is_undecided_and_nothing_else() -> None:
    audit = sample.audit()
    found = step(audit)
    assert found is not None
    words = shlex.split(found.command)
    options = dict(itertools.pairwise(words))
    schemes = options["--schemes"].split(",")
    assert words[:2] == ["qaudit", "scan"]
    assert all("4bit" in name or name == "bnb-nf4" for name in schemes)
    assert options["--bits"] == "4"
    assert "evaluation_documents=240" in words
    assert options["--out"].endswith("-4bit")


def test_the_folder_has_the_name_of_its_class() -> None:
    assert _folder(sample.audit(), ["4", "w4a4"]).endswith("-4bit-w4a4")


def test_without_a_number_of_documents_there_is_no_command() -> None:
    assert step(sample.audit(), needed_documents=None) is None
    assert next_step(sample.audit(), [class_verdict("4")]) is None


def test_card_and_terminal_end_the_verdict_in_the_command() -> None:
    audit = sample.audit()
    audit = replace(audit, protocol={**audit.protocol, "evaluation_documents_available": 101})
    found = step(audit)
    assert found is not None
    assert found.available == 101
    undecided = class_verdict("4", "undecided", needed_documents=240)
    shown = with_verdict(replace(verdict(undecided), next_step=found))
    for text in (render(shown), render_terminal(shown, 60)):
        assert found.command in text
        assert "The text has 101 documents" in text
