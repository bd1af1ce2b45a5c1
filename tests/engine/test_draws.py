"""Several draws of one subject: what is measured once more, what is not, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qaudit.engine.measure
from qaudit.core.linears import Inputs
from qaudit.core.registry import parse_schemes
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Machine, Task
from qaudit.engine.tokens import perturbed, perturbed_inputs
from qaudit.planning.price import Pricing, flops, passes_of, price_otherwise
from qaudit.planning.sizes import Load, Sizes, TextSize
from qaudit.saved.results import ResultStore
from qaudit.types import (
    Checkpoint,
    Corpus,
    EvaluationDocument,
    Price,
    Protocol,
    Ref,
    Subject,
    WeightFile,
    Window,
)
from tests.support.models import save_model
from tests.support.running import floor_of, is_stored, measure_each, tasks_of
from tests.support.series import find_checkpoints

MACHINE = Machine(torch.device("cpu"), torch.float32, stream_limit_nbytes=10**9)
SCHEMES = parse_schemes(["gptq-3bit:group=16", "rtn-4bit:group=16", "awq-4bit:group=16"])
DRAWN = [scheme for scheme in SCHEMES if scheme.name != "rtn"]


def windows(seed: int, count: int = 4) -> tuple[Window, ...]:
    random = np.random.default_rng(seed)
    return tuple(
        Window(k, random.integers(3, 290, 12 + 5 * k).astype(np.int32)) for k in range(count)
    )


def corpus(draws: int = 3) -> Corpus:
    documents = tuple(EvaluationDocument(f"d{k}", f"{k}" * 64, 40) for k in range(4))
    return Corpus(
        Protocol(context=32, calibration_seed=4),
        windows(1),
        windows(0),
        documents,
        further=tuple(windows(k) for k in range(2, draws + 1)),
    )


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> list[Subject]:
    root = tmp_path_factory.mktemp("series")
    for seed, step in enumerate((10, 20)):
        save_model(root / f"step{step}", seed)
    found = find_checkpoints(root)
    assert len(found) == 2
    return [Subject(c.label, ((c, 1.0),)) for c in found]


Passes = list[tuple[str, ...]]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Return a list that grows by every pass: what was measured in it."""
    seen: Passes = []
    really = qaudit.engine.measure.send

    def watched(task: Task, *rest: Any) -> Any:
        full = ["fp"] if task.pass_.full_precision else []
        seen.append((task.subject.label, *full, *(scheme.name for scheme in task.schemes)))
        return really(task, *rest)

    monkeypatch.setattr("qaudit.engine.measure.send", watched)
    return seen


def test_only_what_calibrates_is_measured_again_and_the_last_alone_is_perturbed(
    subjects: list[Subject], store: ResultStore, passes: Passes
) -> None:
    tasks = tasks_of(subjects, corpus(), SCHEMES)
    filed = [measure_each(task, MACHINE, store) for task in tasks]
    whole, drawn = ("fp", "gptq", "rtn", "awq"), ("gptq", "awq")
    assert passes == [
        ("step10", *whole),
        ("step10", *drawn),
        ("step10", *drawn),
        ("step20", *whole),
        ("step20", *drawn),
        ("step20", *drawn),
        ("step20", "fp", *drawn),
    ]
    for found in filed:
        measured = [(f.measurement.scheme, f.measurement.calibration_seed) for f in found]
        names = [scheme.short for scheme in SCHEMES]
        again = [(s.short, seed) for seed in (5, 6) for s in DRAWN]
        assert measured == [("fp", 4), *((name, 4) for name in names), *again]
        assert {f.path.parent.name for f in found} == {"evidence"}


def test_a_draw_is_what_its_seed_alone_would_be(
    subjects: list[Subject], store: ResultStore, tmp_path: Path
) -> None:
    text = corpus()
    together = measure_each(tasks_of(subjects, text, SCHEMES)[0], MACHINE, store)
    for draw in text.draws:
        alone = measure(
            Task.unplanned(subjects[0], draw, SCHEMES), MACHINE, ResultStore(tmp_path / "alone")
        )
        seed = draw.protocol.calibration_seed
        by_scheme = {f.measurement.scheme: f.measurement.evidence for f in alone}
        found = [f.measurement for f in together if f.measurement.calibration_seed == seed]
        assert len(found) == (4 if seed == 4 else 2)
        for m in found:
            np.testing.assert_array_equal(m.evidence.nll_sum, by_scheme[m.scheme].nll_sum)
    for scheme in DRAWN:  # each draw makes another model
        own = [f.measurement.evidence for f in together if f.measurement.scheme == scheme.short]
        assert len({evidence.nll_sum.tobytes() for evidence in own}) == 3


def test_every_measurement_is_found_again_by_itself(
    subjects: list[Subject], store: ResultStore, passes: Passes
) -> None:
    task = tasks_of(subjects, corpus(), SCHEMES)[1]
    before = measure_each(task, MACHINE, store)
    passes.clear()
    lost = next(
        f
        for f in before
        if (f.measurement.scheme, f.measurement.calibration_seed) == (DRAWN[1].short, 5)
    )
    lost.path.unlink()
    assert not is_stored(task, MACHINE, store)
    after = measure_each(task, MACHINE, store)
    assert passes == [("step20", "awq")]
    for a, b in zip(before, after, strict=True):
        sums = a.measurement.evidence.nll_sum, b.measurement.evidence.nll_sum
        np.testing.assert_array_equal(*sums)
    (full,) = (f for f in before if f.measurement.scheme == "fp")
    passes.clear()
    full.path.unlink()
    measure_each(task, MACHINE, store)
    assert passes == [("step20", "fp")]


def test_more_draws_later_measure_only_those(
    subjects: list[Subject], store: ResultStore, passes: Passes
) -> None:
    measure_each(tasks_of(subjects, corpus(1), SCHEMES)[1], MACHINE, store)
    measure_each(tasks_of(subjects, corpus(2), SCHEMES)[1], MACHINE, store)
    drawn = ("step20", "gptq", "awq")
    assert passes[1:] == [("step20", "fp", *drawn[1:]), drawn]
    measure_each(tasks_of(subjects, corpus(3), SCHEMES)[1], MACHINE, store)
    assert passes[3:] == [drawn]


def test_the_floor_is_the_first_draw_perturbed_and_no_measurement(
    subjects: list[Subject], store: ResultStore, tmp_path: Path
) -> None:
    tasks = tasks_of(subjects, corpus(), SCHEMES)
    assert [[one.perturbed for one in some] for some in tasks] == [
        [False, False, False],
        [False, False, False, True],
    ]
    assert floor_of(tasks, MACHINE, store) == {}
    filed = measure_each(tasks[1], MACHINE, store)
    assert len(list((tmp_path / "evidence" / "floor").glob("*.npz"))) == 3
    moved = floor_of(tasks, MACHINE, store)
    assert set(moved) == {("step20", name) for name in ("fp", *(s.short for s in DRAWN))}
    assert not [f for f in filed if "floor" in f.path.parts[-2]]
    first, other = (
        next(
            f.measurement.evidence
            for f in filed
            if (f.measurement.scheme, f.measurement.calibration_seed) == (DRAWN[0].short, seed)
        )
        for seed in (4, 5)
    )
    drawn = abs(first.nll_sum.sum() - other.nll_sum.sum()) / first.tokens.sum()
    assert 0 < moved["step20", DRAWN[0].short].nats < 2 * drawn
    assert 0 <= moved["step20", "fp"].nats < 1e-6


def test_progress_names_the_pass(subjects: list[Subject], store: ResultStore) -> None:
    said: list[str] = []
    (*_, task) = tasks_of(subjects, corpus(2), parse_schemes(["gptq-4bit"]))
    for one in task:
        measure(one, MACHINE, store, lambda done, total, what: said.append(what))
    heard = dict.fromkeys(what.partition(",")[2].strip() for what in said)
    assert list(heard) == ["", "calibration seed 5", "rounded otherwise"]


def test_rounding_moves_gptq_and_hardly_what_does_not_calibrate(
    subjects: list[Subject], store: ResultStore
) -> None:
    task = Task.unplanned(subjects[1], corpus(1), SCHEMES)
    again = task.changed(perturbed=True)
    for one in (task, again):
        measure(one, MACHINE, store)
    moved = {name: one for (_, name), one in floor_of([[task, again]], MACHINE, store).items()}
    gptq, rtn, awq = (scheme.short for scheme in SCHEMES)
    assert set(moved) == {"fp", gptq, rtn, awq}
    # Losses are near 6 nats, and float32 has seven digits.
    assert max(moved["fp"].nats, moved[rtn].nats) < 1e-6
    assert min(moved[gptq].nats, moved[awq].nats) > 0


def test_full_precision_diverges_from_itself_by_the_floor_of_kl(
    subjects: list[Subject], store: ResultStore
) -> None:
    task = Task.unplanned(subjects[1], corpus(1), SCHEMES)
    again = task.changed(perturbed=True)
    filed = [measure(one, MACHINE, store) for one in (task, again)]
    floor = floor_of([[task, again]], MACHINE, store)
    rtn = SCHEMES[1].short
    (full, *_), (other, *_) = filed
    assert full.measurement.evidence.fidelity is None
    fidelity = other.measurement.evidence.fidelity
    assert fidelity is not None
    tokens = other.measurement.evidence.tokens.sum()
    assert floor["step20", "fp"].kl == fidelity.kl_sum.sum() / tokens
    assert floor["step20", "fp"].top1 == 1 - fidelity.same_top.sum() / tokens
    # Logits are near 1 and move by 1e-6: KL divergence by its square.
    assert 0 < fidelity.kl_sum.sum() / tokens < 1e-10
    assert (floor["step20", rtn].kl or 0.0) < 1e-7


def test_a_part_of_the_floor_is_measured_against_what_is_unperturbed(
    subjects: list[Subject], store: ResultStore
) -> None:
    task = Task.unplanned(subjects[1], corpus(1), SCHEMES, perturbed=True)
    before = measure(task, MACHINE, store)
    before[1].path.unlink()
    after = measure(task, MACHINE, store)
    for one, two in zip(before, after, strict=True):
        sums = one.measurement.evidence.fidelity, two.measurement.evidence.fidelity
        np.testing.assert_array_equal(*(part.kl_sum for part in sums if part is not None))


@pytest.mark.parametrize(
    ("dtype", "units"), [(torch.float32, 4), (torch.bfloat16, 1), (torch.float16, 1)]
)
def test_each_value_moves_by_some_units(dtype: torch.dtype, units: int) -> None:
    values = torch.randn(3, 5, 7).to(dtype)
    values[0, 0, :3] = torch.tensor([0.0, float("inf"), float("nan")], dtype=dtype)
    moved = perturbed(values, 3)
    assert torch.equal(moved[0, 0, :2], values[0, 0, :2])
    assert torch.isnan(moved[0, 0, 2])
    rest, after = values.flatten()[3:], moved.flatten()[3:]
    step = (after.double() - rest.double()).abs() / rest.double().abs()
    assert (after != rest).all()
    assert (step <= units * torch.finfo(dtype).eps).all()
    assert ((after > rest).any()) and ((after < rest).any())
    assert torch.equal(moved.nan_to_num(), perturbed(values, 3).nan_to_num())
    assert not torch.equal(moved.nan_to_num(), perturbed(values, 4).nan_to_num())


def test_a_gram_matrix_stays_symmetric_and_moves_by_four_units_of_its_diagonal() -> None:
    x_TC = torch.randn(50, 7, dtype=torch.float64) * torch.tensor([1e-3, 1, 1, 1e4, 0, 1, 1])
    gram_CC = (x_TC.T @ x_TC).float()
    inputs = Inputs(gram_CC, x_TC.abs().mean(0).float(), 50)
    moved = perturbed_inputs(inputs, 2)
    assert torch.equal(moved.gram_CC, moved.gram_CC.T)
    assert torch.equal(moved.absmean_C, inputs.absmean_C)
    scale_C = gram_CC.diagonal().double().sqrt()
    limit_CC = 4 * 2.0**-23 * scale_C * scale_C[:, None]
    difference_CC = (moved.gram_CC.double() - gram_CC.double()).abs()
    # float32 rounds the sum once more, by at most half a unit of the largest
    assert (difference_CC <= 1.2 * limit_CC).all()
    assert (difference_CC >= 0.8 * limit_CC).all()


# --------------------------------------------------------------------- the price

SIZES = Sizes(
    parameters=10**6,
    blocks=4,
    block_parameters=2 * 10**5,
    rest_parameters=2 * 10**5,
    hidden=128,
    widest=512,
    vocabulary=1000,
)
PROTOCOL = Protocol(context=64)


def priced(repeats: int, schemes: Any = SCHEMES, **more: Any) -> Any:
    series = more.get("series", [series_of("step10"), series_of("step20"), soup()])
    pricing = Pricing(SIZES, TextSize.bound(PROTOCOL), Price())
    once, often = (
        sum((p.price for p in passes_of(series, schemes, draws, pricing)), Price())
        for draws in (1, repeats)
    )
    return Price(
        often.flops - once.flops, often.nbytes_read - once.nbytes_read, often.streams - once.streams
    )


def series_of(label: str) -> Subject:
    file = WeightFile("model.safetensors", 1000, "0" * 64)
    return Subject(label, ((Checkpoint(Ref("x", label), label, (file,)), 1.0),))


def soup() -> Subject:
    members = [series_of(label).first for label in ("step10", "step20")]
    return Subject("soup", tuple((m, 0.5) for m in members), "mean")


def test_each_draw_costs_a_pass_of_what_calibrates() -> None:
    assert priced(1) == priced(4, parse_schemes(["rtn-4bit", "bnb-nf4"])) == Price()
    again, more = priced(2), priced(3)
    assert again.streams == 3 * (1 + 2)  # what is drawn, full precision beside it
    assert more.streams - again.streams == 3 * (1 + 2)
    assert again.nbytes_read == 1000 + 1000 + 2000
    each = flops(SIZES, Load.of(DRAWN, TextSize.bound(PROTOCOL)))
    assert more.flops - again.flops == pytest.approx(3 * each)


def test_what_ships_is_rounded_otherwise_for_a_tenth_of_the_scan() -> None:
    pricing = Pricing(SIZES, TextSize.bound(PROTOCOL), Price())
    few, many = ([series_of(f"step{k}") for k in range(count)] for count in (2, 40))
    for series, fits in ((few, False), (many, True)):
        passes = passes_of(series, SCHEMES, 1, pricing)
        assert not [step for step in passes if step.perturbed]
        price = price_otherwise(series, SCHEMES, pricing, passes, ("cpu", "float32"))
        assert (price is not None) is fits
        # Nothing calibrates.
        assert price_otherwise(series, SCHEMES[1:2], pricing, passes, ("cpu", "float32")) is None
    assert price is not None
    assert price.streams == 1 + 2  # full precision runs unperturbed as well
    assert 0 < price.seconds_low <= price.seconds_high
