"""What is exported: a subject under a scheme, of an audit or of a target."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qaudit.core.mixture import Mixture, Table
from qaudit.core.registry import parse_scheme, parse_schemes
from qaudit.core.scheme import Scheme
from qaudit.errors import NotShipping, UsageError
from qaudit.hub import Hub, open_hub
from qaudit.planning.prepare import prepare
from qaudit.planning.resolve import reads_hub
from qaudit.report.document import status_in_words
from qaudit.report.verdict import label, what
from qaudit.saved.audits import read_audit
from qaudit.saved.codec import FILE
from qaudit.saved.exports import read_table
from qaudit.saved.parts import is_unfinished
from qaudit.saved.results import sha256_of
from qaudit.settings import SEARCHED_AT, RunOptions
from qaudit.support.keys import nearest
from qaudit.types import AuditRecord, ClassVerdict, Plan, Subject, Watch


@dataclass(frozen=True, eq=False)
class ExportChoice:
    """A subject and a scheme, the plan whose text calibrates it, and the audit it is of."""

    subject: Subject
    scheme: Scheme
    plan: Plan
    options: RunOptions
    hub: Hub | None
    record: AuditRecord | None = None
    audit_file: Path | None = None
    table: Table = field(default_factory=dict)  # bits of each linear of a mixture
    is_named: bool = False  # on the command line, and so exported whatever its verdict is
    repo: str | None = None  # `org/name` on the Hub, where it goes

    @property
    def folder(self) -> Path:
        return Path() if self.audit_file is None else self.audit_file.parent

    @property
    def audit_sha256(self) -> str | None:
        return None if self.audit_file is None else sha256_of(self.audit_file)

    @property
    def ships(self) -> ClassVerdict | None:
        """The line of the verdict that names this subject and scheme."""
        verdict = self.record.verdict if self.record else None
        label = (self.subject.label, self.scheme.short)
        classes = verdict.classes if verdict else ()
        return next((line for line in classes if (line.subject, line.scheme) == label), None)


def audit_file_of(source: str) -> Path | None:
    """Return the audit.json that a source names; None for a target."""
    path = Path(source)
    if path.is_dir() and ((path / FILE).is_file() or is_unfinished(path)):
        return path / FILE
    return path if path.name == FILE else None


def of_audit(
    file: Path, bits: str | None, subject: str | None, scheme: str | None, watch: Watch
) -> ExportChoice:
    record = read_audit(file)
    chosen = None if subject is None else _subject(subject, record.subjects)
    wanted = None if scheme is None else _measured_scheme(scheme, record)
    if wanted is not None:
        classes = {row.spec: row.bit_class for row in record.measurements}
        name = classes.get(wanted.spec, wanted.bit_class)
        if bits not in (None, name):
            of_class = {row.scheme: 0 for row in record.measurements if row.bit_class == bits}
            raise UsageError(
                f"{wanted.short} is of the class `{name}`, and `--bits {bits}` asks for another",
                hint=f"of `{bits}` the audit has {', '.join(of_class) or 'nothing'}; or add "
                f"`--bits {name}`",
            )
        bits = name
    is_named = chosen is not None and wanted is not None
    if chosen is None or wanted is None:
        chosen, wanted = _what_ships(record, bits, chosen, wanted)
    plan = record.plan
    hub = open_hub(watch=watch) if reads_hub(plan, chosen) else None
    cell = (chosen.label, wanted.spec)
    rows = [row for row in record.measurements if (row.subject, row.spec) == cell]
    table = min(rows, key=lambda row: row.calibration_seed).mixture if rows else {}
    return ExportChoice(chosen, wanted, plan, RunOptions(), hub, record, file, table, is_named)


def of_target(
    target: str, subject: str | None, scheme: str | None, settings: dict[str, Any], watch: Watch
) -> ExportChoice:
    """Choose the one subject of a target, or the named one, under a scheme that is named."""
    if scheme is None:
        raise UsageError(
            f"`{target}` is no audit, so that nothing says which scheme ships",
            hint=f"name one, as `--scheme {SEARCHED_AT}`, or export an audit's folder",
        )
    wanted = parse_scheme(scheme)
    prepared = prepare([target], {**settings, "schemes": (wanted.spec,)}, watch)
    subjects = prepared.plan.subjects
    if subject is None and len(subjects) > 1:
        raise UsageError(
            f"`{target}` has {len(subjects)} checkpoints and soups, and one is exported",
            hint=f"name it with `--subject`, as `--subject {subjects[-1].label}`",
        )
    chosen = _subject(subject or subjects[0].label, subjects)
    (pinned,) = parse_schemes(prepared.plan.specs)
    table = (
        read_table(Path(wanted.table)) if isinstance(wanted, Mixture) and pinned != wanted else {}
    )
    return ExportChoice(chosen, pinned, prepared.plan, prepared.options, prepared.hub, table=table)


def _what_ships(
    record: AuditRecord, bits: str | None, subject: Subject | None, scheme: Scheme | None
) -> tuple[Subject, Scheme]:
    """Return what ships of a bit class, which must be the subject or the scheme that is named."""
    classes = {row.bit_class: row for row in record.verdict.classes} if record.verdict else {}
    if not classes:
        raise UsageError(
            "the audit has no verdict, because nothing quantized was measured",
            hint="name `--subject` and `--scheme`, or scan with `--schemes`",
        )
    if bits is None and len(classes) > 1:
        raise UsageError(
            f"the audit decides {len(classes)} classes of bits, and one file holds one",
            hint=f"add {' or '.join(f'`--bits {name}`' for name in classes)}",
        )
    decision = classes.get(bits or next(iter(classes)))
    if decision is None:
        raise UsageError(
            f"the audit decides nothing of {bits} bits", hint=f"it has {', '.join(classes)}"
        )
    if decision.subject is None or decision.scheme is None:
        raise UsageError(
            f"nothing of {label(decision)} was measured, so that nothing ships",
            hint="run the scan again to complete it, or name `--subject` and `--scheme`",
        )
    decided = _subject(decision.subject, record.subjects), _measured_scheme(decision.scheme, record)
    named = subject or decided[0], scheme or decided[1]
    options = f"--subject {shlex.quote(named[0].label)} --scheme {named[1].short}"
    hint = f"name both to export it all the same: `{options}`"
    if decision.status != "ship":
        status = status_in_words(decision.status).upper()
        raise NotShipping(
            f"nothing of {label(decision)} ships: the verdict is {status}, "
            f"{'; '.join((*decision.breaches, *decision.needs)) or 'by the policy'}",
            hint=hint,
        )
    if named != decided:
        raise NotShipping(
            f"`{named[0].label}` at {named[1].short} is not what ships of {label(decision)}, "
            f"which is {what(decision)}",
            hint=hint,
        )
    return decided


def _subject(label: str, subjects: Sequence[Subject]) -> Subject:
    labelled = {subject.label: subject for subject in reversed(subjects)}
    if label not in labelled:
        near = nearest(label, [subject.label for subject in subjects])
        raise UsageError(f"there is no subject `{label}`", hint=near)
    if labelled[label].is_search:
        raise UsageError(
            f"`{label}` is a search that found no soup yet",
            hint="scan it first, and export the audit",
        )
    return labelled[label]


def _measured_scheme(text: str, record: AuditRecord) -> Scheme:
    specs = {row.scheme: row.spec for row in record.measurements}
    spec = specs.get(text) or parse_scheme(text).spec
    measured = {scheme.spec: scheme for scheme in parse_schemes(record.plan.specs)}
    if spec not in measured:
        raise UsageError(
            f"`{text}` was not measured in this audit",
            hint=f"measured are {', '.join(scheme.short for scheme in measured.values())}",
        )
    return measured[spec]
