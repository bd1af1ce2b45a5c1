"""The tokenizer that the subjects of a plan share, loaded from a checkpoint or borrowed.

Subjects can only be compared document by document if they read the same tokens, so that a scan
over several tokenizers is refused before any weights are read, not after.

Modules that import torch are imported inside functions: plans are made without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from qaudit import families
from qaudit.checkpoints.configuration import unreadable
from qaudit.checkpoints.stamps import folder_of
from qaudit.errors import ConfigurationError, SourceError
from qaudit.hub import Hub
from qaudit.saved.results import sha256_of
from qaudit.text.cutting import Tokenizer
from qaudit.types import Checkpoint, Ref, digest
from qaudit.whole import read_regular

_SETTINGS = "tokenizer_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", _SETTINGS)
_DECIDES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Files of a tokenizer that decide how text becomes tokens."""


def tokenizer_of(
    folders: Sequence[Path], trust_remote_code: bool
) -> tuple[Tokenizer, tuple[str, ...]]:
    """Load the first tokenizer there is: a checkpoint without one reads what the others read."""
    from qaudit.model.config import is_remote, ran, read_config

    failures = []
    for folder in [f for f in folders if _tokenizer_files(f)] or folders[:1]:
        try:
            # The library wants the config too, and says less of what is wrong there.
            config = read_config(folder, trust_remote_code=trust_remote_code)
            own_config = None if not is_remote(folder) else config  # of others it reads its own
            tokenizer = load_tokenizer(
                folder, trust_remote_code=trust_remote_code, config=own_config
            )
        except SourceError as error:
            failures.append(error)
            continue
        if not has_own_code(folder):
            return tokenizer, ()
        note = "the tokenizer is the library's: the repository's own code for it was not run"
        if not type(tokenizer).__module__.startswith("transformers."):
            note = f"the tokenizer is the repository's own: {ran(folder)}"
        return tokenizer, (note,)
    raise failures[0]


def load_tokenizer(
    folder: Path, *, trust_remote_code: bool = False, config: object = None
) -> Tokenizer:
    """Load the tokenizer in a checkpoint's folder.

    Code of the repository is run only with leave, and only where the library has no tokenizer
    of its own for the files there. A `config` is given where the library cannot read it itself.
    """
    from transformers import AutoTokenizer

    from qaudit.model.config import foreign, remote_class

    hint = "copy `tokenizer.json` and `tokenizer_config.json` of the model into the folder"
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise SourceError(f"there is no tokenizer in `{folder}`", hint=hint)
    try:
        with unreadable(f"the tokenizer in `{folder}` cannot be read", hint):
            loaded = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=False, local_files_only=True, config=config
            )
            return cast(Tokenizer, loaded)
    except ConfigurationError:
        if not has_own_code(folder):
            raise
    if not trust_remote_code:
        raise SourceError(
            f"the tokenizer in `{folder}` is code of its own, which is not run unless asked for",
            hint="read the code, then pass `--trust-remote-code` to run it on this machine",
        )
    kind = remote_class(folder, "AutoTokenizer", _SETTINGS)
    with foreign(folder, "to make its tokenizer"):
        tokenizer: Tokenizer = kind.from_pretrained(str(folder), local_files_only=True)
    return tokenizer


def has_own_code(folder: Path) -> bool:
    """Return whether the files of a tokenizer name code of their repository."""
    try:
        table = json.loads(read_regular(folder / _SETTINGS).decode())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(table, dict) and bool(table.get("auto_map"))


def _tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in _DECIDES if (folder / name).is_file()]


def borrowed_tokenizer(hub: Hub | None, members: Sequence[Checkpoint]) -> Checkpoint | None:
    """Fetch the tokenizer of another repository, where checkpoints have none and a family says so.

    It is found when text is read and not when it is planned, because only then is it known
    that no checkpoint has one; its commit is in the record.
    """
    if hub is None or any(_tokenizer_files(folder_of(c)) for c in members):
        return None
    owners = {family.family: family.tokenizer for family in families.all_families()}
    repos = [repo for c in members if (repo := owners.get(c.family or ""))]
    if not repos:
        return None
    owner = Checkpoint(Ref(repos[0]), repos[0], commit=hub.listing.commit(repos[0]))
    hub.fetcher.settings(owner)
    return owner


def tokenizer_sha256(folders: Sequence[Path]) -> str:
    """Identify the first tokenizer there is by the bytes of its files."""
    files = next((some for folder in folders if (some := _tokenizer_files(folder))), [])
    settings = [file.parent / _SETTINGS for file in files[:1]]
    return digest([(f.name, sha256_of(f)) for f in (*files, *settings) if f.is_file()])


def other_tokenizers(folders: dict[str, Path]) -> tuple[str, str] | None:
    """Return the first two labels whose tokenizers differ; a folder without one has no part."""
    labels: dict[str, str] = {}
    for label, folder in folders.items():
        if files := _tokenizer_files(folder):
            labels.setdefault(digest([(f.name, sha256_of(f)) for f in files]), label)
    first, *labels_of_others = [*labels.values()] or [""]
    return (first, labels_of_others[0]) if labels_of_others else None
