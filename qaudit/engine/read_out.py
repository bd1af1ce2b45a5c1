"""The one read-out: hidden states become losses, and divergences from full precision.

It walks batch by batch and chunk by chunk over all streams: full precision's logits of a chunk
are made once, every stream's are compared with them, and none are stored. Streams of one model go
through its head together, as many rows in all as one of them would alone. Then they are compared
a few rows at a time, stream after stream: full precision's probabilities of these rows stay in a
core's cache. Results go into tensors of the whole batch: small ones that outlive logits would lie
between them in the heap, which would take new memory for every chunk. A stream that cannot be
compared has its losses all the same, and a note that names the reason.

Results per token become sums over documents, which is all that intervals need.

Results of rollouts per token become sums by sample: in all, by position and by role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, takewhile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qaudit.core import statistics
from qaudit.core.fidelity import TIE, ComparedRows, Reference, losses, output_error, row_parts
from qaudit.engine.batches import Batch
from qaudit.engine.shipped import ReferenceStream
from qaudit.engine.streams import Stream
from qaudit.engine.tally import Tally, columns, timed
from qaudit.engine.tokens import Feed, Tokens
from qaudit.model.blocks import BlockModel
from qaudit.model.device import Copies, HostCopy
from qaudit.types import (
    CONFIDENCE_EDGES,
    ROLES,
    ByConfidence,
    Corpus,
    Evidence,
    Fidelity,
    Positions,
    Roles,
    RolloutEvidence,
    Routing,
    TaskEvidence,
    Window,
)


def read_out(tokens: Tokens, streams: Sequence[Stream]) -> None:
    """Add losses and divergences per token to the tally of every stream.

    The first is what the others are compared with, and all with the reference, if there is one.
    """
    model, copies = tokens.model, Copies(tokens.model.device)
    batches = []
    for k, batch in enumerate(tokens.feed.evaluation):
        read = _read_batch(tokens, streams, k, batch)
        named = [rows for stream in read for rows in (stream.rows, stream.from_reference)]
        batches.append((batch, _copied(named, copies)))
    for batch, copied in batches:
        windows, length = batch.tokens_BT.shape
        rows = copied()
        for stream in streams:
            stream.tally.read((windows, length), next(rows), next(rows))
    for stream in streams:
        tokens.states.drop(f"evaluation/{stream.name}")
        if (of_stream := stream.tokens(tokens)).items:
            with timed(model.device, stream.tally):
                stream.tally.options = of_stream.item_losses(stream.name)


def _copied(
    named: list[dict[str, Tensor]], copies: Copies
) -> Callable[[], Iterator[dict[str, Tensor]]]:
    """Send results to the host, in one copy for which a GPU is not waited for; return its reader.

    Values of rows, a column of them or several, go as rows of float32.
    """
    kinds = [{name: (v_N.shape, v_N.dtype) for name, v_N in rows.items()} for rows in named]
    values = (v_N for rows in named for v_N in rows.values())
    columns = [v_N.reshape(len(v_N), v_N.shape[1:].numel()).T.float() for v_N in values]
    copy = copies.to_host(torch.cat(columns)) if columns else HostCopy(torch.zeros(0))

    def read() -> Iterator[dict[str, Tensor]]:
        first = 0
        for kinds_of_rows in kinds:
            rows: dict[str, Tensor] = {}
            for name, (shape, dtype) in kinds_of_rows.items():
                behind = first + shape[1:].numel()
                rows[name] = copy.read()[first:behind].T.reshape(shape).to(dtype)
                first = behind
            yield rows

    return read


def _read_batch(
    tokens: Tokens, streams: Sequence[Stream], k: int, batch: Batch
) -> list[_StreamRows]:
    model = tokens.model
    targets_N = batch.tokens_BT[:, 1:].reshape(-1).to(model.device, torch.long)
    readings = []
    for stream in streams:
        with timed(model.device, stream.tally):
            hidden_BTD = tokens.states.get(f"evaluation/{stream.name}", k)
            hidden_ND = hidden_BTD[:, :-1].reshape(-1, hidden_BTD.shape[-1])
            readings.append(_StreamRows(stream, hidden_ND))
    groups: dict[BlockModel, list[_StreamRows]] = {}
    # The reference comes first: all streams are compared with it.
    for reading in sorted(readings, key=lambda r: not isinstance(r.stream, ReferenceStream)):
        groups.setdefault(reading.stream.tokens(tokens).model, []).append(reading)
    full = readings[0] if tokens.feed.compared and len(streams) > 1 else None
    step = max(2, model.head_rows // max(map(len, groups.values())))
    for first in range(0, len(targets_N), step):
        chunk = slice(first, min(first + step, len(targets_N)))
        parts: list[_RowPart] = []
        for group_model, group in groups.items():
            with timed(model.device, *(reading.stream.tally for reading in group)):
                hidden_ND = torch.cat([reading.hidden_ND[chunk] for reading in group])
                logits = group_model.logits(hidden_ND[None])[0].chunk(len(group))
            parts = parts or [
                _RowPart(batch, targets_N, full, chunk.start, rows) for rows in row_parts(logits[0])
            ]
            for part in parts:
                for reading, logits_NV in zip(group, logits, strict=True):
                    with timed(model.device, reading.stream.tally):
                        part.read(reading, logits_NV, wrote=reading is readings[0])
                if len(groups) == 1:
                    part.reference = None  # its memory is that of the next part
    return readings


@dataclass(frozen=True, eq=False)
class _StreamRows:
    """A batch of a stream: what its last block returned, and the rows that came of it."""

    stream: Stream
    hidden_ND: Tensor
    rows: dict[str, Tensor] = field(default_factory=dict)  # of the batch, as in `ComparedRows`
    from_reference: dict[str, Tensor] = field(default_factory=dict)  # compared with the reference

    def add(self, rows: dict[str, Tensor], place: slice, part: ComparedRows) -> None:
        """Add results of some rows to those of the batch."""
        for name, values in vars(part).items():
            if values is not None:
                if name not in rows:
                    rows[name] = values.new_empty(len(self.hidden_ND), *values.shape[1:])
                rows[name][place] = values


@dataclass(eq=False)
class _RowPart:
    """Some rows of all streams, and what they are compared with."""

    batch: Batch
    targets_N: Tensor  # of the batch
    full: _StreamRows | None  # what is compared with, if anything is
    start: int  # of the chunk in the batch
    rows: slice  # of the chunk
    reference: Reference | None = None  # full precision's rows
    yardstick: Reference | None = None  # the reference's

    def read(self, reading: _StreamRows, logits_NV: Tensor, *, wrote: bool) -> None:
        """Add these rows to those of a stream."""
        place = slice(self.start + self.rows.start, self.start + self.rows.stop)
        logits_NV, targets_N = logits_NV[self.rows], self.targets_N[place]
        tally, full = reading.stream.tally, self.full
        if isinstance(reading.stream, ReferenceStream):
            self.yardstick = Reference.of(logits_NV, targets_N)
            rows = self.yardstick.rows
        else:
            if reading is full:
                self.reference = Reference.of(logits_NV, targets_N)
                rows = self.reference.rows
            else:
                rows = rows_of(tally, self.reference, logits_NV, targets_N)
                if full is not None:
                    error_N = output_error(full.hidden_ND[place], reading.hidden_ND[place])
                    rows = replace(rows, output_error_N=error_N)
            if self.yardstick is not None:
                compared = rows_of(tally, self.yardstick, logits_NV, targets_N)
                reading.add(reading.from_reference, place, compared)
        batch = self.batch
        if batch.choices is not None and batch.drawn_BT is not None:  # what it would choose itself
            drawn_S = batch.drawn_BT[:, 1:].reshape(-1)[place].nonzero().squeeze(1)
            rows = rows.with_choices(logits_NV, targets_N, batch.choices, drawn_S, wrote=wrote)
        reading.add(reading.rows, place, rows)


def rows_of(
    tally: Tally, reference: Reference | None, logits_NV: Tensor, targets_N: Tensor
) -> ComparedRows:
    """Return a stream's rows, compared with full precision's where that is possible."""
    if reference is not None:
        full, vocabulary = reference.logits_NV.shape[1], logits_NV.shape[1]
        if vocabulary == full:
            return reference.compare(logits_NV, targets_N)
        tally.note(
            f"KL divergence is not measured: its vocabulary is {vocabulary} tokens, "
            f"that of full precision {full}"
        )
    return ComparedRows(losses(logits_NV, targets_N))


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def position_edges(context: int) -> Ints:
    """Return the bins of positions in a window: 16, and four times as many each further one."""
    inner = takewhile(lambda edge: edge < context, (16 * 4**k for k in count()))
    return np.array([0, *inner, context], dtype=np.int64)


def _rollout_evidence(
    corpus: Corpus, batches: Sequence[Batch], tally: Tally, full: Tally | None
) -> RolloutEvidence | None:
    """Return the sums of each sample.

    Where full precision would not write its own token, by rounding alone, no stream diverges.
    """
    text = corpus.rollouts
    if text is None or not batches:
        return None
    count, first = len(text.windows), len(corpus.evaluation)  # behind windows of documents
    samples = ScoredTokens(batches, [-1] * first + [*range(count)], count, from_start=True)
    read = np.zeros(count, dtype=np.int64) if text.read is None else text.read
    marked, of_draws = (columns(tally.rows, name) for name in ("drawn_N", "entropy_N"))
    drawn, entropy, agreed = np.zeros(count), np.zeros(count), np.full(count, -1)
    for k, batch in enumerate(batches):
        agrees_BT = tally.rows[k]["likeliest_N"] > 0
        if full is not None:
            agrees_BT |= full.rows[k]["likeliest_N"] == TIE
        for row, w in enumerate(batch.windows):
            s, written = w - first, slice(batch.starts[row], batch.lengths[row])
            drawn[s] = float(marked[k][row, written][: read[s]].double().sum())
            if of_draws:
                entropy[s] = float(of_draws[k][row, written][: read[s]].double().sum())
            if text.greedy[s]:
                agreed[s] = int(agrees_BT[row, written].long().cumprod(0).sum())
    nll = samples.unit_sums(tally.nll)
    kl = samples.unit_sums(tally.kl) if tally.kl else None
    ends = samples.unit_sums(columns(tally.rows, "ends_NG"))
    finite = all(np.isfinite(values).all() for values in (nll, ends, nll if kl is None else kl))
    if not finite or np.isnan(drawn).any():
        tally.note("rollouts are not scored: the loss or divergence of one is not finite")
        return None
    is_weighed = text.mark is not None and not text.unweighed
    longest = max(window.scored for window in text.windows)
    return RolloutEvidence(
        sha256=text.sha256,
        prompt=text.prompt,
        tokens=np.array([window.scored for window in text.windows], dtype=np.int64),
        nll_sum=nll,
        agreed=agreed,
        end_names=tuple(name for name, _ in text.ends),
        end_sum=ends,
        kl_sum=kl,
        mark=text.mark,
        drawn_sum=drawn if is_weighed else None,
        entropy_sum=entropy if is_weighed and of_draws else None,
        weights_sha256=text.weights_sha256,
        unweighed=text.unweighed,
        positions=samples.positions(tally, longest, compared=kl is not None),
        roles=samples.roles(tally, compared=kl is not None),
    )


def evidence_of(
    corpus: Corpus,
    feed: Feed,
    tally: Tally,
    full: Tally | None = None,
    reference: Tally | None = None,
) -> Evidence:
    count = sum(batch.choices is None for batch in feed.evaluation)
    documents, behind = slice(count), slice(count, None)
    rollouts = _rollout_evidence(
        corpus, feed.evaluation[behind], tally.of_batches(behind), full and full.of_batches(behind)
    )
    tally = tally.of_batches(documents)
    full, reference = (other and other.of_batches(documents) for other in (full, reference))
    unit_of = [window.document for window in corpus.evaluation]
    scored = ScoredTokens(feed.evaluation[documents], unit_of, len(corpus.documents))
    fidelity = from_reference = expert_tokens = output_error_sum = None
    if tally.kl and full is not None:
        fidelity = scored.fidelity(tally, full, tally.rows)
    if tally.from_reference and reference is not None:
        from_reference = scored.fidelity(tally, reference, tally.from_reference)
    if errors := columns(tally.rows, "output_error_N"):
        error_N = scored.values(errors)
        output_error_sum = scored.sums(error_N) if np.isfinite(error_N).all() else None
    if layers := tally.expert_tokens:
        widest = max(len(counts) for counts in layers.values())
        expert_tokens = np.full((len(layers), 1 + widest), -1, dtype=np.int64)
        for row, ((block, _), counts) in zip(expert_tokens, layers.items(), strict=True):
            row[0] = block
            row[[1 + index for index in counts]] = list(counts.values())
    return Evidence(
        document_sha256=tuple(d.sha256 for d in corpus.documents),
        nll_sum=scored.unit_sums(tally.nll),
        tokens=scored.tokens,
        nbytes=np.array([d.nbytes for d in corpus.documents], dtype=np.int64),
        strata=corpus.strata,
        tasks=tuple(_task_evidence(corpus, tally)),
        fidelity=fidelity,
        positions=scored.positions(tally, corpus.protocol.context, compared=fidelity is not None),
        roles=scored.roles(tally, compared=fidelity is not None),
        expert_tokens=expert_tokens,
        routing=_routing(corpus, tally),
        output_error=output_error_sum,
        reference=from_reference,
        rollouts=rollouts,
    )


def _routing(corpus: Corpus, tally: Tally) -> Routing | None:
    if not tally.routing:
        return None
    sums = np.zeros((len(tally.routing), 2, len(corpus.documents)))
    for layer, windows in enumerate(tally.routing.values()):
        count = len(corpus.evaluation)  # windows of rollouts come behind
        ids = np.array([w for some, _ in windows for w in some], dtype=np.int64)
        of_windows = torch.cat([sums_2B.cpu() for _, sums_2B in windows], dim=1).numpy()
        of_windows, ids = of_windows[:, ids < count], ids[ids < count]
        np.add.at(sums[layer].T, [corpus.evaluation[w].document for w in ids], of_windows.T)
    blocks = np.array([block for block, _ in tally.routing], dtype=np.int64)
    return Routing(blocks, sums[:, 0].round().astype(np.int64), sums[:, 1])


def _task_evidence(corpus: Corpus, tally: Tally) -> Iterator[TaskEvidence]:
    if tally.options is None or not corpus.items:
        return
    nll, greedy = tally.options
    item_P = np.repeat(np.arange(len(corpus.items)), [item.options for item in corpus.items])
    task_N = np.array([corpus.tasks.index(item.task) for item in corpus.items])
    right_P = np.array([k in item.right for item in corpus.items for k in range(item.options)])
    for number, task in enumerate(corpus.tasks):
        own_P = (task_N == number)[item_P]
        _, items_P = np.unique(item_P[own_P], return_inverse=True)
        yield TaskEvidence(
            task, nll[own_P], items_P.astype(np.int64), right_P[own_P], greedy[own_P]
        )


def document_sums(
    batches: Sequence[Batch], nll: Sequence[Tensor], windows: Sequence[Window], count: int
) -> tuple[Floats, Ints]:
    scored = ScoredTokens(batches, [window.document for window in windows], count)
    return scored.unit_sums(nll), scored.tokens


class ScoredTokens:
    """The tokens of documents, or samples of rollouts, whose loss counts: N in order of batches."""

    def __init__(
        self,
        batches: Sequence[Batch],
        unit_of: Sequence[int],
        units: int,
        *,
        from_start: bool = False,
    ) -> None:
        """`unit_of` is of each window; positions are in a window, or behind a prompt."""
        self.batches, self.unit_of, self.units = batches, unit_of, units
        empty = np.zeros(0, dtype=np.int64)
        unit, position, role = [empty], [empty], [empty]
        for batch in batches:
            marked_BT = batch.scored_BT()
            row_N, position_N = torch.nonzero(marked_BT).numpy().T
            unit.append(np.array([unit_of[w] for w in batch.windows], dtype=np.int64)[row_N])
            position.append(position_N - np.array(batch.starts)[row_N] * from_start)
            if batch.roles_BT is not None:
                role.append(batch.roles_BT[marked_BT].numpy().astype(np.int64))
        self.unit_N, self.position_N = np.concatenate(unit), np.concatenate(position)
        # Places in `ROLES`; None: plain text.
        self.role_N = np.concatenate(role) if len(role) > 1 else None

    @property
    def tokens(self) -> Ints:
        return np.bincount(self.unit_N, minlength=self.units)

    def unit_sums(self, values: Sequence[Tensor]) -> Floats:
        """Return the sums of each unit, window by window."""
        sums = np.zeros((self.units, *(values[0].shape[2:] if values else ())))
        for batch, values_BT in zip(self.batches, values, strict=True):
            marked_BT = batch.scored_BT()
            for row, w in enumerate(batch.windows):
                sums[self.unit_of[w]] += values_BT[row][marked_BT[row]].double().sum(0).numpy()
        return sums

    def values(self, batches: Sequence[Tensor]) -> Floats:
        pairs = zip(batches, self.batches, strict=True)
        chosen = [values[batch.scored_BT()] for values, batch in pairs]
        return torch.cat(chosen or [torch.zeros(0)]).double().numpy()

    def sums(self, values_N: Floats) -> Floats:
        return np.bincount(self.unit_N, values_N, self.units).astype(np.float64)

    def fidelity(
        self, tally: Tally, full: Tally, rows: Sequence[Mapping[str, Tensor]]
    ) -> Fidelity | None:
        """Return the sums of each document; None, with a note, where one is not finite."""
        kl_N = self.values(columns(rows, "kl_N"))
        same_N = self.values(columns(rows, "same_top_N"))
        dp_N = np.exp(-self.values(tally.nll)) - np.exp(-self.values(full.nll))
        if odd := int((~np.isfinite(kl_N) | ~np.isfinite(dp_N)).sum()):
            tally.note(
                f"KL divergence is not measured: it is not finite at {odd} of {len(kl_N)} tokens"
            )
            return None
        largest_D = np.zeros(self.units)
        np.maximum.at(largest_D, self.unit_N, kl_N)
        by_confidence = None
        if sure := columns(full.rows, "confidence_N"):
            bucket_N = np.searchsorted(CONFIDENCE_EDGES, self.values(sure), "right")
            tokens, kl, flips = (
                self._sums_by_bin(bucket_N, len(CONFIDENCE_EDGES) + 1, some_N)
                for some_N in (None, kl_N, same_N == 0)
            )
            by_confidence = ByConfidence(tokens.astype(np.int64), kl, flips.astype(np.int64))
        return Fidelity(
            kl_sum=self.sums(kl_N),
            kl_max=largest_D,
            kl_counts=statistics.counts_of(kl_N, self.unit_N, self.units),
            same_top=self.sums(same_N).astype(np.int64),
            squared_dp_sum=self.sums(dp_N**2),
            by_confidence=by_confidence,
        )

    def positions(self, tally: Tally, context: int, *, compared: bool) -> Positions:
        """Return the sums of each unit by where a token is."""
        edges = position_edges(context)
        bin_N = np.searchsorted(edges, self.position_N, "right") - 1
        return Positions(edges, *self._binned(tally, bin_N, len(edges) - 1, compared))

    def roles(self, tally: Tally, *, compared: bool) -> Roles | None:
        if self.role_N is None:
            return None
        return Roles(ROLES, *self._binned(tally, self.role_N, len(ROLES), compared))

    def _binned(
        self, tally: Tally, bin_N: Ints, bins: int, compared: bool
    ) -> tuple[Ints, Floats, Floats | None, Floats | None]:
        summed = partial(self._sums_by_bin, bin_N, bins)
        kl, end_sum = summed(self.values(tally.kl)) if compared else None, None
        if ends := columns(tally.rows, "ends_NG"):
            of_groups = [summed(values_N) for values_N in self.values(ends).T]
            end_sum = np.stack(of_groups, -1) if of_groups else np.zeros((self.units, bins, 0))
        return summed().astype(np.int64), summed(self.values(tally.nll)), kl, end_sum

    def _sums_by_bin(self, bin_N: Ints, bins: int, values_N: Floats | None = None) -> Floats:
        """Return sums of tokens by unit and bin; without values how many they are."""
        flat = np.bincount(self.unit_N * bins + bin_N, values_N, self.units * bins)
        return flat.astype(np.float64).reshape(self.units, bins)
