"""A subject under a scheme -> a folder that runtimes load: the weights that were measured.

`made` has the quantized linears, which are packed with all other tensors of the subject. Unfinished
work is in a hidden folder beside the result, from which the same command resumes; the result is
made under another name and renamed when it is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.safetensors import ShardWriter
from qaudit.checkpoints.stamps import CONFIGURATION, folder_of
from qaudit.engine.kept_weights import kept_groups
from qaudit.errors import NotShipping
from qaudit.export.cards import export_card
from qaudit.export.choice import ExportChoice
from qaudit.export.contents import EVIDENCE, README, copy_settings, hashes_in
from qaudit.export.made import Made, as_kept, kept_as_judged, made_again
from qaudit.export.packed import Packed
from qaudit.export.refusals import try_format
from qaudit.export.soup import SHARD_NBYTES, note_doubts
from qaudit.export.unfinished import begun_folder, must_be_new, whole_folder
from qaudit.formats.packing import Format
from qaudit.formats.registry import format_named, formats
from qaudit.model.skeleton import Skeleton
from qaudit.planning.pin import libraries
from qaudit.planning.survey import refuse
from qaudit.report.card import render as render_card
from qaudit.saved.audits import read_audit
from qaudit.saved.exports import ExportRecord, read_export, write_export
from qaudit.saved.parts import PLAN
from qaudit.saved.signature import may_sign, signed_export
from qaudit.types import SILENT, Watch, digest
from qaudit.version import __version__


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
    # A format that is made from the checkpoint's files needs these, and is made again.
    kept = kept_as_judged(choice, watch) if packing.has_settings else None
    work = [choice.subject.content, choice.scheme.spec, choice.audit_sha256, form, __version__]
    with (
        begun_folder(out, digest(work)) as begun,
        nullcontext(as_kept(choice, packing, kept, begun))
        if kept is not None
        else made_again(choice, packing, begun, watch) as made,
        whole_folder(out, begun) as folder,
    ):
        _write(choice, packing, made, folder, shard_nbytes, out.name)
    if kept is not None:
        watch.note("written from the weights that the scan kept")
    _must_ship(choice, out)
    return out


def _write(
    choice: ExportChoice, form: Format, made: Made, folder: Path, shard_nbytes: int, name: str
) -> None:
    """Write weights, what runtimes read beside them, and what `verify` compares them with."""
    source = folder_of(choice.subject.first)
    shards = ShardWriter(folder, shard_nbytes)
    packed = Packed(form, made.weights, shards)
    for linears, quantized in kept_groups(made.folder):
        packed.add(choice.scheme, linears, quantized)
    packed.add_rest(shards)
    form.assemble(shards, folder)
    dtype = str(made.identity["dtype"]).removeprefix("torch.")
    if form.has_settings:
        copy_settings(source, folder)
        shapes = {each: tuple(made.weights.shape(each)) for each in packed.rest}
        outside = unquantized(shapes, made.weights.skeleton)
        form.mixed = packed.mixed
        config = form.config(outside, symmetric=packed.is_symmetric, dtype=dtype)
        documents = {CONFIGURATION: form.whole_config(read_configuration(source), config)}
        for file, document in (documents | dict.fromkeys(form.config_files, config)).items():
            (folder / file).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (folder / EVIDENCE).mkdir()
    judged = made.judged(choice, folder / EVIDENCE)
    _copy_evidence(judged, folder / EVIDENCE)
    plugin = formats().origin(form.name)  # None of a format that is built in
    record = ExportRecord(
        schema="1",
        qaudit=__version__,
        format=form.name,
        subject=choice.subject.label,
        content=choice.subject.content,
        scheme=choice.scheme.short,
        spec=choice.scheme.spec,
        dtype=dtype,
        device=str(made.identity["device"]),
        calibration_seed=made.calibration_seed,
        corpus_sha256=str(made.identity["corpus"]),
        audit_sha256=judged.audit_sha256,
        bits_per_weight=packed.bits_per_weight,
        mixture=packed.mixed,
        dense=packed.dense,
        rest=packed.rest,
        files=hashes_in(folder),
        libraries=libraries([choice.scheme], [choice.subject.merge])
        | ({plugin.distribution: plugin.version} if plugin else {}),
    )
    if judged is choice and may_sign(choice.record, choice.folder):
        record = signed_export(record)
    write_export(record, folder)
    settings = read_configuration(folder if form.has_settings else folder / EVIDENCE)
    card = export_card(judged, record, form, settings, choice.repo or name)
    (folder / README).write_text(card, encoding="utf-8")


def _copy_evidence(choice: ExportChoice, folder: Path) -> None:
    """Put the checkpoint's configuration, and the audit with card and plan, beside the weights.

    The card has lines of text in place of the audit's plots, which are not copied.
    """
    shutil.copyfile(folder_of(choice.subject.first) / CONFIGURATION, folder / CONFIGURATION)
    if choice.record is None or choice.audit_file is None:
        return
    card = render_card(choice.record, pictures_at=None)
    (folder / "card.md").write_text(card, encoding="utf-8")
    for name in (choice.audit_file.name, PLAN):
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


def _must_ship(choice: ExportChoice, out: Path) -> None:
    """Raise NotShipping where a file that was judged alone does not ship, unless it is named."""
    if choice.is_named or read_export(out).audit_sha256 in (None, choice.audit_sha256):
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
