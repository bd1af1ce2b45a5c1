"""A subject under a scheme -> a folder that runtimes load: the weights that were measured.

Weights that the scan kept are packed as they are. Otherwise the engine's pass quantizes again, with
the first draw of calibration text, and every block is packed and written when it is done. The
hashes of the audit tell whether these are the weights that were judged: where they are not, kept
weights are made again, and the pass that makes others measures them (`measured`). Unfinished work
is in a hidden folder beside the result, from which the same command resumes; the result is made
under another name and renamed when it is whole.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.places import folder_of
from qaudit.checkpoints.settings import CONFIGURATION
from qaudit.checkpoints.unchanged import refuse_changed_settings
from qaudit.core.scheme import Scheme
from qaudit.core.sizes import size
from qaudit.downloads.downloads import Downloads
from qaudit.engine.kept_weights import kept_groups
from qaudit.engine.measure import open_weights, quantize_only, send
from qaudit.engine.tasks import Machine, Task
from qaudit.errors import MachineError, NotShipping, UsageError
from qaudit.executors.ready import make_ready
from qaudit.export.cards import export_card
from qaudit.export.choice import ExportChoice
from qaudit.export.contents import EVIDENCE, README, copy_settings, hashes_in
from qaudit.export.measured import (
    is_made_alike,
    judged_alone,
    kept_as_judged,
    measured_hashes,
    other_linears,
)
from qaudit.export.parts import Continued, Part, Parts
from qaudit.export.refusals import must_be_the_text, must_have_names, try_format, with_experts
from qaudit.export.soup import note_doubts
from qaudit.export.soup_folder import must_be_new
from qaudit.export.unfinished import begun_folder, whole_folder
from qaudit.formats.packing import Document, Format
from qaudit.formats.registry import format_named, formats
from qaudit.model.blocks import Weights
from qaudit.model.remote import is_remote
from qaudit.model.skeleton import Skeleton
from qaudit.model.stored_names import Names
from qaudit.planning.permissions import refuse
from qaudit.planning.pins import libraries
from qaudit.planning.unread import whole
from qaudit.report.card import render as render_card
from qaudit.saved.audits import read_audit
from qaudit.saved.exports import ExportRecord, read_export, write_export
from qaudit.saved.kept import key_of
from qaudit.saved.parts import OLD_LOCK, PLAN
from qaudit.saved.signature import may_sign, signed_export
from qaudit.types import SILENT, Measurement, Watch, digest
from qaudit.version import __version__

SHARD_NBYTES = 2 * 10**9


Alone = Callable[[Path], ExportChoice]
"""Write an audit of a file that no audit judged into a folder, and return the choice with it."""


@dataclass(frozen=True)
class _Origin:
    """What the weights were made with."""

    key: str  # of their result
    dtype: str
    device: str
    calibration_seed: int
    corpus_sha256: str


@dataclass(frozen=True, eq=False)
class _Work:
    """One export under way."""

    choice: ExportChoice
    form: Format
    origin: _Origin
    out: Path
    watch: Watch

    @property
    def identity(self) -> str:
        return digest([self.origin.key, self.form.name, __version__])


@dataclass(frozen=True, eq=False)
class _Made(_Work):
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
    """Write a subject under a scheme in a format, and return the folder."""
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
    if choice.subject.label in ready.refused:
        raise ready.refused[choice.subject.label]
    must_be_the_text(choice, ready.corpus.sha256)
    if is_remote(folder_of(choice.subject.first)):
        raise UsageError(
            f"`{choice.subject.label}` is code of its own, which no runtime loads quantized",
            hint="export a model of a family that transformers has",
        )
    if choice.hub is not None and choice.subject.first.commit is not None:
        must_have_names(choice, choice.hub, packing)
    text, schemes = ready.corpus.draws[0], (choice.scheme,)
    task = Task.unplanned(choice.subject, text, schemes, full_precision=False)
    everything = whole(choice.subject)  # towers, too, which are copied
    with Downloads(choice.hub, (everything,)) as downloads, downloads.ready(everything):
        task = replace(task, folder=downloads.folder)
        weights = open_weights(
            everything, allow_pickle=choice.options.allow_pickle, folder=downloads.folder
        )
        origin = _Origin(
            key=task.identity(choice.scheme, ready.machine).key,
            dtype=str(ready.machine.dtype).removeprefix("torch."),
            device=ready.machine.device.type,
            calibration_seed=text.protocol.calibration_seed,
            corpus_sha256=text.sha256,
        )
        work = _Made(choice, packing, origin, out, watch, task, ready.machine)
        with begun_folder(out, work.identity) as begun:
            _write(work, weights, begun, shard_nbytes, partial(_made_as_audited, work))
    _must_ship(read_export(out), choice, out)
    return out


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
    origin = _Origin(
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

    work = _Work(choice, form, origin, out, watch)
    with begun_folder(out, work.identity) as begun:
        _write(work, kept.rest, begun, shard_nbytes, pack)
    watch.note("written from the weights that the scan kept")
    return True


def _write(
    work: _Work,
    weights: Weights,
    begun: Path,
    shard_nbytes: int,
    make: Callable[[Parts, Names], Alone | None],
) -> None:
    """Let `make` write all parts, and make the folder of them."""
    source = folder_of(work.choice.subject.first)
    weights = with_experts(work.choice, work.form, weights)
    names = weights.stored_name
    parts = Parts(begun, work.form, weights, names)
    parts.open()
    _check_room(weights, begun)
    work.form.start(source, begun, weights.names())
    alone = make(parts, names)
    with whole_folder(work.out, begun) as folder:
        files = [begun / part.file for part in parts.done.values()]
        done = list(parts.done.values())
        outside = unquantized(_shapes(weights, done), weights.skeleton)
        config = work.form.config(outside, symmetric=_is_symmetric(done))
        _assemble(work.form, files, folder, source, config, shard_nbytes)
        _write_beside(work, parts, folder, alone)


def _assemble(
    form: Format, parts: Sequence[Path], folder: Path, source: Path, config: Document, nbytes: int
) -> None:
    """Write files of `nbytes` at most, and what runtimes read beside them."""
    form.assemble(parts, folder, nbytes)
    if not form.has_settings:
        return
    copy_settings(source, folder)
    whole = form.whole_config(read_configuration(source), config)
    for name, document in (("config.json", whole), *((name, config) for name in form.config_files)):
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


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
    if not other_linears(hashes, _dense(parts), names):
        return ()
    work.watch.note("this machine rounds otherwise than that of the audit: quantized once more")
    return _measure(work, parts, hashes, names)


def _measure(
    work: _Made, parts: Parts, hashes: dict[str, str], names: Names
) -> tuple[Measurement, ...]:
    """Quantize from the first block on, and measure; return nothing if the audit judged it all."""
    parts.remove()
    measured = _quantize(work, parts, measured=True)
    differing = other_linears(hashes, _dense(parts), names)
    if hashes and not differing:
        return ()
    if hashes:
        count = f"{len(differing)} of {len(hashes)}"
        work.watch.note(f"{count} linears are not those of the audit: the file is judged alone")
    return measured


def _quantize(work: _Made, parts: Parts, *, measured: bool = False) -> tuple[Measurement, ...]:
    """Quantize every block, and write it and what is not quantized."""
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


def _dense(parts: Parts) -> dict[str, str]:
    return {name: sha256 for part in parts.done.values() for name, sha256 in part.dense.items()}


def _bits_per_weight(parts: Parts) -> float:
    shapes = (parts.weights.shape(f"{linear}.weight") for linear in _dense(parts))
    return sum(part.bits for part in parts.done.values()) / max(sum(map(math.prod, shapes)), 1)


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


def _is_symmetric(parts: Any) -> bool:
    return all(part.symmetric is not False for part in parts)


def _check_room(weights: Weights, folder: Path) -> None:
    """Refuse a disk without room for the parts and the shards that are made of them."""
    needed = 2 * sum(math.prod(weights.shape(name)) for name in weights.names())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise MachineError(
            f"the export takes up to {size(needed)} while it is written, and {size(free)} are "
            f"free at `{folder.parent}`",
            hint="give a folder on another disk with `--out`",
        )


# ------------------------------------------------------------------------- what is beside


def _write_beside(work: _Work, parts: Parts, folder: Path, alone: Alone | None) -> None:
    choice, all_parts = work.choice, list(parts.done.values())
    (folder / EVIDENCE).mkdir()
    if alone is not None:
        choice = alone(folder / EVIDENCE)
    _copy_evidence(choice, folder / EVIDENCE)
    record = ExportRecord(
        schema="2",
        qaudit=__version__,
        format=work.form.name,
        subject=choice.subject.label,
        content=choice.subject.content,
        scheme=choice.scheme.short,
        spec=choice.scheme.spec,
        dtype=work.origin.dtype,
        device=work.origin.device,
        calibration_seed=work.origin.calibration_seed,
        corpus_sha256=work.origin.corpus_sha256,
        audit_sha256=choice.audit_sha256,
        bits_per_weight=_bits_per_weight(parts),
        dense=_dense(parts),
        rest={name: one for part in all_parts for name, one in part.rest.items()},
        files=hashes_in(folder),
        libraries=libraries([choice.scheme], [choice.subject.merge]) | _of_format(work.form),
    )
    if alone is None and may_sign(choice.record, choice.folder):
        record = signed_export(record)
    write_export(record, folder)
    (folder / README).write_text(export_card(choice, record, work.form), encoding="utf-8")


def _of_format(form: Format) -> dict[str, str]:
    """Return the distribution that a format is of, unless it is built in."""
    origin = formats().origin(form.name)
    return {origin.distribution: origin.version} if origin else {}


def _copy_evidence(choice: ExportChoice, folder: Path) -> None:
    """Put the checkpoint's configuration, and the audit with card and plan, beside the weights.

    The card has lines of text in place of the audit's plots, which are not copied.
    """
    shutil.copyfile(folder_of(choice.subject.first) / CONFIGURATION, folder / CONFIGURATION)
    if choice.record is None or choice.audit_file is None:
        return
    card = render_card(choice.record, pictures_at=None)
    (folder / "card.md").write_text(card, encoding="utf-8")
    for name in (choice.audit_file.name, PLAN, OLD_LOCK):
        path = choice.audit_file.with_name(name)
        if path.is_file() and path.parent != folder:  # judged alone, it is there
            shutil.copyfile(path, folder / name)


def unquantized(
    shapes: Mapping[str, tuple[int, ...]], skeleton: Skeleton | None = None
) -> tuple[str, ...]:
    """Return the linears among tensors that are not quantized: the head, even if it is tied.

    Runtimes call them as their modules are called, where those of a checkpoint have other names.
    """
    modules = {key: parameter for parameter, key in skeleton.routes.items()} if skeleton else {}
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    matrices += [modules[name] for name in matrices if name in modules]
    linears = [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]
    return tuple(sorted({"lm_head", *(name for name in linears if "embed" not in name)}))


def _shapes(weights: Weights, parts: Sequence[Part]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weights.shape(name)) for part in parts for name in part.rest}
