"""The folder of an export: what is packed, and what runtimes and `verify` read beside it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.stamps import CONFIGURATION, folder_of
from qaudit.errors import MachineError
from qaudit.export.cards import export_card
from qaudit.export.choice import ExportChoice
from qaudit.export.contents import EVIDENCE, README, copy_settings, hashes_in
from qaudit.export.parts import Part, Parts
from qaudit.export.refusals import with_experts
from qaudit.export.unfinished import whole_folder
from qaudit.formats.packing import Document, Format
from qaudit.formats.registry import formats
from qaudit.model.blocks import Weights
from qaudit.model.skeleton import Skeleton
from qaudit.model.stored_names import Names
from qaudit.planning.pin import libraries
from qaudit.report.card import render as render_card
from qaudit.saved.exports import ExportRecord, write_export
from qaudit.saved.parts import PLAN
from qaudit.saved.signature import may_sign, signed_export
from qaudit.support.sizes import size
from qaudit.types import Watch, digest
from qaudit.version import __version__

Alone = Callable[[Path], ExportChoice]
"""Write an audit of a file that no audit judged into a folder, and return the choice with it."""


@dataclass(frozen=True)
class Origin:
    """What the weights were made with."""

    key: str  # of their result
    dtype: str
    device: str
    calibration_seed: int
    corpus_sha256: str


@dataclass(frozen=True, eq=False)
class Work:
    """One export under way."""

    choice: ExportChoice
    form: Format
    origin: Origin
    out: Path
    watch: Watch

    @property
    def identity(self) -> str:
        return digest([self.origin.key, self.form.name, __version__])


def write_export_folder(
    work: Work,
    weights: Weights,
    begun: Path,
    shard_nbytes: int,
    make: Callable[[Parts, Names], Alone | None],
) -> None:
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
        work.form.mixed = parts.mixed
        config = work.form.config(outside, symmetric=_is_symmetric(done), dtype=work.origin.dtype)
        _assemble(work.form, files, folder, source, config, shard_nbytes)
        _write_beside(work, parts, folder, alone)


def _assemble(
    form: Format, parts: Sequence[Path], folder: Path, source: Path, config: Document, nbytes: int
) -> None:
    form.assemble(parts, folder, nbytes)
    if not form.has_settings:
        return
    copy_settings(source, folder)
    whole = form.whole_config(read_configuration(source), config)
    for name, document in (("config.json", whole), *((name, config) for name in form.config_files)):
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def dense_of(parts: Parts) -> dict[str, str]:
    return {name: sha256 for part in parts.done.values() for name, sha256 in part.dense.items()}


def _bits_per_weight(parts: Parts) -> float:
    shapes = (parts.weights.shape(f"{linear}.weight") for linear in dense_of(parts))
    nbytes = sum(part.nbytes for part in parts.done.values())
    return 8 * nbytes / max(sum(map(math.prod, shapes)), 1)


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


def _write_beside(work: Work, parts: Parts, folder: Path, alone: Alone | None) -> None:
    choice, all_parts = work.choice, list(parts.done.values())
    (folder / EVIDENCE).mkdir()
    if alone is not None:
        choice = alone(folder / EVIDENCE)
    _copy_evidence(choice, folder / EVIDENCE)
    record = ExportRecord(
        schema="1",
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
        mixture=parts.mixed,
        dense=dense_of(parts),
        rest={name: one for part in all_parts for name, one in part.rest.items()},
        files=hashes_in(folder),
        libraries=libraries([choice.scheme], [choice.subject.merge]) | _of_format(work.form),
    )
    if alone is None and may_sign(choice.record, choice.folder):
        record = signed_export(record)
    write_export(record, folder)
    config = read_configuration(folder if work.form.has_settings else folder / EVIDENCE)
    card = export_card(choice, record, work.form, config, choice.repo or work.out.name)
    (folder / README).write_text(card, encoding="utf-8")


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


def _shapes(weights: Weights, parts: Sequence[Part]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weights.shape(name)) for part in parts for name in part.rest}
