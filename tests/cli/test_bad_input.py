"""What strangers do to a scan: each has a sentence, a hint and an exit code, and no traceback."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import qaudit.errors
from qaudit.saved.parts import one_writer
from tests.house.source import modules
from tests.support.cli import QUICK, TEXT, Outcome, Run, audit_of, refused
from tests.support.models import save_model, save_tokenizer, write_documents

DAMAGED = "download the file again"


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Edit the tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | values), encoding="utf-8")


def cut(path: Path, nbytes: int) -> None:
    path.write_bytes(path.read_bytes()[:nbytes])


# ------------------------------------------------------------------------------------ targets


def test_no_such_folder_is_answered_with_one_nearly_called_so(scan: Run) -> None:
    refused(scan("serie"), 2, "there is no folder `serie`", "did you mean `series`?")


def test_no_such_folder_and_none_like_it(scan: Run) -> None:
    refused(scan("nowhere/at/all"), 2, "there is no folder", "name a folder with checkpoints")
    offline = scan("runs/my-modle")  # the name of a repository, too
    refused(offline, 4, "there is no folder `runs/my-modle`, and on the Hub: ", "HF_HUB_OFFLINE")


def test_a_folder_that_is_missing_is_named_before_the_hub_is_asked(place: Path, scan: Run) -> None:
    note = "there is no folder `runs/my-modle`: looking for it on the Hub"
    assert note not in scan("runs/my-modle").err  # nothing says that a folder is meant
    (place / "runs").mkdir()
    said = scan("runs/my-modle").err
    assert said.index(note) < said.index("error: ")


def test_an_empty_folder(place: Path, scan: Run) -> None:
    (place / "nothing").mkdir()
    refused(scan("nothing"), 2, "`nothing` is empty", "name a folder with checkpoints")


def test_a_folder_of_other_things(place: Path, scan: Run) -> None:
    (place / "other").mkdir()
    (place / "other" / "notes.txt").write_text("hello", encoding="utf-8")
    refused(scan("other"), 2, "no checkpoint in `other`", "`config.json`")


def test_a_file_where_a_folder_is_needed(scan: Run) -> None:
    refused(scan("calibration.jsonl"), 2, "is a file", "`config.json`")


def test_weights_without_a_config(place: Path, scan: Run) -> None:
    (place / "series" / "step10" / "config.json").unlink()
    refused(scan("series/step10"), 4, "holds weights and no `config.json`", "`config.json`")


def test_a_config_without_weights(place: Path, scan: Run) -> None:
    (place / "series" / "step10" / "model.safetensors").unlink()
    refused(scan("series/step10"), 4, "no weights in `series/step10`", "`model.safetensors`")


def test_the_same_folder_twice(scan: Run) -> None:
    refused(scan("series", "series/step10"), 2, "is given 2 times", "name each of them once")


# ------------------------------------------------------------------------------------- models


def test_an_encoder(place: Path, scan: Run) -> None:
    save_tokenizer(save_model(place / "bert", 0, "bert"))
    change_config(place / "bert", architectures=["BertForMaskedLM"])
    refused(scan("bert"), 4, "`BertForMaskedLM`, not a decoder", "predict the next token")


def test_a_vision_model(place: Path, scan: Run) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    ViTForImageClassification(config).save_pretrained(place / "vit")
    save_tokenizer(place / "vit")
    refused(scan("vit"), 4, "`ViTForImageClassification`, not a decoder", "next token of a text")


def test_a_model_of_an_unknown_kind(place: Path, scan: Run) -> None:
    change_config(place / "series" / "step10", model_type="lamma")
    refused(scan("series/step10"), 2, "does not describe a known model", "`model_type`")


def test_a_config_that_is_not_json(place: Path, scan: Run) -> None:
    cut(place / "series" / "step10" / "config.json", 40)
    refused(scan("series/step10"), 2, "config.json` cannot be read", "download it again")


def test_a_config_that_is_not_a_table(place: Path, scan: Run) -> None:
    (place / "series" / "step10" / "config.json").write_text("[1]", encoding="utf-8")
    refused(scan("series/step10"), 2, "it is not a table of keys", "`config.json`")


def test_a_config_that_contradicts_itself(place: Path, scan: Run) -> None:
    change_config(place / "series" / "step10", num_attention_heads=5)
    refused(scan("series/step10"), 2, "hidden size (32) is not a multiple", "`model_type`")


def test_a_config_with_words_for_numbers(place: Path, scan: Run) -> None:
    change_config(place / "series" / "step10", num_hidden_layers="two")
    refused(scan("series/step10"), 2, "num_hidden_layers", "`config.json`")


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "float31"}, {"quantization_config": True}, {"num_hidden_layers": 1_000_000}],
    ids=str,
)
def test_a_checkpoint_with_an_odd_config_is_skipped_and_the_others_are_measured(
    place: Path, scan: Run, changes: dict[str, object]
) -> None:
    change_config(place / "series" / "step10", **changes)
    done = scan("series")
    assert done.code == 3
    assert "step10" in done.err
    assert "bug" not in done.err


def test_a_config_whose_contradiction_shows_only_when_it_runs(place: Path, scan: Run) -> None:
    save_tokenizer(save_model(place / "helium", 0, "helium", head_dim=128))
    refused(scan("helium"), 4, "block 0 cannot be run", "`config.json`")


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("model.layers.1.block_sparse_moe.experts.1.w1.weight", None, "number 1 is missing"),
        ("model.layers.1.block_sparse_moe.experts.2.w3.weight", None, "3 tensors like"),
        (
            "model.layers.1.block_sparse_moe.gate.weight",
            torch.zeros(3, 16),
            "where the config asks",
        ),
        (
            "model.layers.1.block_sparse_moe.experts.1.w2.weight",
            torch.zeros(16, 5),
            "block_sparse_moe.experts",
        ),
    ],
    ids=["an expert", "the last expert", "a router", "a converter that fails"],
)
def test_experts_that_do_not_fit(
    key: str, value: torch.Tensor | None, sentence: str, place: Path, scan: Run
) -> None:
    folder = save_model(place / "moe", 0, "mixtral", num_local_experts=3)
    save_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    assert key in tensors
    changed = {name: t for name, t in {**tensors, key: value}.items() if t is not None}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    done = scan("moe", "series/step10")
    assert done.code == 3 and "moe" in done.err and sentence in done.err
    rows: Any = audit_of(place / "out")["measurements"]
    assert {row["subject"] for row in rows} == {"step10"}  # the other goes on


@pytest.mark.parametrize("count", [2, 5])
def test_a_count_of_experts_that_contradicts_the_tensors(
    count: int, place: Path, scan: Run
) -> None:
    folder = save_model(place / "moe", 0, "mixtral", num_local_experts=3)
    save_tokenizer(folder)
    change_config(folder, num_local_experts=count)
    done = scan("moe", "series/step10")
    assert done.code == 3 and f"[3, 32] where the config asks for [{count}, 32]" in done.err
    rows: Any = audit_of(place / "out")["measurements"]
    assert {row["subject"] for row in rows} == {"step10"}  # the other goes on


def test_a_tokenizer_that_is_missing(place: Path, scan: Run) -> None:
    for file in (place / "series" / "step10").glob("token*"):
        file.unlink()
    refused(scan("series/step10"), 4, "there is no tokenizer in", "copy `tokenizer.json`")


def test_a_tokenizer_that_is_damaged(place: Path, scan: Run) -> None:
    cut(place / "series" / "step10" / "tokenizer.json", 100)
    refused(scan("series/step10"), 2, "the tokenizer in", "copy `tokenizer.json`")


def test_a_tokenizer_of_another_model(place: Path, scan: Run) -> None:
    folder = save_model(place / "small", 0, vocab_size=270)
    save_tokenizer(folder)
    refused(scan("small"), 4, "knows 270 tokens", "tokenizer")


def test_a_context_longer_than_a_model_has_positions_for(place: Path, scan: Run) -> None:
    write_documents(place / "evaluation.jsonl", range(200, 212))
    save_tokenizer(save_model(place / "gpt2", 0, "gpt2", max_position_embeddings=16))
    refused(scan("gpt2", "--set", "context=40"), 4, "a window of", "`--set context=N`")


def test_different_tokenizers(place: Path, scan: Run) -> None:
    save_tokenizer(place / "series" / "step200", 280)
    refused(scan("series"), 2, "different tokenizers", "bits per byte")


# ------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("nbytes", [0, 5, 500, 60_000])
def test_weights_that_are_cut_short(place: Path, scan: Run, nbytes: int) -> None:
    cut(place / "series" / "step10" / "model.safetensors", nbytes)
    refused(scan("series/step10"), 4, "model.safetensors` is cut short", DAMAGED)


def test_a_tensor_that_is_missing(place: Path, scan: Run) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change(place / "series" / "step10", lambda tensors: tensors.pop(name))
    refused(scan("series/step10"), 4, f"no tensor for `{name}` in `series/step10`", "incomplete")


def test_a_tensor_that_nothing_reads(place: Path, scan: Run) -> None:
    extra = {"model.layers.0.mlp.side.weight": torch.ones(2, 2)}
    change(place / "series" / "step10", lambda tensors: tensors.update(extra))
    done = scan("series/step10")
    refused(done, 4, "has no place for `model.layers.0.mlp.side.weight`", "belong together")
    assert "step10/config.json" in done.err


def test_a_tensor_of_the_wrong_shape(place: Path, scan: Run) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change(place / "series" / "step10", lambda tensors: tensors.update({name: torch.ones(64, 30)}))
    done = scan("series/step10")
    refused(done, 4, f"tensor `{name}` in `series/step10/model.safetensors` is [64, 30]", "config")
    assert "[64, 32]" in done.err


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_are_not_numbers(place: Path, scan: Run, value: str) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    change(place / "series" / "step10", lambda tensors: tensors[name][3, 4:6].fill_(float(value)))
    done = scan("series/step10")
    refused(done, 4, f"tensor `{name}` in `model.safetensors` holds NaN or infinity", "diverged")
    assert "2 of 1024" in done.err


def test_pickled_weights_are_refused_unless_trusted(place: Path, scan: Run) -> None:
    folder = place / "series" / "step10"
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(scan("series/step10"), 4, "holds pickled weights only", "`--allow-pickle`")


def test_a_pickle_that_runs_code_is_refused_even_if_trusted(place: Path, scan: Run) -> None:
    folder = place / "series" / "step10"
    (folder / "model.safetensors").unlink()
    torch.save({"a": Opens(str(place / "was-run"))}, folder / "pytorch_model.bin")
    done = scan("series/step10", "--allow-pickle")
    refused(done, 4, "cannot be read as pickled tensors", "convert it to safetensors")
    assert not (place / "was-run").exists()


class Opens:
    """Pickles as a call that makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (self.path, 0o700)


def _cut(folder: Path) -> None:
    cut(folder / "model.safetensors", 60_000)


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _with_half_a_config(folder: Path) -> None:
    cut(folder / "config.json", 40)


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _with_a_dead_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/gone")


def _with_pickles(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _with_nan(folder: Path) -> None:
    change(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))


DAMAGES = [
    (_cut, "is cut short"),
    (_without_config, "no `config.json`"),
    (_with_half_a_config, "/config.json` "),
    (_without_weights, "no weights"),
    (_with_a_dead_link, "no weights"),
    (_with_pickles, "pickled weights only"),
    (_with_nan, "holds NaN"),
]


def _are_skipped(done: Outcome, place: Path, reasons: dict[str, str], good: list[str]) -> None:
    audit = audit_of(place / "out")
    assert [subject["label"] for subject in audit["subjects"]] == good
    assert {row["subject"] for row in audit["measurements"]} == set(good)
    skipped = {row["subject"]: row for row in audit["skipped"]}
    assert skipped.keys() == reasons.keys()
    for label, reason in reasons.items():
        assert skipped[label]["scheme"] is None
        assert reason in skipped[label]["reason"]
        assert f"skipped {label}: " in done.err
        assert f"- {label}: " in done.out
    assert done.code == 3


@pytest.mark.parametrize(("break_it", "reason"), DAMAGES)
def test_a_damaged_checkpoint_before_good_ones_is_skipped_by_name(
    place: Path, scan: Run, break_it: Callable[[Path], None], reason: str
) -> None:
    break_it(place / "series" / "step10")
    _are_skipped(scan("series"), place, {"step10": reason}, ["step200", "step1000"])


def test_damaged_checkpoints_behind_good_ones_are_skipped_by_name(place: Path, scan: Run) -> None:
    reasons = {}
    for step, (break_it, reason) in enumerate(DAMAGES, 2000):
        shutil.copytree(place / "series" / "step1000", place / "series" / f"step{step}")
        break_it(place / "series" / f"step{step}")
        reasons[f"step{step}"] = reason
    _are_skipped(scan("series"), place, reasons, ["step10", "step200", "step1000"])


def test_a_soup_with_a_damaged_member_is_skipped(place: Path, scan: Run) -> None:
    _cut(place / "series" / "step10")
    done = scan("series", "--soup", "step10+step200")
    skipped = [row["subject"] for row in audit_of(place / "out")["skipped"]]
    assert skipped == ["step10", "mean(step10+step200)"]
    assert done.code == 3


def test_a_series_without_one_good_checkpoint(place: Path, scan: Run) -> None:
    for folder in (place / "series").iterdir():
        _with_nan(folder)
    done = scan("series")
    refused(done, 4, "nothing could be measured", "diverged")
    assert "step200" in done.err


# ------------------------------------------------------------------------------------ schemes


@pytest.mark.parametrize(
    ("scheme", "sentence", "hint"),
    [
        ("gtpq-4bit", "there is no scheme `gtpq-4bit`", "did you mean `gptq-4bit`?"),
        ("GPTQ-4bit", "there is no scheme `GPTQ-4bit`", "did you mean `gptq-4bit`?"),
        ("int3", "there is no scheme `int3`", "did you mean `int8`?"),
        ("rtn-1bit", "bits", "2 to 8"),
        ("rtn-9bit", "bits", "2 to 8"),
        ("gptq-4bit:group=0", "group", "-1"),
        ("rtn-4bit:group=-2", "group", "-1"),
        ("awq-4bit:group=0", "group", "-1"),
        ("rtn-4bit:groups=64", "`rtn` has no parameter `groups`", "did you mean `group`?"),
        ("rtn-4bit:group=many", "`group=many` of `rtn` is not a whole number", "whole number"),
        ("rtn", "needs bits", "`rtn-4bit`"),
        ("rtn-4bit,rtn-4bit", "is named twice", "name each scheme once"),
        (",", "no scheme is named", "for example"),
        ("gptq-4bit:preset=paper-z", "no preset `paper-z`", "paper-a"),
        ("auto-gptq", "there is no scheme `auto-gptq`", "as `gptq-4bit`"),
        ("autoawq", "there is no scheme `autoawq`", "as `awq-4bit`"),
        ("awq", "needs bits", "`awq-4bit`"),
        ("bitsandbytes", "there is no scheme", "`bnb-nf4`"),
        ("fp", "there is no scheme `fp`", "always measured"),
    ],
)
def test_schemes_that_are_not(
    place: Path, qaudit: Run, scheme: str, sentence: str, hint: str
) -> None:
    refused(qaudit("scan", "series", *TEXT, "--schemes", scheme), 2, sentence, hint)


# --------------------------------------------------------------------------------------- text


def test_an_evaluation_text_of_one_document(place: Path, qaudit: Run) -> None:
    write_documents(place / "one.jsonl", range(1))
    done = qaudit("scan", "series", *TEXT[:2], "--evaluation", "one.jsonl")
    refused(done, 2, "1 usable document, and 2 are needed", "one a line")


def test_one_plain_text_is_one_document(place: Path, qaudit: Run) -> None:
    (place / "book.txt").write_text("the fox\n" * 500, encoding="utf-8")
    done = qaudit("scan", "series", *TEXT[:2], "--evaluation", "book.txt")
    refused(done, 2, "1 usable document, and 2", "one a file")


def test_a_folder_of_plain_texts_is_as_many_documents(place: Path, qaudit: Run) -> None:
    (place / "books").mkdir()
    for k in range(3):
        (place / "books" / f"{k}.txt").write_text(f"{k} the fox jumps", encoding="utf-8")
    done = qaudit(
        "scan",
        "series/step10",
        *TEXT[:2],
        "--evaluation",
        "books",
        "--schemes",
        "rtn-4bit",
        "--json",
        "-q",
    )
    assert json.loads(done.out)["measurements"][0]["documents"] == 3


def test_calibration_and_evaluation_on_the_same_text(place: Path, qaudit: Run) -> None:
    same = ("--calibration", "evaluation.jsonl", "--evaluation", "evaluation.jsonl")
    refused(qaudit("scan", "series", *same), 2, "share 12 documents", "no document in common")


def test_one_shared_document_under_another_name(place: Path, qaudit: Run) -> None:
    lines = (place / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    with (place / "calibration.jsonl").open("a", encoding="utf-8") as file:
        file.write(lines[5])
    done = qaudit("scan", "series", *TEXT)
    refused(done, 2, "share 1 documents, the first is `calibration.jsonl:5`", "in common")


def test_a_text_that_is_not_there(qaudit: Run, place: Path) -> None:
    done = qaudit("scan", "series", *TEXT[:2], "--evaluation", "evaluatoin.jsonl")
    refused(done, 2, "no text file `evaluatoin.jsonl`", "did you mean `evaluation.jsonl`?")


def test_a_line_that_is_not_json(qaudit: Run, place: Path) -> None:
    with (place / "evaluation.jsonl").open("a", encoding="utf-8") as file:
        file.write("{oops\n")
    done = qaudit("scan", "series", *TEXT)
    refused(done, 2, "line 13 of `evaluation.jsonl` is not JSON", "one object on each line")


def test_choices_without_an_answer(place: Path, scan: Run) -> None:
    (place / "c.jsonl").write_text('{"question": "a", "choices": ["b", "c"]}', encoding="utf-8")
    refused(scan("series", "--set", "choices=c.jsonl"), 2, "no `answer`", '"answer": 0')


# ------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--scheme", "rtn-4bit"], "--schemes"),
        (["--frobnicate"], "has no option `--frobnicate`"),
        (["--set", "context=long"], "context"),
        (["--set", "context=1"], "context"),
        (["--set", "evaluation_documents=1"], "evaluation_documents"),
        (["--set", "calibration_seed=-1"], "calibration_seed"),
    ],
)
def test_options_the_parser_refuses(scan: Run, options: list[str], sentence: str) -> None:
    done = scan("series", *options)
    assert sentence in done.err
    assert done.code == 2


@pytest.mark.parametrize(
    ("options", "code", "sentence", "hint"),
    [
        (["--device", "tpu"], 2, "device", "cuda"),
        (["--device", "cuda:x"], 2, "`cuda:x` is not a device", "cuda"),
        (["--set", "dtype=int8"], 2, "dtype", "'float32'"),
        (["--set", "bos=sometimes"], 2, "bos", "'never'"),
        (["--set", "stream_memory=lots"], 2, "`lots` is not a size", "512MB"),
        (["--set", f"disk_budget={'9' * 400}"], 2, "is more than any machine has", "512MB"),
        (["--set", "stream_memory=-1GB"], 2, "`-1GB` is not a size", "512MB"),
        (["--set", "disk_budget=60"], 2, "`60` has no unit", "write `60GB` or `60MB`"),
        (["--set", "bos=always"], 2, "no BOS token", "`--set bos=auto`"),
        (["--checkpoints", "stage*"], 2, "no checkpoint matches `stage*`", "step10, step200"),
        (["--checkpoints", "step100"], 2, "no checkpoint `step100`", "did you mean `step1000`?"),
        (["--soup", "step10"], 2, "has one member, `step10`", "two or more"),
        (["--soup", "step10+step20"], 2, "no checkpoint `step20`", "did you mean `step200`?"),
        (["--soup", "stage*"], 2, "no checkpoint matches `stage*`", "step10, step200"),
        (["--soup", "step10+"], 2, "`step10+` is not a soup", "`A+B+C`"),
        (["--soup", "step10+step10"], 2, "the same weights twice", "leave one of them out"),
        (["--soup", "blend(step10+step200)"], 2, "there is no merge `blend`", "mean"),
        (["--soup", "step10=mean(step200+step1000)"], 2, "called `step10`", "something else"),
    ],
)
def test_options_with_values_that_are_not(
    scan: Run, options: list[str], code: int, sentence: str, hint: str
) -> None:
    refused(scan("series", *options), code, sentence, hint)


def test_a_soup_of_the_same_weights_under_two_names(place: Path, scan: Run) -> None:
    shutil.copytree(place / "series" / "step10", place / "series" / "step20")
    done = scan("series", "--soup", "step10+step20")
    refused(done, 2, "the same weights twice: `step10` and `step20`", "leave one of them out")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there(scan: Run) -> None:
    refused(scan("series", "--device", "cuda"), 4, "sees no CUDA device", "`--device cpu`")


def test_a_command_that_is_not_there(qaudit: Run) -> None:
    done = qaudit("scna", "series")
    assert "scna" in done.err
    assert done.code == 2


# ------------------------------------------------------------------------------------ recipes


@pytest.mark.parametrize(
    ("recipe", "sentence", "hint"),
    [
        ("targets: [series\n", "`audit.yaml` cannot be read", "YAML"),
        ("- series\n", "`audit.yaml` is not a recipe", "table of keys"),
        ("targets: [series]\nscheme: [rtn-4bit]\n", "no key `scheme`", "did you mean `schemes`?"),
        ("schemes: [rtn-4bit]\n", "key `targets` is missing", "add it"),
        ("targets: [series]\ncontext: long\n", "`context` is `long`", "a whole number"),
        ("targets: [series]\nschedule: {kind: cosin}\n", "`schedule`", "kind: linear"),
    ],
)
def test_recipes_that_are_not(
    place: Path, scan: Run, recipe: str, sentence: str, hint: str
) -> None:
    (place / "audit.yaml").write_text(recipe, encoding="utf-8")
    refused(scan("audit.yaml"), 2, sentence, hint)


def test_files_of_a_checkpoint_that_nest_without_end(place: Path, scan: Run) -> None:
    for name in ("trainer_state.json", "model.safetensors.index.json", "config.json"):
        folder = place / "series" / "step10"
        shutil.copytree(folder, place / name)
        (place / name / name).write_text("[" * 100_000, encoding="utf-8")
        if name == "model.safetensors.index.json":  # read only where there is no single file
            (place / name / "model.safetensors").rename(place / name / "part.safetensors")
        refused(scan(name, "--dry-run"), 2 if name == "config.json" else 4, name, "")
    (place / "series" / "qaudit-family.yaml").write_text("[" * 100_000, encoding="utf-8")
    refused(scan("series"), 2, "qaudit-family.yaml` cannot be read: line 1: it nests", "YAML")


def test_a_recipe_of_floods_and_knots(place: Path, scan: Run) -> None:
    text = "targets: [series]\nsoups: &a [x]\nsources: [*a, {b: *a}]\nsoups: []\n"
    (place / "audit.yaml").write_text(text, encoding="utf-8")
    refused(scan("audit.yaml"), 2, "line 4: key `soups` is there twice", "YAML")


def test_a_recipe_that_is_not_there(place: Path, scan: Run) -> None:
    (place / "audit.yaml").write_text("targets: [series]\n", encoding="utf-8")
    refused(scan("adit.yaml"), 2, "no recipe `adit.yaml`", "did you mean `audit.yaml`?")


def test_a_recipe_beside_another_target(place: Path, scan: Run) -> None:
    (place / "audit.yaml").write_text("targets: [series]\n", encoding="utf-8")
    refused(scan("audit.yaml", "series"), 2, "there are other targets beside it", "by itself")


# ------------------------------------------------------------------------------------ machine


def test_an_output_folder_that_is_a_file(place: Path, qaudit: Run) -> None:
    (place / "results").write_text("", encoding="utf-8")
    done = qaudit("scan", "series", *QUICK[:-1], "results")
    refused(done, 2, "`results` is a file", "`--out`")
    done = qaudit("scan", "series", *QUICK[:-1], "results/inside")
    refused(done, 2, "`results` is a file", "`--out`")


@pytest.mark.parametrize("out", ["series/step10", "series/step10/audits/new"])
def test_an_output_folder_inside_a_checkpoint(place: Path, qaudit: Run, out: str) -> None:
    files = sorted((place / "series").rglob("*"))
    done = qaudit("scan", "series", *QUICK[:-1], out)
    refused(done, 2, "series/step10`, whose files others copy", "outside of it with `--out`")
    for command in (
        ("soup", "series", "--soup", "last:2"),
        ("export", "series/step10", "--scheme", "rtn-4bit"),
        ("rollouts", "series/step10", "--prompts", TEXT),
    ):
        done = qaudit(*command, "--out", out + "-new" if out.endswith("new") else f"{out}/new")
        refused(done, 2, "series/step10`, whose files others copy", "outside of it with `--out`")
    assert sorted((place / "series").rglob("*")) == files


@pytest.mark.parametrize(
    "command",
    [
        ("scan", "series", *QUICK, "--policy", "p" * 5000),
        ("scan", "t" * 5000, "--dry-run"),
        ("scan", "series", "--evaluation", "e" * 5000, "--dry-run"),
        ("gate", "a" * 5000),
        ("export", "a" * 5000, "--out", "new"),
    ],
)
def test_a_name_that_is_too_long_for_a_file(
    place: Path, qaudit: Run, command: tuple[str, ...]
) -> None:
    done = qaudit(*command)
    assert (done.code, done.err.count("error: ")) == (2, 1), done.err
    assert len(done.err) < 8000


def test_an_output_folder_that_is_a_fifo_or_a_loop_of_links(place: Path, qaudit: Run) -> None:
    os.mkfifo(place / "fifo")
    (place / "loop").symlink_to(place / "loop")
    refused(qaudit("scan", "series", *QUICK[:-1], "fifo"), 2, "`fifo` is a file", "`--out`")
    for out in ("loop", "loop/inside"):
        done = qaudit("scan", "series", *QUICK[:-1], out)
        refused(done, 2, "`loop` is a link that leads nowhere", "`--out`")


def test_an_output_folder_that_another_process_writes(place: Path, qaudit: Run) -> None:
    with one_writer(place / "results"):
        done = qaudit("scan", "series", *QUICK[:-1], "results")
    refused(done, 4, f"`results` is being written by process {os.getpid()} on ", "`--out`")


def test_an_output_folder_that_takes_no_files(
    place: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: "results" not in str(path))
    (place / "results").mkdir()
    done = qaudit("scan", "series", *QUICK[:-1], "results/deep/down")
    refused(done, 4, "`results` takes no files", "`--out`")


def test_memory_that_runs_out(place: Path, scan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("qaudit.engine.block_pass.run_blocks", run_out)
    refused(scan("series"), 4, "out of memory", "`--set context=N`")


FOOTPRINT = "qaudit.planning.footprint.Footprint"


def test_an_audit_larger_than_the_machine(scan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{FOOTPRINT}.memory_nbytes", 2**60)
    monkeypatch.setattr(f"{FOOTPRINT}.what_would_fit", lambda *_: (10**6, None))
    refused(
        scan("series"),
        4,
        "needs about 1152921.5 TB of memory",
        "it would fit with `--set stream_memory=",
    )


def test_an_audit_that_nothing_would_make_fit(scan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{FOOTPRINT}.memory_nbytes", 2**60)
    refused(scan("series"), 4, "needs about 1152921.5 TB of memory", "more memory")


def test_what_the_system_refuses_is_said_in_words(
    scan: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "secret/config.json")

    monkeypatch.setattr("qaudit.planning.prepare.make_plan", refuse)
    refused(scan("series"), 4, "`secret/config.json`: permission denied", "run the same command")


# -------------------------------------------------------------------------------- every error

ERRORS = {name for name, kind in vars(qaudit.errors).items() if isinstance(kind, type)}


def test_every_error_says_what_to_do() -> None:
    without = [
        f"{module.name}:{call.lineno} {ast.unparse(call)}"
        for module in modules()
        for call in ast.walk(module.tree)
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") in ERRORS
        and not any(
            keyword.arg == "hint" and ast.unparse(keyword.value) not in ("''", "None")
            for keyword in call.keywords
        )
    ]
    assert without == []


@pytest.mark.parametrize("option", [("--out", ""), ("--out=",)])
def test_an_output_folder_without_a_name_is_refused(qaudit: Run, option: tuple[str, ...]) -> None:
    refused(qaudit("scan", "demo", *option, "--dry-run"), 2, "`--out` is empty", "name a folder")


def test_a_window_longer_than_any_model_reads_is_refused(qaudit: Run) -> None:
    done = qaudit("scan", "demo", "--set", f"context={10**30}", "--dry-run")
    refused(done, 2, "`context` is", "less than or equal to")
