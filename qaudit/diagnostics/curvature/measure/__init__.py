"""Trace and largest eigenvalues of the Hessian of a subject's loss, for all its parameters.

The model is held whole, in float32 whatever the dtype of its weights, with the plain formula for
attention (`hessian.py`). Documents are fixed by content: those evaluation documents whose hashes
come first, the same for every subject and whatever order the text has. The interval around the
trace is over the probes; a second one, over documents too, covers other documents like these:
probes are crossed with documents
(`core/statistics.py`). The samples of single tensors add up to roles and layers, at no cost.

What does not fit in memory is made smaller, with a note: fewer windows side by side, the vectors
of Lanczos on the host, power iteration in their place. A model that does not fit at all is refused
with the memory that it would take.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from qaudit.core.statistics import crossed
from qaudit.diagnostics.case import Case, DocumentChoice, Measure
from qaudit.diagnostics.curvature.hutchinson import Probing, Trace, estimate_trace
from qaudit.diagnostics.curvature.lanczos import EigenSearch, Ends, find_ends, power_iteration
from qaudit.diagnostics.curvature.measure.hessian import LossHessian, cut
from qaudit.diagnostics.curvature.measure.room import PassShape, Room, find_room
from qaudit.diagnostics.curvature.parameters import Curvature
from qaudit.diagnostics.roles import role_of
from qaudit.model.config import read_config
from qaudit.model.skeleton import find_blocks, load_whole
from qaudit.types import CurvatureRow


def measure_curvature(case: Case) -> list[CurvatureRow]:
    parameters = cast(Curvature, case.parameters)
    choice = DocumentChoice.of(case.corpus, parameters.documents, "curvature")
    weights = case.weights()
    trust = case.machine.trust_remote_code
    shape = PassShape.of(read_config(case.folder, trust_remote_code=trust), weights)
    longest = max(len(window.tokens) for windows in choice.windows for window in windows)
    room = find_room(shape, longest, parameters, case.machine.device)
    model = load_whole(case.folder, weights, torch.float32, trust_remote_code=trust)
    model = model.to(room.device)
    name = find_blocks(model, case.folder)
    parts = cut(choice.windows, longest, room.windows * longest, case.task.pad_until)
    hessian = LossHessian(model, list(model.get_submodule(name)), parts)
    return _Measuring(case, parameters, hessian, room, choice).rows(_layer_of(name))


@dataclass(frozen=True, eq=False)
class _Measuring:
    case: Case
    parameters: Curvature
    hessian: LossHessian
    room: Room
    choice: DocumentChoice

    def rows(self, layer_of: Callable[[str], str]) -> list[CurvatureRow]:
        trace = estimate_trace(
            self.hessian,
            sum(self.hessian.sizes),
            self.hessian.like,
            Probing(
                probes=self.parameters.probes,
                tolerance=self.parameters.tolerance,
                sketch=self.parameters.sketch,
                seed=self.parameters.seed,
                confidence=self.case.confidence,
            ),
            lambda done, total: self.case.progress(done, total, f"curvature: product {done}"),
        )
        ends, products, notes = self._ends()
        whole = replace(
            self._whole(trace),
            eigenvalues=tuple(end.value for end in ends.largest) if ends else (),
            residuals=tuple(end.residual for end in ends.largest) if ends else (),
            smallest=ends.smallest.value if ends and ends.steps else None,
            products=trace.products + products,
            notes=(*self.room.notes, *self._unreached(trace), *notes),
        )
        groups = {"role": _role_of, "layer": layer_of}
        return [
            whole,
            *(row for part, key in groups.items() for row in self._parts(trace, part, key)),
        ]

    def _whole(self, trace: Trace) -> CurvatureRow:
        tokens_D = self.hessian.tokens_D
        forms_ND = trace.forms_NK[:, : len(tokens_D)]
        elsewhere = crossed(forms_ND, tokens_D, self.case.confidence)
        return CurvatureRow(
            subject=self.case.subject.label,
            part="model",
            name="all",
            parameters=sum(self.hessian.sizes),
            trace=trace.interval,
            trace_elsewhere=elsewhere,
            loss=self.hessian.loss(),
            probes=len(trace.samples_N),
            documents=len(tokens_D),
            tokens=int(tokens_D.sum()),
            documents_sha256=self.choice.sha256,
        )

    def _parts(self, trace: Trace, part: Any, key: Callable[[str], str]) -> Iterator[CurvatureRow]:
        form_NS = trace.forms_NK[:, len(self.hessian.tokens_D) :]
        members: dict[str, list[int]] = {}
        for k, name in enumerate(self.hessian.names):
            members.setdefault(key(name), []).append(k)
        for name, chosen in members.items():
            yield CurvatureRow(
                subject=self.case.subject.label,
                part=part,
                name=name,
                parameters=sum(self.hessian.sizes[k] for k in chosen),
                trace=replace(trace, samples_N=form_NS[:, chosen].sum(axis=1)).interval,
                probes=len(trace.samples_N),
            )

    def _ends(self) -> tuple[Ends | None, int, tuple[str, ...]]:
        parameters, size = self.parameters, sum(self.hessian.sizes)
        if not parameters.eigenvalues:
            return None, 0, ()
        search = EigenSearch(
            parameters.eigenvalues, parameters.steps, parameters.residual, parameters.seed
        )
        if self.room.iterates:
            end, steps, settled = power_iteration(
                self.hessian.multiply, size, self.hessian.like, search
            )
            notes = () if settled else (f"power iteration did not settle in {steps} products",)
            return Ends((end,), end, 0, settled), steps, notes
        ends = find_ends(
            self.hessian.multiply,
            size,
            self.hessian.like,
            search,
            self.room.keep_on,
            lambda done, total: self.case.progress(done, total, f"curvature: step {done}"),
        )
        if ends.reached:
            return ends, ends.steps, ()
        return ends, ends.steps, (f"Lanczos: residual still above tolerance at {ends.steps} steps",)

    def _unreached(self, trace: Trace) -> tuple[str, ...]:
        if trace.reached:
            return ()
        error = trace.standard_error / abs(trace.interval.estimate)
        return (
            f"trace: standard error {100 * error:.1f} % of it after {len(trace.samples_N)} probes",
        )


def _role_of(name: str) -> str:
    return role_of(name.rpartition(".")[0])


def _layer_of(blocks: str) -> Callable[[str], str]:
    inside = re.compile(rf"{re.escape(blocks)}\.(\d+)\.")

    def layer_of(name: str) -> str:
        match = inside.match(name)
        return match.group(1) if match else "outside"

    return layer_of


MEASURE = Measure(measure_curvature)
