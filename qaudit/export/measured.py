"""What an audit measured of the linears that an export writes, and what is measured of others.

Where the weights that were made again are not those of the audit, they are a file of its own: the
pass that writes them measures them, and they are judged alone under the policy of the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from qaudit.core.scheme import Scheme
from qaudit.engine.kept_weights import KeptRest, LinearHashes, kept_groups, rest_sha256
from qaudit.engine.tasks import Machine, Task
from qaudit.errors import SourceError
from qaudit.export.choice import ExportChoice
from qaudit.judge import judge
from qaudit.policy import policy_named
from qaudit.saved.audits import to_json
from qaudit.saved.codec import FILE
from qaudit.saved.exports import kept_folder, key_of
from qaudit.saved.results import ResultStore, read_measurement, sha256_of
from qaudit.types import AuditRecord, Diagnostics, Measurement, MeasurementRow, Watch
from qaudit.version import __version__
from qaudit.whole import write_whole

_SAME = ("dtype", "device", "libraries", "numerics", "scheme_version")
"""Of an identity, what decides which codes the same weights and text give."""


def measured_hashes(choice: ExportChoice) -> dict[str, str]:
    """Return the hashes of linears, by BLOCK.NAME."""
    measured = _measured(choice)
    return measured.linears_sha256 if measured else {}


def rest_hash(choice: ExportChoice) -> str:
    """Return the hash of all tensors that are not quantized."""
    measured = _measured(choice)
    return measured.rest_sha256 if measured else ""


def stored_linears(hashes: Mapping[str, str], names: Callable[[int, str], str]) -> dict[str, str]:
    stored = {}
    for place, sha256 in hashes.items():
        block, _, name = place.partition(".")
        stored[names(int(block), f"{name}.weight").removesuffix(".weight")] = sha256
    return stored


def other_linears(
    hashes: Mapping[str, str], written: Mapping[str, str], names: Callable[[int, str], str]
) -> tuple[str, ...]:
    """Return the linears that were written and are not those whose hashes an audit has."""
    stored = stored_linears(hashes, names)
    return tuple(sorted(n for n in stored.keys() | written if stored.get(n) != written.get(n)))


def is_made_alike(choice: ExportChoice, task: Task, machine: Machine) -> bool:
    """Return whether the audit was measured with what decides the codes here."""
    measured = _measured(choice)
    if measured is None or not measured.linears_sha256 or measured.identity is None:
        return False
    identity = vars(task.identity(choice.scheme, machine))
    return all(measured.identity.get(name) == identity[name] for name in _SAME)


@dataclass(frozen=True, eq=False)
class Kept:
    """Weights that the scan kept, by their hashes those that were judged."""

    folder: Path
    rest: KeptRest
    measured: Measurement


def kept_as_judged(choice: ExportChoice, watch: Watch) -> Kept | None:
    """Return what the scan kept of these weights; None, with a sentence, for any others."""
    measured = _measured(choice)
    if measured is None or measured.identity is None:
        return None
    evidence = choice.folder / "evidence"
    folder = kept_folder(evidence, key_of(measured))
    beside = kept_folder(evidence, choice.subject.content)
    if not folder.is_dir() or not beside.is_dir():  # towers, which nothing reads, are not kept
        return None
    try:
        rest = KeptRest(beside)
        if _hashes_of_kept(choice.scheme, folder, rest) == (
            measured.linears_sha256,
            measured.rest_sha256,
        ):
            return Kept(folder, rest, measured)
        watch.note("the kept weights are not, or not all, those that were judged: made again")
    except SourceError as error:
        watch.note(f"{error.message}: made again")
    return None


def _hashes_of_kept(scheme: Scheme, folder: Path, rest: KeptRest) -> tuple[dict[str, str], str]:
    with LinearHashes() as hashes:
        for linears, quantized in kept_groups(folder):
            hashes.observe(scheme, linears, quantized)
        return hashes.of(scheme.spec), rest_sha256(rest, rest.kept)


def _measured(choice: ExportChoice) -> Measurement | None:
    """Return the measurement of the first draw, which an export writes; None without evidence."""
    rows = [row for row in _rows(choice) if (choice.folder / row.evidence).is_file()]
    if not rows:
        return None
    row = min(rows, key=lambda each: each.calibration_seed)
    return read_measurement(choice.folder / row.evidence, row.evidence_sha256)


def _rows(choice: ExportChoice) -> Sequence[MeasurementRow]:
    cell = (choice.subject.label, choice.scheme.spec)
    rows = choice.record.measurements if choice.record else ()
    return [row for row in rows if (row.subject, row.spec) == cell]


def judged_alone(
    choice: ExportChoice,
    task: Task,
    measured: Sequence[Measurement],
    machine: Machine,
    folder: Path,
) -> ExportChoice:
    """Write an audit of the weights that a pass wrote into a folder; return the choice with it."""
    assert choice.record is not None
    before, plan = choice.record, choice.record.plan
    (bits,) = {m.bit_class for m in measured if m.spec == choice.scheme.spec}
    judgement = judge(
        (choice.subject,),
        measured,
        _write_evidence(task, measured, machine, folder),
        confidence=plan.recipe.confidence,
        policy=policy_named(plan.recipe.policy),
        today=datetime.now(UTC).date(),
        planned=(choice.subject,),
        bits=(str(bits),),
    )
    dtype = str(machine.dtype).removeprefix("torch.")
    alone = replace(
        plan,
        recipe=replace(plan.recipe, bits=(str(bits),)),
        subjects=(choice.subject,),
        specs=(choice.scheme.spec,),
        shipped=(),
        device=machine.device.type,
        dtype=dtype,
    )
    record = AuditRecord(
        plan=alone,
        environment={**before.environment, "device": str(machine.device)},
        protocol=before.protocol,
        subjects=(choice.subject,),
        skipped=(),
        qaudit=__version__,
        diagnostics=Diagnostics(noise=judgement.noise),
        **judgement.fields,
    )
    write_whole(folder / FILE, to_json(record))
    return replace(choice, record=record, audit_file=folder / FILE)


def _write_evidence(
    task: Task, measured: Sequence[Measurement], machine: Machine, folder: Path
) -> dict[tuple[str, str, int | str], tuple[str, str]]:
    store = ResultStore(folder / "evidence")
    files: dict[tuple[str, str, int | str], tuple[str, str]] = {}
    for m in measured:
        identity = task.identity(task.streams[m.spec], machine)
        path = store.write(m, identity.key, identity).path
        at = (path.relative_to(folder).as_posix(), sha256_of(path))
        files[m.subject, m.spec, m.calibration_seed] = at
    return files
