"""An audit as the API returns it: its tables, its evidence, its card in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.errors import MachineError
from qaudit.saved.codec import encode
from qaudit.saved.evidence import SavedAudit, read_saved
from qaudit.types import AuditRecord, Pick, Plan, Verdict

if TYPE_CHECKING:
    import pandas


class Table(tuple[Any, ...]):
    """A tuple of frozen rows."""

    __slots__ = ()

    def to_records(self) -> list[dict[str, Any]]:
        """Return each row as a dictionary, with the names that it has in audit.json."""
        return [encode(row) for row in self]

    def to_pandas(self) -> pandas.DataFrame:
        try:
            import pandas
        except ImportError as error:
            raise MachineError(
                "pandas is not installed", hint="pip install pandas, or use `.to_records()`"
            ) from error
        return pandas.DataFrame(self.to_records())


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

    @property
    def measurements(self) -> Table:
        """One row for each subject, scheme and calibration draw."""
        return Table(self.record.measurements)

    @property
    def pooled(self) -> Table:
        """One row for each subject and scheme, over all calibration draws."""
        return Table(self.record.pooled)

    @property
    def tasks(self) -> Table:
        """Accuracy on multiple-choice items."""
        return Table(self.record.tasks)

    @property
    def comparisons(self) -> Table:
        """Pairs of subjects, compared on the same documents."""
        return Table(self.record.comparisons)

    @property
    def strata(self) -> Table:
        """One row for each subject, scheme and stratum, if documents are grouped."""
        return Table(self.record.diagnostics.strata)

    @property
    def positions(self) -> Table:
        """One row for each subject, scheme and bin of positions in the window."""
        return Table(self.record.diagnostics.positions)

    @property
    def routing(self) -> Table:
        """One row for each subject, scheme and layer of experts."""
        return Table(self.record.diagnostics.routing)

    @property
    def findings(self) -> Table:
        """Rules applied to measurements."""
        return Table(self.record.findings)

    @property
    def subjects(self) -> Table:
        """The checkpoints and soups that were measured."""
        return Table(self.record.subjects)

    @property
    def skipped(self) -> Table:
        """What was planned and not measured, and why."""
        return Table(self.record.skipped)

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
        from qaudit.report.card import render

        return render(self.record, pictures_at=None)

    def _repr_html_(self) -> str:
        from qaudit.report.card import render_notebook

        return render_notebook(self.record)
