"""Many audits as one page: its rows are those of the audits, and a forged audit is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from qaudit import gallery, gate, load
from qaudit.judging import decide
from qaudit.saved.audits import to_json
from qaudit.saved.evidence import SavedAudit, read_saved
from qaudit.version import __version__
from tests.support.cli import Run, refused
from tests.support.saved_audits import save


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audits")
    for seed, name in enumerate(("one", "two")):
        record = save(folder / name, seed=seed)
        verdict = decide(read_saved(folder / name), "release")
        judged = replace(record, verdict=verdict, qaudit=__version__)
        (folder / name / "audit.json").write_text(to_json(judged), encoding="utf-8")
    return folder


def test_every_row_of_every_audit_is_on_the_page_and_in_the_table(
    saved: Path, tmp_path: Path, qaudit: Run
) -> None:
    site = tmp_path / "site"
    done = qaudit("gallery", saved / "one", saved / "two", "--out", site)
    assert (done.code, done.out) == (0, f"{site / 'index.html'}\n")
    assert {path.name for path in site.iterdir()} == {"index.html", "gallery.parquet"}
    rows = pyarrow.parquet.read_table(site / "gallery.parquet").to_pylist()
    tidy = {name: load(saved / name).tidy() for name in ("one", "two")}
    assert [row["audit"] for row in rows] == [name for name in tidy for _ in tidy[name]]
    for row, expected in zip(rows, [row for name in tidy for row in tidy[name]], strict=True):
        shared = row.keys() & expected.keys()
        assert {name: row[name] for name in shared} == {name: expected[name] for name in shared}
        assert {"loss", "added_loss_low", "agreement", "verdict"} <= shared
        assert not {"learning_rate", "step"} & row.keys()  # the word of the audit
    index = (site / "index.html").read_text(encoding="utf-8")
    assert index.count("<tr") >= len(rows) + len(tidy)


def forge(folder: Path, original: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy an audit and change what its audit.json says."""
    shutil.copytree(original, folder)
    audit = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    change(audit)
    (folder / "audit.json").write_text(json.dumps(audit), encoding="utf-8")
    return folder


def halve_the_error(audit: dict[str, Any]) -> None:
    next(row for row in audit["measurements"] if row["relative_error"])["relative_error"] /= 2


def ship_it(audit: dict[str, Any]) -> None:
    decision = audit["verdict"]["classes"][0]
    decision["status"] = "hold" if decision["status"] == "ship" else "ship"


def prefer_the_soup(audit: dict[str, Any]) -> None:
    audit["comparisons"][0] |= {"estimate": -1.0, "low": -1.5, "high": -0.5}


@pytest.mark.parametrize("change", [halve_the_error, ship_it, prefer_the_soup])
def test_a_forged_audit_is_refused_by_its_name_and_the_others_go_on(
    saved: Path, tmp_path: Path, qaudit: Run, change: Callable[[dict[str, Any]], None]
) -> None:
    forged = forge(tmp_path / "forged", saved / "one", change)
    done = qaudit("gallery", forged, saved / "two", "--out", tmp_path / "site")
    refused(done, 2, f"left out: `{forged}`", "it was edited after it was written")
    assert done.out == f"{tmp_path / 'site' / 'index.html'}\n"
    rows = pyarrow.parquet.read_table(tmp_path / "site" / "gallery.parquet").to_pylist()
    assert {row["audit"] for row in rows} == {"two"}


def tell_a_story(audit: dict[str, Any]) -> None:
    audit["findings"][0] |= {"message": "STORY", "hint": "STORY"}
    for subject in audit["subjects"]:
        subject["members"][0]["learning_rate"] = 0.123456


def test_what_evidence_does_not_give_is_not_shown(saved: Path, tmp_path: Path, qaudit: Run) -> None:
    forged = forge(tmp_path / "one", saved / "one", tell_a_story)
    assert qaudit("gallery", forged, "--out", tmp_path / "site").code == 0
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "STORY" not in index
    assert "0.123456" not in index
    assert "gptq-4bit" in index


def name_a_policy(path: str) -> Callable[[dict[str, Any]], None]:
    def change(audit: dict[str, Any]) -> None:
        audit["plan"]["recipe"]["policy"] = path
        audit["verdict"] = None

    return change


@pytest.mark.parametrize(
    "place", ["/etc/shadow", "../secret.yaml", "{tmp}/secret.yaml", "link.yaml"]
)
def test_a_policy_outside_of_an_audits_folder_is_never_opened(
    saved: Path, tmp_path: Path, qaudit: Run, place: str
) -> None:
    (tmp_path / "secret.yaml").write_text("SECRET: [", encoding="utf-8")
    path = place.format(tmp=tmp_path)
    forged = forge(tmp_path / "forged", saved / "one", name_a_policy(path))
    (forged / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    done = qaudit("gallery", forged, saved / "two", "--out", tmp_path / "site")
    refused(done, 2, f"its policy `{path}` is neither one that ships", "copy the policy into")
    assert "SECRET" not in done.err


def test_a_policy_in_the_folder_of_an_audit_judges_it(
    saved: Path, tmp_path: Path, qaudit: Run
) -> None:
    folder = forge(tmp_path / "own", saved / "one", name_a_policy("own.yaml"))
    (folder / "own.yaml").write_text(
        "rules: [{name: any, metric: relative_error, margin: 90%}]", encoding="utf-8"
    )
    assert qaudit("gallery", folder, "--out", tmp_path / "site").code == 0
    rows = pyarrow.parquet.read_table(tmp_path / "site" / "gallery.parquet").to_pylist()
    assert {row["policy"] for row in rows} == {"own"}


@pytest.mark.parametrize("damage", ["absent", "crash"])
def test_an_audit_that_cannot_be_read_ends_nothing_but_itself(
    saved: Path, tmp_path: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    broken = tmp_path / "broken"
    if damage == "crash":
        shutil.copytree(saved / "one", broken)
        read = gallery.read_saved

        def crash(path: Path) -> SavedAudit:
            if path == broken:
                raise ZeroDivisionError("of all things")
            return read(path)

        monkeypatch.setattr(gallery, "read_saved", crash)
    done = qaudit("gallery", broken, saved / "two", "--out", tmp_path / "site")
    assert "left out: " in done.err
    assert f"`{broken}`" in done.err
    assert done.code == 2
    assert (tmp_path / "site" / "index.html").is_file()


def test_a_site_of_forged_audits_alone_is_not_written(
    saved: Path, tmp_path: Path, qaudit: Run
) -> None:
    forged = forge(tmp_path / "forged", saved / "one", halve_the_error)
    refused(qaudit("gallery", forged, "--out", tmp_path / "site"), 2, "forged", "")
    assert not (tmp_path / "site").exists()


def test_every_verdict_is_that_of_the_gate(saved: Path, tmp_path: Path, qaudit: Run) -> None:
    site = tmp_path / "site"
    assert qaudit("gallery", saved / "one", "--out", site).code == 0
    index = (site / "index.html").read_text(encoding="utf-8")
    table = index.partition('id="verdicts"')[2].partition("</section>")[0]
    rows = [unescape(re.sub(r"<[^>]+>", "|", row)) for row in table.split("<tr")[2:]]
    for row, decision in zip(rows, gate(saved / "one").classes, strict=True):
        assert decision.status.upper() in row
        assert f"{decision.subject}|" in row
        assert f"{decision.scheme}|" in row


def test_audits_of_one_name_are_told_by_the_folders_above_them(
    saved: Path, tmp_path: Path, qaudit: Run
) -> None:
    shutil.copytree(saved / "one", tmp_path / "x" / "one")
    shutil.copytree(saved / "one", tmp_path / "y" / "one")
    shutil.copytree(saved / "one", tmp_path / "decay-cpu" / "seed-1")
    clashing = (tmp_path / "x" / "one", tmp_path / "y" / "one" / "audit.json")
    audits = (*clashing, saved / "two", tmp_path / "decay-cpu" / "seed-1")
    assert qaudit("gallery", *audits, "--out", tmp_path / "site").code == 0
    rows = pyarrow.parquet.read_table(tmp_path / "site" / "gallery.parquet").to_pylist()
    assert {row["audit"] for row in rows} == {"x-one", "y-one", "two", "decay-cpu-seed-1"}


def test_an_audit_is_shown_once(saved: Path, tmp_path: Path, qaudit: Run) -> None:
    twice = (saved / "one", saved / "one" / "audit.json")
    done = qaudit("gallery", *twice, "--out", tmp_path / "site")
    refused(done, 2, "two audits would be named ", "name each audit once")
