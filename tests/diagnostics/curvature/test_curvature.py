"""Curvature of subjects and slices through the loss, as an audit has them measured."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.checkpoints.stamps import folder_of
from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme
from qaudit.diagnostics import curvature_measure
from qaudit.diagnostics.case import Case, DocumentChoice
from qaudit.diagnostics.curvature import Curvature
from qaudit.diagnostics.curvature_measure import find_room, measure_curvature, product_nbytes
from qaudit.diagnostics.plane import Plane
from qaudit.diagnostics.plane_measure import Along, Anchor, between, measure_plane
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Task
from qaudit.errors import MachineError, SchemeError, SourceError
from qaudit.model.routes import MergedWeights
from qaudit.saved.codec import encode
from qaudit.saved.results import ResultStore
from qaudit.types import Corpus, Subject
from tests.support.measured import MACHINE, corpus
from tests.support.models import save_model
from tests.support.series import find_checkpoints

CPU = torch.device("cpu")
QUICK = Curvature(documents=3, probes=4, steps=6, tolerance=0.0)
SHAPE = SimpleNamespace(
    num_hidden_layers=4, hidden_size=128, intermediate_size=384, num_attention_heads=4,
    vocab_size=2048,
), 10**6  # fmt: skip


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    root = tmp_path_factory.mktemp("series")
    return [find_checkpoints(save_model(root / f"step{k}", k))[0] for k in (10, 20)]


def measured(members, tmp_path, asked=QUICK, text=None):
    single = len(members) == 1
    share = 1.0 if single else 0.5
    subject = Subject("it", tuple((c, share) for c in members), None if single else "mean")
    task = Task.unplanned(subject, text or corpus(), ())
    case = Case(asked, task, MACHINE, None, ResultStore(tmp_path), lambda *_: None)
    return list(measure_curvature(case))


def test_a_model_is_measured_whole_and_in_parts_and_a_soup_merged(series, tmp_path):
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
    asked = replace(QUICK, eigenvalues=0)
    (whole, *_), (first, *_), (again, *_) = (
        measured(members, tmp_path, asked)
        for members in (series, series[:1], [series[0], series[0]])
    )
    assert whole.trace.estimate != pytest.approx(first.trace.estimate, rel=1e-3)
    assert again.trace.estimate == pytest.approx(first.trace.estimate, rel=1e-5)
    assert (whole.eigenvalues, whole.smallest, whole.products) == ((), None, 4)


def test_documents_are_chosen_by_content_whatever_their_order(series, tmp_path):
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
    only = tuple(w for w in text.evaluation if w.document == 0)
    with pytest.raises(SourceError, match="two evaluation documents"):
        measured(series[:1], tmp_path, text=replace(text, evaluation=only))


def test_less_goes_side_by_side_where_less_fits_and_nothing_where_none_does(monkeypatch):
    def with_free(nbytes):
        monkeypatch.setattr(curvature_measure, "room_nbytes", lambda device: nbytes)

    bare = replace(QUICK, eigenvalues=0)
    with_free(product_nbytes(*SHAPE, 3, 256) + 100)
    said = ("3 of 16 windows side by side, to fit in memory",)
    assert find_room(*SHAPE, 256, bare, CPU) == (3, said)
    with_free(product_nbytes(*SHAPE, 1, 256) + 100)
    with pytest.raises(MachineError, match=r"eigenvalues 24\.0 MB more") as refusal:
        find_room(*SHAPE, 256, QUICK, CPU)
    assert "`curvature:eigenvalues=0`" in refusal.value.hint
    assert find_room(*SHAPE, 256, bare, CPU)[0] == 1
    with_free(10**6)
    with pytest.raises(MachineError, match=r"takes [\d.]+ .B of memory.*; 1\.0 MB are free"):
        find_room(*SHAPE, 256, QUICK, CPU)


# --------------------------------------------------------------------- slices through the loss


RTN = parse_scheme("rtn-3bit:group=16")
GPTQ = parse_scheme("gptq-3bit:group=16")


def points(series, tmp_path, scheme=RTN, **asked):
    return {(row.a, row.b): row for row in rows(series, tmp_path, scheme, **asked)}


def rows(series, tmp_path, scheme=RTN, *, previous=True, **asked):
    before, after = series
    task = Task.unplanned(Subject("after", ((after, 1.0),)), corpus(), (scheme,))
    given = Plane(**{"steps": 2, "beyond": 1, **asked})
    previous = before if previous else None
    case = Case(given, task, MACHINE, previous, ResultStore(tmp_path), lambda *_: None)
    return list(measure_plane(case))


@torch.no_grad()
def loss_by_hand(series, a, b, scheme=RTN):
    """Return the loss of a model whose weights were moved one by one."""
    before, after = (AutoModelForCausalLM.from_pretrained(folder_of(c)) for c in series)
    earlier = before.state_dict()
    for name, parameter in after.named_parameters():
        moved = parameter.clone()
        if name.endswith("proj.weight"):
            quantized = scheme.quantize(Linears({"it": parameter})).weights["it"]
            moved += b * (quantized - parameter)
        moved += a * (earlier[name] - parameter)
        parameter.copy_(moved)
    total = tokens = 0.0
    for window in corpus().evaluation:
        tokens_T = torch.from_numpy(window.tokens.astype("int64"))
        logits_TV = after(input_ids=tokens_T[None]).logits[0]
        scored = slice(window.scored_from, None)
        logits_TV = logits_TV[window.scored_from - 1 : -1]
        total += float(nn.functional.cross_entropy(logits_TV, tokens_T[scored], reduction="sum"))
        tokens += window.scored
    return total / tokens


def test_every_point_of_the_grid_is_a_model_whose_weights_were_moved(series, tmp_path):
    found = points(series, tmp_path, grid=True)
    assert len(found) == 25
    for a, b in [(0, 0), (0, 1), (1, 0), (0.5, 0.5), (-0.5, 1.5), (1, 1)]:
        # float32, moved and summed in another order
        assert found[a, b].ce.estimate == pytest.approx(loss_by_hand(series, a, b), rel=1e-5)
    assert {row.previous for row in found.values()} == {series[0].label}
    # At a = 1 stands the checkpoint before; quantizing it afresh would be another model.
    afresh = loss_by_hand([series[1], series[0]], 0, 1)
    assert found[1.0, 1.0].ce.estimate != pytest.approx(afresh, rel=1e-4)


def test_the_line_holds_the_subject_for_its_documents_and_scheme(series, tmp_path):
    found = points(series, tmp_path, GPTQ)
    assert sorted(found) == [(0.0, -0.5), (0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (0.0, 1.5)]
    task = Task.unplanned(Subject("after", ((series[1], 1.0),)), corpus(), (GPTQ,))
    for filed, b in zip(measure(task, MACHINE, ResultStore(tmp_path)), (0.0, 1.0), strict=True):
        evidence = filed.measurement.evidence
        loss = evidence.nll_sum.sum() / evidence.tokens.sum()
        assert found[0.0, b].ce.estimate == pytest.approx(loss, rel=1e-12)
    middle = found[0.0, 0.0].absolute_change
    assert (middle.estimate, middle.low, middle.high) == (0.0, 0.0, 0.0)
    quantized = found[0.0, 1.0].absolute_change
    assert quantized.low < quantized.estimate < quantized.high
    found = rows(series, tmp_path, previous=False, grid=True)
    assert {(row.a, row.previous) for row in found} == {(0.0, None)}
    assert any("only the line" in note for note in found[0].notes)
    few, all_of_them = rows(series, tmp_path, documents=2), rows(series, tmp_path)
    assert few[0].documents == 2
    assert few[0].tokens < all_of_them[0].tokens
    assert few[0].documents_sha256 != all_of_them[0].documents_sha256
    with pytest.raises(SchemeError, match="quantizes activations too"):
        rows(series, tmp_path, parse_scheme("bnb-int8"))
    for asked in (Plane(), Plane(steps=3, beyond=0), Plane(steps=7, beyond=5)):
        assert {0.0, 1.0} <= set(asked.along)
        assert np.allclose(np.diff(asked.along), 1 / asked.steps)


def test_blocks_stay_until_read_and_weights_between_two_are_on_a_line(series):
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for keeps, blocks in ((False, {1}), (True, {0, 1})):
        anchor = Anchor(inner=RTN, keeps=keeps)
        half = Along(anchor=anchor, part=0.5)
        for block in (0, 1):
            given = Linears({"q": weight}, block=block)
            quantized = anchor.quantize(given).weights["q"]
            moved = half.quantize(given).weights["q"]
            torch.testing.assert_close(moved, (weight + quantized) / 2, rtol=0, atol=1e-6)
        assert {block for block, _ in anchor.moved} == blocks
    unread = Anchor(inner=RTN, keeps=False)
    for block in (0, 1, 2):
        unread.quantize(Linears({"q": weight}, block=block))
    assert len(unread.moved) == 3
    here, there = (WeightFolder(folder_of(c)) for c in series)
    quarter = MergedWeights(("a", "b"), (here, there), partial(between, part=0.25))
    name = quarter.names()[0]
    expected = 0.75 * here.read(name).double() + 0.25 * there.read(name).double()
    torch.testing.assert_close(quarter.read(name).double(), expected, rtol=0, atol=1e-6)
    assert quarter.shape(name) == tuple(expected.shape)

    class Shorter(WeightFolder):
        def names(self):
            return super().names()[1:]

    with pytest.raises(SourceError, match="cannot be merged"):
        MergedWeights(("a", "b"), (here, Shorter(folder_of(series[1]))), partial(between, part=1.0))
