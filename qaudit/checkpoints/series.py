"""Candidates -> a series of checkpoints: what each name says, in the order of training.

Folders and the Hub list candidates in different ways, and both end here. What is known of a place
in a run comes from, in this order: the family, the `trainer_state.json` that HF Trainer leaves
beside a checkpoint, the schedule of a recipe. Nothing is guessed; what no source gives stays
unknown, and a name that no rule reads is a checkpoint like any other, placed last.

What a family's file says against a revision is noted here too, before anything is compared: a
default choice should not fall on it. Revisions that a family calls equal are suspect if they are
at different places of the run, because then one of them is not what its name says; two names for
one place are only noted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qaudit.checkpoints.stamps import own_folder
from qaudit.core.course import bad_report, equal_report
from qaudit.errors import SourceError, UsageError
from qaudit.families import Family, learning_rate_of
from qaudit.families.family import Duplicates, Key, LearningRate, Place, order, parse_name
from qaudit.types import Checkpoint, Recipe, Ref
from qaudit.whole import read_regular

FILE = "trainer_state.json"

_LARGEST_NBYTES = 256_000_000  # a line for each of a million steps
_LARGEST_NUMBER = 1 << 53


@dataclass(frozen=True)
class TrainerState:
    """What is known of a checkpoint's place in its run; all empty where there is no file."""

    step: int | None = None
    tokens: int | None = None
    rates: Mapping[int, float] = field(default_factory=dict)  # step -> learning rate logged at it


def read_trainer_state(folder: Path) -> TrainerState:
    """Return the state beside a checkpoint; refuse a file that Trainer cannot have written."""
    path = folder / FILE
    if not path.is_file():
        return TrainerState()
    try:
        state = json.loads(read_regular(path, _LARGEST_NBYTES).decode())
        log = state.get("log_history") or [] if isinstance(state, dict) else [None]
        if not isinstance(log, list) or not all(isinstance(line, dict) for line in log):
            raise ValueError("it is not a table of keys with a `log_history` of such tables")
        rates = {  # those that were logged first last
            line["step"]: float(_number(line, "learning_rate"))
            for line in reversed(log)
            if isinstance(line.get("step"), int) and line.get("learning_rate") is not None
        }
        step, tokens = (
            None if state.get(key) is None else int(_number(state, key, whole=True))
            for key in ("global_step", "num_input_tokens_seen")  # tokens are logged as floats
        )
        return TrainerState(step, tokens or None, rates)
    except (OSError, ValueError, RecursionError) as error:
        why = "it nests too deep" if isinstance(error, RecursionError) else error
        raise SourceError(
            f"`{path}` cannot be read: {why}", hint="fix it, or remove it from the folder"
        ) from error


def _number(table: Mapping[str, Any], key: str, *, whole: bool = False) -> float:
    value = table[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value < _LARGEST_NUMBER) or (whole and value != int(value)):
        raise ValueError(f"`{key}` is not a {'whole ' * whole}number from 0 to 2^53")
    return float(value) if not whole else int(value)


@dataclass(frozen=True)
class Knowledge:
    """Where the steps and learning rates of a series come from."""

    family: Family | None = None
    schedule: LearningRate | None = None

    @classmethod
    def of(cls, family: Family | None, recipe: Recipe | None) -> Knowledge:
        schedule = recipe.schedule if recipe is not None else None
        return cls(family, learning_rate_of(schedule) if schedule else None)

    def place(self, name: str, repo: str | None = None) -> Place:
        """Read a name by the family, or by the general rules."""
        return self.family.place(name, repo) if self.family else parse_name(name)

    def order(self, place: Place) -> Key:
        return self.family.order(place) if self.family else order(place)


@dataclass(frozen=True)
class Candidate:
    """A checkpoint before its name is read.

    The first of its names that tells a place is the one that is read; without one, the last
    decides the order among those that tell none. `state` is what HF Trainer left beside it.
    """

    ref: Ref
    label: str
    names: tuple[str, ...]
    knowledge: Knowledge
    commit: str | None = None
    state: TrainerState = field(default_factory=TrainerState)
    notes: tuple[str, ...] = ()

    @property
    def repo(self) -> str | None:
        return self.ref.location if self.commit else None


@dataclass(frozen=True)
class CheckpointGroup:
    """What one target holds; `alone` if the target is one checkpoint and no series."""

    candidates: tuple[Candidate, ...]
    alone: bool


def as_series(groups: Iterable[CheckpointGroup]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of every target under labels that differ."""
    groups = list(groups)
    together = [candidate for group in groups if group.alone for candidate in group.candidates]
    series: list[Checkpoint] = []
    for group in groups:
        series += in_order(together if group.alone else group.candidates)
        if group.alone:
            together = []
    return tell_apart(series)


def in_order(candidates: Sequence[Candidate]) -> list[Checkpoint]:
    """Return the checkpoints of one series as far as names and logs tell, in their order."""
    places = ((candidate, _place(candidate)) for candidate in candidates)
    series = sorted(places, key=lambda pair: pair[0].knowledge.order(pair[1]))
    suspect, notes = _doubts(series)
    return [
        _checkpoint(candidate, place, suspect[k], notes[k])
        for k, (candidate, place) in enumerate(series)
    ]


def tell_apart(checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Give checkpoints of equal name labels that differ, by the folders around them."""
    labelled = list(checkpoints)
    places = (str(c.ref if c.commit else own_folder(c).resolve()) for c in labelled)
    for where, times in Counter(places).items():
        if times > 1:
            raise UsageError(f"`{where}` is given {times} times", hint="name each of them once")
    above: list[tuple[str, ...]] = []
    for c in labelled:
        revision = (c.ref.revision or "main",) if c.ref.subfolder else ()
        on_hub = (*c.ref.location.split("/"), *revision)
        above.append(on_hub if c.commit else own_folder(c).absolute().parts[1:-1])
    for depth in range(1, max(map(len, above), default=0) + 1):
        twice = {label for label, times in Counter(c.label for c in labelled).items() if times > 1}
        if not twice:
            break
        for k, checkpoint in enumerate(labelled):
            if checkpoint.label in twice and depth <= len(above[k]):
                labelled[k] = replace(checkpoint, label=f"{above[k][-depth]}/{checkpoint.label}")
    return tuple(labelled)


def _place(candidate: Candidate) -> Place:
    places = [candidate.knowledge.place(name, candidate.repo) for name in candidate.names]
    telling = (place for place in places if not place.named or place.stage is not None)
    place = next(telling, places[-1])
    if place.named and candidate.state.step is not None:
        return replace(place, step=candidate.state.step)
    return place


def _checkpoint(
    candidate: Candidate, place: Place, suspect: Iterable[str], notes: Iterable[str]
) -> Checkpoint:
    family, schedule = candidate.knowledge.family, candidate.knowledge.schedule
    tokens, rate = place.tokens, None
    inferred: tuple[str, ...] = ()
    if family is not None:
        computed = family.tokens(place)
        tokens = place.tokens if computed is None else computed
        rate, inferred = family.learning_rate(place), family.notes(place, candidate.repo)
    if rate is None:  # one logged at another step does not stand for it
        rate = None if place.step is None else candidate.state.rates.get(place.step)
        tokens = tokens or candidate.state.tokens
    if rate is None and schedule is not None and place.step is not None:
        seen = {"steps": place.step, "tokens": tokens or None}.get(schedule.units)
        rate = None if seen is None else schedule.schedule().at(seen)
    return Checkpoint(
        ref=candidate.ref,
        label=candidate.label,
        commit=candidate.commit,
        family=family.family if family else None,
        stage=place.stage,
        ingredient=place.ingredient,
        step=place.step,
        tokens=tokens,
        learning_rate=rate,
        notes=(*candidate.notes, *inferred, *notes),
        suspect=tuple(suspect),
    )


def _doubts(series: Sequence[tuple[Candidate, Place]]) -> tuple[list[list[str]], list[list[str]]]:
    """Return, for each checkpoint, why it is suspect and what is merely worth a note."""
    suspect: list[list[str]] = [[] for _ in series]
    notes: list[list[str]] = [[] for _ in series]
    equal: dict[tuple[str | None, Duplicates], list[int]] = {}
    for k, (candidate, _) in enumerate(series):
        family = candidate.knowledge.family
        if family is None:
            continue
        for bad in family.bad(candidate.names[0], candidate.repo):
            suspect[k].append(bad_report(bad.reason, bad.source, some=bad.some))
        for duplicates in family.duplicates(candidate.names[0], candidate.repo):
            equal.setdefault((candidate.repo, duplicates), []).append(k)
    for (_, duplicates), members in equal.items():
        if len(members) > 1:
            places = [series[k][1] for k in members]
            points = {  # a place without a step is like no other
                (p.stage, p.ingredient, p.step, p.variant, p.name if p.step is None else None)
                for p in places
            }
            is_one_place = len(points) == 1
            names = [series[k][0].names[0] for k in members]
            text = equal_report(names, duplicates.reason, duplicates.source, one_place=is_one_place)
            for k in members:
                (notes if is_one_place else suspect)[k].append(text)
    return suspect, notes
