"""The files of an exported folder: those that are copied, recorded, and compared.

Every file is recorded with its sha256, so that a tokenizer, a chat template or a second file of
weights cannot change without a word. The record itself is compared with what an audit pinned of
the checkpoint, whose configuration is kept beside the audit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.stamps import (
    CONFIGURATION,
    INDEXES,
    LARGEST_SETTINGS_NBYTES,
    QUANTIZATION,
    TOKENIZER,
    computed_hash,
    settings_in,
)
from qaudit.errors import QauditError
from qaudit.saved.exports import FILE, ExportRecord
from qaudit.saved.results import sha256_of

if TYPE_CHECKING:
    from qaudit.export.choice import ExportChoice
    from qaudit.formats.packing import Format

README = "README.md"
EVIDENCE = "qaudit"
"""The folder of the audit, its card and its lock, and of the checkpoint's configuration."""
_COPIED = (
    CONFIGURATION,
    *(name for name in TOKENIZER if "/" not in name),
    "*.tiktoken",
    "tekken.json",
    "generation_config.json",
    "*processor_config.json",  # without which runtimes load no wrapper
    "LICEN[CS]E*",
    "NOTICE*",
    "USE_POLICY*",
)
_UNREAD = ("*.md", "*.png", "*.jpg", "*.svg", "*.webp", "*.pdf", "LICEN[CS]E*", "NOTICE*")
"""What no runtime reads may be added to a folder."""


def copy_settings(source: Path, target: Path) -> None:
    """Copy configuration, tokenizer, processors and licence, and nothing else of a folder."""
    paths = [p for p in sorted(source.iterdir()) if _is_any(p.name, _COPIED)]
    for path in (*paths, *sorted(source.glob("additional_chat_templates/*.jinja"))):
        if path.is_file() and path.stat().st_size < LARGEST_SETTINGS_NBYTES:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def hashes_in(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file that is recorded: all but the record and the card."""
    return {
        name: sha256_of(folder / name) for name in _names_in(folder) if name not in (FILE, README)
    }


def changed_files(folder: Path, record: ExportRecord) -> Iterator[tuple[str, str]]:
    """Yield the name of each file that is not as it was recorded, and what is wrong with it."""
    names = _names_in(folder)
    for name in sorted({*names, *record.files} - {FILE, README}):
        path = folder / name
        if name not in record.files:
            if not _is_any(path.name, _UNREAD):
                yield name, f"`{name}` was not exported"
        elif name not in names:
            yield name, f"`{name}` is missing"
        elif not path.is_file():
            yield name, f"`{name}` is not a regular file"
        elif sha256_of(path) != record.files[name]:
            yield name, f"`{name}` is not what was exported"


def not_of_the_audit(
    folder: Path, record: ExportRecord, form: Format, choice: ExportChoice
) -> Iterator[str]:
    """Yield what a record names, or a folder holds, that is not what the audit measured."""
    if (choice.subject.content, choice.scheme.spec) != (record.content, record.spec):
        yield f"the record names other weights of `{record.subject}` than the audit measured"
    assert choice.record is not None
    if choice.record.protocol.get("corpus_sha256") != record.corpus_sha256:
        yield "the record names another calibration text than the audit"
    if record.audit_sha256 not in (None, record.files.get(f"{EVIDENCE}/audit.json")):
        yield f"`{EVIDENCE}/audit.json` is another audit than the record names"
    pinned = {file.name: file.sha256 for file in choice.subject.first.settings}
    if not _has(folder / EVIDENCE / CONFIGURATION, pinned.get(CONFIGURATION)):
        yield f"`{EVIDENCE}/{CONFIGURATION}` is not the configuration that was measured"
    if not form.has_settings:
        return
    names = {file.name for file in settings_in(folder)}
    names |= {name for name in pinned if _is_any(name, TOKENIZER)}
    for name in sorted(names - {CONFIGURATION, *INDEXES, *QUANTIZATION}):
        if not _has(folder / name, pinned.get(name)):
            yield f"`{name}` is not that of the checkpoint that was measured"
    yield from _configuration(folder, form)


def _configuration(folder: Path, form: Format) -> Iterator[str]:
    try:
        written = read_configuration(folder)
        expected = form.whole_config(
            read_configuration(folder / EVIDENCE), written.get("quantization_config", {})
        )
    except QauditError as error:
        yield error.message
        return
    for key in sorted(written.keys() | expected.keys()):
        if written.get(key) != expected.get(key):
            yield f"`{key}` of `{CONFIGURATION}` is not that of the checkpoint that was measured"


def _has(path: Path, pinned: str | None) -> bool:
    """Return whether a file has the hash that a plan pinned: sha256, or the id of git."""
    if pinned is None or not path.is_file():
        return False
    if pinned.startswith("git:"):
        return f"git:{computed_hash(path, 'git')}" == pinned
    return computed_hash(path, "sha256") == pinned


def _names_in(folder: Path) -> list[str]:
    """Return the files of a folder, and links to folders, which are not followed; not hidden."""
    names: list[str] = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        here = Path(root).relative_to(folder)
        names += [(here / n).as_posix() for n in (*files, *links) if not n.startswith(".")]
    return names


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
