"""Bases that ship quantized: decoded, they are what schemes and files are compared with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support import quantized_bases
from tests.support.cards import whole_at
from tests.support.cli import TEXT, Run, audit_of, refused, settings, weights_in
from tests.support.hub import Hub
from tests.support.quantized import quantized_copy

BASE = "series/step10"
MEASURED = ("ce", "kl", "relative_error", "bits_per_weight")


def rows_of(out: Path) -> dict[str, dict[str, object]]:
    return {row["scheme"]: row for row in audit_of(out)["measurements"]}


@pytest.mark.parametrize("layout", quantized_bases.LAYOUTS)
def test_a_base_that_ships_quantized_is_measured_as_what_it_means(
    layout: str, place: Path, qaudit: Run
) -> None:
    ships, means = quantized_bases.write(place, layout, place / BASE)
    for folder in (ships, means):
        done = qaudit("scan", *TEXT, "--schemes", "rtn-4bit", "--out", f"out-{folder.name}", folder)
        assert done.code == 0, done.err
    ours, dense = rows_of(place / f"out-{ships.name}"), rows_of(place / f"out-{means.name}")
    for scheme in ("fp", "rtn-4bit"):
        for key in MEASURED if scheme != "fp" else ("ce",):
            assert ours[scheme][key] == dense[scheme][key]
    assert ours["fp"]["nbytes"] < dense["fp"]["nbytes"]
    assert ours["rtn-4bit"]["nbytes"] == dense["rtn-4bit"]["nbytes"]
    (note,) = [n for n in ours["fp"]["notes"] if "ships quantized" in n]
    assert note in whole_at(place / f"out-{ships.name}")
    assert note in audit_of(place / f"out-{ships.name}")["plan"]["notes"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["deepseek", "kimi"])
def test_a_base_that_ships_quantized_is_diagnosed_and_exported_as_what_it_means(
    layout: str, place: Path, qaudit: Run
) -> None:
    ships, means = quantized_bases.write(place, layout, place / BASE)
    scheme = "gptq-4bit:group=-1"
    setting = f"--schemes {scheme} --set dtype=bfloat16 --set diagnostics=weights -q"
    options = (*TEXT, *setting.split())
    rows = []
    for folder in (ships, means):
        assert qaudit("scan", folder, *options, "--out", f"out-{folder.name}").code == 0
        diagnosed = audit_of(place / f"out-{folder.name}")["diagnostics"]["weights"]
        rows.append([{**row, "subject": "", "details": ""} for row in diagnosed])
    assert rows[0] == rows[1] and rows[0]
    named = ("--subject", layout, "--scheme", scheme, "--out", "new", "-q")
    assert qaudit("export", f"out-{layout}", *named).code == 0
    done = qaudit("verify", "new", "--audit", f"out-{layout}", "--json", "-q")
    run = json.loads(done.out[done.out.index("{") :])["run"]
    assert run["agrees"] and run["difference"] == 0


def test_files_are_compared_with_a_base_that_ships_quantized(place: Path, scan: Run) -> None:
    quantized_copy(place / BASE, place / "model-GPTQ", "gptq", bits=8)
    quantized_copy(place / BASE, place / "model-AWQ", "awq")
    done = scan("model-GPTQ", "--shipped", "model-AWQ")
    assert done.code == 0, done.err
    rows = rows_of(place / "out")
    assert list(rows) == ["fp", "rtn-4bit", "model-AWQ"]
    assert rows["model-AWQ"]["kl"] > 0


def test_the_base_is_not_a_file_beside_itself(place: Path, scan: Run) -> None:
    quantized_copy(place / BASE, place / "model-GPTQ", "gptq")
    refused(scan("model-GPTQ", "--shipped", "model-GPTQ"), 2, "is the base itself", "leave out")


def test_soups_of_quantized_checkpoints_are_refused(place: Path, scan: Run) -> None:
    for name, source in {"a": "step10", "b": "step200"}.items():
        quantized_copy(place / "series" / source, place / name, "gptq")
    refused(scan("a", "b", "--soup", "a+b"), 2, "is quantized already", "before they are quantized")


def test_a_base_of_the_hub_is_priced_as_what_it_means(
    place: Path, scan: Run, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = online / "root"
    ships, means = quantized_bases.write(place, "gpt-oss", place / BASE)
    for folder, name in ((ships, "oss"), (means, "dense")):
        shutil.copytree(folder, root / "lab" / name / "v1")
        settings(root / "lab" / name, branch_per_revision=True)
    with Hub(root).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        plans = {
            name: json.loads(scan(f"lab/{name}@v1", "--dry-run", "--json").out)
            for name in ("oss", "dense")
        }
    assert plans["oss"]["parameters"] == plans["dense"]["parameters"]
    assert not weights_in(online / "hub")
