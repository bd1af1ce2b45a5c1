"""A race over real weights: each round measures the survivors on the documents that are new.

Every measurement of a round is kept by its content like any other, in a folder of its own, so
that a race that was stopped runs to where it was without reading a weight. Calibration text is
whole in every round: another calibration set is another quantized model. A survivor's later
rounds go on from quantized weights that were kept on the disk, or quantize it again, whatever
was priced lower; the losses are the same to the bit. Full precision is measured nowhere, because
a race does not need it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qaudit.checkpoints.places import own_cache
from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Calibration, Scheme
from qaudit.engine.tasks import Task
from qaudit.errors import SourceError, UsageError
from qaudit.executors.events import Failed, Measured
from qaudit.executors.in_process import Measuring
from qaudit.executors.ready import Ready, make_ready, one_error
from qaudit.judge.race import Course, Positions, race
from qaudit.judge.race import Watch as RoundWatch
from qaudit.planning.prepare import Prepared
from qaudit.planning.survey import survey
from qaudit.planning.traffic import default_budget
from qaudit.racing import kept
from qaudit.racing.kept import Keeping, Kept
from qaudit.racing.price import GoingOn, price_going_on
from qaudit.saved.results import Filed, ResultStore
from qaudit.types import Corpus, Plan, Race, RaceCost, Round, Subject, Watch

EVIDENCE = "race"
"""The folder of what a race measured, beside `evidence`: parts of a text are no audit."""

KEPT = "kept"


@dataclass(frozen=True)
class Rules:
    """What a race is run by."""

    margin: float
    share: float


@dataclass(frozen=True)
class Run:
    """How a race went, what it cost, and who could not be measured, with the reason."""

    race: Race
    cost: RaceCost
    failed: dict[str, SourceError]


def run_race(prepared: Prepared, rules: Rules, watch: Watch, told: RoundWatch) -> Run:
    """Race the subjects of a plan under its one scheme."""
    subjects = tuple(_without_twins(prepared.plan.subjects, watch))
    plan = replace(prepared.plan, subjects=subjects)
    _must_be_raced(plan)
    ready = make_ready(plan, prepared.options, prepared.hub)
    (scheme,) = parse_schemes(plan.specs)
    price = _price(ready, scheme, replace(prepared, plan=plan))
    watch.said("the plan is that of an exhaustive run, and a race takes a part of it")
    if scheme.calibration is not Calibration.NONE:
        watch.said(str(price))
    track = _Track(ready, scheme, prepared, watch, keep=price.keep)
    corpus = ready.corpus
    course = Course.of(
        [subject.label for subject in ready.subjects],
        scored_tokens(corpus),
        [document.split for document in corpus.documents],
        [document.sha256 for document in corpus.documents],
    )

    def after(found: Round) -> None:
        told(found)
        for departure in found.left:
            track.forget(departure.subject)

    found = race(
        course,
        track.measured,
        margin=rules.margin,
        share=rules.share,
        confidence=plan.recipe.confidence,
        watch=after,
    )
    kept.forget(prepared.out / KEPT)
    failed = {**ready.refused, **track.failed}
    if found.winner is None:
        raise one_error(failed)
    return Run(found, track.cost(), failed)


def _without_twins(subjects: Sequence[Subject], watch: Watch) -> Iterator[Subject]:
    """Yield subjects with weights of their own: no document tells two names for one apart."""
    seen: dict[str, str] = {}
    for subject in subjects:
        first = seen.setdefault(subject.content, subject.label)
        if first == subject.label:
            yield subject
        else:
            watch.said(f"{subject.label} holds the weights of {first} and does not race beside it")


def _must_be_raced(plan: Plan) -> None:
    if len(plan.subjects) < 2:
        raise UsageError(
            "a race needs two subjects or more", hint="name more checkpoints, or a soup"
        )
    if any(subject.is_search for subject in plan.subjects):
        raise UsageError(
            "a greedy soup is a search of its own, and measures every mean in full",
            hint="scan it, and race the soup that it finds, named by its members",
        )
    if plan.recipe.repeats > 1:
        raise UsageError(
            "a race has one draw of calibration text: another is another quantized model",
            hint="leave out `repeats`, or scan the winners with several draws",
        )


def _price(ready: Ready, scheme: Scheme, prepared: Prepared) -> GoingOn:
    plan, options = prepared.plan, prepared.options
    seen = survey(
        ready.subjects,
        prepared.hub,
        allow_pickle=options.allow_pickle,
        code=options.trust_remote_code,
    )
    place = prepared.out.absolute()
    place = next(folder for folder in (place, *place.parents) if folder.exists())
    return price_going_on(
        seen.largest,
        scheme,
        plan,
        calibration_tokens=_calibration_tokens(ready.corpus),
        room_nbytes=default_budget(shutil.disk_usage(place).free) - _yet_to_fetch(plan),
    )


def _yet_to_fetch(plan: Plan) -> int:
    return plan.traffic.nbytes_disk_peak if plan.traffic else 0


def _calibration_tokens(corpus: Corpus) -> int:
    return sum(len(window.tokens) for window in corpus.calibration)


def scored_tokens(corpus: Corpus) -> npt.NDArray[np.int64]:
    """Return how many tokens of each document are scored."""
    tokens = np.zeros(len(corpus.documents), dtype=np.int64)
    for window in corpus.evaluation:
        tokens[window.document] += window.scored
    return tokens


def part_of(corpus: Corpus, positions: Positions) -> Corpus:
    """Return some documents of a corpus, in the order given, with all of its calibration text."""
    place = {int(position): k for k, position in enumerate(positions)}
    windows = [
        replace(window, document=place[window.document])
        for window in corpus.evaluation
        if window.document in place
    ]
    return replace(
        corpus,
        evaluation=tuple(sorted(windows, key=lambda window: window.document)),
        documents=tuple(corpus.documents[int(position)] for position in positions),
        choices=(),
        choice_windows=(),
    )


class _Track:
    """Measures subjects on parts of the text, and remembers what that took."""

    def __init__(
        self, ready: Ready, scheme: Scheme, prepared: Prepared, watch: Watch, *, keep: bool
    ) -> None:
        self._ready, self._scheme, self._out = ready, scheme, prepared.out
        self._keep = keep
        self._subjects = {subject.label: subject for subject in ready.subjects}
        store = ResultStore(prepared.out / EVIDENCE, own_cache() / "evidence")
        self._measuring = Measuring(prepared, ready.machine, watch, store)
        self._filed: list[Filed] = []
        self._folders: dict[str, Path] = {}
        self.failed: dict[str, SourceError] = {}

    def folder(self, label: str) -> Path:
        """Return where a subject's quantized weights are kept, by all that they depend on."""
        if label not in self._folders:
            calibration = part_of(self._ready.corpus, np.zeros(0, dtype=np.int64))
            task = Task(self._subjects[label], calibration, (self._scheme,))
            key = task.identity(self._scheme, self._ready.machine).key
            self._folders[label] = self._out / KEPT / key[:32]
        return self._folders[label]

    def forget(self, label: str) -> None:
        """Remove what was kept of a subject that left."""
        if label in self._folders:
            kept.forget(self._folders[label])

    def measured(
        self, labels: Sequence[str], positions: Positions
    ) -> dict[str, npt.NDArray[np.float64]]:
        """Return the summed loss of subjects on documents; of those that can be measured."""
        part = part_of(self._ready.corpus, positions)
        tasks = [
            Task(self._subjects[label], part, (self._stand_in(label),), full=False)
            for label in labels
        ]
        events = {event.label: event for event in self._losses(tasks)}
        for task in tasks:
            for scheme in task.schemes:
                if isinstance(scheme, Keeping):
                    scheme.finish()
        results = [
            result for label in labels if label in events for result in events[label].results
        ]
        self._filed.extend(results)
        return {one.measurement.subject: one.measurement.evidence.nll_sum for one in results}

    def _losses(self, tasks: Sequence[Task]) -> Iterator[Measured]:
        """Measure; remember which subjects failed."""
        for event in self._measuring.run(tasks):
            if isinstance(event, Measured):
                yield event
            elif isinstance(event, Failed):
                self.failed[event.label] = event.error

    def _stand_in(self, label: str) -> Scheme:
        """Return the scheme, or what reads or writes what it makes of this subject."""
        if not self._keep:
            return self._scheme
        folder = self.folder(label)
        if kept.is_whole(folder):
            return Kept(inner=self._scheme, folder=folder)
        return Keeping(inner=self._scheme, folder=folder)

    def cost(self) -> RaceCost:
        """Return what the race took, and what measuring everyone on everything would."""
        measurements = [filed.measurement for filed in self._filed]
        calibrated = sum(kept.WENT_ON not in m.notes for m in measurements)
        needs = self._scheme.calibration is not Calibration.NONE
        tokens = _calibration_tokens(self._ready.corpus) if needs else 0
        return RaceCost(
            passes=len(measurements),
            quantized=calibrated,
            calibration_tokens=calibrated * tokens,
            exhaustive_calibration_tokens=len(self._subjects) * tokens,
            seconds=sum(m.seconds for m in measurements),
        )
