"""Folders of tasks of others: nothing in them runs code, with or without Python beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from qaudit.errors import SourceError, UsageError
from qaudit.items import harness
from qaudit.items.files import split_files
from qaudit.items.foreign import code_in
from qaudit.items.prepare import Reading, read_items
from qaudit.settings import Recipe
from tests.support import toys

pytestmark = pytest.mark.filterwarnings("default")  # lm-eval's own

GOOD = {
    "task": "mine",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}} is",
    "doc_to_choice": "options",
    "doc_to_target": "gold",
    "num_fewshot": 0,
    "metric_list": [{"metric": "acc"}],
}
EVIL = "open('marker', 'w').close()\ndef text(*a, **k):\n    return 'run'\n"


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"q": word, "options": ["a", "bb", "c d"], "gold": 1} for word in toys.WORDS[:4]]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("mine").mkdir()
    Path("mine/evil.py").write_text(EVIL)


def write(text: str = "", **keys: object) -> None:
    """Write the task, keys of it replaced; `text` is YAML that JSON cannot say."""
    table = {key: value for key, value in (GOOD | keys).items() if value is not None}
    lines = [f"{key}: {json.dumps(value)}" for key, value in table.items()]
    Path("mine/mine.yaml").write_text("\n".join([*lines, text]) + "\n")


def read(*, trusted: bool = False) -> tuple[list[str], dict[str, SourceError]]:
    recipe = Recipe((), tasks=("mine",), task_items="all")
    tokenizer = toys.tokenizer(adds_bos=False)
    items, failed = read_items(Reading(recipe, (), "t", 4096, trusted), tokenizer, {})
    return [tokenizer.decode(window.tokens) for window in items.windows], failed


CODE = {
    "text": "doc_to_text: !function evil.text",
    "documents": "process_docs: !function evil.text",
    "data": "custom_dataset: !function evil.text",
    "examples": "fewshot_config: {sampler: first_n, samples: !function evil.text}",
    "metric": "metric_list: [{metric: acc}, {metric: acc, aggregation: !function evil.text}]",
    "filter": "filter_list: [{name: x, filter: [{function: !function evil.text}]}]",
    "installed": "doc_to_text: !function os.system",
    "included": "include: more/base.yaml",
}


@pytest.mark.parametrize("line", CODE.values(), ids=list(CODE))
def test_python_code_of_a_folder_is_not_run(line: str) -> None:
    Path("mine/more").mkdir()
    Path("mine/more/evil.py").write_text(EVIL)
    Path("mine/more/base.yaml").write_text("doc_to_target: !function evil.text\n")
    key = line.partition(":")[0]
    write(line, **{key: None}, **({"doc_to_target": None} if key == "include" else {}))
    (definition,) = harness.definitions(["mine"])
    assert code_in(definition.leaves[0].config)
    with pytest.raises(UsageError, match=r"runs Python code, `.*`, which is not run") as refused:
        read()
    assert "--trust-task-code" in refused.value.hint
    assert not Path("marker").exists()


def test_python_code_of_a_folder_runs_where_it_is_trusted() -> None:
    write("doc_to_text: !function evil.text", doc_to_text=None)
    texts, failed = read(trusted=True)
    assert (failed, texts[0]) == ({}, "run a")
    assert Path("marker").exists()


@pytest.mark.parametrize("key", ["doc_to_text", "doc_to_choice", "doc_to_target", "description"])
def test_a_template_that_leaves_its_values_leaves_its_task_out(key: str) -> None:
    write(**{key: "{{ cycler.__init__.__globals__.os.system('touch marker') }}"})
    _, failed = read(trusted=True)  # no option lets it
    assert "is unsafe" in failed["mine"].message
    assert not Path("marker").exists()


REFUSED = {
    "class": ({"class": "evil.Task"}, "is a Python class"),
    "results": ({"process_results": "evil.text"}, "by code of its own"),
    "prompt": ({"use_prompt": "evil.yaml:x"}, "promptsource"),
    "address": ({"dataset_kwargs": {"data_files": "http://x/y.json"}}, "no files on this machine"),
    "chain": ({"dataset_kwargs": {"data_files": ["reference::a"]}}, "no files on this machine"),
    "FIFO": ({"dataset_kwargs": {"data_files": "fifo"}}, "no files on this machine"),
    "script": ({"dataset_path": "script"}, "is a script"),
    "shape": ({"dataset_kwargs": 5}, "`dataset_kwargs` is no dict"),
    "shapes": ({"metric_list": ["acc"]}, "no list of tables"),
}


@pytest.mark.parametrize(("keys", "why"), REFUSED.values(), ids=list(REFUSED))
def test_what_else_could_run_code_or_wait_for_ever_is_refused(
    keys: dict[str, object], why: str
) -> None:
    os.mkfifo("fifo")
    Path("script").mkdir()
    Path("script/script.py").write_text(EVIL)
    write(**keys)
    with pytest.raises((UsageError, SourceError), match=why):
        read()
    assert not Path("marker").exists()


HARMLESS = {
    "metric": {"metric_list": [{"metric": "acc"}, {"metric": "mine/evil", "hf_evaluate": True}]},
    "unknown metric": {"metric_list": [{"metric": "acc"}, {"metric": "mine/evil"}]},
    "filter": {"filter_list": [{"name": "x", "filter": [{"function": "evil"}]}]},
    "remote code": {"dataset_kwargs": {**GOOD["dataset_kwargs"], "trust_remote_code": True}},  # type: ignore[dict-item]
}


@pytest.mark.parametrize("keys", HARMLESS.values(), ids=list(HARMLESS))
def test_names_of_metrics_and_filters_are_not_looked_up(keys: dict[str, object]) -> None:
    Path("mine/evil").mkdir()
    Path("mine/evil/evil.py").write_text(EVIL)
    write(**keys)
    texts, failed = read()
    assert (failed, len(texts), texts[0]) == ({}, 12, "the is a")
    assert not Path("marker").exists()


def test_pickles_are_no_data_of_tasks() -> None:
    write(dataset_path="pandas")
    assert "chooses among the files of `pandas`" in read()[1]["mine"].message


OUTSIDE = ("/etc/passwd", "../x.json", "reference::x.json", "http://x/y.json", "~/x.json")


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("shape", ['"{}"', '["{}"]', '[{{split: test, path: ["{}"]}}]'])
def test_a_readme_names_no_data_outside_of_its_data_set(path: str, shape: str) -> None:
    text = f"---\nconfigs: [{{config_name: x, data_files: {shape.format(path)}}}]\n---\n"
    with pytest.raises(SourceError, match="names data outside of it"):
        split_files("org/name", None, ("test",), ("x.json",), text.encode())


FILES = {
    "objects": "a: !!python/object/apply:os.system ['touch marker']\n",
    "names": "task: !!python/name:os.system\n",
    "bomb": "a: &a [x]\n"
    + "".join(
        f"{b}: &{b} [*{a},*{a}]\n"
        for a, b in zip("abcdefghijklmnopqrs", "bcdefghijklmnopqrst", strict=True)
    ),
    "cycle": "include: bad.yaml\ntask: bad\n",
    "device": "include: /dev/zero\ntask: bad\n",
}


@pytest.mark.parametrize("text", FILES.values(), ids=list(FILES))
def test_a_file_that_is_no_table_of_keys_is_named(text: str) -> None:
    Path("mine/bad.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"bad.yaml` cannot be read: "):
        harness.definitions(["mine"])
    assert not Path("marker").exists()


@pytest.mark.parametrize("name", ["mine", "mine/fifo.yaml"])
def test_a_fifo_is_not_waited_for(name: str) -> None:
    os.mkfifo("mine/fifo.yaml")
    with pytest.raises(UsageError, match="not a regular file"):
        harness.definitions([name])


def test_an_included_file_is_part_of_what_identifies_prompts() -> None:
    Path("base.yaml").write_text('doc_to_text: "{{q}} was"\n')
    write("include: ../base.yaml", doc_to_text=None)
    assert read()[0][0] == "the was a"
    Path("base.yaml").write_text('doc_to_text: "{{q}} will be"\n')
    assert read()[0][0] == "the will be a"
