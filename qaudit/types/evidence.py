"""What the engine measured: sums by document, enough for every number of an audit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

CONFIDENCE_EDGES = (0.25, 0.5, 0.9)
"""Between four buckets of tokens, by the probability that full precision gives its likeliest."""
SURE = 2
"""The first bucket of tokens of which full precision is sure: it gives one at least 0.5."""


@dataclass(frozen=True, eq=False)
class ByConfidence:
    """Sums by how sure full precision is of a token, by document and bucket: (D, 4) each."""

    tokens: npt.NDArray[np.int64]
    kl_sum: npt.NDArray[np.float64]
    flips: npt.NDArray[np.int64]  # tokens whose likeliest token is another


@dataclass(frozen=True, eq=False)
class Fidelity:
    """How far a stream's predictions are from those of full precision, summed by document.

    Shapes: D documents, B bins of the histogram (`core.statistics`).
    """

    kl_sum: npt.NDArray[np.float64]  # (D,) nats
    kl_max: npt.NDArray[np.float64]  # (D,) of the worst token
    kl_counts: npt.NDArray[np.integer]  # (D, B) tokens by their KL divergence
    same_top: npt.NDArray[np.int64]  # (D,) tokens whose likeliest token is the same
    squared_dp_sum: npt.NDArray[np.float64]  # (D,) of the change of the right token's probability
    by_confidence: ByConfidence | None = None  # None: measured before it was recorded


@dataclass(frozen=True, eq=False)
class Positions:
    """Sums by where in its window a token is: long context has bins of its own.

    Of rollouts, D are samples and a place is that behind the prompt.

    Shapes: D documents, P bins, G groups of tokens that end something.
    """

    edges: npt.NDArray[np.int64]  # (P + 1,) first position of each bin, and the end
    tokens: npt.NDArray[np.int64]  # (D, P)
    nll_sum: npt.NDArray[np.float64]  # (D, P)
    kl_sum: npt.NDArray[np.float64] | None = None  # (D, P); None for full precision
    end_sum: npt.NDArray[np.float64] | None = None  # (D, P, G); None but of rollouts


@dataclass(frozen=True, eq=False)
class Roles:
    """Sums by what a token is in its conversation.

    Shapes: D documents, or samples of rollouts, P roles, G groups of tokens that end something.
    """

    names: tuple[str, ...]  # (P,)
    tokens: npt.NDArray[np.int64]  # (D, P)
    nll_sum: npt.NDArray[np.float64]  # (D, P)
    kl_sum: npt.NDArray[np.float64] | None = None  # (D, P); None for full precision
    end_sum: npt.NDArray[np.float64] | None = None  # (D, P, G); None but of rollouts


@dataclass(frozen=True, eq=False)
class RolloutEvidence:
    """What a stream makes of rollouts: sums over what was written, by sample.

    Shapes: S samples, G groups of tokens that end something.
    """

    sha256: str  # of the samples
    prompt: npt.NDArray[np.int64]  # (S,) the prompt of each
    tokens: npt.NDArray[np.int64]  # (S,)
    nll_sum: npt.NDArray[np.float64]  # (S,)
    agreed: npt.NDArray[np.int64]  # (S,) tokens before its own choice differs; -1: a sampled one
    end_names: tuple[str, ...]  # (G,)
    end_sum: npt.NDArray[np.float64]  # (S, G) probability of the group, summed over tokens
    kl_sum: npt.NDArray[np.float64] | None = None  # (S,); None for full precision
    # Of samples that were drawn and marked; None: of none, or the sampler has penalties.
    mark: npt.NDArray[np.float64] | None = None  # (S,) NaN: not marked
    drawn_sum: npt.NDArray[np.float64] | None = None  # (S,) log-probability of what the mark reads
    entropy_sum: npt.NDArray[np.float64] | None = None  # (S,) of what it was drawn from; of fp
    weights_sha256: str = ""  # `Subject.content` of what wrote them
    unweighed: str = ""  # why marks give no expected score
    positions: Positions | None = None  # None: measured before it was recorded
    roles: Roles | None = None  # None: the template has no markers


@dataclass(frozen=True, eq=False)
class Routing:
    """How far routers choose other experts than in full precision, summed by document.

    Shapes: L layers of experts, D documents.
    """

    blocks: npt.NDArray[np.int64]  # (L,) the block of each
    same: npt.NDArray[np.int64]  # (L, D) tokens whose set of experts is the same
    moved: npt.NDArray[np.float64]  # (L, D) half the L1 distance of normalized routing weights


@dataclass(frozen=True, eq=False)
class ImportedAnswers:
    """Where the answers to N items come from that another tool generated and marked."""

    tool: str  # with its version, as `lm-eval 0.4.13`
    metric: str  # whose marks these are, as the tool names it
    greedy: bool  # False: sampled, so that answers differ by chance too
    items_sha256: str  # of all items with their prompts
    picked_N: npt.NDArray[np.int64]  # a number for each distinct answer; -1: not known

    @property
    def about(self) -> str:
        """Name the tool, the metric and the way of decoding."""
        return f"{self.tool}, {self.metric}, {'greedy' if self.greedy else 'sampled'}"


@dataclass(frozen=True, eq=False)
class TaskEvidence:
    """The losses of the options of a task's items: P options of N items.

    Of imported answers, each item has one option without a loss, and `greedy` has the marks.
    """

    task: str
    nll: npt.NDArray[np.float64]  # (P,) nats, infinite or NaN where the model gives that
    items: npt.NDArray[np.int64]  # (P,) the item that an option is of, from zero
    right: npt.NDArray[np.bool_]  # (P,)
    greedy: npt.NDArray[np.bool_]  # (P,) whether each of its tokens is the likeliest
    imported: ImportedAnswers | None = None  # None: the options were scored here


@dataclass(frozen=True, eq=False)
class Evidence:
    """Per-document sums: enough to recompute every interval on a machine without torch."""

    document_sha256: tuple[str, ...]
    nll_sum: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    tasks: tuple[TaskEvidence, ...] = ()
    fidelity: Fidelity | None = None  # None: full precision
    positions: Positions | None = None
    strata: tuple[str, ...] = ()  # of each document, where `strata` names a field of the text
    # (L, 1 + E) by layer of experts: its block, and the calibration tokens of each expert, -1
    # where a layer has fewer experts. None: no scheme that calibrates, or no experts.
    expert_tokens: npt.NDArray[np.int64] | None = None
    output_error: npt.NDArray[np.float64] | None = None  # (D,) of tokens, see `core.fidelity`
    routing: Routing | None = None  # None: full precision, or no experts, or replayed
    reference: Fidelity | None = None  # against another subject, where one is the reference
    roles: Roles | None = None  # of conversations
    rollouts: RolloutEvidence | None = None

    def scored(self) -> npt.NDArray[np.bool_]:
        """Mark the documents with a scored token."""
        return self.tokens > 0


@dataclass(frozen=True, eq=False)
class Measurement:
    """One subject under one scheme, as it came out of the engine."""

    subject: str
    scheme: str
    spec: str
    evidence: Evidence
    bits_per_weight: float
    seconds: float
    calibration_seed: int = 0
    notes: tuple[str, ...] = ()
    weights_sha256: dict[str, str] = field(default_factory=dict)  # of the files as they were read
    linears_sha256: dict[str, str] = field(default_factory=dict)  # by BLOCK.NAME
    rest_sha256: str = ""  # of every tensor that is no such linear, as it is stored
    parameters: int | None = None  # of all tensors; None: of a diagnostic, which counts none
    nbytes: int | None = None  # of all tensors, the linears as the scheme stores them
    bit_class: str = "fp"  # what it competes in
    calibrates: bool = False  # whether the result depends on the calibration text
    identity: dict[str, str | int] | None = None  # of what it is; None: of a part of a file
    plugins: tuple[str, ...] = ()  # distributions and versions that scheme and merge are of
    mixture: dict[str, str] = field(default_factory=dict)  # bits of each linear, a digit a block

    @property
    def cell(self) -> tuple[str, str]:
        return self.subject, self.scheme
