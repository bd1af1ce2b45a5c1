"""docs/api.md and the notebook run as they are printed."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from qaudit.errors import MachineError
from qaudit.tables import Audit
from tests.house.notebook import NOTEBOOK, results, run
from tests.house.source import ROOT
from tests.support import sample
from tests.support.verdicts import with_verdict

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTE = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
CELLS, META = NOTE["cells"], NOTE["metadata"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@pytest.mark.slow
def test_the_examples_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qaudit.report.folder.write", lambda audit, folder: {})  # no pictures
    scope = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        with monkeypatch.context() as patched:
            if "to_pandas" in block:
                patched.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
            run(block, scope)
    rows = scope["audit"].measurements
    assert len(scope["frame"]) == len(rows) == 9
    assert {row.calibration_seed for row in rows} == {0}  # the verdict is about the file
    assert scope["records"][0].keys() >= {"a", "b"}
    assert scope["pick"].scheme == "gptq-4bit"
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("there is no scheme `gtpq-4bit`")
    assert printed[-1].endswith(" 2")


def test_an_audit_is_a_tidy_table_and_its_verdict_is_printed_short():
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
    printed = str(record.verdict).splitlines()
    assert len(printed) < 20 and max(map(len, printed)) <= 80


def test_the_readme_needs_nothing_that_its_install_leaves_out(monkeypatch, capsys):
    audit = Audit(with_verdict(), Path())
    monkeypatch.setattr("qaudit.scan", lambda *targets, **settings: audit)
    monkeypatch.setitem(sys.modules, "pandas", None)
    (block,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    scope = {}
    run(block, scope)
    assert len(scope["rows"]) == len(audit.tidy())
    assert capsys.readouterr().out == f"{audit.verdict}\n"
    with pytest.raises(MachineError) as refused:
        audit.to_pandas()
    assert refused.value.hint == "pip install 'qaudit-llm[pandas]', or use `.to_records()`"


def in_words(text):
    """Return a text without its numbers, and its numbers."""
    return NUMBER.sub("#", text), [float(number) for number in NUMBER.findall(text)]


@pytest.mark.slow
def test_the_notebook_shows_the_same_anew(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    shown = results(CELLS)
    committed = [
        {
            kind: "".join(text)
            for output in cell["outputs"]
            for kind, text in output.get("data", {"stream": output.get("text")}).items()
        }
        for cell in CODE
    ]
    assert [set(cell) for cell in shown] == [set(cell) for cell in committed]
    made_with = META["language_info"]["version"].split(".")[:2]
    if made_with != [str(part) for part in sys.version_info[:2]]:
        return  # another Python has other documentation to measure on
    for seen, saved in zip(shown, committed, strict=True):
        for kind, text in saved.items():
            (words, numbers), (same, values) = in_words(seen[kind]), in_words(text)
            assert words == same
            assert numbers == pytest.approx(values, rel=0.05, abs=0.01)


def test_the_notebook_is_committed_with_results():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    assert all(cell["outputs"] for cell in CODE)
    assert NOTEBOOK.stat().st_size < 50_000
