"""Many audits as one page: its rows are those of the audits, and a forged audit is refused."""

import json
import re
import shutil
from dataclasses import replace
from html import unescape

import pyarrow.parquet
import pytest

from qaudit import gallery, gate, load
from qaudit.judging import decide
from qaudit.saved.audits import to_json
from qaudit.saved.evidence import read_saved
from qaudit.version import __version__
from tests.support.cli import refused
from tests.support.saved_audits import save


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audits")
    for seed, name in enumerate(("one", "two")):
        record = save(folder / name, seed=seed)
        verdict = decide(read_saved(folder / name), "release")
        judged = replace(record, verdict=verdict, qaudit=__version__)
        (folder / name / "audit.json").write_text(to_json(judged), encoding="utf-8")
    return folder


@pytest.fixture
def site(tmp_path):
    return tmp_path / "site"


def rows_of(site):
    return pyarrow.parquet.read_table(site / "gallery.parquet").to_pylist()


def test_all_rows_and_verdicts_are_on_the_page_and_in_the_table(saved, site, qaudit):
    done = qaudit("gallery", saved / "one", saved / "two", "--out", site)
    assert (done.code, done.out) == (0, f"{site / 'index.html'}\n")
    assert {path.name for path in site.iterdir()} == {"index.html", "gallery.parquet"}
    rows, index = rows_of(site), (site / "index.html").read_text(encoding="utf-8")
    tidy = {name: load(saved / name).tidy() for name in ("one", "two")}
    assert [row["audit"] for row in rows] == [name for name in tidy for _ in tidy[name]]
    for row, expected in zip(rows, [row for name in tidy for row in tidy[name]], strict=True):
        shared = row.keys() & expected.keys()
        assert {name: row[name] for name in shared} == {name: expected[name] for name in shared}
        assert {"loss", "added_loss_low", "agreement", "verdict"} <= shared
        assert not {"learning_rate", "step"} & row.keys()  # the word of the audit
    assert index.count("<tr") >= len(rows) + len(tidy)
    table = index.partition('id="verdicts"')[2].partition("</section>")[0]
    told = [unescape(re.sub(r"<[^>]+>", "|", row)) for row in table.split("<tr")[2:]]
    decided = [one for name in tidy for one in gate(saved / name).classes]
    for row, decision in zip(told, decided, strict=True):
        assert decision.status.upper() in row
        assert f"{decision.subject}|" in row
        assert f"{decision.scheme}|" in row


def forge(folder, original, change):
    """Copy an audit and change what its audit.json says."""
    shutil.copytree(original, folder)
    audit = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    change(audit)
    (folder / "audit.json").write_text(json.dumps(audit), encoding="utf-8")
    return folder


def halve_the_error(audit):
    next(row for row in audit["measurements"] if row["relative_error"])["relative_error"] /= 2


def ship_it(audit):
    decision = audit["verdict"]["classes"][0]
    decision["status"] = "hold" if decision["status"] == "ship" else "ship"


def prefer_the_soup(audit):
    audit["comparisons"][0] |= {"estimate": -1.0, "low": -1.5, "high": -0.5}


@pytest.mark.parametrize("change", [halve_the_error, ship_it, prefer_the_soup])
def test_a_forged_audit_is_refused_by_its_name_and_the_others_go_on(saved, site, qaudit, change):
    forged = forge(site.parent / "forged", saved / "one", change)
    refused(qaudit("gallery", forged, "--out", site), 2, "forged", "")
    assert not site.exists()  # of forged audits alone
    done = qaudit("gallery", forged, saved / "two", "--out", site)
    refused(done, 2, f"left out: `{forged}`", "it was edited after it was written")
    assert done.out == f"{site / 'index.html'}\n"
    assert {row["audit"] for row in rows_of(site)} == {"two"}


def tell_a_story(audit):
    audit["findings"][0] |= {"message": "STORY", "hint": "STORY"}
    for subject in audit["subjects"]:
        subject["members"][0]["learning_rate"] = 0.123456


def test_what_evidence_does_not_give_is_not_shown(saved, site, qaudit):
    forged = forge(site.parent / "one", saved / "one", tell_a_story)
    assert qaudit("gallery", forged, "--out", site).code == 0
    page = (site / "index.html").read_text(encoding="utf-8")
    found = [text in page for text in ("STORY", "0.123456", "gptq-4bit")]
    assert found == [False, False, True]


def name_a_policy(path):
    def change(audit):
        audit["plan"]["recipe"]["policy"] = path
        audit["verdict"] = None

    return change


def test_a_policy_outside_of_an_audits_folder_is_never_opened_and_one_in_it_judges_it(
    saved, tmp_path, site, qaudit
):
    (tmp_path / "secret.yaml").write_text("SECRET: [", encoding="utf-8")
    for place in ("/etc/shadow", "../secret.yaml", f"{tmp_path}/secret.yaml", "link.yaml"):
        shutil.rmtree(tmp_path / "forged", ignore_errors=True)
        forged = forge(tmp_path / "forged", saved / "one", name_a_policy(place))
        (forged / "link.yaml").symlink_to(tmp_path / "secret.yaml")
        done = qaudit("gallery", forged, saved / "two", "--out", site)
        refused(done, 2, f"its policy `{place}` is neither one that ships", "copy the policy into")
        assert "SECRET" not in done.err
    folder = forge(tmp_path / "own", saved / "one", name_a_policy("own.yaml"))
    policy = "rules: [{name: any, metric: relative_error, margin: 90%}]"
    (folder / "own.yaml").write_text(policy, encoding="utf-8")
    assert qaudit("gallery", folder, "--out", site).code == 0
    assert {row["policy"] for row in rows_of(site)} == {"own"}


def test_an_audit_that_cannot_be_read_ends_nothing_but_itself(saved, site, qaudit, monkeypatch):
    broken, read = site.parent / "broken", gallery.read_saved

    def crash(path):
        if path == broken and broken.exists():
            raise ZeroDivisionError("of all things")
        return read(path)

    monkeypatch.setattr(gallery, "read_saved", crash)
    for _ in range(2):  # absent, and then one on which reading crashes
        done = qaudit("gallery", broken, saved / "two", "--out", site)
        assert "left out: " in done.err
        assert f"`{broken}`" in done.err
        assert done.code == 2
        assert (site / "index.html").is_file()
        shutil.rmtree(site)
        shutil.copytree(saved / "one", broken, dirs_exist_ok=True)


def test_audits_are_told_by_the_folders_above_them_and_shown_once(saved, tmp_path, site, qaudit):
    for folder in ("x/one", "y/one", "decay-cpu/seed-1"):
        shutil.copytree(saved / "one", tmp_path / folder)
    clashing = (tmp_path / "x" / "one", tmp_path / "y" / "one" / "audit.json")
    audits = (*clashing, saved / "two", tmp_path / "decay-cpu" / "seed-1")
    assert qaudit("gallery", *audits, "--out", site).code == 0
    assert {row["audit"] for row in rows_of(site)} == {"x-one", "y-one", "two", "decay-cpu-seed-1"}
    twice = (saved / "one", saved / "one" / "audit.json")
    done = qaudit("gallery", *twice, "--out", site)
    refused(done, 2, "two audits would be named ", "name each audit once")
