"""The quantized linears that an export packs: those that the scan kept, or else made again.

They are made by the pass of a scan that keeps them, which resumes as a scan does. The hashes of the
audit tell whether they are those that were judged. Where they are not, as on another device or with
other libraries, they are a file of its own: the pass measures them, and they are judged alone under
the policy of the audit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qaudit.checkpoints.stamps import folder_of, refuse_changed_settings
from qaudit.core.scheme import Scheme
from qaudit.downloads.downloads import Downloads
from qaudit.engine.block_pass import open_weights
from qaudit.engine.kept_weights import KeptRest, LinearHashes, kept_groups, rest_sha256
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Task
from qaudit.errors import SourceError, UsageError
from qaudit.executors.ready import Ready, make_ready
from qaudit.export.choice import ExportChoice
from qaudit.export.packed import Packed
from qaudit.export.refusals import begun_with, must_be_the_text, must_have_names
from qaudit.formats.packing import Format
from qaudit.judge import judge
from qaudit.model.config import is_remote
from qaudit.model.stored_names import Names, Unfused
from qaudit.planning.mixtures import write_table
from qaudit.planning.resolve import whole
from qaudit.policy import policy_named
from qaudit.saved.audits import to_json
from qaudit.saved.codec import FILE
from qaudit.saved.exports import kept_folder, key_of
from qaudit.saved.results import ResultFile, ResultStore, read_measurement, sha256_of
from qaudit.support.sizes import size
from qaudit.types import AuditRecord, Diagnostics, Measurement, Watch
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

    def judged(self, choice: ExportChoice, folder: Path) -> ExportChoice:
        """Return the choice with what judged these weights: its audit, or one of their own."""
        return _judged_alone(choice, self, folder) if self.results else choice


Kept = tuple[Path, KeptRest, Measurement]
"""The folder of linears that a scan kept, its other tensors, and what was measured of both."""


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
    return read_measurement(choice.folder / row.evidence, row.evidence_sha256)


def other_linears(
    hashes: Mapping[str, str], written: Mapping[str, str], names: Names
) -> tuple[str, ...]:
    """Return the linears that were written and are not those whose hashes an audit has.

    The audit names them `BLOCK.NAME`, and a file as the checkpoint does.
    """
    stored = {}
    for place, sha256 in hashes.items():
        block, _, name = place.partition(".")
        stored[names(int(block), f"{name}.weight").removesuffix(".weight")] = sha256
    return tuple(sorted(n for n in stored.keys() | written if stored.get(n) != written.get(n)))


def _hashes(scheme: Scheme, folder: Path) -> dict[str, str]:
    with LinearHashes() as hashes:
        for linears, quantized in kept_groups(folder):
            hashes.observe(scheme, linears, quantized)
        return hashes.of(scheme.spec)


def kept_as_judged(choice: ExportChoice, watch: Watch) -> Kept | None:
    """Return what the scan kept of these weights; None, with a sentence, for any others."""
    measured = measured_of(choice)
    if measured is None or measured.identity is None:
        return None
    evidence = choice.folder / "evidence"
    folder = kept_folder(evidence, key_of(measured))
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
    return folder, rest, measured


def as_kept(choice: ExportChoice, form: Format, kept: Kept, begun: Path) -> Made:
    folder, rest, measured = kept
    weights = begun_with(choice, form, rest, begun)
    return Made(folder, weights, measured.identity or {}, measured.calibration_seed)


@contextmanager
def made_again(choice: ExportChoice, form: Format, begun: Path, watch: Watch) -> Iterator[Made]:
    """Quantize in the pass of a scan, with the first draw; measure what no audit judged."""
    ready = make_ready(choice.plan, choice.options, choice.hub)
    _must_be_exportable(choice, form, ready)
    scheme, everything = choice.scheme, whole(choice.subject)  # towers, too, which are copied
    machine = replace(ready.machine, keeps_weights=(scheme.spec,))
    store = ResultStore(begun / "evidence")
    text = ready.corpus.draws[0].of_tasks(())
    task = Task.unplanned(choice.subject, text, (scheme,), full_precision=True)
    unmeasured = replace(task, corpus=text.without_evaluation()).changed(full_precision=False)
    for path in task.with_tables(store.folder).tables.values() if choice.table else ():
        write_table(choice.table, path)
    before = measured_of(choice)
    hashes = before.linears_sha256 if before else {}

    def made(pass_: Task) -> tuple[Path, dict[str, str], Sequence[ResultFile]]:
        """Return the folder and the hashes of the linears that a pass makes, and its results."""
        key = pass_.identity(scheme, machine).key
        folder, done = kept_folder(store.folder, key), store.folder / f"{key[:16]}.json"
        results: Sequence[ResultFile] = ()
        if pass_ is task or not done.is_file():
            pass_ = replace(pass_, folder=downloads.folder)
            tried = Packed(form, named)
            results = measure(pass_, machine, store, watch.block, check=tried.add)
            write_whole(done, json.dumps(_hashes(scheme, folder)))
        return folder, json.loads(read_regular(done, _LARGEST_NBYTES)), results

    with Downloads(choice.hub, (everything,)) as downloads, downloads.ready(everything):
        weights = open_weights(
            everything, allow_pickle=choice.options.allow_pickle, folder=downloads.folder
        )
        named = begun_with(choice, form, weights, begun)  # refused before anything is computed
        identity = vars(task.identity(scheme, machine))
        results: Sequence[ResultFile] = ()
        is_alike = _is_made_alike(before, identity)
        if choice.record is None or is_alike:
            folder, own, _ = made(unmeasured)
        if choice.record is not None and not (is_alike and own == hashes):
            watch.note(
                "this machine rounds otherwise than that of the audit: quantized once more"
                if is_alike
                else _why_measured(choice, has_hashes=bool(hashes))
            )
            folder, own, results = made(task)
            differing = sum(own.get(n) != hashes.get(n) for n in own.keys() | hashes.keys())
            if not differing:
                results = ()
            elif hashes:
                count = f"{differing} of {len(hashes)}"
                watch.note(f"{count} linears are not those of the audit: the file is judged alone")
        yield Made(folder, named, identity, text.protocol.calibration_seed, results)


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
    if choice.hub is not None and choice.subject.first.sources[0].commit is not None:
        must_have_names(choice, choice.hub, form)


def _is_made_alike(measured: Measurement | None, identity: Mapping[str, Any]) -> bool:
    """Return whether the audit was measured with what decides the codes here."""
    if measured is None or not measured.linears_sha256 or measured.identity is None:
        return False
    return all(measured.identity.get(name) == identity[name] for name in _SAME)


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
    judgement = judge(
        (choice.subject,),
        measured,
        files,
        confidence=plan.recipe.confidence,
        policy=policy_named(plan.recipe.policy),
        today=datetime.now(UTC).date(),
        planned=(choice.subject,),
        bits=(bits,),
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
