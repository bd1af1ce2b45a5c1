"""What cannot be exported: refused before anything is computed, and before it is downloaded."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from qaudit.checkpoints.stamps import folder_of
from qaudit.core.mixture import Mixture
from qaudit.core.scheme import Scheme
from qaudit.errors import MachineError, SourceError, UsageError
from qaudit.export.choice import ExportChoice
from qaudit.export.packed import refuse_rounded
from qaudit.formats.packing import Format, changed_inputs, declared_group
from qaudit.hub import Hub
from qaudit.model.blocks import Weights
from qaudit.model.experts import is_fused
from qaudit.model.skeleton import Shapes, build_skeleton
from qaudit.model.stored_names import Unfused
from qaudit.planning.survey import shapes_of
from qaudit.support.lazy import torch
from qaudit.support.sizes import size


def try_format(scheme: Scheme, form: Format) -> None:
    from qaudit.core.linears import Inputs, Linears

    if isinstance(scheme, Mixture):
        if not form.mixes_bits:
            raise UsageError(
                f"`{scheme.short}` has linears of several widths, and `{form.name}` files have one",
                hint="export it as `compressed-tensors`, `gptq`, `mlx` or `gguf`",
            )
        for bits in scheme.widths:
            try_format(scheme.member(bits), form)
        return
    columns = 256
    if (group := declared_group(scheme)) != -1:
        columns = 2 * math.lcm(group, columns)
    weight_RC = torch.linspace(-1, 1, 128 * columns).reshape(128, columns)
    x_CC, ones_C = torch.eye(columns), torch.ones(columns)
    inputs = Inputs(x_CC, ones_C, columns, ones_C, sample_TC=x_CC)
    refuse_rounded(scheme)
    linears = Linears({"linear": weight_RC}, inputs, block_has_norm_folds=True)
    quantized = scheme.quantize(linears)
    runtime_rounds = scheme.layout is not None and scheme.layout.rounds_inputs
    if quantized.inputs is not None and not runtime_rounds:
        raise changed_inputs(scheme)
    form.pack("linear", quantized.stored["linear"])


def must_be_the_text(choice: ExportChoice, corpus_sha256: str) -> None:
    """Refuse calibration text that is not the audit's."""
    if choice.record is None:
        return
    measured = choice.record.protocol.get("corpus_sha256")
    if measured != corpus_sha256:
        raise SourceError(
            "the text that was measured on has changed since the audit, so that the exported "
            "weights would be others",
            hint="restore the text, or scan again",
        )


def must_have_names(choice: ExportChoice, hub: Hub, form: Format) -> None:
    try:
        base = choice.subject.first.sources[0]
        shapes = shapes_of(base, hub.fetcher.settings(base), hub)
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
    free = shutil.disk_usage(begun).free
    if needed > free:
        raise MachineError(
            f"the export takes up to {size(needed)} while it is written, and {size(free)} are "
            f"free at `{begun.parent}`",
            hint="give a folder on another disk with `--out`",
        )
    form.start(folder_of(choice.subject.first), begun, named.names())
    return named
