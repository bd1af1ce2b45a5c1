"""Audits under schemes that are not installed here: their rows say what a verdict needs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import qaudit
from qaudit.errors import AuditError
from qaudit.judge import judge
from qaudit.judge.table import Measurements
from qaudit.saved.audits import to_json
from qaudit.saved.evidence import read_saved
from qaudit.saved.results import ResultStore, sha256_of
from tests.support.saved_audits import identity_of, save


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an audit as another installation writes it, under a scheme of its own."""
    out = tmp_path_factory.mktemp("unknown")
    save(out / "known")
    saved = read_saved(out / "known")
    contents = {subject.label: subject.content for subject in saved.audit.subjects}
    files, measurements = {}, []
    for m in saved.measurements:
        if m.scheme == "gptq-4bit":
            m = replace(m, scheme="newq", spec="newq:turns=3", bit_class="w4a4", calibrates=True)
        identity = identity_of(contents[m.subject], m.spec, "0")
        path = ResultStore(out / "evidence").write(m, identity.key, identity).path
        files[m.subject, m.spec, 0] = (f"evidence/{path.name}", sha256_of(path))
        measurements.append(m)
    judgement = judge(Measurements.of(saved.audit.subjects, measurements, 0.95), files)
    plan = replace(saved.audit.plan, specs=("newq:turns=3",))
    written = replace(saved.audit, plan=plan, **judgement.fields)
    (out / "audit.json").write_text(to_json(written), encoding="utf-8")
    return out


def test_an_audit_is_judged_alike_where_its_scheme_is_not_installed(
    audit: Path, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    rule = "{name: new, metric: relative_error, subjects: '@ships', bits: w4a4, margin: 9%}"
    policy.write_text(f"rules: [{rule}]\n")
    gate = qaudit.gate(audit, policy=str(policy))
    assert gate.exit_code == 0
    assert [(c.bit_class, c.scheme) for c in gate.classes] == [("w4a4", "newq")]


@pytest.mark.parametrize(("column", "value"), [("bit_class", "4"), ("calibrates", False)])
def test_a_class_that_was_edited_is_refused(
    audit: Path, tmp_path: Path, column: str, value: object
) -> None:
    out = shutil.copytree(audit, tmp_path / "out")
    document = json.loads((out / "audit.json").read_text(encoding="utf-8"))
    row = next(m for m in document["measurements"] if m["scheme"] == "newq")
    row[column] = value
    (out / "audit.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(AuditError, match=f"`{column}` of .* disagrees with its evidence"):
        qaudit.gate(out, policy="release")
