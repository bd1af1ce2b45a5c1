"""`qaudit pick --race`: rounds over real weights, stored weights, resuming, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from qaudit.audit import load
from qaudit.engine.stored_weights import REUSED
from qaudit.racing import stored_weights
from qaudit.saved.results import ResultStore, measured_in
from tests.support.cli import TEXT, Outcome, Run, refused
from tests.support.models import save_model, save_tokenizer, write_documents

MODELS = 4
GPTQ = ("--objective", "loss@gptq-4bit")
TO_THE_END = ("--share", "100%", "--margin", "0")


@pytest.fixture
def raced(place: Path, qaudit: Run) -> Run:
    """Return a function that races four models on 48 documents."""
    shutil.rmtree(place / "series")
    for seed in range(MODELS):
        save_tokenizer(save_model(place / "series" / f"step{seed + 1}", seed))
    write_documents(place / "evaluation.jsonl", range(200, 248))

    def run(*arguments: object) -> Outcome:
        return qaudit("pick", "series", "--race", *TEXT, "--out", "out", *arguments)

    return run


@pytest.fixture
def dear_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stored weights the cheaper way, as they are for models of any size."""
    monkeypatch.setattr(stored_weights, "matmul_rate", lambda: 1.0)


@pytest.fixture
def dear_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_weights, "DISK_NBYTES_PER_SECOND", 1)


def report_of(done: Outcome) -> dict[str, object]:
    assert done.code in (0, 3), done.err
    return json.loads(done.out)


def losses(folder: Path) -> dict[tuple[str, tuple[str, ...]], np.ndarray]:
    """Return every measurement of a race by its subject and its documents."""
    return {
        (m.subject, m.evidence.document_sha256): m.evidence.nll_sum
        for m in measured_in(folder / "race")
    }


# ----------------------------------------------------------------------------------- the result


def test_a_race_says_who_leads_who_left_who_won_and_what_it_took(raced: Run) -> None:
    done = raced("--objective", "loss@rtn-4bit")
    assert done.code in (0, 3), done.err
    assert "10 documents, 4 in the race: step" in done.err
    text = " ".join(done.out.split())
    assert "at rtn-4bit wins the race of 4 subjects" in text
    assert "of an exhaustive run" in text
    assert "documents, 4 in the race" not in done.out


def test_quiet_prints_the_result_and_nothing_else(raced: Run) -> None:
    done = raced("--objective", "loss@rtn-4bit", "-q")
    assert done.err == ""
    assert "wins the race" in done.out


def test_what_a_race_takes_is_what_its_rounds_add_up_to(raced: Run, place: Path) -> None:
    report = report_of(raced(*GPTQ, "--json", "-q"))
    confirmed = report["tokens"] - sum(r["tokens"] for r in report["rounds"])  # type: ignore
    assert 0 < report["tokens"] < report["exhaustive_tokens"]  # type: ignore[operator]
    assert confirmed > 0
    measured = measured_in(place / "out" / "race")
    assert report["tokens"] == sum(int(m.evidence.tokens.sum()) for m in measured)
    assert report["receipt"]["passes"] == len(measured)  # type: ignore[index]
    assert report["rounds"][0]["entrants"] == [f"step{k + 1}" for k in range(MODELS)]  # type: ignore


@pytest.mark.slow
def test_a_race_agrees_with_the_scan_of_everything(raced: Run, qaudit: Run, place: Path) -> None:
    report = report_of(raced(*GPTQ, "--json", "-q", *TO_THE_END))
    done = qaudit("scan", "series", *TEXT, "--schemes", "gptq-4bit", "--out", "all", "-q")
    assert done.code == 0, done.err
    pick = json.loads(qaudit("pick", "all", "--json").out)["pick"]
    assert report["winner"] == pick["subject"]
    scanned = {
        m.subject: dict(zip(m.evidence.document_sha256, m.evidence.nll_sum, strict=True))
        for m in load(place / "all").evidence.measurements
        if m.scheme == "gptq-4bit"
    }
    for (subject, documents), nll in losses(place / "out").items():
        np.testing.assert_allclose(nll, [scanned[subject][d] for d in documents], rtol=1e-4)


def test_a_soup_races_beside_its_members(raced: Run) -> None:
    report = report_of(
        raced("--objective", "loss@rtn-4bit", "--soup", "mix=mean(step1+step2)", "--json", "-q")
    )
    assert "mix" in report["rounds"][0]["entrants"]  # type: ignore[index]


def test_two_names_for_the_same_weights_race_as_one(raced: Run, place: Path) -> None:
    shutil.copytree(place / "series" / "step1", place / "series" / "step9")
    done = raced("--objective", "loss@rtn-4bit")
    assert "step9 holds the weights of step1 and does not race beside it" in done.err
    assert "10 documents, 4 in the race" in done.err


# ---------------------------------------------------------------------------------- stored weights


@pytest.mark.slow
def test_stored_weights_give_the_same_losses_to_the_bit(
    raced: Run, place: Path, dear_calibration: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scheme in ("gptq-4bit", "awq-4bit"):
        arguments = ("--objective", f"loss@{scheme}", "--json", "-q", *TO_THE_END)
        stored = report_of(raced(*arguments))
        shutil.move(place / "out", place / f"kept-{scheme}")
        with monkeypatch.context() as patched:
            patched.setattr(stored_weights, "DISK_NBYTES_PER_SECOND", 1e-9)
            again = report_of(raced(*arguments))
        shutil.move(place / "out", place / f"again-{scheme}")
        a, b = losses(place / f"kept-{scheme}"), losses(place / f"again-{scheme}")
        assert a.keys() == b.keys()
        for key, nll in a.items():
            np.testing.assert_array_equal(nll, b[key])
        assert stored["receipt"]["quantized"] < again["receipt"]["quantized"]  # type: ignore[index]
        assert again["receipt"]["quantized"] == again["receipt"]["passes"]  # type: ignore[index]


def test_a_survivor_with_stored_weights_is_calibrated_once(
    raced: Run, place: Path, dear_calibration: None
) -> None:
    report = report_of(raced(*GPTQ, "--json", "-q", *TO_THE_END))
    calibrated = [m.subject for m in measured_in(place / "out/race") if REUSED not in m.notes]
    left = {d["subject"] for r in report["rounds"] for d in r["left"]}  # type: ignore[attr-defined]
    stayed = [subject for subject in calibrated if subject not in left]
    assert stayed
    assert len(stayed) == len(set(stayed))


def test_stored_weights_are_removed_with_the_end_of_the_race(
    raced: Run, place: Path, dear_calibration: None
) -> None:
    done = raced(*GPTQ)
    assert "go on from stored weights" in done.err
    assert not (place / "out" / "kept").exists()


def test_a_dear_disk_keeps_nothing_and_says_so(raced: Run, dear_disk: None) -> None:
    done = raced(*GPTQ)
    assert "do not go on from stored weights" in done.err


# -------------------------------------------------------------------------------------- resuming


def test_a_race_run_again_runs_no_model(raced: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = report_of(raced(*GPTQ, "--json", "-q"))

    def ran(*_: object) -> None:
        raise AssertionError("a block was run")

    monkeypatch.setattr(nn.Module, "__call__", ran)
    assert report_of(raced(*GPTQ, "--json", "-q")) == first


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that interrupts once, after so many measurements."""
    real = ResultStore.write

    def ask(most: int) -> None:
        written = 0

        def stopped(self: ResultStore, *arguments: object) -> object:
            nonlocal written
            written += 1
            if written == most + 1:
                raise KeyboardInterrupt
            return real(self, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(ResultStore, "write", stopped)

    return ask


@pytest.mark.slow
def test_an_interrupted_race_goes_on_and_ends_the_same(
    raced: Run, place: Path, stop_after: Callable[[int], None], dear_calibration: None
) -> None:
    whole = report_of(raced(*GPTQ, "--json", "-q", *TO_THE_END))
    shutil.move(place / "out", place / "whole")
    stop_after(MODELS + 1)
    done = raced(*GPTQ, "--json", "-q", *TO_THE_END)
    assert done.code == 130
    assert "run the same command again: qaudit pick series --race" in done.err
    assert len(measured_in(place / "out" / "race")) == MODELS + 1
    report = report_of(raced(*GPTQ, "--json", "-q", *TO_THE_END))
    for row in (whole, report):
        row["receipt"]["seconds"] = 0  # type: ignore[index]
    assert report == whole
    a, b = losses(place / "whole"), losses(place / "out")
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[key], b[key]) for key in a)


@pytest.mark.slow
def test_weights_stored_for_one_scheme_are_not_taken_for_another(
    raced: Run, place: Path, stop_after: Callable[[int], None], dear_calibration: None
) -> None:
    other = ("--objective", "loss@gptq-3bit", "--json", "-q", *TO_THE_END)
    report_of(raced(*other))
    shutil.move(place / "out", place / "fresh")
    stop_after(MODELS)
    assert raced(*GPTQ, *TO_THE_END).code == 130
    assert list((place / "out" / "kept").glob("*/whole"))
    report_of(raced(*other))
    a = losses(place / "fresh")
    of_scheme = [m for m in measured_in(place / "out/race") if m.scheme == "gptq-3bit"]
    assert of_scheme
    for m in of_scheme:
        np.testing.assert_array_equal(m.evidence.nll_sum, a[m.subject, m.evidence.document_sha256])


@pytest.mark.slow
def test_a_part_of_the_stored_weights_is_not_used(
    raced: Run, place: Path, stop_after: Callable[[int], None], dear_calibration: None
) -> None:
    whole = report_of(raced(*GPTQ, "--json", "-q", *TO_THE_END))
    shutil.rmtree(place / "out")
    stop_after(MODELS)
    assert raced(*GPTQ, *TO_THE_END).code == 130
    for folder in (place / "out" / "kept").iterdir():
        next(folder.glob("*.safetensors")).unlink()
    report = report_of(raced(*GPTQ, "--json", "-q", *TO_THE_END))
    assert report["winner"] == whole["winner"]
    assert report["receipt"]["quantized"] > whole["receipt"]["quantized"]  # type: ignore[index]


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "sentence", "hint"),
    [
        (("--objective", "bits@1%"), "a race is for the lowest loss at one scheme", "loss@"),
        (("--objective", "pareto"), "a race is for the lowest loss at one scheme", "loss@"),
        (("--objective", "loss@fp"), "a race compares quantized losses", "scan"),
        (("--objective", "loss@gptk-4bit"), "gptk", "gptq"),
        (("--margin", "2"), "`2` is not a `--margin` between 0 and 100 %", "0.2%"),
        (("--share", "most"), "`most` is not a `--share` between 0 and 100 %", "40%"),
        (("--checkpoints", "step1"), "a race needs two subjects or more", "more"),
        (
            ("--soup", "greedy(step1+step2+step3)"),
            "a greedy soup is a search of its own",
            "race the soup",
        ),
    ],
)
def test_what_cannot_be_raced_is_refused(
    raced: Run, arguments: tuple[str, ...], sentence: str, hint: str
) -> None:
    refused(raced(*arguments), 2, sentence, hint)


def test_options_of_a_race_without_one_are_refused(qaudit: Run, place: Path) -> None:
    done = qaudit("pick", "series", "--checkpoints", "step10")
    refused(done, 2, "`--checkpoints` is an option of a race, and this is none", "--race")


def test_a_broken_checkpoint_leaves_and_is_named(raced: Run, place: Path) -> None:
    weights = place / "series" / "step2" / "model.safetensors"
    config = json.loads((place / "series/step2/config.json").read_text())
    (place / "series/step2/config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    assert weights.exists()
    done = raced("--objective", "loss@rtn-4bit")
    assert done.code == 3
    assert "step2 leaves: it could not be measured" in done.err
    assert "Skipped step2" in done.out
