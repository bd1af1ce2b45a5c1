"""Text as a stream of tokens: what is in it, what is held out of it, when it is made again."""

import hashlib
import json
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from experiments.folder import LOG, family_table, truncate_log
from experiments.run import TrainingRun, differences
from experiments.text import END, FEWEST, entries_of, prepare
from experiments.train import train
from qaudit.checkpoints.folder import find_all
from qaudit.core.schedules import Constant, build
from qaudit.errors import SourceError, UsageError
from qaudit.families import Family, load_file
from qaudit.text.documents import part_of
from tests.support.training import DECAY, HELD, SHAPE, read_log

SENTENCES = [f"document {n} speaks of {n * n} and of {'ab' * (n % 5)}" for n in range(60)]


def write_folder(folder, texts):
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"d{number}.txt").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    source = write_folder(root / "source", SENTENCES)
    return root, source, prepare(root / "made", sources=[source], vocabulary=300)


def documents_of(stream):
    end = stream.tokenizer.eos_token_id
    starts = np.flatnonzero(stream.tokens == end)
    parts = np.split(stream.tokens, starts[1:])
    assert stream.tokens[0] == end
    return [stream.tokenizer.decode(part[1:].tolist()) for part in parts]


def test_the_stream_is_the_documents_that_are_not_held_out_and_those_are_recorded(made):
    root, _, stream = made
    expected = {SENTENCES[n] for n in range(60) if part_of(f"d{n}.txt") != "evaluation"}
    found = documents_of(stream)
    assert set(found) == expected
    assert len(found) == len(expected) == stream.documents == 60 - stream.heldout
    assert (stream.tokens.dtype, stream.tokenizer.eos_token) == (np.uint16, END)
    hashes, lines = (
        (root / f"made/heldout.{kind}").read_text("utf-8").splitlines() for kind in ("txt", "jsonl")
    )
    texts = [json.loads(line)["text"] for line in lines]
    assert len(hashes) - 1 == len(texts) == stream.heldout > 3
    expected = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    assert [line.split()[0] for line in hashes[1:]] == expected
    assert not set(texts) & set(found)


def test_a_held_out_text_is_trained_on_under_no_name_and_of_few_none_is_held_out(tmp_path):
    heldout = next(n for n in range(60) if part_of(f"d{n}.txt") == "evaluation")
    trained = next(n for n in range(60) if part_of(f"d{n}.txt") == "training")
    texts = list(SENTENCES)
    texts[trained] = texts[heldout]
    source = write_folder(tmp_path / "source", texts)
    stream = prepare(tmp_path / "made", sources=[source], vocabulary=300)
    assert SENTENCES[heldout] not in documents_of(stream)
    source = write_folder(tmp_path / "few", SENTENCES[: FEWEST - 1])
    stream = prepare(tmp_path / "made of few", sources=[source], vocabulary=300)
    assert (stream.documents, stream.heldout) == (FEWEST - 1, 0)


def test_a_stream_is_made_once_and_other_text_in_its_folder_is_refused(made, tmp_path, monkeypatch):
    root, source, stream = made
    before = (root / "made/tokens.bin").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr("experiments.text._encode", None)
        again = prepare(root / "made", sources=[source], vocabulary=300)
    assert (root / "made/tokens.bin").stat().st_mtime_ns == before
    assert (again.key, again.tokenizer_key) == (stream.key, stream.tokenizer_key)
    assert np.array_equal(again.tokens, stream.tokens)
    with pytest.raises(UsageError, match="`vocabulary` was 300 and is 310"):
        prepare(root / "made", sources=[source], vocabulary=310)
    other = write_folder(tmp_path / "other", [*SENTENCES, "one more"])
    with pytest.raises(UsageError, match=r"`documents` was [0-9a-f]+ and is [0-9a-f]+"):
        prepare(root / "made", sources=[other], vocabulary=300)


def test_given_tokenizers_are_known_and_broken_texts_made_again(made, tmp_path, monkeypatch):
    root, source, stream = made
    given = prepare(
        tmp_path / "given", sources=[source], vocabulary=999, tokenizer=root / "made/tokenizer"
    )
    assert np.array_equal(given.tokens, stream.tokens)
    assert given.key == stream.key  # however its tokenizer came to be
    assert entries_of(root / "made/tokenizer") == 320  # 300, made a multiple of 64
    with monkeypatch.context() as patch:  # not callable: stops before the end
        patch.setattr("experiments.text._record_heldout", None)
        with pytest.raises(TypeError):
            prepare(tmp_path / "made", sources=[source], vocabulary=300)
    again = prepare(tmp_path / "made", sources=[source], vocabulary=300)
    assert np.array_equal(again.tokens, stream.tokens)
    for text in ("", "[1]", "[" * 100_000, "{}", '{"wanted": {}}', "null"):
        (tmp_path / "made" / "text.json").write_text(text, encoding="utf-8")
        with pytest.raises(SourceError, match="is not the record of a text") as refused:
            prepare(tmp_path / "made", sources=[source], vocabulary=300)
        assert "remove" in refused.value.hint


@given(st.lists(st.text() | st.sampled_from(["[" * 9999, "3", "{}", '{"run": "a"}', "NaN"])))
def test_the_odd_lines_of_a_log_are_dropped(lines):
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        text = "\n".join(['{"run": "a", "step": 10}', *lines])
        (place / LOG).write_text(text, encoding="utf-8", newline="")
        truncate_log(place, "a", 10)
        assert read_log(place) == [{"run": "a", "step": 10}]


# --------------------------------------------------------------------------------------------------
# The family's file that a trainer leaves: what a scan knows of its checkpoints without options.


AVERAGED = replace(HELD, ema_decay=0.5, lawa=(2, 5), schedule=build("cosine", peak=1e-2, end=25))
SGDR = replace(
    DECAY, name="forked", parent=AVERAGED, schedule=build("sgdr", peak=8e-3, period=4),
    save_at=(8, 10),
)  # fmt: skip
INGREDIENTS = [
    replace(DECAY, name=f"stage2-ingredient{k}", parent=AVERAGED, seed=k) for k in (1, 2)
]


@pytest.fixture(scope="module")
def series(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("runs") / "series"
    for run in (AVERAGED, SGDR, *INGREDIENTS):
        train(run, text, out)
    return out


def test_a_series_knows_logged_rates_tokens_stages_and_their_order(series, tmp_path, text):
    logged = {(line["run"], line["step"]): line["learning_rate"] for line in read_log(series)}
    checkpoints = find_all([str(series)])
    found = {c.label: c for c in checkpoints}
    for run in (AVERAGED, SGDR, *INGREDIENTS):
        for step in run.save_at:
            assert found[run.label(step)].step == step
            for average in ("", *run.averages):
                checkpoint = found[run.label(step, average) if average else run.label(step)]
                assert checkpoint.learning_rate == logged[(run.name, step)]
    assert all(c.family == "lab-series" for c in checkpoints)
    tokens = {label: c.tokens for label, c in found.items()}  # from the very start
    assert tokens["stage1-step10"] == 10 * 4 * 8
    assert tokens["stage1-lawa-step20"] == 20 * 4 * 8
    assert tokens["forked-step8"] == tokens["stage2-ingredient1-step10"] - 2 * 4 * 8
    assert tokens["stage2-ingredient2-step10"] == (20 + 10) * 4 * 8
    ingredients = [(c.stage, c.ingredient, c.step) for c in checkpoints if c.ingredient]
    assert ingredients == [("stage2", 1, 10), ("stage2", 2, 10)]
    stages = list(dict.fromkeys(c.stage for c in checkpoints))
    assert stages.index("stage1") < min(stages.index("forked"), stages.index("stage2"))
    assert stages.index("stage2") < stages.index("stage1-lawa")
    # The parent of a fork is told of where it does not lie.
    train(replace(SGDR, name="away"), text, tmp_path, fork=series)
    assert [c.tokens for c in find_all([str(tmp_path)])] == [28 * 32, 30 * 32]
    names = [stage.name for stage in load_file(tmp_path / "qaudit-family.yaml").stages]
    assert names == ["stage1", "away", "stage1-ema", "stage1-lawa"]


def test_ingredients_keep_schedules_of_their_own_and_those_of_two_points_are_two_stages():
    steeper = replace(INGREDIENTS[1], schedule=build("linear", peak=5e-3, end=10))
    later = replace(INGREDIENTS[1], fork_at=10)
    for other, step, of, wanted in (
        (steeper, 0, Family.learning_rate, [1e-2, 5e-3]),
        (later, 10, Family.tokens, [30 * 32, 20 * 32]),
    ):
        family = Family.model_validate(family_table("x", [INGREDIENTS[0], other]))
        places = [family.place(f"stage2-ingredient{k}-step{step}") for k in (1, 2)]
        assert [of(family, place) for place in places] == wanted


# --------------------------------------------------------------------------------------------------
# A run as a value: its key, its table, and the values it refuses.


CHANGES = {
    "shape": replace(SHAPE, layers=2), "schedule": Constant(peak=2e-2, warmup=2), "batch": 8,
    "seed": 2, "order": 9, "accumulation": 2, "weight_decay": 0.0, "betas": (0.8, 0.95),
    "clip": 2.0, "sam_rho": 0.05, "ema_decay": 0.9, "lawa": (2, 10), "precision": "fp32",
    "attention": "eager",
}  # fmt: skip
FREE = {"name": "other", "steps": 30, "save_at": (20,), "keep_at": (10,)}


def test_what_changes_weights_changes_the_key_of_forks_too():
    assert {f.name for f in fields(TrainingRun)} == set(CHANGES) | set(FREE) | {"parent", "fork_at"}
    for name, value in CHANGES.items():
        changed = replace(HELD, **{name: value})
        assert changed.key != HELD.key, name
        assert any(f"`{name}" in line for line in differences(HELD, changed)), name
    for name, value in FREE.items():
        changed = replace(HELD, **{name: value})
        assert (changed.key, differences(HELD, changed)) == (HELD.key, []), name
    assert replace(DECAY, fork_at=10).key != DECAY.key
    grandparent = replace(HELD, weight_decay=0.3)
    assert replace(DECAY, parent=grandparent).key != DECAY.key
    further = replace(DECAY, name="x", parent=DECAY, fork_at=10)
    changed = replace(further, parent=replace(DECAY, parent=grandparent))
    assert changed.key != further.key
    assert differences(further, changed)[0].startswith("`parent` was stage2-ingredient1")
    # Its first weights are its parent's, whatever its seed is.
    assert replace(DECAY, seed=8, order=3).key == replace(DECAY, seed=9, order=3).key
    assert replace(HELD, order=HELD.seed).key == HELD.key

    for run in (HELD, DECAY, replace(HELD, lawa=(2, 10), keep_at=(5,))):
        assert TrainingRun(**json.loads(json.dumps(run.table()))) == run


def test_a_run_with_a_wrong_value_is_refused_with_what_is_allowed():
    for changed, field, words in (
        ({"name": "../up"}, "name", "should match pattern"),
        ({"steps": 0, "batch": 0}, "batch", "greater than or equal to 1"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"accumulation": 3}, "", "`accumulation` is 3 and must divide the batch of 4"),
        ({"save_at": (21,)}, "", "`save_at` has 21, and the run has 20 steps"),
        ({"keep_at": (0,)}, "keep_at", "greater than or equal to 1"),
        ({"schedule": build("constant", peak=0.0)}, "", "`peak` is 0 and must be above 0"),
        ({"weight_decay": -1.0}, "weight_decay", "greater than or equal to 0"),
        ({"betas": (0.9, 1.0)}, "betas", "less than 1"),
        ({"clip": 0.0}, "clip", "greater than 0"),
        ({"sam_rho": -0.1}, "sam_rho", "greater than or equal to 0"),
        ({"ema_decay": 1.0}, "ema_decay", "less than 1"),
        ({"lawa": (1, 5)}, "lawa", "greater than or equal to 2"),
        ({"lawa": (3, 10)}, "", "no saved step is a multiple of 10 from 30 on"),
        ({"precision": "fp8"}, "precision", "'bf16' or 'fp32'"),
        ({"attention": "magic"}, "attention", "'sdpa' or 'eager'"),
        ({"fork_at": 5}, "", "`fork_at` is 5 and must be 0 without a parent"),
        ({"parent": HELD}, "", "`name` is `stage1` and must differ from its parent's"),
    ):
        with pytest.raises(ValidationError) as refusal:
            replace(HELD, **changed)
        errors = {str(e["loc"][0]) if e["loc"] else "": e["msg"] for e in refusal.value.errors()}
        assert words in errors[field]
