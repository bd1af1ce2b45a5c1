"""Subjects diagnosed while they are measured: what comes out, what is kept, what goes without."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import qaudit.diagnostics.sensitivity_measure as sensitivity_part
from qaudit.core.course import previous_of
from qaudit.core.linears import Linears
from qaudit.core.registry import parse_schemes
from qaudit.diagnostics import diagnostic as registry
from qaudit.diagnostics.case import Case, Diagnoses, Measure, is_on_disk
from qaudit.diagnostics.diagnostic import diagnostics, parse_diagnostics
from qaudit.diagnostics.sensitivity import Variant, judge, variants_of
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.tasks import Task
from qaudit.errors import ModelError, SchemeError
from qaudit.judge.table import Measurements
from qaudit.saved.results import ResultStore, read_measurement
from qaudit.types import Checkpoint, Diagnostics, Interval, Ref, Subject
from tests.support.diagnosed import ALL, ROLE
from tests.support.filled import filled
from tests.support.measured import MACHINE, corpus
from tests.support.models import save_model
from tests.support.running import measure_tasks
from tests.support.series import find_checkpoints

SCHEMES = parse_schemes(["gptq-3bit:group=16", "rtn-4bit:group=16"])
QUICK = SCHEMES[1:]


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    root = tmp_path_factory.mktemp("series")
    found = [find_checkpoints(save_model(root / f"step{k}", k))[0] for k in (10, 20)]
    singles = [Subject(c.label, ((c, 1.0),)) for c in found]
    return (*singles, Subject("soup", tuple((c, 0.5) for c in found), "mean"))


def tasks(subjects, schemes=SCHEMES):
    return [Task.unplanned(subject, corpus(), schemes) for subject in subjects]


def diagnose(subjects, folder, *asked, schemes=SCHEMES):
    return measure_tasks(tasks(subjects, schemes), MACHINE, folder, parse_diagnostics(asked))


@pytest.fixture(scope="module")
def done(series, tmp_path_factory):
    folder = tmp_path_factory.mktemp("done")
    return folder, diagnose(series, folder, "weights:group=16", "sensitivity:layers=2")


@pytest.fixture
def again(done, tmp_path):
    """Return a copy of the finished folder."""
    return Path(shutil.copytree(done[0], tmp_path / "again"))


def test_looking_at_weights_changes_no_bit_of_a_measurement_before_or_after(series, done, tmp_path):
    """Schemes that share a pass and one that stands alone see the same weights."""
    plain = diagnose(series, tmp_path)
    for a, b in filled(zip(plain.filed, done[1].filed, strict=True)):
        one, other = a.measurement.evidence, b.measurement.evidence
        np.testing.assert_array_equal(one.nll_sum, other.nll_sum)
        assert a.measurement.notes == b.measurement.notes
        assert a.path.name == b.path.name
    # What was measured before is quantized once more, without an evaluation.
    later = diagnose(series[:1], tmp_path, "weights:group=16").diagnostics.weights
    rows = [row for row in done[1].diagnostics.weights if row.subject == series[0].label]
    assert [replace(row, details=None) for row in later] == [
        replace(row, details=None) for row in rows
    ]


def test_every_subject_has_rows_for_the_model_and_each_role_as_it_was_merged(series, done):
    rows = done[1].diagnostics.weights
    for subject in series:
        own = [row for row in rows if row.subject == subject.label]
        assert [row.name for row in own] == ["all", "q", "k", "v", "o", "gate", "up", "down"]
        assert own[0].weights == sum(row.weights for row in own[1:])
        assert set(own[0].perturbation) == {scheme.short for scheme in SCHEMES}
        assert (done[0] / str(own[0].details)).is_file()
    (row,) = [r for r in rows if (r.subject, r.name) == ("soup", "q")]
    folders = [Path(c.ref.location) / "model.safetensors" for c, _ in series[2].members]
    first, second = map(load_file, folders)
    names = [f"model.layers.{k}.self_attn.q_proj.weight" for k in (0, 1)]
    merged = torch.cat([(first[name] + second[name]) / 2 for name in names]).double()
    rest = merged - merged.mean()
    expected = float((rest**4).mean() / (rest**2).mean() ** 2 - 3)
    assert row.kurtosis == pytest.approx(expected, rel=1e-6)
    one, two, soup = (r for r in rows if r.part == "model")
    assert (one.previous, one.movement, one.grid_drift) == (None, None, {})
    assert two.previous == "step10"
    assert two.movement == pytest.approx(2**0.5, rel=0.05)  # two draws that know nothing
    assert two.grid_drift["3"] == two.grid_distance["3"] - one.grid_distance["3"]
    assert (soup.previous, soup.movement) == (None, None)


def test_what_was_diagnosed_is_found_again_and_another_scheme_alone_is_evaluated(
    series, done, again, monkeypatch
):
    sent = []
    partly = "qaudit.diagnostics.sensitivity_measure.run_partly"

    def counted(model, feed, schemes, *others):
        sent.append(tuple(scheme.short for scheme in schemes))
        return run_blocks(model, feed, schemes, *others)

    monkeypatch.setattr("qaudit.engine.block_pass.run_blocks", counted)
    with monkeypatch.context() as refused:
        refused.setattr(partly, None)
        found = diagnose(series, again, "weights:group=16", "sensitivity:layers=2")
    assert (found.diagnostics, sent) == (done[1].diagnostics, [])
    more = (*SCHEMES, *parse_schemes(["rtn-3bit:group=16"]))
    found = diagnose(series[:1], again, "weights:group=16", schemes=more)
    assert sent[0] == ("rtn-3bit:group=16",)
    assert set(found.diagnostics.weights[0].perturbation) == {s.short for s in more}


def copy_of(subject, label):
    return Subject(label, ((replace(subject.first, label=label), 1.0),))


def test_a_diagnostic_that_fails_is_noted_and_a_twin_has_the_rows_and_reasons_of_its_first(
    series, tmp_path, monkeypatch
):
    def fails(case):
        if case.subject.label == "step10":
            raise MemoryError
        raise ModelError("its blocks are tied in knots")

    monkeypatch.setattr(sensitivity_part, "MEASURE", Measure(fails))
    some = (*series[:2], copy_of(series[1], "main"))
    ended = diagnose(some, tmp_path, "sensitivity", "weights", schemes=QUICK)
    assert (len(ended.filed), len(ended.diagnostics.weights)) == (6, 24)
    _, step20, main = (row for row in ended.diagnostics.weights if row.part == "model")
    assert main == replace(step20, subject="main")
    assert (main.previous, main.details) == ("step10", step20.details)
    reasons = ("out of memory", *["its blocks are tied in knots"] * 2)
    assert [(row.subject, row.reason) for row in ended.diagnostics.skipped] == [
        (one.label, reason) for one, reason in zip(some, reasons, strict=True)
    ]


def test_weights_gone_leave_measurements_and_twins_have_own_rows(series, tmp_path):
    one = Path(shutil.copytree(series[0].first.ref.location, tmp_path / "step10"))
    (checkpoint,) = find_checkpoints(one)
    subject = Subject("step10", ((checkpoint, 1.0),))
    diagnose((subject,), tmp_path, schemes=QUICK)
    assert is_on_disk(checkpoint, one)
    with (one / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert not is_on_disk(checkpoint, one)  # only as a whole
    (one / "model.safetensors").unlink()
    found = diagnose((subject,), tmp_path, "weights", schemes=QUICK)
    assert (len(found.filed), found.failed) == (2, {})
    (skipped,) = found.diagnostics.skipped
    assert skipped.diagnostic == "weights"
    beside = Path(series[0].first.ref.location).with_name("step30")
    (third,) = find_checkpoints(save_model(beside, 30))
    step30 = Subject("step30", ((third, 1.0),))
    some = (*series[:2], step30, copy_of(series[1], "again"))
    rows = diagnose(some, tmp_path, "weights", schemes=QUICK).diagnostics.weights
    _, step20, _, again = (row for row in rows if row.part == "model")
    assert (step20.previous, again.previous) == ("step10", "step30")
    assert again.movement not in (None, step20.movement)


@pytest.mark.parametrize("evicts", [False, True])
def test_weights_that_may_leave_the_disk_are_not_read_beside_others(series, tmp_path, evicts):
    """They are on disk here: whether they are read does not depend on that moment."""
    root = Path(series[0].first.ref.location).parent
    of_hub = replace(series[0].first, commit="a", ref=Ref(str(root), "step10"))
    subjects = [Subject("step10", ((of_hub, 1.0),)), series[1]]
    cases = list[Case]()

    def watch(case):
        cases.append(case)
        return lambda *_: None

    driver = Diagnoses(
        parse_diagnostics(["weights"]), subjects, MACHINE, ResultStore(tmp_path), evicts=evicts
    )
    driver._diagnostics = dict.fromkeys(driver._diagnostics, Measure(lambda case: [], watch))
    task = Task.unplanned(subjects[1], corpus(), SCHEMES)
    task = replace(task, folder=lambda one: root / one.label)
    driver.watch(task, lambda *_: None)
    assert [case.previous for case in cases] == [None if evicts else of_hub]


def test_the_checkpoint_before_is_of_the_same_branch_or_of_the_trunk():
    def point(label, stage, ingredient=None):
        ref = Ref("org/name", label)
        one = Checkpoint(ref, label, commit="a", stage=stage, ingredient=ingredient)
        return Subject(label, ((one, 1.0),))

    a, b = point("a", "stage1"), point("b", "stage1")
    c, d = point("c", "stage2", 1), point("d", "stage2", 1)
    e = point("e", "stage2", 2)
    soup = Subject("soup", (*d.members, *e.members), "mean")
    series = (a, b, c, d, e, soup)
    before = [previous_of(one, series) for one in series]
    assert [one and one.label for one in before] == [None, "a", "b", "c", "b", None]


def test_parts_are_what_is_left_when_all_else_stays_beside_the_sum_of_all(series, done):
    """A model of transformers with one role of its weights replaced has the same loss."""
    tight = parse_schemes(["rtn-3bit:group=16"])
    folder = done[0] / "rounded"
    found = diagnose(series[:1], folder, "sensitivity:layers=2", schemes=tight)
    rows = {(r.part, r.name, r.bits): r for r in found.diagnostics.sensitivity}
    for part, name, touched in (
        ("role", "down", lambda key: "down_proj" in key),
        ("layers", "1..1", lambda key: ".layers.1." in key and "_proj" in key),
    ):
        model = AutoModelForCausalLM.from_pretrained(series[0].first.ref.location)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if touched(key):
                    quantized = tight[0].quantize(Linears({"w": parameter}))
                    parameter.copy_(quantized.weights["w"])
        sums = read_measurement(folder / rows[part, name, 3].evidence).evidence.nll_sum
        np.testing.assert_allclose(sums, plain_losses(model), rtol=1e-5)  # float32 either way
    rows = [r for r in done[1].diagnostics.sensitivity if r.subject == "step20"]
    low, _ = (row for row in rows if row.part == "all")
    alone = [r for r in rows if r.part == "role" and r.bits == low.bits]
    added = sum(r.absolute_change.estimate for r in alone if r.absolute_change)
    assert low.predicted == pytest.approx(added, abs=1e-9)
    assert low.absolute_change is not None
    assert low.absolute_change.estimate != low.predicted
    shares = [row.share.estimate for row in alone if row.share]
    assert not shares or sum(shares) == pytest.approx(1)


@torch.no_grad()
def plain_losses(model):
    losses = []
    for window in corpus().evaluation:
        tokens_T = torch.from_numpy(window.tokens.astype("int64"))
        logits_TV = model(tokens_T[None]).logits[0, :-1].float()
        nll_T = torch.nn.functional.cross_entropy(logits_TV, tokens_T[1:], reduction="none")
        losses.append(float(nll_T[window.scored_from - 1 :].sum()))
    return losses


# --------------------------------------------------------------------- parts, and who may be asked


ROLES = ("q", "o", "down")


def test_every_role_and_every_block_is_in_exactly_one_part_of_its_kind():
    variants = variants_of(ROLES, 10, 3, 4, 4)
    for bits in (3, 4):
        alone = [v for v in variants if v.part == "role" and v.bits[0][1] == bits]
        assert [v.name for v in alone] == list(ROLES)
    groups = [v for v in variants if v.part == "layers"]
    for block in range(10):
        assert [v.bits_of(block, "mlp.down_proj") for v in groups].count(3) == 1
    assert {v.bits_of(7, "self_attn.q_proj") for v in variants if v.part == "all"} == {3, 4}
    for blocks, most, count in ((10, 4, 4), (2, 4, 2), (2, 0, 0)):
        parts = [v.part for v in variants_of(ROLES, blocks, 3, 4, most)]
        assert parts.count("layers") == count
    only = Variant("role", "q", (("q", 3),))
    assert only.bits_of(0, "self_attn.q_proj") == 3
    assert only.bits_of(0, "self_attn.k_proj") is None
    assert Variant("layers", "0..1", (("q", 3),), (0, 2)).bits_of(2, "self_attn.q_proj") is None


def test_diagnostics_read_back_all_stands_for_each_and_others_are_refused():
    assert set(diagnostics()) == {"curvature", "plane", "positions", "sensitivity", "weights"}
    for name in diagnostics():
        plain = diagnostics()[name]()
        assert parse_diagnostics([plain.spec]) == parse_diagnostics([plain.short]) == (plain,)
        assert plain.short == name
        module = registry.module(name, "_measure") if plain.reads_weights else None
        assert module is None or isinstance(module.MEASURE, Measure)
    (asked,) = parse_diagnostics(["sensitivity:layers=8:scheme=gptq:bits=3:group=64"])
    assert asked.short == "sensitivity:layers=8:scheme=gptq:bits=3:group=64"
    assert parse_diagnostics([asked.spec]) == (asked,)
    every = {one.name: one for one in parse_diagnostics(["all", "weights:group=64"])}
    assert list(every) == list(diagnostics())
    assert every["weights"].short == "weights:group=64"
    assert parse_diagnostics(["weights:group=64,all"])[0] in every.values()
    for text, sentence in (
        ("kurtosis", "there is no diagnostic `kurtosis`"),
        ("weights:groups=3", "`weights` has no parameter `groups`"),
        ("weights:group=64,weights:group=32", "`weights` is requested twice"),
        ("curvature:probes=1", "out of range"),
        ("curvature:tolerance=2", "out of range"),
        ("curvature:seed=-1", "out of range"),
        ("plane:steps=0", "out of range"),
    ):
        with pytest.raises(SchemeError, match=sentence):
            parse_diagnostics([text])


FOUR = (replace(ALL, bits=4), replace(ROLE, bits=4))


def test_a_role_adds_most_with_all_its_interval():
    for rows, rules in (
        ([ROLE], ["QA035"]),
        ([replace(ROLE, share=Interval(0.6, 0.49, 0.7))], []),  # not all of the interval
        ([replace(ROLE, share=None)], []),
        (FOUR, []),  # said at the fewer bits alone
        ([*FOUR, ROLE], ["QA035"]),
        ([replace(ROLE, part="layers", name="0..1")], []),
    ):
        _, findings = judge(Measurements((), (), 0.95), Diagnostics(sensitivity=(ALL, *rows)))
        assert [finding.rule for finding in findings] == rules
