"""Folders as training leaves them: adapters of Trainer and PEFT, DCP folders of torch."""

import shutil
import warnings
from functools import partial

import pytest
import torch

from qaudit.checkpoints.configuration import FSDP_FOLDER
from tests.support.cli import OUT, TEXT, cells, edited, refused

BASE, SCHEME, MIXTURE = "series/step10", "rtn-4bit:group=32", "gptq-mix:budget=3.75:group=32"


@pytest.fixture(scope="module")
def trained(shipped, tmp_path_factory):
    """Train an adapter for two steps with Trainer, which saves each with its optimizer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    base, out = shipped / BASE, tmp_path_factory.mktemp("trained") / "run"
    with warnings.catch_warnings(action="ignore"):  # of PEFT, about transformers
        model = AutoModelForCausalLM.from_pretrained(base)
        lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
        rows = [{"input_ids": torch.arange(3, 35), "labels": torch.arange(3, 35)}] * 4
        arguments = TrainingArguments(
            str(out), max_steps=2, save_steps=1, learning_rate=0.05, report_to=[], use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            get_peft_model(model, lora), arguments, train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(base),
            data_collator=lambda rows: {k: torch.stack([r[k] for r in rows]) for k in rows[0]},
        )  # fmt: skip
        trainer.train()
        trainer.save_model(str(out))
    assert (out / "checkpoint-1" / "optimizer.pt").is_file()
    return out


@pytest.fixture
def run(place, trained):
    """Return a copy of the run beside its base, which it names by a path."""
    shutil.copytree(trained, place / "run")
    rename(place / "run", BASE)
    return place / "run"


@pytest.fixture
def scan(place, qaudit):
    return partial(qaudit, "scan", *TEXT, "--schemes", SCHEME, "--out", "out")


def rename(folder, base, **more):
    """Name another base, and change what else an adapter says of itself."""
    for file in folder.rglob("adapter_config.json"):
        edited(file, base_model_name_or_path=base, **more)


def losses(folder=OUT):
    return {cell: row["ce"] for cell, row in cells(folder).items()}


def export_is_what_was_audited(qaudit, out, label, scheme=SCHEME):
    shutil.rmtree("exported", ignore_errors=True)
    chosen = ("--subject", label, "--scheme", scheme, "--out", "exported")
    assert qaudit("export", out, *chosen).code == 0
    verified = qaudit("verify", "exported", "--audit", out)
    assert (verified.code, "This is what was audited" in verified.out + verified.err) == (0, True)


def test_adapters_of_a_run_are_a_series_that_is_merged_as_peft_merges(scan, qaudit, place, run):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    both, half = "both=checkpoint-1+checkpoint-2", "half=step10+checkpoint-2"
    done = scan("run", BASE, "--soup", both, "--soup", half, code=0)
    assert "run holds the weights of checkpoint-2: one row for both" in " ".join(done.err.split())
    assert "QA015" not in done.err
    with warnings.catch_warnings(action="ignore"):
        model = AutoModelForCausalLM.from_pretrained(place / BASE)
        merged = PeftModel.from_pretrained(model, run / "checkpoint-2").merge_and_unload()
        merged.save_pretrained(place / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / BASE / name, place / "merged" / name)
    assert scan("merged", "--out", "of-merged").code == 0
    ours, theirs = losses(), losses(place / "of-merged")
    labels = {"step10", "checkpoint-1", "checkpoint-2", "both", "half"}
    assert {subject for subject, _ in ours} == labels
    for scheme in ("fp", SCHEME):
        assert ours["checkpoint-2", scheme] == pytest.approx(theirs["merged", scheme], rel=1e-6)
        assert ours["checkpoint-2", scheme] != ours["step10", scheme]
    export_is_what_was_audited(qaudit, "out", "checkpoint-2")
    assert qaudit("soup", "run", "--soup", both, "--out", "soup").code == 0
    assert scan("soup", "--out", "of-soup").code == 0
    assert losses(place / "of-soup")["soup", "fp"] == pytest.approx(ours["both", "fp"], rel=1e-6)

    rename(run / "checkpoint-1", BASE, lora_alpha=64)  # of 8: a plan knows another adapter
    assert scan("run", "--checkpoints", "checkpoint-1", "--out", "again").code == 0
    assert losses(place / "again")["checkpoint-1", "fp"] != ours["checkpoint-1", "fp"]


def test_a_mixture_of_a_soup_with_an_adapter_is_exported(qaudit, run, scan):
    half = ("--soup", "half=step10+checkpoint-2", "--checkpoints", "step10", "--out", "out")
    assert qaudit("scan", "run", BASE, *half, *TEXT, "--schemes", MIXTURE).code == 0
    assert len(set("".join(cells()["half", MIXTURE]["mixture"].values()))) > 1
    export_is_what_was_audited(qaudit, "out", "half", MIXTURE)
    # An adapter is refused with what is missing.
    shutil.rmtree(run / "checkpoint-1")
    for base, sentence, hint in (
        (None, "does not name the model", "base_model_name_or_path"),
        ("/gone/model", "is an adapter of `/gone/model`, which", "put that model there"),
    ):
        rename(run, base)
        refused(scan("run/checkpoint-2", "--dry-run"), 4, sentence, hint)
    rename(run, "series/step200")
    assert scan("run/checkpoint-2", "--dry-run").code == 0
    (run / "checkpoint-2" / "adapter_model.safetensors").unlink()
    refused(scan("run/checkpoint-2"), 4, "no weights of an adapter", "adapter_model.safetensors")


def test_an_adapter_and_its_base_may_be_on_the_hub(scan, qaudit, place, run, online, serve_root):
    assert scan("run").code == 0
    here, root = losses(), online / "root" / "lab"
    shutil.copytree(place / "series", root / "series")
    shutil.copytree(place / BASE, root / "base" / "main")
    shutil.copytree(run / "checkpoint-2", root / "adapter" / "main")
    shutil.copytree(run / "checkpoint-2", root / "adapters" / "main" / "checkpoint-2")
    rename(root, "lab/base")
    rename(run, "lab/series", revision="step10")
    serve_root()
    for target in ("run", "lab/adapter", "lab/adapters@main//checkpoint-2"):
        out = f"of-{target.replace('/', '-')}"
        scan(target, "--out", out, code=0)
        found = losses(place / out)
        if target == "run":
            assert found == here
            continue
        (label,) = {subject for subject, _ in found}
        for scheme in ("fp", SCHEME):
            assert found[label, scheme] == here["checkpoint-2", scheme]
    export_is_what_was_audited(qaudit, out, label)


def test_a_distributed_checkpoint_is_its_safetensors(scan, qaudit, place):
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM

    for number, step in enumerate((10, 200), 1):
        model = AutoModelForCausalLM.from_pretrained(place / f"series/step{step}")
        folder = place / "fsdp" / f"checkpoint-{number}"
        with warnings.catch_warnings(action="ignore"):  # that one process saves
            states = {"model": model.state_dict()}
            dcp.save(states, checkpoint_id=folder / FSDP_FOLDER, no_dist=True)
        (folder / "optimizer_0").mkdir()
    refused(scan("fsdp"), 4, "config.json` cannot be read", "once into the folder that holds all")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / BASE / name, place / "fsdp" / name)
    assert scan("fsdp").code == 0
    assert scan(BASE, "series/step200", "--out", "plain").code == 0
    ours, plain = losses(), losses(place / "plain")
    for number, step in enumerate((10, 200), 1):
        for scheme in ("fp", SCHEME):
            assert ours[f"checkpoint-{number}", scheme] == plain[f"step{step}", scheme]
    export_is_what_was_audited(qaudit, "out", "checkpoint-1")
