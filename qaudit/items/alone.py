"""An audit of imported answers alone: tasks of a base and of quantized files, and no scan.

It has evidence of no documents, so that there is no loss and no KL divergence: nothing is chosen,
and rules about tasks judge every scheme that was imported. Any other rule is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from qaudit.core.registry import parse_scheme
from qaudit.errors import UsageError
from qaudit.items.answered import paired, read_answers
from qaudit.judge import EvidenceFiles, judge
from qaudit.judge.tasks import same_items
from qaudit.policy import policy_named
from qaudit.report.folder import must_take_files, write_folder
from qaudit.saved.parts import one_writer
from qaudit.saved.results import IMPORTED, Identity, ResultStore, sha256_of, slug_of
from qaudit.settings import Recipe
from qaudit.types import (
    FULL_PRECISION,
    AuditRecord,
    Checkpoint,
    Evidence,
    Measurement,
    Plan,
    Ref,
    Subject,
    TaskEvidence,
)
from qaudit.version import __version__

_NOTE = "its answers were imported, and its weights were not measured"


def begin_audit(
    out: Path,
    base: Sequence[Path],
    quantized: Mapping[str, Sequence[Path]],
    name: str,
    metric: str | None,
) -> None:
    """Write an audit of answers alone; `name` is what gave them."""
    must_take_files(out)
    if out.exists() and any(out.iterdir()):
        raise UsageError(
            f"`{out}` is not empty, and `--alone` begins an audit",
            hint="name a new folder, or leave out `--alone` to import into the audit that is there",
        )
    measured = _measured(base, quantized, name, metric)
    subject = Subject(name, ((Checkpoint(Ref(name), name, notes=(_NOTE,)), 1.0),))
    with one_writer(out):
        files = _files(out, subject, measured)
        write_folder(_record(subject, measured, files), out)


def _measured(
    base: Sequence[Path], quantized: Mapping[str, Sequence[Path]], name: str, metric: str | None
) -> list[Measurement]:
    of_base = read_answers(base)
    full: dict[str, TaskEvidence] = {}
    streams: dict[str, list[TaskEvidence]] = {}
    for text, places in quantized.items():
        tasks: list[TaskEvidence] = []
        if streams.setdefault(parse_scheme(text).spec, tasks) is not tasks:
            raise UsageError(f"`{text}` is named twice", hint="name each scheme by one text")
        for before, after in paired(of_base, read_answers(places), metric):
            if not same_items(full.setdefault(before.task, before), before):
                raise UsageError(
                    f"the answers to `{before.task}` are marked by other metrics under {text}",
                    hint="name one that all files have: `--metric NAME`",
                )
            tasks.append(after)
    return [
        _measurement(name, FULL_PRECISION, [*full.values()]),
        *(_measurement(name, spec, tasks) for spec, tasks in streams.items()),
    ]


def _measurement(name: str, spec: str, tasks: Sequence[TaskEvidence]) -> Measurement:
    none = np.zeros(0, np.int64)
    evidence = Evidence((), np.zeros(0), none, none, (), tasks=tuple(tasks))
    short = spec if spec == FULL_PRECISION else parse_scheme(spec).short
    return Measurement(name, short, spec, evidence, 0.0, 0.0, notes=(_NOTE,))


def _files(
    out: Path, subject: Subject, measured: Sequence[Measurement]
) -> dict[tuple[str, str, int | str], tuple[str, str]]:
    """Write the evidence, a file for each stream and for each of its tasks; return the hashes."""
    files: dict[tuple[str, str, int | str], tuple[str, str]] = {}
    for each in measured:
        tasks: tuple[TaskEvidence | None, ...] = (None, *each.evidence.tasks)
        for task in tasks:
            folder = out / "evidence" / (f"{IMPORTED}/{slug_of(task.task)}" if task else "")
            evidence = replace(each.evidence, tasks=(task,) if task else ())
            identity = _identity(subject, each, task)
            filed = ResultStore(folder).write(
                replace(each, evidence=evidence), identity.key, identity
            )
            place = filed.path.relative_to(out).as_posix()
            files[each.subject, each.spec, task.task if task else 0] = place, sha256_of(filed.path)
    return files


def _identity(subject: Subject, measured: Measurement, task: TaskEvidence | None) -> Identity:
    """Return what evidence is of: answers to items, by weights that nothing was read of."""
    imported = task.imported if task else None
    return Identity(
        subject=subject.content,
        model="",
        scheme=measured.spec,
        scheme_version=0,
        corpus=imported.items_sha256 if imported else "",
        geometry=f"imported: {imported.about}" if imported else "imported",
        checks="",
        dtype="",
        device="",
        numerics=0,
        libraries="",
    )


def _record(subject: Subject, measured: Sequence[Measurement], files: EvidenceFiles) -> AuditRecord:
    """Return the audit, judged by the policy of a scan that names none."""
    specs = tuple(each.spec for each in measured if each.spec != FULL_PRECISION)
    schemes = tuple(each.scheme for each in measured if each.spec != FULL_PRECISION)
    recipe = Recipe((subject.label,), schemes)
    now = datetime.now(UTC)
    judgement = judge(
        (subject,),
        measured,
        files,
        confidence=recipe.confidence,
        policy=policy_named(recipe.policy),
        today=now.date(),
        planned=(subject,),
    )
    plan = Plan(  # nothing was planned: no weights were opened, and no text was read
        recipe=recipe, subjects=(subject,), specs=specs, device="", dtype="", context=0,
        parameters=0, blocks=0, nbytes_read=0, nbytes_memory=0, nbytes_memory_fixed=0,
        nbytes_memory_available=0, streams=0, seconds_low=0, seconds_high=0,
    )  # fmt: skip
    return AuditRecord(
        plan=plan,
        environment={"began": now.isoformat(timespec="seconds")},
        protocol={"notes": [_NOTE]},
        subjects=(subject,),
        measurements=judgement.measurements,
        tasks=judgement.tasks,
        comparisons=(),
        findings=judgement.findings,
        pick=None,
        skipped=(),
        verdict=judgement.verdict,
        qaudit=__version__,
    )
