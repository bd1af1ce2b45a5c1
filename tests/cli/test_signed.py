"""Signed audits and exports: edits that renew every hash are found by a signature."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qaudit.saved.results import SEAL, seal_of, sha256_of
from tests.support.cli import QUICK, TEXT, Run, audit_of, refused, run_in

KEY = "0123456789abcdef" * 2
NAMED = ("--subject", "step10", "--scheme", "rtn-4bit:group=32")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAUDIT_SIGNING_KEY", KEY)


@pytest.fixture(scope="module")
def scanned(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signed") / "place"
    shutil.copytree(shipped, folder)
    options = ("--schemes", "rtn-4bit:group=32", "--set", "sign=true", "-q")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QAUDIT_SIGNING_KEY", KEY)
        assert run_in(folder, "scan", *QUICK, "series/step10", *options) == 0
    return folder / "out"


@pytest.fixture
def signed(scanned: Path, place: Path, key: None) -> Path:
    return shutil.copytree(scanned, place / "out")


def forged(folder: Path) -> None:
    """Lower a loss, and renew the seal of its file and its hash in the audit."""
    path = folder / audit_of(folder)["measurements"][1]["evidence"]
    with np.load(path) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    about = json.loads(str(columns.pop("about")))
    del about[SEAL]
    columns["nll_sum"] = columns["nll_sum"] * (1 - 1e-12)  # no number in the audit shows it
    sealed = {**about, SEAL: seal_of(about, columns)}
    np.savez_compressed(path, **columns, about=np.array(json.dumps(sealed)))
    digest = sha256_of(path)
    edited(folder, lambda audit: audit["measurements"][1].update(evidence_sha256=digest))


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    audit = audit_of(folder)
    change(audit)
    (folder / "audit.json").write_text(json.dumps(audit))


def with_another_name(folder: Path) -> None:
    edited(folder, lambda audit: audit["environment"].update(processor="another"))


def test_a_signed_audit_is_gated_in_any_folder_and_holds_no_key(
    place: Path, signed: Path, qaudit: Run
) -> None:
    shutil.copytree(signed, place / "copy")
    plain, done = qaudit("gate", "out"), qaudit("gate", "copy", "--signed")
    assert (done.code, done.err) == (plain.code, "")
    assert not [
        path for path in place.rglob("*") if path.is_file() and KEY in path.read_text("latin1")
    ]


@pytest.mark.parametrize("change", [forged, with_another_name])
def test_an_edit_that_renews_every_hash_is_refused(
    signed: Path, qaudit: Run, change: Callable[[Path], None]
) -> None:
    change(signed)
    assert "error: " not in qaudit("gate", signed).err  # the promise of hashes ends here
    export = ("export", signed, *NAMED, "--out", "new", "-q")
    for command in (("gate", signed, "--signed"), export):
        done = qaudit(*command)
        refused(done, 2, "is not of this key and these files", "edited after it was signed")
    assert not Path("new").exists()


def test_another_key_and_no_signature_are_refused(
    signed: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QAUDIT_SIGNING_KEY", KEY[::-1])
    refused(qaudit("gate", signed, "--signed"), 2, "is not of this key", "another key")
    edited(signed, lambda audit: audit.pop("signature"))
    refused(qaudit("gate", signed, "--signed"), 2, "is not signed", "`--set sign=true`")


@pytest.mark.parametrize(
    "options", [["--set", "sign=true"], ["--set", "sign=true", "--dry-run"]], ids=" ".join
)
@pytest.mark.parametrize(("value", "state"), [("", "is not set"), ("short", "has 5 characters")])
def test_a_key_that_cannot_sign_is_refused_before_anything_is_planned(
    place: Path,
    scan: Run,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    state: str,
    options: list[str],
) -> None:
    monkeypatch.setenv("QAUDIT_SIGNING_KEY", value)
    done = scan("series/step10", *options)
    refused(done, 2, state, "openssl rand -hex 32")
    assert "short" not in done.out + done.err.replace("shortest", "")
    assert not (place / "out").exists()


def test_a_signed_export_is_what_was_audited_without_the_audit(
    signed: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verified(key: str | None) -> tuple[str, int]:
        if key is None:
            monkeypatch.delenv("QAUDIT_SIGNING_KEY")
        else:
            monkeypatch.setenv("QAUDIT_SIGNING_KEY", key)
        done = qaudit("verify", "new")
        return " ".join((done.out + done.err).split()), done.code

    assert qaudit("export", signed, *NAMED, "--out", "new", "-q").code == 0
    shutil.rmtree(signed)
    for key, code, sentence in (
        (KEY, 0, "The weights are those that were audited; the model was not run."),
        (KEY, 0, "add `--audit`"),
        (None, 3, "`QAUDIT_SIGNING_KEY`"),
        (KEY[::-1], 1, "is not of this record and the key"),
        ("short", 2, "has 5 characters"),
    ):
        text, end = verified(key)
        assert (sentence in text, end) == (True, code), text
    # A record that was edited with its files is found by its signature.
    template, path = Path("new/chat_template.jinja"), Path("new/qaudit-export.json")
    template.write_text("obey")
    record = json.loads(path.read_text())
    record["files"][template.name] = sha256_of(template)
    path.write_text(json.dumps(record))
    text, end = verified(KEY)
    assert "the signature of `qaudit-export.json` is not of this record" in text
    assert ("This is not what was exported." in text, end) == (True, 1)
    assert verified(None)[1] == 3  # the promise of hashes ends here


def test_what_parts_measured_is_signed_when_it_is_collected(
    place: Path, qaudit: Run, key: None
) -> None:
    assert qaudit("plan", "series/step10", *TEXT, "--schemes", "rtn-4bit", "--out", "out").code == 0
    assert qaudit("part", "out", "--part", "0/1").code == 0
    assert qaudit("collect", "out", "--set", "sign=true").code == 0
    assert "error: " not in qaudit("gate", "out", "--signed").err
