"""Slices through the loss, held against models whose weights were moved by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.checkpoints.stamps import folder_of
from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme
from qaudit.diagnostics.case import Case
from qaudit.diagnostics.diagnostic import parse_diagnostics
from qaudit.diagnostics.plane import Plane
from qaudit.diagnostics.plane_measure import Along, Anchor, Between, measure_plane
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Task
from qaudit.errors import SchemeError, SourceError
from qaudit.saved.results import ResultStore
from qaudit.types import PlaneRow, Subject
from tests.support.measured import MACHINE, corpus
from tests.support.models import save_model
from tests.support.series import find_checkpoints

RTN = parse_scheme("rtn-3bit:group=16")
GPTQ = parse_scheme("gptq-3bit:group=16")


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    root = tmp_path_factory.mktemp("series")
    return [find_checkpoints(save_model(root / f"step{k}", k))[0] for k in (10, 20)]


def points(series, tmp_path, scheme=RTN, *, previous=True, **asked) -> dict:
    found = rows(series, tmp_path, scheme, previous=previous, **asked)
    return {(row.a, row.b): row for row in found}


def rows(series, tmp_path, scheme=RTN, *, previous=True, **asked) -> list[PlaneRow]:
    before, after = series
    task = Task.unplanned(Subject("after", ((after, 1.0),)), corpus(), (scheme,))
    given = Plane(**{"steps": 2, "beyond": 1, **asked})
    quiet = lambda done, total, what: None  # noqa: E731
    case = Case(given, task, MACHINE, before if previous else None, ResultStore(tmp_path), quiet)
    return list(measure_plane(case))


@torch.no_grad()
def loss_by_hand(series, a: float, b: float, scheme=RTN) -> float:
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
        total += float(
            nn.functional.cross_entropy(
                logits_TV[window.scored_from - 1 : -1], tokens_T[scored], reduction="sum"
            )
        )
        tokens += window.scored
    return total / tokens


def test_every_point_of_the_grid_is_a_model_whose_weights_were_moved(series, tmp_path) -> None:
    found = points(series, tmp_path, grid=True)
    assert len(found) == 25
    for a, b in [(0, 0), (0, 1), (1, 0), (0.5, 0.5), (-0.5, 1.5), (1, 1)]:
        # float32, moved and summed in another order
        assert found[a, b].ce.estimate == pytest.approx(loss_by_hand(series, a, b), rel=1e-5)
    assert {row.previous for row in found.values()} == {series[0].label}


def test_the_line_holds_the_subject_and_what_is_measured_of_it(series, tmp_path) -> None:
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


def test_the_direction_of_quantization_is_that_of_the_subject_everywhere(series, tmp_path) -> None:
    # At a = 1 stands the checkpoint before; quantizing it afresh would be another model.
    found = points(series, tmp_path, grid=True)
    afresh = loss_by_hand([series[1], series[0]], 0, 1)
    assert found[1.0, 1.0].ce.estimate != pytest.approx(afresh, rel=1e-4)


def test_without_a_checkpoint_before_only_the_line_is_measured_and_said(series, tmp_path) -> None:
    found = rows(series, tmp_path, previous=False, grid=True)
    assert {row.a for row in found} == {0.0}
    assert all(row.previous is None for row in found)
    assert any("only the line" in note for note in found[0].notes)


def test_documents_are_as_many_as_were_asked_for(series, tmp_path) -> None:
    few, all_of_them = rows(series, tmp_path, documents=2), rows(series, tmp_path)
    assert few[0].documents == 2
    assert few[0].tokens < all_of_them[0].tokens
    assert few[0].documents_sha256 != all_of_them[0].documents_sha256


def test_a_scheme_whose_model_is_no_weights_is_refused(series, tmp_path) -> None:
    with pytest.raises(SchemeError, match="quantizes activations too"):
        rows(series, tmp_path, parse_scheme("bnb-int8"))


def test_what_was_read_is_forgotten_block_by_block_unless_it_is_kept() -> None:
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for keeps, left in ((False, {1}), (True, {0, 1})):
        anchor = Anchor(inner=RTN, keeps=keeps)
        half = Along(anchor=anchor, part=0.5)
        for block in (0, 1):
            given = Linears({"q": weight}, block=block)
            quantized = anchor.quantize(given).weights["q"]
            moved = half.quantize(given).weights["q"]
            torch.testing.assert_close(moved, (weight + quantized) / 2, rtol=0, atol=1e-6)
        assert {block for block, _ in anchor.moved} == left


def test_a_block_stays_until_it_is_read() -> None:
    anchor = Anchor(inner=RTN, keeps=False)
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for block in (0, 1, 2):
        anchor.quantize(Linears({"q": weight}, block=block))
    assert len(anchor.moved) == 3


def test_weights_between_two_checkpoints_are_on_the_straight_line(series) -> None:
    here, there = (WeightFolder(folder_of(c)) for c in series)
    between = Between(("a", "b"), here, there, 0.25)
    name = between.names()[0]
    expected = 0.75 * here.read(name).double() + 0.25 * there.read(name).double()
    torch.testing.assert_close(between.read(name).double(), expected, rtol=0, atol=1e-6)
    assert between.shape(name) == tuple(expected.shape)


def test_checkpoints_of_other_shapes_are_no_plane(series, tmp_path) -> None:
    other = find_checkpoints(save_model(tmp_path / "other", 3))[0]

    class Shorter(WeightFolder):
        def names(self):
            return super().names()[1:]

    with pytest.raises(SourceError, match="cannot be merged"):
        Between(("a", "b"), WeightFolder(folder_of(series[0])), Shorter(folder_of(other)), 1.0)


def test_the_named_models_are_among_the_points() -> None:
    for asked in (Plane(), Plane(steps=3, beyond=0), Plane(steps=7, beyond=5)):
        assert {0.0, 1.0} <= set(asked.along)
        assert np.allclose(np.diff(asked.along), 1 / asked.steps)
    with pytest.raises(SchemeError, match="out of range"):
        parse_diagnostics(["plane:steps=0"])
