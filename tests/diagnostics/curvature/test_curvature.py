"""Curvature of subjects as an audit has it measured, and what is done to fit in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qaudit.diagnostics import curvature_measure
from qaudit.diagnostics.case import Case, DocumentChoice
from qaudit.diagnostics.curvature import Curvature
from qaudit.diagnostics.curvature_measure import (
    PassShape,
    find_room,
    measure_curvature,
    product_nbytes,
)
from qaudit.diagnostics.diagnostic import parse_diagnostics
from qaudit.engine.tasks import Task
from qaudit.errors import MachineError, SchemeError, SourceError
from qaudit.saved.codec import encode
from qaudit.saved.results import ResultStore
from qaudit.types import Corpus, CurvatureRow, Subject
from tests.support.measured import MACHINE, corpus
from tests.support.models import save_model
from tests.support.series import find_checkpoints

CPU = torch.device("cpu")
QUICK = Curvature(documents=3, probes=4, steps=6, tolerance=0.0)
SHAPE = PassShape(parameters=10**6, blocks=4, hidden=128, inner=384, heads=4, vocabulary=2048)


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    root = tmp_path_factory.mktemp("series")
    return [find_checkpoints(save_model(root / f"step{k}", k))[0] for k in (10, 20)]


def measured(members, tmp_path, asked=QUICK, text=None) -> list[CurvatureRow]:
    single = len(members) == 1
    share = 1.0 if single else 0.5
    subject = Subject("it", tuple((c, share) for c in members), None if single else "mean")
    task = Task.unplanned(subject, text or corpus(), ())
    quiet = lambda done, total, what: None  # noqa: E731
    case = Case(asked, task, MACHINE, None, ResultStore(tmp_path), quiet)
    return list(measure_curvature(case))


def test_a_model_is_measured_whole_and_by_role_and_layer(series, tmp_path) -> None:
    whole, *parts = measured(series[:1], tmp_path)
    assert (whole.part, whole.documents, whole.probes) == ("model", 3, 4)
    assert whole.trace.low < whole.trace.estimate < whole.trace.high
    assert whole.trace_elsewhere is not None
    assert whole.trace_elsewhere.estimate == pytest.approx(whole.trace.estimate, rel=1e-5)
    assert whole.eigenvalues[0] > whole.smallest
    assert whole.products > whole.probes
    for kind in ("role", "layer"):
        mine = [row for row in parts if row.part == kind]
        total = sum(row.trace.estimate for row in mine)
        assert total == pytest.approx(whole.trace.estimate, rel=1e-4)
        assert sum(row.parameters for row in mine) == whole.parameters
    assert {"q", "down", "embed_tokens"} <= {row.name for row in parts}
    assert {"0", "1", "outside"} <= {row.name for row in parts}
    assert encode(whole)["trace_low"] == whole.trace.low


def test_a_soup_is_measured_by_its_merged_weights(series, tmp_path) -> None:
    asked = replace(QUICK, eigenvalues=0)
    (whole, *_), (first, *_), (again, *_) = (
        measured(members, tmp_path, asked)
        for members in (series, series[:1], [series[0], series[0]])
    )
    assert whole.trace.estimate != pytest.approx(first.trace.estimate, rel=1e-3)
    assert again.trace.estimate == pytest.approx(first.trace.estimate, rel=1e-5)
    assert (whole.eigenvalues, whole.smallest, whole.products) == ((), None, 4)


def test_documents_are_chosen_by_content_whatever_their_order() -> None:
    text = corpus()
    count = len(text.documents)
    turned = Corpus(
        protocol=text.protocol,
        calibration=text.calibration,
        evaluation=tuple(replace(w, document=count - 1 - w.document) for w in text.evaluation),
        documents=text.documents[::-1],
    )
    assert DocumentChoice.of(text, 2).sha256 == DocumentChoice.of(turned, 2).sha256
    assert DocumentChoice.of(text, 2).sha256 != DocumentChoice.of(text, 3).sha256
    mine, theirs = DocumentChoice.of(text, 2).windows, DocumentChoice.of(turned, 2).windows
    assert [len(w.tokens) for p in mine for w in p] == [len(w.tokens) for p in theirs for w in p]


def test_one_document_is_refused(series, tmp_path) -> None:
    text = corpus()
    only = [w for w in text.evaluation if w.document == 0]
    with pytest.raises(SourceError, match="two evaluation documents"):
        measured(series[:1], tmp_path, text=replace(text, evaluation=tuple(only)))


# ------------------------------------------------------------------------- want of memory


def with_free(monkeypatch, nbytes: int) -> None:
    monkeypatch.setattr(curvature_measure, "room_nbytes", lambda device: nbytes)


def test_less_goes_side_by_side_where_less_fits_and_nothing_where_none_does(monkeypatch) -> None:
    bare = replace(QUICK, eigenvalues=0)
    with_free(monkeypatch, product_nbytes(SHAPE, 3, 256) + 100)
    assert find_room(SHAPE, 256, bare, CPU) == (
        3,
        ("3 of 16 windows side by side, to fit in memory",),
    )
    with_free(monkeypatch, product_nbytes(SHAPE, 1, 256) + 100)
    with pytest.raises(MachineError, match=r"eigenvalues 24\.0 MB more") as refusal:
        find_room(SHAPE, 256, QUICK, CPU)
    assert "`curvature:eigenvalues=0`" in refusal.value.hint
    assert find_room(SHAPE, 256, bare, CPU)[0] == 1
    with_free(monkeypatch, 10**6)
    with pytest.raises(MachineError, match=r"takes [\d.]+ .B of memory.*; 1\.0 MB are free"):
        find_room(SHAPE, 256, QUICK, CPU)


@pytest.mark.parametrize(
    "text", ["curvature:probes=1", "curvature:tolerance=2", "curvature:seed=-1"]
)
def test_numbers_that_leave_nothing_to_measure_are_refused(text: str) -> None:
    with pytest.raises(SchemeError, match="out of range"):
        parse_diagnostics([text])
