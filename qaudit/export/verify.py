"""Compare an exported folder with its record and an audit: bytes first, then how it runs.

Bits decide what the folder is. How a runtime computes with it is a second question, with a
tolerance by the runtime's arithmetic and an interval over documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_scheme
from qaudit.engine.kept_weights import sha256_of
from qaudit.errors import AuditError, MachineError, QauditError, SourceError
from qaudit.export.choice import ExportChoice, of_audit
from qaudit.export.contents import EVIDENCE, changed_files, not_of_the_audit
from qaudit.export.folder import measured_of, unquantized
from qaudit.formats.packing import Format, format_named
from qaudit.formats.weights import QuantizedWeights, open_quantized
from qaudit.model.skeleton import Shapes, build_skeleton
from qaudit.model.stored_names import stored_name
from qaudit.policy import policy_named
from qaudit.saved.evidence import VARIABLE, has_key, is_signed_export
from qaudit.saved.exports import FILE as RECORD
from qaudit.saved.exports import ExportRecord, read_export
from qaudit.support.keys import install
from qaudit.support.lazy import torch
from qaudit.types import Watch, digest

if TYPE_CHECKING:
    from qaudit.export.runs import AsItRuns


@dataclass(frozen=True)
class Verification:
    """What was compared, and whether the folder is what was audited."""

    record: ExportRecord
    differences: tuple[str, ...]  # from what was exported, and from what was measured
    run: AsItRuns | None = None
    why_not_run: str | None = None
    install: str | None = None  # the command for what a run lacks
    unhashed: bool = False  # the audit has no hashes of linears
    trusted: bool = False  # the record agrees with a named audit, or is signed with our key

    @property
    def holds(self) -> bool | None:
        """Return whether the folder is what was audited; None: that cannot be decided."""
        if self.differences:
            return False
        if not self.trusted:
            return None
        return True if self.run is None else self.run.agrees

    @property
    def sentence(self) -> str:
        if self.differences:
            return f"This is not what was {'audited' if self.trusted else 'exported'}."
        if not self.trusted:
            return "The weights match the export's own record."
        if self.run is None:
            return "The weights are those that were audited; the model was not run."
        if self.run.agrees:
            return "This is what was audited."
        audited = "The weights are those that were audited"
        if self.run.agrees is False:
            return f"{audited}, and the runtime computes something else with them."
        return (
            f"{audited}; whether the runtime's loss is within the limit cannot be decided on "
            f"{self.run.documents} documents."
        )


def verify(
    folder: Path, audit: Path | None, runtime: str | None, policy: str | None, watch: Watch
) -> Verification:
    """Compare a folder with its record, the record with an audit, and losses as it runs.

    How far losses may differ is in the policy: the named one, or that of the audit.
    """
    held_to = None if policy is None else policy_named(policy)
    record = read_export(folder)
    form = format_named(record.format, parse_scheme(record.spec))
    choice = None
    if audit is not None:
        choice = of_audit(audit, None, record.subject, record.scheme, watch)
        if record.audit_sha256 not in (None, choice.audit_sha256):
            raise AuditError(
                f"`{audit}` is not the audit that was exported: its sha256 is another",
                hint="name that audit, or export this one",
            )
    differences = tuple(_differences(folder, record, form, choice, watch))
    trusted = choice is not None
    if record.signature is not None and has_key():
        trusted = is_signed_export(record, folder)
        differences += () if trusted else (_NOT_SIGNED,)
    measurement = None if choice is None else measured_of(choice)
    unhashed = choice is not None and not (measurement and measurement.linears_sha256)
    result = Verification(record, differences, trusted=trusted, unhashed=unhashed)
    if choice is None or audit is None:
        return replace(result, why_not_run=_NO_AUDIT_TO_RUN if trusted else _NOTHING_TO_TRUST)
    if differences:
        return result
    from qaudit.export.runs import run, runtime_for

    program = runtime_for(record.format, runtime)
    if missing := program.missing(record.format):
        why, how = f"{' and '.join(missing)} is not installed", install(*missing)
        if runtime is not None:
            raise MachineError(f"`{runtime}` cannot run it: {why}", hint=how)
        return replace(result, why_not_run=why, install=how)
    held_to = held_to or policy_named(choice.plan.recipe.policy)
    if measurement is None:
        raise AuditError(
            f"`{audit}` has no evidence of `{record.subject}` at {record.scheme}",
            hint="run the scan again to complete it",
        )
    as_it_runs = run(choice, folder, record, measurement.evidence, program, held_to, watch)
    return replace(result, run=as_it_runs)


_NO_AUDIT_TO_RUN = "the documents and losses to compare with are in the audit: add `--audit`"
_NOTHING_TO_TRUST = (
    "an audit, by `--audit`, decides whether that is what was measured, and runs it; so does, "
    f"without running it, the key of a signed export, in `{VARIABLE}`"
)
_NOT_SIGNED = f"the signature of `{RECORD}` is not of this record and the key in `{VARIABLE}`"


def _differences(
    folder: Path, record: ExportRecord, form: Format, choice: ExportChoice | None, watch: Watch
) -> Iterator[str]:
    """Yield what is not as exported: tensors, then other files, then what the audit contradicts."""
    changed = dict(changed_files(folder, record))
    if any("regular" in sentence for sentence in changed.values()):
        yield from changed.values()  # nothing of it is opened
        return
    tensors: list[str] = []
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        tensors += _check_weights(folder, record, form, watch, shapes)
        tensors[:0] = _configuration(folder, shapes, form, record)
    except QauditError as error:  # cut short, or not what it says that it is
        tensors.append(error.message)
    yield from tensors
    # What is wrong with a file of weights is in the lines above.
    weights = (".safetensors", ".safetensors.index.json", ".gguf")
    yield from (s for name, s in changed.items() if not (tensors and name.endswith(weights)))
    if choice is not None and not changed:
        yield from not_of_the_audit(folder, record, form, choice)
        yield from () if tensors else _not_as_measured(folder, record, form, choice, shapes)


def _not_as_measured(
    folder: Path,
    record: ExportRecord,
    form: Format,
    choice: ExportChoice,
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[str]:
    """Yield each linear of a record that is not the one whose hash the audit's evidence has.

    Everything else has one hash, except where scales are folded into norms, or a file holds other
    types than the checkpoint.
    """
    measured = measured_of(choice)
    if measured is None or not measured.linears_sha256:
        return
    skeleton = build_skeleton(folder / EVIDENCE, Shapes(shapes), _dtype(record))
    audited = {}
    for place, sha256 in measured.linears_sha256.items():  # `BLOCK.NAME`
        block, _, name = place.partition(".")
        stored = stored_name(skeleton, int(block), f"{name}.weight")
        audited[stored.removesuffix(".weight")] = sha256
    for linear in sorted(audited.keys() | record.dense):
        if audited.get(linear) != record.dense.get(linear):
            yield f"`{linear}.weight` is not what the audit measured"
    is_as_stored = form.has_settings and not getattr(choice.scheme, "exact_fold", False)
    unread = skeleton.unread(list(shapes))
    rest = [(name, sha256) for name, sha256 in record.rest.items() if name not in unread]
    if is_as_stored and measured.rest_sha256 not in ("", digest(sorted(rest))):
        yield "embeddings, norms or head are not those that the audit measured"


def _check_weights(
    folder: Path,
    record: ExportRecord,
    form: Format,
    watch: Watch,
    shapes: dict[str, tuple[int, ...]],
) -> Iterator[str]:
    """Yield every tensor of an exported folder that is not what was measured; note all shapes."""
    linears = {f"{linear}.weight": sha256 for linear, sha256 in record.dense.items()}
    hashes = {**linears, **record.rest}
    weights: QuantizedWeights | WeightFolder | None = None
    try:
        weights = open_quantized(folder / form.file if form.file else folder, base=list(hashes))
    except QauditError as error:
        yield error.message
        with suppress(QauditError):  # what is not quantized is compared all the same
            weights, hashes = WeightFolder(folder), dict(record.rest)
    if weights is None:
        return
    names, dtype = set(weights.names()), _dtype(record)
    for number, (name, sha256) in enumerate(hashes.items()):
        watch.count("tensors", number, len(hashes))
        if name not in names:
            if name not in form.leaves_out:
                yield f"`{name}` is missing"
            continue
        try:
            tensor = weights.read(name)
        except QauditError as error:
            yield error.message
            continue
        shapes[name] = tuple(tensor.shape)
        if name not in linears and sha256_of(tensor) != sha256:
            yield f"`{name}` is not what it was"
        elif name in linears and sha256_of(tensor.to(dtype)) != sha256:
            yield f"`{name}` holds other weights than were measured"
    watch.count("tensors", len(hashes), len(hashes))
    if not isinstance(weights, WeightFolder):
        yield from (f"`{name}` was not exported" for name in sorted(names - set(hashes)))


def _dtype(record: ExportRecord) -> torch.dtype:
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SourceError(
            f"`{record.dtype}` is no dtype of weights", hint="the export's record was edited"
        )
    return dtype


def _configuration(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], form: Format, record: ExportRecord
) -> Iterator[str]:
    if not form.has_settings:
        return
    rest = {name: shape for name, shape in shapes.items() if name in record.rest}
    skeleton = None
    with suppress(QauditError):  # where a tensor is damaged
        skeleton = build_skeleton(folder / EVIDENCE, Shapes(shapes), _dtype(record))
    outside = unquantized(rest, skeleton)
    form.mixed = record.mixture
    written = [
        form.config(outside, symmetric=symmetric, dtype=record.dtype) for symmetric in (True, False)
    ]
    if read_configuration(folder).get("quantization_config") not in written:
        yield f"`quantization_config` of `config.json` is not that of `{record.scheme}`"
