"""One subject on this machine: what is found, what is measured, what is refused, what it takes.

Several draws of it, its items in rounds, and the bytes of a whole model.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from qaudit.checkpoints.folder import find_all
from qaudit.checkpoints.stamps import folder_of
from qaudit.core.linears import Inputs
from qaudit.core.registry import parse_schemes
from qaudit.engine import kept_weights
from qaudit.engine import measure as measuring
from qaudit.engine.measure import StoredSizes, in_rounds, measure
from qaudit.engine.tally import Tally
from qaudit.engine.tasks import Task, look_up
from qaudit.engine.tokens import perturbed, perturbed_inputs
from qaudit.errors import SourceError
from qaudit.planning.price import Pricing, flops, passes_of, price_otherwise
from qaudit.planning.sizes import Load, Sizes, TextSize
from qaudit.saved.results import ResultStore, read_measurement
from qaudit.settings import Recipe
from qaudit.types import Checkpoint, Item, Price, Protocol, Ref, Subject, WeightFile, Window
from tests.support import tiny
from tests.support.filled import filled
from tests.support.measured import MACHINE, corpus
from tests.support.models import VOCABULARY, save_model
from tests.support.running import floor_of, is_stored, measure_each, tasks_of
from tests.support.series import find_checkpoints


@pytest.fixture
def checkpoint(tmp_path):
    (found,) = find_checkpoints(save_model(tmp_path / "step10", 0))
    return found


def task(checkpoint, **more):
    subject = Subject(checkpoint.label, ((checkpoint, 1.0),))
    return replace(Task.unplanned(subject, corpus(), parse_schemes(["rtn-4bit"])), **more)


def file_of(checkpoint):
    return Path(checkpoint.ref.location) / "model.safetensors"


def write_other_weights(path):
    tensors = load_file(path)
    save_file({k: t.neg() for k, t in tensors.items()}, path, metadata={"format": "pt"})


def same_losses(results, others):
    for a, b in filled(zip(results, others, strict=True)):
        sums = a.measurement.evidence.nll_sum, b.measurement.evidence.nll_sum
        np.testing.assert_array_equal(*sums)


def test_what_is_on_disk_is_found_by_hashes_without_the_weights(checkpoint, store):
    weights = file_of(checkpoint)
    hashes = {
        f"step10/{name}": hashlib.sha256(weights.with_name(name).read_bytes()).hexdigest()
        for name in (weights.name, "config.json")
    }
    assert not look_up(task(checkpoint), MACHINE, store).is_complete
    measured = measure(task(checkpoint), MACHINE, store)
    weights.unlink()
    standing = look_up(task(checkpoint), MACHINE, store)
    assert standing.is_complete
    assert [f.path for f in measure(task(checkpoint), MACHINE, store)] == [f.path for f in measured]
    for filed in filled([*measured, *standing.files.values()]):
        assert filed.measurement.weights_sha256 == hashes


def test_equal_weights_may_lie_in_another_place(checkpoint, store, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    here = Path(checkpoint.ref.location)
    twin = Checkpoint(Ref("org/twin", "v1"), "twin", checkpoint.files, commit=40 * "a")
    folder_of(twin).mkdir(parents=True)
    shutil.copy(here / "config.json", folder_of(twin))
    whole = measure(task(checkpoint), MACHINE, ResultStore(tmp_path / "other"))
    same_losses(whole, measure(task(twin, folder=lambda _: here), MACHINE, store))


CHANGED = "`step10` have changed since the audit was planned"


@pytest.mark.parametrize("change", [write_other_weights, Path.unlink], ids=["other", "gone"])
def test_weights_that_change_meanwhile_give_no_number(checkpoint, store, monkeypatch, change):
    send = measuring.send

    def changed(*args):
        measured = send(*args)
        change(file_of(checkpoint))
        return measured

    monkeypatch.setattr(measuring, "send", changed)
    with pytest.raises(SourceError, match=CHANGED):
        measure(task(checkpoint), MACHINE, store)
    assert not look_up(task(checkpoint), MACHINE, store).files
    if change is write_other_weights:  # they are others from the start now
        with pytest.raises(SourceError, match=CHANGED):
            measure(task(checkpoint), MACHINE, store)


def test_weights_without_a_hash_are_refused_with_what_is_wrong(checkpoint, store):
    bare = Checkpoint(checkpoint.ref, "step10")
    with pytest.raises(SourceError, match="could not be read when the audit was planned"):
        look_up(task(bare), MACHINE, store)
    file_of(checkpoint).write_bytes(b"oops")
    with pytest.raises(SourceError, match="cut short"):
        look_up(task(bare), MACHINE, store)


# --------------------------------------------------------------------- several draws

SCHEMES = parse_schemes(["gptq-3bit:group=16", "rtn-4bit:group=16", "awq-4bit:group=16"])
DRAWN = [scheme for scheme in SCHEMES if scheme.name != "rtn"]


def windows(seed):
    random = np.random.default_rng(seed)
    lengths = range(12, 32, 5)
    return tuple(
        Window(k, random.integers(3, 290, n).astype(np.int32)) for k, n in enumerate(lengths)
    )


def drawn_corpus(draws=3):
    protocol = Protocol(context=32, calibration_seed=4)
    further = tuple(windows(k) for k in range(2, draws + 1))
    return replace(corpus(), protocol=protocol, calibration=windows(1), further=further)


def series(folder):
    for seed, step in enumerate((10, 20)):
        save_model(folder / f"step{step}", seed)
    return [Subject(c.label, ((c, 1.0),)) for c in find_checkpoints(folder)]


@pytest.fixture
def subjects(once):
    return once(series)


@contextmanager
def watched():
    """Yield a list that grows by every pass: what was measured in it."""
    seen, send = [], measuring.send

    def sending(task, *rest):
        full = ["fp"] if task.pass_.full_precision else []
        seen.append((task.subject.label, *full, *(scheme.name for scheme in task.schemes)))
        return send(task, *rest)

    with mock.patch.object(measuring, "send", sending):
        yield seen


def measure_draws(folder):
    """Measure three draws of both subjects, and how rounding moves the last."""
    tasks = tasks_of(series(folder), drawn_corpus(), SCHEMES)
    store = ResultStore(folder / "evidence")
    before = floor_of(tasks, MACHINE, store)
    with watched() as passes:
        filed = [measure_each(some, MACHINE, store) for some in tasks]
    return SimpleNamespace(tasks=tasks, store=store, filed=filed, passes=passes, before=before)


@pytest.fixture
def drawn(once):
    return once(measure_draws)


def of(filed, scheme, seed):
    """Return the result of a scheme in a draw."""
    return {(f.measurement.scheme, f.measurement.calibration_seed): f for f in filed}[scheme, seed]


def test_only_what_calibrates_is_measured_again_and_the_last_alone_is_perturbed(drawn):
    perturbed_tasks = [[one.perturbed for one in some] for some in drawn.tasks]
    assert perturbed_tasks == [[False] * 3, [False] * 3 + [True]]
    whole, again = ("fp", "gptq", "rtn", "awq"), ("gptq", "awq")
    assert drawn.passes == [
        *(("step10", *some) for some in (whole, again, again)),
        *(("step20", *some) for some in (whole, again, again)),
        ("step20", "fp", *again),
    ]
    for found in drawn.filed:
        measured = [(f.measurement.scheme, f.measurement.calibration_seed) for f in found]
        names = [scheme.short for scheme in SCHEMES]
        more = [(s.short, seed) for seed in (5, 6) for s in DRAWN]
        assert measured == [("fp", 4), *((name, 4) for name in names), *more]
        assert {f.path.parent.name for f in found} == {"evidence"}
    assert (drawn.before, len(list((drawn.store.folder / "floor").glob("*.npz")))) == ({}, 3)
    moved = floor_of(drawn.tasks, MACHINE, drawn.store)
    assert set(moved) == {("step20", name) for name in ("fp", *(s.short for s in DRAWN))}
    assert not [f for f in drawn.filed[1] if "floor" in f.path.parts[-2]]
    first, other = (
        of(drawn.filed[1], DRAWN[0].short, seed).measurement.evidence for seed in (4, 5)
    )
    apart = abs(first.nll_sum.sum() - other.nll_sum.sum()) / first.tokens.sum()
    assert 0 < moved["step20", DRAWN[0].short].nats < 2 * apart
    assert 0 <= moved["step20", "fp"].nats < 1e-6


def test_a_draw_is_what_its_seed_alone_would_be(drawn, tmp_path):
    text, together = drawn_corpus(), drawn.filed[0]
    for draw in text.draws:
        subject = drawn.tasks[0][0].subject
        lone = measure(Task.unplanned(subject, draw, SCHEMES), MACHINE, ResultStore(tmp_path))
        seed = draw.protocol.calibration_seed
        by_scheme = {f.measurement.scheme: f for f in lone}
        found = [f for f in together if f.measurement.calibration_seed == seed]
        assert len(found) == (4 if seed == 4 else 2)
        same_losses(found, [by_scheme[f.measurement.scheme] for f in found])
    for scheme in DRAWN:  # each draw makes another model
        some = [of(together, scheme.short, seed).measurement.evidence for seed in (4, 5, 6)]
        assert len({evidence.nll_sum.tobytes() for evidence in some}) == 3


def test_every_measurement_is_found_again_by_itself(drawn, tmp_path):
    store = ResultStore(shutil.copytree(drawn.store.folder, tmp_path / "evidence"))
    subject_tasks, before = drawn.tasks[1], drawn.filed[1]
    for scheme, seed, expected in (
        (DRAWN[1].short, 5, ("step20", "awq")),
        ("fp", 4, ("step20", "fp")),
    ):
        (store.folder / of(before, scheme, seed).path.name).unlink()
        assert not is_stored(subject_tasks, MACHINE, store)
        with watched() as passes:
            same_losses(before, measure_each(subject_tasks, MACHINE, store))
        assert passes == [expected]


def test_more_draws_later_measure_only_those_and_progress_names_each(subjects, store):
    said, again = [], ("step20", "gptq", "awq")
    first = [("step20", "fp", "gptq", "rtn", "awq"), ("step20", "fp", "gptq", "awq")]
    for draws, expected in ((1, first), (2, [again]), (3, [again])):
        with watched() as passes:
            for one in tasks_of(subjects, drawn_corpus(draws), SCHEMES)[1]:
                measure(one, MACHINE, store, lambda done, total, what: said.append(what))
        assert passes == expected
    heard = dict.fromkeys(what.partition(",")[2].strip() for what in said)
    assert list(heard) == ["", "rounded otherwise", "calibration seed 5", "calibration seed 6"]


def test_rounding_moves_what_calibrates_and_hardly_what_does_not(subjects, store):
    plain = Task.unplanned(subjects[1], drawn_corpus(1), SCHEMES)
    moved = plain.changed(perturbed=True)
    (full, *_), perturbed_results = (measure(one, MACHINE, store) for one in (plain, moved))
    floor = {name: one for (_, name), one in floor_of([[plain, moved]], MACHINE, store).items()}
    gptq, rtn, awq = (scheme.short for scheme in SCHEMES)
    assert set(floor) == {"fp", gptq, rtn, awq}
    # Losses are near 6 nats, and float32 has seven digits.
    assert max(floor["fp"].nats, floor[rtn].nats) < 1e-6
    assert min(floor[gptq].nats, floor[awq].nats) > 0
    assert full.measurement.evidence.fidelity is None
    evidence = perturbed_results[0].measurement.evidence
    fidelity, tokens = evidence.fidelity, evidence.tokens.sum()
    assert floor["fp"].kl == fidelity.kl_sum.sum() / tokens
    assert floor["fp"].top1 == 1 - fidelity.same_top.sum() / tokens
    # Logits are near 1 and move by 1e-6: KL divergence by its square.
    assert 0 < fidelity.kl_sum.sum() / tokens < 1e-10
    assert (floor[rtn].kl or 0.0) < 1e-7
    perturbed_results[1].path.unlink()  # a part is measured against what is unperturbed
    for one, two in zip(perturbed_results, measure(moved, MACHINE, store), strict=True):
        sums = (some.measurement.evidence.fidelity.kl_sum for some in (one, two))
        np.testing.assert_array_equal(*sums)


@pytest.mark.parametrize(
    ("dtype", "units"), [(torch.float32, 4), (torch.bfloat16, 1), (torch.float16, 1)]
)
def test_each_value_moves_by_some_units(dtype, units):
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


def test_a_gram_matrix_stays_symmetric_and_moves_by_four_units_of_its_diagonal():
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
    parameters=10**6, blocks=4, block_parameters=2 * 10**5, rest_parameters=2 * 10**5,
    hidden=128, widest=512, vocabulary=1000,
)  # fmt: skip
PROTOCOL = Protocol(context=64)


def subject_of(label):
    file = WeightFile("model.safetensors", 1000, "0" * 64)
    return Subject(label, ((Checkpoint(Ref("x", label), label, (file,)), 1.0),))


def priced(repeats, schemes=SCHEMES):
    """Return what further draws of two checkpoints and their soup cost."""
    both = [subject_of("step10"), subject_of("step20")]
    soup = Subject("soup", tuple((subject.first, 0.5) for subject in both), "mean")
    pricing = Pricing(SIZES, TextSize.bound(PROTOCOL), Price())
    single, often = (
        sum((p.price for p in passes_of([*both, soup], schemes, draws, pricing)), Price())
        for draws in (1, repeats)
    )
    names = ("flops", "nbytes_read", "streams")
    return Price(*(getattr(often, name) - getattr(single, name) for name in names))


def test_each_draw_costs_a_pass_and_what_ships_is_rounded_otherwise_for_a_tenth_of_the_scan():
    assert priced(1) == priced(4, parse_schemes(["rtn-4bit", "bnb-nf4"])) == Price()
    again, more = priced(2), priced(3)
    assert again.streams == 3 * (1 + 2)  # what is drawn, full precision beside it
    assert (more.streams - again.streams, again.nbytes_read) == (3 * (1 + 2), 1000 + 1000 + 2000)
    each = flops(SIZES, Load.of(DRAWN, TextSize.bound(PROTOCOL)))
    assert more.flops - again.flops == pytest.approx(3 * each)
    pricing = Pricing(SIZES, TextSize.bound(PROTOCOL), Price())
    few, many = ([subject_of(f"step{k}") for k in range(count)] for count in (2, 40))
    for some, fits in ((few, False), (many, True)):
        passes = passes_of(some, SCHEMES, 1, pricing)
        assert not [step for step in passes if step.perturbed]
        price = price_otherwise(some, SCHEMES, pricing, passes, ("cpu", "float32"))
        assert (price is not None) is fits
        # Nothing calibrates.
        assert price_otherwise(some, SCHEMES[1:2], pricing, passes, ("cpu", "float32")) is None
    assert price is not None
    assert price.streams == 1 + 2  # full precision runs unperturbed as well
    assert 0 < price.seconds_low <= price.seconds_high


# --------------------------------------------------------------------- items in rounds

ROUND = 96  # tokens: one task


def with_items(count=12):
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


def subject_in(folder):
    (checkpoint,) = find_all([str(folder)], Recipe(()), hashed=True)
    return Subject("model", ((checkpoint, 1.0),))


@pytest.fixture
def subject(once):
    return subject_in(once(save_model, 2))


def measure_items(store, subject, tasks=()):
    text = with_items().of_tasks(tasks) if tasks else with_items()
    schemes = parse_schemes(["rtn-4bit:group=16,gptq-3bit:group=16,awq-4bit:group=16"])
    return measure(Task.unplanned(subject, text, schemes), MACHINE, ResultStore(store))


@contextmanager
def counted():
    """Count the groups of linears that are written, and those that are read."""
    names = ("save_tensors", "_read_group")
    calls = {name: mock.Mock(wraps=getattr(kept_weights, name)) for name in names}
    with mock.patch.multiple(kept_weights, **calls):
        yield calls


def in_short_rounds(store, subject):
    """Measure one task in each round; return the folder, the results and what was counted."""
    with counted() as calls, mock.patch.object(measuring, "ROUND_TOKENS", ROUND):
        return store, measure_items(store, subject), calls


@pytest.fixture
def parts(once, subject):
    return once(in_short_rounds, subject)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(measuring, "ROUND_TOKENS", ROUND)


def files(store):
    return {path: path.stat().st_mtime_ns for path in store.rglob("*.npz")}


def files_of_tasks(store):
    return [path for path in files(store) if "tasks" in path.parts]


def tasks_in(results):
    return {
        (one.measurement.scheme, task.task): (task.nll.tolist(), task.items.tolist())
        for one in results
        for task in one.measurement.evidence.tasks
    }


def test_rounds_change_no_loss_and_quantize_once(subject, tmp_path, parts):
    whole = measure_items(tmp_path / "whole", subject)
    store, results, calls = parts
    assert len(in_rounds(with_items(), trees=True)) == 1
    for most in (1, ROUND):  # at least a task, and documents in the first
        with mock.patch.object(measuring, "ROUND_TOKENS", most):
            rounds = in_rounds(with_items(4), trees=True)
        assert [(len(part.items), bool(part.evaluation)) for part in rounds] == [(2, 1), (2, 0)]
        assert [w.document for part in rounds for w in part.item_windows] == [*range(6)] * 2
    with mock.patch.object(measuring, "ROUND_TOKENS", ROUND):  # whatever tasks are beside one
        measure_items(tmp_path / "one", subject, ("task-3",))
        assert tasks_in(parts[1]) == tasks_in(measure_items(tmp_path / "one", subject))
    # gptq and awq alone: rtn needs no calibration
    assert calls["_read_group"].call_count == 5 * calls["save_tensors"].call_count > 0
    assert len(whole) == len(results) == 4
    same_losses(whole, results)
    assert tasks_in(whole) == tasks_in(results)
    assert not (store / "weights").exists()
    assert len(files(store)) == 7 * 4  # documents and six tasks, of four streams
    assert all(read_measurement(path).identity for path in files(store))


def test_a_stop_between_rounds_loses_no_measurement(subject, tmp_path, short, parts, monkeypatch):
    _, whole, quantized = parts
    send, fed, stop = measuring.send, [], 2

    def stopping(task, *others):
        if len(fed) == stop:
            raise KeyboardInterrupt
        fed.append((len(task.corpus.documents), len(task.corpus.items)))
        return send(task, *others)

    monkeypatch.setattr(measuring, "send", stopping)
    with counted() as calls:
        with pytest.raises(KeyboardInterrupt):
            measure_items(tmp_path, subject)
        assert fed == [(3, 2), (0, 2)]
        before, stop = files(tmp_path), 100
        fed.clear()
        assert tasks_in(whole) == tasks_in(measure_items(tmp_path, subject))
        assert fed == 4 * [(0, 2)]  # each item once, and no document
        assert calls["save_tensors"].call_count == quantized["save_tensors"].call_count
    after = files(tmp_path)
    assert all(after[path] == stamp for path, stamp in filled(before.items()) if path in after)
    assert not (tmp_path / "weights").exists()


_KILLED = """
import os, signal, sys
from pathlib import Path
from qaudit.engine import measure as measuring
from tests.engine.test_measure import measure_items, subject_in

measuring.ROUND_TOKENS = 96
send, sent = measuring.send, []

def killing(*arguments):
    if len(sent) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    sent.append(0)
    return send(*arguments)

measuring.send = killing
measure_items(Path("store"), subject_in(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_kill_between_rounds_loses_no_measurement(subject, tmp_path, short, parts):
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, subject.first.ref.location],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(files_of_tasks(tmp_path / "store")) == 2 * 4
    with counted() as calls:
        resumed = measure_items(tmp_path / "store", subject)
    assert (calls["save_tensors"].call_count, tasks_in(parts[1])) == (0, tasks_in(resumed))


def test_weights_that_changed_between_rounds_lose_that_round_alone(tmp_path, short, monkeypatch):
    subject, send, sent = subject_in(save_model(tmp_path / "model", 2)), measuring.send, []

    def changing(*arguments):
        sent.append(arguments)
        if len(sent) == 3:
            save_model(tmp_path / "model", 9)
        return send(*arguments)

    monkeypatch.setattr(measuring, "send", changing)
    with pytest.raises(Exception, match="have changed since the audit was planned"):
        measure_items(tmp_path / "store", subject)
    # Of the first two rounds, for four streams.
    assert len(files_of_tasks(tmp_path / "store")) == 2 * 4


# --------------------------------------------------------------------- bytes of a whole model

GROUP = 32


def in_two_widths(folder, store):
    """Return a model in full precision, and at 4 bits with an fp16 scale for every 32 weights."""
    (checkpoint,) = find_checkpoints(folder)
    schemes = parse_schemes([f"rtn-4bit:group={GROUP}"])
    some = Task.unplanned(Subject("model", ((checkpoint, 1.0),)), corpus(), schemes)
    return [filed.measurement for filed in measure(some, MACHINE, store)]


def linears_of(folder):
    """Return the matrices inside the blocks of a model as the library builds it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    blocks = max(
        ((n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)),
        key=lambda pair: sum(p.numel() for p in pair[1].parameters()),
    )
    return {
        f"{blocks[0]}.{name}.weight": module.weight.numel()
        for name, module in blocks[1].named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("gpt2", True), ("gpt_neox", True), ("gpt_neox", False)]
)
def test_bytes_are_those_of_the_files_less_the_linears(tmp_path, store, family, tied):
    folder = tiny.make(tmp_path / "step1", family, tie_word_embeddings=tied)
    tensors = load_file(folder / "model.safetensors")
    full, low = in_two_widths(folder, store)
    count = sum(tensor.numel() for tensor in tensors.values())
    quantized = sum(linears_of(folder).values())
    assert (full.parameters, low.parameters, full.nbytes) == (count, count, 4 * count)
    assert low.nbytes == 4 * (count - quantized) + quantized * (4 + 16 / GROUP) / 8
    assert low.bits_per_weight == 4 + 16 / GROUP


def test_each_tensor_counts_in_the_dtype_that_it_is_stored_in(tmp_path, store):
    folder = tiny.make(tmp_path / "step1", "llama")
    tensors = load_file(folder / "model.safetensors")
    linears = linears_of(folder)
    # What is quantized later is stored in two bytes, norms and embeddings in four.
    mixed = {n: t.to(torch.bfloat16) if n in linears else t for n, t in tensors.items()}
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    full, low = in_two_widths(folder, store)
    rest = sum(4 * t.numel() for n, t in mixed.items() if n not in linears)
    assert full.nbytes == rest + 2 * sum(linears.values())
    assert low.nbytes == rest + sum(linears.values()) * (4 + 16 / GROUP) / 8
    # Names of another layout count by their one dtype.
    tally = Tally(bits=400, weights=100, linears={"q_proj"})
    elements = {"fused.weight": 120, "embeddings": 80}
    for nbytes, expected in (((240, 160), 400 - 200 + 50), ((240, 320), None)):
        sizes = StoredSizes(elements, dict(zip(elements, nbytes, strict=True)), sum(nbytes))
        assert sizes.quantized_nbytes(tally) == expected
    # Pickled tensors share what the files take.
    assert StoredSizes({"a": 150, "b": 50}, {}, 808).quantized_nbytes(tally) == 808 - 404 + 50
