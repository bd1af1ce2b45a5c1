"""Files into a repository of the Hub as one pull request: an audit's, or those of an export.

    README.md                the verdict, a link to the card, metadata; every other byte as it was
    qaudit/audit.json        the audit, as it is
    qaudit/card.md           its card, and `report.html` if there was one, rendered anew
    qaudit/evidence/*.npz    per-document sums, each checked against its hash in the audit
    qaudit/plots/*.svg       the pictures that the card shows

Nothing else of an audit's folder is taken, no link is followed, and what an older audit left in the
repository is removed. First the open pull requests are searched for one of ours: of this account,
with our mark in its title. If it holds all files by their hashes, there is nothing to do; if it
holds older ones, the change goes onto its branch; only where there is none is one opened.

So the same command may be run any number of times. Requests are those of `HfApi`, repeated as the
client's own are, but for the commit: where its reply is lost nothing is sent again, because a
server that answers late may still be at work. The next run finds what was taken.

A published audit is read like a folder once it is fetched, as weights are: the revision is pinned
to a commit, every file is hashed against the Hub's listing, what is in the shared cache is not
fetched again, and without a network the cache alone is read. The audit names its evidence with
hashes of its own, so that files which belong to another audit are refused when the folder is read.
It may come from a stranger: only files that its repository lists below `qaudit/evidence` are
fetched, and none larger than per-document sums can be.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from qaudit.errors import (
    AuditError,
    HubError,
    UnreachableError,
    UsageError,
)
from qaudit.hub import Hub, open_hub
from qaudit.hub.answers import LOG_IN, DroppedError, HubFile, Request, repository_of
from qaudit.hub.api import GarbledAnswerError, checked
from qaudit.hub.cache import not_read
from qaudit.hub.metadata import metadata_of, with_metadata
from qaudit.report import document as doc
from qaudit.report.chart import dark
from qaudit.report.folder import PICTURES, figures, render_block, render_card, render_page
from qaudit.report.html import FILE as PAGE
from qaudit.report.markdown import put_block, render_blocks
from qaudit.report.series import pictures
from qaudit.report.verdict import headline, table
from qaudit.report.views import View
from qaudit.saved.audits import read_audit
from qaudit.saved.evidence import read_saved
from qaudit.types import HUB, AuditRecord, MeasurementRow, TaskRow, Watch

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, CommitOperationAdd, Discussion, HfApi

State = Literal["new", "changed", "unchanged"]
Count = Callable[[int, int], object]
"""Called with how many of how many files are sent."""

MARK = "[qaudit]"
"""Ends the title of every pull request of ours."""

FOLDER = "qaudit"
"""The folder of a published audit in its repository."""

AUDIT, README = f"{FOLDER}/audit.json", "README.md"
LARGEST_NBYTES = 256_000_000
"""Of one file: an audit of a thousand checkpoints, or the sums of ten million documents."""

_EVIDENCE = re.compile(r"evidence/(tasks/[A-Za-z0-9_=-][A-Za-z0-9._=-]*/)?[A-Za-z0-9._=-]+\.npz")
_STALE = re.compile(rf"{FOLDER}/(evidence/(tasks/[^/]+/)?[^/]+\.npz|plots/[^/]+\.svg|report\.html)")
_LONGEST_MESSAGE, _AT_A_TIME = 120, 20


def state_of(addition: CommitOperationAdd, listed: Mapping[str, HubFile]) -> State:
    """Compare the bytes of a file with those in a commit, by the hash that names them there."""
    from huggingface_hub.utils.sha import git_hash

    info, file = addition.upload_info, listed.get(addition.path_in_repo)
    if file is None:
        return "new"
    if file.sha256 is not None or file.nbytes != info.size:
        return "unchanged" if file.sha256 == info.sha256.hex() else "changed"
    with addition.as_file() as content:
        return "unchanged" if file.git_id == git_hash(content.read()) else "changed"


@dataclass(frozen=True, eq=False)
class PublishPlan:
    """What is written into a repository at one commit, and onto which pull request."""

    repo: str
    onto: Discussion | None  # None: opens one
    commit: str  # what the files were compared with
    files: tuple[tuple[CommitOperationAdd, State], ...]
    removed: tuple[str, ...]
    readme: tuple[str, str] = field(repr=False)  # before and after
    notes: tuple[str, ...]

    @property
    def additions(self) -> tuple[CommitOperationAdd, ...]:
        return tuple(addition for addition, state in self.files if state != "unchanged")

    @property
    def is_done(self) -> bool:
        return not self.additions and not self.removed


@dataclass(frozen=True, eq=False)
class Outcome:
    """How publishing ended."""

    state: Literal["opened", "updated", "already open", "already published"]
    url: str
    plan: PublishPlan


# ------------------------------------------------------------------------------ the repository


def require_account(hub: Hub) -> None:
    if hub.client.offline:
        raise HubError(
            "a pull request needs the network, and `HF_HUB_OFFLINE` keeps it away",
            hint="unset `HF_HUB_OFFLINE` and run the command again",
        )
    if not hub.client.logged_in:
        raise HubError(
            "a pull request needs an account, and you are not logged in",
            hint=f"{LOG_IN}, with a token that may write",
        )


def there(repo: str, hub: Hub) -> tuple[Discussion | None, str, dict[str, HubFile]]:
    """Return our open pull request, and the commit and files that a change goes upon."""
    ours = _own_pull_requests(repo, hub) if hub.client.logged_in else []
    onto = ours[0] if ours else None
    if onto is not None:
        commit = hub.client.commit(repo, str(onto.git_reference))
    else:
        commit = hub.listing.commit(repo, "main")
    return onto, commit, {file.path: file for file in hub.listing.files(repo, commit)}


def plan_of(
    repo: str,
    place: tuple[Discussion | None, str, Mapping[str, HubFile]],
    contents: Mapping[str, bytes | Path],
    stale: re.Pattern[str],
    readme: tuple[str, str],
    notes: Sequence[str] = (),
) -> PublishPlan:
    from huggingface_hub import CommitOperationAdd

    onto, commit, listed = place
    removed = tuple(sorted(p for p in listed if stale.fullmatch(p) and p not in contents))
    additions = [CommitOperationAdd(path, content) for path, content in contents.items()]
    files = tuple((addition, state_of(addition, listed)) for addition in additions)
    return PublishPlan(repo, onto, commit, files, removed, readme, tuple(notes))


def submit(plan: PublishPlan, description: str, hub: Hub, title: str, progress: Count) -> Outcome:
    """Open the pull request, or add to the one that is open, unless it holds all of it."""
    from huggingface_hub import CommitOperationDelete
    from huggingface_hub.utils.tqdm import disable_progress_bars

    require_account(hub)
    if plan.is_done:
        if plan.onto:
            return Outcome("already open", plan.onto.url, plan)
        return Outcome("already published", f"{hub.client.endpoint}/{plan.repo}", plan)
    branch = str(plan.onto.git_reference) if plan.onto else "main"
    where: dict[str, Any] = {"revision": branch, "create_pr": plan.onto is None}
    request = Request(
        f"whether it takes the files for `{plan.repo}`", plan.repo, revision=branch, writes=True
    )
    additions = plan.additions
    disable_progress_bars()
    for start in range(0, len(additions), _AT_A_TIME):
        some = additions[start : start + _AT_A_TIME]
        with warnings.catch_warnings(action="ignore"):
            upload = methodcaller("preupload_lfs_files", plan.repo, some, **where)
            hub.client.ask(request, upload)
        if ignored := [a.path_in_repo for a in some if a._should_ignore]:
            raise HubError(
                f"`.gitignore` of `{plan.repo}` leaves out `{ignored[0]}`",
                hint="let it take all files: an audit without its evidence cannot be checked",
            )
        progress(start + len(some), len(additions))
    where |= {"commit_message": title, "commit_description": description}
    where["parent_commit"] = plan.commit
    operations: list[Any] = [*additions, *map(CommitOperationDelete, plan.removed)]
    commit = _commit(plan, operations, where, hub, request)
    if plan.onto:
        return Outcome("updated", plan.onto.url, plan)
    return Outcome("opened", str(commit.pr_url), plan)


def _commit(
    plan: PublishPlan, operations: list[Any], where: Mapping[str, Any], hub: Hub, request: Request
) -> CommitInfo:
    """Send the commit: again only where it is known that it was not taken."""
    client = hub.client

    def send(api: HfApi) -> CommitInfo:
        try:
            with warnings.catch_warnings(action="ignore"):
                commit: CommitInfo = api.create_commit(plan.repo, operations, **where)
                return commit
        except ValueError as error:
            if "metadata in README" not in str(error):
                raise
            raise HubError(
                f"the Hub does not take the metadata of `{README}` in `{plan.repo}`: "
                f"{client.credentials.cleaned(str(error).partition('- ')[2])}",
                hint="fix the front matter of the README on the Hub, then run this again",
            ) from error

    def attempt() -> CommitInfo:
        try:
            return client.attempt(request, send)
        except GarbledAnswerError as error:
            raise _lost(plan, hub, "its answer makes no sense") from error
        except DroppedError as dropped:
            if dropped.unreached or dropped.status == 429:
                raise
            raise _lost(plan, hub, dropped.reason) from dropped

    return client.with_retries(request, attempt)


def _own_pull_requests(repo: str, hub: Hub) -> list[Discussion]:
    """Return the open pull requests that this account opened with qaudit, the latest first."""

    def read(api: HfApi) -> list[Discussion]:
        author = api.whoami()["name"]
        every = api.get_repo_discussions(repo, author=author, discussion_type="pull_request")
        return [
            d
            for d in every
            if d.is_pull_request and d.author == author and d.status in ("open", "draft")
            if d.title.endswith(MARK)
        ]

    ours = hub.client.ask(Request(f"the pull requests of `{checked(repo)}`", repo), read)
    return sorted(ours, key=lambda discussion: -discussion.num)


def _lost(plan: PublishPlan, hub: Hub, reason: str) -> UnreachableError:
    """Return the error for a commit that was sent, and may or may not have been taken."""
    return UnreachableError(
        f"the Hub did not say whether it took the commit for `{plan.repo}`: {reason}",
        hint=f"look at {hub.client.endpoint}/{plan.repo}/discussions, then run the same command "
        "again: it looks there first, and opens no second pull request",
    )


# ------------------------------------------------------------------------------------ the audit


@dataclass(frozen=True, eq=False)
class Folder:
    """An audit's folder as it is published."""

    audit: AuditRecord
    files: Mapping[str, bytes] = field(repr=False)  # by their path in the repository
    notes: tuple[str, ...] = ()


def read_for_publishing(path: Path) -> Folder:
    """Read an output folder with all of its evidence, and refuse what does not fit together."""
    folder = path if path.is_dir() else path.parent
    audit = read_saved(path).checked().audit
    if not audit.measurements:
        raise AuditError("the audit measured nothing", hint="there is nothing to publish")
    files = {AUDIT: _bytes(folder / "audit.json"), f"{FOLDER}/card.md": render_card(audit).encode()}
    rows: list[MeasurementRow | TaskRow] = [*audit.measurements, *audit.tasks]
    for row in (row for row in rows if row.evidence):  # whose bytes were compared by their hash
        files[f"{FOLDER}/{row.evidence}"] = _bytes(folder / row.evidence)
    names = [f"{name}.svg" for name, _ in pictures(View(audit))]
    missing = [name for name in names if not _is_file(folder / PICTURES / name)]
    notes = [f"`{PICTURES}/{m}` is not there, so the pictures are drawn anew" for m in missing[:1]]
    drawn = figures(audit, folder / PICTURES)
    for name, svg in drawn.items():
        files[f"{FOLDER}/{PICTURES}/{name}.svg"] = svg.encode()
        files[f"{FOLDER}/{PICTURES}/{name}-dark.svg"] = dark(svg).encode()
    if _is_file(folder / PAGE):
        files[f"{FOLDER}/{PAGE}"] = render_page(audit, drawn).encode()
    recipe = audit.plan.recipe
    sources = [*recipe.targets, recipe.evaluation, recipe.calibration, recipe.choices]
    sources += [checkpoint.ref.location for s in audit.subjects for checkpoint, _ in s.members]
    places = [source for source in sources if source and PurePath(source).is_absolute()]
    if places:
        notes.append(
            f"the audit names places on this machine, such as `{places[0]}`: all can read them"
        )
    return Folder(audit, files, tuple(notes))


def propose(folder: Folder, repo: str, hub: Hub, subject: str | None = None) -> PublishPlan:
    """Return the files and the place of a pull request; nothing is written."""
    place = there(repo, hub)
    _, commit, listed = place
    weights = frozenset(file.identity for file in listed.values())
    url = f"{hub.client.endpoint}/{repo}/blob/main/{AUDIT}"
    metadata, notes = metadata_of(folder.audit, repo, subject, weights=weights, audit_url=url)
    before, file = b"", listed.get(README)
    if file is not None:
        before = (hub.fetcher.files(repo, commit, README, [file], show=False) / README).read_bytes()
    try:
        readme = before.decode()
    except UnicodeDecodeError as error:
        hint = "write it anew in UTF-8 on the Hub first"
        raise HubError(f"`{README}` of `{repo}` is not UTF-8", hint=hint) from error
    after, edit_notes = with_metadata(readme, metadata, repo)
    has_page = f"{FOLDER}/{PAGE}" in folder.files
    try:
        after = put_block(after, render_block(folder.audit, FOLDER, has_page=has_page))
    except UsageError as error:
        raise HubError(f"in `{README}` of `{repo}`, {error.message}", hint=error.hint) from error
    contents = {README: after.encode(), **dict(sorted(folder.files.items()))}
    notes = (*folder.notes, *notes, *edit_notes)
    return plan_of(repo, place, contents, _STALE, (readme, after), notes)


def title_of(message: str) -> str:
    text = message.strip()
    if not text or not text.isprintable() or len(text) > _LONGEST_MESSAGE:
        raise UsageError(
            f"`--message` is not one line of at most {_LONGEST_MESSAGE} letters",
            hint="say in a few words what the pull request is for",
        )
    return f"{text} {MARK}"


def description_of(folder: Folder) -> str:
    view = View(folder.audit)
    sha256 = hashlib.sha256(folder.files[AUDIT]).hexdigest()
    blocks: list[doc.Block] = [
        doc.paragraph(headline(view)),
        *([table(view.classes)] if view.classes else ()),
        doc.paragraph(
            f"A report card for `{README}`; the audit and the evidence behind it in `qaudit/`.",
            f"Written by qaudit {folder.audit.qaudit}.",
        ),
        doc.paragraph(f"`audit.json` has the sha256 `{sha256}`."),
    ]
    return f"{render_blocks(blocks)}\n"


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise not_read(path, error) from error


# ------------------------------------------------------------------------- a published audit


def audit_folder(target: str, watch: Watch | None = None) -> Path:
    """Return the folder of an AUDIT of the command line: a folder, its file, or a fetched one."""
    return published_folder(target, watch) if is_published(target) else Path(target)


def is_published(target: str) -> bool:
    """Return whether a target is an audit on the Hub; a folder on this machine wins.

    So does a folder that is missing: `runs/demo`, where there is a `runs`, or `qaudit-out/demo`.
    """
    if target.startswith(HUB):
        return True
    path, ref = Path(target), repository_of(target)
    near = "@" not in target and (path.parent.is_dir() or path.parts[:1] == ("qaudit-out",))
    return ref is not None and not (path.exists() or near)


def published_folder(target: str, watch: Watch | None = None, *, hub: Hub | None = None) -> Path:
    """Fetch the audit that `org/name@revision` holds, with its evidence; return its folder."""
    ref = repository_of(target)
    if ref is None or ref.subfolder is not None:
        raise UsageError(
            f"`{target}` names no repository with an audit",
            hint="write it as `org/name` or `org/name@revision`",
        )
    hub = hub or open_hub(watch)
    commit = hub.listing.commit(ref.location, ref.revision or "main")
    listed = {file.path: file for file in hub.listing.files(ref.location, commit)}
    if AUDIT not in listed:
        raise HubError(
            f"there is no audit in `{ref}`: it has no `{AUDIT}`",
            hint="name a revision that has one, or put one there with `qaudit publish`",
        )

    def fetch(paths: Iterable[str]) -> Path:
        for path in (files := {path: listed[path] for path in paths}):
            if files[path].nbytes > LARGEST_NBYTES:
                raise HubError(
                    f"`{path}` has {files[path].nbytes} bytes, more than an audit's file can have",
                    hint="it was not written by qaudit; nothing was fetched",
                )
        return hub.fetcher.files(ref.location, commit, str(ref), list(files.values())) / FOLDER

    folder = fetch([AUDIT])
    audit = read_audit(folder / "audit.json")
    rows: list[MeasurementRow | TaskRow] = [*audit.measurements, *audit.tasks]
    paths = [f"{FOLDER}/{row.evidence}" for row in rows]
    fetch(path for path in paths if path.startswith(f"{FOLDER}/evidence/") and path in listed)
    return folder
