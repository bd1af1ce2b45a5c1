"""`qaudit gate` and `qaudit pick` over saved folders: what they print, and how they end."""

import io
import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from xml.etree import ElementTree as Xml

import numpy as np
import pytest

from qaudit.cli.gate import outputs_of
from qaudit.core.statistics import BINS
from qaudit.errors import UsageError
from qaudit.report.gate import FORMATS
from qaudit.saved.results import sha256_of
from qaudit.types import Fidelity
from qaudit.version import __version__
from tests.support import sample, saved_audits
from tests.support.cli import QUICK, ROUNDED, audit_of, edited, refused
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
def shelf(tmp_path_factory):
    """Return an audit of 40 documents. Read it; whoever breaks it uses `audit`."""
    folder = tmp_path_factory.mktemp("shelf") / "new"
    folder.mkdir()
    save(folder, documents=40)
    edited(folder / "audit.json", qaudit=__version__)
    return folder


@pytest.fixture
def audit(shelf, tmp_path, monkeypatch):
    shutil.copytree(shelf, tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    return Path("new")


@pytest.fixture
def gate(qaudit, audit):
    """Return a function that gates the audit with a margin."""

    def run(*arguments, margin="2%"):
        Path("ours.yaml").write_text(POLICY.format(margin=margin), encoding="utf-8")
        return qaudit("gate", audit, "--policy", "ours.yaml", *arguments)

    return run


def test_formats_go_to_files_and_never_change_the_exit_code(gate, audit, qaudit, monkeypatch):
    answers = (("2%", 0, "SHIP"), ("0.01%", 1, "HOLD"), ("0.75%", 3, "UNDEC"))
    for form, (margin, code, verdict) in product(FORMATS, answers):
        done = gate("--format", form, margin=margin)
        assert (done.code, done.err) == (code, ""), form
        assert done.out.strip() and (form != "terminal" or done.out.startswith(verdict)), form
    # What is for a terminal stays on stdout.
    done = gate("--format", "junit=out/gate.xml", "--format", "json=gate.json", margin="0.01%")
    assert done.out.startswith("HOLD")
    assert done.err == "wrote out/gate.xml\nwrote gate.json\n"
    assert Xml.parse("out/gate.xml").getroot().find(".//failure") is not None
    assert json.loads(Path("gate.json").read_text(encoding="utf-8"))["exit_code"] == 1
    assert gate("-q", "--format", "json=gate.json").err == ""
    refused(gate("--format", "json=gate.json/gate.json"), 4, "cannot be written", "")
    # On GitHub the summary of the step is written beside the annotations.
    Path("summary.md").write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    assert "::error " in gate("--format", "github", margin="0.01%").out
    assert Path("summary.md").read_text(encoding="utf-8").startswith("before\n## qaudit gate")
    # Options stand in the environment.
    monkeypatch.setenv("QAUDIT_POLICY", "explore")
    monkeypatch.setenv("QAUDIT_FORMAT", "json")
    assert json.loads(qaudit("gate", audit).out)["policy"]["name"] == "explore"


def test_a_breach_that_the_baseline_has_is_told_from_a_new_one(gate, audit, qaudit):
    shutil.copytree(audit, "old")
    done = gate("--baseline", "old", "--format", "json", margin="0.01%")
    (check,) = json.loads(done.out)["checks"]
    assert (done.code, check["known"]) == (1, True)
    Path("milder.yaml").write_text(POLICY.format(margin="0.01%") + "known: warn\n", "utf-8")
    assert qaudit("gate", audit, "--policy", "milder.yaml", "--baseline", "old").code == 0
    assert qaudit("gate", audit, "--policy", "milder.yaml").code == 1
    save(Path("other"), documents=30)
    refused(gate("--baseline", "other"), 2, "on 40 documents and `other` on 30", "measure both")
    done = qaudit("gate", audit, "--policy", "strict", "--format", "json")
    assert (done.code, json.loads(done.out)["verdict"]) == (3, "incomplete")  # it needs a baseline
    # An audit of another version may have other intervals.
    NARROWER(audit)
    edited(audit / "audit.json", qaudit="0.0.1")
    assert gate().code == 0
    SMALLER(audit)
    assert gate().code == 2


def row(document):
    named = {(one["subject"], one["scheme"]): one for one in document["measurements"]}
    return named["soup", "gptq-4bit"]


def with_row(change):
    """Return a damage that changes some keys of the soup's row."""
    return edits(lambda a: row(a).update(change(row(a))))


def edits(change):
    return lambda audit: edited(audit / "audit.json", change)


def rewritten(change):
    def damage(audit):
        text = (audit / "audit.json").read_text(encoding="utf-8")
        (audit / "audit.json").write_text(change(text), encoding="utf-8")

    return damage


NO_ERROR = dict.fromkeys(("relative_error", "relative_error_low", "relative_error_high"))
THREE_BITS = {"scheme": "gptq-3bit", "spec": "gptq:bits=3:group=128:sym=true"}
SMALLER = with_row(lambda _: {"relative_error": 0.0001})
NARROWER = with_row(lambda row: {"relative_error_high": row["relative_error"]})
OF_SOUP = "`relative_error` of `soup` under gptq-4bit"

AUDITS = [
    (rewritten(lambda text: text[: len(text) // 2]), "the audit is not whole JSON", "scan again"),
    (rewritten(lambda _: '{"results": {}}'), "this is not an audit of qaudit", "audit.json"),
    (
        edits(lambda a: a.update(schema="99", qaudit="42.0")),
        "the audit has schema version 99", "install qaudit 42.0 or later",
    ),
    (lambda audit: (audit / "audit.json").unlink(), "there is no audit at", "qaudit scan"),
    (SMALLER, OF_SOUP, "edited"),
    (NARROWER, OF_SOUP, "edited"),
    (with_row(lambda _: NO_ERROR), OF_SOUP, "edited"),
    (with_row(lambda _: {"documents": 4000}), "`documents` of `soup`", "edited"),
    (with_row(lambda _: {"bits_per_weight": 2.0}), "`bits_per_weight` of `soup`", "edited"),
    (
        edits(lambda a: a["pick"].update(subject=a["subjects"][0]["label"])),
        "the audit picks `stage2-", "edited",
    ),
    (edits(lambda a: a["pick"].update(scheme="rtn-2bit")), "which it did not measure", "edited"),
    (
        with_row(lambda _: {"relative_error_high": float("nan")}),
        "`NaN` is no number of JSON", "scan again",
    ),
    (  # readers that take the last of two keys would not see the scores
        rewritten(lambda text: f'{text.rstrip()[:-1]}, "measurements": []}}'),
        "`measurements` is twice", "scan again",
    ),
    (  # 3 bits on the evidence of 4: bytes and hashes fit each other
        edits(lambda a: (row(a).update(THREE_BITS), a["pick"].update(scheme="gptq-3bit"))),
        "it is of `gptq:bits=4", "edited",
    ),
]  # fmt: skip


def evidence_of(audit):
    return audit / row(json.loads((audit / "audit.json").read_text(encoding="utf-8")))["evidence"]


def replaced(content, *, renewed=True):
    """Return a damage of a file of evidence, with its hash in the audit."""

    def damage(audit):
        path = evidence_of(audit)
        path.write_bytes(content(path.read_bytes()))
        if renewed:
            edits(lambda a: row(a).update(evidence_sha256=sha256_of(path)))(audit)

    return damage


def outside(audit):
    shutil.move(evidence_of(audit), "elsewhere.npz")
    with_row(lambda _: {"evidence": "../elsewhere.npz"})(audit)


def columns_cut(raw):
    file, arrays = io.BytesIO(), dict(np.load(io.BytesIO(raw)))
    np.savez(file, **{**arrays, "nll_sum": arrays["nll_sum"][:-1]})
    return file.getvalue()


EVIDENCE = [
    (lambda audit: evidence_of(audit).unlink(), "cannot be read"),
    (
        replaced(lambda raw: raw[:100] + bytes([raw[100] ^ 1]) + raw[101:], renewed=False),
        "is not the evidence that the audit was made from",
    ),
    (outside, "is outside the audit"),
    (with_row(lambda _: {"evidence": str(Path("new/evidence/x").absolute())}), "cannot be read"),
    (replaced(lambda _: b"PK\x03\x04 and nothing more"), "cannot be read"),
    (replaced(columns_cut), "`nll_sum` is no column of such values"),
]


CASES = [(one, 2, said, hint) for one, said, hint in AUDITS]
CASES += [(one, 4, said, "") for one, said in EVIDENCE]


@pytest.mark.parametrize(("damage", "code", "said", "hint"), CASES, ids=range(len(CASES)))
def test_damage_is_refused_and_is_never_a_finding(gate, audit, damage, code, said, hint):
    damage(audit)
    done = gate("--format", "junit=gate.xml")
    refused(done, code, said, hint.replace("scan again", "same scan again"))
    assert done.out == ""
    root = Xml.parse("gate.xml").getroot()
    assert root.find(".//error") is not None
    assert root.find(".//failure") is None


def test_formats_say_where_they_go_and_those_that_go_nowhere_are_refused():
    assert outputs_of(()) == (("terminal", None),)
    assert outputs_of(("md",)) == (("md", None),)
    assert outputs_of(("md=a=b.md",)) == (("terminal", None), ("md", Path("a=b.md")))
    for forms, said in (
        (("junitt",), "there is no format `junitt`"),
        (("md=",), "names no file"),
        (("md=/",), "names no file"),
        (("md", "json"), "`md` and `json` would both be printed"),
    ):
        with pytest.raises(UsageError, match=said):
            outputs_of(forms)


def test_a_scan_carries_the_checks_of_its_policy(place, qaudit):
    rule = "{name: any, metric: relative_error, margin: 0%, schemes: rtn-4bit, subjects: '@all'}"
    (place / "ours.yaml").write_text(f"minimum_documents: 10\nrules: [{rule}]\n", "utf-8")
    series = ("series", *QUICK, "--set", "last=1", "-q")
    refused(qaudit("scan", *series, "--policy", "ours.yml"), 2, "there is no policy `ours.yml`", "")
    assert not (place / "out").exists()
    qaudit("scan", *series, "--policy", "ours.yaml", code=0)
    document = audit_of(place / "out")
    found = [f for f in document["findings"] if f["rule"] == "QA001"]
    assert [(f["subject"], f["margin"]) for f in found] == [("step1000", 0.0)]
    assert document["plan"]["recipe"]["policy"] == "ours.yaml"


def test_a_quiet_gate_prints_the_headline_and_ends_as_pick_does(audit, qaudit):
    text = qaudit("gate", audit).out
    assert "Policy: release." in text and "0.05 nats" in text
    assert "QA0" not in text and "qaudit pick" not in text
    done = qaudit("gate", audit / "audit.json", "-q")
    assert done.out == "SHIP by the policy release: ship soup at gptq-4bit.\n"
    assert done.code == qaudit("pick", audit, "-q").code == 0
    # A wrong policy is refused before anything is read.
    Path("ours.yaml").write_text("rules:\n  - {name: a, metrik: relative_error}\n", "utf-8")
    done = qaudit("gate", "nothing", "--policy", "ours.yaml", "--format", "json")
    refused(done, 2, "`ours.yaml`, line 2: there is no key `rules[0].metrik`", "`metric`")
    assert json.loads(done.out)["verdict"] == "error"


# -------------------------------------------------------------------------------- one thing to ship


def picked(qaudit, *more):
    return json.loads(qaudit("pick", "out", *more, "--json").out)


def test_a_pick_says_what_and_why_and_card_pick_and_gate_have_one_verdict(qaudit, exported):
    done = qaudit("pick", "out", "--objective", "loss@rtn-3bit:group=32")
    assert done.code in (0, 3)
    assert "at rtn-3bit:group=32 has the lowest quantized loss" in " ".join(done.out.split())
    assert "nats per token" in done.out
    assert "yes" in done.out.split()
    front = qaudit("pick", "out", "--objective", "pareto", code=0)
    assert front.out.startswith("On the front: nothing with fewer bits is better.")
    saved = audit_of(Path("out"))["verdict"]
    answer = picked(qaudit)
    assert (saved, answer["pick"]["scheme"]) == (answer["verdict"], ROUNDED)
    assert {one["scheme"] for one in answer["pareto"]} == {"fp", ROUNDED, "rtn-3bit:group=32"}
    gate = qaudit("gate", "out", "--format", "json")
    assert saved["classes"] == json.loads(gate.out)["classes"]
    assert {"ship": 0, "hold": 1, "undecided": 3, "incomplete": 3}[saved["status"]] == gate.code
    # Classes are named by their bits.
    three = picked(qaudit, "--bits", "3")
    assert [one["bit_class"] for one in three["verdict"]["classes"]] == ["3"]
    assert three["pick"]["scheme"] == "rtn-3bit:group=32"
    eight = qaudit("gate", "out", "--bits", "8", "--format", "json", code=3)
    assert json.loads(eight.out)["classes"][0]["subject"] is None


def test_a_target_is_scanned_first(qaudit, place, exported):
    recipe = "targets: series/step10\nschemes: rtn-4bit\ncalibration: calibration.jsonl\n"
    (place / "mine.yaml").write_text(recipe + "evaluation: evaluation.jsonl\n")
    done = qaudit("pick", "mine.yaml", "-q")
    assert done.code in (0, 3)
    assert "at rtn-4bit has the lowest quantized loss" in " ".join(done.out.split())
    assert (place / "qaudit-out" / "mine" / "audit.json").is_file()
    # Two audits of the same text are picked from together.
    for name, subject in zip(("one", "two"), sample.series()[-2:], strict=True):
        save(Path(name), subjects=(subject,))
    done = qaudit("pick", "one", "two", "--policy", "explore", "--json")
    pick = json.loads(done.out)["pick"]
    assert {pick["subject"], pick["runner_up"]} == {"stage2-ingredient3-step1000", "soup"}


def test_small_divergences_are_a_tie(qaudit, exported, monkeypatch):
    found, kl = sample.measurements(64, 0), {"gptq-4bit": 0.02, "bnb-nf4": 0.03}
    monkeypatch.setattr(saved_audits, "SCHEMES", ("fp", *kl))
    for factor, code in ((1.0, 0), (0.01, 3)):
        diverging = [with_kl(m, factor * kl[m.scheme]) if m.scheme in kl else m for m in found]
        monkeypatch.setattr(sample, "measurements", lambda *_, all=tuple(diverging): all)
        save(Path("saved"), documents=64)
        done = qaudit("pick", "saved", "--objective", "kl", "--policy", "explore", "--json")
        (only,) = json.loads(done.out)["verdict"]["classes"]
        assert (done.code, bool(only["contenders"])) == (code, code == 3)


def with_kl(measurement, kl):
    """Return a measurement with about this divergence at every token."""
    evidence = measurement.evidence
    noise_D = 1 + 0.05 * np.sin(np.arange(len(evidence.tokens)))
    kl_D = kl * noise_D * (evidence.tokens > 0)
    counts = np.zeros((len(kl_D), BINS), dtype=np.int64)
    counts[:, 0] = evidence.tokens
    zeros_D = np.zeros(len(kl_D))
    fidelity = Fidelity(kl_D * evidence.tokens, kl_D, counts, evidence.tokens, zeros_D)
    return replace(measurement, evidence=replace(evidence, fidelity=fidelity))
