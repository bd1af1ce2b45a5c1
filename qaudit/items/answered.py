"""Files of answers that lm-eval and inspect wrote: one task each, marked item by item.

    folder or file -> AnswerFile -> pairs of a base and its quantized files

Items are paired by a hash of the item and its prompt, in whatever order the tool ran them.

Logs of inspect: `.json`, and `.eval`, a ZIP archive of the same parts. Answers are what a model
generated; a sample's prompt is every message before its first generated one. Members of an archive
are compressed with Zstandard since 2026, which Python reads from 3.14, and before with the package
`zstandard`.

`samples_TASK_DATE.jsonl` of lm-eval (`--log_samples`), and `results_DATE.json` beside it: a line is
an item under one filter. Its prompt is in `arguments`, for each option where options are scored;
the last part of `arguments` of text that is generated has the settings of the sampler. lm-eval
writes NaN and infinities as Python does: they are read, and refused where they decide.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qaudit.errors import UsageError
from qaudit.judge.tasks import MEAN, same_items
from qaudit.saved.evidence import read_saved
from qaudit.saved.parts import PLAN, one_writer
from qaudit.saved.results import write_imported
from qaudit.support.foreign import json_of
from qaudit.support.keys import first_of, install, nearest
from qaudit.types import FULL_PRECISION, ImportedAnswers, Measurement, TaskEvidence, digest
from qaudit.whole import read_regular

Marks = Mapping[str, tuple[Any, str | int | None]]
"""What each metric, as the tool names it, gave an item, and which answer it read; None: unknown.

A mark is 0 or 1, unless the metric is none."""


@dataclass(frozen=True)
class AnswerFile:
    """The answers to the items of one task."""

    path: Path
    sha256: str
    tool: str  # with its version
    task: str
    greedy: bool
    sampler: str  # its settings, to be equal on both sides
    answers: Mapping[str, Marks]  # by a hash of the item and its prompt

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(next(iter(self.answers.values()), {}))


def numbered(answers: Iterable[tuple[str, Marks]]) -> dict[str, Marks]:
    """Return answers by item: the second time that an item comes it is another one."""
    times: Counter[str] = Counter()
    by_item = {}
    for item, marks in answers:
        times[item] += 1
        by_item[f"{item}-{times[item]}"] = marks
    return by_item


_FORMS = "a `samples_*.jsonl` of lm-eval (`--log_samples`) or a log of inspect"


def bad_file(path: Path, reason: str) -> UsageError:
    return UsageError(f"`{path}` cannot be imported: {reason}", hint=f"name {_FORMS}")


Answers = tuple[str, str, bool, str, dict[str, Marks]]
"""Those of a file: the tool, the task, whether they are greedy, the sampler, marks by item."""

_MOST_NBYTES, _MOST_NBYTES_OF_PART = 2**31, 2**24
"""Of an archive, unpacked, and of one part, which takes 25 times as much when it is parsed."""
_ZSTANDARD = 93
_VALUES = {"C": 1, "I": 0, "N": 0, True: 1, False: 0}
"""What inspect writes for correct, incorrect and no answer."""
_SAMPLER = ("temperature", "top_p", "top_k", "max_tokens")


def read_inspect(path: Path, content: bytes) -> Answers:
    with ExitStack() as stack:
        if path.suffix == ".eval":
            archive = stack.enter_context(zipfile.ZipFile(io.BytesIO(content)))
            parts = archive.infolist()
            if sum(part.file_size for part in parts) > _MOST_NBYTES:
                raise ValueError("it unpacks to more than 2 GiB")
            log = json_of(_member(archive, content, archive.getinfo("header.json")))
            of_samples = (part for part in parts if part.filename.startswith("samples/"))
            log["samples"] = (json_of(_member(archive, content, part)) for part in of_samples)
        else:
            log = json_of(content.decode())
        about = log["eval"]
        if log["status"] != "success":
            raise ValueError(f"its status is {log['status']}")
        epochs = about["config"].get("epochs") or 1
        if epochs != 1:
            raise ValueError(f"it has {epochs} epochs, and items are paired one to one")
        sampler = {**about.get("model_generate_config", {}), **log["plan"]["config"]}
        sampler = {k: sampler[k] for k in _SAMPLER if sampler.get(k) is not None}
        return (
            f"inspect {about['packages']['inspect_ai']}",
            str(about["task"]),
            sampler.get("temperature") == 0,
            json.dumps(sampler, sort_keys=True),
            numbered(map(_inspect_answer, log["samples"])),
        )


def _member(archive: zipfile.ZipFile, content: bytes, part: zipfile.ZipInfo) -> str:
    if part.file_size > _MOST_NBYTES_OF_PART:
        raise ValueError(f"its part {part.filename!r:.60} unpacks to more than 16 MiB")
    if part.compress_type != _ZSTANDARD or hasattr(zipfile, "ZIP_ZSTANDARD"):
        return archive.read(part).decode()
    try:
        import zstandard
    except ImportError as error:
        raise ValueError(
            f"it is compressed with Zstandard: {install('zstandard')}, or write it as JSON with "
            "`inspect log convert --to json`"
        ) from error
    names = struct.unpack_from("<HH", content, part.header_offset + 26)
    start = part.header_offset + 30 + sum(names)
    packed = content[start : start + part.compress_size]
    with zstandard.ZstdDecompressor().stream_reader(packed) as reader:
        return bytes(reader.read(part.file_size)).decode()


def _inspect_answer(sample: Mapping[str, Any]) -> tuple[str, Marks]:
    if sample.get("error"):
        raise ValueError(f"the sample {sample['id']!r:.60} ended in an error")
    prompt = []
    for message in sample["messages"]:
        if message["role"] == "assistant" and message.get("source") == "generate":
            break
        text = message["content"]
        if isinstance(text, str) and text.startswith("attachment://"):
            text = sample["attachments"][text.removeprefix("attachment://")]
        prompt.append([message["role"], text])
    item = digest([sample["input"], sample.get("choices"), sample["target"], prompt])
    marks: dict[str, tuple[Any, str | None]] = {}
    for scorer, score in sample["scores"].items():  # one may give several values, each by its name
        value, answer = score["value"], score.get("answer")
        for name, mark in (value if isinstance(value, dict) else {"": value}).items():
            number = _VALUES.get(mark, mark) if isinstance(mark, str | bool) else mark
            key = f"{scorer},{name}" if name else scorer
            marks[key] = number, None if answer is None else str(answer)
    return item, marks


_NAME = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
_MOST_RESULTS_NBYTES = 2**26


def read_lm_eval(path: Path, content: bytes) -> Answers:
    lines: dict[str, list[tuple[str, Marks]]] = {}
    samplers: set[str] = set()
    greedy: set[bool] = set()
    texts = (text for text in content.decode().split("\n") if text.strip())
    for number, line in enumerate((json_of(text, of_python=True) for text in texts), 1):
        # Of each request a context, and an option or a sampler's settings.
        arguments = [list(request.values()) for request in line["arguments"].values()]
        settings = [last for *_, last in arguments if isinstance(last, dict)]
        values = [value for setting in settings for value in setting.values()]
        losses = [r[0] for r in line["filtered_resps"] if isinstance(r, list) and len(r) == 2]
        field = ""
        if not all(math.isfinite(value) for value in values if isinstance(value, float)):
            field = "arguments"
        # An option may have a probability of 0, but NaN does not say which is likeliest.
        elif "acc" in line["metrics"] and any(str(loss).lower() == "nan" for loss in losses):
            field = "filtered_resps"
        if field:
            raise bad_file(path, f"`{field}` of item {number} has no finite number")
        samplers.add(json.dumps(settings[:1], sort_keys=True))
        greedy.update(map(is_greedy, settings))
        prompts = [[part for part in p if not isinstance(part, dict)] for p in arguments]
        marks = {
            f"{metric},{line['filter']}": (line[metric], _picked(line, metric, losses))
            for metric in line["metrics"]
        }
        item = digest([line["doc"], prompts])
        lines.setdefault(str(line["filter"]), []).append((item, marks))
    if not lines or len(samplers) > 1 or len(greedy) > 1:
        raise bad_file(path, "it has no items" if not lines else "its items differ in the sampler")
    first, *further = (numbered(answers) for answers in lines.values())
    for answers in further:
        if answers.keys() != first.keys():
            raise bad_file(path, "its filters have other items than each other")
        first = {item: {**marks, **answers[item]} for item, marks in first.items()}
    name = _NAME.fullmatch(path.name)
    return (
        f"lm-eval {_version(path, name['date'] if name else '')}",
        name["task"] if name else path.stem.removeprefix("samples_"),
        greedy != {False},
        samplers.pop(),
        first,
    )


def is_greedy(settings: dict[str, Any]) -> bool:
    """Return whether generation takes the likeliest token, as lm-eval's model classes do."""
    temperature = settings.get("temperature")
    if temperature is None:
        return not settings.get("do_sample")
    return temperature == 0 or settings.get("do_sample") is False


def _picked(line: dict[str, Any], metric: str, losses: Sequence[Any]) -> str | int | None:
    """Return the option that a metric takes for the answer, or the text behind the filter."""
    responses = line["filtered_resps"]
    if not losses or len(losses) != len(responses):
        return json.dumps(responses)
    if metric != "acc":
        return None  # it divides by lengths, which are not in the file
    if len(losses) == 1:  # one continuation: whether it is the likeliest
        return str(responses[0][1])
    values = [float(value) for value in losses]
    return values.index(max(values))


def _version(path: Path, date: str) -> str:
    """Return the version that is in the results beside the samples, which do not have it."""
    beside = path.with_name(f"results_{date}.json")
    if not date or not beside.is_file():
        return "of an unknown version"
    try:
        text = read_regular(beside, _MOST_RESULTS_NBYTES).decode()
        return str(json_of(text, of_python=True)["lm_eval_version"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise bad_file(beside, f"it has no version of lm-eval: {error}") from error


_LOG = "log of inspect with samples"
_READERS: dict[str, tuple[Callable[[Path, bytes], Answers], str]] = {
    ".jsonl": (read_lm_eval, "file of samples"),
    ".json": (read_inspect, _LOG),
    ".eval": (read_inspect, _LOG),
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
    labels = [s.label for s in saved.audit.subjects]
    if subject is None and len(labels) > 1:
        raise UsageError(
            f"the audit has {len(labels)} subjects: {first_of(labels)}",
            hint=f"name the one that gave the answers: `--subject {labels[-1]}`",
        )
    label = labels[0] if subject is None else subject
    if label not in labels:
        raise UsageError(f"the audit has no subject `{label}`", hint=nearest(label, labels))
    streams: dict[str, Measurement] = {}
    for scheme in (*quantized, FULL_PRECISION):
        measured = saved.table.find(label, scheme)
        if measured is None:
            schemes = [name for of, name in saved.table.cells if of == label]
            raise UsageError(
                f"the audit has no measurement of `{label}` under `{scheme}`",
                hint=nearest(scheme, [name for name in schemes if name != FULL_PRECISION]),
            )
        streams[scheme] = measured
    of_base = read_answers(base)
    for row in saved.audit.tasks:
        if row.subject == label and row.task in of_base and not row.imported:
            raise UsageError(
                f"the scan measured `{row.task}` itself",
                hint=f"leave out `{of_base[row.task].path}`",
            )
    written: dict[tuple[str, str], tuple[Measurement, TaskEvidence, list[str]]] = {}
    full = streams[FULL_PRECISION]
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


def read_answers(places: Iterable[Path]) -> dict[str, AnswerFile]:
    files: dict[str, AnswerFile] = {}
    for path in (path for place in places for path in _files_at(place)):
        read, kind = _READERS[path.suffix]
        try:
            content = read_regular(path)
        except OSError as error:
            raise bad_file(path, str(error)) from error
        try:
            file = AnswerFile(path, hashlib.sha256(content).hexdigest(), *read(path, content))
        except (
            ValueError, TypeError, LookupError, AttributeError, zipfile.BadZipFile, EOFError,
            NotImplementedError, struct.error,
        ) as error:  # fmt: skip
            lacks = isinstance(error, LookupError) and path.suffix == ".jsonl"
            reason = f"a line has no {error}" if lacks else error
            raise bad_file(path, f"it is no {kind}: {reason}") from error
        for name in (file.tool, file.task, *file.metrics):  # reports print them
            if not _PLAIN.fullmatch(name) or name == MEAN:
                raise bad_file(path, f"it has the name {name!r:.60}")
        if earlier := files.get(file.task):
            raise UsageError(
                f"`{earlier.path}` and `{path}` both have answers of the task `{file.task}`",
                hint="name one of the two files",
            )
        files[file.task] = file
    return files


def _files_at(place: Path) -> list[Path]:
    if not place.exists():
        raise UsageError(f"there is no `{place}`", hint=f"name {_FORMS}")
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


def _is_named(name: str, metric: str) -> bool:
    """Return whether a metric is meant, by its name with or without the filter."""
    return metric in (name, name.partition(",")[0])


def _pair(a: AnswerFile, b: AnswerFile, metric: str | None) -> tuple[TaskEvidence, TaskEvidence]:
    greedy, sampled = (a, b) if a.greedy else (b, a)
    message = ""
    if a.tool != b.tool:
        message = f"`{a.path}` is of {a.tool} and `{b.path}` of {b.tool}"
        hint = "mark both with the same version: prompts and marks change between versions"
    elif a.greedy != b.greedy:
        message = f"the answers in `{greedy.path}` are greedy and those in `{sampled.path}` sampled"
        hint = "generate both with temperature 0, or both with the same sampler"
    elif a.sampler != b.sampler:
        message = f"`{a.path}` was generated with {a.sampler}, `{b.path}` with {b.sampler}"
        hint = "generate both with the same settings"
    if message:
        raise UsageError(message, hint=hint)
    if not a.answers or not b.answers:
        raise bad_file(a.path if not a.answers else b.path, "it has no items")
    # The metric whose marks are read: the one that is named, `acc`, or the only one.
    every = [name for name in a.metrics if name in b.metrics]
    names = [name for name in every if metric and _is_named(name, metric)]
    if not names:  # `acc` is what a scan of the same task measures
        names = ["acc,none"] if "acc,none" in every else every
    if len(names) != 1:
        raise UsageError(
            f"the answers to `{a.task}` are marked by {first_of(names, 6) or 'nothing'}",
            hint=f"name one: `--metric {names[0]}`" if names else "score them, and import again",
        )
    missing = a.answers.keys() - b.answers.keys()
    if missing or len(a.answers) != len(b.answers):
        raise UsageError(
            f"{len(missing)} of the {len(a.answers)} items of `{a.task}` in `{a.path}` are not "
            f"with the same prompt among the {len(b.answers)} in `{b.path}`",
            hint="use the same items, examples, chat template and limit for both",
        )
    items = list(a.answers)
    return _evidence(a, items, names[0]), _evidence(b, items, names[0])


def _evidence(file: AnswerFile, items: Sequence[str], metric: str) -> TaskEvidence:
    marks = [file.answers[item].get(metric, (None, None)) for item in items]
    for number, (mark, _) in enumerate(marks, 1):
        if not isinstance(mark, bool | int | float) or mark not in (0, 1):
            raise UsageError(
                f"`{metric}` of item {number} of `{file.task}` in `{file.path}` is {mark!r:.60}, "
                "and a mark is 0 or 1",
                hint="choose marks that are right or wrong, with `--metric NAME`",
            )
    answers = [answer if answer is None else repr(answer).encode() for _, answer in marks]
    picked = [-1 if a is None else int.from_bytes(hashlib.sha256(a).digest()[:7]) for a in answers]
    return TaskEvidence(
        file.task,
        np.full(len(items), np.nan),
        np.arange(len(items)),
        np.ones(len(items), dtype=np.bool_),
        np.array([bool(mark) for mark, _ in marks], np.bool_),
        ImportedAnswers(
            tool=file.tool,
            metric=metric,
            greedy=file.greedy,
            items_sha256=digest(list(items)),
            # A number for an answer is the same in every file; -1 where it is not known.
            picked_N=np.array(picked, dtype=np.int64),
        ),
    )
