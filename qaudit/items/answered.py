"""Files of answers that other tools wrote: one task each, marked item by item.

    folder or file -> AnswerFile -> pairs of a base and its quantized files

Items are paired by a hash of the item and its prompt, in whatever order the tool ran them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qaudit.errors import UsageError
from qaudit.items.answer_files import (
    AnsweredItem,
    AnswerFile,
    AnswerMark,
    bad_file,
    read_inspect,
    read_inspect_archive,
    read_lm_eval,
)
from qaudit.judge.tasks import MEAN, same_items
from qaudit.saved.evidence import SavedAudit, read_saved
from qaudit.saved.parts import PLAN, one_writer
from qaudit.saved.results import write_imported
from qaudit.support.keys import first_of, nearest
from qaudit.types import FULL_PRECISION, ImportedAnswers, Measurement, TaskEvidence, digest
from qaudit.whole import read_regular

_READERS: dict[str, Callable[[Path, bytes], AnswerFile]] = {
    ".jsonl": read_lm_eval,
    ".json": read_inspect,
    ".eval": read_inspect_archive,
}


_PLAIN = re.compile(r"[\w .,/:+@()-]{1,120}", re.ASCII)


def import_into(
    out: Path,
    base: Sequence[Path],
    quantized: Mapping[str, Sequence[Path]],
    subject: str | None,
    metric: str | None,
) -> None:
    """Write answers as tasks of a subject of an audit; it is to be judged again."""
    saved = read_saved(out).checked()
    if not (out / PLAN).is_file():
        raise UsageError(
            f"`{out}` has no `{PLAN}`: it is a copy of an audit",
            hint="import into the output folder of the scan, then save or publish it again",
        )
    label = _subject_of(saved, subject)
    streams = {scheme: _stream_of(saved, label, scheme) for scheme in quantized}
    full = _stream_of(saved, label, FULL_PRECISION)
    of_base = read_answers(base)
    for row in saved.audit.tasks:
        if row.subject == label and row.task in of_base and not row.imported:
            raise UsageError(
                f"the scan measured `{row.task}` itself",
                hint=f"leave out `{of_base[row.task].path}`",
            )
    written: dict[tuple[str, str], tuple[Measurement, TaskEvidence, list[str]]] = {}
    for scheme, places in quantized.items():
        of_scheme = read_answers(places)
        for before, after in paired(of_base, of_scheme, metric):
            source = of_base[before.task].sha256
            earlier = written.setdefault((FULL_PRECISION, before.task), (full, before, [source]))
            if not same_items(earlier[1], before):
                raise UsageError(
                    f"the answers to `{before.task}` are marked by other metrics under {scheme}",
                    hint="name one that all files have: `--metric NAME`",
                )
            hashes = [source, of_scheme[after.task].sha256]
            written[scheme, after.task] = streams[scheme], after, hashes
    with one_writer(out):
        write_imported(out, label, [*written.values()])


def _subject_of(saved: SavedAudit, name: str | None) -> str:
    labels = [subject.label for subject in saved.audit.subjects]
    if name is None and len(labels) == 1:
        return labels[0]
    if name is None:
        raise UsageError(
            f"the audit has {len(labels)} subjects: {first_of(labels)}",
            hint=f"name the one that gave the answers: `--subject {labels[-1]}`",
        )
    if name not in labels:
        raise UsageError(f"the audit has no subject `{name}`", hint=nearest(name, labels))
    return name


def _stream_of(saved: SavedAudit, label: str, scheme: str) -> Measurement:
    measured = saved.table.find(label, scheme)
    if measured is None:
        schemes = [name for subject, name in saved.table.cells if subject == label]
        raise UsageError(
            f"the audit has no measurement of `{label}` under `{scheme}`",
            hint=nearest(scheme, [name for name in schemes if name != FULL_PRECISION]),
        )
    return measured


def read_answers(places: Iterable[Path]) -> dict[str, AnswerFile]:
    files: dict[str, AnswerFile] = {}
    for path in (path for place in places for path in _files_at(place)):
        try:
            content = read_regular(path)
        except OSError as error:
            raise bad_file(path, str(error)) from error
        read = _READERS[path.suffix](path, content)
        _must_be_plain(read)
        if earlier := files.get(read.task):
            raise UsageError(
                f"`{earlier.path}` and `{path}` both have answers of the task `{read.task}`",
                hint="name one of the two files",
            )
        files[read.task] = read
    return files


def _must_be_plain(file: AnswerFile) -> None:
    """Refuse names that no tool writes: reports print them."""
    for name in (file.tool, file.task, *file.metrics):
        if not _PLAIN.fullmatch(name) or name == MEAN:
            raise bad_file(file.path, f"it has the name {name!r:.60}")


def _files_at(place: Path) -> list[Path]:
    if not place.exists():
        raise UsageError(
            f"there is no `{place}`",
            hint="name a `samples_*.jsonl` of lm-eval (`--log_samples`) or a log of inspect",
        )
    if not place.is_dir():
        if place.suffix not in _READERS:
            raise bad_file(place, "it has none of the endings .jsonl, .json and .eval")
        return [place]
    samples = sorted(place.rglob("samples_*.jsonl"))
    logs = [*place.rglob("*.eval"), *place.rglob("*.json")]
    logs = sorted(path for path in logs if not path.name.startswith("results_"))
    if not samples and not logs:
        raise UsageError(
            f"`{place}` has no answers of single items",
            hint="run lm-eval with `--log_samples`, or name the folder of inspect's logs",
        )
    return samples or logs


def paired(
    base: Mapping[str, AnswerFile], quantized: Mapping[str, AnswerFile], metric: str | None
) -> list[tuple[TaskEvidence, TaskEvidence]]:
    """Return the tasks of both, items in the order of the base, or refuse what does not pair."""
    if set(base) != set(quantized):
        task = next(iter(set(base) ^ set(quantized)))
        side = "the quantized files" if task in base else "the base"
        raise UsageError(
            f"there are no answers to `{task}` among {side}",
            hint="import the same tasks of both, with names of files as lm-eval gave them",
        )
    names = {name for file in base.values() for name in file.metrics}
    if metric is not None and not any(_is_named(name, metric) for name in names):
        raise UsageError(f"no answers have marks `{metric}`", hint=nearest(metric, sorted(names)))
    return [_pair(file, quantized[task], metric) for task, file in base.items()]


def _pair(a: AnswerFile, b: AnswerFile, metric: str | None) -> tuple[TaskEvidence, TaskEvidence]:
    if a.tool != b.tool:
        raise UsageError(
            f"`{a.path}` is of {a.tool} and `{b.path}` of {b.tool}",
            hint="mark both with the same version: prompts and marks change between versions",
        )
    if a.greedy != b.greedy:
        greedy, sampled = (a, b) if a.greedy else (b, a)
        raise UsageError(
            f"the answers in `{greedy.path}` are greedy and those in `{sampled.path}` sampled",
            hint="generate both with temperature 0, or both with the same sampler",
        )
    if a.sampler != b.sampler:
        raise UsageError(
            f"`{a.path}` was generated with {a.sampler}, `{b.path}` with {b.sampler}",
            hint="generate both with the same settings",
        )
    name = _metric_of(a, b, metric)
    by_item = {answer.item: answer for answer in b.answers}
    missing = [answer for answer in a.answers if answer.item not in by_item]
    if missing or len(a.answers) != len(b.answers):
        raise UsageError(
            f"{len(missing)} of the {len(a.answers)} items of `{a.task}` in `{a.path}` are not "
            f"with the same prompt among the {len(b.answers)} in `{b.path}`",
            hint="use the same items, examples, chat template and limit for both",
        )
    return (
        _evidence(a, a.answers, name),
        _evidence(b, [by_item[answer.item] for answer in a.answers], name),
    )


def _is_named(name: str, metric: str) -> bool:
    """Return whether a metric is meant, by its name with or without the filter."""
    return metric in (name, name.partition(",")[0])


def _metric_of(a: AnswerFile, b: AnswerFile, metric: str | None) -> str:
    """Return the metric whose marks are read: the one that is named, `acc`, or the only one."""
    if not a.answers or not b.answers:
        raise bad_file(a.path if not a.answers else b.path, "it has no items")
    every = [name for name in a.metrics if name in b.metrics]
    named = [name for name in every if metric and _is_named(name, metric)]
    if not named and "acc,none" in every:  # what a scan of the same task measures
        return "acc,none"
    names = named or every
    if len(names) != 1:
        raise UsageError(
            f"the answers to `{a.task}` are marked by {first_of(names, 6) or 'nothing'}",
            hint=f"name one: `--metric {names[0]}`" if names else "score them, and import again",
        )
    return names[0]


def _evidence(file: AnswerFile, answers: Sequence[AnsweredItem], metric: str) -> TaskEvidence:
    count = len(answers)
    marks = [answer.marks.get(metric, AnswerMark(None, None)) for answer in answers]
    imported = ImportedAnswers(
        tool=file.tool,
        metric=metric,
        greedy=file.greedy,
        items_sha256=digest([answer.item for answer in answers]),
        picked_N=np.array([number_of(mark.answer) for mark in marks], dtype=np.int64),
    )
    return TaskEvidence(
        file.task,
        np.full(count, np.nan),
        np.arange(count),
        np.ones(count, dtype=np.bool_),
        np.array([_is_right(n, mark, metric, file) for n, mark in enumerate(marks, 1)], np.bool_),
        imported,
    )


def _is_right(number: int, mark: AnswerMark, metric: str, file: AnswerFile) -> bool:
    if isinstance(mark.value, bool | int | float) and mark.value in (0, 1):
        return bool(mark.value)
    raise UsageError(
        f"`{metric}` of item {number} of `{file.task}` in `{file.path}` is {mark.value!r:.60}, and "
        "a mark is 0 or 1",
        hint="choose marks that are right or wrong, with `--metric NAME`",
    )


def number_of(answer: Any) -> int:
    """Return a number for an answer, the same in every file; -1 where it is not known."""
    if answer is None:
        return -1
    return int.from_bytes(hashlib.sha256(repr(answer).encode()).digest()[:7])
