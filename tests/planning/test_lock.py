"""A lock comes back as it was, is refused where it is damaged or hostile, and holds its commits."""

import json
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.errors import UsageError
from qaudit.hub.answers import HubFile
from qaudit.planning import pin
from qaudit.saved.parts import digest_of, write_plan
from qaudit.types import (
    Checkpoint,
    Finding,
    Interval,
    Recipe,
    Ref,
    Resolved,
    Subject,
    TextFile,
    WeightFile,
    digest,
)  # fmt: skip
from qaudit.whole import write_whole
from tests.support.damage import damaged
from tests.support.running import EMPTY

COMMIT = 40 * "a"
RECIPE = Recipe(
    targets=("org/name",),
    schemes=("rtn-4bit",),
    soups=("ends=mean(step1+step2)",),
    schedule={"kind": "linear", "peak": 0.003, "end": 1000},
)


def checkpoint(label):
    files = (WeightFile("model.safetensors", 29_194_510_544, digest(label)),
             WeightFile("small.safetensors", 7, f"git:{40 * 'b'}"))  # fmt: skip
    return Checkpoint(
        ref=Ref("org/name", label), label=label, files=files, commit=digest(label)[:40],
        family="olmo2-7b", stage="stage1", ingredient=2, step=1000, tokens=4_194_304_000,
        learning_rate=3.0e-4, notes=("the learning rate of `stage1` is inferred",),
        suspect=("its family's file says so",), requires=("pickle",),
    )  # fmt: skip


def resolved(**changes):
    first, second = checkpoint("step1"), checkpoint("step2")
    text = TextFile("hf://datasets/a/b/c.txt", "a/b", COMMIT, "c.txt", 9, 64 * "c")
    found = Resolved(
        recipe=replace(RECIPE, evaluation=text.source),
        checkpoints=(first, second),
        subjects=(
            Subject("step1", ((first, 1.0),)),
            Subject("ends", ((first, 0.5), (second, 0.5)), "mean"),
        ),
        texts=(text,),
        findings=(
            Finding("QA009", "warn", "step1", None, "twice", "leave one out"),
            Finding("QA010", "info", "ends", "fp", "odd", "", Interval(1.0, 0.5, 2.0), 0.1),
        ),
        notes=("2 of 900 checkpoints",),
        local=64 * "d",
    )
    return replace(found, **changes)


@pytest.fixture(scope="module")
def lock(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("lock"), resolved()
    write_plan(replace(EMPTY, recipe=RECIPE, subjects=found.subjects), RECIPE, found, None, folder)
    return (folder / "plan.json").read_text(encoding="utf-8")


@pytest.fixture
def written(lock, tmp_path):
    (tmp_path / "plan.json").write_text(lock, encoding="utf-8")
    return tmp_path / "plan.json"


def test_a_lock_comes_back_also_without_what_a_later_version_added(written):
    assert pin.read_lock(written) == (RECIPE, resolved())
    contents = json.loads(written.read_text(encoding="utf-8"))
    del contents["resolved"]["shipped"]  # has a default, as every field has that is added
    contents["digest"] = digest_of(contents)
    write_whole(written, json.dumps(contents))
    assert pin.read_lock(written) == (RECIPE, resolved(shipped=()))
    # What a lock says of a folder on this machine may lie anywhere.
    path = ("resolved", "checkpoints", 1)
    edited(written, *path, "commit", value=None)
    edited(written, *path, "ref", "location", value="/models/../models/step2")
    _, found = pin.read_lock(written)
    assert found.checkpoints[1].ref.location == "/models/../models/step2"


def test_what_chooses_makes_a_lock_stale_and_names_that_moved_are_named():
    assert pin.same_choice(RECIPE, replace(RECIPE, schemes=("rtn-3bit",), device="cpu", context=7))
    chosen = {"targets": ("org/name", "org/other"), "checkpoints": ("step1",)}
    chosen |= {"last": 2, "soups": (), "calibration": "mine.txt", "evaluation": "mine.txt"}
    chosen |= {"choices": "mine.jsonl", "schedule": None, "family": "olmo2-7b"}
    for name, value in chosen.items():
        assert not pin.same_choice(RECIPE, replace(RECIPE, **{name: value})), name
    before = resolved()
    first, second = before.checkpoints
    now = replace(before, checkpoints=(replace(first, commit=40 * "9"), second))
    (said,) = pin.moved(before, now)
    assert "`org/name@step1` is at 9999999999 now" in said
    assert digest("step1")[:10] in said
    assert pin.moved(before, before) == ()
    text = replace(before.texts[0], commit=40 * "8")
    (said,) = pin.moved(before, replace(before, texts=(text,)))
    assert "`hf://datasets/a/b/c.txt` is at 8888888888 now" in said
    many = tuple(checkpoint(f"step{k}") for k in range(9))
    moved = tuple(replace(c, commit=40 * "9") for c in many)
    said = pin.moved(resolved(checkpoints=many), resolved(checkpoints=moved))
    assert len(said) == 4
    assert said[-1] == "and 6 more revisions moved"


# ------------------------------------------------------------------------------ what is refused


def edited(path, *keys, value, renewed=True):
    """Edit a plan, and renew its digest as a forger would."""
    document = json.loads(path.read_text(encoding="utf-8"))
    inner = document
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    if renewed:
        document["digest"] = digest_of(document)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_a_truncated_foreign_edited_or_future_lock_is_refused(lock, written):
    with pytest.raises(UsageError, match="was edited") as refusal:
        pin.read_lock(edited(written, "resolved", "checkpoints", 0, "step", value=7, renewed=False))
    assert "--set update=true" in refusal.value.hint
    for share in (0.0, 0.1, 0.5, 0.99):
        written.write_text(lock[: int(share * len(lock))], encoding="utf-8")
        with pytest.raises(UsageError, match="cannot be read") as refusal:
            pin.read_lock(written)
        assert "--set update=true" in refusal.value.hint
    for text in ("{}", "[]", "3", "null", '{"schema": "1", "qaudit": "1"}'):
        written.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match=r"is not (a plan of qaudit|an object)"):
            pin.read_lock(written)
    written.write_text(lock, encoding="utf-8")
    edited(written, "qaudit", value="4.2.0")
    with pytest.raises(UsageError, match="schema version 7") as refusal:
        pin.read_lock(edited(written, "schema", value="7"))
    assert "4.2.0" in refusal.value.hint


@given(st.data())
def test_any_lock_is_read_or_refused_in_words(lock, tmp_path_factory, data):
    document = damaged(json.loads(lock), data)
    path = tmp_path_factory.mktemp("any") / "plan.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with suppress(UsageError):
        pin.read_lock(path)


OUTSIDE = (
    "../x", "/etc/passwd", "a/../../x", "a//b", ".", "a\\..\\b", "a\nb", "a\0b", 1001 * "x",
)  # fmt: skip
REPOS = ("..", "../..", "a/..", "/a", "a/b/c", "a", "a/b\n", "a\\b/c", "")
COMMITS = ("main", 39 * "a", 41 * "a", 40 * "g", 40 * "A", "", "../" * 13)


def test_locks_edited_by_hand_and_hashes_of_others_are_refused(written):
    whole = written.read_text(encoding="utf-8")
    for keys, values, words in (
        (("resolved", "checkpoints", 0, "files", 0, "name"), (*OUTSIDE, ""), "lead outside"),
        (("resolved", "checkpoints", 0, "ref", "subfolder"), OUTSIDE, "leads outside"),
        (("resolved", "texts", 0, "path"), (*OUTSIDE, ""), "lead outside"),
        (("resolved", "checkpoints", 1, "ref", "location"), REPOS, "no repository"),
        (("resolved", "texts", 0, "repo"), REPOS, "no repository"),
        (("resolved", "checkpoints", 1, "commit"), COMMITS, "no full commit hash"),
        (("resolved", "texts", 0, "commit"), COMMITS, "no full commit hash"),
        (("resolved", "checkpoints", 0, "files", 0, "sha256"), ("git:../x", "abc"), "a hash or"),
        (("resolved", "checkpoints", 0, "files", 0, "nbytes"), (-1, "many"), "size|number"),
        (("resolved", "checkpoints", 0, "files"), ([],), "has no files"),
        (("resolved", "checkpoints", 0), (None,), "must be a table"),
        (("resolved", "checkpoints"), ({},), "must be a list"),
        (("resolved", "texts", 0, "sha256"), ("abc",), "a hash or"),
        (("resolved", "texts", 0, "nbytes"), (-1,), "a size"),
        (("resolved", "subjects"), ([],), "are none"),
        (("resolved", "subjects", 0, "members", 0, 1), (0.5,), "is not one checkpoint"),
        (("resolved", "subjects", 1, "members", 0, 1), (None,), "must be a number"),
        (("resolved", "subjects", 1, "members", 0, 0, "commit"), ("main",), "no full commit hash"),
        (("resolved", "subjects", 1, "label"), ("step1",), "a label twice"),
        (("resolved", "subjects", 1, "merge"), ("magic",), "magic"),
        (("requested", "context"), (-5,), "context"),
        (("requested", "targets"), ([],), "targets"),
        (("requested",), (None,), "must be a table"),
        (("resolved", "notes"), ("no list",), "must be a list"),
        (("resolved", "findings", 0, "level"), ("splendid",), "level"),
        (("schema",), (None, "one"), "unknown schema"),
    ):
        for value in values:
            written.write_text(whole, encoding="utf-8")
            with pytest.raises(UsageError, match=rf"(?s)plan\.json.*({words})") as refusal:
                pin.read_lock(edited(written, *keys, value=value))
            assert refusal.value.hint
            assert refusal.value.hint
    file = WeightFile("model.safetensors", 7, digest("step1"))
    pinned = replace(checkpoint("step1"), files=(file,))
    for names, fits in ((["step1"], True), ([], True), (["step2"], False)):
        files = [HubFile("model.safetensors", 7, 40 * "c", digest(name)) for name in names]
        listing = SimpleNamespace(known_files=lambda repo, commit, files=files: files)
        hub = SimpleNamespace(listing=listing)
        with nullcontext() if fits else pytest.raises(UsageError, match="no file at commit"):
            pin.check_pins(Resolved(RECIPE, (pinned,), ()), hub)
