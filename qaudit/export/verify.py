"""Is an exported folder what was audited? Its bytes first, then how it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qaudit.errors import AuditError, MachineError
from qaudit.export.choice import Choice, of_audit
from qaudit.export.weights_check import WeightsCheck, check_weights
from qaudit.saved.evidence import read_saved
from qaudit.saved.exports import ExportRecord, read_export
from qaudit.types import Evidence, Interval, Watch


@dataclass(frozen=True)
class AsItRuns:
    """Loss and KL divergence beside those of the audit, in nats per token."""

    runtime: str
    tolerance: float
    documents: int
    audited: Interval
    running: Interval
    difference: Interval
    audited_kl: float | None
    running_kl: float | None

    @property
    def agrees(self) -> bool:
        return abs(self.difference.estimate) <= self.tolerance


@dataclass(frozen=True)
class Verification:
    """What was compared, and whether the folder is what was audited."""

    record: ExportRecord
    weights: WeightsCheck
    run: AsItRuns | None
    why_not_run: str | None = None

    @property
    def holds(self) -> bool:
        return not self.weights.differences and (self.run is None or self.run.agrees)


def verify(folder: Path, audit: Path | None, runtime: str | None, watch: Watch) -> Verification:
    """Compare a folder with the weights, and the losses, that were measured."""
    record = read_export(folder)
    choice = None if audit is None else _audited(record, audit, watch)
    weights = check_weights(folder, record, watch)
    if choice is None:
        return Verification(record, weights, None, "name the audit with `--audit` to run it")
    if weights.differences:
        return Verification(record, weights, None, "its weights are not those of the audit")
    from qaudit.export.runs import run
    from qaudit.export.runtimes import runtime_for, tolerance

    program = runtime_for(record.format, runtime)
    if missing := program.missing(record.format):
        why = f"{' and '.join(missing)} is not installed"
        if runtime is not None:
            raise MachineError(
                f"`{runtime}` cannot run it: {why}", hint=f"pip install {' '.join(missing)}"
            )
        return Verification(record, weights, None, why)
    assert audit is not None
    evidence = _evidence(record, audit)
    measured = run(choice, evidence, folder, program, watch)
    as_it_runs = AsItRuns(
        program.described(record.format),
        tolerance(folder),
        int((evidence.tokens > 0).sum()),
        measured.audited,
        measured.running,
        measured.difference,
        measured.audited_kl,
        measured.running_kl,
    )
    return Verification(record, weights, as_it_runs)


def _audited(record: ExportRecord, file: Path, watch: Watch) -> Choice:
    """Return what an audit measured of these weights; refuse another audit."""
    choice = of_audit(file, None, record.subject, record.scheme, watch)
    if record.audit_sha256 not in (None, choice.audit_sha256):
        raise AuditError(
            f"`{file}` is not the audit that was exported: its sha256 is another",
            hint="name that audit, or export this one",
        )
    if choice.subject.content != record.content or choice.scheme.spec != record.spec:
        raise AuditError(
            f"`{file}` measured other weights of `{record.subject}` than were exported",
            hint="name the audit of these weights",
        )
    return choice


def _evidence(record: ExportRecord, file: Path) -> Evidence:
    """Return the losses of the draw that was exported."""
    for one in read_saved(file).measurements:
        if (one.subject, one.spec, one.calibration_seed) == (
            record.subject,
            record.spec,
            record.calibration_seed,
        ):
            return one.evidence
    raise AuditError(
        f"`{file}` has no measurement of `{record.subject}` at {record.scheme}",
        hint="run the scan again to complete it",
    )
