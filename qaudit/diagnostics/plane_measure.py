"""The loss on a slice through a subject: towards its quantized self, and the checkpoint before.

The cheap form is a line: one pass in which every point along the direction of quantization is a
stream beside full precision and the scheme itself, whatever the size of the model. To the engine
such a point is one more scheme: `Along` makes W + b * u of a weight W, where u is what `Anchor` saw
the real scheme do to it. Nothing is calibrated twice, and no model has to be held whole.

The grid is such a pass for every step towards the checkpoint before, a source of weights merged as
they are read. The direction of quantization is kept from the first pass: it is that of the subject
itself and not of its neighbours.

The scheme may be any that leaves weights behind, GPTQ and AWQ too, calibrated on the audit's
text. Weights are read, moved and run in float32: in a shorter format the small steps near the
middle would be rounding. Losses are those of fixed documents, each point paired with the middle
document by document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from qaudit.checkpoints.stamps import unchanged_files
from qaudit.core import statistics
from qaudit.core.linears import Linears, Quantized
from qaudit.core.scheme import Calibration, Scheme, StandIn
from qaudit.core.statistics import Array
from qaudit.diagnostics.case import Case, DocumentChoice, Measure
from qaudit.diagnostics.plane import Plane
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import Route, opened_states
from qaudit.engine.read_out import document_sums
from qaudit.engine.tokens import Feed
from qaudit.errors import SchemeError
from qaudit.model.blocks import Weights
from qaudit.model.routes import MergedWeights
from qaudit.settings import EXAMPLE_SCHEME
from qaudit.types import FULL_PRECISION, PlaneRow

Point = tuple[float, float]
"""(a, b)."""
Place = tuple[int, str]
"""A block, and the name of a linear in it."""


def measure_plane(case: Case) -> list[PlaneRow]:
    parameters = cast(Plane, case.parameters)
    choice = DocumentChoice.of(case.corpus, parameters.documents, "a slice")
    earlier = case.previous if parameters.grid else None
    before = None if earlier is None else case.weights(earlier)
    previous = None if earlier is None else earlier.label
    scheme = parameters.scheme_among(case.task.schemes)
    anchor = Anchor(inner=scheme, keeps=before is not None)
    notes = ["weights moved and run in float32"]
    with unchanged_files(case.subject, case.task.folder):
        weights = case.weights()
        losses = _line(case, choice, anchor, weights, 0.0)
        if before is not None and previous is not None:
            for a in (a for a in parameters.along if a != 0.0):
                labels = case.subject.label, previous
                moved = MergedWeights(labels, (weights, before), partial(between, part=a))
                losses |= _line(case, choice, anchor, moved, a)
        elif parameters.grid:
            notes.append("the checkpoint before is not on disk: only the line was measured")
    tokens_D = np.array([sum(w.scored for w in part) for part in choice.windows])
    middle_D, confidence = losses[0.0, 0.0], case.confidence
    return [
        PlaneRow(
            subject=case.subject.label,
            scheme=scheme.short,
            spec=scheme.spec,
            a=a,
            b=b,
            ce=statistics.cross_entropy(loss_D, tokens_D, confidence),
            absolute_change=statistics.absolute_change(loss_D, middle_D, tokens_D, confidence),
            previous=previous,
            documents=len(tokens_D),
            tokens=int(tokens_D.sum()),
            documents_sha256=choice.sha256,
            notes=tuple(notes),
        )
        for (a, b), loss_D in sorted(losses.items())
    ]


def _line(
    case: Case, choice: DocumentChoice, anchor: Anchor, weights: Weights, a: float
) -> dict[Point, Array]:
    """Return the losses of the chosen documents at each point along the quantization."""
    first = a == 0.0
    along = cast(Plane, case.parameters).along
    schemes: dict[float, Scheme] = {1.0: anchor} if first else {}
    schemes |= {b: Along(anchor=anchor, part=b) for b in along if b != 0.0 and b not in schemes}
    corpus, limit = case.corpus, case.task.pad_until
    context = corpus.protocol.context
    windows = [window for part in choice.windows for window in part]
    feed = Feed(
        make_batches(corpus.calibration if first else (), context, pad_until=limit),
        make_batches(windows, context, pad_until=limit),
        compared=False,
    )
    machine = replace(case.machine, dtype=torch.float32)
    with opened_states(machine) as states:
        tallies = Route(case.folder, weights, machine).follow(
            feed,
            [*schemes.values()],
            states,
            lambda done, total, what: case.progress(done, total, f"plane a={a:g}: {what}"),
        )
    losses: dict[Point, Array] = {}
    for b, spec in {0.0: FULL_PRECISION, **{b: s.spec for b, s in schemes.items()}}.items():
        nll, count = tallies[spec].nll, len(corpus.documents)
        loss_D, _ = document_sums(feed.evaluation, nll, windows, count)
        losses[a, b] = loss_D[list(choice.documents)]
    return losses


@dataclass(frozen=True, kw_only=True)
class Anchor(StandIn):
    """Quantize as a scheme does, and remember by how much every weight moved."""

    keeps: bool  # all blocks, and not only those that no point has read yet
    moved: dict[Place, Tensor] = field(default_factory=dict, compare=False)
    read: set[int] = field(default_factory=set, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "calibration", self.inner.calibration)

    def made(self, linears: Linears, quantized: Quantized) -> Quantized:
        if quantized.forwards or quantized.inputs:
            raise SchemeError(
                f"`{self.inner.short}` quantizes activations too: no weights are its model",
                hint=f"name another scheme, as `--set diagnostics=plane:scheme={EXAMPLE_SCHEME}`",
            )
        if not self.keeps:
            for place in [p for p in self.moved if p[0] in self.read and p[0] != linears.block]:
                del self.moved[place]
        for name, weight_RC in linears.weights.items():
            after_RC = quantized.weights[name].to(weight_RC.device, torch.float32)
            self.moved[linears.block, name] = after_RC - weight_RC.float()
        return quantized


@dataclass(frozen=True, kw_only=True)
class Along(Scheme):
    """Go a part of the way that quantization moves every weight."""

    anchor: Anchor
    part: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.anchor.name)
        object.__setattr__(self, "calibration", Calibration.NONE)

    @property
    def short(self) -> str:
        return f"{self.part:g} of {self.anchor.short}"

    @property
    def spec(self) -> str:
        return f"{self.part!r} of {self.anchor.spec}"

    @property
    def remark(self) -> str | None:
        # the scheme has its own
        return None

    def quantize(self, linears: Linears) -> Quantized:
        self.anchor.read.add(linears.block)
        weights = {}
        for name, weight_RC in linears.weights.items():
            moved_RC = weight_RC.float() + self.part * self.anchor.moved[linears.block, name]
            weights[name] = moved_RC.to(weight_RC.dtype)
        return Quantized(weights, bits=0)


def between(tensors: Sequence[Tensor], part: float) -> Tensor:
    """Return a tensor a part of the way to that of another checkpoint."""
    here, origin = (tensor.float() for tensor in tensors)
    return here + part * (origin - here)


MEASURE = Measure(measure_plane)
