"""Is an exported folder what was audited? Its bytes first, then how it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qaudit.errors import AuditError, MachineError
from qaudit.export.choice import Choice, of_audit
from qaudit.export.weights_check import WeightsCheck, check_weights
from qaudit.policy import policy_named
from qaudit.saved.evidence import read_saved
from qaudit.saved.exports import ExportRecord, read_export
from qaudit.types import Evidence, Interval, Watch


@dataclass(frozen=True)
class AsItRuns:
    """Loss and KL divergence beside those of the audit, in nats per token."""

    runtime: str
    policy: str
    loss_tolerance: float
    kl_tolerance: float
    documents: int
    audited: Interval
    running: Interval
    difference: Interval
    audited_kl: float | None
    running_kl: float | None

    @property
    def agrees(self) -> bool:
        return abs(self.difference.estimate) <= self.loss_tolerance and (
            self.kl_difference is None or abs(self.kl_difference) <= self.kl_tolerance
        )

    @property
    def kl_difference(self) -> float | None:
        """Return the KL divergence as it runs minus that of the audit; None: not measured."""
        if self.running_kl is None or self.audited_kl is None:
            return None
        return self.running_kl - self.audited_kl


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


def verify(
    folder: Path, audit: Path | None, runtime: str | None, policy: str | None, watch: Watch
) -> Verification:
    """Compare a folder with the weights, and the losses, that were measured.

    How far losses may differ is in the policy: the named one, or that of the audit.
    """
    held_to = None if policy is None else policy_named(policy)
    record = read_export(folder)
    choice = None if audit is None else _audited(record, audit, watch)
    if choice is not None and held_to is None:
        held_to = policy_named(choice.plan.recipe.policy)
    weights = check_weights(folder, record, watch)
    if choice is None:
        return Verification(record, weights, None, "name the audit with `--audit` to run it")
    if weights.differences:
        return Verification(record, weights, None, "its weights are not those of the audit")
    from qaudit.export.runs import run
    from qaudit.export.runtimes import is_plain, runtime_for

    program = runtime_for(record.format, runtime)
    if missing := program.missing(record.format):
        why = f"{' and '.join(missing)} is not installed"
        if runtime is not None:
            raise MachineError(
                f"`{runtime}` cannot run it: {why}", hint=f"pip install {' '.join(missing)}"
            )
        return Verification(record, weights, None, why)
    assert audit is not None and held_to is not None
    evidence = _evidence(record, audit)
    measured = run(choice, evidence, folder, program, watch)
    allowed, plain = held_to.verify, is_plain(program, folder)
    as_it_runs = AsItRuns(
        program.described(record.format),
        held_to.name,
        allowed.plain if plain else allowed.loss,
        allowed.plain if plain else allowed.kl,
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
