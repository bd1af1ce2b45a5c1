"""The examples in CONTRIBUTING.md work."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from experiments.table import read_experiment
from qaudit.core.linears import Linears
from qaudit.core.merge import Merge
from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import Diagnostic
from qaudit.errors import AuditError
from qaudit.families import load_file
from qaudit.policy import read_policy
from tests.house.source import ROOT
from tests.support import gate_sample, sample

PREAMBLE = """
from dataclasses import dataclass
from typing import ClassVar
from qaudit.diagnostics.case import Case, Measure
from qaudit.diagnostics.diagnostic import Diagnostic
from qaudit.core.linears import Linears, Quantized, decoded, refuse_nonfinite
from qaudit.core.merge import Merge
from qaudit.core.scheme import Scheme
from qaudit.core.linears import IntegerCodes
from qaudit.errors import QauditError
from qaudit.report.format import printable
from qaudit.report.gate.checks import Answer
from qaudit.types import AuditRecord
"""
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def example(name: str) -> Any:
    """Return the class or function of this name from the first block that defines it."""
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
    (block,) = (block for block in blocks if re.search(rf"^(class|def) {name}\(", block, re.M))
    scope: dict[str, Any] = {"__name__": __name__}
    text = PREAMBLE + block.replace("\n...\n", "\n")
    exec(compile(text, "CONTRIBUTING.md", "exec", dont_inherit=True), scope)
    return scope[name]


def file_of(section: str, folder: Path, name: str) -> Path:
    """Write the YAML of a section into a file."""
    body = TEXT.partition(f"## {section}\n")[2].partition("\n## ")[0]
    block = re.search(r"^```yaml\n(.*?)^```", body, re.M | re.S)
    assert block is not None
    (folder / name).write_text(block[1], encoding="utf-8")
    return folder / name


def test_the_scheme_quantizes_and_the_merge_merges() -> None:
    scheme, merge = example("Sign")(), example("First")()
    assert isinstance(scheme, Scheme) and isinstance(merge, Merge)
    done = scheme.quantize(Linears({"a": torch.tensor([[1.0, -3.0], [0.0, 0.0]])}))
    assert done.weights["a"].tolist() == [[2.0, -2.0], [0.0, 0.0]]
    assert (done.bits, scheme.spec, set(done.stored)) == (2 * 4 + 2 * 16, "sign", {"a"})
    assert merge.merge([torch.ones(2), torch.zeros(2)], [0.5, 0.5]).tolist() == [1.0, 1.0]


def test_the_formats_of_the_report_and_of_the_gate_render() -> None:
    lines = example("render_lines")(sample.audit()).splitlines()
    assert len(lines) == len(sample.audit().measurements)
    assert re.fullmatch(r"stage1-step500 fp \d\.\d{4}", lines[0])
    assert example("word")(gate_sample.gate()) in {"pass", "fail", "inconclusive"}
    assert example("word")(AuditError("a", hint="b")) == "error"


def test_the_diagnostic_has_parameters_and_measures_rows() -> None:
    assert isinstance(example("Norms")(), Diagnostic)
    assert example("Norms")().spec == "norms"
    weights = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    case = SimpleNamespace(
        subject=SimpleNamespace(label="step10"),
        weights=lambda: SimpleNamespace(names=lambda: list(weights), read=weights.__getitem__),
    )
    (row,) = example("measure_norms")(case)
    assert (row.subject, row.norm) == ("step10", 5.0)


def test_the_policy_the_experiment_and_the_family_are_read(tmp_path: Path) -> None:
    policy = read_policy(file_of("Add a policy that ships", tmp_path, "nightly.yaml"))
    assert [(rule.margin, rule.subjects) for rule in policy.rules] == [(0.05, ("@last",))]
    experiment = read_experiment(str(file_of("Add an experiment", tmp_path, "slow.yaml")))
    assert [run.name for run in experiment.runs][-1] == "slow"
    assert len(experiment.contrasts) == 1
    family = load_file(file_of("Add a model family", tmp_path, "acorn.yaml"))
    assert family.learning_rate(family.place("step1000")) == 2.5e-4
