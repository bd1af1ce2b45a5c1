"""Many partly quantized models in one pass: each block is quantized once, and shared by all.

All variants take their quantized weights from the same statistics, those of the full-precision
stream. So a block is quantized once for each number of bits, however many variants there are,
and a variant costs its evaluation alone. What is given up: a scheme that calibrates on its own
past (GPTQ) is calibrated here on the unquantized model's, and all of it quantized this way is
close to what the audit measures under that scheme, and not the same.

Where a scheme's error comes from: each role and group of layers quantized alone, and all of it.

The parts are measured in one pass, from one quantization of each block.

Losses are stored per document, as those of a measurement are: everything here is paired with the
full-precision stream of the audit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from qaudit.checkpoints.stamps import unchanged_files
from qaudit.core import statistics
from qaudit.core.linears import Quantized
from qaudit.core.scheme import Calibration, Scheme
from qaudit.diagnostics.case import Case, Measure
from qaudit.diagnostics.diagnostic import role_of
from qaudit.diagnostics.sensitivity import Sensitivity, Variant, variants_of
from qaudit.engine.block_pass import Progress, Route, feed_of, opened_states, run_streams
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.read_out import evidence_of
from qaudit.engine.streams import FullPrecision, Stream
from qaudit.engine.tally import RoutingWatch, Tally
from qaudit.engine.tokens import Feed, Tokens
from qaudit.errors import ModelError
from qaudit.model.blocks import Block, BlockModel
from qaudit.model.config import is_remote
from qaudit.saved.results import ResultFile, ResultStore, sha256_of
from qaudit.types import FULL_PRECISION, Evidence, Measurement, SensitivityRow, digest

Storage = tuple[Counter[tuple[str, int]], dict[tuple[str, int], float]]
"""How many weights each role has with so many bits each, and what those take to store."""


@torch.no_grad()
def run_partly(
    model: BlockModel,
    feed: Feed,
    scheme: Scheme,
    variants: Sequence[Variant],
    states: HiddenStates,
    progress: Progress,
) -> tuple[Mapping[Variant, Tally], Storage]:
    """Send the evaluation through every variant; return a tally each, and what roles take."""
    tokens = Tokens(model, replace(feed, items=(), compared=False), states, RoutingWatch(()))
    full = _Quantizing(scheme, sorted({bits for variant in variants for _, bits in variant.bits}))
    streams = [_Partly(variant, full) for variant in variants]
    tokens.embed(calibration=full.captures)
    run_streams(tokens, [full, *streams], progress)
    return {stream.variant: stream.tally for stream in streams}, full.storage


class _Quantizing(FullPrecision):
    """Full precision, on whose statistics each block is quantized for each number of bits."""

    def __init__(self, scheme: Scheme, bits: Sequence[int]) -> None:
        super().__init__(evaluated=False)
        self.captures = scheme.calibration is not Calibration.NONE
        self._schemes: dict[int, Scheme] = {
            number: replace(scheme, bits=number)  # type: ignore[call-arg]
            for number in bits
        }
        self.storage: Storage = Counter(), defaultdict(float)
        self.weights: dict[tuple[int, str], Tensor] = {}  # of a block, by bits and linear

    def enter(self, block: Block, tokens: Tokens) -> Block:
        super().enter(block, tokens)
        self.weights.clear()
        for bits, scheme in self._schemes.items():
            for group in block.groups:
                quantized = scheme.quantize(tokens.linears(block, group, self.inputs(group)))
                count = sum(weight_RC.numel() for weight_RC in quantized.weights.values())
                for name, weight_RC in quantized.weights.items():
                    self.weights[bits, name] = weight_RC
                    # A group's linears have the same columns: each row takes the same.
                    part, (weights, stored) = (role_of(name), bits), self.storage
                    weights[part] += weight_RC.numel()
                    stored[part] += quantized.bits * weight_RC.numel() / count
        return block


class _Partly(Stream):
    """A stream of which some linears are quantized."""

    evaluated = True

    def __init__(self, variant: Variant, full: _Quantizing) -> None:
        self.variant, self._full, self.tally = variant, full, Tally()
        self.name = f"{variant.part} {variant.spec}"
        self.label = f"{variant.part} {variant.name}"

    def enter(self, block: Block, tokens: Tokens) -> Block:
        weights = {
            name: self._full.weights[bits, name]
            for group in block.groups
            for name in group.linears
            if (bits := self.variant.bits_of(block.index, name)) is not None
        }
        block.install(Quantized(weights, bits=0))
        return block


VERSION = 1
"""Raised whenever what is computed here changes a number."""


def measure_sensitivity(case: Case) -> list[SensitivityRow]:
    parameters = cast(Sensitivity, case.parameters)
    scheme = parameters.scheme_among(case.task.schemes)
    low = min(int(scheme.bits), 7)  # type: ignore[attr-defined]  # 8 is the most, for one more
    if is_remote(case.folder):
        raise ModelError(
            "a model with code in its own repository cannot be quantized by roles",
            hint="leave `sensitivity` out",
        )
    with unchanged_files(case.subject, case.task.folder):
        weights = case.weights()
        model, _ = Route(case.folder, weights, case.machine).streamed()
        roles = tuple(dict.fromkeys(map(role_of, model.linears)))
        variants = variants_of(roles, model.num_blocks, low, low + 1, parameters.layers)
        feed = feed_of(case.task, case.machine, weights)
        with opened_states(case.machine) as states:
            tallies, (weights_of, stored) = run_partly(
                model, feed, scheme, variants, states, case.progress
            )
    store, key = ResultStore(case.store.folder.parent), case.task.identity(None, case.machine).key
    full = store.find(case.subject.label, FULL_PRECISION, key)
    assert full is not None, "a subject is measured before it is diagnosed"
    files, identity = {}, vars(case.task.identity(scheme, case.machine))
    for variant, tally in tallies.items():
        bits = f"{variant.bits[0][1]}bit" if variant.part == "role" else "bits"
        measured = Measurement(
            subject=case.subject.label,
            scheme=f"{scheme.short} {variant.part} {variant.name} {bits}",
            spec=f"{scheme.spec} of {variant.spec}",
            evidence=evidence_of(case.corpus, feed, tally),
            # Of some layers, the bits of all layers.
            bits_per_weight=sum(stored[p] for p in variant.bits)
            / sum(weights_of[p] for p in variant.bits),
            seconds=tally.seconds,
            calibration_seed=case.corpus.protocol.calibration_seed,
        )
        parts = {**identity, "of": variant.spec, "sensitivity": VERSION}
        files[variant] = case.store.write(measured, digest(parts))
    return _rows(case, scheme, model.num_blocks, full.measurement.evidence, files, weights_of)


def _rows(
    case: Case,
    scheme: Scheme,
    blocks: int,
    full: Evidence,
    files: Mapping[Variant, ResultFile],
    weights_of: Counter[tuple[str, int]],
) -> list[SensitivityRow]:
    used, confidence = full.scored(), case.confidence
    full_D, tokens_D = full.nll_sum[used], full.tokens[used]
    losses = {v: file.measurement.evidence.nll_sum[used] for v, file in files.items()}
    added = {variant: loss_D - full_D for variant, loss_D in losses.items()}
    rows = []
    for variant, file in files.items():
        share = predicted = None
        if variant.part == "all":
            alone = [Variant("role", role, ((role, bits),)) for role, bits in variant.bits]
            predicted = sum(float(added[v].sum()) for v in alone) / float(tokens_D.sum())
        else:
            bits = variant.bits[0][1]
            kind = [v for v in files if v.part == variant.part and v.bits[0][1] == bits]
            together = np.sum([added[v] for v in kind], axis=0)
            if together.sum() > 0:
                sums = added[variant], together
                share = statistics.interval(sums, lambda s: s[0] / s[1], confidence)
        count = sum(weights_of[part] for part in variant.bits)
        if variant.blocks is not None:  # blocks hold as many weights each
            count = count * (variant.blocks[1] - variant.blocks[0]) // blocks
        pair = losses[variant], full_D
        rows.append(
            SensitivityRow(
                subject=case.subject.label,
                scheme=scheme.short,
                spec=scheme.spec,
                part=variant.part,
                name=variant.name,
                bits=min(bits for _, bits in variant.bits),
                bits_per_weight=file.measurement.bits_per_weight,
                weights=count,
                absolute_change=statistics.absolute_change(*pair, tokens_D, confidence),
                relative_error=statistics.relative_error(*pair, confidence),
                share=share,
                predicted=predicted,
                documents=int(used.sum()),
                evidence=file.path.relative_to(case.store.folder.parent.parent).as_posix(),
                evidence_sha256=sha256_of(file.path),
            )
        )
    return rows


MEASURE = Measure(measure_sensitivity)
