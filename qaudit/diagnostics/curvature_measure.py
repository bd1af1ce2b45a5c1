"""Trace and largest eigenvalues of the Hessian of a subject's loss, for all its parameters.

The model is held whole, in float32 whatever the dtype of its weights, with the plain formula for
attention. Documents are fixed by content: those evaluation documents whose hashes come first, the
same for every subject and whatever order the text has. The interval around the trace is over the
probes; a second one, over documents too, covers other documents like these: probes are crossed with
documents (`core/statistics.py`). The samples of single tensors add up to roles and layers, at no
cost.

What does not fit in memory is made smaller, with a note: fewer windows side by side. A model or
vectors of Lanczos that do not fit are refused with the memory that they would take.

The Hessian of a model's mean token loss over given documents, as products with vectors.

H v is the gradient of the slope of the loss along v: two backward passes (Pearlmutter 1994),
exact to rounding, for every parameter of the model at once, tied ones counted once. Documents
follow one another, a few windows at a time, and their products are added up; with each come
v.H_d v of the summed loss of every document and v.(Hv) of every parameter tensor.

Attention is the plain formula: the fused kernels have no second derivative. Blocks keep nothing
of their inside (`recomputed`), so that beside the weights there are three vectors as long as
them: v, the first gradient, and the sum; the second gradient comes as the first one goes. That
is what a training step with Adam holds.

Shapes: B windows, T tokens, P parameters, D documents, S parameter tensors.

A block whose inside is computed again whenever it is differentiated: once, or twice.

A second derivative by two backward passes keeps what the first of them computed in every block,
and `torch.utils.checkpoint` does not help: it recomputes the forward pass during the first
backward pass, whose graph then holds on to all of it. Here a block's gradient is a checkpointed
function too: of each block there remain its input and the gradient that reached its output, and
the graph of at most one block exists at any time, through both passes. The price is that a block
is run forward and backward once more.

A block whose arguments lead to parameters by other ways than its hidden states (shared caches)
is left as it is: right, and as large as it was.

Shapes: B windows, T tokens, D hidden.

How much memory products with the Hessian take, and what is done where there is less.

Beside the weights there are vectors as long as them, the hidden states and their gradients between
the blocks, and the graph of one block or of the head through two backward passes. What of these is
alive at the worst moment was read off `python -m benchmarks.curvature` at several shapes; the
factors below stay above all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qaudit.core.spectrum import Ends, Trace, dot, estimate_trace, find_ends
from qaudit.core.statistics import Array, crossed
from qaudit.diagnostics.case import Case, DocumentChoice, Measure
from qaudit.diagnostics.curvature import Curvature
from qaudit.diagnostics.diagnostic import role_of
from qaudit.engine.batches import make_batches
from qaudit.errors import MachineError, SourceError
from qaudit.host import available_nbytes
from qaudit.model.config import read_config
from qaudit.model.device import free_nbytes
from qaudit.model.proven import NO_LIMIT
from qaudit.model.skeleton import find_blocks, load_whole
from qaudit.support.sizes import size
from qaudit.types import CurvatureRow, Window

Grads = tuple[Tensor | None, ...]

HessianPart = tuple[int, Tensor, Tensor]
"""A document, some of its windows side by side (B, T), and which of their tokens are scored."""


def cut(
    documents: Sequence[Sequence[Window]], context: int, positions: int, limit: int = NO_LIMIT
) -> list[HessianPart]:
    """Put the windows of each document side by side, as many as fit in so many positions."""
    return [
        (document, batch.tokens_BT, batch.scored_BT())
        for document, windows in enumerate(documents)
        for batch in make_batches(windows, context, positions, limit)
    ]


class LossHessian:
    """Multiplies vectors with the Hessian of a model's mean token loss."""

    def __init__(
        self, model: Any, blocks: Sequence[nn.Module], parts: Sequence[HessianPart]
    ) -> None:
        """Take a whole model; its parameters are differentiated and not changed."""
        self._model, self._blocks, self._parts = model, blocks, parts
        named: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.names, self._parameters = list(named), list(named.values())
        for parameter in self._parameters:
            parameter.requires_grad_()
        self.sizes = [parameter.numel() for parameter in self._parameters]
        self.tokens_D = np.zeros(1 + max(document for document, _, _ in parts), dtype=np.int64)
        for document, _, scored_BT in parts:
            self.tokens_D[document] += int(scored_BT.sum())

    @property
    def like(self) -> Tensor:
        """Return a tensor of the device and dtype that vectors have."""
        return self._parameters[0].detach()

    def loss(self) -> float:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            total = sum(float(self._nll(*windows)) for _, *windows in self._parts)
        return total / float(self.tokens_D.sum())

    def multiply(self, vector_P: Tensor) -> Tensor:
        return self(vector_P)[0]

    def __call__(self, vector_P: Tensor) -> tuple[Tensor, Array]:
        """Return the product, the forms of the documents' summed losses, and of the tensors."""
        product_P = torch.zeros_like(vector_P)
        along, sums = vector_P.split(self.sizes), product_P.split(self.sizes)
        form_D = np.zeros(len(self.tokens_D))
        with recomputed(self._blocks), sdpa_kernel(SDPBackend.MATH):
            for document, *windows in self._parts:
                seconds = self._curve(windows, along)
                for second, direction, summed in zip(seconds, along, sums, strict=True):
                    if second is not None:
                        form_D[document] += dot(direction, second.flatten())
                        summed.add_(second.flatten())
        product_P /= int(self.tokens_D.sum())
        form_S = [dot(direction, summed) for direction, summed in zip(along, sums, strict=True)]
        if not np.isfinite(form_D).all():
            raise SourceError(
                "the second derivatives of its loss are not finite",
                hint="the checkpoint is damaged or its training diverged; try another revision",
            )
        return product_P, np.concatenate([form_D, form_S])

    def _curve(self, windows: Sequence[Tensor], along: Sequence[Tensor]) -> Grads:
        with torch.enable_grad():
            gradients: Grads = torch.autograd.grad(
                self._nll(*windows), self._parameters, create_graph=True, allow_unused=True
            )
            slopes = [
                (gradient.flatten() * direction).sum()
                for gradient, direction in zip(gradients, along, strict=True)
                if gradient is not None  # of a parameter that the loss does not use
            ]
            del gradients  # as large as the model, and the graph does not need them
            slope = torch.stack(slopes).sum()
            return torch.autograd.grad(slope, self._parameters, allow_unused=True)

    def _nll(self, tokens_BT: Tensor, scored_BT: Tensor) -> Tensor:
        tokens_BT, scored_BT = tokens_BT.to(self.like.device), scored_BT.to(self.like.device)
        logits_BTV = self._model(input_ids=tokens_BT, use_cache=False).logits[:, :-1]
        wanted_BT = scored_BT[:, 1:]
        return nn.functional.cross_entropy(
            logits_BTV[wanted_BT], tokens_BT[:, 1:][wanted_BT], reduction="sum"
        )


Run = Callable[..., Tensor]
"""Hidden states and parameters -> hidden states; nothing else of it is differentiated."""


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_Backward.apply(ctx.run, grads[0], *ctx.saved_tensors)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, grad: Tensor, *inputs: Tensor) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad, *inputs)
        return _gradients(run, grad, _fresh(inputs), create_graph=False)

    @staticmethod
    def backward(ctx: Any, *seconds: Tensor | None) -> Any:
        grad, *inputs = _fresh(ctx.saved_tensors)
        first = _gradients(ctx.run, grad, inputs, create_graph=True)
        pairs = [
            (f, s)
            for f, s in zip(first, seconds, strict=True)
            if f is not None and s is not None and f.requires_grad
        ]
        with torch.enable_grad():
            again = torch.autograd.grad(
                [f for f, _ in pairs], [grad, *inputs], [s for _, s in pairs], allow_unused=True
            )
        return None, *again


def _fresh(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


def _gradients(run: Run, grad: Tensor, inputs: Sequence[Tensor], *, create_graph: bool) -> Grads:
    with torch.enable_grad():
        return torch.autograd.grad(
            run(*inputs), inputs, grad, create_graph=create_graph, allow_unused=True
        )


@contextmanager
def recomputed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Let blocks keep nothing of their inside, while a `with` body lasts."""
    for block in blocks:
        block.forward = _recomputing(block)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _recomputing(block: nn.Module) -> Callable[..., Any]:
    inside = copy(block)  # which keeps its own forward
    names = [name for name, _ in block.named_parameters()]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not args or not torch.is_grad_enabled() or _leads_on((args[1:], kwargs)):
            return inside(*args, **kwargs)
        beside: list[tuple[Any, ...] | None] = []  # what a block returns besides hidden states

        def run(hidden_BTD: Tensor, *parameters: Tensor) -> Tensor:
            named = dict(zip(names, parameters, strict=True))
            out = torch.func.functional_call(
                inside, named, (hidden_BTD, *args[1:]), kwargs, tie_weights=False
            )
            beside[:] = [out[1:] if isinstance(out, tuple) else None]
            first: Tensor = out[0] if isinstance(out, tuple) else out
            return first

        out_BTD: Tensor = _Forward.apply(run, args[0], *block.parameters())
        return out_BTD if beside[0] is None else (out_BTD, *beside[0])

    return forward


def _leads_on(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        return any(map(_leads_on, value.values()))
    return isinstance(value, tuple | list) and any(map(_leads_on, value))


VECTORS = 6  # weights, v, the sum, gradients of both passes, and what is being freed
OF_HIDDEN, OF_INNER, OF_ATTENTION, OF_LOGITS = 40, 14, 19, 7  # copies alive in a graph
ITEMSIZE = 4
POSITIONS = 4096  # side by side at most
SHARE = 0.9  # of what is free


def product_nbytes(config: Any, parameters: int, windows: int, length: int) -> int:
    """Return what a product takes; of the configuration, what is missing has its usual value."""
    tokens, hidden = windows * length, config.hidden_size
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", 4 * hidden)
    heads = getattr(config, "num_attention_heads", None) or 1
    between = 2 * (config.num_hidden_layers + 1) * tokens * hidden
    block = tokens * (OF_HIDDEN * hidden + OF_INNER * inner + OF_ATTENTION * heads * length)
    head = OF_LOGITS * tokens * config.vocab_size
    return int(ITEMSIZE * (VECTORS * parameters + between + max(block, head)))


def find_room(
    config: Any, count: int, length: int, parameters: Curvature, device: torch.device
) -> tuple[int, tuple[str, ...]]:
    """Return how many windows fit side by side, with a note, or refuse with what they take."""
    free = room_nbytes(device)
    basis = ITEMSIZE * count * parameters.steps if parameters.eigenvalues else 0
    most = max(1, POSITIONS // length)
    for windows in range(most, 0, -1):
        if product_nbytes(config, count, windows, length) <= free - basis:
            text = f"{windows} of {most} windows side by side, to fit in memory"
            return windows, () if windows == most else (text,)
    needed = product_nbytes(config, count, 1, length)
    more = f", and eigenvalues {size(basis)} more" if basis else ""
    smaller = "the trace alone with `curvature:eigenvalues=0`, or fewer `steps`"
    raise MachineError(
        f"curvature of {count:,} parameters takes {size(needed)} of memory{more}; "
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
    config = read_config(case.folder, trust_remote_code=trust).get_text_config()
    count = sum(math.prod(weights.shape(name)) for name in weights.names())
    longest = max(len(window.tokens) for windows in choice.windows for window in windows)
    notes: tuple[str, ...] = ()
    if device.type == "mps":
        device = torch.device("cpu")
        notes = ("computed on the CPU: this device has no double precision",)
    windows, of_memory = find_room(config, count, longest, parameters, device)
    model = load_whole(case.folder, weights, torch.float32, trust_remote_code=trust).to(device)
    name = find_blocks(model, case.folder)
    parts = cut(choice.windows, longest, windows * longest, case.task.pad_until)
    hessian = LossHessian(model, list(model.get_submodule(name)), parts)
    trace = estimate_trace(
        hessian,
        sum(hessian.sizes),
        hessian.like,
        lambda done, total: case.progress(done, total, f"curvature: product {done}"),
        probes=parameters.probes,
        tolerance=parameters.tolerance,
        seed=parameters.seed,
        confidence=case.confidence,
    )
    ends = None
    if parameters.eigenvalues:
        ends = find_ends(
            hessian.multiply,
            sum(hessian.sizes),
            hessian.like,
            lambda done, total: case.progress(done, total, f"curvature: step {done}"),
            count=parameters.eigenvalues,
            steps=parameters.steps,
            tolerance=parameters.residual,
            seed=parameters.seed,
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
