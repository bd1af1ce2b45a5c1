"""Which files of a data set hold its splits, by the rules of the `datasets` library itself.

The library finds files by the metadata of a README or by their names. It is given a folder of
empty files with the names that the Hub lists, and the README, so that its own rules answer
before any data is fetched; then only the files of the splits that a task reads are.

Where the data of tasks come from: files of the Hub at a commit, or a folder.

Data are pinned like texts: a file at a commit, known by the hash of its bytes.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.errors import HubError, SourceError
from qaudit.items.harness import Leaf
from qaudit.support.foreign import yaml_of
from qaudit.types import TextFile
from qaudit.whole import read_regular

if TYPE_CHECKING:
    from qaudit.hub import Hub
    from qaudit.hub.listing import Listing


README = "README.md"
_MOST_FILES = 50_000
_PUBMEDQA = "bigbio/pubmed_qa"
_ARCHIVE = "pqal.zip"
_MEMBERS = {
    "train": "pqal_{fold}/train_set.json",
    "validation": "pqal_{fold}/dev_set.json",
    "test": "pqal_test_set.json",
}
"""Where the script of `bigbio/pubmed_qa` finds its splits: no version of `datasets` runs it now."""

Splits = Mapping[str, tuple[str, ...]]
"""Split -> paths inside the data set."""


@dataclass(frozen=True)
class Data:
    """The data of a task: splits of a repository of the Hub."""

    repo: str
    name: str | None
    splits: tuple[str, ...]
    revision: str = "main"

    @classmethod
    def of(cls, leaf: Leaf) -> Data:
        config = leaf.config
        path, kwargs = str(config.get("dataset_path") or ""), config.get("dataset_kwargs") or {}
        if "data_files" in kwargs or "data_dir" in kwargs or "custom_dataset" in config:
            raise SourceError(
                f"`{leaf.name}` chooses among the files of `{path}` itself",
                hint="run it with lm-eval and `qaudit import` its answers",
            )
        name = config.get("dataset_name")
        return cls(path, name, leaf.splits, str(kwargs.get("revision") or "main"))

    @property
    def is_archived(self) -> bool:
        """Whether it is an archive that a script would read."""
        return self.repo == _PUBMEDQA

    def source(self, split: str) -> str:
        """Return the name under which a plan pins the files of a split."""
        return f"hf://datasets/{self.repo}#{self.name or 'default'}/{split}"

    @property
    def readme(self) -> str:
        return f"hf://datasets/{self.repo}#{README}"


def split_files(data: Data, paths: Iterable[str], readme: bytes | None) -> Splits:
    """Return the files of the splits that are read, by the paths that a data set has."""
    paths = [path for path in paths if path != README]
    repo, hint = data.repo, "leave its task out"
    if data.is_archived:
        if _ARCHIVE not in paths:
            raise SourceError(f"there is no `{_ARCHIVE}` in the data set `{repo}`", hint=hint)
        return dict.fromkeys(data.splits, (_ARCHIVE,))
    if len(paths) > _MOST_FILES:
        raise SourceError(
            f"the data set `{repo}` has {len(paths)} files, more than {_MOST_FILES}", hint=hint
        )
    with tempfile.TemporaryDirectory(prefix="qaudit-") as folder:
        root = Path(folder).resolve() / "data"
        for path in paths:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
        root.mkdir(exist_ok=True)
        if readme is not None:
            (root / README).write_text(metadata_of(readme, data.name), encoding="utf-8")
        by_library = _by_library(data, root, paths)
    if missing := [split for split in data.splits if split not in by_library]:
        raise SourceError(
            f"the data set `{repo}` has no split `{missing[0]}`: it has {', '.join(by_library)}",
            hint=hint,
        )
    return {split: by_library[split] for split in data.splits}


def metadata_of(readme: bytes, name: str | None) -> str:
    """Return a README's metadata without the configurations of other names.

    The library parses all of them for each: a minute for the 57 subjects of MMLU.
    """
    table = dict(_front_matter(readme))
    configs = table.get("configs")
    for config in configs if isinstance(configs, list) else []:
        keys = config if isinstance(config, dict) else {}
        for text in texts_in([keys.get("data_files"), keys.get("data_dir")]):
            # The library would open any address.
            if "::" in text or "://" in text or text[:1] in "/~" or ".." in text.split("/"):
                raise SourceError(
                    f"the data set names data outside of it: `{text[:100]}`",
                    hint="leave its task out",
                )
    for key in ("configs", "dataset_info"):
        entries = table.get(key)
        if name and isinstance(entries, list):
            entries_of_name = [
                entry
                for entry in entries
                if isinstance(entry, dict) and entry.get("config_name") == name
            ]
            table[key] = entries_of_name or entries
    return f"---\n{json.dumps(table, default=str)}\n---\n"


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_in(part)


@lru_cache(maxsize=8)
def _front_matter(readme: bytes) -> dict[str, Any]:
    text = readme.decode("utf-8", errors="replace").replace("\r\n", "\n")
    table = None
    if text.startswith("---\n"):
        with suppress(ValueError):
            table = yaml_of(text[4:].partition("\n---")[0])
    return table if isinstance(table, dict) else {}


def _by_library(data: Data, root: Path, paths: Sequence[str]) -> Splits:
    import datasets

    try:
        with tempfile.TemporaryDirectory(prefix="qaudit-") as cache:
            builder = datasets.load_dataset_builder(str(root), data.name, cache_dir=cache)
            by_split = builder.config.data_files or {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = " ".join(str(error).split())[:160].replace(str(root), data.repo)
        message = f"the files of the data set `{data.repo}` are not found: {reason}"
        hint = "leave its task out"
        if any(path.endswith(".py") for path in paths):
            message = f"the data set `{data.repo}` needs a script, which is not run"
            hint = "name a folder with its files as parquet: `--set task_data=FOLDER`"
        raise SourceError(message, hint=hint) from error
    return {
        str(split): tuple(Path(file).relative_to(root).as_posix() for file in files)
        for split, files in by_split.items()
    }


def source_of(data: Data, folder: Path, files: Splits, scratch: Path) -> dict[str, Any]:
    """Return the files on this machine that lm-eval loads in place of a data set."""
    on_disk: dict[str, Any] = {}
    described, name = "json", None
    for split, paths in files.items():
        if data.is_archived:
            on_disk[split] = str(_unpacked(data, folder / _ARCHIVE, split, scratch))
        else:
            on_disk[split] = [str(folder / path) for path in paths]
    if not data.is_archived:
        described, name = str(scratch / "data"), data.name
        Path(described).mkdir()
        if (folder / README).is_file():
            text = metadata_of(read_regular(folder / README), name)
            (scratch / "data" / README).write_text(text, encoding="utf-8")
    return {
        "dataset_path": described,
        "dataset_name": name,
        "dataset_kwargs": {"data_files": on_disk, "cache_dir": str(scratch / "arrow")},
    }


def _unpacked(data: Data, archive: Path, split: str, scratch: Path) -> Path:
    """Write a split of PubMedQA as JSON lines, in the order that its script reads them."""
    fold = (data.name or "").removeprefix("pubmed_qa_labeled_").removesuffix("_source")
    member = _MEMBERS[split].format(fold=fold)
    try:
        with zipfile.ZipFile(archive) as content:
            names = [name for name in content.namelist() if name.endswith(member)]
            table = json.loads(content.read(names[0] if names else member))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise SourceError(
            f"`{archive.name}` has no `{member}` that can be read", hint="leave its task out"
        ) from error
    path = scratch / f"{split}.jsonl"
    lines = (json.dumps({"id": key, **row}) for key, row in table.items())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def find(hub: Hub, data: Data) -> Iterator[TextFile]:
    """Yield the README of a data set, and the files of the splits that are read."""
    listing: Listing = hub.listing
    commit = listing.commit(data.repo, data.revision, kind="dataset")
    by_path = {file.path: file for file in listing.files(data.repo, commit, kind="dataset")}

    def text(source: str, path: str) -> TextFile:
        return TextFile(
            source, data.repo, commit, path, by_path[path].nbytes, by_path[path].identity
        )

    readme = None
    if README in by_path and not data.is_archived:
        about = text(data.readme, README)
        readme = hub.fetcher.text(about).read_bytes()
        yield about
    for split, paths in split_files(data, by_path, readme).items():
        yield from (text(data.source(split), path) for path in paths)


def pinned(data: Data, texts: Sequence[TextFile]) -> list[TextFile]:
    sources = {data.source(split) for split in data.splits}
    pinned_texts = [text for text in texts if text.source in sources]
    if {text.source for text in pinned_texts} != sources:
        raise HubError(
            f"the files of `{data.repo}` were not looked up when the audit was planned",
            hint="plan the audit again: `--set update=true`",
        )
    return [*(text for text in texts if text.source == data.readme), *pinned_texts]


@lru_cache(maxsize=256)
def local(root: Path, data: Data) -> tuple[Path, Splits]:
    repo = data.repo  # `org/name`, or `name`
    names = (repo, repo.replace("/", "--"), repo.rpartition("/")[2])
    folder = next((f for name in names if (f := root.resolve() / name).is_dir()), None)
    if folder is None:
        raise SourceError(
            f"there is no folder `{data.repo}` in `{root}`",
            hint=f"hf download --repo-type dataset {data.repo} --local-dir {root / data.repo}",
        )
    readme = folder / README
    about = read_regular(readme) if readme.is_file() else None
    paths = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        with suppress(OSError):
            if path.is_file() and not any(part.startswith(".") for part in inside.parts):
                paths.append(inside.as_posix())
    return folder, split_files(data, paths, about)
