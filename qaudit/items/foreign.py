"""Folders of tasks of others: YAML as lm-eval writes it, read without running what it names.

lm-eval imports a Python file for each `!function`, and reads data and metrics by names that may be
code. Here a folder's files are values: `!function` stays a name, and is imported by lm-eval only
where the user trusts the folder's code. What a template does is bounded by `qaudit.sandbox`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qaudit.core.foreign import LARGEST_YAML, yaml_of
from qaudit.errors import SourceError, UsageError
from qaudit.items.files import README, metadata_of, texts_in
from qaudit.whole import read_regular

_LARGEST_README = 1 << 26
_NO_CONFIGURATION = ("tag", "group", "task_list")
_SHAPES: Mapping[str, tuple[type, ...]] = {
    "task": (str,),
    "dataset_path": (str,),
    "dataset_name": (str,),
    "dataset_kwargs": (dict,),
    "fewshot_config": (dict,),
    "metric_list": (list,),
    "num_fewshot": (int,),
    "training_split": (str,),
    "validation_split": (str,),
    "test_split": (str,),
    "fewshot_split": (str,),
}
_SCORED = ("multiple_choice", "loglikelihood")
_INSTEAD = (
    "score options instead: mmlu, arc_challenge, hellaswag; or run lm-eval on the exported model"
)


@dataclass(frozen=True)
class FunctionName:
    """A `!function`, not imported: a module beside a file, or one that is installed."""

    name: str
    folder: Path

    def __str__(self) -> str:
        return self.name

    @property
    def file(self) -> Path:
        """Where lm-eval looks first; what is not there is an installed module."""
        return self.folder / f"{self.name.rpartition('.')[0].replace('.', '/')}.py"


def read_tasks(path: Path) -> tuple[dict[Path, dict[str, Any]], str]:
    """Read the YAML files of a folder, or one file; also return why the first bad one is left."""
    files = sorted(path.rglob("*.yaml"), key=Path.as_posix) if path.is_dir() else [path]
    tables, why = {}, ""
    for file in files:
        if "__pycache__" in file.parts or ".ipynb_checkpoints" in file.parts:
            continue
        try:
            tables[file] = checked(load(file))
        except (OSError, ValueError, RecursionError) as error:
            why = why or f"`{file}` cannot be read: {' '.join(str(error).split())[:200]}"
    return tables, why


def load(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file and those that it includes; its own keys win, as lm-eval has it."""
    path = path.expanduser().resolve()
    if path in seen:
        raise ValueError(f"it includes itself by way of `{path.name}`")
    folder = path.parent
    text = read_regular(path, LARGEST_YAML).decode("utf-8")
    table = yaml_of(text, (("!function", lambda name: FunctionName(name, folder)),))
    if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
        raise ValueError("it is no table of keys")
    merged: dict[str, Any] = {}
    included = table.pop("include", ())
    for name in included if isinstance(included, list) else [included] if included else []:
        more = load(folder / str(name), (*seen, path))
        more.pop("task_list", None)
        merged |= more
    return merged | table


def checked(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table whose values have the types that are relied on; ValueError names the key."""
    if "group" in table:
        return table
    for key, kinds in _SHAPES.items():
        value = table.get(key)
        if value is not None and not isinstance(value, (*kinds, FunctionName)):
            raise ValueError(f"`{key}` is no {kinds[0].__name__}")
    if not all(isinstance(metric, dict) for metric in table.get("metric_list") or []):
        raise ValueError("`metric_list` is no list of tables")
    return table


def code_in(config: Mapping[str, Any]) -> tuple[FunctionName, ...]:
    return tuple(dict.fromkeys(_codes(dict(config))))


def _codes(value: Any) -> Iterator[FunctionName]:
    if isinstance(value, FunctionName):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _codes(part)
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from _codes(part)


def must_be_trusted(name: str, config: Mapping[str, Any], *, trusted: bool) -> None:
    """Refuse a task that names Python code, unless the user trusts it."""
    if (codes := code_in(config)) and not trusted:
        first = codes[0]
        raise UsageError(
            f"the task `{name}` runs Python code, `{first}` in `{first.folder}`, "
            "which is not run unless requested",
            hint="read the code, then pass `--trust-task-code` to run it with all your rights",
        )


def must_be_local(name: str, config: Mapping[str, Any]) -> None:
    """Refuse data that are neither files on this machine nor a data set of the Hub."""
    kwargs = config.get("dataset_kwargs") or {}
    for text in texts_in([kwargs.get("data_files"), kwargs.get("data_dir")]):
        if "://" in text or "::" in text or _is_special(Path(text)):
            raise SourceError(
                f"the data of `{name}`, `{text}`, are no files on this machine",
                hint="name files, or a data set of the Hub",
            )
    folder = Path(str(config.get("dataset_path") or ""))
    if folder.is_dir() and (folder / f"{folder.resolve().name}.py").exists():
        raise SourceError(
            f"the data set `{folder}` of `{name}` is a script, which is not run",
            hint="name a folder with its files as parquet",
        )
    if (readme := folder / README).is_file():
        metadata_of(read_regular(readme, _LARGEST_README), None)


def _is_special(path: Path) -> bool:
    """Return whether a path is a device or a FIFO, which could be read for ever."""
    return path.exists() and not path.is_file() and not path.is_dir()


def task_of(config: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
    """Have lm-eval make a task of values that were read here; its code is imported here.

    Metrics and filters are left out: names of them may be code of the Hub, and none is used.
    """
    from lm_eval.api.task import ConfigurableTask

    table = {key: value for key, value in config.items() if key not in _NO_CONFIGURATION}
    table |= {**data, "metric_list": [{"metric": "acc"}], "filter_list": None}
    table = _imported(deepcopy(table))
    kwargs = dict(table.get("dataset_kwargs") or {})
    kwargs.pop("trust_remote_code", None)
    return ConfigurableTask(config=table | {"dataset_kwargs": kwargs})


def _imported(value: Any) -> Any:
    from lm_eval.tasks._yaml_loader import _import_func_in_yml

    if isinstance(value, FunctionName):
        return _import_func_in_yml(value.name, value.folder)
    if isinstance(value, dict):
        return {key: _imported(part) for key, part in value.items()}
    return [_imported(part) for part in value] if isinstance(value, list) else value


def must_be_scored(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a task that no log-likelihoods of options mark."""
    if "use_prompt" in config:
        raise UsageError(
            f"`{name}` takes its prompt from promptsource", hint="write it as `doc_to_text`"
        )
    kind = config.get("output_type", "generate_until")
    metrics = [str(metric.get("metric")) for metric in config.get("metric_list") or []]
    if "class" in config:
        raise UsageError(f"`{name}` is a Python class of lm-eval", hint=_INSTEAD)
    if kind == "generate_until":
        raise UsageError(f"`{name}` generates text, and an audit scores options", hint=_INSTEAD)
    if kind not in _SCORED:
        raise UsageError(
            f"`{name}` measures perplexity, and an audit does so on text of its own",
            hint="name its text with `--evaluation`",
        )
    if config.get("process_results") is not None:
        raise UsageError(f"`{name}` marks answers by code of its own", hint=_INSTEAD)
    if metrics and "acc" not in metrics:
        raise UsageError(
            f"`{name}` is marked by {', '.join(metrics)}, and an audit counts right answers",
            hint=_INSTEAD,
        )
