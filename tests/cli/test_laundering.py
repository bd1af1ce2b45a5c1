"""Evidence that is not what its record or audit says is found, wherever the folder is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qaudit.saved.results import sha256_of
from tests.support.cli import TEXT, Run, audit_of, refused, run_in

ASKED = (
    "series", "--checkpoints", "step10", "--checkpoints", "step200", *TEXT, "--schemes",
    "rtn-4bit:group=32,rtn-3bit:group=32", "--set", "context=32", "--out", "out",
)  # fmt: skip


Row = dict[str, Any]
Change = Callable[[Row, Row], object]


def halved(path: Path) -> None:
    """Halve the losses in a file of evidence, and leave what it says of itself."""
    with np.load(path) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    np.savez_compressed(path, **{**columns, "nll_sum": columns["nll_sum"] / 2})


@pytest.fixture(scope="module")
def part(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a plan whose one part is measured."""
    folder = tmp_path_factory.mktemp("part") / "place"
    shutil.copytree(shipped, folder)
    assert run_in(folder, "plan", *ASKED) == 0
    assert run_in(folder, "part", "out", "--part", "0/1") == 0
    return folder / "out"


@pytest.fixture
def audited(part: Path, place: Path) -> Path:
    """Return the folder of the plan with its audit."""
    shutil.copytree(part, place / "out")
    assert run_in(place, "collect", "out") == 0
    return place / "out"


@pytest.fixture
def measured(part: Path, place: Path) -> Path:
    return Path(shutil.copytree(part, place / "out"))


def edited(out: Path, change: Change) -> None:
    """Change the records of the two subjects."""
    paths = sorted((out / "parts" / "units").glob("*.json"))
    records = [json.loads(path.read_text()) for path in paths]
    change(*records)
    for path, record in zip(paths, records, strict=True):
        path.write_text(json.dumps(record))


def exchange(a: Row, b: Row, *names: str) -> None:
    for name in names:
        a[name], b[name] = b[name], a[name]


def with_a_renewed_hash(one: Row, other: Row) -> None:
    path = Path("out", one["results"][1]["evidence"])
    halved(path)
    one["results"][1]["sha256"] = sha256_of(path)


@pytest.mark.parametrize(
    "change",
    [
        with_a_renewed_hash,
        lambda one, other: exchange(one, other, "results"),
        lambda one, other: exchange(*one["results"][1:3], "evidence", "sha256"),
        lambda one, other: one["results"].pop(1),
        lambda one, other: one["results"].__setitem__(1, one["results"][2]),
    ],
    ids=["hash renewed", "another subject", "another scheme", "without one", "twice the same"],
)
def test_a_record_that_is_not_of_its_unit_is_not_measured_yet(
    measured: Path, qaudit: Run, change: Change
) -> None:
    edited(measured, change)
    refused(qaudit("collect", measured), 3, "not measured yet", "qaudit part")
    assert qaudit("part", measured, "--part", "0/1").code == 0
    assert qaudit("collect", measured).code == 0
    assert len(audit_of(measured)["measurements"]) == 6


def test_an_edited_file_is_measured_again_in_a_copied_folder_with_an_empty_cache(
    place: Path, qaudit: Run, audited: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [row["ce"] for row in audit_of(place / "out")["measurements"]]
    halved(next((place / "out" / "evidence").glob("step10--rtn-3bit*.npz")))
    (place / "out").rename(place / "copy")
    monkeypatch.setenv("QAUDIT_CACHE", str(place / "empty"))
    assert qaudit("scan", *ASKED, "--out", "copy").code == 0
    assert [row["ce"] for row in audit_of(place / "copy")["measurements"]] == before


def test_rows_that_name_each_others_evidence_are_refused(audited: Path, qaudit: Run) -> None:
    audit = audit_of(audited)
    a, b = (next(r for r in audit["measurements"] if r["subject"] == s and r["scheme"] == "fp")
            for s in ("step10", "step200"))  # fmt: skip
    exchange(a, b, "evidence", "evidence_sha256")
    (audited / "audit.json").write_text(json.dumps(audit))
    refused(qaudit("gate", "out"), 2, "of other weights than those of `step10`", "edited by hand")


def test_a_scheme_that_failed_in_a_part_is_skipped_with_its_reason(
    place: Path, qaudit: Run, measured: Path
) -> None:
    def change(one: Row, other: Row) -> None:
        scheme = one["results"].pop(1)["scheme"]
        one["failed_schemes"] = {scheme: {"message": "it ran out of scales", "hint": ""}}

    edited(measured, change)
    assert qaudit("collect", measured).code == 3
    (skipped,) = audit_of(measured)["skipped"]
    assert (skipped["subject"], skipped["reason"]) == ("step10", "it ran out of scales")


def test_a_measurement_cut_out_of_an_audit_is_missing(audited: Path, qaudit: Run) -> None:
    audit = audit_of(audited)
    shipped = {(one["subject"], one["scheme"]) for one in audit["verdict"]["classes"]}
    cells = [(r["subject"], r["scheme"]) for r in audit["measurements"] if r["scheme"] != "fp"]
    cut = next(cell for cell in cells if cell not in shipped)
    for name in ("measurements", "comparisons"):
        audit[name] = [r for r in audit[name] if (r.get("subject"), r.get("scheme")) != cut]
    (audited / "audit.json").write_text(json.dumps(audit))
    done = qaudit("gate", "out", "--policy", "explore", "--format", "json")
    assert done.code == 3, done.err
    messages = [check["message"] for check in json.loads(done.out)["checks"]]
    sentence = f"`{cut[0]}` was planned under {cut[1]}, and the audit has no result of it"
    assert sentence in messages
