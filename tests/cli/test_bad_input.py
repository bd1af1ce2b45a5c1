"""What strangers do to a scan: each has a sentence, a hint and an exit code, and no traceback."""

import ast
import os
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import qaudit.errors
from qaudit.saved.parts import one_writer
from tests.house.source import modules
from tests.support.cli import QUICK, TEXT, audit_of, edited, refused
from tests.support.models import save_model, save_tokenizer

DAMAGED = "download the file again"
STEP10 = Path("series/step10")
CONFIG, WEIGHTS = STEP10 / "config.json", STEP10 / "model.safetensors"


def change(edit, file=WEIGHTS):
    """Edit the tensors of a checkpoint."""
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def configure(file=CONFIG, **values):
    return lambda: edited(file, **values)


def short(file, nbytes):
    return lambda: file.write_bytes(file.read_bytes()[:nbytes])


def file_of(name, text):
    def write():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")

    return write


def model(name, family="llama", **options):
    return lambda: save_tokenizer(save_model(Path(name), 0, family, **options))


def of_tensors(edit=dict.update, *arguments, **tensors):
    """Edit tensors by a method of dictionaries: `update` if no other is named."""
    return lambda: change(lambda own: edit(own, *arguments, **tensors))


def filled(name, value, many):
    return lambda: change(lambda tensors: tensors[name][3, many].fill_(float(value)))


def pickled(folder=STEP10):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


class Opens:
    """Pickles as a call that makes a folder."""

    def __reduce__(self):
        return os.mkdir, (str(Path.cwd() / "was-run"), 0o700)


def with_code():
    WEIGHTS.unlink()
    torch.save({"a": Opens()}, STEP10 / "pytorch_model.bin")


def add_encoder():
    model("bert", "bert")()
    configure(Path("bert/config.json"), architectures=["BertForMaskedLM"])()


def add_vision_model():
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    ViTForImageClassification(ViTConfig(num_hidden_layers=1, **small)).save_pretrained("vit")
    save_tokenizer(Path("vit"))


def added(name, line):
    with Path(f"{name}.jsonl").open("a", encoding="utf-8") as file:
        return file.write(line or Path("evaluation.jsonl").read_text("utf-8").splitlines()[5])


def with_nan(folder):
    change(lambda tensors: tensors["model.norm.weight"].fill_(torch.nan), folder / WEIGHTS.name)


UP, V = "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.v_proj.weight"
LOST, CUT = "model.layers.1.mlp.up_proj.weight", "model.safetensors` is cut short"
DOCUMENT, NO_ANSWER = '{"text": "the fox"}', '{"question": "a", "choices": ["b", "c"]}'
NO_NUMBERS = f"tensor `{V}` in `model.safetensors` holds NaN or infinity"
RECIPE = "audit.yaml"
GOOD_RECIPE = file_of(RECIPE, "targets: [series]\n")

REFUSED = [
    # targets
    (None, "serie", 2, "there is no folder `serie`", "did you mean `series`?"),
    (None, "nowhere/at/all", 2, "there is no folder", "name a folder with checkpoints"),
    (None, "runs/my-modle", 4, "no folder `runs/my-modle`, and on the Hub: ", "HF_HUB_OFFLINE"),
    (lambda: Path("nothing").mkdir(), "nothing", 2, "`nothing` is empty", "name a folder with"),
    (file_of("other/notes.txt", "hello"), "other", 2, "no checkpoint in `other`", "`config.json`"),
    (None, "calibration.jsonl", 2, "is a file", "`config.json`"),
    (None, "series series/step10", 2, "is given 2 times", "name each of them once"),
    # models
    (add_encoder, "bert", 4, "`BertForMaskedLM`, not a decoder", "predict the next token"),
    (add_vision_model, "vit", 4, "`ViTForImageClassification`, not a decoder", "next token of a"),
    (model("helium", "helium", head_dim=128), "helium", 4, "block 0 cannot be run", "config.json"),
    (model("small", vocab_size=270), "small", 4, "knows 270 tokens", "tokenizer"),
    (
        model("gpt2", "gpt2", max_position_embeddings=16),
        "gpt2 --set context=40", 4, "a window of", "`--set context=N`",
    ),
    (partial(save_tokenizer, Path("series/step200"), 280), "series", 2, "different tok", "bits"),
    (with_code, "series/step10 --allow-pickle", 4, "cannot be read as pickled", "to safetensors"),
    (
        lambda: [with_nan(folder) for folder in Path("series").iterdir()],
        "series", 4, "nothing could be measured", "diverged",
    ),
    *(
        (edit, "series/step10", code, sentence, hint)
        for edit, code, sentence, hint in (
            (CONFIG.unlink, 4, "holds weights and no `config.json`", "`config.json`"),
            (WEIGHTS.unlink, 4, "no weights in `series/step10`", "`model.safetensors`"),
            (configure(model_type="lamma"), 2, "not describe a known model", "model_type"),
            (short(CONFIG, 40), 2, "config.json` cannot be read", "download it again"),
            (file_of(str(CONFIG), "[1]"), 2, "it is not a table of keys", "config.json"),
            (configure(num_attention_heads=5), 2, "(32) is not a multiple", "`model_type`"),
            (configure(num_hidden_layers="two"), 2, "num_hidden_layers", "`config.json`"),
            (lambda: [f.unlink() for f in STEP10.glob("token*")], 4, "no tokenizer in", "copy `t"),
            (short(STEP10 / "tokenizer.json", 100), 2, "the tokenizer in", "copy `token"),
            (short(WEIGHTS, 0), 4, CUT, DAMAGED),
            (short(WEIGHTS, 5), 4, CUT, DAMAGED),
            (short(WEIGHTS, 500), 4, CUT, DAMAGED),
            (short(WEIGHTS, 60_000), 4, CUT, DAMAGED),
            (of_tensors(dict.pop, LOST), 4, f"no tensor for `{LOST}` in `serie", "incomplete"),
            (of_tensors(SIDE=torch.ones(2, 2)), 4, "has no place for `SIDE`", "belong together"),
            (of_tensors(**{UP: torch.ones(64, 30)}), 4, f"`{UP}` in `series/st", "config"),
            (filled(V, "nan", slice(4, 6)), 4, NO_NUMBERS, "diverged"),
            (filled(V, "inf", slice(4, 6)), 4, "2 of 1024", "diverged"),
            (pickled, 4, "holds pickled weights only", "`--allow-pickle`"),
        )
    ),
    # schemes
    (None, "series --schemes gtpq-4bit", 2, "no scheme `gtpq-4bit`", "mean `gptq-4bit`?"),
    (None, "series --schemes int3", 2, "there is no scheme `int3`", "did you mean `int8`?"),
    # text
    *(
        (edit, f"series {options}", 2, sentence, hint)
        for edit, options, sentence, hint in (
            (file_of("1.txt", "fox " * 500), "--evaluation 1.txt", "1 usable doc", "one a file"),
            (file_of("1.jsonl", DOCUMENT), "--evaluation 1.jsonl", "1 usable", "one a line"),
            (None, "--calibration evaluation.jsonl", "share 12 documents", "no document in"),
            (partial(added, "calibration", ""), "",
             "share 1 documents, the first is `calibration.jsonl:5`", "in"),
            (None, "--evaluation evaluatoin.jsonl", "no text file", "where the command runs"),
            (partial(added, "evaluation", "{oops\n"), "", "line 13 of `eval", "one object"),
            (file_of("c.jsonl", NO_ANSWER), "--set choices=c.jsonl", "no `answer`", '"answer": 0'),
        )
    ),
    # options
    *(
        (None, f"series {options}", 2, sentence, hint)
        for options, sentence, hint in (
            ("--scheme rtn-4bit", "no option `--scheme`", "--schemes"),
            ("--frobnicate", "has no option `--frobnicate`", "--help-all"),
            (f"--set context={10**30}", "`context` is", "less than or equal to"),
            ("--set calibration_seed=-1", "calibration_seed", ""),
            ("--device cuda:x", "`cuda:x` is not a device", "cuda"),
            ("--set stream_memory=-1GB", "`-1GB` is not a size", "512MB"),
            ("--set bos=always", "no BOS token", "`--set bos=auto`"),
            ("--checkpoints stage*", "no checkpoint matches `stage*`", "step10, step200"),
            ("--checkpoints step100", "no checkpoint `step100`", "did you mean `step1000`?"),
            ("--out=", "`--out` is empty", "name a folder"),
        )
    ),
    *(
        (None, "series --device cuda", 4, "sees no CUDA device", "`--device cpu`")
        for _ in range(not torch.cuda.is_available())
    ),
    *(
        (None, f"series --soup greedy{soup}", 2, sentence, hint)
        for soup, sentence, hint in (
            (":scheme=gptq-2bit(step*)", "searched for at `gptq-2bit`, which is not", "--sch"),
            (":scheme=gtpq-4bit(step*)", "there is no scheme `gtpq-4bit`", "gptq-4bit"),
            ("(0.5*step10+0.5*step200)", "takes no weights", "plain mean"),
            ("(step10)", "has one candidate, `step10`", "two or more"),
            ("(step10+step10)", "the same weights twice", "leave one"),
            ("(nothing-*)", "no checkpoint matches `nothing-*`", "there are"),
            (":scheme=rtn-4bit", "`greedy:scheme=rtn-4bit` names no checkpoints", "(A+B+C)"),
        )
    ),
    *(
        (None, f"series/step10 --set diagnostics={asked}", 2, sentence, hint)
        for asked, sentence, hint in (
            ("weight", "there is no diagnostic `weight`", "did you mean `weights`?"),
            ("weights:group=big", "`group=big` of `weights` is not a whole", "whole"),
            ("sensitivity:scheme=bnb-nf4", "no bits to choose", "sensitivity:scheme=gptq-"),
            ("sensitivity --schemes bnb-nf4", "no scheme of this audit has bits to", "gptq-3bit"),
        )
    ),
    (
        lambda: shutil.copytree(STEP10, "series/step20"),
        "series --soup step10+step20", 2, "the same weights twice: `step10` and `step20`",
        "leave one of them out",
    ),
    # recipes
    *(
        (file_of(RECIPE, recipe), RECIPE, 2, sentence, hint)
        for recipe, sentence, hint in (
            ("targets: [series\n", "`audit.yaml` cannot be read", "YAML"),
            ("- series\n", "`audit.yaml` is not a recipe", "table of keys"),
            ("schemes: [rtn-4bit]\n", "key `targets` is missing", "add it"),
            (
                "targets: [series]\nsoups: &a [x]\nsources: [*a, {b: *a}]\nsoups: []\n",
                "line 4: key `soups` is there twice", "YAML",
            ),
        )
    ),
    (GOOD_RECIPE, "adit.yaml", 2, "no recipe `adit.yaml`", "did you mean `audit.yaml`?"),
    (GOOD_RECIPE, "audit.yaml series", 2, "there are other targets beside it", "by itself"),
    # output folders
    (file_of("results", ""), "series --out results", 2, "`results` is a file", "`--out`"),
    (file_of("results", ""), "series --out results/inside", 2, "`results` is a file", "`--out`"),
    (lambda: os.mkfifo("fifo"), "series --out fifo", 2, "`fifo` is a file", "`--out`"),
    *(
        (
            lambda: Path("loop").symlink_to("loop"),
            f"series --out {out}", 2, "`loop` is a link that leads nowhere", "`--out`",
        )
        for out in ("loop", "loop/inside")
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=[f"{c[1][:30]}: {c[3][:30]}" for c in REFUSED])
def test_what_is_wrong_is_refused_in_words(place, qaudit, case):
    edit, words, code, sentence, hint = case
    if edit is not None:
        edit()
    usual = TEXT if "--schemes" in words else QUICK
    refused(qaudit("scan", *usual, *words.split()), code, sentence, hint)
    assert not list(place.rglob("audit.json"))
    assert not (place / "was-run").exists()


def test_a_folder_that_is_missing_is_named_before_the_hub_is_asked(place, scan):
    note = "there is no folder `runs/my-modle`: looking for it on the Hub"
    assert note not in scan("runs/my-modle").err  # nothing says that a folder is meant
    (place / "runs").mkdir()
    said = scan("runs/my-modle").err
    assert said.index(note) < said.index("error: ")


MOE = "model.layers.1.block_sparse_moe."
EXPERTS = {
    "an-expert": ("experts.1.w1.weight", None, 3, "cannot be joined"),
    "the-last": ("experts.2.w3.weight", None, 3, "cannot be joined"),
    "a-router": ("gate.weight", torch.zeros(3, 16), 3, "where the config asks"),
    "converter": ("experts.1.w2.weight", torch.zeros(16, 5), 3, "block_sparse_moe.experts"),
    "fewer": ("", None, 2, "[3, 32] where the config asks for [2, 32]"),
    "more": ("", None, 5, "[3, 32] where the config asks for [5, 32]"),
}
ODD = {
    "type": {"dtype": "float31"},
    "config": {"quantization_config": True},
    "blocks": {"num_hidden_layers": 1_000_000},
}


def test_odd_configs_and_experts_that_do_not_fit_are_skipped(place, scan):
    model("moe", "mixtral", num_local_experts=3)()
    for name, (key, value, count, _) in EXPERTS.items():
        shutil.copytree("moe", name)
        changes = {} if value is None else {MOE + key: value}
        if key:
            change(lambda tensors, key=key: tensors.pop(MOE + key), Path(name, WEIGHTS.name))
            change(lambda tensors, new=changes: tensors.update(new), Path(name, WEIGHTS.name))
        configure(Path(name, "config.json"), num_local_experts=count)()
    for name, keys in ODD.items():
        shutil.copytree(STEP10, name)
        configure(Path(name, "config.json"), **keys)()
    done = scan(*EXPERTS, *ODD, "series/step1000")
    assert done.code == 3 and "bug" not in done.err
    audit = audit_of(place / "out")
    assert {row["subject"] for row in audit["measurements"]} == {"step1000"}
    skipped = {row["subject"]: row["reason"] for row in audit["skipped"]}
    assert skipped.keys() == {*EXPERTS, *ODD}
    for name, reason in skipped.items():
        assert f"skipped {name}: " in done.err
        assert name in ODD or EXPERTS[name][3] in reason


def with_a_dead_link(folder):
    (folder / WEIGHTS.name).unlink()
    (folder / WEIGHTS.name).symlink_to("../../blobs/gone")


DAMAGES = [
    (lambda folder: short(folder / WEIGHTS.name, 60_000)(), "is cut short"),
    (lambda folder: (folder / CONFIG.name).unlink(), "no `config.json`"),
    (lambda folder: short(folder / CONFIG.name, 40)(), "/config.json` "),
    (lambda folder: (folder / WEIGHTS.name).unlink(), "no weights"),
    (with_a_dead_link, "no weights"),
    (pickled, "pickled weights only"),
    (with_nan, "holds NaN"),
]


def test_damaged_checkpoints_are_skipped_by_name(place, scan):
    before_and_behind = (f"step{(1, 2000)[k % 2] + k}" for k in range(len(DAMAGES)))
    reasons = dict(zip(before_and_behind, [reason for _, reason in DAMAGES], strict=True))
    for (break_it, _), label in zip(DAMAGES, reasons, strict=True):
        shutil.copytree("series/step1000", f"series/{label}")
        break_it(place / "series" / label)
    shutil.copytree("series/step200", "series/step300")
    save_file(load_file(WEIGHTS), place / "series/step300/model.safetensors")
    soups = [f"mean(step10+{label})" for label in ("step1", "step2001")]
    done = scan("series", "--soup", soups[0], "--soup", soups[1], code=3)
    audit = audit_of(place / "out")
    good = ["step10", "step200", "step300", "step1000"]
    assert [subject["label"] for subject in audit["subjects"]] == good
    assert {row["subject"] for row in audit["measurements"]} == set(good)
    skipped = {row["subject"]: row for row in audit["skipped"]}
    assert skipped.keys() == {*reasons, *soups}
    for label, reason in reasons.items():
        assert skipped[label]["scheme"] is None
        assert reason in skipped[label]["reason"]
        assert f"skipped {label}: " in done.err and f"- {label}: " in done.out


def test_files_of_a_checkpoint_that_nest_without_end(place, scan):
    for name in ("trainer_state.json", "model.safetensors.index.json", "config.json"):
        folder = place / "series" / "step10"
        shutil.copytree(folder, place / name)
        (place / name / name).write_text("[" * 100_000, encoding="utf-8")
        if name == "model.safetensors.index.json":  # read only where there is no single file
            (place / name / "model.safetensors").rename(place / name / "part.safetensors")
        refused(scan(name, "--dry-run"), 2 if name == "config.json" else 4, name, "")
    (place / "series" / "qaudit-family.yaml").write_text("[" * 100_000, encoding="utf-8")
    refused(scan("series"), 2, "qaudit-family.yaml` cannot be read: line 1: it nests", "YAML")


def test_an_output_folder_inside_a_checkpoint(place, qaudit):
    files = sorted((place / "series").rglob("*"))
    for command, *outs in (
        (f"scan series {' '.join(TEXT)}", "", "/audits/new"),
        ("soup series --soup last:2", "/new", "/audits/new-new"),
        ("export series/step10 --scheme rtn-4bit", "/new", "/audits/new-new"),
        ("rollouts series/step10 --prompts evaluation.jsonl", "/new", "/audits/new-new"),
    ):
        for out in outs:
            done = qaudit(*command.split(), "--out", f"series/step10{out}")
            refused(done, 2, "series/step10`, whose files others copy", "outside of it with `--o")
    assert sorted((place / "series").rglob("*")) == files


FOOTPRINT = "qaudit.planning.machine.Footprint"
TERABYTES = "needs about 1152921.5 TB of memory"
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
DENIED = PermissionError(13, "Permission denied", "secret/config.json")


def test_what_the_machine_does_not_give_is_said_in_words(place, scan, monkeypatch):
    results = ("--out", "results/deep/down")
    with one_writer(place / "results"):
        done = scan("series", "--out", "results")
        refused(done, 4, "`results` is being written by another process", "`--out`")
    for name, value, more, sentence, hint in (
        ("os.access", lambda path, _: "results" not in str(path), results,
         "`results` takes no files", "`--out`"),
        ("qaudit.engine.block_pass.run_blocks", Mock(side_effect=OUT_OF_MEMORY), (),
         "out of memory", "`--set context=N`"),
        ("qaudit.planning.prepare.make_plan", Mock(side_effect=DENIED), (),
         "`secret/config.json`: permission denied", "run the same command"),
        (f"{FOOTPRINT}.memory_nbytes", 2**60, (), TERABYTES, "more memory"),
    ):  # fmt: skip
        with monkeypatch.context() as patched:
            patched.setattr(name, value)
            refused(scan("series", *more), 4, sentence, hint)
    monkeypatch.setattr(f"{FOOTPRINT}.memory_nbytes", 2**60)
    monkeypatch.setattr(f"{FOOTPRINT}.what_would_fit", lambda *_: (10**6, None))
    refused(scan("series"), 4, TERABYTES, "it would fit with `--set stream_memory=")


ERRORS = {name for name, kind in vars(qaudit.errors).items() if isinstance(kind, type)}


def test_every_error_says_what_to_do():
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
