"""Folders as training leaves them: adapters of Trainer and PEFT, DCP folders of torch."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from qaudit.checkpoints.header import FSDP_FOLDER
from tests.support.cli import TEXT, Run, audit_of, refused, settings
from tests.support.hub import Hub

BASE, SCHEME = "series/step10", "rtn-4bit:group=32"


@pytest.fixture(scope="module")
def trained(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def run(place: Path, trained: Path) -> Path:
    """Return a copy of the run beside its base, which it names by a path."""
    shutil.copytree(trained, place / "run")
    for file in (place / "run").rglob("adapter_config.json"):
        text = file.read_text("utf-8")
        assert str(trained.parents[1]) not in text or "step10" in text
        file.write_text(_naming(text, BASE), "utf-8")
    return place / "run"


def _naming(text: str, base: str | None) -> str:
    return json.dumps({**json.loads(text), "base_model_name_or_path": base})


def losses(folder: Path) -> dict[tuple[str, str], float]:
    rows = audit_of(folder)["measurements"]
    return {(row["subject"], row["scheme"]): row["ce"] for row in rows}


def test_adapters_of_a_run_are_a_series_that_is_merged_as_peft_merges(
    scan: Run, qaudit: Run, place: Path, run: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    done = scan(
        "run",
        BASE,
        "--schemes",
        SCHEME,
        "--soup",
        "both=checkpoint-1+checkpoint-2",
        "--soup",
        "half=step10+checkpoint-2",
    )
    assert done.code == 0
    assert "run holds the weights of checkpoint-2: one row for both" in " ".join(done.err.split())
    assert "QA015" not in done.err
    with warnings.catch_warnings(action="ignore"):
        model = AutoModelForCausalLM.from_pretrained(place / BASE)
        PeftModel.from_pretrained(model, run / "checkpoint-2").merge_and_unload().save_pretrained(
            place / "merged"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / BASE / name, place / "merged" / name)
    assert scan("merged", "--schemes", SCHEME, "--out", "of-merged").code == 0
    ours, merged = losses(place / "out"), losses(place / "of-merged")
    assert {subject for subject, _ in ours} == {
        "step10",
        "checkpoint-1",
        "checkpoint-2",
        "both",
        "half",
    }
    for scheme in ("fp", SCHEME):
        assert ours["checkpoint-2", scheme] == pytest.approx(merged["merged", scheme], rel=1e-6)
        assert ours["checkpoint-2", scheme] != ours["step10", scheme]

    chosen = ("--subject", "checkpoint-2", "--scheme", SCHEME)
    assert qaudit("export", "out", *chosen, "--out", "w4").code == 0
    verified = qaudit("verify", "w4", "--audit", "out")
    assert (verified.code, "This is what was audited" in verified.out + verified.err) == (0, True)
    assert (
        qaudit("soup", "run", "--soup", "both=checkpoint-1+checkpoint-2", "--out", "soup").code == 0
    )
    assert scan("soup", "--out", "of-soup").code == 0
    assert losses(place / "of-soup")["soup", "fp"] == pytest.approx(ours["both", "fp"], rel=1e-6)


MIXED_SOUP = """
targets: [run, series/step10]
soups:
  - {label: half, merge: mean, of: [step10, checkpoint-2]}
schemes: ["gptq-mix:budget=3.75:group=32"]
"""


def test_a_mixture_of_a_soup_with_an_adapter_is_measured_exported_and_verified(
    qaudit: Run, place: Path, run: Path
) -> None:
    (place / "recipe.yaml").write_text(MIXED_SOUP)
    assert qaudit("scan", "recipe.yaml", *TEXT, "--out", "out").code == 0
    mixture = "gptq-mix:budget=3.75:group=32"
    (row,) = (
        row
        for row in audit_of(place / "out")["measurements"]
        if (row["subject"], row["scheme"]) == ("half", mixture)
    )
    assert len(set("".join(row["mixture"].values()))) > 1
    assert qaudit("export", "out", "--subject", "half", "--scheme", mixture, "--out", "w").code == 0
    assert qaudit("verify", "w", "--audit", "out", "-q").code == 0


def test_an_adapter_is_refused_with_what_is_missing(scan: Run, place: Path, run: Path) -> None:
    configuration = run / "checkpoint-2" / "adapter_config.json"
    text = configuration.read_text("utf-8")
    shutil.rmtree(run / "checkpoint-1")
    for base, sentence, hint in (
        (None, "does not name the model", "base_model_name_or_path"),
        (
            "/gone/base/model",
            "is an adapter of `/gone/base/model`, which",
            "put that model there",
        ),
        ("series/step200", "", ""),
    ):
        configuration.write_text(_naming(text, base), "utf-8")
        done = scan("run/checkpoint-2", "--dry-run")
        if sentence:
            refused(done, 4, sentence, hint)
        else:
            assert done.code == 0
    (run / "checkpoint-2" / "adapter_model.safetensors").unlink()
    refused(scan("run/checkpoint-2"), 4, "no weights of an adapter", "adapter_model.safetensors")


def test_the_base_of_an_adapter_may_be_on_the_hub(
    scan: Run, place: Path, run: Path, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scan("run").code == 0
    here = losses(place / "out")
    shutil.copytree(place / "series", online / "root" / "lab/series")
    settings(online / "root" / "lab/series", branch_per_revision=True)
    for file in run.rglob("adapter_config.json"):
        named = json.loads(_naming(file.read_text("utf-8"), "lab/series"))
        file.write_text(json.dumps({**named, "revision": "step10"}), "utf-8")
    with Hub(online / "root").running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert scan("run", "--dry-run", "--out", "remote").code == 0
        assert scan("run", "--out", "remote").code == 0
    assert losses(place / "remote") == here


@pytest.mark.parametrize("where", ["lab/adapter", "lab/adapters@main//checkpoint-2"])
def test_an_adapter_on_the_hub_is_read_with_its_base(
    where: str,
    scan: Run,
    qaudit: Run,
    place: Path,
    run: Path,
    online: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert scan("run/checkpoint-2", "--schemes", SCHEME).code == 0
    here = losses(place / "out")
    shutil.copytree(place / BASE, online / "root/lab/base/main")
    folder = online / "root" / where.replace("@", "/").replace("//", "/")
    folder = folder if "@" in where else folder / "main"
    shutil.copytree(run / "checkpoint-2", folder)
    configuration = folder / "adapter_config.json"
    configuration.write_text(_naming(configuration.read_text("utf-8"), "lab/base"), "utf-8")
    with Hub(online / "root").running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        remote = ("--schemes", SCHEME, "--out", "remote")
        assert scan(where, *remote, "--dry-run").code == 0
        assert scan(where, *remote).code == 0
        (label,) = {subject for subject, _ in losses(place / "remote")}
        export = ("export", "remote", "--subject", label, "--scheme", SCHEME, "--out", "w4")
        assert qaudit(*export).code == 0
        verified = qaudit("verify", "w4", "--audit", "remote")
    assert "This is what was audited." in verified.out
    assert {s: ce for (_, s), ce in losses(place / "remote").items()} == {
        scheme: loss for (_, scheme), loss in here.items()
    }


def test_a_scale_that_changes_after_the_plan_is_noticed(scan: Run, place: Path, run: Path) -> None:
    assert scan("run", "--checkpoints", "checkpoint-1").code == 0
    before = losses(place / "out")
    configuration = run / "checkpoint-1" / "adapter_config.json"
    text = configuration.read_text("utf-8")
    assert '"lora_alpha": 8' in text
    configuration.write_text(text.replace('"lora_alpha": 8', '"lora_alpha": 64'), "utf-8")
    assert scan("run", "--checkpoints", "checkpoint-1", "--out", "again").code == 0
    assert losses(place / "again")["checkpoint-1", "fp"] != before["checkpoint-1", "fp"]


def test_a_distributed_checkpoint_is_measured_as_its_safetensors_are(
    scan: Run, qaudit: Run, place: Path
) -> None:
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM

    for number, step in enumerate((10, 200), 1):
        model = AutoModelForCausalLM.from_pretrained(place / f"series/step{step}")
        with warnings.catch_warnings(action="ignore"):  # that one process saves
            dcp.save(
                {"model": model.state_dict()},
                checkpoint_id=place / "fsdp" / f"checkpoint-{number}" / FSDP_FOLDER,
                no_dist=True,
            )
        (place / "fsdp" / f"checkpoint-{number}" / "optimizer_0").mkdir()
    refused(scan("fsdp"), 4, "config.json` cannot be read", "once into the folder that holds all")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / BASE / name, place / "fsdp" / name)
    assert scan("fsdp", "--schemes", SCHEME).code == 0
    assert (
        scan(
            "series",
            "--schemes",
            SCHEME,
            "--checkpoints",
            "step10",
            "--checkpoints",
            "step200",
            "--out",
            "plain",
        ).code
        == 0
    )
    ours, plain = losses(place / "out"), losses(place / "plain")
    for number, step in enumerate((10, 200), 1):
        for scheme in ("fp", SCHEME):
            assert ours[f"checkpoint-{number}", scheme] == plain[f"step{step}", scheme]
    assert (
        qaudit("export", "out", "--subject", "checkpoint-1", "--scheme", SCHEME, "--out", "w4").code
        == 0
    )
    assert qaudit("verify", "w4", "--audit", "out").code == 0
