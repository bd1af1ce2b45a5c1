"""Many audits as one static site and one table: the template of a public one.

    index.html         every verdict, and every row of every audit, sorted by a click
    NAME/report.html   the page of an audit
    gallery.parquet    the same rows, with the name of the audit; needs pyarrow

Nothing is taken from an audit's word: each number is recomputed from the losses of its documents,
the verdict from the numbers under the policy of its audit, as of the day of the audit. An audit
that says otherwise is refused; the others go on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from qaudit.audit import decide
from qaudit.errors import MachineError, QauditError, UsageError
from qaudit.judge.agreement import refuse_another_verdict
from qaudit.report import document as doc
from qaudit.report.card import PICTURES, render_page
from qaudit.report.document import status_in_words
from qaudit.report.folder import must_take_files
from qaudit.report.format import count, loss, percent, plural, shown, spread
from qaudit.report.html import FILE as PAGE
from qaudit.report.html import render
from qaudit.report.plots import figures
from qaudit.report.verdict import DEFAULT_TEXT
from qaudit.report.views import View
from qaudit.saved.evidence import read_saved
from qaudit.tables import Audit
from qaudit.types import AuditRecord, ClassVerdict, Interval
from qaudit.version import __version__
from qaudit.whole import write_whole

TABLE = "gallery.parquet"
_BARE = re.compile(r"([a-z]+-)?\d+")
"""A name that says nothing without the folder that it is in: `seed-1`."""


@dataclass(frozen=True)
class Exhibit:
    """An audit under the name of its page and its rows, with the verdict of its numbers."""

    name: str
    audit: Audit


def read_audits(paths: Mapping[str, Path]) -> tuple[list[Exhibit], list[QauditError]]:
    """Read audits, each by the name it was asked for; refuse those that disagree with evidence.

    Return what can be shown, and an error for each of the others.
    """
    exhibits, refused = [], []
    for name, (target, path) in zip(_names(paths), paths.items(), strict=True):
        folder = path if path.is_dir() else path.parent
        try:
            exhibits.append(Exhibit(name, Audit(_recomputed(path), folder, name)))
        except QauditError as error:
            if f"`{target}`" not in error.message:
                error.message = f"`{target}`: {error.message}"
            error.message = f"left out: {error.message}"
            refused.append(error)
    return exhibits, refused


def _recomputed(path: Path) -> AuditRecord:
    saved = read_saved(path).checked()
    audit = saved.audit
    verdict = decide(saved, audit.plan.recipe.policy, today=_day(audit))
    if audit.verdict is not None and audit.qaudit == __version__:
        refuse_another_verdict(audit.verdict, verdict)
    return replace(audit, verdict=verdict)


def _day(audit: AuditRecord) -> date | None:
    """Return the day on which an audit was made, if it says: ignores expire as of it."""
    try:
        return datetime.fromisoformat(audit.environment["began"]).astimezone(UTC).date()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _names(paths: Mapping[str, Path]) -> list[str]:
    """Name each audit by the end of its path, so long that no other has it: `decay-cpu-seed-1`."""
    places = [
        path.resolve() if Path(target).exists() else Path(target.removeprefix("hf://"))
        for target, path in paths.items()
    ]
    places = [place.parent if place.name == "audit.json" else place for place in places]
    lengths = [1 + bool(_BARE.fullmatch(place.name)) for place in places]
    for _ in range(max(len(place.parts) for place in places)):
        ends = ["-".join(p.parts[-n:]) for p, n in zip(places, lengths, strict=True)]
        names = [re.sub(r"[^A-Za-z0-9._-]+", "-", end).strip(".-") or "audit" for end in ends]
        times = Counter(names)
        if len(times) == len(names):
            return names
        lengths = [n + (times[name] > 1) for n, name in zip(lengths, names, strict=True)]
    name = times.most_common(1)[0][0]
    raise UsageError(f"two audits would have the page `{name}`", hint="name each audit once")


def rows_of(exhibits: Iterable[Exhibit]) -> list[dict[str, Any]]:
    """Return one row for each audit, subject and scheme, all with the same columns."""
    rows: list[dict[str, Any]] = [
        {
            "audit": exhibit.name,
            "model": " ".join(exhibit.audit.plan.recipe.targets),
            "parameters": exhibit.audit.plan.parameters,
            "text": _text(exhibit),
            "policy": exhibit.audit.plan.recipe.policy,
            **row,
        }
        for exhibit in exhibits
        for row in exhibit.audit.tidy()
    ]
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def _text(exhibit: Exhibit) -> str:
    """Name the evaluation text; `-` where answers alone were imported."""
    if not View(exhibit.audit.record).documents:
        return "-"
    return exhibit.audit.plan.recipe.evaluation or DEFAULT_TEXT


def write_gallery(exhibits: Sequence[Exhibit], out: Path) -> None:
    """Write the site and the table."""
    must_take_files(out)
    rows = rows_of(exhibits)
    for exhibit in exhibits:
        (out / exhibit.name).mkdir(parents=True, exist_ok=True)
        drawn = figures(exhibit.audit.record, exhibit.audit.folder / PICTURES)
        write_whole(out / exhibit.name / PAGE, render_page(exhibit.audit.record, drawn))
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
    about = f"What ships is marked. The same rows, with all columns, are in `{TABLE}`."
    return doc.Page(
        "Quantization audits",
        doc.prose(head),
        (
            doc.Section("Verdicts", tuple(_verdicts(exhibits))),
            doc.Section("Every measurement", (doc.paragraph(about), _measurements(rows))),
        ),
    )


def _link(name: str) -> doc.Cell:
    return doc.cell((doc.TextRun(name, code=True, href=f"{name}/{PAGE}"),))


def _verdicts(exhibits: Sequence[Exhibit]) -> Iterator[doc.Block]:
    """Yield a row for each audit and class of bits; policy and text once, if all have the same."""
    about = {(_text(exhibit), exhibit.audit.plan.recipe.policy) for exhibit in exhibits}
    if is_alike := len(about) == 1:
        text, policy = about.pop()
        on_text = "" if text == "-" else f", on {text}"
        yield doc.paragraph(f"Every audit is under the policy `{policy}`{on_text}.")
    names = ("audit", "size", "bits", "verdict", "subject", "scheme", "added loss, %", "margin, %")
    further = ("documents",) if is_alike else ("documents", "policy", "text")
    yield doc.TableBlock(
        doc.columns(*names, *further),
        tuple(
            _verdict(exhibit, decision, is_alike=is_alike)
            for exhibit in exhibits
            if exhibit.audit.verdict is not None
            for decision in exhibit.audit.verdict.classes
        ),
        name="errors",  # the page's main table
    )


def _verdict(exhibit: Exhibit, decision: ClassVerdict, *, is_alike: bool) -> doc.TableRow:
    view = View(exhibit.audit.record)
    recipe, parameters = exhibit.audit.plan.recipe, exhibit.audit.plan.parameters
    bounds_loss = decision.unit == "fraction" and decision.metric in (None, "relative_error")
    margin = decision.margin if bounds_loss else None
    added = decision.relative_error
    documents = decision.documents or view.documents
    return doc.row(
        _link(exhibit.name),
        doc.cell(count(parameters), value=float(parameters)) if parameters else "-",
        decision.bit_class,
        doc.cell(doc.strong(status_in_words(decision.status).upper())),
        doc.name_cell(decision.subject or "-"),
        decision.scheme or "-",
        doc.cell("-") if added is None else _interval(added, percent),
        doc.cell(shown(margin, lambda part: f"{100 * part:g}"), value=margin),
        doc.cell(str(documents), value=float(documents)) if documents else "-",
        *(() if is_alike else (recipe.policy, _text(exhibit))),
    )


def _measurements(rows: Sequence[dict[str, Any]]) -> doc.TableBlock:
    heads = {"kl": "KL", "agreement": "agreement, %"}
    measured = [name for name in heads if any(row[name] is not None for row in rows)]
    names = ("audit", "subject", "scheme", "bits", "loss", "added loss, %")
    return doc.TableBlock(
        doc.columns(*names, *(heads[name] for name in measured)),
        tuple(_measurement(row, measured) for row in rows),
    )


def _measurement(row: dict[str, Any], measured: Sequence[str]) -> doc.TableRow:
    bits = row["bits_per_weight"]
    return doc.row(
        _link(row["audit"]),
        doc.name_cell(row["subject"]),
        row["scheme"],
        doc.cell(shown(bits, "{:.2f}".format), value=bits),
        _number(row, "loss", loss),
        _number(row, "added_loss", percent),
        *(_number(row, name, percent if name == "agreement" else spread) for name in measured),
        chosen=row["verdict"] == "ship",
    )


def _number(row: dict[str, Any], name: str, show: Callable[[Interval], str]) -> doc.Cell:
    value = row[name]
    if value is None:
        return doc.cell("-")
    return _interval(Interval(value, row[f"{name}_low"], row[f"{name}_high"]), show)


def _interval(interval: Interval, show: Callable[[Interval], str]) -> doc.Cell:
    return doc.interval_cell(show(interval), value=interval.estimate)
