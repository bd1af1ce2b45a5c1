"""What weights look like to a quantizer, in the section `Why`: the pick and the last checkpoint.

Tensors and other subjects are in `audit.json`.
"""

from __future__ import annotations

from qaudit.report import document as doc
from qaudit.report.format import shown, spread
from qaudit.report.views import View
from qaudit.types import WeightRow


def section(view: View) -> doc.Section:
    rows = view.audit.diagnostics.weights
    blocks = [block for label in view.of_interest for block in _subject(view, label, rows)]
    return doc.Section("Why", tuple(blocks), 4)


def _subject(view: View, label: str, rows: tuple[WeightRow, ...]) -> list[doc.Block]:
    roles = [row for row in rows if row.subject == label and row.part == "role"]
    if not roles:
        return []
    schemes = dict.fromkeys(name for role in roles for name in role.perturbation)
    pick = view.audit.pick.scheme if view.audit.pick else ""
    scheme = pick if pick in schemes else next(iter(schemes), None)
    names = ["role", "excess kurtosis", "range / deviation"]
    names += [] if scheme is None else [f"moved by {scheme}, %"]
    cells = tuple(doc.row(doc.name_cell(role.name), *_numbers(role, scheme)) for role in roles)
    blocks: list[doc.Block] = [
        doc.paragraph(f"The weights of `{label}`, by role."),
        doc.TableBlock(doc.columns(*names), cells),
    ]
    score = view.score(label, scheme) if scheme else None
    if score is not None and score.output_error is not None:
        blocks.append(
            doc.paragraph(
                f"R_L, the squared error of the last block's output as a part of its square, is "
                f"{spread(score.output_error)} under {scheme}. Kurtosis does not predict what "
                "quantization costs across optimizers; R_L did (2509.23500)."
            )
        )
    return blocks


def _numbers(one: WeightRow, scheme: str | None) -> list[str]:
    numbers = [one.kurtosis, one.effective_range]
    if scheme is not None:
        moved = one.perturbation.get(scheme)
        numbers.append(None if moved is None else 100 * moved)
    return [shown(value, "{:.3g}".format) for value in numbers]
