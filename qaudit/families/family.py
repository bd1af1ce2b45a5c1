"""A family: the places of its checkpoints in their run, and what is known about them.

Each table of a family's file is a class, whose fields are its keys.

Steps that restart in a later stage are counted from the end of the one before, by
`starts_after: stage1@5000`. A stage without it goes on counting from the start of the run.
Tokens come from steps, never from a name: labels are rounded, and twins of one checkpoint
carry different ones. A label far from the tokens of its step is noted.

Every lab names its checkpoints in its own way, and a few change it in the middle of a run. The
rules below read the names that are in public use; the first that matches the whole name wins,
and the order matters: `global_step1000` must not be read as a stage called "global", nor the
`2T` of `stage2-step47684-mix-round5-from-2T-ckpt` as tokens. A name that no rule reads is a
named checkpoint: it has its own name, is placed last and never dropped.

Numbers sort as numbers (`step1000` comes after `step200`). Token counts in names are rounded
by their authors, so that they are a check and not a measurement; `ckpt_007` counts in units
that its family defines, so that it is an index and not a step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from qaudit.core.schedules import Schedule, build
from qaudit.support.foreign import slow_reason
from qaudit.support.keys import as_list


@dataclass(frozen=True)
class Place:
    """The place of a checkpoint in a training run, as far as its name gives it."""

    name: str
    stage: str | None = None
    ingredient: int | None = None
    step: int | None = None
    tokens: int | None = None
    index: int | None = None
    variant: str | None = None

    @property
    def named(self) -> bool:
        """Whether the name has no number to order it by."""
        return self.step is None and self.tokens is None and self.index is None


_N = "[0-9]{1,18}"  # longer runs of digits are hashes, and Python refuses to read the longest
_TOKENS = rf"(?P<tokens>{_N}(?:\.{_N})?)(?P<unit>[KMBT])"

RULES: tuple[re.Pattern[str], ...] = tuple(
    re.compile(rule)
    for rule in (
        rf"(?P<stage>stage{_N})-ingredient(?P<ingredient>{_N})-step-?(?P<step>{_N})"
        rf"(?:-tokens{_TOKENS})?",
        rf"(?P<stage>stage{_N})-step-?(?P<step>{_N})(?:-tokens{_TOKENS})?(?:-(?P<variant>mix-.+))?",
        rf"global_?step_?(?P<step>{_N})",
        rf"step-(?P<step>{_N})_tokens-{_TOKENS}-(?P<stage>phase{_N})",
        rf"step[-_]?(?P<step>{_N})(?:-tokens?{_TOKENS})?",
        rf"step-(?P<step>{_N})-{_TOKENS}T?",  # 2BT is 2 B tokens
        # one repository per checkpoint
        rf".+[-_]step-(?P<thousands>{_N})k-(?:token-)?(?P<tokens>{_N})(?P<unit>[bT])",
        rf"(?P<stage>[A-Za-z][A-Za-z0-9]*(?:[-_.][A-Za-z0-9]+)*?)[-_]step[-_]?(?P<step>{_N})"
        rf"(?:-tokens{_TOKENS})?",
        rf"iter[-_]?(?P<step>{_N})",
        rf"checkpoint-(?P<step>{_N})",
        rf"(?:ckpt|checkpoint|chkpt)[-_](?P<index>{_N})",
        rf"[A-Za-z]+_(?P<stage>phase{_N})_checkpoint_(?P<step>{_N})",
        _TOKENS,
        rf"(?P<step>{_N})",
    )
)

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_name(name: str) -> Place:
    """Read a revision's or folder's name; a name without a place is a named checkpoint."""
    last = re.sub(r"/mp_rank_[0-9]+$", "", name.rstrip("/")).rpartition("/")[2]
    for rule in RULES:
        if match := rule.fullmatch(last):
            return place_of(name, match.groupdict())
    return Place(name)


def place_of(name: str, groups: dict[str, str | None]) -> Place:
    texts = {key: text for key, text in groups.items() if text is not None}
    fields: dict[str, Any] = {key: texts[key] for key in ("stage", "variant") if key in texts}
    fields |= {key: int(texts[key]) for key in ("ingredient", "step", "index") if key in texts}
    if "thousands" in texts:
        fields["step"] = 1000 * int(texts["thousands"])
    if "tokens" in texts:
        unit = _UNITS[texts.get("unit", "B").upper()]
        fields["tokens"] = int(Decimal(texts["tokens"]) * unit)
    return Place(name, **fields)


Key = tuple[Any, ...]


def order(place: Place, stages: Sequence[str] = ()) -> Key:
    """Return the sort key of a place: stage, ingredient, step.

    `stages` is the order its family gives. Without one, what has no stage comes first, then
    numbered stages by number, then other stages by name; named checkpoints come last.
    """
    if place.named:
        return (9, 0, (), 0, 0, 0, natural(place.name))
    counters = (place.step, place.index, place.tokens)
    kind = next(k for k, counter in enumerate(counters) if counter is not None)
    stage: Key = (3, 0, natural(place.stage or ""))
    if place.stage in stages:
        stage = (0, stages.index(place.stage), ())
    elif place.stage is None:
        stage = (1, 0, ())
    elif match := re.fullmatch(rf"(?:stage|phase)({_N})", place.stage):
        stage = (2, int(match[1]), ())
    return (*stage, place.ingredient or 0, kind, counters[kind], natural(place.name))


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that reads the numbers in a text as numbers."""
    parts = re.findall(rf"{_N}|[^0-9]+", text)
    return tuple(
        (0, int(part), part) if part[0] in "0123456789" else (1, 0, part) for part in parts
    )


# ------------------------------------------------------------------------ the tables of a file


class Strict(BaseModel):
    """A table that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Inferred(BaseModel):
    """Whether a table was read in a source or inferred, and the reason."""

    verified: bool = True
    reason: str | None = None

    def doubt(self, sentence: str) -> tuple[str, ...]:
        """Return the sentence and its reason, or nothing when the table is verified."""
        if self.verified:
            return ()
        return (f"{sentence}: {self.reason}" if self.reason else sentence,)


class Ramp(Strict, Inferred):
    """The tokens of a step, from a step on: batches grow during some runs."""

    from_step: int = 0
    tokens: int


Ramps = Annotated[
    tuple[Ramp, ...],
    BeforeValidator(lambda one: ({"tokens": one},) if isinstance(one, int) else as_list(one)),
]


class LearningRate(Inferred):
    """A schedule, the unit its counter runs in, and where it was in force."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: str
    units: Literal["steps", "tokens", "samples"] = "steps"
    until_step: int | None = None
    ingredients: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _can_be_built(self) -> LearningRate:
        self.schedule()
        return self

    def schedule(self) -> Schedule:
        return build(self.kind, **{k: _number(k, v) for k, v in (self.model_extra or {}).items()})


def _number(key: str, value: object) -> Any:
    """Read `5.0e12` and `5e12` alike: YAML takes the second for a text."""
    if not isinstance(value, str) or key == "shape":
        return value
    if re.fullmatch(r"[-+]?[0-9]+(\.[0-9]*)?(e[-+]?[0-9]{1,3})?", value, re.I):
        return float(value)
    raise ValueError(f"`{key}` is `{value}`, which is no number")


class Index(Strict):
    """How a counted checkpoint becomes a step: `step = (index + offset) * steps`."""

    steps: int
    offset: int = 0


class Stage(Strict):
    """One stage of a run: its names, its learning rate, where it starts and ends."""

    name: str
    pattern: str | None = None
    lr: Annotated[tuple[LearningRate, ...], BeforeValidator(as_list)] = ()
    starts_after: str | None = None
    end_step: int | None = None
    tokens_per_step: Ramps | None = None
    tokens_per_sample: int | None = None
    index: Index | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Stage:
        unknown = set(compiled(self.pattern or "").groupindex) - _GROUPS
        if unknown:
            raise ValueError(
                f"the pattern names groups {sorted(unknown)}; known are {sorted(_GROUPS)}"
            )
        if self.starts_after is not None and not re.fullmatch(r".+@[0-9]+", self.starts_after):
            raise ValueError("`starts_after` is a stage and a step, such as `stage1@5000`")
        if self.tokens_per_sample is None and any(lr.units == "samples" for lr in self.lr):
            raise ValueError("a schedule in samples needs `tokens_per_sample` beside it")
        return self


_LONGEST_PATTERN = 500
_GROUPS = {"stage", "ingredient", "step", "tokens", "unit", "index", "variant", "thousands"}


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a stage's pattern once, or refuse it; `\\d` is an ASCII digit."""
    shown = pattern if len(pattern) <= 60 else f"{pattern[:57]}..."
    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"`{shown}` is longer than {_LONGEST_PATTERN} characters; shorten it")
    try:
        regex = re.compile(pattern, re.ASCII)
        reason = slow_reason(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"`{shown}` is not a regular expression: {error}") from error
    if reason:
        raise ValueError(f"`{shown}` could take hours on a long name: {reason}; write it without")
    return regex


class Named(Strict, Inferred):
    """The place of a checkpoint without a number in its name.

    One without a step comes after those with one, in the order of the file.
    """

    name: str
    repo: str | None = None  # where only one of the family's repositories means this by it
    stage: str | None = None
    ingredient: int | None = None
    step: int | None = None


class FamilySoup(Strict, Inferred):
    """A soup as its makers document it.

    `target` is the revision that should equal it, as `owner/name@revision` in another repository.
    """

    label: str
    merge: str = "mean"
    of: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    target: str | None = None


class Duplicates(Strict, Inferred):
    """Revisions with the same weights, or reported to have them; a bare list of names will do."""

    revisions: tuple[str, ...]
    repo: str | None = None
    source: str | None = None


DuplicatesOrNames = Annotated[
    Duplicates,
    BeforeValidator(lambda one: {"revisions": one} if isinstance(one, list | tuple) else one),
]


class KnownBad(Strict):
    """Revisions, by name or glob, whose weights do not match their names.

    `some` means that only some of them are bad, unknown which: hashes must decide.
    """

    revisions: tuple[str, ...]
    reason: str
    some: bool = False
    repo: str | None = None
    source: str | None = None


class Match(Strict):
    """What belongs to the family: repositories by glob, and their architecture.

    `reads` are regular expressions that search a repository's name; their groups are
    parameters of the schedule, which the name then overrides.
    """

    repos: tuple[str, ...] = ()
    model_type: str | None = None
    reads: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _can_be_searched(self) -> Match:
        for pattern in self.reads:
            compiled(pattern)
        return self


LABEL_TOLERANCE = 0.003
"""How far nominal tokens may be from those of the step, beside the billion of rounding."""

_LONGEST_NAME = 255
_AFTER_ALL = 10**9

Need = Literal["pickle", "remote_code", "revision"]
"""Weights only as pickles; code of the repository; a revision, as `main` holds no weights."""


class Family(Strict):
    """The keys of a family's file."""

    family: str
    description: str
    match: Match = Match()
    stages: tuple[Stage, ...] = ()
    tokens_per_step: Ramps | None = None
    named: tuple[Named, ...] = ()
    soups: tuple[FamilySoup, ...] = ()
    known_duplicates: tuple[DuplicatesOrNames, ...] = ()
    known_bad: tuple[KnownBad, ...] = ()
    dtype: str | None = None
    context: int | None = None
    tokenizer: str | None = None  # the repository it is in, where it is another
    requires: tuple[Need, ...] = ()
    why_required: dict[Need, str] = Field(default_factory=dict)  # what is particular to this one
    sources: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()  # what to know before scanning
    unverified: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _stages_follow_each_other(self) -> Family:
        seen: set[str] = set()
        for stage in self.stages:
            before = (stage.starts_after or "").rpartition("@")[0]
            if before and before not in seen:
                raise ValueError(
                    f"stage `{stage.name}` starts after `{before}`, which is not before it"
                )
            seen.add(stage.name)
        return self

    def place(self, name: str, repo: str | None = None) -> Place:
        """Read a name by this family's patterns, or by the general rules."""
        if named := self._named(name, repo):
            return Place(name, named.stage, named.ingredient, named.step)
        # A run of 19 digits is a hash, and Python refuses to read the longest as a number; a name
        # of a file system is no longer than this, and patterns may be slow on longer ones.
        if len(name) > _LONGEST_NAME or re.search("[0-9]{19}", name):
            return Place(name)
        of_place: Stage | None = None
        place = parse_name(name)
        for stage in self.stages:
            if stage.pattern and (match := compiled(stage.pattern).fullmatch(name)):
                place, of_place = place_of(name, {**match.groupdict(), "stage": stage.name}), stage
                break
        else:
            of_place = self._stage(place)
        if of_place is None or of_place.index is None:
            return place
        if place.index is None or place.step is not None:
            return place
        step = (place.index + of_place.index.offset) * of_place.index.steps
        return replace(place, stage=of_place.name, step=step)

    def order(self, place: Place) -> Key:
        names = [named.name for named in self.named if named.step is None]
        if place.named and place.name in names:
            return (8, names.index(place.name), (), 0, 0, 0, natural(place.name))
        if place.ingredient is None and place.name in {soup.target for soup in self.soups}:
            place = replace(place, ingredient=_AFTER_ALL)  # a mean follows its ingredients
        return order(place, tuple(stage.name for stage in self.stages))

    def _named(self, name: str, repo: str | None) -> Named | None:
        return next((n for n in self.named if n.name == name and n.repo in {None, repo}), None)

    def tokens(self, place: Place) -> int | None:
        """Return the tokens the run had seen at a place, from its very start."""
        stage, step, seen = self._stage(place), place.step, 0
        while stage is not None and step is not None:
            inside = self._in_stage(stage, step)
            if inside is None:
                return None
            seen += inside
            if stage.starts_after is None:
                return seen
            before, _, last = stage.starts_after.rpartition("@")
            stage, step = next(s for s in self.stages if s.name == before), int(last)
        return None

    def learning_rate(self, place: Place) -> float | None:
        """Return the learning rate at a place, or nothing where no schedule is published."""
        piece, stage = self._piece(place), self._stage(place)
        if piece is None or stage is None or place.step is None:
            return None
        if piece.units == "steps":
            return piece.schedule().at(place.step)
        tokens = self._in_stage(stage, place.step)
        per = (piece.units == "samples" and stage.tokens_per_sample) or 1
        return None if tokens is None else piece.schedule().at(tokens / per)

    def _stage(self, place: Place) -> Stage | None:
        """Return the stage of a place; a family of one stage need not name it.

        A variant left the run somewhere, so that no stage's counting holds for it.
        """
        if place.variant is not None:
            return None
        if place.stage is None and len(self.stages) == 1 and not self.stages[0].pattern:
            return self.stages[0]
        return next((stage for stage in self.stages if stage.name == place.stage), None)

    def _piece(self, place: Place) -> LearningRate | None:
        """Return the first schedule that holds for the ingredient and step of a place."""
        stage, step = self._stage(place), place.step
        for piece in stage.lr if stage is not None else ():
            is_early = step is not None and (piece.until_step is None or step <= piece.until_step)
            if is_early and (piece.ingredients is None or place.ingredient in piece.ingredients):
                return piece
        return None

    def _in_stage(self, stage: Stage, step: int) -> int | None:
        ramps = stage.tokens_per_step or self.tokens_per_step
        if not ramps:
            return None
        ends = [*(ramp.from_step for ramp in ramps[1:]), step]
        return sum(
            max(0, min(end, step) - ramp.from_step) * ramp.tokens
            for ramp, end in zip(ramps, ends, strict=True)
        )

    def notes(self, place: Place, repo: str | None = None) -> tuple[str, ...]:
        """Return the inferences about a place that no source confirms."""
        notes: list[str] = []
        if named := self._named(place.name, repo):
            notes += named.doubt(f"the place of `{place.name}` in the run is inferred")
        where = place.stage or self.family
        if piece := self._piece(place):
            notes += piece.doubt(f"the learning rate of `{where}` is inferred")
        stage = self._stage(place)
        if stage is not None and place.step is not None:
            for ramp in stage.tokens_per_step or self.tokens_per_step or ():
                notes += ramp.doubt(f"the tokens of a step of `{where}` are inferred")
            tokens, counted = place.tokens, self._in_stage(stage, place.step)
            far = 10**9 + LABEL_TOLERANCE * (counted or 0)
            if tokens is not None and counted is not None and abs(tokens - counted) > far:
                notes.append(
                    f"`{place.name}` names {tokens / 1e9:g}B tokens, and its step has "
                    f"{counted / 1e9:.1f}B"
                )
        return tuple(notes)

    def bad(self, name: str, repo: str | None = None) -> tuple[KnownBad, ...]:
        return tuple(group for group in self.known_bad if self._names(group, name, repo))

    def duplicates(self, name: str, repo: str | None = None) -> tuple[Duplicates, ...]:
        """Return the groups of revisions, this one among them, that serve the same weights."""
        return tuple(group for group in self.known_duplicates if self._names(group, name, repo))

    def _names(self, group: Duplicates | KnownBad, name: str, repo: str | None) -> bool:
        return group.repo in {None, repo} and any(self._same(r, name) for r in group.revisions)

    def _same(self, entry: str, name: str) -> bool:
        """Whether a file's entry means a revision; one without tokens means any label."""
        if entry == name or fnmatchcase(name, entry):
            return True
        listed, place = self.place(entry), self.place(name)
        return (
            listed.step is not None
            and listed.tokens is None
            and replace(listed, name="", tokens=None) == replace(place, name="", tokens=None)
        )
