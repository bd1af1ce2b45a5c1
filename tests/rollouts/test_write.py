"""Rollouts of a tiny model: what transformers generates, once, resumed and hashed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qaudit.rollouts.generate as generating
from qaudit.text.rollouts import read_rollouts
from tests.support.cli import refused
from tests.support.models import save_model, save_tokenizer

PROMPTS = ("the quick fox", "a lazy dog jumps", "wizards", "over the lazy box while")
COMMAND = ("model", "--prompts", "prompts.jsonl", "--max-tokens", 12, "--samples", 3, "-q")
END = 270
SIZES = {"eos_token_id": END, "max_position_embeddings": 48}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Return a folder with a model and prompts; whoever changes them uses `place`."""
    root = tmp_path_factory.mktemp("shipped")
    save_tokenizer(save_model(root / "model", 1, **SIZES))
    lines = [json.dumps({"prompt": text}) for text in PROMPTS]
    (root / "prompts.jsonl").write_text("\n".join(lines), "utf-8")
    return root


@pytest.fixture
def place(shipped, tmp_path, monkeypatch):
    shutil.copytree(shipped, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(qaudit, out, *options):
    ended = qaudit("rollouts", *COMMAND, "--out", out, *options)
    assert ended.code == 0, ended.err
    return read_rollouts(Path(out))


def by_key(rollouts):
    return {(r.prompt, r.sample, r.greedy): r for r in rollouts.samples}


def test_greedy_samples_are_those_of_transformers(place, qaudit):
    rollouts = write(qaudit, "out")
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained("model")
    for number, text in enumerate(PROMPTS):
        ids = tokenizer(text, return_tensors="pt").input_ids
        expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        sample = by_key(rollouts)[number, 0, True]
        assert list(sample.ids) == ids[0].tolist()
        assert list(sample.new_ids) == expected[0, ids.shape[1] :].tolist()
        assert sample.finished == (sample.new_ids[-1] == END)
    assert len(rollouts.samples) == 16
    assert rollouts.header.end_ids == (END,)
    assert rollouts.header.engine.endswith("float32 on cpu")
    assert "text" in (place / "out" / "answers.jsonl").read_text("utf-8")


def test_samples_are_drawn_by_the_checkpoints_own_sampler(place, qaudit):
    own = {"do_sample": True, "temperature": 0.5, "top_k": 1, "top_p": 0.9}
    (place / "model" / "generation_config.json").write_text(json.dumps(own), "utf-8")
    rollouts = write(qaudit, "out")
    assert (rollouts.header.sampler.temperature, rollouts.header.sampler.top_k) == (0.5, 1)
    samples = by_key(rollouts)
    assert all(r.new_ids == samples[r.prompt, 0, True].new_ids for r in rollouts.samples)
    other = write(qaudit, "other", "--set", "top_k=0", "--temperature", 3, "--samples", 40)
    assert other.header.sampler.top_k is None
    drawn = {r.new_ids for r in other.samples if r.prompt == 0 and not r.greedy}
    assert len(drawn) == 40
    finished = [r for r in other.samples if r.finished]
    assert finished
    assert all(r.new_ids[-1] == END and END not in r.new_ids[:-1] for r in finished)
    assert all(len(r.new_ids) == 12 for r in other.samples if not r.finished)


def test_a_killed_command_goes_on(place, qaudit, monkeypatch):
    whole = write(qaudit, "whole")
    calls = []
    original = generating.generate

    def killed(*arguments):
        calls.append(len(arguments[1]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(generating, "generate", killed)
        ended = qaudit("rollouts", *COMMAND, "--out", "out")
    refused(ended, 130, "what was measured is in `out`", "run the same command again")
    assert not (place / "out" / "rollouts.json").exists()
    partial = place / "out" / "partial.jsonl"
    kept = partial.read_bytes()
    partial.write_bytes(kept[:-9])  # as a kill in the middle of a line leaves it
    calls.clear()
    monkeypatch.setattr(
        generating, "generate", lambda *a: (calls.append(len(a[1])), original(*a))[1]
    )
    assert write(qaudit, "out") == whole
    assert sum(calls) == 16 - (kept.count(b"\n") - 1)
    assert (place / "out" / "rollouts.jsonl").read_bytes() == (
        place / "whole" / "rollouts.jsonl"
    ).read_bytes()
    calls.clear()
    assert write(qaudit, "out") == whole
    assert not calls


def test_other_requests_are_refused_and_marks_put_beside_samples(place, qaudit):
    done = qaudit("rollouts", *COMMAND, "--out", "out", "--set", "marks=none.jsonl")
    refused(done, 2, "there is no text file `none.jsonl`", "path")
    assert not (place / "out").exists()  # before anything is written
    write(qaudit, "out")
    other = qaudit("rollouts", *COMMAND, "--out", "out", "--set", "seed=1")
    refused(other, 2, "was begun with another `seed`: 0, not 1", "--out")
    marks = [
        {"prompt": 1, "sample": 2, "correct": True},
        {"prompt": 0, "greedy": True, "score": 0.5},
    ]
    (place / "marks.jsonl").write_text("\n".join(map(json.dumps, marks)), "utf-8")
    samples = by_key(write(qaudit, "out", "--set", "marks=marks.jsonl"))
    found = [samples[key].mark for key in ((1, 2, False), (0, 0, True), (0, 0, False))]
    assert found == [1, 0.5, None]
    for mark, wrong, hint in (
        ({"prompt": 9, "correct": True}, "sample of prompt 9, which `out` does not", "answers"),
        ({"prompt": 0, "correct": 1}, "line 1 of `marks.jsonl` is no mark", "correct"),
    ):
        (place / "marks.jsonl").write_text(json.dumps(mark), "utf-8")
        done = qaudit("rollouts", *COMMAND, "--out", "out", "--set", "marks=marks.jsonl")
        refused(done, 2, wrong, hint)
    save_tokenizer(save_model(place / "model", 2, **SIZES))
    refused(qaudit("rollouts", *COMMAND, "--out", "out"), 2, "another `weights`", "--out")
    (place / "out" / "begun.json").write_text("{", "utf-8")
    refused(qaudit("rollouts", *COMMAND, "--out", "out"), 2, "`out/begun.json` cannot", "--out")


def test_messages_are_rendered_by_the_chat_template(place, qaudit):
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    (place / "model" / "chat_template.jinja").write_text(template, "utf-8")
    messages = [{"role": "user", "content": "the lazy dog"}]
    (place / "prompts.jsonl").write_text(json.dumps({"messages": messages}), "utf-8")
    rollouts = write(qaudit, "out", "--samples", 0)
    tokenizer = AutoTokenizer.from_pretrained("model")
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert list(rollouts.samples[0].ids) == list(expected)


def test_prompts_that_cannot_be_read_and_a_model_that_does_not_fit_are_refused(
    place, qaudit, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("qaudit.model.device.available_nbytes", lambda: 100_000)
        ended = qaudit("rollouts", *COMMAND, "--out", "out")
    refused(ended, 4, "`model` does not fit in memory as a whole", "--server")
    for content, sentence in (
        ("", "there is no prompt in"),
        ("{", "line 1 of `prompts.jsonl` is not JSON"),
        ('{"text": "x"}', "has no text"),
        ('{"prompt": "\\ud800"}', "line 1 of `prompts.jsonl` holds half a character"),
        ("[]", "is a list and not an object"),
        (json.dumps({"prompt": "the " * 60}), "tokens, and the model reads 48"),
        (json.dumps({"messages": [{"role": "user", "content": "x"}]}), "chat template"),
    ):
        (place / "prompts.jsonl").write_text(content, "utf-8")
        ended = qaudit("rollouts", *COMMAND, "--out", f"out-{len(content)}")
        assert ended.code == 2
        assert sentence in ended.err


def test_one_checkpoint_writes_rollouts(place, qaudit):
    for step in (10, 20):
        save_tokenizer(save_model(place / "series" / f"step{step}", step))
    several = qaudit("rollouts", "series", *COMMAND[1:], "--out", "out")
    refused(several, 2, "`series` has 2 checkpoints", "--checkpoints")
    alone = ("rollouts", "series", *COMMAND[1:], "--out", "out", "--checkpoints", "step20")
    assert qaudit(*alone).code == 0
    whole = read_rollouts(Path("out")).header
    assert (whole.target, whole.weights_sha256 != "") == ("series/step20", True)
    merged = ("rollouts", "series", *COMMAND[1:], "--out", "soup", "--soup", "step10+step20")
    assert qaudit(*merged).code == 0
    assert read_rollouts(Path("soup")).header.weights_sha256 != whole.weights_sha256
    recipe = "targets: [series]\nsoups: [step10+step20]\ncheckpoints: [step20]\n"
    (place / "recipe.yaml").write_text(recipe, "utf-8")
    assert qaudit("rollouts", "recipe.yaml", *COMMAND[1:], "--out", "recipe").code == 0
    assert read_rollouts(Path("recipe")).header.target == "series/step20"
    nothing = qaudit("rollouts", *COMMAND, "--out", "y", "--temperature", 0)
    refused(nothing, 2, "draws nothing", "--samples 0")
