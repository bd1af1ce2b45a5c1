"""`qaudit explain`: rules, findings, metrics, schemes and notes by their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qaudit.saved.audits import to_json
from tests.support import sample
from tests.support.cli import Run, refused

OWN = "rules: [{name: ours, metric: kl, subjects: '@ships', margin: 0.1 nats}]"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("four-bit-tail", ("a rule about kl_p999", "1 nat in release (warn)", "(QA038)")),
        ("qa029", ("QA029: one document carries much of the added loss",)),
        ("kl", ("kl (QA037)", "What to do: ship another subject or scheme")),
        ("gptq-4bit", ("gptq:bits=4", "Round columns in turn")),
        ("ours --policy OWN", ("a rule about kl, with a margin of 0.1 nats in ours",)),
    ],
)
def test_a_name_is_explained(
    qaudit: Run, names: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "ours.yaml").write_text(OWN)
    done = qaudit("explain", *names.replace("OWN", str(tmp_path / "ours.yaml")).split())
    assert done.code == 0
    assert all(text in " ".join(done.out.split()) for text in words)
    assert max(map(len, done.out.splitlines())) <= 80 or ":" in done.out


def test_an_audit_explains_its_notes_and_the_rules_of_its_policy(
    qaudit: Run, tmp_path: Path
) -> None:
    audit = sample.audit()
    recipe = replace(audit.plan.recipe, policy="ours.yaml")
    rows = (replace(audit.measurements[0], notes=("2 linears are left",)), *audit.measurements[1:])
    plan = replace(audit.plan, recipe=recipe)
    (tmp_path / "ours.yaml").write_text(OWN)
    (tmp_path / "audit.json").write_text(to_json(replace(audit, plan=plan, measurements=rows)))
    done = qaudit("explain", "ours", "LINEARS are left", "--audit", tmp_path)
    text = " ".join(done.out.split())
    assert "ours is a rule about kl" in text
    assert f"2 linears are left: a note about {rows[0].subject} at {rows[0].scheme}. QA003" in text


def test_what_nothing_is_called_is_refused_with_what_is_near(qaudit: Run) -> None:
    refused(qaudit("explain", "four-bit-tails"), 2, "nothing is called", "four-bit-tail")
    refused(qaudit("explain", "nf4"), 2, "nothing is called", "did you mean `bnb-nf4`?")
    refused(qaudit("explain", "a long note"), 2, "nothing is called", "--audit FOLDER")
