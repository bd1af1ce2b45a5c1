"""The documents every Python carries, and the part each belongs to for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from qaudit.text.documents import part_of, python_documents, python_part
from qaudit.types import Document


def test_a_document_s_part_never_changes() -> None:
    # A trained series depends on these: they were held out of its training by name.
    assert [part_of(f"python:{name}.py") for name in ("graphlib", "linecache", "site")] == [
        "evaluation"
    ] * 3
    parts = Counter(part_of(f"python:{n}") for n in range(600))
    assert parts == {"training": 382, "calibration": 116, "evaluation": 102}


def test_the_parts_are_all_documents_and_share_none() -> None:
    parts = [python_part(part) for part in ("evaluation", "calibration", "training")]  # type: ignore[arg-type]
    names = [d.name for part in parts for d in part]
    assert len(names) == len(set(names))
    everything = [d.name for d in python_documents()]
    assert set(names) <= set(everything)
    assert len(names) >= len(everything) - 5  # those that stand in two parts under two names
    texts = [{d.sha256 for d in part} for part in parts]
    assert not texts[0] & (texts[1] | texts[2])


def test_a_text_that_stands_under_two_names_is_left_to_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = [Document(f"d{n}", "same text") for n in range(50)]
    monkeypatch.setattr(
        "qaudit.text.documents.python_documents",
        lambda *, part: (d for d in documents if part_of(d.name) == part),
    )
    uncached = python_part.__wrapped__
    assert uncached("evaluation")
    assert uncached("calibration") == ()


def test_there_are_enough_documents_to_measure_on() -> None:
    assert len(python_part("evaluation")) >= 64
    assert len(python_part("calibration")) >= 64


def test_the_first_documents_are_not_all_of_one_package() -> None:
    names = [d.name for d in python_part("evaluation")[:64]]
    packages = Counter(name.partition("/")[0] for name in names)
    assert packages.most_common(1)[0][1] <= 16
    assert any(name.startswith("python-topic:") for name in names)
    assert names != sorted(names)


def test_every_document_is_worth_reading() -> None:
    assert all(len(d.text) >= 400 for d in python_documents())
