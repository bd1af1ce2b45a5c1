"""Audits as the first version wrote them are read, judged by the schema, gated and rendered.

`first.json` is of the first version that could write an audit, `demo/` of a scan of the demo with
its evidence (a few subjects of it), and `tables.json` has every table of diagnostics.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qaudit
from qaudit.errors import AuditError
from qaudit.judge import judge
from qaudit.judge.draw_noise import without_draws
from qaudit.report.card import render as render_card
from qaudit.report.figures import write
from qaudit.report.folder import FORMATS, render
from qaudit.saved.audits import from_json, read_audit, to_json
from qaudit.saved.evidence import read_saved
from qaudit.saved.results import ResultStore, sha256_of
from qaudit.types import digest
from tests.support.schemas import violations

AUDITS = Path(__file__).parent / "audits"
FIRST, DEMO, TABLES = AUDITS / "first.json", AUDITS / "demo" / "audit.json", AUDITS / "tables.json"
EVERY = pytest.mark.parametrize("path", [FIRST, DEMO, TABLES], ids=lambda path: path.stem)


def document(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@EVERY
@pytest.mark.parametrize("form", FORMATS)
def test_an_older_audit_is_rendered_in_every_form(path: Path, form: str) -> None:
    text = render(read_audit(path), form)
    first_screen = ("soup",)  # a terminal shows no more
    every = ("stage1-step5000", "stage1-step500", "soup")
    for label in first_screen if form == "terminal" else every:
        assert label in text


@EVERY
def test_an_older_audit_is_still_what_the_schema_describes(path: Path) -> None:
    assert violations(document(path)) == []


@EVERY
def test_an_older_audit_keeps_every_name_and_number(path: Path) -> None:
    def lost(old: Any, new: Any, where: str = "") -> list[str]:
        if isinstance(old, dict):
            absent = [f"{where}.{key}" for key in old if key not in new]
            return absent + [
                p for k in old if k in new for p in lost(old[k], new[k], f"{where}.{k}")
            ]
        if isinstance(old, list):
            pairs = enumerate(zip(old, new, strict=True))
            return [p for k, (a, b) in pairs for p in lost(a, b, f"{where}[{k}]")]
        return [] if old == new else [where]

    again = json.loads(to_json(from_json(path.read_text(encoding="utf-8"))))
    assert lost(document(path), again) == []


def test_every_table_of_diagnostics_is_read() -> None:
    tables = vars(read_audit(TABLES).diagnostics)
    assert {name for name, rows in tables.items() if rows} == set(document(TABLES)["diagnostics"])
    since = {"others", "strata", "positions", "roles", "rollouts", "routing", "shipped"}
    since |= {"rollout_roles", "rollout_positions"}
    assert set(tables) - set(document(TABLES)["diagnostics"]) == since


def test_an_older_audit_is_gated_by_its_evidence() -> None:
    saved = read_saved(DEMO.parent)
    assert len(saved.measurements) == len(saved.audit.measurements) == 18
    gate = qaudit.gate(DEMO.parent, policy="release")
    assert gate.exit_code == 0
    shipped = [(c.bit_class, c.level, c.subject, c.scheme, c.status) for c in gate.classes]
    assert shipped == [
        ("4", "error", "soup", "gptq-4bit", "ship"), ("3", "warn", "soup", "rtn-3bit", "hold"),
    ]  # fmt: skip
    # It has no KL divergence, which only warns.
    missing = {(c.metric, c.level) for c in gate.checks if c.outcome == "missing"}
    assert missing == {("kl", "warn"), ("kl_p999", "warn"), ("sure_top1", "warn")}


@pytest.fixture(scope="module")
def of_an_unknown_scheme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo's audit as another installation writes it, under a scheme of its own."""
    out = tmp_path_factory.mktemp("unknown")
    saved = read_saved(DEMO.parent)
    store = ResultStore(out / "evidence")
    files = {}
    measurements = []
    for m in saved.measurements:
        if m.scheme == "gptq-4bit":
            m = replace(m, scheme="newq", spec="newq:turns=3", bit_class="w4a4", calibrates=True)
        path = store.write(m, digest([m.subject, m.spec])).path
        files[m.subject, m.spec, 0] = (f"evidence/{path.name}", sha256_of(path))
        measurements.append(m)
    judgement = judge(saved.audit.subjects, measurements, files)
    audit = replace(
        saved.audit,
        plan=replace(saved.audit.plan, specs=(saved.audit.plan.specs[0], "newq:turns=3")),
        measurements=judgement.measurements,
        comparisons=judgement.comparisons,
        findings=judgement.findings,
        pick=judgement.pick,
        qaudit=qaudit.__version__,
    )
    (out / "audit.json").write_text(to_json(audit), encoding="utf-8")
    return out


def test_an_audit_is_judged_alike_where_its_scheme_is_not_installed(
    of_an_unknown_scheme: Path, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    rule = "{name: new, metric: relative_error, subjects: '@ships', bits: w4a4, margin: 2%}"
    policy.write_text(f"rules: [{rule}]\n")
    gate = qaudit.gate(of_an_unknown_scheme, policy=str(policy))
    assert gate.exit_code == 0
    assert [(c.bit_class, c.scheme, c.calibrates) for c in gate.classes] == [
        ("w4a4", "newq", True), ("3", "rtn-3bit", False),
    ]  # fmt: skip
    left_out = without_draws(read_audit(of_an_unknown_scheme))
    assert {scheme for _, scheme in left_out} == {"newq"}


@pytest.mark.parametrize(("column", "value"), [("bit_class", "4"), ("calibrates", False)])
def test_a_class_that_was_edited_is_refused(
    of_an_unknown_scheme: Path, tmp_path: Path, column: str, value: object
) -> None:
    out = shutil.copytree(of_an_unknown_scheme, tmp_path / "out")
    audit = document(out / "audit.json")
    row = next(m for m in audit["measurements"] if m["scheme"] == "newq")
    row[column] = value
    (out / "audit.json").write_text(json.dumps(audit), encoding="utf-8")
    with pytest.raises(AuditError, match=f"`{column}` of .* disagrees with its evidence"):
        qaudit.gate(out, policy="release")


def test_an_older_audit_gets_its_verdict_from_its_evidence(tmp_path: Path) -> None:
    verdict = qaudit.load(DEMO.parent).verdict
    assert verdict is not None
    assert verdict.classes == qaudit.gate(DEMO.parent, policy="release").classes
    out = shutil.copytree(DEMO.parent, tmp_path / "out")
    shutil.rmtree(out / "evidence")
    assert qaudit.load(out).verdict is None


def test_the_evidence_of_an_older_audit_has_no_seal_and_is_measured_again(tmp_path: Path) -> None:
    out = shutil.copytree(DEMO.parent, tmp_path / "out")
    row = read_audit(out).measurements[0]
    key = json.loads(str(np.load(out / row.evidence)["about"]))["key"]
    assert ResultStore(out / "evidence").find(row.subject, row.scheme, key) is None


def test_the_card_of_the_first_audit_has_its_numbers() -> None:
    row = next(m for m in document(FIRST)["measurements"] if m["scheme"] == "rtn-3bit")
    assert f"| {100 * row['relative_error']:.1f}<br>" in render_card(read_audit(FIRST))


def test_the_pictures_of_the_first_audit_are_drawn(tmp_path: Path) -> None:
    names = {path.name for path in write(read_audit(FIRST), tmp_path)}
    assert {"trajectory.svg", "quantized.svg", "soups.svg", "pareto.svg"} <= names
