"""The files of an exported folder: copied, recorded, compared, its README.md; unfinished work.

Every file is recorded with its sha256, so that a tokenizer, a chat template or a second file of
weights cannot change without a word. The record itself is compared with what an audit pinned of
the checkpoint, whose configuration is kept beside the audit.

Unfinished work is beside a result, in `.NAME.begun`, which the same command alone continues. A file
in it has the identity of the work. A folder of that name without it, or with links in it, is
refused and stays as it is: nothing is written to or removed from files of others.

A push reads the repository before anything is computed, so that one that is not there costs
nothing. Files are compared by their hashes: the same command sends what is missing, and finds its
own pull request. Weights of an earlier export that this one does not have are removed by it.

The README.md says what a folder holds, what was measured, and what loads it; that of a soup its
members, their files and their weights.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.checkpoints import stamps
from qaudit.checkpoints.configuration import read_configuration
from qaudit.errors import MachineError, QauditError, UsageError, not_written
from qaudit.hub import Hub, publish
from qaudit.hub.metadata import front_matter
from qaudit.report import document
from qaudit.report.document import prose, words
from qaudit.report.folder import must_be_outside
from qaudit.report.format import percent, spread
from qaudit.report.markdown import render_blocks
from qaudit.report.views import judged
from qaudit.saved.exports import FILE, ExportRecord, read_export
from qaudit.saved.parts import LOCK, one_writer
from qaudit.saved.results import sha256_of
from qaudit.support.sizes import size
from qaudit.types import Subject
from qaudit.version import __version__
from qaudit.whole import read_regular, write_whole

if TYPE_CHECKING:
    from qaudit.export.choice import ExportChoice
    from qaudit.formats.packing import Document, Format

README = "README.md"
EVIDENCE = "qaudit"
"""The folder of the audit, its card and its lock, and of the checkpoint's configuration."""
_COPIED = (
    stamps.CONFIGURATION,
    *(name for name in stamps.TOKENIZER if "/" not in name),
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

_MARKER = "qaudit-work"
_OWN_FILES = (LOCK, _MARKER)
_RESULT = "result"


def copy_settings(source: Path, target: Path) -> None:
    """Copy configuration, tokenizer, processors and licence, and nothing else of a folder."""
    paths = [p for p in sorted(source.iterdir()) if _is_any(p.name, _COPIED)]
    for path in (*paths, *sorted(source.glob("additional_chat_templates/*.jinja"))):
        if path.is_file() and path.stat().st_size < stamps.LARGEST_SETTINGS_NBYTES:
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
    if not stamps.has_hash(
        folder / EVIDENCE / stamps.CONFIGURATION, pinned.get(stamps.CONFIGURATION)
    ):
        yield f"`{EVIDENCE}/{stamps.CONFIGURATION}` is not the configuration that was measured"
    if not form.has_settings:
        return
    names = {file.name for file in stamps.settings_in(folder)}
    names |= {name for name in pinned if _is_any(name, stamps.TOKENIZER)}
    for name in sorted(names - {stamps.CONFIGURATION, *stamps.INDEXES, *stamps.QUANTIZATION}):
        if not stamps.has_hash(folder / name, pinned.get(name)):
            yield f"`{name}` is not that of the checkpoint that was measured"
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
            yield f"`{key}` of `config.json` is not that of the checkpoint that was measured"


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


def must_be_new(out: Path) -> None:
    """Refuse a folder that holds something, or is inside a checkpoint."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"`{out}` exists already", hint="name a folder that does not exist yet")
    must_be_outside(out)


# ----------------------------------------------------------------------------- unfinished work


def begun_path(out: Path) -> Path:
    return out.with_name(f".{out.name}.begun")


@contextmanager
def begun_folder(out: Path, identity: str) -> Iterator[Path]:
    """Hold the folder of unfinished work; remove it once the block ends without an error.

    And where nothing can be resumed: what is refused is refused again.
    """
    folder = begun_path(out)
    _must_be_ours(folder, identity)
    with one_writer(folder):
        write_whole(folder / _MARKER, identity)
        try:
            yield folder
        except BaseException as error:
            if isinstance(error, UsageError) or _only_own_files(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def whole_folder(path: Path, begun: Path) -> Iterator[Path]:
    """Yield a new folder within unfinished work, which is moved to `path` once it is complete."""
    partial = begun / _RESULT
    try:
        if partial.exists():  # of a run that was killed
            shutil.rmtree(partial)
        partial.mkdir()
        yield partial
        if path.exists():
            path.rmdir()
        partial.replace(path)
    except OSError as error:
        raise not_written(path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def must_fit(folder: Path, needed: int, what: str) -> None:
    """Refuse bytes that a folder's disk has no room for."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise MachineError(
            f"{what.format(size(needed))}, and {size(free)} are free at `{folder.parent}`",
            hint="give a folder on another disk with `--out`",
        )


def _must_be_ours(folder: Path, identity: str) -> None:
    """Refuse a folder that is not of this very work, and links, before anything is written."""
    marker, is_ours = folder / _MARKER, not folder.exists() and not folder.is_symlink()
    try:
        if folder.is_dir() and not any(p.is_symlink() for p in (folder, *folder.rglob("*"))):
            text = read_regular(marker, 1000) if marker.exists() else None
            is_ours = _only_own_files(folder) if text is None else text == identity.encode()
    except OSError as error:
        raise not_written(folder, error) from error
    if not is_ours:
        raise UsageError(
            f"unfinished work goes to `{folder}`, which holds something else or links",
            hint="remove it if nothing in it is needed and no other command writes it, or give "
            "another folder with `--out`",
        )


def _only_own_files(folder: Path) -> bool:
    """Return whether a folder has no file but those that a killed process may begin with."""
    return all(path.name.startswith(_OWN_FILES) and path.is_file() for path in folder.iterdir())


# ------------------------------------------------------- into a repository, as one pull request

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


def must_take(repo: str, hub: Hub) -> None:
    """Refuse a repository that is not there, and an account that is none, before any work."""
    publish.require_account(hub)
    refuse_other_weights(repo, publish.there(repo, hub)[2])


def refuse_other_weights(repo: str, listed: Collection[str]) -> None:
    """Refuse a repository whose weights an export did not write: a push would remove them."""
    weights = sorted(name for name in listed if _WEIGHTS.fullmatch(name))
    if weights and FILE not in listed:
        raise UsageError(
            f"`{repo}` has weights that `qaudit export` did not write, as `{weights[0]}`",
            hint="push to a repository of its own",
        )


def holds(folder: Path, choice: ExportChoice, form: str) -> bool:
    """Return whether a folder is the whole export of a choice, as an earlier run wrote it."""
    if not (folder / FILE).is_file():
        return False
    record = read_export(folder)
    wanted = (form, choice.subject.content, choice.scheme.spec, choice.audit_sha256)
    return (record.format, record.content, record.spec, record.audit_sha256) == wanted


def push(folder: Path, repo: str, hub: Hub, progress: publish.Count) -> publish.Outcome:
    """Open a pull request with an exported folder, or add to the one that is open."""
    record = read_export(folder)
    place = publish.there(repo, hub)
    refuse_other_weights(repo, place[2])
    for _, sentence in changed_files(folder, record):
        raise UsageError(
            f"`{folder}` is not as it was exported: {sentence}",
            hint="restore it, or export to a new folder, and push that",
        )
    names = sorted({*record.files, FILE, README})  # and nothing else that is in the folder
    contents = {name: folder / name for name in names}
    readme = ("", (folder / README).read_text(encoding="utf-8"))
    plan = publish.plan_of(repo, place, contents, _WEIGHTS, readme)
    what = f"{record.subject} at {record.scheme}, {record.format}"[:100]
    description = (
        f"`{record.subject}` under `{record.spec}`, as {record.format} files, written by qaudit "
        f"{record.qaudit}. `qaudit verify` compares them with the weights that were measured.\n"
    )
    return publish.submit(plan, description, hub, publish.title_of(f"Add {what}"), progress)


# ------------------------------------------------------------------------------- its README.md

_OF_BASE = ("license", "license_name", "license_link", "language", "datasets", "pipeline_tag")
"""What the card of a base says that holds for its quantized form."""
_LARGEST_NBYTES = 5_000_000


def export_card(
    choice: ExportChoice, record: ExportRecord, form: Format, config: Document, place: str
) -> str:
    """Return the card of a folder with a `config.json`, which is loaded from a place."""
    model = str(next(iter(config.get("architectures") or ()), "AutoModelForCausalLM"))
    model = "AutoModelForCausalLM" if model.endswith("ForCausalLM") else model
    snippet = form.snippet(place, model, config.get("quantization_config", {}))
    audit = f" The audit has the sha256 {record.audit_sha256}." if record.audit_sha256 else ""
    blocks = [
        document.paragraph(
            f"`{record.subject}` under `{record.spec}`, as {record.format} files of "
            f"{record.bits_per_weight:.3f} bits per quantized weight, written by qaudit "
            f"{record.qaudit}. Embeddings, norms and the head are as they were."
        ),
        *([_members(choice.subject)] if choice.subject.merge else []),
        *_measured(choice),
        document.CodeBlock(snippet, "console" if snippet.startswith("$") else "python"),
        document.paragraph(words("Lowest versions that load these files, and what they need:")),
        document.table(
            ("runtime", "version", "note"),
            ((runtime.name, runtime.lowest, runtime.remark or "-") for runtime in form.runtimes),
        ),
        document.paragraph(
            f"`{FILE}` has a hash of every weight as it was measured; `qaudit verify` compares "
            f"them with the files.{audit}"
        ),
    ]
    tags = ("quantized", "qaudit")
    front = _front_matter(choice.subject, "quantized", tags, form.library, choice.hub)
    return _rendered(front, f"{record.subject}, {record.scheme}", blocks)


def _measured(choice: ExportChoice) -> list[document.Block]:
    ships, scheme = choice.ships, choice.scheme
    rows = [
        row
        for row in (choice.record.measurements if choice.record else ())
        if row.subject == choice.subject.label
        and (row.scheme == scheme.short or row.spec == scheme.spec)
    ]
    if not rows:
        return [document.paragraph("No audit measured these weights.")]
    first = judged(rows[0], ships) if ships else rows[0]
    numbers = {
        "loss, nats per token": spread(first.ce),
        "added loss": percent(first.relative_error, unit=" %") if first.relative_error else "-",
        "KL divergence, nats per token": spread(first.kl) if first.kl else "-",
        "documents": str(first.documents),
    }
    blocks: list[document.Block] = [document.table(("measured", "value"), numbers.items())]
    if ships is None:
        other = "The audit's verdict is about other weights, not about these."
        return [*blocks, document.paragraph(other)]
    status = document.status_in_words(ships.status)
    blocks.append(document.paragraph(f"The verdict on {ships.bit_class} bits: {status}."))
    return [*blocks, *document.bullets_of((*ships.breaches, *ships.needs, *ships.warnings))]


def soup_card(soup: Subject, hub: Hub | None = None) -> str:
    files = [
        f"`{file.sha256}` `{checkpoint.label}/{file.name}`"
        for checkpoint, _ in soup.members
        for file in checkpoint.files
    ]
    blocks: list[document.Block] = [
        document.paragraph(
            f"A merge of {len(soup.members)} checkpoints by `{soup.merge}`, written by qaudit "
            f"{__version__}. Each tensor is summed in double precision, in this order, and rounded "
            "once to the dtype of the first member. Configuration and tokenizer are the first "
            "member's."
        ),
        _members(soup),
        document.paragraph("The members' files, by the sha256 of their bytes:"),
        document.bullets(*files),
    ]
    front = _front_matter(soup, "merge", ("merge", "model-soup"), "transformers", hub)
    return _rendered(front, soup.label, blocks)


def _rendered(front: str, title: str, blocks: Sequence[document.Block]) -> str:
    card = document.Section(title, tuple(blocks))
    return f"{front}\n\n{render_blocks([card], level=1)}\n"


def _members(soup: Subject) -> document.TableBlock:
    rows = []
    for number, (checkpoint, share) in enumerate(soup.members, 1):
        name = document.name_cell(checkpoint.label)
        if checkpoint.commit is not None:
            name = document.cell(prose(f"`{checkpoint.ref}` at `{checkpoint.commit}`"))
        rows.append((str(number), name, _share_text(share)))
    return document.table(("", "member", "weight"), rows)


def _share_text(share: float) -> str:
    """Return a weight as people write it: `0.75`, `1/3`, or all digits of any other number."""
    short, ratio = f"{share:.6g}", Fraction(share).limit_denominator(1000)
    if float(short) == share:
        return short
    return str(ratio) if float(ratio) == share else f"{share:.17g}"


def _front_matter(
    subject: Subject, relation: str, tags: Sequence[str], library: str, hub: Hub | None
) -> str:
    """Return the metadata that the Hub reads: checkpoints on the Hub are base models."""
    bases = dict.fromkeys(c.ref.location for c, _ in subject.members if c.commit)
    values: dict[str, Any] = {"base_model": list(bases)} if bases else {}
    if bases:
        values["base_model_relation"] = relation
    values |= {"library_name": library, "pipeline_tag": "text-generation"}
    base = _base_metadata(subject, hub)
    for key in _OF_BASE:  # of a foreign README: a text or a list of texts
        texts = base[key] if isinstance(base.get(key), list) else [base.get(key)]
        if texts and all(isinstance(text, str) and text for text in texts):
            values[key] = base[key]
    lines = ["---"]
    for key, value in (values | {"tags": list(tags)}).items():
        # JSON's quoted texts are YAML's: no name can be taken for anything else.
        if isinstance(value, list):
            lines += [f"{key}:", *(f"- {json.dumps(each)}" for each in value)]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join([*lines, "---"])


def _base_metadata(subject: Subject, hub: Hub | None) -> Mapping[str, Any]:
    """Return the front matter of the first member's README; nothing if there is none."""
    base = subject.first
    path = stamps.folder_of(base) / README
    with suppress(QauditError, OSError, UnicodeDecodeError):
        if base.commit is not None and hub is not None:
            repo = base.ref.location
            files = [f for f in hub.listing.files(repo, base.commit) if f.path == README]
            path = hub.fetcher.files(repo, base.commit, README, files, show=False) / README
        return front_matter(read_regular(path, _LARGEST_NBYTES).decode())
    return {}
