"""A race over real weights: each round measures the survivors on the documents that are new.

Every measurement of a round is filed by its content like any other, in a folder of its own, so
that a race that was stopped runs to where it was without reading a weight. Calibration text is
whole in every round: another calibration set is another quantized model. In later rounds a
survivor reuses stored quantized weights or quantizes again, whichever is priced lower; the
losses are the same to the bit. A race does not need full precision and does not measure it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Calibration, Scheme
from qaudit.engine.stored_weights import REUSED, Restoring, Storing, is_whole
from qaudit.engine.stored_weights import remove as remove_weights
from qaudit.engine.tasks import Task
from qaudit.errors import SourceError, UsageError
from qaudit.executors.events import Failed, Measured, one_error
from qaudit.executors.measuring import Measuring
from qaudit.executors.ready import Ready, make_ready
from qaudit.judge.race import Positions, RaceCourse, RoundWatch, race
from qaudit.planning.prepare import Prepared
from qaudit.planning.survey import survey
from qaudit.planning.traffic import default_budget
from qaudit.racing.stored_weights import RoundPrice, price_round
from qaudit.saved.results import Filed, ResultStore
from qaudit.types import Corpus, Plan, Race, RaceCost, Round, Subject, Watch

EVIDENCE = "race"
"""The folder of a race's measurements, beside `evidence`: parts of a text are no audit."""

STORED = "kept"


@dataclass(frozen=True)
class RaceRun:
    """A race, its cost, and the subjects that could not be measured, with the reason."""

    race: Race
    cost: RaceCost
    failed: dict[str, SourceError]


def run_race(prepared: Prepared, watch: Watch, report_round: RoundWatch, **rules: float) -> RaceRun:
    """Race the subjects of a plan under its one scheme, by the margin and the share of a race."""
    subjects = tuple(_without_twins(prepared.plan.subjects, watch))
    recipe = prepared.plan.recipe
    # A race explores: without a number, no further draw is read for it.
    recipe = replace(recipe, repeats=recipe.repeats or 1)
    plan = replace(prepared.plan, subjects=subjects, recipe=recipe)
    _must_be_raced(plan)
    ready = make_ready(plan, prepared.options, prepared.hub)
    (scheme,) = parse_schemes(plan.specs)
    price = _price(ready, scheme, replace(prepared, plan=plan))
    watch.note("the plan is that of an exhaustive run, and a race takes a part of it")
    if scheme.calibration is not Calibration.NONE:
        watch.note(str(price))
    track = _Track(ready, scheme, prepared, watch, store=price.store)
    corpus = ready.corpus
    course = RaceCourse.of(
        [subject.label for subject in ready.subjects],
        scored_tokens(corpus),
        [document.split for document in corpus.documents],
        [document.sha256 for document in corpus.documents],
    )

    def after(ended: Round) -> None:
        report_round(ended)
        for departure in ended.left:
            track.remove_stored(departure.subject)

    confidence = plan.recipe.confidence
    result = race(course, track.losses, confidence=confidence, watch=after, **rules)
    remove_weights(prepared.out / STORED)
    failed = {**ready.refused, **track.failed}
    if result.winner is None:
        raise one_error(failed)
    return RaceRun(result, track.cost(), failed)


def _without_twins(subjects: Sequence[Subject], watch: Watch) -> Iterator[Subject]:
    """Yield subjects that differ: two names of one model would never."""
    seen: dict[tuple[str, str | None], str] = {}
    for subject in subjects:
        first = seen.setdefault(
            (subject.content, subject.first.configuration_sha256), subject.label
        )
        if first == subject.label:
            yield subject
        else:
            watch.note(f"{subject.label} holds the weights of {first} and does not race beside it")


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
    if plan.recipe.repeats != 1:
        raise UsageError(
            "a race has one draw of calibration text: another is another quantized model",
            hint="leave out `repeats`, or scan the winners with several draws",
        )


def _price(ready: Ready, scheme: Scheme, prepared: Prepared) -> RoundPrice:
    plan, options = prepared.plan, prepared.options
    sizes = survey(
        ready.subjects,
        prepared.hub,
        allow_pickle=options.allow_pickle,
        code=options.trust_remote_code,
    ).largest
    out = prepared.out.absolute()
    disk = next(folder for folder in (out, *out.parents) if folder.exists())
    yet_to_fetch = plan.traffic.nbytes_disk_peak if plan.traffic else 0
    return price_round(
        sizes,
        scheme,
        plan,
        calibration_tokens=_calibration_tokens(ready.corpus),
        room_nbytes=default_budget(shutil.disk_usage(disk).free) - yet_to_fetch,
    )


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
        items=(),
        item_windows=(),
        rollouts=None,
    )


class _Track:
    """Measures subjects on parts of the text, and counts what that took."""

    def __init__(
        self, ready: Ready, scheme: Scheme, prepared: Prepared, watch: Watch, *, store: bool
    ) -> None:
        self._ready, self._scheme, self._out = ready, scheme, prepared.out
        self._store = store
        self._subjects = {subject.label: subject for subject in ready.subjects}
        results = ResultStore(prepared.out / EVIDENCE)
        self._measuring = Measuring(
            prepared.plan, prepared.out, prepared.hub, ready.machine, watch, results
        )
        self._filed: list[Filed] = []
        self._folders: dict[str, Path] = {}
        self.failed: dict[str, SourceError] = {}

    def _folder(self, label: str) -> Path:
        if label not in self._folders:
            calibration = part_of(self._ready.corpus, np.zeros(0, dtype=np.int64))
            task = Task.unplanned(self._subjects[label], calibration, (self._scheme,))
            task = replace(task, compared=False)
            key = task.identity(self._scheme, self._ready.machine).key
            self._folders[label] = self._out / STORED / key[:32]
        return self._folders[label]

    def remove_stored(self, label: str) -> None:
        if label in self._folders:
            remove_weights(self._folders[label])

    def losses(
        self, labels: Sequence[str], positions: Positions
    ) -> dict[str, npt.NDArray[np.float64]]:
        part = part_of(self._ready.corpus, positions)
        tasks = [
            replace(
                Task.unplanned(
                    self._subjects[label], part, (self._stand_in(label),), full_precision=False
                ),
                compared=False,
            )
            for label in labels
        ]
        measured: dict[str, Measured] = {}
        for event in self._measuring.visit(tasks):
            if isinstance(event, Measured):
                measured[event.label] = event
            elif isinstance(event, Failed):
                self.failed[event.label] = event.error
        for scheme in (scheme for task in tasks for scheme in task.schemes):
            if isinstance(scheme, Storing):
                scheme.finish()
        results = [
            result for label in labels if label in measured for result in measured[label].results
        ]
        self._filed.extend(results)
        return {
            result.measurement.subject: result.measurement.evidence.nll_sum for result in results
        }

    def _stand_in(self, label: str) -> Scheme:
        """Return the scheme, or one that stores or reads what it makes of this subject."""
        if not self._store:
            return self._scheme
        folder = self._folder(label)
        if is_whole(folder):
            return Restoring(inner=self._scheme, folder=folder)
        return Storing(inner=self._scheme, folder=folder)

    def cost(self) -> RaceCost:
        """Return the cost of the race, and that of all subjects on all documents."""
        measurements = [filed.measurement for filed in self._filed]
        calibrated = sum(REUSED not in m.notes for m in measurements)
        needs_text = self._scheme.calibration is not Calibration.NONE
        tokens = _calibration_tokens(self._ready.corpus) if needs_text else 0
        return RaceCost(
            passes=len(measurements),
            quantized=calibrated,
            calibration_tokens=calibrated * tokens,
            exhaustive_calibration_tokens=len(self._subjects) * tokens,
            seconds=sum(m.seconds for m in measurements),
        )
