"""Read back what an audit was made from, and sign it: what hashes cannot promise.

Evidence counts only if its bytes have the hash that is in the audit, and if the file itself names
the scheme and the draw that the audit has it for.

A hash finds damage. An editor who renews it is found by a signature alone: HMAC-SHA256, by the
key in `QAUDIT_SIGNING_KEY`, of the canonical form of `audit.json` and of the hash of every file
that its measurements and tasks name, which is all that is judged. The record of a signed
audit's export is signed too. The key is read from the environment, and is never printed or saved.
A holder of the key can sign anything.
"""

from __future__ import annotations

import hmac
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qaudit.core.registry import parse_scheme
from qaudit.errors import AuditError, SourceError, UsageError
from qaudit.judge import refuse_edited
from qaudit.judge.table import Measurements
from qaudit.saved.audits import from_json, read_audit, to_json
from qaudit.saved.codec import EDITED, FILE, encode, read_object, text_of
from qaudit.saved.exports import ExportRecord, export_document
from qaudit.saved.parts import UnitDocument
from qaudit.saved.results import OtherContentError, read_measurement, sha256_of
from qaudit.types import (
    FULL_PRECISION,
    AuditRecord,
    Measurement,
    MeasurementRow,
    Signature,
    Subject,
    TaskRow,
    WorkUnit,
    digest,
)
from qaudit.version import __version__
from qaudit.whole import write_whole


def must_be_of(measured: Measurement, subject: Subject, spec: str) -> None:
    """Raise ValueError for a measurement of another subject, configuration or scheme."""
    identity = measured.identity or {}
    if (measured.spec, identity.get("scheme")) != (spec, spec):
        raise ValueError(f"it is of `{measured.spec}` and not of `{spec}`")
    if identity.get("subject") != subject.content:
        raise ValueError(f"it is of other weights than those of `{subject.label}`")
    planned = subject.first.configuration_sha256
    runs_code = any(file.name.endswith(".py") for file in subject.first.settings)
    hashed = planned is not None and not planned.startswith("git:") and not runs_code
    if hashed and identity.get("model") != planned:
        raise ValueError(f"it is of another configuration than that of `{subject.label}`")


def must_be_pass(
    measured: Measurement, perturbed: bool, protocol: Mapping[str, Any], *, is_candidate: bool
) -> None:
    """Raise ValueError for a measurement that was computed otherwise, or on other text."""
    identity = measured.identity or {}
    if (",perturbed=" in str(identity.get("geometry"))) != perturbed:
        raise ValueError("it is perturbed, or is not, where the plan has it otherwise")
    is_first = measured.calibration_seed == protocol.get("calibration_seed")
    texts = [protocol.get(name) for name in ("corpus_sha256", "documents_sha256")]
    if is_candidate and "search_sha256" in protocol:
        texts = [protocol["search_sha256"]]
    if is_first and identity.get("corpus") not in texts:  # without rollouts where none are scored
        raise ValueError("it is of other text than the protocol names")


def must_be_complete(unit: WorkUnit, document: UnitDocument, seeds: Sequence[int]) -> None:
    """Raise ValueError where a record has neither results nor a reason of a scheme of its unit.

    `seeds` are those of the calibration text of its results, in their order.
    """
    if document.error:
        return
    if document.search is not None and len(document.search.members) < 2:
        return  # one checkpoint is best, and it has results of its own
    first = int(document.protocol.get("calibration_seed", 0))
    rows = zip(document.results, seeds, strict=True)
    results = Counter((result.spec, result.perturbed, seed - first) for result, seed in rows)
    for step in unit.passes:
        for spec in (*([FULL_PRECISION] if step.full_precision else []), *step.schemes):
            short = spec if spec == FULL_PRECISION else parse_scheme(spec).short
            if (
                not results[spec, step.perturbed, step.draw]
                and short not in document.failed_schemes
            ):
                raise ValueError(f"it has no result of {short}, and no reason")


_AGAIN = "run the same scan again: what is missing is measured again"


@dataclass(frozen=True, eq=False)
class SavedAudit:
    """An audit and the measurements it was made from."""

    audit: AuditRecord
    measurements: tuple[Measurement, ...]

    @cached_property
    def every_draw(self) -> Measurements:
        """All measurements, with every draw of calibration text."""
        confidence = self.audit.plan.recipe.confidence
        return Measurements.of(self.audit.subjects, self.measurements, confidence)

    @cached_property
    def table(self) -> Measurements:
        """What the verdict is about."""
        return self.every_draw.first_draws

    def checked(self) -> SavedAudit:
        refuse_edited(self.audit, self.every_draw, version=__version__)
        return self


def read_saved(path: Path) -> SavedAudit:
    """Read an output folder, or the `audit.json` in one, with all of its evidence."""
    audit = read_audit(path)
    folder = path if path.is_dir() else path.parent
    subjects = {subject.label: subject for subject in audit.subjects}
    tasks: dict[tuple[str, str], list[TaskRow]] = defaultdict(list)
    for row in audit.tasks:
        if row.evidence:
            tasks[row.cell].append(row)
    measurements = []
    for score in audit.measurements:
        measured = read_evidence(score, folder)
        of_tasks = [read_evidence(row, folder) for row in tasks[score.cell]]
        for each in (measured, *of_tasks):
            try:
                must_be_of(each, subjects[score.subject], score.spec)
            except ValueError as error:
                raise AuditError(
                    f"the evidence of `{score.subject}` under `{score.spec}` is another "
                    f"measurement's: {error}",
                    hint=EDITED,
                ) from error
        evidence = measured.evidence
        if of_tasks:
            parts = tuple(part for each in of_tasks for part in each.evidence.tasks)
            evidence = replace(evidence, tasks=parts)
        # Two names of the same weights share one file, which has one of them.
        label, scheme = score.subject, score.scheme
        measurements.append(replace(measured, subject=label, scheme=scheme, evidence=evidence))
    return SavedAudit(audit, tuple(measurements))


def read_evidence(row: MeasurementRow | TaskRow, folder: Path) -> Measurement:
    path = folder / row.evidence
    try:
        # The file itself may be a link, as in the shared cache: its bytes are hashed.
        inside = path.parent.resolve().is_relative_to(folder.resolve())
        if not inside or path.name in ("", ".."):
            raise SourceError(
                f"the evidence of `{row.subject}` under `{row.scheme}` is outside the audit",
                hint=EDITED,
            )
        return read_measurement(path, row.evidence_sha256)
    except OtherContentError as error:
        raise SourceError(
            f"`{path}` is not the evidence that the audit was made from", hint=_AGAIN
        ) from error
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise SourceError(f"`{path}` cannot be read: {error}", hint=_AGAIN) from error


def combine(audits: Mapping[str, SavedAudit]) -> SavedAudit:
    """Join audits of the same text and precision; equal labels get the names of their audits."""
    (first_name, first), *further = audits.items()
    for name, other in further:
        for setting in ("dtype", "context"):
            a, b = getattr(first.audit.plan, setting), getattr(other.audit.plan, setting)
            if a != b:
                raise UsageError(
                    f"`{first_name}` was measured with {setting} {a} and `{name}` with {b}",
                    hint="measure both alike; such numbers do not compare",
                )
    times = Counter(s.label for saved in audits.values() for s in saved.audit.subjects)

    def joined(label: str, rows: Callable[[SavedAudit], Iterable[Any]]) -> tuple[Any, ...]:
        return tuple(
            replace(row, **{label: f"{name}/{old}"}) if times[old] > 1 else row
            for name, saved in audits.items()
            for row in rows(saved)
            for old in (getattr(row, label),)
        )

    audit = replace(
        first.audit,
        subjects=joined("label", lambda saved: saved.audit.subjects),
        measurements=joined("subject", lambda saved: saved.audit.measurements),
    )
    return SavedAudit(audit, joined("subject", lambda saved: saved.measurements))


VARIABLE = "QAUDIT_SIGNING_KEY"
METHOD = "hmac-sha256"
SHORTEST = 32
"""Characters of a key: published signatures can be tried against guesses."""


def signing_key(option: str) -> bytes:
    """Return the key of the environment, or refuse one that is missing or easy to guess."""
    key = os.environ.get(VARIABLE, "")
    if len(key) < SHORTEST:
        state = f"has {len(key)} characters" if key else "is not set"
        raise UsageError(
            f"`{option}` needs a key of {SHORTEST} characters or more, and `{VARIABLE}` {state}",
            hint=f"make one: `export {VARIABLE}=$(openssl rand -hex 32)`, and keep it secret",
        )
    return key.encode()


def sign_audit(folder: Path) -> AuditRecord:
    """Write the signature of an audit into its `audit.json`, and return the audit."""
    key = signing_key("--set sign=true")
    document = read_object(folder / FILE, f"`{folder / FILE}`", EDITED)
    read_saved(folder)  # refuses evidence that is of something else
    value = _signature(document, folder, key)
    text = text_of({**document, "signature": {"method": METHOD, "value": value}})
    write_whole(folder / FILE, text)
    return from_json(text)


def must_be_signed(audit: AuditRecord, folder: Path, option: str = "--signed") -> None:
    """Refuse an audit that is not signed with the key of the environment, as it is now."""
    key = signing_key(option)
    document = read_object(folder / FILE, f"`{folder / FILE}`", EDITED)
    if audit.signature is None:
        raise AuditError(
            f"`{folder}` is not signed",
            hint=f"scan it again with `--set sign=true`, and `{VARIABLE}` set",
        )
    read_saved(folder)
    value = _signature(document, folder, key)
    same = to_json(from_json(text_of(document))) == to_json(audit)
    is_known = audit.signature.method == METHOD
    if not (same and is_known and hmac.compare_digest(value, audit.signature.value)):
        raise AuditError(
            f"the signature of `{folder}` is not of this key and these files",
            hint=f"it was edited after it was signed, or `{VARIABLE}` is another key",
        )


def has_key() -> bool:
    """Return whether the environment has a key, of any length."""
    return bool(os.environ.get(VARIABLE))


def may_sign(audit: AuditRecord | None, folder: Path) -> bool:
    """Return whether an export is to be signed; refuse a signed audit that was edited since."""
    if audit is None or audit.signature is None or not has_key():
        return False
    must_be_signed(audit, folder, "export")
    return True


def signed_export(record: ExportRecord) -> ExportRecord:
    value = _value(encode(record), signing_key("export"), "export")
    return replace(record, signature=Signature(METHOD, value))


def is_signed_export(record: ExportRecord, folder: Path) -> bool:
    """Return whether the record of an exported folder is signed with the environment's key."""
    if record.signature is None or record.signature.method != METHOD:
        return False
    value = _value(export_document(folder), signing_key("verify"), "export")
    return hmac.compare_digest(value, record.signature.value)


def _signature(document: dict[str, Any], folder: Path, key: bytes) -> str:
    files = {}
    for name in sorted({*_files_in(document)}):
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise AuditError(f"`{name}` is outside the audit `{folder}`", hint=EDITED)
        if not path.is_file():
            raise SourceError(f"there is no `{path}`, which the audit names", hint=EDITED)
        files[name] = sha256_of(path)
    return _value(document, key, files=files)


def _value(document: dict[str, Any], key: bytes, *before: str, **behind: Any) -> str:
    """Return the keyed hash of a document without its signature, and of what belongs to it."""
    body = {name: value for name, value in document.items() if name != "signature"}
    signed = [METHOD, *before, body, *behind.values()]
    return hmac.digest(key, digest(signed).encode(), "sha256").hex()


def _files_in(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for part in value:
            yield from _files_in(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name == "evidence" and isinstance(part, str) and part:
                yield part
            else:
                yield from _files_in(part)
