"""A subject under a scheme -> a folder that runtimes load: the weights that were measured.

The quantized linears are those that the scan kept, or else made again by the pass of a scan that
keeps them, which resumes as a scan does. The hashes of the audit tell whether they are those that
were judged. Where they are not, as on another device or with other libraries, they are a file of
its own: the pass measures them, and they are judged alone under the policy of the audit.

They are packed with all other tensors of the subject. Unfinished work is in a hidden folder beside
the result, from which the same command resumes; the result is made under another name and renamed
when it is whole. What cannot be exported is refused before anything is computed or downloaded.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.safetensors import ShardWriter
from qaudit.checkpoints.stamps import CONFIGURATION, folder_of, refuse_changed_settings
from qaudit.core.linears import Inputs, Linears
from qaudit.core.mixture import Mixture
from qaudit.core.scheme import Scheme
from qaudit.downloads.downloads import Downloads
from qaudit.engine.block_pass import open_weights
from qaudit.engine.kept_weights import KeptRest, LinearHashes, kept_groups, rest_sha256
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Task
from qaudit.errors import NotShipping, SchemeError, SourceError, UsageError
from qaudit.executors.part import Ready, make_ready
from qaudit.export import contents
from qaudit.export.choice import ExportChoice
from qaudit.export.packed import Packed, refuse_rounded
from qaudit.export.soup import SHARD_NBYTES, refuse_members
from qaudit.formats.packing import Format, changed_inputs, declared_group, format_named, formats
from qaudit.judge import judge
from qaudit.judge.gate import GateInput
from qaudit.judge.table import Measurements
from qaudit.model.blocks import Weights
from qaudit.model.config import is_remote
from qaudit.model.experts import is_fused
from qaudit.model.skeleton import Shapes, Skeleton, build_skeleton
from qaudit.model.stored_names import Unfused
from qaudit.planning.pin import libraries
from qaudit.planning.resolve import whole
from qaudit.planning.survey import shapes_of
from qaudit.policy import policy_named
from qaudit.report.folder import render_card
from qaudit.saved import exports
from qaudit.saved.audits import read_audit, to_json
from qaudit.saved.codec import FILE, write
from qaudit.saved.evidence import may_sign, read_evidence, signed_export
from qaudit.saved.exports import ExportRecord, kept_folder
from qaudit.saved.parts import PLAN
from qaudit.saved.results import ResultFile, ResultStore, sha256_of
from qaudit.support.lazy import torch
from qaudit.support.sizes import size
from qaudit.types import SILENT, AuditRecord, Diagnostics, Measurement, Watch, digest
from qaudit.version import __version__
from qaudit.whole import read_regular, write_whole

_SAME = ("dtype", "device", "libraries", "numerics", "scheme_version")
"""Of an identity, what decides which codes the same weights and text give."""

_LARGEST_NBYTES = 2**28  # of a file of hashes


@dataclass(frozen=True, eq=False)
class Made:
    """Groups of quantized linears in a folder, the subject's weights, and what made them."""

    folder: Path
    weights: Unfused
    identity: Mapping[str, Any]
    calibration_seed: int
    results: Sequence[ResultFile] = ()  # of weights that no audit judged


def export_quantized(
    choice: ExportChoice,
    form: str,
    out: Path,
    *,
    converter: Path | None = None,
    watch: Watch = SILENT,
) -> Path:
    packing = format_named(form, choice.scheme)
    packing.use(converter)
    contents.must_be_new(out)
    may_sign(choice.record, choice.folder)  # refused before hours go into what it would sign
    try_format(choice.scheme, packing)
    refuse_members(choice.subject, choice.options, watch)
    work = [choice.subject.content, choice.scheme.spec, choice.audit_sha256, form, __version__]
    with (
        contents.begun_folder(out, digest(work)) as begun,
        _quantized(choice, packing, begun, watch) as made,
        contents.whole_folder(out, begun) as folder,
    ):
        _write(choice, packing, made, folder, out.name)
    if choice.is_named or exports.read_export(out).audit_sha256 in (None, choice.audit_sha256):
        return out
    alone = read_audit(out / contents.EVIDENCE).verdict
    if alone is not None and alone.status != "ship":
        (decision,) = alone.classes
        raise NotShipping(
            f"the file in `{out}` is not the one that the audit judged, and measured by itself its "
            f"verdict is {decision.status.upper()}: "
            f"{'; '.join((*decision.breaches, *decision.needs)) or 'by the policy'}",
            hint="export on the machine and with the libraries of the audit, or scan again here",
        )
    return out


def _write(choice: ExportChoice, form: Format, made: Made, folder: Path, place: str) -> None:
    """Write weights, what runtimes read beside them, and what `verify` compares them with."""
    source = folder_of(choice.subject.first)
    shards = ShardWriter(folder, SHARD_NBYTES)
    packed = Packed(form, made.weights, shards)
    for linears, quantized in kept_groups(made.folder):
        packed.add(choice.scheme, linears, quantized)
    packed.add_rest(shards)
    form.assemble(shards, folder)
    dtype = str(made.identity["dtype"]).removeprefix("torch.")
    if form.has_settings:
        contents.copy_settings(source, folder)
        shapes = {each: tuple(made.weights.shape(each)) for each in packed.rest}
        outside = unquantized(shapes, made.weights.skeleton)
        form.mixed = packed.mixed
        config = form.config(outside, symmetric=packed.is_symmetric, dtype=dtype)
        documents = {CONFIGURATION: form.whole_config(read_configuration(source), config)}
        for file, document in (documents | dict.fromkeys(form.config_files, config)).items():
            (folder / file).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    evidence = folder / contents.EVIDENCE
    evidence.mkdir()
    judged = _judged_alone(choice, made, evidence) if made.results else choice
    shutil.copyfile(source / CONFIGURATION, evidence / CONFIGURATION)
    if judged.record is not None and judged.audit_file is not None:
        card = render_card(judged.record, pictures_at=None)  # lines of text in place of plots
        (evidence / "card.md").write_text(card, encoding="utf-8")
        for name in (judged.audit_file.name, PLAN) if judged is choice else ():
            if (path := judged.audit_file.with_name(name)).is_file():
                shutil.copyfile(path, evidence / name)
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
        files=contents.hashes_in(folder),
        libraries=libraries([choice.scheme], [choice.subject.merge])
        | ({plugin.distribution: plugin.version} if plugin else {}),
    )
    if judged is choice and may_sign(choice.record, choice.folder):
        record = signed_export(record)
    write(folder / exports.FILE, record)
    settings = read_configuration(folder if form.has_settings else evidence)
    card = contents.export_card(judged, record, form, settings, choice.repo or place)
    (folder / contents.README).write_text(card, encoding="utf-8")


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


def try_format(scheme: Scheme, form: Format) -> None:
    if isinstance(scheme, Mixture):
        _must_hold(scheme, form)
        return
    group = declared_group(scheme)
    columns = 256 if group == -1 else 2 * math.lcm(group, 256)
    weight_RC = torch.linspace(-1, 1, 128 * columns).reshape(128, columns)
    x_CC, ones_C = torch.eye(columns), torch.ones(columns)
    inputs = Inputs(x_CC, ones_C, columns, ones_C, sample_TC=x_CC)
    refuse_rounded(scheme)
    linears = Linears({"linear": weight_RC}, inputs, block_has_norm_folds=True)
    quantized = scheme.quantize(linears)
    if quantized.inputs is not None and not (scheme.layout and scheme.layout.rounds_inputs):
        raise changed_inputs(scheme)
    form.pack("linear", quantized.stored["linear"])


def _must_hold(scheme: Mixture, form: Format) -> None:
    """Refuse a mixture of which a format does not hold every width."""
    refusals = _refusals(scheme, form)
    fitting = "".join(str(bits) for bits in scheme.widths if bits not in refusals)
    if form.mixes_bits and not refusals:
        return
    holding = [
        f"`{name}`"
        for name in formats()
        if formats()[name].mixes_bits and not _refusals(scheme, format_named(name, scheme))
    ]
    if not (fitting if form.mixes_bits else holding):
        bits, error = next(iter(refusals.items()))
        named = error.message.replace(scheme.member(bits).short, scheme.short)
        raise type(error)(named, hint=error.hint) from error
    ways = [f"export it as {' or '.join(holding)}"] if holding else []
    doubt = f"has linears of several widths, and `{form.name}` files have one"
    if form.mixes_bits:
        widths = " or ".join(map(str, refusals))
        doubt = f"may have linears of {widths} bits, which `{form.name}` files do not hold"
        with suppress(SchemeError):  # where no linear of these has the budget
            ways.insert(0, f"scan and export `{replace(scheme, members=fitting).short}`")
    raise UsageError(f"`{scheme.short}` {doubt}", hint=", or ".join(ways))


def _refusals(scheme: Mixture, form: Format) -> dict[int, SchemeError | SourceError]:
    """Return why a format does not hold a mixture's members, by their bits."""
    refusals: dict[int, SchemeError | SourceError] = {}
    for bits in scheme.widths:
        try:
            try_format(scheme.member(bits), form)
        except (SchemeError, SourceError) as error:
            refusals[bits] = error
    return refusals


def _must_be_exportable(choice: ExportChoice, form: Format, ready: Ready) -> None:
    """Refuse what this machine or the format cannot hold, before weights are downloaded."""
    if choice.subject.label in ready.refused:
        raise ready.refused[choice.subject.label]
    measured = ready.corpus.sha256
    if choice.record and choice.record.protocol.get("corpus_sha256") != measured:
        raise SourceError(
            "the text that was measured on has changed since the audit, so that the exported "
            "weights would be others",
            hint="restore the text, or scan again",
        )
    if is_remote(folder_of(choice.subject.first)):
        raise UsageError(
            f"`{choice.subject.label}` is code of its own, which no runtime loads quantized",
            hint="export a model of a family that transformers has",
        )
    base = choice.subject.first.sources[0]
    if choice.hub is not None and base.commit is not None:
        try:
            shapes = shapes_of(base, choice.hub.fetcher.settings(base), choice.hub)
        except SourceError:  # tensors have to be read to know their shapes
            return
        with_experts(choice, form, Shapes(shapes))


def with_experts(choice: ExportChoice, form: Format, weights: Weights) -> Unfused:
    """Return weights with a name for each expert's linears; refuse a format without experts."""
    skeleton = build_skeleton(folder_of(choice.subject.first), weights, torch.float32)
    if not form.has_experts and any(map(is_fused, skeleton.model.modules())):
        raise UsageError(
            f"`{choice.subject.label}` is a mixture of experts, and no runtime loads quantized "
            f"experts from `{form.name}` files",
            hint="export an integer scheme as `compressed-tensors` or `gptq`",
        )
    return Unfused(skeleton, weights)


def begun_with(choice: ExportChoice, form: Format, weights: Weights, begun: Path) -> Unfused:
    """Return weights under the names of files; refuse what cannot be written of them here."""
    named = with_experts(choice, form, weights)
    needed = 2 * sum(math.prod(named.shape(name)) for name in named.names())
    contents.must_fit(begun, needed, "the export takes up to {} while it is written")
    form.start(folder_of(choice.subject.first), begun, named.names())
    return named


def measured_of(choice: ExportChoice) -> Measurement | None:
    """Return the measurement of the first draw, which an export writes; None without evidence."""
    cell = (choice.subject.label, choice.scheme.spec)
    rows = [
        row
        for row in (choice.record.measurements if choice.record else ())
        if (row.subject, row.spec) == cell and (choice.folder / row.evidence).is_file()
    ]
    if not rows:
        return None
    row = min(rows, key=lambda each: each.calibration_seed)
    return read_evidence(row, choice.folder)


def _hashes(scheme: Scheme, folder: Path) -> dict[str, str]:
    with LinearHashes() as hashes:
        for linears, quantized in kept_groups(folder):
            hashes.observe(scheme, linears, quantized)
        return hashes.of(scheme.spec)


def _kept_as_judged(choice: ExportChoice, form: Format, begun: Path, watch: Watch) -> Made | None:
    """Return what the scan kept of these weights; None, with a sentence, for any others."""
    measured = measured_of(choice)
    if measured is None or measured.identity is None:
        return None
    evidence = choice.folder / "evidence"
    folder = kept_folder(evidence, exports.key_of(measured))
    beside = kept_folder(evidence, choice.subject.content)
    if not folder.is_dir() or not beside.is_dir():  # towers, which nothing reads, are not kept
        return None
    try:
        rest = KeptRest(beside)
        found = _hashes(choice.scheme, folder), rest_sha256(rest, rest.kept)
    except SourceError as error:
        watch.note(f"{error.message}: made again")
        return None
    if found != (measured.linears_sha256, measured.rest_sha256):
        watch.note("the kept weights are not, or not all, those that were judged: made again")
        return None
    for checkpoint, _ in choice.subject.members:
        for source in checkpoint.sources:
            if choice.hub is not None and source.commit is not None:
                choice.hub.fetcher.settings(source, code=False)
        refuse_changed_settings(checkpoint)
    weights = begun_with(choice, form, rest, begun)
    return Made(folder, weights, measured.identity, measured.calibration_seed)


@contextmanager
def _quantized(choice: ExportChoice, form: Format, begun: Path, watch: Watch) -> Iterator[Made]:
    """Take what the scan kept, or quantize in its pass, with the first draw.

    What no audit judged is measured. A format that is made from the checkpoint's files needs these,
    and is made again.
    """
    if form.has_settings and (kept := _kept_as_judged(choice, form, begun, watch)):
        yield kept
        watch.note("written from the weights that the scan kept")
        return
    ready = make_ready(choice.plan, choice.options, choice.hub)
    _must_be_exportable(choice, form, ready)
    scheme, everything = choice.scheme, whole(choice.subject)  # towers, too, which are copied
    machine = replace(ready.machine, keeps_weights=(scheme.spec,))
    store = ResultStore(begun / "evidence")
    text = ready.corpus.draws[0].of_tasks(())
    task = Task.unplanned(choice.subject, text, (scheme,), full_precision=True)
    unmeasured = replace(task, corpus=text.without_evaluation()).changed(full_precision=False)
    for path in task.with_tables(store.folder).tables.values() if choice.table else ():
        exports.write_table(choice.table, path)
    before = measured_of(choice)
    hashes = before.linears_sha256 if before else {}

    def made(pass_: Task) -> tuple[Path, dict[str, str], Sequence[ResultFile]]:
        """Return the folder and the hashes of the linears that a pass makes, and its results."""
        key = pass_.identity(scheme, machine).key
        folder, record = kept_folder(store.folder, key), store.folder / f"{key[:16]}.json"
        results: Sequence[ResultFile] = ()
        if pass_ is task or not record.is_file():
            pass_ = replace(pass_, folder=downloads.folder)
            tried = Packed(form, named)
            results = measure(pass_, machine, store, watch.block, check=tried.add)
            write_whole(record, json.dumps(_hashes(scheme, folder)))
        return folder, json.loads(read_regular(record, _LARGEST_NBYTES)), results

    with Downloads(choice.hub, (everything,)) as downloads, downloads.ready(everything):
        weights = open_weights(
            everything, allow_pickle=choice.options.allow_pickle, folder=downloads.folder
        )
        named = begun_with(choice, form, weights, begun)  # refused before anything is computed
        identity = vars(task.identity(scheme, machine))
        results: Sequence[ResultFile] = ()
        audited = before.identity if before and hashes else None
        is_alike = audited is not None and all(audited.get(k) == identity[k] for k in _SAME)
        if choice.record is None or is_alike:
            folder, written, _ = made(unmeasured)
        if choice.record is not None and not (is_alike and written == hashes):
            rounds = "this machine rounds otherwise than that of the audit: quantized once more"
            watch.note(rounds if is_alike else _why_measured(choice, has_hashes=bool(hashes)))
            folder, written, results = made(task)
            names = written.keys() | hashes.keys()
            differing = sum(written.get(name) != hashes.get(name) for name in names)
            results = results if differing else ()
            if differing and hashes:
                count = f"{differing} of {len(hashes)}"
                watch.note(f"{count} linears are not those of the audit: the file is judged alone")
        yield Made(folder, named, identity, text.protocol.calibration_seed, results)


def _why_measured(choice: ExportChoice, *, has_hashes: bool) -> str:
    nbytes = sum(c.nbytes for c, _ in choice.subject.members if c.commit is not None)
    fetched = f", for which up to {size(nbytes)} are downloaded" if nbytes else ""
    why = "other libraries, or on another device or in another dtype"
    return (
        f"the audit was made with {why if has_hashes else 'no hashes of linears'}: the file is "
        f"measured while it is written{fetched}"
    )


def _judged_alone(choice: ExportChoice, made: Made, folder: Path) -> ExportChoice:
    """Write an audit of the weights that a pass made into a folder; return the choice with it."""
    assert choice.record is not None
    before, plan = choice.record, choice.record.plan
    measured = [result.measurement for result in made.results]
    (bits,) = {str(m.bit_class) for m in measured if m.spec == choice.scheme.spec}
    files: dict[tuple[str, str, int | str], tuple[str, str]] = {}
    for result in made.results:
        m, path = result.measurement, folder / "evidence" / result.path.name
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(result.path, path)
        place = path.relative_to(folder).as_posix(), sha256_of(path)
        files[m.subject, m.spec, m.calibration_seed] = place
    every = Measurements.of((choice.subject,), measured, plan.recipe.confidence)
    judgement = judge(
        every,
        files,
        GateInput(every.first_draws, planned=(choice.subject,), bits=(bits,)),
        policy=policy_named(plan.recipe.policy),
        today=datetime.now(UTC).date(),
    )
    alone = replace(
        plan,
        recipe=replace(plan.recipe, bits=(bits,)),
        subjects=(choice.subject,),
        specs=(choice.scheme.spec,),
        shipped=(),
        device=made.identity["device"],
        dtype=str(made.identity["dtype"]).removeprefix("torch."),
    )
    record = AuditRecord(
        schema="1",
        plan=alone,
        environment={**before.environment, "device": made.identity["device"]},
        protocol=before.protocol,
        subjects=(choice.subject,),
        skipped=(),
        qaudit=__version__,
        diagnostics=Diagnostics(noise=judgement.noise),
        **judgement.fields,
    )
    write_whole(folder / FILE, to_json(record))
    return replace(choice, record=record, audit_file=folder / FILE)
