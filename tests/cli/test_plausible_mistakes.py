"""What a first user gets wrong is answered in the terms of what they typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cli import Run, refused
from tests.support.saved_audits import save


@pytest.mark.parametrize("command", ["report", "gate"])
def test_a_file_that_is_no_audit_is_not_called_a_truncated_one(
    place: Path, qaudit: Run, command: str
) -> None:
    (place / "card.md").write_text("# A card\n")
    refused(qaudit(command, "card.md"), 2, "`card.md` is not an audit", "an output folder")


def test_a_gguf_as_a_target_is_sent_to_the_option_for_it(place: Path, qaudit: Run) -> None:
    (place / "model.gguf").write_bytes(b"GGUF")
    refused(qaudit("scan", "model.gguf"), 2, "is a quantized file", "`--shipped model.gguf`")


def test_an_export_before_its_scan_names_the_scan(place: Path, qaudit: Run) -> None:
    to = ("--bits", "4", "--out", "to-ship")
    audit_first = "audit it first, `qaudit scan series`"
    refused(qaudit("export", "series", *to), 2, "there is no audit at `series`", audit_first)
    refused(qaudit("export", "out", *to), 2, "there is no audit at `out`", "an output folder")


def test_a_folder_as_a_policy_is_called_one(place: Path, qaudit: Run) -> None:
    save(place / "out")
    refused(qaudit("gate", "out", "--policy", "series"), 2, "`series` is a folder", "explore")


def test_help_cuts_no_sentence(qaudit: Run) -> None:
    shown = qaudit("--help").out
    assert "..." not in shown.partition("Commands:")[2]
    assert max(map(len, shown.splitlines())) <= 80


def test_doctor_fits_a_terminal(qaudit: Run) -> None:
    words = qaudit("doctor").out.splitlines()
    assert [line for line in words if len(line) > 80 and re.search(r"\S\s\S.*\s", line[22:])] == []
