"""Folders of checkpoints: which, in which order, and what is known of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.checkpoints.folder import DEMO, find_all
from qaudit.errors import QauditError, SourceError, UsageError
from qaudit.types import Checkpoint, Recipe, Ref
from tests.support.series import find_checkpoints

FAMILY = """
family: mine
description: Mine.
tokens_per_step: 100
stages:
  - {name: stage1, lr: {kind: constant, peak: 0.5}}
  - {name: stage2, starts_after: stage1@10, lr: {kind: linear, peak: 0.5, end: 10, verified: false}}
"""


def checkpoint(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(weights + folder.name.encode())
    return folder


def series(folder: Path, *names: str) -> Path:
    for name in names:
        checkpoint(folder / name)
    return folder


def labels(checkpoints: tuple[Checkpoint, ...]) -> list[str]:
    return [c.label for c in checkpoints]


def recipe(**more: object) -> Recipe:
    return Recipe(("x",), ("rtn-4bit",), **more)  # type: ignore[arg-type]


def trainer_state(folder: Path, **state: object) -> None:
    (folder / "trainer_state.json").write_text(json.dumps(state))


def test_pickled_weights_count_only_where_there_is_nothing_else(tmp_path: Path) -> None:
    both, pickled = checkpoint(tmp_path / "both"), checkpoint(tmp_path / "pickled")
    (both / "pytorch_model.bin").write_bytes(b"p")
    (pickled / "pytorch_model.bin").write_bytes(b"p")
    (pickled / "training_args.bin").write_bytes(b"not weights")
    (pickled / "model.safetensors").unlink()
    found = {c.label: [f.name for f in c.files] for c in find_checkpoints(tmp_path)}
    (file,) = find_checkpoints(both)[0].files
    assert file.sha256 == hashlib.sha256(b"weightsboth").hexdigest()
    assert found == {"both": ["model.safetensors"], "pickled": ["pytorch_model.bin"]}


def test_checkpoints_lie_in_a_folder_or_one_deeper_and_others_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat, deep = series(tmp_path / "flat", "step1", "step2", ".hidden"), tmp_path / "deep"
    (flat / "step2" / "config.json").unlink()  # named later, and not dropped
    (flat / "tokenizer").mkdir()
    (flat / "log.txt").write_text("")
    assert labels(find_checkpoints(flat)) == ["step1", "step2"]
    series(deep, "iter_0000200/hf", "iter_0000030/hf")
    found = find_checkpoints(deep)
    assert [(c.label, c.step) for c in found] == [("iter_0000030", 30), ("iter_0000200", 200)]
    assert found[0].ref == Ref(str(deep / "iter_0000030" / "hf"))
    monkeypatch.chdir(checkpoint(tmp_path / "step7"))
    (found,) = find_checkpoints(".")  # without a name of its own
    assert (found.label, found.step) == ("step7", 7)
    run = checkpoint(tmp_path / "run")  # a final model comes after the checkpoints beneath it
    series(run, "checkpoint-1000", "checkpoint-500", "original")
    assert labels(find_checkpoints(run)) == ["checkpoint-500", "checkpoint-1000", "run"]
    (left,) = series(tmp_path / "left", "step10", "inner/step30", "inner/step40").glob("inner")
    (found,) = find_checkpoints(left.parent)
    (note,) = found.notes
    assert note.startswith("`inner` is left out, with checkpoints inside: name them as targets")


def test_series_keep_their_order_and_equal_names_are_told_apart(tmp_path: Path) -> None:
    series(tmp_path, "step1000", "step200")
    targets = [str(tmp_path / "step1000"), str(tmp_path / "step200")]
    assert labels(find_all(targets)) == ["step200", "step1000"]
    series(tmp_path / "b", "step2", "step10")
    series(tmp_path / "a", "step1")
    both = [str(tmp_path / "b"), str(tmp_path / "a")]
    assert labels(find_all(both)) == ["step2", "step10", "step1"]
    for run in ("x/a", "y/a", "x/b"):
        series(tmp_path / run, "step1")
    series(tmp_path / "x/b", "step2")
    found = find_all([str(tmp_path / run) for run in ("x/a", "y/a", "x/b")])
    assert labels(found) == ["x/a/step1", "y/a/step1", "b/step1", "step2"]
    with pytest.raises(UsageError, match="2 times"):
        find_all([str(tmp_path / "x/a"), f"{tmp_path / 'x/a'}/"])


# --------------------------------------------------------------------------- what is known of them


def test_a_family_file_in_the_folder_is_read(tmp_path: Path) -> None:
    series(tmp_path, "stage1-step10", "stage2-step5")
    (tmp_path / "qaudit-family.yaml").write_text(FAMILY)
    first, second = find_checkpoints(tmp_path)
    assert (first.family, first.stage, first.tokens, first.learning_rate) == (
        "mine", "stage1", 1000, 0.5,
    )  # fmt: skip
    assert (second.tokens, second.learning_rate) == (1500, 0.25)
    assert (first.notes, second.notes) == ((), ("the learning rate of `stage2` is inferred",))
    (alone,) = find_checkpoints(tmp_path / "stage2-step5")
    assert alone.learning_rate == 0.25


def test_no_family_is_guessed_and_a_trainer_s_state_gives_its_rate(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "stage1-step500")
    (found,) = find_checkpoints(folder)
    assert (found.family, found.tokens, found.learning_rate) == (None, None, None)
    assert (found.stage, found.step) == ("stage1", 500)
    with pytest.raises(UsageError, match="no family `dmeo`") as caught:
        find_checkpoints(folder, recipe(family="dmeo"))
    assert caught.value.hint == "did you mean `demo`?"
    folder = checkpoint(tmp_path / "final")
    log = [{"step": 10, "learning_rate": 0.3}, {"step": 20, "learning_rate": 0.2}, {"step": 20}]
    trainer_state(folder, global_step=20, num_input_tokens_seen=4096, log_history=log)
    (found,) = find_checkpoints(folder)
    assert (found.step, found.tokens, found.learning_rate) == (20, 4096, 0.2)
    trainer_state(folder, global_step=25, log_history=[{"step": 20, "learning_rate": 0.2}])
    (found,) = find_checkpoints(folder)  # the rate of another step does not stand for it
    assert (found.step, found.learning_rate, found.tokens) == (25, None, None)
    # A recipe's schedule stands in where nothing else is known.
    last = series(tmp_path / "own", "checkpoint-5", "checkpoint-10") / "checkpoint-10"
    trainer_state(last, global_step=10, log_history=[{"step": 10, "learning_rate": 7.0}])
    schedule = {"kind": "linear", "peak": 1.0, "end": 10}
    found = find_checkpoints(tmp_path / "own", recipe(schedule=schedule))
    assert [c.learning_rate for c in found] == [0.5, 7.0]


def test_a_final_model_is_a_row_of_its_own_unless_it_equals_a_checkpoint(tmp_path: Path) -> None:
    run = series(checkpoint(tmp_path / "run"), "checkpoint-5", "checkpoint-10", "checkpoint-15")
    for step in (5, 10, 15):
        log = [{"step": step, "learning_rate": step / 100}]
        trainer_state(run / f"checkpoint-{step}", global_step=step, log_history=log)
    (run / "model.safetensors").write_bytes(b"weightscheckpoint-15")
    found = find_checkpoints(run)
    assert [(c.label, c.step, c.learning_rate) for c in found] == [
        ("checkpoint-5", 5, 0.05), ("checkpoint-10", 10, 0.1), ("checkpoint-15", 15, 0.15),
    ]  # fmt: skip
    assert found[-1].notes == ("`run` holds the weights of `checkpoint-15`: one row for both",)
    (run / "model.safetensors").write_bytes(b"weightscheckpoint-5")  # the best was loaded again
    found = find_checkpoints(run)
    assert labels(found) == ["checkpoint-5", "checkpoint-10", "checkpoint-15"]
    assert [bool(c.notes) for c in found] == [True, False, False]
    (run / "model.safetensors").write_bytes(b"weightscheckpoint-16")
    trainer_state(run, global_step=17, log_history=[{"step": 17, "learning_rate": 0}])
    found = find_checkpoints(run)
    assert [(c.label, c.step) for c in found][-1] == ("run", 17)
    assert found[-1].learning_rate == 0
    (run / "model.safetensors").write_bytes(b"weightscheckpoint-15")
    found = find_checkpoints(run, recipe(checkpoints=("run",)))
    assert labels(found)[-1] == "run"  # a copy that is requested by name


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
_STATES = _JSON | st.fixed_dictionaries(
    {},
    optional={
        "global_step": _JSON,
        "num_input_tokens_seen": _JSON,
        "log_history": _JSON
        | st.lists(st.fixed_dictionaries({}, optional={"step": _JSON, "learning_rate": _JSON})),
    },
)


@given(state=_STATES)
def test_trainer_states_are_read_or_refused(
    state: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = checkpoint(tmp_path_factory.mktemp("state") / "final")
    (folder / "trainer_state.json").write_text(json.dumps(state))
    try:
        (found,) = find_checkpoints(folder, hashed=False)
    except SourceError as error:
        assert "trainer_state.json" in error.message
    else:
        assert found.step is None or found.step >= 0


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, "9" * 5000, "\ud800", '{"global_step": 1e400}']
)
def test_a_trainer_state_made_to_harm_is_refused(text: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "final")
    (folder / "trainer_state.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(SourceError, match=r"trainer_state\.json"):
        find_checkpoints(folder)


def _runs(root: Path) -> Path:
    series(root / "run-a", "step10", "step20")
    return series(root / "run-b", "step10", "step20").parent


def _neighbour(root: Path) -> Path:
    return checkpoint(root / "olmo-step1000").with_name("olmo-step100")


def _without_checkpoints(root: Path) -> Path:
    (root / "notes.txt").write_text("")
    (root / "sub").mkdir()
    return root


def _without_configuration(root: Path) -> Path:
    (checkpoint(root / "a") / "config.json").unlink()
    return root / "a"


@pytest.mark.parametrize(
    ("make", "code", "message", "hint"),
    [
        (_neighbour, 2, "there is no folder `{}`", "did you mean `olmo-step1000`?"),
        (lambda root: root / "no" / "where", 2, "there is no folder `{}`", "a recipe file, or `de"),
        (lambda root: root, 2, "`{}` is empty", "checkpoints in it"),
        (_without_checkpoints, 2, "there is no checkpoint in `{}`", "config.json"),
        (_runs, 2, "there is no checkpoint in `{}`", "/run-a`"),
        (_without_configuration, 4, "`{}` holds weights and no `config.json`", "as safetensors"),
        (lambda root: checkpoint(root / "a") / "model.safetensors", 2,
         "`{}` is a file, and a folder is needed", "`config.json` in it"),
    ],
)  # fmt: skip
def test_what_is_no_folder_of_checkpoints_is_refused_with_what_to_do(
    make: Callable[[Path], Path], code: int, message: str, hint: str, tmp_path: Path
) -> None:
    target = make(tmp_path)
    with pytest.raises(QauditError) as caught:
        find_checkpoints(target)
    assert (caught.value.message, caught.value.code) == (message.format(target), code)
    assert hint in caught.value.hint


def test_demo_means_the_shipped_series(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    series(tmp_path / "shipped", "stage1-step500")
    series(tmp_path / "here" / "demo", "step1")
    monkeypatch.setattr("qaudit.checkpoints.folder.shipped_series", lambda: tmp_path / "shipped")
    monkeypatch.chdir(tmp_path / "here")
    assert labels(find_checkpoints(DEMO)) == ["stage1-step500"]
    assert labels(find_checkpoints("./demo")) == ["step1"]
