"""What lm-eval knows: which tasks there are, what data they need, and their prompts.

Few-shot examples are drawn in the order of the documents from one generator, so that every document
of a task is built even where few are used: those that are left have the prompts of the full run.
The right options of an item are found as lm-eval's `process_results` finds them; a test holds every
mark to it.

The twelve tasks of paper A, their sizes, and presets are known without lm-eval. Sizes of splits are
exact. Characters are means over documents, so that a price is good to about 15 %; once the prompts
are built, a plan counts them instead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from qaudit.errors import MachineError, SourceError, UsageError
from qaudit.sandbox import Templates
from qaudit.support.keys import install, nearest

DEFAULT_SHOTS = 5
DEFAULT_ITEMS = 500
ALL_ITEMS = "all"


@dataclass(frozen=True)
class KnownTask:
    """The size of a task: items, options, and characters of what a prompt is made of."""

    folder: str  # below lm-eval's tasks
    items: int
    options: int
    shown_characters: int  # of an example, with its answer
    question_characters: int
    option_characters: int
    characters_per_token: float
    single_token: bool = False  # every option is one token

    def tokens(self, shots: int = DEFAULT_SHOTS, *, trees: bool = True) -> int:
        """Return how many tokens go through a model for one item, its context once in trees."""
        context = (shots * self.shown_characters + self.question_characters) / (
            self.characters_per_token
        )
        option = 1.0 if self.single_token else self.option_characters / self.characters_per_token
        contexts = 1 if trees or self.single_token else self.options
        return math.ceil(contexts * context + self.options * (option - 1))


KNOWN: dict[str, KnownTask] = {
    "arc_challenge": KnownTask("arc", 1172, 4, 190, 165, 30, 4.4),
    "arc_easy": KnownTask("arc", 2376, 4, 158, 135, 22, 4.4),
    "openbookqa": KnownTask("openbookqa", 500, 4, 73, 52, 20, 4.5),
    "piqa": KnownTask("piqa", 1838, 2, 155, 55, 99, 4.4),
    "hellaswag": KnownTask("hellaswag", 10042, 4, 336, 250, 85, 4.4),
    "winogrande": KnownTask("winogrande", 1267, 2, 102, 55, 45, 4.4),
    "mathqa": KnownTask("mathqa", 2985, 5, 181, 173, 5, 3.3),
    "pubmedqa": KnownTask("pubmedqa", 500, 3, 1475, 1470, 4, 4.4, True),
    "sciq": KnownTask("sciq", 1000, 4, 620, 605, 12, 4.4),
    "social_iqa": KnownTask("siqa", 1954, 3, 156, 131, 24, 4.5),
    "commonsense_qa": KnownTask("commonsense_qa", 1221, 5, 163, 160, 2, 3.9, True),
    "mmlu": KnownTask("mmlu/default", 14042, 4, 485, 480, 2, 3.9, True),
}

PRESETS: dict[str, tuple[str, ...]] = {"paper-a": tuple(KNOWN)}
"""Lists of tasks under one name."""

_UNKNOWN = KnownTask("", DEFAULT_ITEMS, 4, 440, 300, 40, 4.4)
"""A task whose size is not in the table: a few short examples."""


def named(requested: Sequence[str]) -> tuple[str, ...]:
    """Return the requested tasks with presets written out, no task twice."""
    names = (name for request in requested for name in PRESETS.get(request, (request,)))
    return tuple(dict.fromkeys(names))


def descriptions() -> dict[str, str]:
    lines = {}
    for name, tasks in PRESETS.items():
        items = sum(items_of(tasks, DEFAULT_ITEMS).values())
        some, every = (sum(bound(tasks, n, None).values()) for n in (DEFAULT_ITEMS, None))
        lines[name] = (
            f"{len(tasks)} tasks, {items:,} items, about {some / 1e6:.1f} M tokens; "
            f"of all items {every / 1e6:.0f} M"
        )
    for name, task in KNOWN.items():
        tokens = task.tokens() * min(task.items, DEFAULT_ITEMS)
        lines[name] = (
            f"{task.items:,} items of {task.options} options, about {task.tokens():,} tokens each; "
            f"{tokens / 1e6:.2f} M of {min(task.items, DEFAULT_ITEMS)} items"
        )
    return lines


def items_of(names: Iterable[str], most: int | None) -> dict[str, int]:
    """Return about how many items of each task are measured."""
    every = {name: KNOWN.get(name, _UNKNOWN).items for name in names}
    return {name: count if most is None else min(count, most) for name, count in every.items()}


def bound(
    names: Iterable[str], most: int | None, shots: int | None, *, trees: bool = True
) -> dict[str, int]:
    """Return about how many tokens the items of each task take."""
    examples = DEFAULT_SHOTS if shots is None else shots
    return {
        name: count * KNOWN.get(name, _UNKNOWN).tokens(examples, trees=trees)
        for name, count in items_of(names, most).items()
    }


def most_items(setting: str) -> int | None:
    return None if setting == ALL_ITEMS else int(setting)


_SCORED = ("multiple_choice", "loglikelihood")
_INSTEAD = (
    "score options instead: mmlu, arc_challenge, hellaswag; or run lm-eval on the exported model"
)

FEWSHOT_SEED = 1234
"""lm-eval's own: the same examples in every run, here and there."""


@dataclass(frozen=True)
class Leaf:
    """A task as lm-eval has it: one file of options, with what replaces them."""

    name: str
    config: Mapping[str, Any] = field(compare=False)  # functions unresolved
    replaced: tuple[tuple[str, Any], ...] = ()
    file: Path | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        config = self.config
        shown = config.get("fewshot_config") or {}
        shown = shown.get("split") if isinstance(shown, dict) else None
        evaluated = config.get("test_split") or config.get("validation_split")
        examples = (
            shown
            or config.get("fewshot_split")
            or config.get("training_split")
            or config.get("validation_split")
            or evaluated
        )
        return tuple(dict.fromkeys(split for split in (evaluated, examples) if split))

    def shots(self, requested: int | None) -> int:
        shots = self.config.get("num_fewshot")
        if shots == 0:  # lm-eval never overrides a zero of a task
            return 0
        return requested if requested is not None else shots or DEFAULT_SHOTS


@dataclass(frozen=True)
class Definition:
    """A task as it is reported: one task of lm-eval, or a group that is weighted by size."""

    name: str
    leaves: tuple[Leaf, ...]


Prompt = tuple[tuple[tuple[str, str], ...], tuple[int, ...]]
"""A context and what follows it for each option of an item, and which are right."""


def definitions(requested: Sequence[str]) -> tuple[Definition, ...]:
    """Return the requested tasks; names may be tasks, groups or tags of lm-eval."""
    by_name: dict[str, Definition] = {}
    for name in requested:
        for definition in _in_library(name):
            by_name.setdefault(definition.name, definition)
    for leaf in (leaf for definition in by_name.values() for leaf in definition.leaves):
        if refusal := _not_scored(leaf.config):
            reason, hint = refusal
            raise UsageError(f"`{leaf.name}` {reason}", hint=hint)
    return tuple(by_name.values())


def _not_scored(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why no log-likelihoods of options mark a task, and what to do instead."""
    kind = config.get("output_type", "generate_until")
    metrics = [str(metric.get("metric")) for metric in config.get("metric_list") or []]
    if "use_prompt" in config:
        return "takes its prompt from promptsource", "write it as `doc_to_text`"
    if "class" in config:
        return "is a Python class of lm-eval", _INSTEAD
    if kind == "generate_until":
        return "generates text, and an audit scores options", _INSTEAD
    if kind not in _SCORED:
        reason = "measures perplexity, and an audit does so on text of its own"
        return reason, "name its text with `--evaluation`"
    if config.get("process_results") is not None:
        return "marks answers by code of its own", _INSTEAD
    if metrics and "acc" not in metrics:
        return f"is marked by {', '.join(metrics)}, and an audit counts right answers", _INSTEAD
    return None


def all_tasks() -> dict[str, str]:
    index = _manager(None)._index
    return {name: entry.kind.name.lower() for name, entry in sorted(index.items())}


def prompts(
    leaf: Leaf, data: Mapping[str, Any], shots: int | None, templates: Templates
) -> tuple[Prompt, ...]:
    """Build the prompts of every document of a task; `data` replaces where its data come from.

    Every template is rendered in a process of its own, those of lm-eval too.
    """
    import lm_eval.utils

    with _quiet(), patch.object(lm_eval.utils, "apply_template", templates.render):
        manager = _manager(*_where(leaf.name, leaf.file))
        member = {"task": leaf.name, **dict(leaf.replaced), **data}
        (task,) = manager.load([{"group": "qaudit", "task": [member]}])["tasks"].values()
        task.set_config("num_fewshot", leaf.shots(shots))
        task.set_fewshot_seed(FEWSHOT_SEED)  # it advances with every document
        task.build_all_requests(limit=None, rank=0, world_size=1)
        groups: dict[int, list[Any]] = {}
        for instance in task.instances:
            groups.setdefault(instance.doc_id, []).append(instance)
        return tuple(_prompted(task, group) for group in groups.values())


def _where(name: str, file: Path | None = None) -> tuple[str | None, ...]:
    """Return the folders to index for a task: those of the twelve save seven seconds."""
    group = name if name in KNOWN else name.partition("_")[0]  # mmlu_anatomy
    if group in KNOWN and (name == group or name in _manager(KNOWN[group].folder)._index):
        return (KNOWN[group].folder,)
    folders = {preset.folder for preset in KNOWN.values()}
    tasks_folder = _tasks_folder()
    if file is not None and tasks_folder in file.parents:
        inside = file.parent.relative_to(tasks_folder).as_posix()
        return (inside,) if inside in folders else (None,)
    return (None,)


def _tasks_folder() -> Path:
    return Path(_library().__file__ or "").parent


@cache
def _library() -> Any:
    try:
        import lm_eval.tasks
    except ImportError as error:
        raise MachineError(
            "tasks need lm-eval, which is not installed",
            hint=f"{install('lm_eval')}; `--set choices=FILE` needs nothing more",
        ) from error
    return lm_eval.tasks


@cache
def _manager(folder: str | None) -> Any:
    """Index a folder of tasks; None is all of lm-eval's, which takes seconds."""
    library = _library()
    with _quiet():
        if folder is None:
            return library.TaskManager()
        path = _tasks_folder() / folder
        return library.TaskManager(include_defaults=False, include_path=[path])


def _in_library(name: str) -> Iterator[Definition]:
    manager = _manager(*_where(name))
    entry = manager._index.get(name)
    if entry is None:
        names = [*KNOWN, *(_manager(None)._index if name not in KNOWN else ())]
        near = nearest(name, names)
        hint = near if near.startswith("did you mean") else "`qaudit list tasks` names them"
        if Path(name).exists():
            hint = (
                "`--set choices=FILE` scores items of your own, and `qaudit import` takes answers"
            )
        raise UsageError(f"lm-eval has no task `{name}`", hint=hint)
    leaves = tuple(_leaves(manager, name, {}))
    if not leaves:
        raise UsageError(f"the group `{name}` has no tasks", hint="`qaudit list tasks` names them")
    if entry.kind.name == "TAG" or (entry.kind.name == "GROUP" and not _weighted(entry.cfg)):
        yield from (Definition(leaf.name, (leaf,)) for leaf in leaves)
    else:
        yield Definition(name, leaves)


def _weighted(config: Mapping[str, Any]) -> bool:
    rules = config.get("aggregate_metric_list") or []
    rules = rules if isinstance(rules, list) else [rules]
    return any(rule.get("metric") == "acc" and rule.get("weight_by_size", True) for rule in rules)


def _leaves(manager: Any, name: str, replaced: Mapping[str, Any]) -> Iterator[Leaf]:
    """Yield the tasks below a name, with what the groups above them replace."""
    entry = manager._index[name]
    if entry.kind.name == "TAG":
        for member in sorted(entry.tags):
            yield from _leaves(manager, member, replaced)
    elif entry.kind.name == "GROUP":
        for member in entry.cfg["task"]:
            member_config = dict(member) if isinstance(member, dict) else {}
            below = str(
                member_config.pop("task", None) or member_config.pop("group", None) or member
            )
            if below not in manager._index:
                raise UsageError(
                    f"`{below}` of the group `{name}` is defined inside it",
                    hint="give it a file of its own",
                )
            yield from _leaves(manager, below, {**replaced, **member_config})
    else:
        config = {**(entry.cfg or {}), **replaced}
        yield Leaf(name, config, tuple(replaced.items()), entry.yaml_path)


def _prompted(task: Any, group: Sequence[Any]) -> Prompt:
    """Return a prompt; no option is right where the answer is none, which lm-eval marks wrong."""
    group = sorted(group, key=lambda instance: int(instance.idx))
    document = group[0].doc
    if task.OUTPUT_TYPE == "loglikelihood":
        return (group[0].args,), (0,)
    choices = task.doc_to_choice(document)
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    if isinstance(gold, str):
        gold = list(choices).index(gold) if gold in choices else -1
    reason, right = "", gold if isinstance(gold, list) else [gold]
    if gold is None or gold == "":
        reason = f"`{task.task_name}` has items without a right answer"
    elif any(not isinstance(place, int) for place in right):
        reason = f"the answers of `{task.task_name}` are no options"
    if reason:
        raise SourceError(reason, hint="leave the task out")
    pairs = tuple(instance.args for instance in group[: len(choices)])  # without unconditional ones
    return pairs, tuple(place for place in right if 0 <= place < len(choices))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval's bars and remarks off the terminal."""
    import lm_eval.api.task

    module: Any = lm_eval.api.task
    level = logging.root.manager.disable
    module.datasets.disable_progress_bars()
    logging.disable(logging.WARNING)
    try:
        with patch.object(module, "tqdm", lambda documents, **_: documents):
            yield
    finally:
        logging.disable(level)
