"""Items in several rounds have the losses that they have in one, from weights quantized once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qaudit.checkpoints.folder import find_all
from qaudit.core.registry import parse_schemes
from qaudit.engine import kept_weights
from qaudit.engine import measure as measuring
from qaudit.engine.measure import in_rounds, measure
from qaudit.engine.tasks import Task
from qaudit.saved.results import ResultFile, ResultStore, read_measurement
from qaudit.settings import Recipe
from qaudit.types import Corpus, Item, Subject, TaskEvidence, Window
from tests.support.filled import filled
from tests.support.measured import MACHINE, corpus
from tests.support.models import VOCABULARY, save_model

SCHEMES = "rtn-4bit:group=16,gptq-3bit:group=16,awq-4bit:group=16"


def with_items(count: int) -> Corpus:
    """Return a corpus with tasks of two items of three options, 32 tokens each."""
    random = np.random.default_rng(0)
    items, windows = [], []
    for k in range(count):
        task = f"task-{k // 2}"
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


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put one task into a round."""
    monkeypatch.setattr(measuring, "ROUND_TOKENS", 96)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the groups of linears that are written, and those that are read."""
    counts = Counter[str]()

    def count(name: str, call: Any, *arguments: Any) -> Any:
        counts[name] += 1
        return call(*arguments)

    for name in ("save_tensors", "_read_group"):
        call = getattr(kept_weights, name)
        monkeypatch.setattr(kept_weights, name, partial(count, name, call))
    return counts


def measured(subject: Subject, store: Path, tasks: tuple[str, ...] = ()) -> tuple[ResultFile, ...]:
    text = with_items(12)
    text = text.of_tasks(tasks) if tasks else text
    task = Task.unplanned(subject, text, parse_schemes(SCHEMES.split(",")))
    return measure(task, MACHINE, ResultStore(store))


def tasks_of(results: tuple[ResultFile, ...]) -> Mapping[tuple[str, str], TaskEvidence]:
    return {
        (one.measurement.scheme, task.task): task
        for one in results
        for task in one.measurement.evidence.tasks
    }


def files(store: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in store.rglob("*.npz")}


def same(one: tuple[ResultFile, ...], other: tuple[ResultFile, ...]) -> bool:
    a, b = tasks_of(one), tasks_of(other)
    return a.keys() == b.keys() and all(
        np.array_equal(a[key].nll, b[key].nll) and np.array_equal(a[key].items, b[key].items)
        for key in a
    )


def test_rounds_change_no_loss_and_quantize_once(
    subject: Subject, tmp_path: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measured(subject, tmp_path / "whole")
    monkeypatch.setattr(measuring, "ROUND_TOKENS", 96)
    parts = measured(subject, tmp_path / "parts")
    assert len(in_rounds(with_items(12), trees=True)) == 6
    # gptq and awq alone: rtn needs no calibration
    assert calls["_read_group"] == 5 * calls["save_tensors"] > 0
    assert len(whole) == len(parts) == 4
    for one, other in filled(zip(whole, parts, strict=True)):
        a, b = one.measurement.evidence, other.measurement.evidence
        assert np.array_equal(a.nll_sum, b.nll_sum)
    assert same(whole, parts)
    assert not (tmp_path / "parts" / "weights").exists()
    evidence = files(tmp_path / "parts")
    assert len(evidence) == 7 * 4  # documents and six tasks, of four streams
    assert all(read_measurement(path).identity for path in filled(evidence))


@pytest.mark.parametrize("stop", [1, 5])
def test_a_stop_between_rounds_loses_nothing_that_was_measured(
    stop: int,
    subject: Subject,
    tmp_path: Path,
    short: None,
    calls: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = measured(subject, tmp_path / "whole")
    quantized = calls["save_tensors"]
    send, fed = measuring.send, list[tuple[int, int]]()

    def stopping(task: Task, *others: object, **more: object) -> object:
        if len(fed) == stop:
            raise KeyboardInterrupt
        fed.append((len(task.corpus.documents), len(task.corpus.items)))
        return send(task, *others, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring, "send", stopping)
    store = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        measured(subject, store)
    assert fed == [(3, 2), *[(0, 2)] * (stop - 1)]
    before = files(store)
    stop = 100
    fed.clear()
    again = measured(subject, store)
    assert same(whole, again)
    assert sum(items for _, items in fed) == 12 - 2 * (6 - len(fed))  # each item once
    assert not any(documents for documents, _ in fed)
    assert calls["save_tensors"] == 2 * quantized  # of both runs: once each
    left = files(store)
    assert all(left[path] == stamp for path, stamp in filled(before.items()) if path in left)
    assert not (store / "weights").exists()


_KILLED = """
import os, signal
from pathlib import Path
from qaudit.checkpoints.folder import find_all
from qaudit.engine import measure as measuring
from qaudit.settings import Recipe
from qaudit.types import Subject
from tests.engine.test_rounds import measured

measuring.ROUND_TOKENS = 96
send, sent = measuring.send, []

def killing(*arguments):
    if len(sent) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    sent.append(0)
    return send(*arguments)

measuring.send = killing
(checkpoint,) = find_all(["model"], Recipe(()), hashed=True)
measured(Subject("model", ((checkpoint, 1.0),)), Path("store"))
"""


@pytest.mark.slow
def test_a_process_that_is_killed_between_rounds_loses_nothing_that_was_measured(
    subject: Subject, tmp_path: Path, short: None, calls: Counter[str]
) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = files(tmp_path / "store")
    assert sum("tasks" in path.parts for path in before) == 2 * 4
    resumed = measured(subject, tmp_path / "store")
    assert calls["save_tensors"] == 0
    assert same(measured(subject, tmp_path / "whole"), resumed)


def test_what_a_task_costs_does_not_depend_on_the_tasks_beside_it(
    subject: Subject, tmp_path: Path, short: None
) -> None:
    whole = measured(subject, tmp_path / "whole")
    measured(subject, tmp_path / "one", ("task-3",))
    assert same(whole, measured(subject, tmp_path / "one"))


def test_weights_that_changed_between_rounds_lose_that_round_alone(
    subject: Subject, tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, sent = measuring.send, list[Task]()

    def changing(task: Task, *others: object, **more: object) -> object:
        sent.append(task)
        if len(sent) == 3:
            save_model(tmp_path / "model", 9)
        return send(task, *others, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring, "send", changing)
    with pytest.raises(Exception, match="have changed since the audit was planned"):
        measured(subject, tmp_path / "store")
    tasks = [path for path in files(tmp_path / "store") if "tasks" in path.parts]
    assert len(tasks) == 2 * 4  # of the first two rounds, for four streams


def test_a_round_has_at_least_a_task_and_the_documents_are_in_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "ROUND_TOKENS", 1)
    parts = in_rounds(with_items(4), trees=True)
    assert [len(part.items) for part in parts] == [2, 2]
    assert [bool(part.evaluation) for part in parts] == [True, False]
    assert [w.document for part in parts for w in part.item_windows] == [*range(6)] * 2
