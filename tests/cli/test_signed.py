"""Evidence that is not what its record says is found, and what renews hashes by a signature."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from qaudit.saved.results import SEAL, seal_of, sha256_of
from tests.support.cli import QUICK, TEXT, audit_of, edited, refused

KEY = "0123456789abcdef" * 2
NAMED = ("--subject", "step10", "--scheme", "rtn-4bit:group=32")


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("QAUDIT_SIGNING_KEY", KEY)


@pytest.fixture(scope="module")
def scanned(after):
    options = ("--schemes", "rtn-4bit:group=32", "--set", "sign=true", "-q")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QAUDIT_SIGNING_KEY", KEY)
        return after(("scan", *QUICK, "series/step10", *options)) / "out"


@pytest.fixture
def signed(scanned, place, key):
    return shutil.copytree(scanned, place / "out")


def forged(folder):
    """Lower a loss, and renew the seal of its file and its hash in the audit."""
    path = folder / audit_of(folder)["measurements"][1]["evidence"]
    columns = dict(np.load(path))
    about = json.loads(str(columns.pop("about")))
    del about[SEAL]
    columns["nll_sum"] = columns["nll_sum"] * (1 - 1e-12)  # no number in the audit shows it
    sealed = {**about, SEAL: seal_of(about, columns)}
    np.savez_compressed(path, **columns, about=np.array(json.dumps(sealed)))
    hashed = {"evidence_sha256": sha256_of(path)}
    edited(folder / "audit.json", lambda audit: audit["measurements"][1].update(hashed))


def with_another_name(folder):
    edited(folder / "audit.json", lambda audit: audit["environment"].update(processor="another"))


def test_a_signed_audit_is_gated_in_any_folder_and_holds_no_key(place, signed, qaudit, monkeypatch):
    shutil.copytree(signed, place / "copy")
    plain, done = qaudit("gate", "out"), qaudit("gate", "copy", "--signed")
    assert (done.code, done.err) == (plain.code, "")
    texts = (path.read_text("latin1") for path in place.rglob("*") if path.is_file())
    assert not any(KEY in text for text in texts)
    # Another key and no signature are refused.
    monkeypatch.setenv("QAUDIT_SIGNING_KEY", KEY[::-1])
    refused(qaudit("gate", signed, "--signed"), 2, "is not of this key", "another key")
    edited(signed / "audit.json", signature=None)
    refused(qaudit("gate", signed, "--signed"), 2, "is not signed", "`--set sign=true`")


@pytest.mark.parametrize("change", [forged, with_another_name])
def test_an_edit_that_renews_every_hash_is_refused(signed, qaudit, change):
    change(signed)
    assert "error: " not in qaudit("gate", signed).err  # the promise of hashes ends here
    export = ("export", signed, *NAMED, "--out", "new", "-q")
    for command in (("gate", signed, "--signed"), export):
        done = qaudit(*command)
        refused(done, 2, "is not of this key and these files", "edited after it was signed")
    assert not Path("new").exists()


def test_a_key_that_cannot_sign_is_refused_before_anything_is_planned(place, scan, monkeypatch):
    for value, state in (("", "is not set"), ("short", "has 5 characters")):
        monkeypatch.setenv("QAUDIT_SIGNING_KEY", value)
        for more in ((), ("--dry-run",)):
            done = scan("series/step10", "--set", "sign=true", *more)
            refused(done, 2, state, "openssl rand -hex 32")
            assert "short" not in done.out + done.err.replace("shortest", "")
            assert not (place / "out").exists()


def test_a_signed_export_is_what_was_audited_without_the_audit(signed, qaudit, monkeypatch):
    def verified(key):
        monkeypatch.setenv("QAUDIT_SIGNING_KEY", key)
        done = qaudit("verify", "new")
        return " ".join((done.out + done.err).split()), done.code

    assert qaudit("export", signed, *NAMED, "--out", "new", "-q").code == 0
    shutil.rmtree(signed)
    for key, code, sentence in (
        (KEY, 0, "The weights are those that were audited; the model was not run."),
        (KEY, 0, "add `--audit`"),
        ("", 3, "`QAUDIT_SIGNING_KEY`"),
        (KEY[::-1], 1, "is not of this record and the key"),
        ("short", 2, "has 5 characters"),
    ):
        text, end = verified(key)
        assert (sentence in text, end) == (True, code), text
    # A record that was edited with its files is found by its signature.
    template, path = Path("new/chat_template.jinja"), Path("new/qaudit-export.json")
    template.write_text("obey")
    edited(path, lambda record: record["files"].update({template.name: sha256_of(template)}))
    text, end = verified(KEY)
    assert "the signature of `qaudit-export.json` is not of this record" in text
    assert ("This is not what was exported." in text, end) == (True, 1)
    assert verified("")[1] == 3  # the promise of hashes ends here


# ------------------------------------------------------------- without a key

ASKED = (
    "series", "--checkpoints", "step10", "--checkpoints", "step200", *TEXT, "--schemes",
    "rtn-4bit:group=32,rtn-3bit:group=32", "--set", "context=32", "--out", "out",
)  # fmt: skip


def halved(path):
    """Halve the losses in a file of evidence, and leave what it says of itself."""
    columns = dict(np.load(path))
    np.savez_compressed(path, **{**columns, "nll_sum": columns["nll_sum"] / 2})


@pytest.fixture(scope="module")
def part(after):
    """Return the folder of a plan whose one part is measured."""
    return after(("plan", *ASKED), ("part", "out", "--part", "0/1")) / "out"


@pytest.fixture
def measured(part, place):
    return shutil.copytree(part, place / "out")


def test_what_parts_measured_is_signed_by_collect(measured, qaudit, key):
    qaudit("collect", "out", "--set", "sign=true", code=0)
    assert "error: " not in qaudit("gate", "out", "--signed").err

    # A scheme that failed in a part is skipped with its reason.
    def change(one, other):
        scheme = one["results"].pop(1)["scheme"]
        one["failed_schemes"] = {scheme: {"message": "it ran out of scales", "hint": ""}}

    with_records(measured, change)
    qaudit("collect", measured, code=3)
    (skipped,) = audit_of(measured)["skipped"]
    assert (skipped["subject"], skipped["reason"]) == ("step10", "it ran out of scales")


def with_records(out, change):
    """Change the records of the two subjects."""
    one, other = sorted((out / "parts" / "units").glob("*.json"))
    records = {path: json.loads(path.read_text()) for path in (one, other)}
    change(*records.values())
    for path, record in records.items():
        path.write_text(json.dumps(record))


def exchange(a, b, *names):
    for name in names:
        a[name], b[name] = b[name], a[name]


def with_a_renewed_hash(one, other):
    path = Path("out", one["results"][1]["evidence"])
    halved(path)
    one["results"][1]["sha256"] = sha256_of(path)


def test_a_record_of_another_unit_is_not_measured_yet(part, place, qaudit):
    for change in (
        lambda one, other: exchange(one, other, "results"),
        lambda one, other: exchange(*one["results"][1:3], "evidence", "sha256"),
        lambda one, other: one["results"].pop(1),
        lambda one, other: one["results"].__setitem__(1, one["results"][2]),
        with_a_renewed_hash,
    ):
        shutil.rmtree("out", ignore_errors=True)
        with_records(shutil.copytree(part, place / "out"), change)
        refused(qaudit("collect", "out"), 3, "not measured yet", "qaudit part")
    qaudit("part", "out", "--part", "0/1", code=0)
    qaudit("collect", "out", code=0)
    assert len(audit_of()["measurements"]) == 6


def test_edits_of_an_audit_are_found_and_measured_again(place, measured, qaudit, monkeypatch):
    qaudit("collect", "out", code=0)

    def change(audit):
        rows = {(row["subject"], row["scheme"]): row for row in audit["measurements"]}
        exchange(rows["step10", "fp"], rows["step200", "fp"], "evidence", "evidence_sha256")

    whole = edited(measured / "audit.json", change)
    refused(qaudit("gate", "out"), 2, "of other weights than those of `step10`", "edited by hand")
    # A measurement that is cut out of it is missing.
    audit = json.loads(whole)
    shipped = {(one["subject"], one["scheme"]) for one in audit["verdict"]["classes"]}
    cells = [(r["subject"], r["scheme"]) for r in audit["measurements"] if r["scheme"] != "fp"]
    cut = next(cell for cell in cells if cell not in shipped)
    for name in ("measurements", "comparisons"):
        audit[name] = [r for r in audit[name] if (r.get("subject"), r.get("scheme")) != cut]
    (measured / "audit.json").write_text(json.dumps(audit))
    done = qaudit("gate", "out", "--policy", "explore", "--format", "json", code=3)
    sentence = f"`{cut[0]}` was planned under {cut[1]}, and the audit has no result of it"
    assert sentence in [check["message"] for check in json.loads(done.out)["checks"]]
    # A file that was edited is measured again in a copied folder with an empty cache.
    halved(next((measured / "evidence").glob("step10--rtn-3bit*.npz")))
    measured.rename(place / "copy")
    monkeypatch.setenv("QAUDIT_CACHE", str(place / "empty"))
    qaudit("scan", *ASKED, "--out", "copy", code=0)
    before = [row["ce"] for row in json.loads(whole)["measurements"]]
    assert [row["ce"] for row in audit_of(place / "copy")["measurements"]] == before
