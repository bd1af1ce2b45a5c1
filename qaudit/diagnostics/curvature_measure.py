"""How much memory products with the Hessian take, and what is done where there is less.

Beside the weights there are vectors as long as them (`hessian.py`), the hidden states and their
gradients between the blocks, and the graph of one block or of the head through two backward
passes. What of these is alive at the worst moment was read off `python -m benchmarks.curvature`
at several shapes; the factors below stay above all of them.

Trace and largest eigenvalues of the Hessian of a subject's loss, for all its parameters.

The model is held whole, in float32 whatever the dtype of its weights, with the plain formula for
attention (`hessian.py`). Documents are fixed by content: those evaluation documents whose hashes
come first, the same for every subject and whatever order the text has. The interval around the
trace is over the probes; a second one, over documents too, covers other documents like these:
probes are crossed with documents
(`core/statistics.py`). The samples of single tensors add up to roles and layers, at no cost.

What does not fit in memory is made smaller, with a note: fewer windows side by side. A model or
vectors of Lanczos that do not fit are refused with the memory that they would take.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch

from qaudit.core.spectrum import (
    EigenSearch,
    Ends,
    Probing,
    Trace,
    estimate_trace,
    find_ends,
)
from qaudit.core.statistics import crossed
from qaudit.diagnostics.case import Case, DocumentChoice, Measure
from qaudit.diagnostics.curvature import Curvature
from qaudit.diagnostics.curvature_hessian import LossHessian, cut
from qaudit.diagnostics.diagnostic import role_of
from qaudit.errors import MachineError
from qaudit.host import available_nbytes
from qaudit.model.config import read_config
from qaudit.model.device import free_nbytes
from qaudit.model.routes import Weights
from qaudit.model.skeleton import find_blocks, load_whole
from qaudit.support.sizes import size
from qaudit.types import CurvatureRow

VECTORS = 6  # weights, v, the sum, gradients of both passes, and what is being freed
OF_HIDDEN, OF_INNER, OF_ATTENTION, OF_LOGITS = 40, 14, 19, 7  # copies alive in a graph
ITEMSIZE = 4
POSITIONS = 4096  # side by side at most
SHARE = 0.9  # of what is free


@dataclass(frozen=True)
class PassShape:
    """What of a model decides how much its second derivatives take."""

    parameters: int
    blocks: int
    hidden: int
    inner: int
    heads: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any, weights: Weights) -> PassShape:
        """Read a configuration of `transformers`; what is missing there has its usual value."""
        text = config.get_text_config()
        hidden = int(text.hidden_size)
        inner = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None)
        return cls(
            parameters=sum(math.prod(weights.shape(name)) for name in weights.names()),
            blocks=int(text.num_hidden_layers),
            hidden=hidden,
            inner=int(inner or 4 * hidden),
            heads=int(getattr(text, "num_attention_heads", None) or 1),
            vocabulary=int(text.vocab_size),
        )

    @property
    def vector_nbytes(self) -> int:
        """What a vector takes that is as long as the model has parameters."""
        return ITEMSIZE * self.parameters


def product_nbytes(shape: PassShape, windows: int, length: int) -> int:
    tokens = windows * length
    between = 2 * (shape.blocks + 1) * tokens * shape.hidden
    block = tokens * (
        OF_HIDDEN * shape.hidden + OF_INNER * shape.inner + OF_ATTENTION * shape.heads * length
    )
    head = OF_LOGITS * tokens * shape.vocabulary
    return VECTORS * shape.vector_nbytes + ITEMSIZE * (between + max(block, head))


def find_room(
    shape: PassShape, length: int, parameters: Curvature, device: torch.device
) -> tuple[int, tuple[str, ...]]:
    """Return how many windows fit side by side, with a note, or refuse with what they take."""
    free = room_nbytes(device)
    basis = parameters.steps * shape.vector_nbytes if parameters.eigenvalues else 0
    most = max(1, POSITIONS // length)
    for windows in range(most, 0, -1):
        if product_nbytes(shape, windows, length) <= free - basis:
            text = f"{windows} of {most} windows side by side, to fit in memory"
            return windows, () if windows == most else (text,)
    needed = product_nbytes(shape, 1, length)
    more = f", and eigenvalues {size(basis)} more" if basis else ""
    smaller = "the trace alone with `curvature:eigenvalues=0`, or fewer `steps`"
    raise MachineError(
        f"curvature of {shape.parameters:,} parameters takes {size(needed)} of memory{more}; "
        f"{size(free)} are free",
        hint=f"measure {smaller}"
        if needed <= free
        else "use a machine with more memory, or a shorter `--set context=N`",
    )


def room_nbytes(device: torch.device) -> int:
    return int(SHARE * (free_nbytes(device) if device.type == "cuda" else available_nbytes()))


def measure_curvature(case: Case) -> list[CurvatureRow]:
    parameters = cast(Curvature, case.parameters)
    choice = DocumentChoice.of(case.corpus, parameters.documents, "curvature")
    weights, device = case.weights(), case.machine.device
    trust = case.machine.trust_remote_code
    shape = PassShape.of(read_config(case.folder, trust_remote_code=trust), weights)
    longest = max(len(window.tokens) for windows in choice.windows for window in windows)
    notes: tuple[str, ...] = ()
    if device.type == "mps":
        device = torch.device("cpu")
        notes = ("computed on the CPU: this device has no double precision",)
    windows, of_memory = find_room(shape, longest, parameters, device)
    model = load_whole(case.folder, weights, torch.float32, trust_remote_code=trust).to(device)
    name = find_blocks(model, case.folder)
    parts = cut(choice.windows, longest, windows * longest, case.task.pad_until)
    hessian = LossHessian(model, list(model.get_submodule(name)), parts)
    trace = estimate_trace(
        hessian,
        sum(hessian.sizes),
        hessian.like,
        Probing(
            probes=parameters.probes,
            tolerance=parameters.tolerance,
            seed=parameters.seed,
            confidence=case.confidence,
        ),
        lambda done, total: case.progress(done, total, f"curvature: product {done}"),
    )
    ends = None
    if parameters.eigenvalues:
        ends = find_ends(
            hessian.multiply,
            sum(hessian.sizes),
            hessian.like,
            EigenSearch(
                parameters.eigenvalues, parameters.steps, parameters.residual, parameters.seed
            ),
            lambda done, total: case.progress(done, total, f"curvature: step {done}"),
        )
    tokens_D = hessian.tokens_D
    whole = CurvatureRow(
        subject=case.subject.label,
        part="model",
        name="all",
        parameters=sum(hessian.sizes),
        trace=trace.interval,
        trace_elsewhere=crossed(trace.forms_NK[:, : len(tokens_D)], tokens_D, case.confidence),
        loss=hessian.loss(),
        eigenvalues=tuple(end.value for end in ends.largest) if ends else (),
        residuals=tuple(end.residual for end in ends.largest) if ends else (),
        smallest=ends.smallest.value if ends else None,
        probes=len(trace.samples_N),
        products=len(trace.samples_N) + (ends.steps if ends else 0),
        documents=len(tokens_D),
        tokens=int(tokens_D.sum()),
        documents_sha256=choice.sha256,
        notes=(*notes, *of_memory, *_unreached(trace, ends)),
    )
    return [whole, *_parts(case.subject.label, hessian, trace, name)]


def _unreached(trace: Trace, ends: Ends | None) -> Iterator[str]:
    if not trace.reached:
        error = trace.standard_error / abs(trace.interval.estimate)
        yield f"trace: standard error {100 * error:.1f} % of it after {len(trace.samples_N)} probes"
    if ends is not None and not ends.reached:
        yield f"Lanczos: residual still above tolerance at {ends.steps} steps"


def _parts(subject: str, hessian: LossHessian, trace: Trace, blocks: str) -> Iterator[CurvatureRow]:
    """Yield a row for each role, and one for each layer of the blocks, which have this name."""
    form_NS = trace.forms_NK[:, len(hessian.tokens_D) :]
    inside = re.compile(rf"{re.escape(blocks)}\.(\d+)\.")
    members: dict[tuple[Literal["role", "layer"], str], list[int]] = {}
    for k, name in enumerate(hessian.names):
        members.setdefault(("role", role_of(name.rpartition(".")[0])), []).append(k)
    for k, name in enumerate(hessian.names):
        match = inside.match(name)
        members.setdefault(("layer", match[1] if match else "outside"), []).append(k)
    for (part, name), chosen in members.items():
        yield CurvatureRow(
            subject=subject,
            part=part,
            name=name,
            parameters=sum(hessian.sizes[k] for k in chosen),
            trace=replace(trace, samples_N=form_NS[:, chosen].sum(axis=1)).interval,
            probes=len(trace.samples_N),
        )


MEASURE = Measure(measure_curvature)
