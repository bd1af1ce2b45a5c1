"""The key `reference`: one of the subjects is what all others are compared with."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qaudit.saved.evidence import read_saved
from tests.support.cards import section, table, whole_at
from tests.support.cli import QUICK, audit_of, cells, refused
from tests.support.models import save_model, save_tokenizer, swap_words
from tests.support.parts import same_audit

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
