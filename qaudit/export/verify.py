"""Is an exported folder what was audited? Its bytes first, then how it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.quantized.gguf import GgufFile
from qaudit.checkpoints.quantized.weights import FORMATS, read_linear
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_scheme
from qaudit.errors import AuditError, MachineError, QauditError, SourceError
from qaudit.export.choice import Choice, of_audit
from qaudit.export.formats import Format
from qaudit.export.gguf import FILE, GgufFiles
from qaudit.export.parts import sha256_of
from qaudit.export.quantized import unquantized
from qaudit.export.registry import format_named
from qaudit.policy import policy_named
from qaudit.saved.evidence import read_saved
from qaudit.saved.exports import ExportRecord, read_export
from qaudit.types import Evidence, Watch

if TYPE_CHECKING:
    import torch

    from qaudit.export.runs import Run


@dataclass(frozen=True)
class AsItRuns:
    """Loss and KL divergence beside those of the audit, in nats per token."""

    runtime: str
    policy: str
    loss_tolerance: float
    kl_tolerance: float
    documents: int
    measured: Run

    @property
    def agrees(self) -> bool:
        loss, kl = self.measured.difference.estimate, self.measured.kl_difference
        return abs(loss) <= self.loss_tolerance and (kl is None or abs(kl) <= self.kl_tolerance)


@dataclass(frozen=True)
class Verification:
    """What was compared, and whether the folder is what was audited."""

    record: ExportRecord
    differences: tuple[str, ...]  # from the weights that were measured
    run: AsItRuns | None
    why_not_run: str | None = None

    @property
    def holds(self) -> bool:
        return not self.differences and (self.run is None or self.run.agrees)


def verify(
    folder: Path, audit: Path | None, runtime: str | None, policy: str | None, watch: Watch
) -> Verification:
    """Compare a folder with the weights, and the losses, that were measured.

    How far losses may differ is in the policy: the named one, or that of the audit.
    """
    held_to = None if policy is None else policy_named(policy)
    record = read_export(folder)
    choice = None if audit is None else _audited(record, audit, watch)
    if choice is not None and held_to is None:
        held_to = policy_named(choice.plan.recipe.policy)
    differences = tuple(check_weights(folder, record, watch))
    if choice is None:
        return Verification(record, differences, None, "name the audit with `--audit` to run it")
    if differences:
        return Verification(record, differences, None, "its weights are not those of the audit")
    from qaudit.export.runs import run
    from qaudit.export.runtimes import is_plain, runtime_for

    program = runtime_for(record.format, runtime)
    if missing := program.missing(record.format):
        why = f"{' and '.join(missing)} is not installed"
        if runtime is not None:
            raise MachineError(
                f"`{runtime}` cannot run it: {why}", hint=f"pip install {' '.join(missing)}"
            )
        return Verification(record, differences, None, why)
    assert audit is not None and held_to is not None
    evidence = _evidence(record, audit)
    measured = run(choice, evidence, folder, program, watch)
    allowed, plain = held_to.verify, is_plain(program, folder)
    as_it_runs = AsItRuns(
        program.described(record.format),
        held_to.name,
        allowed.plain if plain else allowed.loss,
        allowed.plain if plain else allowed.kl,
        int((evidence.tokens > 0).sum()),
        measured,
    )
    return Verification(record, differences, as_it_runs)


def _audited(record: ExportRecord, file: Path, watch: Watch) -> Choice:
    """Return what an audit measured of these weights; refuse another audit."""
    choice = of_audit(file, None, record.subject, record.scheme, watch)
    if record.audit_sha256 not in (None, choice.audit_sha256):
        raise AuditError(
            f"`{file}` is not the audit that was exported: its sha256 is another",
            hint="name that audit, or export this one",
        )
    if choice.subject.content != record.content or choice.scheme.spec != record.spec:
        raise AuditError(
            f"`{file}` measured other weights of `{record.subject}` than were exported",
            hint="name the audit of these weights",
        )
    return choice


def _evidence(record: ExportRecord, file: Path) -> Evidence:
    """Return the losses of the draw that was exported."""
    for one in read_saved(file).measurements:
        if (one.subject, one.spec, one.calibration_seed) == (
            record.subject,
            record.spec,
            record.calibration_seed,
        ):
            return one.evidence
    raise AuditError(
        f"`{file}` has no measurement of `{record.subject}` at {record.scheme}",
        hint="run the scan again to complete it",
    )


KEY = "quantization_config"


def check_weights(folder: Path, record: ExportRecord, watch: Watch) -> Iterator[str]:
    """Yield every tensor of an exported folder that is not what was measured."""
    form = format_named(record.format, parse_scheme(record.spec))
    if isinstance(form, GgufFiles):
        yield from _of_gguf(folder, record, watch)
        return
    weights = WeightFolder(folder)
    config = read_configuration(folder).get(KEY)
    yield from _configuration(weights, form, record, config)
    if isinstance(config, dict):
        yield from _linears(weights, form, record, config, watch)
    names = set(weights.names())
    for name, sha256 in record.rest.items():
        if name not in names:
            yield f"`{name}` is missing"
        elif sha256_of(weights.read(name)) != sha256:
            yield f"`{name}` is not what it was"
    starts = tuple(f"{linear}." for linear in record.dense)
    for name in weights.names():
        if name not in record.rest and not name.startswith(starts):
            yield f"`{name}` was not exported"


def _of_gguf(folder: Path, record: ExportRecord, watch: Watch) -> Iterator[str]:
    """Compare the tensors of one file, which has them all in float32."""
    names = [*(f"{linear}.weight" for linear in record.dense), *record.rest]
    hashes = {**{f"{k}.weight": v for k, v in record.dense.items()}, **record.rest}
    try:
        weights = GgufFile(folder / FILE, base=names)
    except QauditError as error:
        yield error.message
        return
    dtype = _dtype(record)
    for number, (name, sha256) in enumerate(hashes.items()):
        watch.count("tensors", number, len(hashes))
        if name not in weights.names():
            if name != "lm_head.weight":  # tied, so that it is the embeddings
                yield f"`{name}` is missing"
            continue
        try:
            tensor = weights.read(name)
        except QauditError as error:
            yield error.message
            continue
        is_linear = name.removesuffix(".weight") in record.dense
        if sha256_of(tensor.to(dtype) if is_linear else tensor) != sha256:
            yield f"`{name}` is not what was measured"
    watch.count("tensors", len(hashes), len(hashes))


def _dtype(record: ExportRecord) -> torch.dtype:
    import torch

    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SourceError(
            f"`{record.dtype}` is no dtype of weights", hint="the export's record was edited"
        )
    return dtype


def _configuration(
    weights: WeightFolder, form: Format, record: ExportRecord, config: object
) -> Iterator[str]:
    """Yield whether the configuration is another one than was written for this scheme."""
    shapes = {name: weights.shape(name) for name in weights.names() if name in record.rest}
    outside = unquantized(shapes)
    written = [form.config(outside, symmetric=symmetric) for symmetric in (True, False)]
    if config not in written:
        yield f"`{KEY}` of `config.json` is not that of `{record.scheme}`"


def _linears(
    weights: WeightFolder,
    form: Format,
    record: ExportRecord,
    config: Mapping[str, Any],
    watch: Watch,
) -> Iterator[str]:
    dtype = _dtype(record)
    for number, (linear, sha256) in enumerate(record.dense.items()):
        watch.count("tensors", number, len(record.dense))
        try:
            dense_RC = read_linear(weights, FORMATS[form.reader], config, linear).to(dtype)
        except QauditError as error:
            yield error.message
            continue
        if sha256_of(dense_RC) != sha256:
            yield f"`{linear}` holds other weights than were measured"
    watch.count("tensors", len(record.dense), len(record.dense))
