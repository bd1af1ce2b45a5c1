"""Run a plan that a test made, as `qaudit scan` would run it."""

from dataclasses import replace
from types import SimpleNamespace

from qaudit.audit import complete
from qaudit.core.registry import parse_schemes
from qaudit.downloads.downloads import missing_nbytes
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Task, look_up
from qaudit.executors.measuring import Measuring
from qaudit.executors.part import whole_plan
from qaudit.judging import moved_by_rounding, tables_of
from qaudit.planning.prepare import Prepared
from qaudit.planning.price import Pricing, calibrated, passes_of
from qaudit.planning.sizes import Sizes, TextSize
from qaudit.saved.audits import checkpoints_of
from qaudit.saved.results import ResultStore, UnitOutcome
from qaudit.settings import Recipe, RunOptions
from qaudit.types import SILENT, Pass, Plan, Price, Resolved, Traffic

PRICING = Pricing(Sizes(1000, 2, 400, 200, 8, 16, 30), TextSize(100, 100, 32), Price())


def prepared(plan, out, *, hub=None, disk_budget_nbytes=None, **options):
    schemes = parse_schemes(plan.specs) if plan.specs else ()
    stands_for = passes_of(plan.subjects, schemes, plan.recipe.repeats, PRICING)
    plan = replace(plan, passes=plan.passes or stands_for)
    if disk_budget_nbytes is not None:
        budget = disk_budget_nbytes + missing_nbytes(plan.texts)
        plan = replace(plan, traffic=Traffic(0, 0, 0, 0, budget))
    checkpoints = checkpoints_of(plan.subjects)
    resolved = Resolved(plan.recipe, checkpoints, plan.subjects)
    return Prepared(plan, RunOptions(**options), out, hub, plan.recipe, resolved)


def run(plan, out, watch=SILENT, **options):
    """Run and judge a plan."""
    return complete(whole_plan(prepared(plan, out, **options), watch)).record


def tasks_of(subjects, corpus, schemes):
    """Return the passes of each subject, with as many draws as the corpus has.

    What calibrates is rounded otherwise, too, of the last subject.
    """
    passes = passes_of(subjects, schemes, len(corpus.draws), PRICING)
    tasks = [[Task.of(one, corpus) for one in passes if one.subject == s] for s in subjects]
    if drawn := tuple(scheme.spec for scheme in calibrated(schemes)):
        tasks[-1].append(Task.of(Pass(subjects[-1], drawn, perturbed=True), corpus))
    return tasks


def measure_each(tasks, machine, store):
    """Return the results of all passes of a subject, perturbed ones left out."""
    results = [(task, measure(task, machine, store)) for task in tasks]
    return [one for task, some in results if not task.perturbed for one in some]


def is_stored(tasks, machine, store):
    return all(look_up(task, machine, store).is_complete for task in tasks)


def floor_of(tasks, machine, store):
    """Return how far rounding moved each measurement, from the results on disk."""
    events = []
    for some in tasks:
        results = [(task, look_up(task, machine, store).results) for task in some]
        filed = [replace(one, perturbed=task.perturbed) for task, found in results for one in found]
        events.append(UnitOutcome(some[0].subject.label, tuple(filed)))
    return moved_by_rounding(events)


def measure_tasks(tasks, machine, folder, diagnostics=()):
    """Measure and diagnose subjects that are on disk; return what came of tasks, in their order."""
    subjects = tuple(task.subject for task in tasks)
    named = tuple(one.spec for one in diagnostics)
    recipe = Recipe(targets=(), schemes=(), diagnostics=named)
    passes = tuple(Pass(task.subject, tuple(s.spec for s in task.schemes)) for task in tasks)
    plan = replace(EMPTY, recipe=recipe, subjects=subjects, passes=passes)
    results = ResultStore(folder / "evidence")
    measuring = Measuring(plan, folder, None, machine, SILENT, results)
    labels = {subject.label for subject in subjects}
    events = {event.label: event for event in measuring.visit(tasks, diagnosed=labels)}
    done = [e for s in subjects if (e := events[s.label]).error is None]
    rows, measured = measuring.diagnoses.rows, [event.label for event in done]
    return SimpleNamespace(
        filed=tuple(one for event in done for one in event.results),
        failed={s.label: e.error for s in subjects if (e := events[s.label]).error is not None},
        diagnostics=tables_of(diagnostics, rows, measured, subjects),
    )


EMPTY = Plan(Recipe((), ()), (), (), "cpu", "float32", 32, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)
