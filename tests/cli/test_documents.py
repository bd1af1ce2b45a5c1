"""What a scan is asked beside losses: roles, groups, a reference, diagnoses."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qaudit.diagnostics.weights_measure as weights_part
from qaudit.diagnostics.case import Measure
from qaudit.diagnostics.diagnostic import diagnostics
from qaudit.errors import ModelError
from qaudit.saved.audits import read_audit
from qaudit.saved.evidence import read_saved
from qaudit.saved.results import read_measurement
from tests.support.cards import section, table, whole_at
from tests.support.cli import OUT, QUICK, audit_of, cells, refused
from tests.support.models import save_model, save_tokenizer, swap_words, text
from tests.support.parts import same_audit

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}{# <think> </think> #}"
)
TEXT = ("--calibration", "fed.jsonl", "--evaluation", "talks.jsonl")
SCHEMES = ("rtn-4bit", "rtn-8bit")
SCAN = ("scan", "series/step10", *TEXT, "--schemes", ",".join(SCHEMES), "--out", "out")


def write_talks(path, seeds):
    talks = []
    for seed in seeds:
        answer = f"<think>{text(seed, 6)}</think>{text(seed + 1, 6)}"
        said = (("user", text(seed + 2, 4)), ("assistant", answer))
        talks.append({"messages": [{"role": role, "content": words} for role, words in said]})
    path.write_text("\n".join(map(json.dumps, talks)))


@pytest.fixture
def talks(place):
    (place / "series" / "step10" / "chat_template.jinja").write_text(TEMPLATE)
    write_talks(place / "talks.jsonl", range(0, 80, 10))
    write_talks(place / "fed.jsonl", range(1000, 1080, 10))
    return place


def test_conversations_are_scored_by_role_once_and_strict_warns(talks, qaudit):
    qaudit(*SCAN, "--policy", "strict", code=0)
    evidence = {path: path.stat().st_mtime_ns for path in OUT.rglob("*.npz")}
    qaudit(*SCAN, "--policy", "strict", code=0)
    assert {path: path.stat().st_mtime_ns for path in OUT.rglob("*.npz")} == evidence
    audit = audit_of()
    rows = audit["diagnostics"]["roles"]
    cells = {(row["scheme"], row["role"]) for row in rows}
    assert cells == {(s, r) for s in ("fp", *SCHEMES) for r in ("reasoning", "answer")}
    (measured,) = (row for row in audit["measurements"] if row["scheme"] == "rtn-4bit")
    of_roles = [row for row in rows if row["scheme"] == "rtn-4bit"]
    assert sum(row["tokens"] for row in of_roles) == measured["tokens"]
    assert all(row["kl"] > 0 for row in of_roles)
    protocol = audit["plan"]["protocol"]
    sources = protocol["sources"]
    assert (protocol["has_chat_template"], sources["chat_template"]) == (True, "that of step10")
    assert len(sources["chat_template_sha256"]) == 64
    assert "by role in the conversation" in whole_at(OUT)
    (decision,) = (one for one in audit["verdict"]["classes"] if one["bit_class"] == "8")
    assert any("neither tasks nor rollouts were measured" in w for w in decision["warnings"])
    gated = qaudit("gate", "out", "--policy", "strict")
    assert "neither tasks nor rollouts were measured" in gated.out
    assert "neither tasks nor rollouts" not in qaudit("gate", "out").out


def test_all_tokens_are_scored_on_request_by_a_template(talks, qaudit):
    qaudit(*SCAN, "--set", "score=all", code=0)
    audit = audit_of()
    roles = {row["role"] for row in audit["diagnostics"]["roles"]}
    assert roles == {"prompt", "reasoning", "answer"}
    assert audit["plan"]["protocol"]["sources"]["scored"] == "all"
    (talks / "series" / "step10" / "chat_template.jinja").unlink()
    done = qaudit(*SCAN, "--out", "new")
    refused(done, 2, "`step10` has no chat template", "`--set chat_template=FILE`")
    assert not (talks / "new" / "evidence").exists()
    (talks / "bomb.jinja").write_text("{{ 'a' * 10**10 }}")
    done = qaudit(*SCAN, "--set", "chat_template=bomb.jinja")
    refused(done, 2, "line 1 of `talks.jsonl` cannot be rendered", "`--set chat_template=FILE`")


def test_another_field_needs_no_new_measurement_and_has_to_group(place, scan):
    lines = [
        {"text": text(200 + k), "source": ("web", "code")[k % 3 > 0], "half": k // 6, "id": k}
        for k in range(12)
    ]
    (place / "evaluation.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    scan("series/step10", code=0)
    seconds = [row["seconds"] for row in audit_of()["measurements"]]
    for field, expected in (
        ("source", ("web", "code", "code") * 4),
        ("half", ("0",) * 6 + ("1",) * 6),
        (None, ()),
    ):
        scan("series/step10", *(["--set", f"strata={field}"] if field else []), code=0)
        audit = audit_of()
        assert [row["seconds"] for row in audit["measurements"]] == seconds
        files = [OUT / row["evidence"] for row in audit["measurements"]]
        assert {read_measurement(file).evidence.strata for file in files} == {expected}
        rows = audit["diagnostics"].get("strata", [])
        assert {row["stratum"] for row in rows} == set(expected)
        assert all((row["kl"] is None) == (row["scheme"] == "fp") for row in rows)
        assert audit["plan"]["protocol"]["sources"].get("strata") == field
    (place / "evaluation.txt").write_text("one two three", encoding="utf-8")
    for options, sentence, hint in (
        ("--set strata=origin", "no value of the field `origin`", "its fields are text"),
        ("--set strata=id", "each of the 12 evaluation documents", "strata=source"),
        ("--set strata=source --set packed=true", "packed windows", "leave out `packed`"),
        ("--set strata=source --evaluation evaluation.txt", "is plain text", "`--evaluation`"),
    ):
        refused(scan("series/step10", "--dry-run", *options.split()), 2, sentence, hint)


# -------------------------------------------------------------------------------------- a reference

PARENT, CHILD = "series/step10", "series/step200"
REFERENCE = (PARENT, CHILD, "--set", f"reference={PARENT}")


def divergence(place, out):
    """Return the KL divergence of the parent's predictions to the child's, by the library."""
    tokenizer = AutoTokenizer.from_pretrained(place / PARENT)
    parent, child = (
        AutoModelForCausalLM.from_pretrained(place / p).eval() for p in (PARENT, CHILD)
    )
    context = audit_of(out)["plan"]["context"]
    total, count = 0.0, 0
    for line in (place / "evaluation.jsonl").read_text().splitlines():
        ids = tokenizer(json.loads(line)["text"], add_special_tokens=True)["input_ids"]
        for first in range(0, len(ids), context):
            tokens_1T = torch.tensor([ids[first : first + context]])
            if tokens_1T.shape[1] < 2:
                continue
            p, q = (m(tokens_1T).logits[0, :-1].double().log_softmax(-1) for m in (parent, child))
            total += float((p.exp() * (p - q)).sum())
            count += len(p)
    return total / count


def test_every_subject_is_compared_with_the_reference(place, scan):
    items = [{"context": f"{k} and", "choices": [" a", " the", " of"], "answer": k % 3}
             for k in range(12)]  # fmt: skip
    (place / "items.jsonl").write_text("\n".join(map(json.dumps, items)))
    with_items = (*REFERENCE, "--set", "choices=items.jsonl")
    scan(*with_items, code=0)
    rows = cells(place / "out")
    with torch.no_grad():
        assert rows["step200", "fp"]["reference_kl"] == pytest.approx(
            divergence(place, place / "out"), rel=1e-4
        )
    assert rows["step200", "fp"]["kl"] is None
    child, parent = rows["step200", "rtn-4bit"], rows["step10", "rtn-4bit"]
    assert 0 < child["kl"] != child["reference_kl"] > 0
    assert parent["reference_kl"] == parent["kl"]  # the reference's own full precision
    card = section(whole_at(place / "out"), "Against the reference")
    assert [row[:2] for row in table(card)[1:]] == [
        ["`step10`", "rtn-4bit"], ["`step200`", "fp"], ["`step200`", "rtn-4bit"]
    ]  # fmt: skip
    read_saved(place / "out").checked()  # as `gate`, `pick` and `diff` do
    tasks = cells(place / "out", "tasks")
    a, b = tasks["step10", "fp"], tasks["step200", "fp"]
    assert (b["drop"], audit_of()["plan"]["protocol"]["choices"]) == (None, 12)
    for (_, scheme), row in tasks.items():
        assert row["accuracy"] * 12 == pytest.approx(round(row["accuracy"] * 12))
        assert (row["accuracy_drop"] is None) == (scheme == "fp")
    assert b["reference_drop"] == pytest.approx(a["accuracy"] - b["accuracy"])
    assert tasks["step10", "rtn-4bit"]["reference_flips"] == tasks["step10", "rtn-4bit"]["flips"]
    scan(*with_items, code=0)
    assert cells(place / "out") == rows  # from disk
    # No other number moves.
    assert scan(PARENT, CHILD, "--out", "alone").code == 0
    new = {"reference_kl", "reference_top1_agreement", "seconds", "evidence", "evidence_sha256"}
    new |= {f"reference_{n}_{e}" for n in ("kl", "top1_agreement") for e in ("low", "high")}
    for cell, row in cells(place / "alone").items():
        other = cells(place / "out")[cell]
        assert {k: v for k, v in row.items() if k not in new} == {
            k: v for k, v in other.items() if k not in new
        }


@pytest.mark.slow
def test_parts_compare_with_the_reference(place, qaudit, scan):
    assert qaudit("plan", *QUICK, *REFERENCE, "--out", "parts").code == 0
    for part in ("0/2", "1/2"):
        assert qaudit("part", "parts", "--part", part).code == 0
    assert qaudit("collect", "parts").code == 0
    assert scan(*REFERENCE).code == 0
    same_audit(place / "out", place / "parts")


def test_a_soup_is_the_reference_that_its_own_file_is(place, qaudit, scan):
    targets = (PARENT, CHILD)
    assert qaudit("soup", *targets, "--soup", "step10+step200", "--out", "merged").code == 0
    soup = ("--soup", "step10+step200", "--set", "reference=mean(step10+step200)", "--out", "soup")
    written = ("merged", "--set", "reference=merged", "--out", "written")
    for more in (soup, written):
        qaudit("scan", *targets, *QUICK, "--set", "evaluation_documents=4", *more, code=0)
    both = [cells(place / name) for name in ("soup", "written")]
    for key in [(name, scheme) for name in ("step10", "step200") for scheme in ("fp", "rtn-4bit")]:
        assert both[0][key]["reference_kl"] == both[1][key]["reference_kl"] > 0
    # A reference of another kind is refused by name.
    done = scan(PARENT, "--set", f"reference={CHILD}")
    refused(done, 2, f"the reference `{CHILD}` is not", "as a target")
    save_tokenizer(save_model(place / "shallow", 3, num_hidden_layers=1))
    scan("shallow", CHILD, "--set", "reference=shallow", code=3)
    (skipped,) = audit_of(place / "out")["skipped"]
    assert skipped["subject"] == "step200"
    assert "the reference `shallow` is a `llama` of 1 blocks" in skipped["reason"]
    swap_words(place / CHILD)
    refused(scan(*REFERENCE, "--out", "new"), 2, "tokenizer", "")


# ---------------------------------------------------------------------------------------- diagnoses

ONE = ("series/step1000", "--set", "diagnostics=weights")
PARTS = "sensitivity:layers=1:scheme=rtn-3bit"


def test_a_scan_diagnoses_what_it_measured_before_and_says_so(scan):
    assert scan("series/step1000").code == 0
    assert "positions" not in audit_of()["diagnostics"]
    done = scan(*ONE, "--set", f"diagnostics={PARTS}", "--set", "diagnostics=positions", code=0)
    asked = "diagnose sensitivity at rtn-3bit: about 17 streams more for each"
    assert asked in " ".join(done.err.split())
    found = audit_of()["diagnostics"]
    assert {row["part"] for row in found["weights"]} == {"model", "role"}
    assert [row["part"] for row in found["sensitivity"]][-1] == "all"
    assert {(row["subject"], row["scheme"]) for row in found["positions"]} == cells().keys()
    card = whole_at(OUT)
    assert "<summary>Why</summary>" in card and f"--set diagnostics=weights,{PARTS}" in card


def test_a_diagnostic_that_cannot_be_had_leaves_the_audit_whole_and_incomplete(scan, monkeypatch):
    fails = Mock(side_effect=ModelError("it is tied in knots"))
    monkeypatch.setattr(weights_part, "MEASURE", Measure(fails))
    assert "step1000 went without weights: it is tied in knots" in scan(*ONE, code=3).err
    assert read_audit(OUT).skipped == ()
    # What ships is not diagnosed again where it is rounded otherwise.
    monkeypatch.setattr("qaudit.planning.price.ARITHMETIC", 1)  # of a long scan it is 10 %
    more = ("--schemes", "gptq-4bit", "--set", f"diagnostics={PARTS}", "--out", "other")
    scan("series/step10", *more, code=0)
    other = audit_of(Path("other"))
    assert other["plan"]["otherwise"] is not None
    assert other["diagnostics"]["sensitivity"][-1]["part"] == "all"


def test_diagnoses_are_in_recipe_environment_and_price(scan, place, qaudit, monkeypatch):
    recipe = "targets: [series/step10]\ndiagnostics: [weights]\nschemes: [rtn-4bit]\n"
    recipe += "calibration: calibration.jsonl\nevaluation: evaluation.jsonl\n"
    (place / "mine.yaml").write_text(recipe, encoding="utf-8")
    done = qaudit("scan", "mine.yaml", "--dry-run", "--json")
    assert json.loads(done.out)["recipe"]["diagnostics"] == ["weights"]
    plain = json.loads(scan("series", "--dry-run", "--json").out)
    monkeypatch.setenv("QAUDIT_DIAGNOSTICS", "weights:group=64,sensitivity")
    asked = json.loads(scan("series", "--dry-run", "--json").out)
    assert asked["recipe"]["diagnostics"] == ["weights:group=64", "sensitivity"]
    assert (asked["streams"], plain["diagnoses"]) == (plain["streams"] + 3 * 18, [])
    # They are listed with what they are.
    lines = dict(line.split(maxsplit=1) for line in qaudit("list", "diagnostics").out.splitlines())
    assert set(lines) == set(diagnostics())
    assert lines["weights"].startswith("Kurtosis, outliers, ranges")
