"""Outliers of weights: what they look like to a quantizer, of the pick and the last checkpoint.

Tensors and other subjects are in `audit.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import Diagnostic, DiagnosticWork
from qaudit.report import document as doc
from qaudit.report.format import or_dash, spread
from qaudit.report.views import View
from qaudit.types import WeightRow


@dataclass(frozen=True, kw_only=True)
class WeightStatistics(Diagnostic):
    """Kurtosis, outliers, ranges and distance to the grid, by tensor, role and model."""

    name: ClassVar[str] = "weights"
    reads_previous: ClassVar[bool] = True

    group: int = 128
    sym: bool = True  # as the schemes here have it
    outlier: float = 6.0  # standard deviations

    def schemes(self, schemes: Sequence[Scheme]) -> Sequence[Scheme]:
        """Return all schemes: the perturbation of each is measured."""
        return schemes

    def work(self, schemes: Sequence[Scheme], blocks: int) -> DiagnosticWork:
        text = "weights: read while schemes quantize them; no stream of their own"
        return DiagnosticWork(text, watches=True)


Rows = list[dict[str, Any]]


def summarize(rows: Rows, before: Mapping[str, str]) -> Rows:
    """Return rows with the difference of each distance to the grid from the checkpoint before.

    Rows of tensors are left out: they stay in the file that `details` names. `before` names the
    checkpoint before for each label; where it was not diagnosed there is no drift.
    """
    rows = [row for row in rows if row["part"] != "tensor"]
    distances = {(row["subject"], row["part"], row["name"]): row["grid_distance"] for row in rows}
    compared = []
    for row in rows:
        label = before.get(row["subject"])
        earlier = distances.get((label, row["part"], row["name"]), {})
        drift = {b: off - earlier[b] for b, off in row["grid_distance"].items() if b in earlier}
        compared.append({**row, "grid_drift": drift, "previous": label} if drift else row)
    return compared


def section(view: View) -> doc.Section:
    blocks: list[doc.Block] = []
    for label in view.of_interest:
        rows = (row for row in view.audit.diagnostics.weights if row.part == "role")
        if roles := [row for row in rows if row.subject == label]:
            blocks += _subject(view, label, roles)
    return doc.Section("Why", tuple(blocks), 4)


def _subject(view: View, label: str, roles: Sequence[WeightRow]) -> Iterator[doc.Block]:
    schemes = dict.fromkeys(name for role in roles for name in role.perturbation)
    main = view.main.scheme if view.main else ""
    scheme = main if main in schemes else next(iter(schemes), "")
    names = ["role", "excess kurtosis", "range / deviation"]
    names += [f"moved by {scheme}, %"] if scheme else []
    cells: list[doc.Cells] = []
    for role in roles:
        moved = role.perturbation.get(scheme)
        numbers = [role.kurtosis, role.effective_range]
        numbers += [None if moved is None else 100 * moved] if scheme else []
        cells.append((doc.name_cell(role.name), *(or_dash(v, "{:.3g}".format) for v in numbers)))
    yield doc.paragraph(f"The weights of `{label}`, by role.")
    yield doc.table(names, cells)
    score = view.score(label, scheme) if scheme else None
    if score is not None and score.output_error is not None:
        yield doc.paragraph(
            f"R_L, the squared error of the last block's output as a part of its square, is "
            f"{spread(score.output_error)} under {scheme}. Kurtosis does not predict what "
            "quantization costs across optimizers; R_L did (2509.23500)."
        )
