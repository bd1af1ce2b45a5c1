"""docs/api.md and the notebook run as they are printed."""

from __future__ import annotations

import ast
import json
import re
import sys
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qaudit.report.verdict import answer
from qaudit.tables import Audit
from qaudit.types import Interval, Pick
from tests.house.source import ROOT
from tests.support import sample
from tests.support.verdicts import with_verdict

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))


def run(code: str, scope: dict[str, Any]) -> object:
    """Run code as a notebook does: the value of a last expression is returned."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec", dont_inherit=True), scope)
    return (
        None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), scope)
    )


@pytest.mark.slow
def test_the_examples_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qaudit.report.folder.write", lambda audit, folder: None)  # no pictures
    scope: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        with monkeypatch.context() as patched:
            if "to_pandas" in block:
                patched.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
            run(block, scope)
    rows = scope["audit"].measurements
    assert len(scope["frame"]) == len(rows) > 9
    assert sum(row.calibration_seed == 0 for row in rows) == 9
    assert scope["records"][0].keys() >= {"a", "b"}
    assert scope["pick"].scheme == "gptq-4bit"
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("there is no scheme `gtpq-4bit`")
    assert printed[-1].endswith(" 2")


def test_an_audit_is_a_tidy_table_and_its_conclusions_have_views() -> None:
    record = with_verdict()
    audit = Audit(record, Path())
    rows = audit.tidy()
    assert len(rows) == len({(row["subject"], row["scheme"]) for row in rows}) > 9
    assert all(row.keys() == rows[0].keys() for row in rows)
    step, soup = rows[0], rows[-1]
    assert step["step"] is not None and step["learning_rate"] is not None
    assert (soup["kind"], soup["step"]) == ("soup", None)
    (full, *quantized) = rows[: len(sample.SCHEMES) + 1]
    assert full["scheme"] == "fp" and full["added_loss"] is None
    assert all(r["added_loss_low"] <= r["added_loss"] <= r["added_loss_high"] for r in quantized)
    assert {row["verdict"] for row in rows} >= {None, "ship"}
    assert record.verdict is not None
    view: Any = record.verdict
    assert answer(record.verdict).replace("`", "")[:12] in view._repr_markdown_()
    pick: Any = Pick("soup", "gptq-4bit", "lowest loss", "other", Interval(-1, -2, -0.5), "32")
    assert pick._repr_markdown_().startswith("**Ship `soup` at gptq-4bit**: lowest loss.")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    scope: dict[str, Any] = {}
    shown = [run("".join(c["source"]), scope) for c in cells if c["cell_type"] == "code"]
    pages = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(pages) == 1 and "<table" in unescape(pages[0])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_results(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in code)
