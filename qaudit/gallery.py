"""Many audits as one static site and one table: the template of a public one.

    index.html         every verdict, and every row of every audit, sorted by a click
    NAME/report.html   the page of an audit
    gallery.parquet    the same rows, with the name of the audit; needs pyarrow

Nothing is taken from an audit's word: each number is recomputed from the losses of its documents,
each verdict is made anew under the policy of its audit, and an audit that disagrees with its
evidence is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qaudit.audit import decide
from qaudit.errors import MachineError, QauditError, UsageError
from qaudit.report import document as doc
from qaudit.report.card import render_page
from qaudit.report.folder import must_take_files
from qaudit.report.format import loss, percent, plural, shown, spread
from qaudit.report.html import FILE as PAGE
from qaudit.report.html import render
from qaudit.report.verdict import answer, text_name
from qaudit.report.views import View
from qaudit.saved.evidence import read_saved
from qaudit.tables import Audit
from qaudit.types import Interval
from qaudit.whole import write_whole

TABLE = "gallery.parquet"


@dataclass(frozen=True)
class Exhibit:
    """An audit under the name of its page and its rows, with a verdict of today."""

    name: str
    audit: Audit


def read_audits(paths: Sequence[Path]) -> tuple[Exhibit, ...]:
    """Read audits and recompute them; refuse one that disagrees with its evidence."""
    exhibits: dict[str, Exhibit] = {}
    for path in paths:
        folder = path if path.is_dir() else path.parent
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip(".-") or "audit"
        if name in exhibits:
            raise UsageError(
                f"two audits would have the page `{name}`", hint="rename one of the folders"
            )
        try:
            saved = read_saved(path).checked()
            verdict = decide(saved, saved.audit.plan.recipe.policy)
        except QauditError as error:
            error.message = f"`{path}`: {error.message}"
            raise
        exhibits[name] = Exhibit(name, Audit(replace(saved.audit, verdict=verdict), folder, name))
    return tuple(exhibits.values())


def rows_of(exhibits: Iterable[Exhibit]) -> list[dict[str, Any]]:
    """Return one row for each audit, subject and scheme, all with the same columns."""
    rows: list[dict[str, Any]] = [
        {
            "audit": exhibit.name,
            "model": " ".join(exhibit.audit.plan.recipe.targets),
            "text": text_name(View(exhibit.audit.record)).replace("`", ""),
            "policy": exhibit.audit.plan.recipe.policy,
            **row,
        }
        for exhibit in exhibits
        for row in exhibit.audit.tidy()
    ]
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def write_gallery(exhibits: Sequence[Exhibit], out: Path) -> None:
    """Write the site and the table."""
    must_take_files(out)
    rows = rows_of(exhibits)
    for exhibit in exhibits:
        (out / exhibit.name).mkdir(parents=True, exist_ok=True)
        write_whole(out / exhibit.name / PAGE, render_page(exhibit.audit.record))
    write_whole(out / TABLE, _parquet(rows))
    write_whole(out / "index.html", render(_page(exhibits, rows)))


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MachineError(
            "pyarrow is not installed, which writes the table",
            hint="pip install 'qaudit-llm[parquet]'",
        ) from error
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return bytes(buffer.getvalue().to_pybytes())


def _page(exhibits: Sequence[Exhibit], rows: Sequence[dict[str, Any]]) -> doc.Page:
    head = f"{plural(len(exhibits), 'audit')}, {plural(len(rows), 'row')}: every number is "
    head += "recomputed from the losses of its documents, and every verdict from the numbers."
    verdicts = doc.TableBlock(
        doc.columns("audit", "verdict", "text", "documents"), tuple(map(_verdict, exhibits))
    )
    names = ("audit", "subject", "scheme", "bits", "loss", "added, %", "KL", "verdict")
    every = doc.TableBlock(doc.columns(*names), tuple(_rows(rows)))
    about = doc.prose(f"The same rows are in `{TABLE}`.")
    return doc.Page(
        "Quantization audits",
        doc.prose(head),
        (
            doc.Section("Verdicts", (verdicts,)),
            doc.Section("Every measurement", (doc.Paragraph(about), every)),
        ),
    )


def _link(name: str) -> doc.Cell:
    return doc.cell((doc.TextRun(name, href=f"{name}/{PAGE}"),))


def _verdict(exhibit: Exhibit) -> doc.TableRow:
    view = View(exhibit.audit.record)
    verdict = exhibit.audit.verdict
    said = answer(verdict) if verdict is not None else "-"
    documents = doc.cell(str(view.documents), value=float(view.documents))
    text = doc.cell(doc.prose(text_name(view)))
    return doc.row(_link(exhibit.name), doc.cell(doc.prose(said)), text, documents)


def _rows(rows: Sequence[dict[str, Any]]) -> Iterator[doc.TableRow]:
    for row in rows:
        bits = row["bits_per_weight"]
        yield doc.row(
            _link(row["audit"]),
            doc.name_cell(row["subject"]),
            row["scheme"],
            doc.cell(shown(bits, "{:.2f}".format), value=bits),
            _number(row, "loss", loss),
            _number(row, "added_loss", percent),
            _number(row, "kl", spread),
            row["verdict"] or "",
            chosen=row["verdict"] == "ship",
        )


def _number(row: dict[str, Any], name: str, show: Callable[[Interval], str]) -> doc.Cell:
    value = row[name]
    if value is None:
        return doc.cell("-")
    interval = Interval(value, row[f"{name}_low"], row[f"{name}_high"])
    return doc.interval_cell(show(interval), value=value)
