"""`qaudit lab train` from the command line: a run, its fork, and what is refused."""

import json

import pytest

from tests.support.cli import refused
from tests.support.models import text, write_documents

SMALL = (
    *("--hidden", "16", "--ffn", "32", "--layers", "1", "--heads", "2", "--kv-heads", "1"),
    *("--vocabulary", "300", "--context", "16", "--batch", "4"),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_documents(tmp_path_factory.mktemp("text") / "text.jsonl", range(40)))


def test_a_run_and_its_fork_are_a_series_with_learning_rates(qaudit, source, tmp_path):
    out, given = str(tmp_path / "out"), (*SMALL, "--text", source)
    done = qaudit("lab", "train", out, *given, "--steps", "20", "--save-every", "10",
               "--schedule", "constant", "--lawa", "2:5", "--keep-states", "10")  # fmt: skip
    assert done.code == 0, done.err
    assert done.out.strip() == out
    assert "held out" in done.err
    assert "constant-step10: loss" in done.err
    done = qaudit("lab", "train", out, "--text", source, "--fork", f"{out}/constant-step10",
               "--schedule", "linear", "--steps", "10", "--save-at", "5,10")  # fmt: skip
    assert done.code == 0, done.err
    found = json.loads(qaudit("series", out, "--json").out)["checkpoints"]
    rates = {c["label"]: c["learning_rate"] for c in found}
    assert rates["constant-lawa-step20"] == 3e-3
    assert (rates["linear-step5"], rates["linear-step10"]) == (pytest.approx(1.5e-3), 0)


def test_a_fork_into_another_folder_reads_with_its_parents_tokens(qaudit, source, tmp_path):
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    given = ("--text", source, "--steps", "4", "--quiet")
    assert qaudit("lab", "train", one, *SMALL, *given).code == 0
    done = qaudit("lab", "train", two, *given, "--fork", f"{one}/wsd-step4", "--schedule", "linear")
    assert done.code == 0, done.err
    a, b = (tmp_path / name / "text/tokens.bin" for name in ("one", "two"))
    assert a.read_bytes() == b.read_bytes()
    again = qaudit(
        "lab", "train", two, *given, "--fork", f"{one}/wsd-step4", "--schedule", "linear"
    )
    assert again.code == 0


def test_going_on_with_other_settings_is_refused(qaudit, source, tmp_path):
    out, given = str(tmp_path / "out"), (*SMALL, "--text", source, "--steps", "4")
    assert qaudit("lab", "train", out, *given).code == 0
    done = qaudit("lab", "train", out, *given, "--weight-decay", "0.3")
    refused(done, 2, "`weight_decay` was 0.1 and is 0.3", "another name or folder")


@pytest.mark.parametrize(
    ("options", "sentence", "hint"),
    [
        (("--lawa", "5"), "`--lawa` is `5`", "write 2 numbers"),
        (("--betas", "0.9;0.95"), "`--betas` is `0.9;0.95`", "write numbers"),
        (("--save-at", "ten"), "`--save-at` is `ten`", "write numbers"),
        (("--clip", "0", "--precision", "fp8"), "`precision` is `fp8` (one of", "mend"),
        (("--device", "tpu"), "there is no device `tpu`", "auto, cpu"),
        (("--tokenizer", "none"), "there is no `tokenizer.json` in `none`", "give the folder"),
    ],
)
def test_bad_input_is_refused_in_words(qaudit, source, tmp_path, options, sentence, hint):
    done = qaudit("lab", "train", str(tmp_path), *SMALL[:-4], "--text", source, *options)
    refused(done, 2, sentence, hint)


def test_an_interruption_says_how_to_go_on(qaudit, source, tmp_path, monkeypatch):
    def stop(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("qaudit.lab.train.advance", stop)
    done = qaudit("lab", "train", str(tmp_path), *SMALL, "--text", source, "--steps", "4")
    refused(done, 130, "run `wsd` was interrupted", "the same command again")


def test_the_environment_gives_options(qaudit, source, tmp_path, monkeypatch):
    monkeypatch.setenv("QAUDIT_STEPS", "3")
    monkeypatch.setenv("QAUDIT_NAME", text(1, 1))
    assert qaudit("lab", "train", str(tmp_path), *SMALL, "--text", source).code == 0
    assert (tmp_path / f"{text(1, 1)}-step3").is_dir()
