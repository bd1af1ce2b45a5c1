"""Many audits as one site: its rows are those of the audits, and a forged audit is refused."""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from pathlib import Path

import pyarrow.parquet
import pytest

from qaudit import load
from tests.support.cli import Run, refused
from tests.support.saved_audits import save


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audits")
    save(folder / "one")
    save(folder / "two", seed=1)
    return folder


def test_every_row_of_every_audit_is_on_the_site_and_in_the_table(
    saved: Path, tmp_path: Path, qaudit: Run
) -> None:
    site = tmp_path / "site"
    done = qaudit("gallery", saved / "one", saved / "two", "--out", site)
    assert (done.code, done.out) == (0, f"{site / 'index.html'}\n")
    rows = pyarrow.parquet.read_table(site / "gallery.parquet").to_pylist()
    tidy = {name: load(saved / name).tidy() for name in ("one", "two")}
    assert [row["audit"] for row in rows] == [name for name in tidy for _ in tidy[name]]
    for row, expected in zip(rows, [row for name in tidy for row in tidy[name]], strict=True):
        assert row["loss"] == expected["loss"]
        assert row["subject"] == expected["subject"]
    index = (site / "index.html").read_text(encoding="utf-8")
    for name in tidy:
        assert f'href="{name}/report.html"' in index
        assert (site / name / "report.html").is_file()
    assert index.count("<tr") >= len(rows) + len(tidy)


def test_a_forged_number_is_refused_by_the_name_of_its_audit(
    saved: Path, tmp_path: Path, qaudit: Run
) -> None:
    forged = tmp_path / "forged"
    shutil.copytree(saved / "one", forged)
    audit = json.loads((forged / "audit.json").read_text(encoding="utf-8"))
    row = next(row for row in audit["measurements"] if row["relative_error"])
    row["relative_error"] /= 2
    (forged / "audit.json").write_text(json.dumps(audit), encoding="utf-8")
    done = qaudit("gallery", saved / "one", forged, "--out", tmp_path / "site")
    refused(done, 2, "forged", "")
    assert not (tmp_path / "site").exists()


def test_every_verdict_is_that_of_the_gate(saved: Path, tmp_path: Path, qaudit: Run) -> None:
    site = tmp_path / "site"
    assert qaudit("gallery", saved / "one", "--out", site).code == 0
    headline = qaudit("gate", saved / "one", "-q").out.strip()
    index = unescape(re.sub(r"<[^>]+>", "", (site / "index.html").read_text(encoding="utf-8")))
    assert headline in index


def test_two_audits_of_one_name_are_refused(saved: Path, tmp_path: Path, qaudit: Run) -> None:
    shutil.copytree(saved / "one", tmp_path / "x" / "one")
    done = qaudit("gallery", saved / "one", tmp_path / "x" / "one", "--out", tmp_path / "site")
    refused(done, 2, "two audits would have the page `one`", "rename")
