"""A subject under a scheme -> a folder that runtimes load: the weights that were measured.

Weights that the scan kept are packed as they are. Otherwise the engine's pass quantizes again, with
the first draw of calibration text, and every block is packed and written when it is done. The
hashes of the audit tell whether these are the weights that were judged: where they are not, kept
weights are made again, and the pass that makes others measures them (`measured`). Unfinished work
is in a hidden folder beside the result, from which the same command resumes; the result is made
under another name and renamed when it is whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from qaudit.checkpoints.stamps import folder_of, refuse_changed_settings
from qaudit.core.scheme import Scheme
from qaudit.downloads.downloads import Downloads
from qaudit.engine.block_pass import open_weights
from qaudit.engine.kept_weights import kept_groups
from qaudit.engine.measure import quantize_only, send
from qaudit.engine.tasks import Machine, Task
from qaudit.errors import NotShipping, UsageError
from qaudit.executors.ready import Ready, make_ready
from qaudit.export.choice import ExportChoice
from qaudit.export.contents import EVIDENCE
from qaudit.export.folder import Alone, Origin, Work, dense_of, write_export_folder
from qaudit.export.measured import (
    is_made_alike,
    judged_alone,
    kept_as_judged,
    measured_hashes,
    other_linears,
)
from qaudit.export.parts import Continued, Parts
from qaudit.export.refusals import must_be_the_text, must_have_names, try_format
from qaudit.export.soup import note_doubts
from qaudit.export.unfinished import begun_folder, must_be_new
from qaudit.formats.packing import Format
from qaudit.formats.registry import format_named
from qaudit.model.remote import is_remote
from qaudit.model.stored_names import Names
from qaudit.planning.mixtures import write_table
from qaudit.planning.resolve import whole
from qaudit.planning.survey import refuse
from qaudit.saved.audits import read_audit
from qaudit.saved.exports import ExportRecord, key_of, read_export
from qaudit.saved.signature import may_sign
from qaudit.support.sizes import size
from qaudit.types import SILENT, Measurement, Watch

SHARD_NBYTES = 2 * 10**9


@dataclass(frozen=True, eq=False)
class _Made(Work):
    """One whose weights are quantized again."""

    task: Task
    machine: Machine


def export_quantized(
    choice: ExportChoice,
    form: str,
    out: Path,
    *,
    shard_nbytes: int = SHARD_NBYTES,
    converter: Path | None = None,
    watch: Watch = SILENT,
) -> Path:
    packing = format_named(form, choice.scheme)
    packing.use(converter)
    must_be_new(out)
    may_sign(choice.record, choice.folder)  # refused before hours go into what it would sign
    try_format(choice.scheme, packing)
    members = [checkpoint for checkpoint, _ in choice.subject.members]
    refuse(members, allow_pickle=choice.options.allow_pickle, trust_remote_code=False)
    note_doubts(choice.subject, watch)
    if _export_kept(choice, packing, out, shard_nbytes, watch):
        return out
    ready = make_ready(choice.plan, choice.options, choice.hub)
    _must_be_exportable(choice, packing, ready)
    text, schemes = ready.corpus.draws[0], (choice.scheme,)
    task = Task.unplanned(choice.subject, text, schemes, full_precision=False)
    everything = whole(choice.subject)  # towers, too, which are copied
    with Downloads(choice.hub, (everything,)) as downloads, downloads.ready(everything):
        task = replace(task, folder=downloads.folder)
        weights = open_weights(
            everything, allow_pickle=choice.options.allow_pickle, folder=downloads.folder
        )
        origin = Origin(
            key=task.identity(choice.scheme, ready.machine).key,
            dtype=str(ready.machine.dtype).removeprefix("torch."),
            device=ready.machine.device.type,
            calibration_seed=text.protocol.calibration_seed,
            corpus_sha256=text.sha256,
        )
        work = _Made(choice, packing, origin, out, watch, task, ready.machine)
        with begun_folder(out, work.identity) as begun:
            work = replace(work, task=task.with_tables(begun))
            for path in work.task.tables.values() if choice.table else ():
                write_table(choice.table, path)
            write_export_folder(work, weights, begun, shard_nbytes, partial(_made_as_audited, work))
    _must_ship(read_export(out), choice, out)
    return out


def _must_be_exportable(choice: ExportChoice, form: Format, ready: Ready) -> None:
    """Refuse what this machine or the format cannot hold, before weights are downloaded."""
    if choice.subject.label in ready.refused:
        raise ready.refused[choice.subject.label]
    must_be_the_text(choice, ready.corpus.sha256)
    if is_remote(folder_of(choice.subject.first)):
        raise UsageError(
            f"`{choice.subject.label}` is code of its own, which no runtime loads quantized",
            hint="export a model of a family that transformers has",
        )
    if choice.hub is not None and choice.subject.first.commit is not None:
        must_have_names(choice, choice.hub, form)


def _export_kept(
    choice: ExportChoice, form: Format, out: Path, shard_nbytes: int, watch: Watch
) -> bool:
    """Write the weights that the scan kept; return whether they are there and as judged.

    A format that is made from the checkpoint's files needs these, and is made again.
    """
    kept = kept_as_judged(choice, watch) if form.has_settings else None
    if kept is None:
        return False
    for checkpoint, _ in choice.subject.members:
        if choice.hub is not None and checkpoint.commit is not None:
            choice.hub.fetcher.settings(checkpoint, code=False)
        refuse_changed_settings(checkpoint)
    identity = kept.measured.identity or {}
    origin = Origin(
        key=f"kept {key_of(kept.measured)}",
        dtype=str(identity["dtype"]).removeprefix("torch."),
        device=str(identity["device"]),
        calibration_seed=kept.measured.calibration_seed,
        corpus_sha256=str(identity["corpus"]),
    )

    def pack(parts: Parts, _: Names) -> None:
        for linears, quantized in kept_groups(kept.folder):
            parts.enter(linears.block)
            parts.watch(choice.scheme, linears, quantized)
        parts.end_block()
        parts.add_rest()

    work = Work(choice, form, origin, out, watch)
    with begun_folder(out, work.identity) as begun:
        write_export_folder(work, kept.rest, begun, shard_nbytes, pack)
    watch.note("written from the weights that the scan kept")
    return True


def _made_as_audited(work: _Made, parts: Parts, names: Names) -> Alone | None:
    """Quantize and write every block; return what judges weights that no audit judged."""
    measured = _measured_if_other(work, parts, names)
    if not measured:
        return None
    choice, task = work.choice, _evaluating(work.task)
    return lambda folder: judged_alone(choice, task, measured, work.machine, folder)


def _measured_if_other(work: _Made, parts: Parts, names: Names) -> tuple[Measurement, ...]:
    choice, hashes = work.choice, measured_hashes(work.choice)
    if choice.record is None:
        return _quantize(work, parts)
    if not is_made_alike(choice, work.task, work.machine):
        nbytes = sum(c.nbytes for c, _ in choice.subject.members if c.commit is not None)
        fetched = f", for which up to {size(nbytes)} are downloaded" if nbytes else ""
        why = "other libraries, or on another device or in another dtype"
        work.watch.note(
            f"the audit was made with {why if hashes else 'no hashes of linears'}: the file is "
            f"measured while it is written{fetched}"
        )
        return _measure(work, parts, hashes, names)
    _quantize(work, parts)
    if not other_linears(hashes, dense_of(parts), names):
        return ()
    work.watch.note("this machine rounds otherwise than that of the audit: quantized once more")
    return _measure(work, parts, hashes, names)


def _measure(
    work: _Made, parts: Parts, hashes: dict[str, str], names: Names
) -> tuple[Measurement, ...]:
    """Quantize from the first block on, and measure; return nothing if the audit judged it all."""
    parts.remove()
    measured = _quantize(work, parts, measured=True)
    differing = other_linears(hashes, dense_of(parts), names)
    if hashes and not differing:
        return ()
    if hashes:
        count = f"{len(differing)} of {len(hashes)}"
        work.watch.note(f"{count} linears are not those of the audit: the file is judged alone")
    return measured


def _quantize(work: _Made, parts: Parts, *, measured: bool = False) -> tuple[Measurement, ...]:
    continued = cast(Scheme, Continued(work.choice.scheme, parts))
    rows: dict[str, Measurement] = {}
    if measured:
        task = replace(_evaluating(work.task), schemes=(continued,))
        rows = send(task, work.machine, work.watch.block, parts.watch)
    else:
        quantize_only(work.task, (continued,), work.machine, work.watch.block, parts.watch)
    parts.end_block()
    parts.add_rest()
    return tuple(rows.values())


def _evaluating(task: Task) -> Task:
    """Return the pass with full precision beside the scheme, without items of tasks."""
    return replace(task, corpus=task.corpus.of_tasks(())).changed(full_precision=True)


def _must_ship(record: ExportRecord, choice: ExportChoice, out: Path) -> None:
    """Raise NotShipping where a file that was judged alone does not ship, unless it is named."""
    if choice.is_named or record.audit_sha256 in (None, choice.audit_sha256):
        return
    alone = read_audit(out / EVIDENCE).verdict
    if alone is not None and alone.status != "ship":
        (decision,) = alone.classes
        raise NotShipping(
            f"the file in `{out}` is not the one that the audit judged, and measured by itself its "
            f"verdict is {decision.status.upper()}: "
            f"{'; '.join((*decision.breaches, *decision.needs)) or 'by the policy'}",
            hint="export on the machine and with the libraries of the audit, or scan again here",
        )
