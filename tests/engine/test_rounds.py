"""Items in several rounds have the losses that they have in one, from weights quantized once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qaudit.checkpoints.folder import find_all
from qaudit.core.registry import parse_schemes
from qaudit.engine import rounds
from qaudit.engine.measure import measure
from qaudit.engine.rounds import joined, split
from qaudit.engine.stored_weights import Stored, Storing
from qaudit.engine.tasks import Task
from qaudit.saved.results import Filed, ResultStore
from qaudit.settings import Recipe
from qaudit.types import Corpus, Item, Subject, Window
from tests.support.items import items_of
from tests.support.measuring import MACHINE, corpus
from tests.support.models import VOCABULARY, save_model

SCHEMES = "rtn-4bit:group=16,gptq-3bit:group=16,awq-4bit:group=16"


def with_items(count: int) -> Corpus:
    """Return a corpus with two tasks of items of three options."""
    random = np.random.default_rng(0)
    items, windows = [], []
    for k in range(count):
        task = "first" if k < count // 2 else "second"
        items.append(Item(task, f"{task}:{k}", 3, (k % 3,)))
        context = random.integers(3, VOCABULARY, 20)
        for n in (1, 3, 5):
            tokens = np.array([*context, *random.integers(3, VOCABULARY, n)], np.int32)
            windows.append(Window(len(windows), tokens, 20))
    return replace(corpus(), items=tuple(items), item_windows=tuple(windows))


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    save_model(tmp_path / "model", 2)
    (checkpoint,) = find_all([str(tmp_path / "model")], Recipe(()), hashed=True)
    return Subject("model", ((checkpoint, 1.0),))


def measured(subject: Subject, store: Path) -> tuple[Filed, ...]:
    task = Task(subject, with_items(12), parse_schemes(SCHEMES.split(",")))
    return measure(task, MACHINE, ResultStore(store))


def test_rounds_change_no_loss_and_quantize_once(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measured(subject, tmp_path / "whole")
    stored: list[int] = []
    read: list[int] = []
    for kind, calls in ((Storing, stored), (Stored, read)):
        quantize = kind.quantize
        monkeypatch.setattr(
            kind, "quantize", lambda s, x, q=quantize, c=calls: (c.append(1), q(s, x))[1]
        )
    monkeypatch.setattr(rounds, "ROUND_TOKENS", 90)  # three items
    parts = measured(subject, tmp_path / "parts")
    assert len(split(with_items(12))) == 4
    assert len(read) == 3 * len(stored) > 0  # gptq and awq alone: rtn needs no calibration
    assert len(whole) == len(parts) == 4
    for one, other in zip(whole, parts, strict=True):
        a, b = one.measurement.evidence, other.measurement.evidence
        assert np.array_equal(a.nll_sum, b.nll_sum)
        assert [task.task for task in a.tasks] == [task.task for task in b.tasks]
        for left, right in zip(a.tasks, b.tasks, strict=True):
            # Other trees in other batches: fp32 rounding, on losses of about 20 nats.
            np.testing.assert_allclose(left.nll, right.nll, rtol=0, atol=1e-4)
            assert np.array_equal(left.items, right.items)
            assert np.array_equal(left.right, right.right)


def test_parts_of_a_task_are_joined_in_order() -> None:
    a, b = (items_of(np.arange(4.0) + k, options=2, task="t") for k in (0, 10))
    found = joined([a, b])
    assert found.items.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found.nll.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_a_round_has_at_least_an_item_and_the_documents_are_in_the_first() -> None:
    whole = with_items(4)
    parts = split(whole, most_tokens=1)
    assert [len(part.items) for part in parts] == [1, 1, 1, 1]
    assert [bool(part.evaluation) for part in parts] == [True, False, False, False]
    assert [w.document for part in parts for w in part.item_windows] == [0, 1, 2] * 4
