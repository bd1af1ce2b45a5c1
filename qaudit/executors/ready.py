"""What must be there before the first weights are read: small files, text, the machine.

Small files come first. The texts, without which nothing can be measured, are downloaded before
anything else; then every subject's configuration and tokenizer, which identify the results on
disk; weights only for what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any

import torch

from qaudit.checkpoints.stamps import refuse_changed_settings
from qaudit.core.column_loops import FUSED
from qaudit.core.gptq_triton import obstacle
from qaudit.core.linears import Linears
from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Calibration, Scheme, Shipped
from qaudit.engine.tasks import (
    Machine,
    device_name,
    environment,
    open_device,
    peak_nbytes,
    resident_nbytes,
)
from qaudit.errors import OtherIdentityError, SourceError
from qaudit.executors.records import one_error
from qaudit.host import default_stream_limit
from qaudit.hub import Hub
from qaudit.items.prepare import fetch_items
from qaudit.model.device import free_nbytes
from qaudit.model.groups import ExpertOptions
from qaudit.planning.passes import with_draws
from qaudit.planning.price import kept_specs
from qaudit.planning.shipped import with_shipped
from qaudit.settings import RunOptions
from qaudit.text.texts import fetch_texts, read_corpus
from qaudit.types import CHOICES, Corpus, Plan, Subject
from qaudit.version import __version__


@dataclass(frozen=True, eq=False)
class Ready:
    """The text as tokens, the machine, and the subjects whose small files are there."""

    corpus: Corpus
    machine: Machine
    subjects: tuple[Subject, ...]
    refused: Mapping[str, SourceError]  # why the others are missing


def make_ready(plan: Plan, options: RunOptions, hub: Hub | None) -> Ready:
    """Download what is small, read the text, and load what schemes compute with."""
    refused = _download_small_files(plan, options, hub)
    machine = _machine(plan, options)
    corpus = read_text(plan, options, hub, refused)
    _load_libraries(parse_schemes(plan.specs))
    readable = tuple(s for s in plan.subjects if s.label not in refused)
    return Ready(corpus, machine, readable, refused)


def read_text(
    plan: Plan,
    options: RunOptions,
    hub: Hub | None,
    refused: Mapping[str, SourceError] | None = None,
) -> Corpus:
    """Read the text of a plan as tokens; small files are downloaded first unless they were."""
    if refused is None:
        refused = _download_small_files(plan, options, hub)
    readable = tuple(s for s in plan.subjects if s.label not in refused)
    if not readable:
        raise one_error(refused)
    recipe = with_draws(plan.recipe, parse_schemes(plan.specs))
    measured = replace(plan, subjects=readable, recipe=recipe)
    return read_corpus(
        measured,
        hub=hub,
        trust_remote_code=options.trust_remote_code,
        failed=fetch_items(hub, plan.recipe, plan.texts) if hub else {},
    )


def protocol_of(corpus: Corpus) -> dict[str, Any]:
    """Return how the text was cut, and what came of it, as an audit records it."""
    return {
        **asdict(corpus.protocol),
        **({"calibration_draws": len(corpus.draws)} if corpus.further else {}),
        "evaluation_documents": len(corpus.documents),
        "evaluation_documents_available": corpus.available,
        "evaluation_tokens": sum(w.scored for w in corpus.evaluation),
        "calibration_windows": len(corpus.calibration),
        "calibration_tokens": sum(len(w.tokens) for w in corpus.calibration),
        "choices": sum(item.task == CHOICES for item in corpus.items),
        "tasks": {
            task: sum(item.task == task for item in corpus.items)
            for task in corpus.tasks
            if task != CHOICES
        },
        "corpus_sha256": corpus.sha256,
        **({"documents_sha256": corpus.of_documents().sha256} if corpus.rollouts else {}),
        **({"search_sha256": corpus.of_search().sha256} if corpus.search else {}),
        "has_chat_template": corpus.has_chat_template,
        "sources": dict(corpus.sources),
        "notes": list(corpus.notes),
    }


def _download_small_files(
    plan: Plan, options: RunOptions, hub: Hub | None
) -> dict[str, SourceError]:
    """Download texts, configurations and tokenizers; return why subjects are missing theirs.

    A text that cannot be downloaded ends the scan. Small files must be those of the plan.
    """
    refused: dict[str, SourceError] = {}
    if hub is not None:
        fetch_texts(hub.fetcher, plan.recipe, plan.texts)
    for subject in (with_shipped(planned, plan.shipped) for planned in plan.subjects):
        for checkpoint, _ in subject.members:
            try:
                for source in checkpoint.sources:
                    if hub is not None and source.commit is not None:
                        hub.fetcher.settings(source, code=options.trust_remote_code)
                refuse_changed_settings(checkpoint)
            except SourceError as error:
                refused.setdefault(subject.label, error)
    return refused


def _machine(plan: Plan, options: RunOptions) -> Machine:
    device, dtype = open_device(plan.device, plan.dtype)
    limit = options.stream_memory
    return Machine(
        device=device,
        dtype=dtype,
        stream_limit_nbytes=default_stream_limit() if limit is None else limit,
        device_stream_limit_nbytes=_free_for_streams(device, plan.nbytes_memory_fixed, limit),
        allow_pickle=options.allow_pickle,
        trust_remote_code=options.trust_remote_code,
        keeps_weights=kept_specs(options.keep, parse_schemes(plan.specs)),
        column_loop=_column_loop(plan, device),
        experts=ExpertOptions(replays=plan.recipe.routing == "reference"),
    )


def _column_loop(plan: Plan, device: torch.device) -> str:
    """Return the plan's loop over GPTQ's columns, which must run here, too."""
    missing = obstacle(torch.empty(0, device=device)) if plan.column_loop == FUSED else None
    if missing is not None:
        raise OtherIdentityError(
            f"the plan rounds GPTQ's columns by the fused kernel, and here {missing}",
            hint="run the part in the environment of the plan, or plan again in this one",
        )
    return plan.column_loop


def _free_for_streams(device: torch.device, fixed_nbytes: int, limit: int | None) -> int:
    """Return how much of a GPU hidden states may take: nine tenths of what blocks leave free."""
    if device.type != "cuda":
        return 0
    free = max(0, int(0.9 * free_nbytes(device)) - fixed_nbytes)
    return free if limit is None else min(free, limit)


def _load_libraries(schemes: Sequence[Scheme]) -> None:
    """Let schemes import their libraries, so that these do not count as an audit's memory."""
    linears = Linears({"weight": torch.ones(2, 64)})
    for scheme in schemes:
        if scheme.calibration is Calibration.NONE and not isinstance(scheme, Shipped):
            scheme.quantize(linears)


@dataclass(frozen=True)
class Account:
    """What a process used and ran on, begun when all is loaded and before weights are read."""

    device: torch.device
    hub: Hub | None
    began: datetime = field(default_factory=lambda: datetime.now(UTC))
    baseline_nbytes: int = field(default_factory=resident_nbytes)

    def environment(self, seconds_waited: float) -> dict[str, Any]:
        return {
            **environment(self.device),
            "qaudit": __version__,
            "began": self.began.isoformat(timespec="seconds"),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "memory_baseline_nbytes": self.baseline_nbytes,
            "memory_peak_nbytes": peak_nbytes(self.device),
            **self._hub_use(seconds_waited),
        }

    def _hub_use(self, seconds_waited: float) -> dict[str, Any]:
        if self.hub is None:
            return {}
        return {
            "hub_calls": self.hub.client.calls,
            "hub_requests": self.hub.client.requests,
            "hub_nbytes_fetched": self.hub.fetcher.nbytes_fetched,
            "hub_nbytes_verified": self.hub.fetcher.nbytes_verified,
            "hub_seconds_waited": round(seconds_waited, 3),
        }


SIZE, SEED = 1024, 20251012
CLOSE = 1e-5  # of probabilities in float32 from those in double precision


def refuse_bad_device(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a device that computes wrongly, before any weight is read.

    Entries are -1, 0 and 1: every partial sum is an integer that float32 holds exactly, whatever
    the order or the kernels, so that every sound device gives the same bits, rounded once. A
    softmax, which has no exact answer, is held to double precision on the CPU.
    """
    for kind in dict.fromkeys((torch.float32, dtype)):
        wrong = wrong_products(device, kind)
        if wrong:
            name = str(kind).removeprefix("torch.")
            raise _bad(device, f"{wrong} of {SIZE * SIZE} products in {name} are wrong")
    apart = softmax_error(device)
    if not apart < CLOSE:
        raise _bad(device, f"probabilities are off by {apart:.1e} (at most {CLOSE:.0e} is sound)")


def wrong_products(device: torch.device, dtype: torch.dtype) -> int:
    """Return how many entries of a product differ from their integers, rounded once."""
    a_cpu, b_cpu, exact = _product(SIZE)
    a, b = (matrix.to(dtype).to(device) for matrix in (a_cpu, b_cpu))
    product = torch.matmul(a, b).cpu()
    return int((product != exact.float().to(dtype)).sum())


def softmax_error(device: torch.device) -> float:
    """Return how far probabilities are from those in double precision on the CPU."""
    logits = _product(SIZE)[2][:64] / 16
    found = logits.float().to(device).softmax(-1).cpu().double()
    return float((found - logits.softmax(-1)).abs().max())


@cache
def _product(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two matrices and their product in double precision: below 2**53, so exact."""
    generator = torch.Generator().manual_seed(SEED)
    a, b = (torch.randint(-1, 2, (size, size), generator=generator) for _ in range(2))
    return a, b, torch.matmul(a.double(), b.double())


def _bad(device: torch.device, why: str) -> OtherIdentityError:
    return OtherIdentityError(
        f"the device `{device_name(device)}` computes wrongly: {why}",
        hint="run the part on another device; have this one checked",
    )
