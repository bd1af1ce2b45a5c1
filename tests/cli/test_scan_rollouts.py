"""A scan that scores rollouts as its user sees it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qaudit.text.rollouts import Rollout, TokenMarker, read_rollouts, roles_of
from qaudit.text.tokenizer import tokenizer_sha256
from tests.support.cards import whole_at
from tests.support.cli import OUT, QUICK, audit_of, refused, run_in
from tests.support.models import text
from tests.support.rollouts import written

ROLLOUTS = ("series/step10", "--set", "rollouts=rolls")
WRITTEN = 16


def greedy(folder, prompts=12):
    """Return what a model writes behind random prompts, and samples that are none of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts_BT = torch.randint(3, 250, (prompts, 6), generator=torch.Generator().manual_seed(1))
    mask_BT, how = torch.ones_like(prompts_BT), {"max_new_tokens": WRITTEN, "do_sample": False}
    rows_BT = model.generate(prompts_BT, attention_mask=mask_BT, pad_token_id=0, **how)
    return [
        Rollout(
            prompt=k, prompt_sha256=f"{k}", ids=tuple(row[:6]), new_ids=tuple(row[6:]), greedy=True
        )
        for k, row in enumerate(rows_BT.tolist())
    ]


@pytest.fixture(scope="module")
def scored(shipped, tmp_path_factory):
    """Return a folder with rollouts and a scan that scored them."""
    root = tmp_path_factory.mktemp("scored") / "place"
    shutil.copytree(shipped, root)
    folder = root / "series" / "step10"
    written(root / "rolls", greedy(folder), tokenizer_sha256=tokenizer_sha256([folder]))
    assert run_in(root, "scan", *QUICK, *ROLLOUTS) == 0
    return root


@pytest.fixture
def rolls(scored, place):
    return shutil.copytree(scored / "rolls", place / "rolls")


@pytest.fixture
def audited(scored, rolls, place):
    return shutil.copytree(scored / "out", place / "out")


@pytest.mark.usefixtures("audited")
def test_rollouts_are_scored_once_beside_documents(place, scan, rolls, audited, qaudit):
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*.npz")}
    assert before and scan(*ROLLOUTS).code == 0
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*.npz")} == before
    audit = audit_of()
    rows = {row["scheme"]: row for row in audit["diagnostics"]["rollouts"]}
    assert (rows.keys(), rows["fp"]["never_diverges"]) == ({"fp", "rtn-4bit"}, 1.0)
    assert rows["rtn-4bit"]["sequence_kl"] == pytest.approx(WRITTEN * rows["rtn-4bit"]["kl"])
    assert "12 rollouts of 12 prompts, 192 tokens" in whole_at(OUT)
    protocol = audit["plan"]["protocol"]
    sources = protocol["sources"]
    assert (protocol["has_chat_template"], sources["rollouts"]) == (False, "rolls")
    assert len(sources["rollouts_sha256"]) == 64
    assert any("whose weights are none of those" in note for note in protocol["notes"])
    # A release with rollouts is gated by one with others.
    (place / "policy.yaml").write_text(
        "rules: [{name: a, metric: loss_against_baseline, margin: 1 nats, subjects: '@last'}]\n"
    )
    folder = place / "series" / "step10"
    written(rolls, greedy(folder)[:6], tokenizer_sha256=tokenizer_sha256([folder]))
    assert scan(*ROLLOUTS, "--out", "later").code == 0
    gate = ("--policy", "policy.yaml", "--baseline", "out")
    gated = qaudit("gate", "later", *gate)
    assert gated.code in (0, 3), gated.err  # few documents


def test_rollouts_are_told_by_role_and_by_place(place, rolls, scan):
    (place / "chat.jinja").write_text("{{ messages[0].content }}", "utf-8")
    tokenizer = AutoTokenizer.from_pretrained(place / "series" / "step10")
    samples = read_rollouts(rolls).samples
    texts = (tokenizer.decode([token]) for sample in samples for token in sample.new_ids[:-1])
    end = next(t for t in texts if t.isalpha() and len(tokenizer.encode(t)) == 1)
    run = scan(*ROLLOUTS, "--set", "chat_template=chat.jinja", "--set", f"reasoning=@ {end}")
    assert run.code == 0, run.err
    tables = audit_of()["diagnostics"]
    places = {row["scheme"]: row for row in tables["rollout_positions"]}
    assert [places[s]["first"] for s in ("fp", "rtn-4bit")] == [0, 0]
    assert places["rtn-4bit"]["kl"] == tables["rollouts"][1]["kl"]
    roles = [row for row in tables["rollout_roles"] if row["scheme"] == "rtn-4bit"]
    ids = (tuple(tokenizer.encode(text)) for text in ("@", end))
    marker = TokenMarker("reasoning", *ids)
    thought = sum(int((roles_of(s.ids, s.new_ids, [marker]) == 1).sum()) for s in samples)
    counts = {"reasoning": thought, "answer": 12 * WRITTEN - thought}
    assert {r["role"]: r["tokens"] for r in roles} == counts


def test_marks_of_written_rollouts_become_expected_scores(place, scan, qaudit, monkeypatch):
    lines = [json.dumps({"prompt": text(seed, 3)}) for seed in range(30, 42)]
    (place / "prompts.jsonl").write_text("\n".join(lines), "utf-8")
    how = ("--prompts", "prompts.jsonl", "--samples", 12, "--max-tokens", 4, "--out", "rolls")
    write = ("rollouts", "series/step10", *how, "--temperature", 0.8, "--set", "top_k=250")
    assert qaudit(*write).code == 0
    samples = [s for s in read_rollouts(place / "rolls").samples if not s.greedy]
    right = [s.new_ids[0] % 2 == 0 for s in samples]

    def mark(correct):
        marks = [
            {"prompt": s.prompt, "sample": s.sample, "correct": one, "reads": 1}
            for s, one in zip(samples, correct, strict=True)
        ]
        (place / "marks.jsonl").write_text("\n".join(map(json.dumps, marks)), "utf-8")
        assert qaudit(*write, "--set", "marks=marks.jsonl").code == 0

    mark([not one for one in right])
    assert scan(*ROLLOUTS).code == 0
    first = audit_of()
    score = first["diagnostics"]["rollouts"][0]["expected_score"]
    assert score == pytest.approx(1 - sum(right) / len(right))
    mark(right)
    with monkeypatch.context() as patch:  # other marks weigh what was measured
        patch.setattr("qaudit.engine.measure.send", None)
        done = scan(*ROLLOUTS)
    assert done.code == 0, done.err
    audit = audit_of()
    rows = {row["scheme"]: row for row in audit["diagnostics"]["rollouts"]}
    assert rows["fp"]["expected_score"] == pytest.approx(sum(right) / len(right))
    assert rows["fp"]["effective_samples"] == pytest.approx(144)
    quantized = rows["rtn-4bit"]
    assert 130 < quantized["effective_samples"] < 144
    assert abs(quantized["expected_change"]) < 0.01
    assert quantized["expected_change_low"] < quantized["expected_change_high"]
    assert "Expected scores" in whole_at(OUT)
    assert scan("series/step200", *ROLLOUTS[1:], "--out", "other").code == 0
    audit = audit_of(place / "other")
    for row in audit["diagnostics"]["rollouts"]:
        assert row["expected_score"] is None
        assert row["unweighed"] == "they are answers of other weights than those of `step200`"


def test_rollouts_that_cannot_be_scored_end_the_plan(place, scan):
    own = tokenizer_sha256([place / "series" / "step10"])
    long = Rollout(prompt=0, prompt_sha256="a", ids=(1,), new_ids=(5,) * 100)
    for tokenizer, sentence, hint in (
        ("", "there is no folder `rolls`", "`qaudit rollouts`"),
        ("another", "tokens of another tokenizer", "`org/model`"),
        (own, "has 101 tokens with its prompt, and the models read 64", "`--max-tokens`"),
    ):
        if tokenizer:
            written(place / "rolls", [long], tokenizer_sha256=tokenizer)
        refused(scan(*ROLLOUTS), 2, sentence, hint)
        assert not (OUT / "audit.json").exists()
