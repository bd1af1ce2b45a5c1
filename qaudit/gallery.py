"""Many audits as one table: a page that any server shows, and the same rows as Parquet.

    index.html         every verdict and every row, sorted by a click
    gallery.parquet    the same rows; needs pyarrow

Nothing is taken from an audit's word: each number is computed again from the losses of its
documents, the verdict from the numbers under the policy of its audit, as of the day of the audit.
What cannot be derived from evidence (diagnostics, findings, learning rates) is not shown. An audit
that says otherwise, or that cannot be read, is left out by name; the others go on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from qaudit.errors import AuditError, MachineError, QauditError, UsageError
from qaudit.judge import refuse_another_verdict, rows_again
from qaudit.judging import decide
from qaudit.policy import policy_inside
from qaudit.report import document as doc
from qaudit.report.folder import must_take_files
from qaudit.report.format import loss, or_dash, percent, plural, spread
from qaudit.report.html import render
from qaudit.saved.evidence import read_saved
from qaudit.support.keys import install
from qaudit.tables import Audit
from qaudit.types import AuditRecord, Diagnostics, Interval
from qaudit.version import __version__
from qaudit.whole import write_whole

TABLE = "gallery.parquet"
_SAID = ("kind", "stage", "step", "tokens_seen", "learning_rate")
"""Columns of a tidy audit that are the audit's own word."""

_BARE = re.compile(r"([a-z]+-)?\d+")
"""A name that says nothing without the folder that it is in: `seed-1`."""

Row = dict[str, Any]


def rows_of(
    targets: Sequence[str], find: Callable[[str], Path]
) -> tuple[list[Row], list[QauditError]]:
    """Return a row for each audit, subject and scheme, and an error for each audit left out.

    `find` returns the folder or file of an audit, and may download it.
    """
    paths: dict[str, Path] = {}
    errors: list[QauditError] = []
    for target in targets:
        with _left_out(target, errors):
            paths[target] = find(target)
    tables: dict[str, list[Row]] = {}
    for name, (target, path) in zip(_names(paths), paths.items(), strict=True):
        with _left_out(target, errors):
            tables[name] = _rows(path)
    rows = [{"audit": name, **row} for name, table in tables.items() for row in table]
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows], errors


@contextmanager
def _left_out(target: str, errors: list[QauditError]) -> Iterator[None]:
    """Collect the error that ends a `with` body, whatever it is: an audit of others may hold it."""
    try:
        yield
        return
    except QauditError as known:
        error = known
    except Exception as unknown:  # noqa: BLE001 - and the other audits go on
        what = " ".join(f"{type(unknown).__name__}: {unknown}".split())[:200]
        error = AuditError(f"it cannot be judged ({what})", hint="scan again, or restore it")
    if f"`{target}`" not in error.message:
        error.message = f"`{target}`: {error.message}"
    error.message = f"left out: {error.message}"
    errors.append(error)


def _rows(path: Path) -> list[Row]:
    saved = read_saved(path).checked()
    audit = saved.audit
    folder = path if path.is_dir() else path.parent
    policy = policy_inside(audit.plan.recipe.policy, folder)
    verdict = decide(saved, policy, today=_day(audit))
    if audit.verdict is not None and audit.qaudit == __version__:
        refuse_another_verdict(audit.verdict, verdict)
    scores, tasks = rows_again(audit, saved.every_draw)
    derived = replace(
        audit,
        measurements=tuple(scores),
        tasks=tuple(tasks),
        verdict=verdict,
        diagnostics=Diagnostics(),
        findings=(),
    )
    rows = Audit(derived, folder).tidy()
    shown_rows = [{k: v for k, v in row.items() if k not in _SAID} for row in rows]
    return [{"policy": verdict.policy, **row} for row in shown_rows]


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
    names = []
    for place in places:
        n = 1 + bool(_BARE.fullmatch(place.name))
        while n < len(place.parts) and sum(p.parts[-n:] == place.parts[-n:] for p in places) > 1:
            n += 1
        end = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(place.parts[-n:])).strip(".-") or "audit"
        if end in names:
            raise UsageError(f"two audits would be named `{end}`", hint="name each audit once")
        names.append(end)
    return names


def write_gallery(rows: Sequence[Row], out: Path) -> None:
    """Write the page and the table."""
    must_take_files(out)
    write_whole(out / TABLE, _parquet(rows))
    write_whole(out / "index.html", render(_page(rows)))


def _parquet(rows: Sequence[Row]) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MachineError(
            "pyarrow is not installed, which writes the table", hint=install("pyarrow")
        ) from error
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
    return bytes(buffer.getvalue().to_pybytes())


def _page(rows: Sequence[Row]) -> doc.Page:
    audits = plural(len({row["audit"] for row in rows}), "audit")
    head = f"{audits}, {plural(len(rows), 'row')}: every number is computed again from the losses "
    decided = [row for row in rows if row["verdict"] is not None]
    about = f"What ships is marked. The same rows, with all columns, are in `{TABLE}`."
    return doc.Page(
        "Quantization audits",
        doc.prose(head + "of its documents, and every verdict from the numbers."),
        (
            doc.Section("Verdicts", (_table(decided, name="errors"),)),  # the page's main table
            doc.Section("Every measurement", (doc.paragraph(about), _table(rows))),
        ),
    )


_NUMBERS = {"loss": "loss", "added_loss": "added loss, %", "kl": "KL", "agreement": "agreement, %"}


def _table(rows: Sequence[Row], name: str = "") -> doc.TableBlock:
    measured = [key for key in _NUMBERS if any(row[key] is not None for row in rows)]
    heads = ("audit", "subject", "scheme", "bits", "verdict", *(_NUMBERS[key] for key in measured))
    cells = (
        doc.row(
            doc.name_cell(row["audit"]),
            doc.name_cell(row["subject"]),
            row["scheme"],
            doc.cell(
                or_dash(row["bits_per_weight"], "{:.2f}".format), value=row["bits_per_weight"]
            ),
            doc.cell(doc.strong(doc.status_in_words(row["verdict"]).upper()))
            if row["verdict"]
            else "-",
            *(_number(row, key) for key in measured),
            doc.cell(str(row["documents"]), value=float(row["documents"])),
            row["policy"],
            chosen=row["verdict"] == "ship",
        )
        for row in rows
    )
    return doc.table((*heads, "documents", "policy"), cells, name=name)


def _number(row: Row, key: str) -> doc.Cell:
    if row[key] is None:
        return doc.cell("-")
    show = {"loss": loss, "kl": spread}.get(key, percent)
    return doc.interval_cell(Interval(row[key], row[f"{key}_low"], row[f"{key}_high"]), show)
