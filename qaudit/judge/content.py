"""Findings from names and hashes, before any weight is fetched. Codes stay, as in `rules`.

Checkpoints of a training run do not share a byte by chance, so that equal hashes prove an
upload that went wrong, a second name, or a release that is a copy. Only what was read is
judged: a checkpoint whose files are unknown, and whose tree showed nothing, has no finding. One
finding covers all checkpoints that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from qaudit.core.course import is_release
from qaudit.core.doubts import doubts_of_files, is_bad_report, names_in_equal_report
from qaudit.types import Checkpoint, Finding, Subject

_MOST_NAMES = 6


@dataclass(frozen=True)
class _Series:
    """The input of the rules: checkpoints, and groups with equal weights."""

    checkpoints: tuple[Checkpoint, ...]
    soups: tuple[Subject, ...]

    @cached_property
    def read(self) -> tuple[Checkpoint, ...]:
        return tuple(c for c in self.checkpoints if c.files)

    @cached_property
    def equal(self) -> tuple[tuple[Checkpoint, ...], ...]:
        """The groups of checkpoints that serve the same weights, those of one alone left out."""
        return tuple(tuple(g) for g in _grouped(self.read, _bytes).values() if len(g) > 1)


def content_findings(
    checkpoints: Sequence[Checkpoint], soups: Sequence[Subject] = ()
) -> tuple[Finding, ...]:
    """Apply every rule to checkpoints in the order of their series, by the order of the codes."""
    series = _Series(tuple(checkpoints), tuple(soups))
    return tuple(finding for rule in RULES for finding in rule(series))


def serve_the_same(series: _Series) -> Iterator[Finding]:
    """QA009: of different places in a run with the same weights, at most one is right."""
    for group in series.equal:
        firsts = [g[0] for g in _grouped(group, _point).values()]
        placed = [c for c in firsts if _is_placed(c)]
        if len(placed) > 1:
            message = f"{len(placed)} checkpoints serve the same weights: {_names(placed)}"
            hint = (
                "at most one of them matches its name; it is measured once, leave it out of "
                "conclusions about the run"
            )
            yield _finding("QA009", placed[0], message, hint)


def is_one_of_its_parts(series: _Series) -> Iterator[Finding]:
    """QA010: what is called a soup or a release is one of the checkpoints it is made of."""
    for group in series.equal:
        releases = [c for c in group if is_release(c)]
        parts = [c for c in group if c.ingredient is not None and not is_release(c)]
        if releases and parts:
            message = (
                f"{_quoted(releases[0])} holds the weights of {_quoted(parts[0])}: it is that "
                "ingredient and no soup of several"
            )
            hint = "compare it with a soup: `--soup 'A+B+C'`"
            yield _finding("QA010", releases[0], message, hint)
    for soup in series.soups:
        members = [c for c, weight in soup.members if weight != 0 and c.files]
        all_known = len(members) == sum(weight != 0 for _, weight in soup.members)
        if members and all_known and len({_bytes(c) for c in members}) == 1:
            message = f"soup `{soup.label}` holds the weights of {_quoted(members[0])} alone"
            hint = "give weight to members that differ"
            yield Finding("QA010", "warn", soup.label, None, message, hint)


def has_two_names(series: _Series) -> Iterator[Finding]:
    """QA011: names of one place in the run, or a name without a place, for the same weights."""
    for group in series.equal:
        names = _grouped(group, _point).values()
        unplaced = [c for c in group if not _is_placed(c)]
        placed = [c for c in group if _is_placed(c)]
        twice = [g for g in names if len(g) > 1 and _is_placed(g[0])]
        if unplaced:
            twice = [[*placed[:1], *unplaced]] if len(placed) + len(unplaced) > 1 else []
        for same in twice:
            if any(is_release(c) for c in same) and any(c.ingredient is not None for c in same):
                continue  # QA010 covers it
            message = f"{_names(same)} are {len(same)} names for the same weights"
            hint = "a soup by glob would count them more than once: name its members"
            yield _finding("QA011", same[0], message, hint, "pass")


def holds_no_weights(series: _Series) -> Iterator[Finding]:
    """QA012: a tree was read, and there is nothing in it to measure."""
    for checkpoint in series.checkpoints:
        doubts = doubts_of_files(checkpoint.suspect)
        if not checkpoint.files and doubts:
            message = f"{_quoted(checkpoint)} cannot be measured: {'; '.join(doubts)}"
            hint = "name other revisions; `qaudit series` lists them"
            yield _finding("QA012", checkpoint, message, hint)


def is_said_to_be_bad(series: _Series) -> Iterator[Finding]:
    """QA013: a family's file warns of a revision, and hashes alone do not decide."""
    reported = {c.label for group in series.equal for c in group}
    reported |= {c.label for pair in _mixes(series) for c in pair[:2]}
    groups: dict[str, list[Checkpoint]] = {}
    for checkpoint in series.read:
        for text in checkpoint.suspect:
            if checkpoint.label not in reported and is_bad_report(text):
                groups.setdefault(text, []).append(checkpoint)
    for text, checkpoints in groups.items():
        hint = (
            "the hashes neither confirm nor refute it; take a neighbour, or compare its loss with "
            "theirs"
        )
        message = f"{_names(checkpoints)}: {text}"
        yield _finding("QA013", checkpoints[0], message, hint, "inconclusive")


def differ_after_all(series: _Series) -> Iterator[Finding]:
    """QA014: revisions that a family's file lists as equal differ, or differ by now."""
    by_name = {(c.ref.location, c.ref.revision or c.label): c for c in series.read}
    listed: dict[str, list[Checkpoint]] = {}
    for checkpoint in series.read:
        for text in (*checkpoint.suspect, *checkpoint.notes):
            names = names_in_equal_report(text)
            files = [by_name.get((checkpoint.ref.location, name)) for name in names]
            differing = [c for c in files if c is not None]
            if len(differing) > 1 and len({_bytes(c) for c in differing}) == len(differing):
                listed.setdefault(text, differing)
    for text, differing in listed.items():
        message = f"{text}; the files of {_names(differing)} differ"
        hint = "they were fixed, or never equal: each can be measured"
        yield _finding("QA014", differing[0], message, hint, "pass")


def is_a_mix(series: _Series) -> Iterator[Finding]:
    """QA015: some files of a checkpoint, and not all, are those of another."""
    for a, b, shared in _mixes(series):
        message = (
            f"{_quoted(a)} has {shared} of its {len(a.files)} files from {_quoted(b)}, "
            "or the other way round"
        )
        hint = "at least one of them is a mix of two checkpoints: leave both out"
        yield _finding("QA015", a, message, hint)


def holds_two_sets(series: _Series) -> Iterator[Finding]:
    """QA016: repeat what is odd about the files of a checkpoint that can be measured."""
    groups: dict[str, list[Checkpoint]] = {}
    for checkpoint in series.read:
        for text in doubts_of_files(checkpoint.suspect):
            groups.setdefault(text, []).append(checkpoint)
    for text, checkpoints in groups.items():
        message = f"{_names(checkpoints)}: {text}"
        yield _finding("QA016", checkpoints[0], message, "name the one of the two to ship")


RULES: tuple[Callable[[_Series], Iterator[Finding]], ...] = (
    serve_the_same, is_one_of_its_parts, has_two_names, holds_no_weights, is_said_to_be_bad,
    differ_after_all, is_a_mix, holds_two_sets,
)  # fmt: skip


def _mixes(series: _Series) -> list[tuple[Checkpoint, Checkpoint, int]]:
    """Return pairs that share some files; each checkpoint with the first it shares with."""
    owners: dict[tuple[str, str], Checkpoint] = {}
    pairs: dict[tuple[str, str], tuple[Checkpoint, Checkpoint, int]] = {}
    for checkpoint in series.read:
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
    shown = [_quoted(c) for c in checkpoints[:_MOST_NAMES]]
    more = len(checkpoints) - len(shown)
    if more:
        return f"{', '.join(shown)} and {more} more"
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]


def _finding(
    rule: str,
    checkpoint: Checkpoint,
    message: str,
    hint: str,
    outcome: Literal["pass", "fail", "inconclusive"] = "fail",
) -> Finding:
    level: Literal["info", "warn"] = "info" if outcome == "pass" else "warn"
    return Finding(rule, level, checkpoint.label, None, message, hint, outcome=outcome)
