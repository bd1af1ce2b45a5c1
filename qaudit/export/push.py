"""An exported folder into a repository of the Hub, as one pull request. No torch here.

The repository is read before anything is computed, so that one that is not there costs nothing.
Files are compared by their hashes: the same command sends what is missing, and finds its own pull
request. Weights of an earlier export that this one does not have are removed by it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from qaudit.errors import UsageError
from qaudit.export.choice import ExportChoice
from qaudit.export.contents import changed_files
from qaudit.hub import Hub
from qaudit.hub.publish import (
    README,
    Addition,
    Count,
    Outcome,
    plan_of,
    require_account,
    submit,
    there,
    title_of,
)
from qaudit.saved.exports import FILE, read_export

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


def must_take(repo: str, hub: Hub) -> None:
    """Refuse a repository that is not there, and an account that is none, before any work."""
    require_account(hub)
    _, _, listed = there(repo, hub)
    refuse_other_weights(repo, listed)


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


def push(folder: Path, repo: str, hub: Hub, progress: Count) -> Outcome:
    """Open a pull request with an exported folder, or add to the one that is open."""
    record = read_export(folder)
    place = there(repo, hub)
    refuse_other_weights(repo, place[2])
    for _, sentence in changed_files(folder, record):
        raise UsageError(
            f"`{folder}` is not as it was exported: {sentence}",
            hint="restore it, or export to a new folder, and push that",
        )
    names = sorted({*record.files, FILE, README})  # and nothing else that is in the folder
    additions = [Addition(name, folder / name) for name in names]
    readme = ("", (folder / README).read_text(encoding="utf-8"))
    plan = plan_of(repo, place, additions, _WEIGHTS, readme)
    what = f"{record.subject} at {record.scheme}, {record.format}"[:100]
    description = (
        f"`{record.subject}` under `{record.spec}`, as {record.format} files, written by qaudit "
        f"{record.qaudit}. `qaudit verify` compares them with the weights that were measured.\n"
    )
    return submit(plan, description, hub, title_of(f"Add {what}"), progress)
