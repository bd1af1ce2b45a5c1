"""One small function per rule. Codes stay: a rule that goes leaves its number empty.

`types/metrics.py` has the title of each. Others hold an audit to a policy (`gate`) and rank files
that are quantized already (`diagnostics.shipped`). Names and hashes are judged before anything is
measured (`content_findings`): checkpoints of a training run do not share a byte by chance, so that
equal hashes prove an upload that went wrong, a second name, or a release that is a copy. Only what
was read is judged: a checkpoint whose files are unknown, and whose tree showed nothing, has no
finding. One finding covers all checkpoints that it names.

A rule yields nothing where it does not apply. Messages are sentences; every number in them is
also a field of the finding.

Damage that few documents carry (QA029) is what an interval over documents may miss: it learns how
far documents scatter from those that were measured. Where a document in fifty loses 27 times as
much as the others, half of all audits of 32 documents meet none of these: their intervals are
narrow, and hold the true value in 55 to 64 % of cases (`benchmarks.coverage`). Nothing in the
numbers of such an audit shows it. Where one was met, it shows: a single document then carries much
of what quantization adds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qaudit.core import statistics
from qaudit.core.course import (
    doubts_of_files,
    is_bad_report,
    is_release,
    listed,
    names_in_equal_report,
)
from qaudit.core.scheme import LOOKS_BROKEN
from qaudit.judge.scores import first_rows
from qaudit.judge.table import (
    Measurements,
    columns_of,
    interval_of,
    is_finite,
    largest_share,
    settling,
)
from qaudit.support.keys import first_of
from qaudit.types import (
    FULL_PRECISION,
    Checkpoint,
    Comparison,
    Finding,
    MeasurementRow,
    Pick,
    Subject,
)

CONSPICUOUS = 0.2
"""Of what a scheme changes, carried by one document.

Without rare damage 1 % of samples of 64 documents reach it where damage is lognormal, 8 to 10 %
where its tails are heavier, and half where they are Pareto's; of 32 documents 13 to 39 %, and 75 %.
"""

MATTERS = 0.001
"""Of the loss: where a scheme adds less, one document carrying it changes no decision."""

FEW = 6.0
"""Among few documents the largest of ordinary ones carries up to so many times its equal share."""


SOLID_DOCUMENTS = 50
"""From here on intervals cover as often as they state; with fewer documents they are wide."""


@dataclass(frozen=True, eq=False)
class RuleCase:
    """The input of the rules."""

    table: Measurements
    measurements: tuple[MeasurementRow, ...]
    comparisons: tuple[Comparison, ...]
    pick: Pick | None


def pick_is_a_tie(case: RuleCase) -> Iterator[Finding]:
    """QA002: the difference of pick and runner-up may be zero."""
    pick, documents = case.pick, case.table.documents
    if pick is None or pick.interval is None or pick.reference is not None:
        return
    if documents >= statistics.MINIMUM_DOCUMENTS and pick.interval.high < 0:
        return
    rival = pick.runner_up or "", pick.runner_up_scheme or pick.scheme
    cells = [(pick.subject, pick.scheme), rival]
    message = (
        f"`{pick.subject}` at {pick.scheme} is indistinguishable from `{pick.runner_up}` "
        f"at {pick.runner_up_scheme}"
    )
    hint = settling(case.table, cells, statistics.change).hint
    yield Finding("QA002", "warn", *cells[0], message, hint, pick.interval, 0.0, "inconclusive")


def has_notes(case: RuleCase) -> Iterator[Finding]:
    """QA003: each note once, with the number of subjects that have it."""
    noted: dict[tuple[str, str], list[str]] = {}
    for score in case.measurements:
        for note in score.notes:
            if note.startswith(LOOKS_BROKEN):  # QA043
                continue
            noted.setdefault((score.scheme, note), []).append(score.subject)
    for (scheme, note), subjects in noted.items():
        message = f"{scheme}, {first_of([*dict.fromkeys(subjects)], 1)}: {note}"
        yield Finding("QA003", "info", subjects[0], scheme, message, "", outcome="pass")


def has_few_documents(case: RuleCase) -> Iterator[Finding]:
    """QA004: too few documents for a verdict, or for intervals of usual width."""
    documents = case.table.documents
    if not case.measurements or documents >= SOLID_DOCUMENTS:
        return
    least, subject = statistics.MINIMUM_DOCUMENTS, case.measurements[0].subject
    if documents < least:
        message = f"{documents} evaluation documents are too few for any verdict"
        hint = f"evaluate on at least {least} documents"
        yield Finding("QA004", "warn", subject, None, message, hint, outcome="inconclusive")
    else:
        message = f"with {documents} evaluation documents, intervals are wider than they need to be"
        hint = f"evaluate on at least {SOLID_DOCUMENTS} documents"
        yield Finding("QA004", "info", subject, None, message, hint, outcome="pass")


def last_is_not_best(case: RuleCase) -> Iterator[Finding]:
    """QA005: a subject whose quantized loss is clearly below the last checkpoint's.

    Where a series ends in several ingredients, the best of them is the last checkpoint. All others
    are compared with it at once, so that the luckiest of many is not mistaken for a better one.
    """
    pick, ends = case.pick, case.table.series_ends()
    if pick is None or pick.subject in ends:
        return
    measured = (case.table.find(label, pick.scheme) for label in ends)
    finite = [m for m in measured if m is not None and is_finite(m)]
    best = case.table.find(pick.subject, pick.scheme)
    if not finite or best is None or case.table.documents < statistics.MINIMUM_DOCUMENTS:
        return
    lowest = min(finite, key=lambda m: float(m.evidence.nll_sum.sum()))
    of_scheme = {m.subject for m in case.table.measurements if m.scheme == pick.scheme}
    level = statistics.simultaneous(case.table.confidence, len(of_scheme) - 1)
    cells = [(label, pick.scheme) for label in (lowest.subject, pick.subject)]
    lead = interval_of(case.table, cells, statistics.change, confidence=level)
    if lead is None or lead.low <= 0:
        return
    message = (
        f"the last checkpoint `{lowest.subject}` is not the best one at {pick.scheme}: "
        f"`{pick.subject}` is {lead.estimate:.4f} nats per token better"
    )
    hint = f"ship `{pick.subject}`: the interval holds with all checkpoints compared at once"
    yield Finding("QA005", "warn", lowest.subject, pick.scheme, message, hint, lead, margin=0.0)


def loss_is_not_finite(case: RuleCase) -> Iterator[Finding]:
    """QA006: a loss that is NaN or infinite: a broken model, or a scheme that breaks it."""
    for score in case.measurements:
        if score.ce == statistics.UNKNOWN:
            message = f"the loss of `{score.subject}` under {score.scheme} is not finite"
            hint = "measure it in float32, and look for outliers in its weights"
            yield Finding("QA006", "error", score.subject, score.scheme, message, hint)


def ignores_its_text(case: RuleCase) -> Iterator[Finding]:
    """QA028: a loss per token that is the same on every document."""
    for subject in case.table.subjects:
        full = case.table.full(subject.label)
        if full is None:
            continue
        used = full.evidence.scored()
        per_token = full.evidence.nll_sum[used] / full.evidence.tokens[used]
        # float32 sums of one number differ by rounding alone; real losses by percents.
        if len(per_token) > 1 and np.ptp(per_token) < 1e-5 * abs(per_token[0]):
            message = (
                f"`{subject.label}` has a loss of {per_token[0]:.4f} nats per token on "
                f"each of {len(per_token)} documents: its predictions ignore the text"
            )
            hint = "check its weights: a checkpoint of zeros does this"
            yield Finding("QA028", "error", subject.label, FULL_PRECISION, message, hint)


def least_loss_is_not_best(case: RuleCase) -> Iterator[Finding]:
    """QA007: the subject that loses least to the picked scheme need not be the one to ship."""
    pick = case.pick
    errors = {
        s.subject: s.relative_error
        for s in first_rows(case.measurements).values()
        if pick and s.scheme == pick.scheme and s.relative_error is not None
    }
    least = min(errors, key=lambda label: errors[label].estimate, default=None)
    if pick is not None and least not in (None, pick.subject):
        cell = (least, pick.scheme)
        message = (
            f"`{least}` loses least to {pick.scheme}, "
            f"and `{pick.subject}` is the best one quantized"
        )
        hint = "a model that has learned less can have less to lose: ship by quantized loss"
        yield Finding("QA007", "info", *cell, message, hint, errors[least], outcome="pass")


def costs_more_than_before(case: RuleCase) -> Iterator[Finding]:
    """QA008: the relative error grew from the end of an earlier stage to an end of the series."""
    ends, before = case.table.series_ends(), case.table.stage_ends()
    for c in case.comparisons:
        grew = c.kind == "relative_error_difference" and c.verdict == "b_better"
        if grew and c.a in ends and c.b in before and c.scheme != FULL_PRECISION:
            message = (
                f"{c.scheme} raises the loss of `{c.a}` by "
                f"{100 * c.interval.estimate:.2f} percentage points more than that of `{c.b}`"
            )
            yield Finding("QA008", "info", c.a, c.scheme, message, "", c.interval, margin=0.0)


def rare_damage(case: RuleCase) -> Iterator[Finding]:
    """QA029: each scheme of which one document carries much, by the worst of its subjects."""
    table = case.table
    for scheme in table.quantized_schemes:
        heavy: list[tuple[float, str, str]] = []
        for label in (subject.label for subject in table.subjects):
            columns = columns_of(table, [(label, scheme), (label, FULL_PRECISION)])
            if columns is None:
                continue
            quantized, full, _ = columns
            added_D = quantized - full
            share, place = largest_share(added_D), int(np.argmax(added_D))
            if share is None or added_D.sum() / full.sum() < MATTERS:
                continue
            # Of all changes, gains and losses: near zero added they cancel.
            if added_D[place] / np.abs(added_D).sum() > max(CONSPICUOUS, FEW / len(added_D)):
                names = np.array(table.draws(label, scheme)[0].evidence.document_sha256)
                heavy.append((share, label, str(names[table.scored()][place])))
        if not heavy:
            continue
        share, label, sha256 = max(heavy, key=lambda damage: damage[0])
        more = f"; so it is with {len(heavy) - 1} more subjects" if len(heavy) > 1 else ""
        message = (
            f"1 of {table.documents} documents carries {100 * share:.0f} % of the loss "
            f"that {scheme} adds to `{label}`, and intervals may miss an added loss as rare{more}"
        )
        hint = f"read document {sha256[:12]}, and measure more documents like it"
        yield Finding("QA029", "warn", label, scheme, message, hint)


def has_equal_documents(case: RuleCase) -> Iterator[Finding]:
    """QA046: documents with the losses of another in every measurement."""
    if not case.table.measurements:
        return
    first = case.table.measurements[0]
    evidence, scored = first.evidence, case.table.scored()
    losses_MD = np.stack([m.evidence.nll_sum for m in case.table.measurements])[:, scored]
    alike: dict[tuple[int, int], list[int]] = {}
    copies: list[int] = []
    for k, size in enumerate(zip(evidence.tokens[scored], evidence.nbytes[scored], strict=True)):
        earlier = alike.setdefault(size, [])
        # Sums in float32 differ by rounding where a copy is in another batch.
        if any(np.allclose(losses_MD[:, k], losses_MD[:, j], rtol=1e-6, atol=0) for j in earlier):
            copies.append(k)
        else:
            earlier.append(k)
    if not copies:
        return
    sha256 = np.array(evidence.document_sha256)[scored][copies[0]][:12]
    message = (
        f"{len(copies)} of {case.table.documents} documents have the losses of another in every "
        "measurement: copies narrow intervals and add nothing"
    )
    hint = f"leave copies out of the evaluation text: document {sha256} is one"
    yield Finding("QA046", "warn", first.subject, None, message, hint, outcome="inconclusive")


RULES: tuple[Callable[[RuleCase], Iterator[Finding]], ...] = (
    pick_is_a_tie, has_notes, has_few_documents, last_is_not_best, loss_is_not_finite,
    ignores_its_text, least_loss_is_not_best, costs_more_than_before, rare_damage,
    has_equal_documents,
)  # fmt: skip


_MOST_NAMES = 6


def content_findings(
    checkpoints: Sequence[Checkpoint], soups: Sequence[Subject] = ()
) -> tuple[Finding, ...]:
    """Apply every rule to checkpoints in the order of their series, by the order of the codes."""
    read = [c for c in checkpoints if c.files]
    equal = [group for group in _grouped(read, _bytes).values() if len(group) > 1]
    findings = [finding for group in equal for finding in _of_equal(group)]
    findings += [finding for soup in soups for finding in _of_soup(soup)]
    for checkpoint in checkpoints:  # QA012: a tree was read, and there is nothing in it to measure
        doubts = doubts_of_files(checkpoint.suspect)
        if not checkpoint.files and doubts:
            message = f"{_quoted(checkpoint)} cannot be measured: {'; '.join(doubts)}"
            hint = "name other revisions; `qaudit series` lists them"
            findings.append(_finding("QA012", checkpoint, message, hint))
    mixes = _mixes(read)
    for a, b, shared in mixes:  # QA015: some files of one, and not all, are those of another
        message = (
            f"{_quoted(a)} has {shared} of its {len(a.files)} files from {_quoted(b)}, "
            "or the other way round"
        )
        hint = "at least one of them is a mix of two checkpoints: leave both out"
        findings.append(_finding("QA015", a, message, hint))
    covered = {c.label for group in equal for c in group}
    covered |= {c.label for a, b, _ in mixes for c in (a, b)}
    findings += _of_reports(read, covered)
    return tuple(sorted(findings, key=lambda finding: finding.rule))


def _of_equal(group: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Judge checkpoints that serve the same weights."""
    names = _grouped(group, _point).values()
    firsts = [same[0] for same in names if _is_placed(same[0])]
    if len(firsts) > 1:  # QA009: of different places in a run at most one is right
        message = f"{len(firsts)} checkpoints serve the same weights: {_names(firsts)}"
        hint = (
            "at most one of them matches its name; it is measured once, leave it out of "
            "conclusions about the run"
        )
        yield _finding("QA009", firsts[0], message, hint)
    releases = [c for c in group if is_release(c)]
    parts = [c for c in group if c.ingredient is not None and not is_release(c)]
    if releases and parts:  # QA010: what is called a soup or a release is one of its parts
        message = (
            f"{_quoted(releases[0])} holds the weights of {_quoted(parts[0])}: it is that "
            "ingredient and no soup of several"
        )
        yield _finding("QA010", releases[0], message, "compare it with a soup: `--soup 'A+B+C'`")
    # QA011: names of one place in the run, or a name without a place, for the same weights.
    unplaced = [c for c in group if not _is_placed(c)]
    placed = [c for c in group if _is_placed(c)]
    twice = [same for same in names if len(same) > 1 and _is_placed(same[0])]
    if unplaced:
        twice = [[*placed[:1], *unplaced]] if len(placed) + len(unplaced) > 1 else []
    for same in twice:
        if any(is_release(c) for c in same) and any(c.ingredient is not None for c in same):
            continue  # QA010 covers it
        message = f"{_names(same)} are {len(same)} names for the same weights"
        hint = "a soup by glob would count them more than once: name its members"
        yield _finding("QA011", same[0], message, hint, "pass")


def _of_soup(soup: Subject) -> Iterator[Finding]:
    """QA010: all members of a soup have the same weights."""
    members = [c for c, weight in soup.members if weight != 0]
    if members and all(c.files for c in members) and len({_bytes(c) for c in members}) == 1:
        message = f"soup `{soup.label}` holds the weights of {_quoted(members[0])} alone"
        yield Finding(
            "QA010", "warn", soup.label, None, message, "give weight to members that differ"
        )


def _of_reports(read: Sequence[Checkpoint], covered: Collection[str]) -> Iterator[Finding]:
    """Judge what files of families and of repositories say of checkpoints."""
    by_name = {(c.ref.location, c.ref.revision or c.label): c for c in read}
    bad, listed, odd = (dict[str, list[Checkpoint]]() for _ in range(3))
    for checkpoint in read:
        for text in checkpoint.suspect:
            if checkpoint.label not in covered and is_bad_report(text):
                bad.setdefault(text, []).append(checkpoint)
        for text in (*checkpoint.suspect, *checkpoint.notes):
            names = names_in_equal_report(text)
            files = [by_name.get((checkpoint.ref.location, name)) for name in names]
            differing = [c for c in files if c is not None]
            if len(differing) > 1 and len({_bytes(c) for c in differing}) == len(differing):
                listed.setdefault(text, differing)
        for text in doubts_of_files(checkpoint.suspect):
            odd.setdefault(text, []).append(checkpoint)
    for text, group in bad.items():  # QA013: hashes alone neither confirm nor refute it
        hint = (
            "the hashes neither confirm nor refute it; take a neighbour, or compare its loss with "
            "theirs"
        )
        yield _finding("QA013", group[0], f"{_names(group)}: {text}", hint, "inconclusive")
    for text, group in listed.items():  # QA014: listed as equal, and they differ, or do by now
        message = f"{text}; the files of {_names(group)} differ"
        hint = "they were fixed, or never equal: each can be measured"
        yield _finding("QA014", group[0], message, hint, "pass")
    for text, group in odd.items():  # QA016: odd files of a checkpoint that can be measured
        hint = "name the one of the two to ship"
        yield _finding("QA016", group[0], f"{_names(group)}: {text}", hint)


def _mixes(read: Iterable[Checkpoint]) -> list[tuple[Checkpoint, Checkpoint, int]]:
    """Return pairs that share some files; each checkpoint with the first it shares with."""
    owners: dict[tuple[str, str], Checkpoint] = {}
    pairs: dict[tuple[str, str], tuple[Checkpoint, Checkpoint, int]] = {}
    for checkpoint in read:
        for file in checkpoint.files:
            if file.name == "adapter_config.json":  # the same for every step of a run
                continue
            other = owners.setdefault((file.name, file.sha256), checkpoint)
            if other is not checkpoint and _bytes(other) != _bytes(checkpoint):
                key = (other.label, checkpoint.label)
                _, _, shared = pairs.get(key, (other, checkpoint, 0))
                pairs[key] = (checkpoint, other, shared + 1)
    return list(pairs.values())


def _grouped(
    checkpoints: Iterable[Checkpoint], key: Callable[[Checkpoint], object]
) -> dict[object, list[Checkpoint]]:
    groups: dict[object, list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        groups.setdefault(key(checkpoint), []).append(checkpoint)
    return groups


def _bytes(checkpoint: Checkpoint) -> object:
    return tuple(sorted((file.name, file.sha256) for file in checkpoint.files))


def _is_placed(checkpoint: Checkpoint) -> bool:
    return checkpoint.step is not None or checkpoint.tokens is not None


def _point(checkpoint: Checkpoint) -> object:
    """Return the run and place of a checkpoint; without a place it equals no other."""
    if not _is_placed(checkpoint):
        return checkpoint.label
    tokens = checkpoint.tokens if checkpoint.step is None else None
    return (checkpoint.family, checkpoint.stage, checkpoint.ingredient, checkpoint.step, tokens)


def _quoted(checkpoint: Checkpoint) -> str:
    return f"`{checkpoint.label}`"


def _names(checkpoints: Sequence[Checkpoint]) -> str:
    labels = [c.label for c in checkpoints]
    return listed(labels) if len(labels) <= _MOST_NAMES else first_of(labels, _MOST_NAMES)


def _finding(
    rule: str,
    checkpoint: Checkpoint,
    message: str,
    hint: str,
    outcome: Literal["pass", "fail", "inconclusive"] = "fail",
) -> Finding:
    level: Literal["info", "warn"] = "info" if outcome == "pass" else "warn"
    return Finding(rule, level, checkpoint.label, None, message, hint, outcome=outcome)
