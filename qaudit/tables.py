"""An audit as the API returns it: its tables, its evidence, its card in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.errors import MachineError
from qaudit.saved.codec import encode
from qaudit.saved.evidence import SavedAudit, read_saved
from qaudit.support.keys import install
from qaudit.types import FULL_PRECISION, AuditRecord, Gate, Interval, Pick, Plan, Verdict

if TYPE_CHECKING:
    import pandas


class Table(tuple[Any, ...]):
    """A tuple of frozen rows."""

    __slots__ = ()

    def to_records(self) -> list[dict[str, Any]]:
        """Return each row as a dictionary, with the names that it has in audit.json."""
        return [row if isinstance(row, dict) else encode(row) for row in self]

    def to_pandas(self) -> pandas.DataFrame:
        try:
            import pandas
        except ImportError as error:
            raise MachineError(
                "pandas is not installed", hint=f"{install('pandas')}, or use `.to_records()`"
            ) from error
        return pandas.DataFrame(self.to_records())


class _RowsOf:
    """A table of the record, or of its diagnostics, by the name of the attribute."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, audit: Audit | None, owner: type | None = None) -> Table:
        if audit is None:
            return self  # type: ignore[return-value]  # of the class, for `help`
        record = audit.record
        tables = record if hasattr(record, self._name) else record.diagnostics
        return Table(getattr(tables, self._name))


@dataclass(frozen=True, eq=False)
class Audit:
    """An audit: what was planned, measured, skipped and concluded.

    Every table is a tuple of frozen rows with `to_records()` and `to_pandas()`.
    """

    record: AuditRecord
    folder: Path  # where its evidence is
    name: str = ""  # as it was opened, for messages

    @property
    def plan(self) -> Plan:
        """What was measured, and its price."""
        return self.record.plan

    @property
    def pick(self) -> Pick | None:
        """The one subject and scheme to ship."""
        return self.record.pick

    @property
    def verdict(self) -> Verdict | None:
        """What ships of each bit class."""
        return self.record.verdict

    measurements = _RowsOf("One row for each subject, scheme and calibration draw.")
    tasks = _RowsOf("Accuracy on multiple-choice items.")
    comparisons = _RowsOf("Pairs of subjects, compared on the same documents.")
    strata = _RowsOf("One row for each subject, scheme and stratum, if documents are grouped.")
    positions = _RowsOf("One row for each subject, scheme and bin of positions in the window.")
    roles = _RowsOf("One row for each subject, scheme and role, if the text is conversations.")
    rollouts = _RowsOf("One row for each subject and scheme, if rollouts were scored.")
    rollout_roles = _RowsOf("One row for each subject, scheme and role of what rollouts wrote.")
    rollout_positions = _RowsOf("One row for each subject, scheme and place behind the prompt.")
    routing = _RowsOf("One row for each subject, scheme and layer of experts.")
    findings = _RowsOf("Rules applied to measurements.")
    subjects = _RowsOf("The checkpoints and soups that were measured.")
    skipped = _RowsOf("What was planned and not measured, and why.")

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with one row for each subject and scheme."""
        return Table(self.tidy()).to_pandas()

    def tidy(self) -> list[dict[str, Any]]:
        """Return one row for each subject and scheme: its place, losses, tasks and verdict.

        Intervals are three columns, `NAME`, `NAME_low` and `NAME_high`; `added_loss` is a fraction
        of the loss in full precision. What was not measured is None.
        """
        from qaudit.report.views import View

        view = View(self.record)
        classes = self.record.verdict.classes if self.record.verdict else ()
        verdicts = {(one.subject, one.scheme): one.status for one in classes}
        rows = []
        for subject in view.subjects:
            for scheme in (FULL_PRECISION, *view.schemes):
                if (score := view.score(subject.label, scheme)) is None:
                    continue
                first, alone = subject.first, subject.kind == "checkpoint"
                rows.append(
                    {
                        "subject": subject.label,
                        "kind": subject.kind,
                        "stage": first.stage if alone else None,
                        "step": first.step if alone else None,
                        "tokens_seen": first.tokens if alone else None,
                        "learning_rate": first.learning_rate if alone else None,
                        "scheme": scheme,
                        "bit_class": score.bit_class,
                        "bits_per_weight": score.bits_per_weight if score.documents else None,
                        **_bounds("loss", score.ce if score.documents else None),
                        **_bounds("added_loss", score.relative_error),
                        **_bounds("kl", score.kl),
                        **_bounds("agreement", score.top1_agreement),
                        **self._tasks_of(subject.label, scheme),
                        "documents": score.documents,
                        "tokens": score.tokens,
                        "verdict": verdicts.get((subject.label, scheme)),
                    }
                )
        return rows

    def _tasks_of(self, subject: str, scheme: str) -> dict[str, float | None]:
        rows = {(row.task, row.subject, row.scheme): row for row in self.record.tasks}
        columns: dict[str, float | None] = {}
        for name in dict.fromkeys(row.task for row in self.record.tasks):
            row = rows.get((name, subject, scheme))
            columns[f"{name}_accuracy"] = row.accuracy.estimate if row else None
            columns[f"{name}_flips"] = row.flips if row else None
        return columns

    def __getattr__(self, name: str) -> Any:
        """Return `environment`, `protocol` and `diagnostics` as they were recorded."""
        if name in ("environment", "protocol", "diagnostics"):
            return getattr(self.record, name)
        raise AttributeError(f"an audit has no `{name}`")

    @cached_property
    def evidence(self) -> SavedAudit:
        """The audit with its per-document losses, checked against their hashes."""
        return read_saved(self.folder)

    def save(self, folder: str | Path) -> Path:
        """Write audit.json, card.md, report.html, plots and evidence into a folder."""
        from qaudit.report.folder import must_take_files, write_folder
        from qaudit.saved.results import copy_evidence

        folder = Path(folder)
        must_take_files(folder)
        copy_evidence((*self.record.measurements, *self.record.tasks), self.folder, folder)
        write_folder(self.record, folder)
        return folder

    def _repr_markdown_(self) -> str:
        from qaudit.report.folder import render_card as render

        return render(self.record, pictures_at=None)

    def _repr_html_(self) -> str:
        from qaudit.report.folder import PICTURES, figures, render_notebook

        return render_notebook(self.record, figures(self.record, self.folder / PICTURES))


def _bounds(name: str, interval: Interval | None) -> dict[str, float | None]:
    values = (interval.estimate, interval.low, interval.high) if interval else (None, None, None)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def _of_verdict(verdict: Verdict, form: str) -> str:
    from qaudit.report import document as doc
    from qaudit.report import html, markdown, terminal
    from qaudit.report.verdict import answer, table

    headline, classes = answer(verdict).replace("`", ""), table(verdict.classes)
    if form == "text":
        return terminal.render(doc.Page("", doc.prose(headline), (classes,))).rstrip()
    if form == "md":
        return markdown.render_blocks((doc.paragraph(tuple(doc.strong(headline))), classes))
    head = html.element("p", html.element("strong", html.text(headline)))
    return head + html.Blocks({}).all([classes], "Verdict")


def _of_gate(gate: Gate) -> str:
    from qaudit.report.gate import render

    return render(gate, "md")


def _of_pick(pick: Pick) -> str:
    lines = [f"**Ship `{pick.subject}` at {pick.scheme}**: {pick.objective}."]
    if pick.runner_up is not None and pick.interval is not None:
        at = pick.interval
        lines.append(
            f"Its loss minus that of `{pick.runner_up}` at {pick.runner_up_scheme or pick.scheme}: "
            f"{at.estimate:.4f} [{at.low:.4f}, {at.high:.4f}] nats per token."
        )
    lines += [f"It may change: {change}." for change in pick.changes]
    return "\n\n".join(lines)


# Values import no report, so their views are added here, where the API begins.
for _kind, _name, _view in (
    (Verdict, "__str__", partialmethod(_of_verdict, "text")),
    (Verdict, "_repr_markdown_", partialmethod(_of_verdict, "md")),
    (Verdict, "_repr_html_", partialmethod(_of_verdict, "html")),
    (Gate, "_repr_markdown_", _of_gate),
    (Pick, "_repr_markdown_", _of_pick),
):
    setattr(_kind, _name, _view)
