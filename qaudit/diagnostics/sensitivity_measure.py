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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qaudit.checkpoints.stamps import unchanged_files
from qaudit.core import statistics
from qaudit.core.linears import Quantized
from qaudit.core.scheme import Calibration, Scheme
from qaudit.diagnostics.case import Case, Measure
from qaudit.diagnostics.roles import role_of
from qaudit.diagnostics.sensitivity import (
    Sensitivity,
    Variant,
    low_and_high,
    variants_of,
)
from qaudit.engine.block_pass import Progress, feed_of, opened_states, route_of
from qaudit.engine.evidence import evidence_of
from qaudit.engine.gathering import Captured, capture_inputs
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.tally import Tally, timed
from qaudit.engine.tokens import Feed
from qaudit.errors import ModelError
from qaudit.model.blocks import Block, BlockModel
from qaudit.model.config import is_remote
from qaudit.saved.results import ResultFile, ResultStore, sha256_of
from qaudit.types import (
    FULL_PRECISION,
    Evidence,
    Interval,
    Measurement,
    SensitivityRow,
    digest,
)

_FULL = "calibration/full"


@dataclass(frozen=True, eq=False)
class Storage:
    """How many weights each role has with so many bits each, and what those take to store."""

    weights: dict[tuple[str, int], int]
    bits: dict[tuple[str, int], float]


@torch.no_grad()
def run_partly(
    model: BlockModel,
    feed: Feed,
    scheme: Scheme,
    variants: Sequence[Variant],
    streams: HiddenStates,
    progress: Progress,
) -> tuple[Mapping[Variant, Tally], Storage]:
    """Send the evaluation through every variant; return a tally each, and what roles take."""
    walk = _PartsWalk(model, feed, scheme, {variant: Tally() for variant in variants}, streams)
    walk.embed()
    storage = Storage({}, {})
    for block in model.blocks():
        walk.pass_block(block, storage, progress)
    progress(model.num_blocks, model.num_blocks, "head")
    for number, tally in enumerate(walk.tallies.values()):
        for k, batch in enumerate(feed.evaluation):
            hidden_BTD = streams.get(f"evaluation/{number}", k)
            tally.rows.append({"nll_N": model.nll(hidden_BTD, batch.tokens_BT).cpu()})
        streams.drop(f"evaluation/{number}")
    return walk.tallies, storage


@dataclass(frozen=True, eq=False)
class _PartsWalk:
    model: BlockModel
    feed: Feed
    scheme: Scheme
    tallies: Mapping[Variant, Tally]
    streams: HiddenStates

    def embed(self) -> None:
        parts = {_FULL: self.feed.calibration, "evaluation": self.feed.evaluation}
        for name, batches in parts.items():
            for k, batch in enumerate(batches):
                hidden_BTD = self.model.embed(batch.tokens_BT.to(self.model.device))
                self.streams.put(name, k, hidden_BTD)

    def pass_block(self, block: Block, storage: Storage, progress: Progress) -> None:
        """Quantize a block for each number of bits, and send every variant through its mixture."""

        def report(what: str) -> None:
            progress(block.index, self.model.num_blocks, what)

        report(self.scheme.short)
        captured = self._captured(block)
        by_bits = {bits: self._quantized(block, bits, captured) for bits in self._bits()}
        for bits, weights in by_bits.items():
            _count(storage, bits, weights)
        for number, (variant, tally) in enumerate(self.tallies.items()):
            report(f"{variant.part} {variant.name}")
            with timed(self.model.device, tally):
                self._evaluate(block, number, variant, by_bits)
        if block.index == 0:
            self.streams.drop("evaluation")
        for embedded in (_FULL, "evaluation"):
            self.streams.drop_given(embedded, self.model.links.passed(block.index))

    def _bits(self) -> list[int]:
        return sorted({bits for variant in self.tallies for _, bits in variant.bits})

    def _captured(self, block: Block) -> Captured | None:
        if self.scheme.calibration is Calibration.NONE:
            return None
        batches = (
            (self.streams.entering(_FULL, _FULL, block, k), batch.valid_BT())
            for k, batch in enumerate(self.feed.calibration)
        )

        def keep(k: int, hidden_BTD: Tensor) -> None:
            self.streams.put(_FULL, k, hidden_BTD)

        return capture_inputs(block, batches, keep)

    def _quantized(
        self, block: Block, bits: int, captured: Captured | None
    ) -> dict[str, tuple[Tensor, float]]:
        """Return every linear's quantized weight with what it takes, as part of its group."""
        scheme: Scheme = replace(self.scheme, bits=bits)  # type: ignore[call-arg]
        weights_of: dict[str, tuple[Tensor, float]] = {}
        for group in block.groups:
            inputs = None if captured is None else captured.get(group)
            linears = block.linears(group, inputs)
            quantized = scheme.quantize(replace(linears, column_loop=self.feed.column_loop))
            weights = sum(weight_RC.numel() for weight_RC in quantized.weights.values())
            for name, weight_RC in quantized.weights.items():
                # A group's linears have the same columns: what each row takes is the same.
                weights_of[name] = weight_RC, quantized.bits * weight_RC.numel() / weights
        return weights_of

    def _evaluate(
        self, block: Block, number: int, variant: Variant, by_bits: Mapping[int, Mapping[str, Any]]
    ) -> None:
        weights = {
            name: by_bits[bits][name][0]
            for group in block.groups
            for name in group.linears
            if (bits := variant.bits_of(block.index, name)) is not None
        }
        block.install(Quantized(weights, bits=0))
        for k in range(len(self.feed.evaluation)):
            stream = f"evaluation/{number}"
            entering_BTD = self.streams.entering(stream, "evaluation", block, k)
            self.streams.put(stream, k, block.forward(entering_BTD))
        block.restore()


def _count(storage: Storage, bits: int, weights: Mapping[str, tuple[Tensor, float]]) -> None:
    for name, (weight_RC, taken) in weights.items():
        part = role_of(name), bits
        storage.bits[part] = storage.bits.get(part, 0.0) + taken
        storage.weights[part] = storage.weights.get(part, 0) + weight_RC.numel()


VERSION = 1
"""Raised whenever what is computed here changes a number."""

Mask = npt.NDArray[np.bool_]


def measure_sensitivity(case: Case) -> list[SensitivityRow]:
    """Measure the parts."""
    parameters = cast(Sensitivity, case.parameters)
    scheme = parameters.scheme_among(case.task.schemes)
    low, high = low_and_high(scheme)
    if is_remote(case.folder):
        raise ModelError(
            "a model with code in its own repository cannot be quantized by roles",
            hint="leave `sensitivity` out",
        )
    with unchanged_files(case.subject, case.task.folder):
        model, _ = route_of(case.task, case.weights(), case.machine).streamed()
        roles = tuple(dict.fromkeys(map(role_of, model.linears)))
        variants = variants_of(roles, model.num_blocks, low, high, parameters.layers)
        feed = feed_of(case.task)
        with opened_states(case.machine) as streams:
            tallies, storage = run_partly(model, feed, scheme, variants, streams, case.progress)
    parts = _Parts(case, scheme, model.num_blocks, _full(case), storage)
    for variant, tally in tallies.items():
        parts.write(variant, feed, tally)
    return parts.rows()


def _full(case: Case) -> Measurement:
    store = ResultStore(case.store.folder.parent)
    key = case.task.identity(None, case.machine).key
    filed = store.find(case.subject.label, FULL_PRECISION, key)
    assert filed is not None, "a subject is measured before it is diagnosed"
    return filed.measurement


@dataclass(frozen=True, eq=False)
class _Parts:
    """What is measured of one subject."""

    case: Case
    scheme: Scheme
    blocks: int
    full: Measurement
    storage: Storage
    filed: dict[Variant, ResultFile] = field(default_factory=dict)

    def write(self, variant: Variant, feed: Feed, tally: Tally) -> None:
        corpus = self.case.corpus
        measured = Measurement(
            subject=self.case.subject.label,
            scheme=self._named(variant),
            spec=f"{self.scheme.spec} of {variant.spec}",
            evidence=evidence_of(corpus, feed, tally),
            bits_per_weight=self._bits_per_weight(variant),
            seconds=tally.seconds,
            calibration_seed=corpus.protocol.calibration_seed,
        )
        identity = vars(self.case.task.identity(self.scheme, self.case.machine))
        key = digest({**identity, "of": variant.spec, "sensitivity": VERSION})
        self.filed[variant] = self.case.store.write(measured, key)

    def _named(self, variant: Variant) -> str:
        bits = f"{variant.bits[0][1]}bit" if variant.part == "role" else "bits"
        return f"{self.scheme.short} {variant.part} {variant.name} {bits}"

    def _role(self, role: str, bits: int) -> Measurement:
        return self.filed[Variant("role", role, ((role, bits),))].measurement

    def rows(self) -> list[SensitivityRow]:
        return [self._row(variant, filed) for variant, filed in self.filed.items()]

    def _row(self, variant: Variant, filed: ResultFile) -> SensitivityRow:
        evidence, full = filed.measurement.evidence, self.full.evidence
        together = variant.part == "all"
        used = full.scored()
        pair = evidence.nll_sum[used], full.nll_sum[used]
        bits = {bits for _, bits in variant.bits}
        relative = statistics.relative_error(*pair, self.case.confidence)
        return SensitivityRow(
            subject=self.case.subject.label,
            scheme=self.scheme.short,
            spec=self.scheme.spec,
            part=variant.part,
            name=variant.name,
            bits=min(bits),
            bits_per_weight=self._bits_per_weight(variant),
            weights=self._weights(variant),
            absolute_change=statistics.absolute_change(
                *pair, full.tokens[used], self.case.confidence
            ),
            relative_error=relative,
            share=None if together else self._share(variant, used),
            predicted=self._predicted(variant, used) if together else None,
            documents=int(used.sum()),
            evidence=filed.path.relative_to(self.case.store.folder.parent.parent).as_posix(),
            evidence_sha256=sha256_of(filed.path),
        )

    def _share(self, variant: Variant, used: Mask) -> Interval | None:
        bits = variant.bits[0][1]
        kind = [v for v in self.filed if v.part == variant.part and v.bits[0][1] == bits]
        added = [self._added(self.filed[draw].measurement.evidence, used) for draw in kind]
        mean = self._added(self.filed[variant].measurement.evidence, used)
        if not np.sum(added) > 0:
            return None
        return statistics.interval(
            (mean, np.sum(added, axis=0)), lambda sums: sums[0] / sums[1], self.case.confidence
        )

    def _predicted(self, variant: Variant, used: Mask) -> float:
        added = sum(
            float(self._added(self._role(role, bits).evidence, used).sum())
            for role, bits in variant.bits
        )
        return added / float(self.full.evidence.tokens[used].sum())

    def _added(self, evidence: Evidence, used: Mask) -> npt.NDArray[np.float64]:
        return (evidence.nll_sum - self.full.evidence.nll_sum)[used]

    def _bits_per_weight(self, variant: Variant) -> float:
        """Return the bits of each quantized weight; of some layers, those of all layers."""
        stored = sum(self.storage.bits[part] for part in variant.bits)
        return stored / sum(self.storage.weights[part] for part in variant.bits)

    def _weights(self, variant: Variant) -> int:
        """Return how many weights are quantized; blocks hold as many each."""
        count = sum(self.storage.weights[part] for part in variant.bits)
        if variant.blocks is None:
            return count
        return count * (variant.blocks[1] - variant.blocks[0]) // self.blocks


MEASURE = Measure(measure_sensitivity)
