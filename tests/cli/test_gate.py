"""`qaudit gate` over saved folders: what it prints, and which code it ends with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import numpy as np
import pytest

from qaudit.cli.gate import outputs_of
from qaudit.errors import UsageError
from qaudit.report.gate import FORMATS
from qaudit.saved.results import sha256_of
from qaudit.version import __version__
from tests.support.cli import Run, audit_of, refused
from tests.support.saved_audits import save

POLICY = """\
name: ours
minimum_documents: 20
rules:
  - name: four-bit
    metric: relative_error
    margin: {margin}
    schemes: gptq-4bit
    subjects: soup
"""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an audit of 40 documents. Read it; whoever breaks it uses `audit`."""
    folder = tmp_path_factory.mktemp("shelf") / "new"
    folder.mkdir()
    save(folder, documents=40)
    edit(folder, lambda audit: audit.update(qaudit=__version__))
    return folder


@pytest.fixture
def audit(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(shelf, tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    return Path("new")


@pytest.fixture
def gate(qaudit: Run, audit: Path) -> Callable[..., Any]:
    """Return a function that gates the audit with a margin."""

    def run(*arguments: object, margin: str = "2%") -> Any:
        Path("ours.yaml").write_text(POLICY.format(margin=margin), encoding="utf-8")
        return qaudit("gate", audit, "--policy", "ours.yaml", *arguments)

    return run


def edit(audit: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = audit / "audit.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


# ----------------------------------------------------------------------- answers


@pytest.mark.parametrize("form", FORMATS)
def test_no_format_changes_the_exit_code(gate: Callable[..., Any], form: str) -> None:
    for margin, code, verdict in (("2%", 0, "SHIP"), ("0.01%", 1, "HOLD"), ("0.75%", 3, "UNDEC")):
        done = gate("--format", form, margin=margin)
        assert (done.code, done.err) == (code, "")
        assert done.out.strip() and (form != "terminal" or done.out.startswith(verdict))


def test_formats_go_to_files_and_the_terminal_s_stays_on_stdout(gate: Callable[..., Any]) -> None:
    done = gate("--format", "junit=out/gate.xml", "--format", "json=gate.json", margin="0.01%")
    assert done.out.startswith("HOLD")
    assert done.err == "wrote out/gate.xml\nwrote gate.json\n"
    assert Xml.parse("out/gate.xml").getroot().find(".//failure") is not None
    assert json.loads(Path("gate.json").read_text(encoding="utf-8"))["exit_code"] == 1
    assert gate("-q", "--format", "json=gate.json").err == ""


def test_on_github_the_step_summary_is_written_beside_the_annotations(
    gate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("summary.md").write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    done = gate("--format", "github", margin="0.01%")
    assert "::error " in done.out
    assert Path("summary.md").read_text(encoding="utf-8").startswith("before\n## qaudit gate")


def test_options_stand_in_the_environment(
    audit: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QAUDIT_POLICY", "explore")
    monkeypatch.setenv("QAUDIT_FORMAT", "json")
    assert json.loads(qaudit("gate", audit).out)["policy"]["name"] == "explore"


# ----------------------------------------------------------------------- baselines


def test_a_breach_that_the_baseline_has_is_told_from_a_new_one(
    gate: Callable[..., Any], audit: Path, qaudit: Run
) -> None:
    shutil.copytree(audit, "old")
    done = gate("--baseline", "old", "--format", "json", margin="0.01%")
    (check,) = json.loads(done.out)["checks"]
    assert (done.code, check["known"]) == (1, True)
    Path("milder.yaml").write_text(POLICY.format(margin="0.01%") + "known: warn\n", "utf-8")
    assert qaudit("gate", audit, "--policy", "milder.yaml", "--baseline", "old").code == 0
    assert qaudit("gate", audit, "--policy", "milder.yaml").code == 1


def test_a_baseline_measured_otherwise_is_refused(gate: Callable[..., Any], audit: Path) -> None:
    Path("old").mkdir()
    save(Path("old"), documents=30)
    refused(gate("--baseline", "old"), 2, "on 40 documents and `old` on 30", "measure both")


def test_a_rule_without_its_baseline_is_incomplete(audit: Path, qaudit: Run) -> None:
    done = qaudit("gate", audit, "--policy", "strict", "--format", "json")
    assert done.code == 3
    assert json.loads(done.out)["verdict"] == "incomplete"


# ----------------------------------------------------------------------- saved audits gone wrong


def truncated(audit: Path) -> None:
    text = (audit / "audit.json").read_text(encoding="utf-8")
    (audit / "audit.json").write_text(text[: len(text) // 2], encoding="utf-8")


def foreign(audit: Path) -> None:
    (audit / "audit.json").write_text('{"results": {"wikitext": 1.0}}', encoding="utf-8")


def future(audit: Path) -> None:
    edit(audit, lambda a: a.update(schema="99", qaudit="42.0"))


def absent(audit: Path) -> None:
    (audit / "audit.json").unlink()


def row(document: dict[str, Any], scheme: str = "gptq-4bit") -> dict[str, Any]:
    (found,) = (
        m for m in document["measurements"] if (m["subject"], m["scheme"]) == ("soup", scheme)
    )
    return found


def smaller_error(audit: Path) -> None:
    edit(audit, lambda a: row(a).update(relative_error=0.0001))


def narrower_interval(audit: Path) -> None:
    edit(audit, lambda a: row(a).update(relative_error_high=row(a)["relative_error"]))


def no_error_at_all(audit: Path) -> None:
    none = dict.fromkeys(("relative_error", "relative_error_low", "relative_error_high"))
    edit(audit, lambda a: row(a).update(none))


def more_documents(audit: Path) -> None:
    edit(audit, lambda a: row(a).update(documents=4000))


def fewer_bits(audit: Path) -> None:
    edit(audit, lambda a: row(a).update(bits_per_weight=2.0))


def another_pick(audit: Path) -> None:
    edit(audit, lambda a: a["pick"].update(subject=a["subjects"][0]["label"]))


def unmeasured_pick(audit: Path) -> None:
    edit(audit, lambda a: a["pick"].update(scheme="rtn-2bit"))


def nan_for_a_number(audit: Path) -> None:
    edit(audit, lambda a: row(a).update(relative_error_high=float("nan")))


def twice_the_scores(audit: Path) -> None:
    """Hide the real scores from readers that take the last of two keys."""
    text = (audit / "audit.json").read_text(encoding="utf-8").rstrip()
    (audit / "audit.json").write_text(f'{text[:-1]}, "measurements": []}}', encoding="utf-8")


def better_evidence(audit: Path) -> None:
    """Let 3 bits stand on the evidence of 4: bytes and hashes fit each other."""
    three = {"scheme": "gptq-3bit", "spec": "gptq:bits=3:group=128:sym=true"}
    edit(audit, lambda a: (row(a).update(three), a["pick"].update(scheme="gptq-3bit")))


@pytest.mark.parametrize(
    ("damage", "said", "hint"),
    [
        (truncated, "the audit is not whole JSON", "scan again"),
        (foreign, "this is not an audit of qaudit", "audit.json"),
        (future, "the audit has schema version 99", "install qaudit 42.0 or later"),
        (absent, "there is no audit at", "qaudit scan"),
        (smaller_error, "`relative_error` of `soup` under gptq-4bit", "edited"),
        (narrower_interval, "`relative_error` of `soup` under gptq-4bit", "edited"),
        (no_error_at_all, "`relative_error` of `soup` under gptq-4bit", "edited"),
        (more_documents, "`documents` of `soup`", "edited"),
        (fewer_bits, "of `bits_per_weight` 4.25, and the audit has 2.0", "edited"),
        (another_pick, "the audit picks `stage2-", "edited"),
        (unmeasured_pick, "which it did not measure", "edited"),
        (nan_for_a_number, "`NaN` is no number of JSON", "scan again"),
        (twice_the_scores, "`measurements` is twice", "scan again"),
        (better_evidence, "is of `spec` gptq:bits=4", "edited"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_audit_that_is_not_what_it_says_is_refused_and_never_a_finding(
    gate: Callable[..., Any], audit: Path, damage: Callable[[Path], None], said: str, hint: str
) -> None:
    damage(audit)
    done = gate()
    refused(done, 2, said, hint.replace("scan again", "same scan again"))
    assert done.out == ""


def evidence_of(audit: Path, scheme: str = "gptq-4bit") -> Path:
    return audit / row(json.loads((audit / "audit.json").read_text(encoding="utf-8")))["evidence"]


def missing(audit: Path) -> None:
    evidence_of(audit).unlink()


def flipped(audit: Path) -> None:
    path = evidence_of(audit)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def outside(audit: Path) -> None:
    shutil.move(evidence_of(audit), "elsewhere.npz")
    edit(audit, lambda a: row(a).update(evidence="../elsewhere.npz"))


def absolute(audit: Path) -> None:
    edit(audit, lambda a: row(a).update(evidence=str(evidence_of(audit).resolve().parent / "x")))


def no_archive(audit: Path) -> None:
    evidence_of(audit).write_bytes(b"PK\x03\x04 and nothing more")
    digest = sha256_of(evidence_of(audit))
    edit(audit, lambda a: row(a).update(evidence_sha256=digest))


def columns_cut(audit: Path) -> None:
    path = evidence_of(audit)
    with np.load(path) as arrays:
        cut = {name: arrays[name] for name in arrays.files}
    cut["nll_sum"] = cut["nll_sum"][:-1]
    np.savez(path, **cut)
    digest = sha256_of(path)
    edit(audit, lambda a: row(a).update(evidence_sha256=digest))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (missing, "cannot be read"),
        (flipped, "is not the evidence that the audit was made from"),
        (outside, "is outside the audit"),
        (absolute, "cannot be read"),
        (no_archive, "cannot be read"),
        (columns_cut, "`nll_sum` is no column of such values"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_evidence_that_is_missing_or_another_is_a_failure_of_the_environment(
    gate: Callable[..., Any], audit: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(audit)
    done = gate("--format", "junit=gate.xml")
    refused(done, 4, said, "")
    assert done.out == ""
    root = Xml.parse("gate.xml").getroot()
    assert root.find(".//error") is not None
    assert root.find(".//failure") is None


def test_an_audit_of_another_version_may_have_other_intervals(
    gate: Callable[..., Any], audit: Path
) -> None:
    narrower_interval(audit)
    edit(audit, lambda a: a.update(qaudit="0.0.1"))
    assert gate().code == 0
    smaller_error(audit)
    assert gate().code == 2


def test_a_wrong_policy_is_refused_before_anything_is_read(audit: Path, qaudit: Run) -> None:
    Path("ours.yaml").write_text("rules:\n  - {name: a, metrik: relative_error}\n", "utf-8")
    done = qaudit("gate", "nothing", "--policy", "ours.yaml", "--format", "json")
    refused(done, 2, "`ours.yaml`, line 2: there is no key `rules[0].metrik`", "`metric`")
    assert json.loads(done.out)["verdict"] == "error"


def test_a_file_that_cannot_be_written_is_no_finding(gate: Callable[..., Any]) -> None:
    Path("there").write_text("", encoding="utf-8")
    refused(gate("--format", "json=there/gate.json"), 4, "cannot be written", "")


# ----------------------------------------------------------------------- where formats go


def test_formats_say_where_they_go() -> None:
    assert outputs_of(()) == (("terminal", None),)
    assert outputs_of(("md",)) == (("md", None),)
    assert outputs_of(("md=a=b.md",)) == (("terminal", None), ("md", Path("a=b.md")))


@pytest.mark.parametrize(
    ("forms", "said"),
    [
        (("junitt",), "there is no format `junitt`"),
        (("md=",), "names no file"),
        (("md=/",), "names no file"),
        (("md", "json"), "`md` and `json` would both be printed"),
    ],
)
def test_formats_that_go_nowhere_are_refused(forms: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as error:
        outputs_of(forms)
    assert said in error.value.message


# ----------------------------------------------------------------------- scans


def test_a_scan_carries_the_checks_of_its_policy(place: Path, qaudit: Run) -> None:
    rule = "{name: any, metric: relative_error, margin: 0%, schemes: rtn-4bit, subjects: '@all'}"
    (place / "ours.yaml").write_text(f"minimum_documents: 10\nrules: [{rule}]\n", "utf-8")
    text = ("--calibration", "calibration.jsonl", "--evaluation", "evaluation.jsonl")
    series = ("series", *text, "--schemes", "rtn-4bit", "--set", "last=1", "--out", "out", "-q")
    done = qaudit("scan", *series, "--policy", "ours.yml")
    refused(done, 2, "there is no policy `ours.yml`", "")
    assert not (place / "out").exists()
    done = qaudit("scan", *series, "--policy", "ours.yaml")
    assert done.code == 0, done.err
    document = audit_of(place / "out")
    found = [f for f in document["findings"] if f["rule"] == "QA001"]  # type: ignore[attr-defined]
    assert [(f["subject"], f["margin"]) for f in found] == [("step1000", 0.0)]
    assert document["plan"]["recipe"]["policy"] == "ours.yaml"  # type: ignore[index]


def test_the_gate_runs_where_there_is_no_torch(shelf: Path) -> None:
    code = "import sys; sys.modules['torch'] = None\nfrom qaudit.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, "gate", str(shelf), "--policy", "explore"],
        env={k: v for k, v in os.environ.items() if not k.startswith("QAUDIT_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_quiet_gate_prints_the_headline_and_ends_as_pick_does(audit: Path, qaudit: Run) -> None:
    text = qaudit("gate", audit).out
    assert "Policy: release." in text and "0.05 nats" in text
    assert "QA0" not in text and "qaudit pick" not in text
    done = qaudit("gate", audit / "audit.json", "-q")
    assert done.out == "SHIP by the policy release: ship soup at gptq-4bit.\n"
    assert done.code == qaudit("pick", audit, "-q").code == 0
