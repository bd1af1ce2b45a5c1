"""A family's YAML: names of checkpoints -> stage, step, tokens and learning rate.

Weights do not say how far a run had come nor what its learning rate was. The file of a family
says how its revisions are named, what a step is in tokens, and which schedule its trainer ran,
as the trainer's code or paper states it. Whatever is inferred is marked `verified: false` and
repeated wherever it is used; a schedule nobody published is left out, and the learning rate
then stays unknown.

Steps that restart in a later stage are counted from the end of the one before, by
`starts_after: stage1@5000`. A stage without it goes on counting from the start of the run.
Tokens come from steps, never from a name: labels are rounded, and twins of one checkpoint
carry different ones.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError, model_validator

from qaudit.core.keys import explain, nearest
from qaudit.errors import RecipeError, UsageError
from qaudit.families.tables import (
    FamilySoup,
    Index,
    KnownBad,
    LearningRate,
    Match,
    Named,
    Ramp,
    Ramps,
    Stage,
    Table,
    compiled,
)
from qaudit.sources.series import Key, Place, order, parse_name, place_of

FAMILY_FILE = "qaudit-family.yaml"
"""A file of this name in a folder of checkpoints says what family they are."""


class Family(Table):
    """Everything a family's file says."""

    family: str
    description: str
    match: Match = Match()
    stages: tuple[Stage, ...] = ()
    tokens_per_step: Ramps | None = None
    named: tuple[Named, ...] = ()
    soups: tuple[FamilySoup, ...] = ()
    known_duplicates: tuple[tuple[str, ...], ...] = ()
    known_bad: tuple[KnownBad, ...] = ()
    dtype: str | None = None
    bytes_per_checkpoint: int | None = None
    shards: int | None = None
    context: int | None = None
    tokenizer: str | None = None
    requires: tuple[Literal["pickle", "remote_code"], ...] = ()
    sources: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _stages_follow_each_other(self) -> Family:
        known: set[str] = set()
        for stage in self.stages:
            before = (stage.starts_after or "").rpartition("@")[0]
            if before and before not in known:
                raise ValueError(
                    f"stage `{stage.name}` starts after `{before}`, which does not stand before it"
                )
            known.add(stage.name)
        return self

    def place(self, name: str) -> Place:
        """Read a name by this family's patterns, or by the general rules."""
        for named in self.named:
            if named.name == name:
                return Place(name, named.stage, named.ingredient, named.step)
        for stage in self.stages:
            if stage.pattern and (match := compiled(stage.pattern).fullmatch(name)):
                return self._by_index(
                    stage, place_of(name, {**match.groupdict(), "stage": stage.name})
                )
        place = parse_name(name)
        found = self._stage(place)
        return self._by_index(found, place) if found else place

    def order(self, place: Place) -> Key:
        """Return what a place sorts by in this family."""
        return order(place, tuple(stage.name for stage in self.stages))

    def tokens(self, place: Place) -> int | None:
        """Return the tokens the run had seen at a place, from its very start."""
        stage = self._stage(place)
        if stage is None or place.step is None:
            return None
        return self._seen(stage, place.step)

    def learning_rate(self, place: Place) -> float | None:
        """Return the learning rate at a place, or nothing where no schedule is published."""
        piece, stage = self._piece(place), self._stage(place)
        if piece is None or stage is None or place.step is None:
            return None
        if piece.units == "steps":
            return piece.schedule().at(place.step)
        tokens = self._in_stage(stage, place.step)
        if tokens is None:
            return None
        per = stage.tokens_per_sample if piece.units == "samples" else 1
        return piece.schedule().at(tokens / (per or 1))

    def notes(self, place: Place) -> tuple[str, ...]:
        """Return what is inferred about a place and not confirmed in any source."""
        inferred = [n.name for n in self.named if n.name == place.name and not n.verified]
        notes = [f"where `{name}` stands in the run is inferred" for name in inferred]
        piece = self._piece(place)
        if piece is not None and not piece.verified:
            notes.append(f"the learning rate of `{place.stage or self.family}` is inferred")
        return tuple(notes)

    def _stage(self, place: Place) -> Stage | None:
        """Return the stage of a place; a family of one stage need not name it."""
        if place.stage is None and len(self.stages) == 1 and not self.stages[0].pattern:
            return self.stages[0]
        return next((stage for stage in self.stages if stage.name == place.stage), None)

    def _piece(self, place: Place) -> LearningRate | None:
        stage = self._stage(place)
        if stage is None or place.step is None:
            return None
        in_force = (
            p
            for p in stage.lr
            if place.step <= (math.inf if p.until_step is None else p.until_step)
        )
        return next(in_force, None)

    def _by_index(self, stage: Stage, place: Place) -> Place:
        if stage.index is None or place.index is None or place.step is not None:
            return place
        step = (place.index + stage.index.offset) * stage.index.steps
        return Place(place.name, stage.name, place.ingredient, step, place.tokens, place.index)

    def _in_stage(self, stage: Stage, step: int) -> int | None:
        """Return the tokens of a stage's steps up to `step`, with growing batches."""
        ramps = stage.tokens_per_step or self.tokens_per_step
        if not ramps:
            return None
        ends = [*(ramp.from_step for ramp in ramps[1:]), step]
        return sum(
            max(0, min(end, step) - ramp.from_step) * ramp.tokens
            for ramp, end in zip(ramps, ends, strict=True)
        )

    def _seen(self, stage: Stage, step: int) -> int | None:
        inside = self._in_stage(stage, step)
        if inside is None or stage.starts_after is None:
            return inside
        name, _, last = stage.starts_after.rpartition("@")
        before = next(s for s in self.stages if s.name == name)
        seen = self._seen(before, int(last))
        return None if seen is None else seen + inside


def load(name: str) -> Family:
    """Return the family called `name`."""
    for family in all_families():
        if family.family == name:
            return family
    known = [family.family for family in all_families()]
    raise UsageError(f"there is no family `{name}`", hint=nearest(name, known))


@cache
def all_families() -> tuple[Family, ...]:
    """Return every family that ships, by name."""
    folder = Path(str(files("qaudit.families")))
    return tuple(load_file(path) for path in sorted(folder.glob("*.yaml")))


def find(repo: str) -> Family | None:
    """Return the family a repository belongs to, or nothing; names are never guessed from."""
    from fnmatch import fnmatchcase

    return next(
        (f for f in all_families() if any(fnmatchcase(repo, glob) for glob in f.match.repos)), None
    )


def load_file(path: Path) -> Family:
    """Read a family's file; a wrong key is named with the one that was probably meant."""
    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"`{path}` cannot be read: {reason}", hint="write it as YAML") from error
    try:
        return Family.model_validate(table)
    except ValidationError as error:
        sentence, hint = explain(error.errors(), _ALLOWED)
        raise RecipeError(f"`{path}`: {sentence}", hint=hint) from error


def learning_rate_of(table: dict[str, Any]) -> LearningRate:
    """Read a schedule as a recipe gives it."""
    try:
        return LearningRate.model_validate(table)
    except ValidationError as error:
        sentence, hint = explain(error.errors(), {"": list(LearningRate.model_fields)})
        raise RecipeError(f"schedule: {sentence}", hint=hint) from error


_ALLOWED = {
    "": list(Family.model_fields),
    "match": list(Match.model_fields),
    "stages": list(Stage.model_fields),
    "lr": list(LearningRate.model_fields),
    "index": list(Index.model_fields),
    "tokens_per_step": list(Ramp.model_fields),
    "named": list(Named.model_fields),
    "soups": list(FamilySoup.model_fields),
    "known_bad": list(KnownBad.model_fields),
}
