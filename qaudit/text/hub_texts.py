"""Text on the Hub: named, resolved to a commit, fetched and checked.

A text on the Hub is a file in a dataset: `hf://datasets/org/name[@revision]/path[::field]`, read
as the client's own file system reads it, so that what people copy from a dataset's page works. It
is resolved once to a commit and to the hash of the file's bytes; the bytes are fetched and
checked like weights, and only where a scan begins.

A name comes from a person or from a foreign recipe, and becomes part of a path on this machine:
whatever could lead out of its folder is refused here, before the Hub is asked anything.

Models of the Hub are measured on published web text by default, because the text this Python
carries shows too little of them. A text that cannot be had ends the scan before any weights are
fetched: another one in its place would give other numbers under the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import unquote

from qaudit.errors import HubError, QauditError, SourceError, UnreachableError, UsageError
from qaudit.hub.names import is_repository
from qaudit.support.keys import nearest
from qaudit.text.documents import KINDS, is_text, split_field
from qaudit.types import Recipe, TextFile

if TYPE_CHECKING:
    from qaudit.hub.fetch import Fetcher
    from qaudit.hub.listing import Listing

DEFAULT_HUB_CALIBRATION = "hf://datasets/allenai/c4/en/c4-train.00001-of-01024.json.gz"
DEFAULT_HUB_EVALUATION = "hf://datasets/allenai/c4/en/c4-validation.00000-of-00008.json.gz"

FORM = "hf://datasets/org/name[@revision]/path[::field]"

_SOURCE = re.compile(
    r"hf://datasets/(?P<repo>[^/@]*/[^/@]*)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?/(?P<path>.+)"
)
_NO_REVISION = re.compile(r"[\s~^:?*\[\\]|\.\.|//|@\{|^[-/]|[/.]$")
_LONGEST = 1000  # characters of a source; the Hub takes none as long


def with_default_texts(recipe: Recipe, on_hub: bool) -> Recipe:
    """Return the recipe with text for models of the Hub, where it names none of its own."""
    if not on_hub:
        return recipe
    return replace(
        recipe,
        calibration=recipe.calibration or DEFAULT_HUB_CALIBRATION,
        evaluation=recipe.evaluation or DEFAULT_HUB_EVALUATION,
    )


def find_texts(listing: Listing, recipe: Recipe) -> tuple[TextFile, ...]:
    """Resolve every text of a recipe that is on the Hub to a commit and a hash."""
    texts: dict[str, TextFile] = {}
    for role, source in hub_sources(recipe):
        if source not in texts:
            try:
                texts[source] = find_text(listing, source)
            except (HubError, UnreachableError) as error:
                raise _cannot_be_had(role, source, error) from error
    return tuple(texts.values())


def fetch_texts(fetcher: Fetcher, recipe: Recipe, texts: Sequence[TextFile]) -> None:
    """Fetch and check the texts of a plan; where one cannot be had, the scan ends here."""
    for role, source in hub_sources(recipe):
        try:
            fetcher.text(planned_text(texts, source))
        except (HubError, UnreachableError) as error:
            raise _cannot_be_had(role, source, error) from error


def hub_sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the texts of a recipe that are on the Hub, and what each is for."""
    for role in ("calibration", "evaluation", "choices"):
        source = getattr(recipe, role)
        if source and is_hub_text(source):
            yield role, source


def planned_text(texts: Sequence[TextFile], source: str) -> TextFile:
    for text in texts:
        if text.source == source:
            return text
    raise SourceError(
        f"the text `{source}` was not looked up when the audit was planned",
        hint="plan the audit again",
    )


def _cannot_be_had(role: str, source: str, error: QauditError) -> QauditError:
    what = "multiple-choice items" if role == "choices" else f"{role} text"
    hint = f"{error.hint}; " if error.hint else ""
    return type(error)(
        f"the {what} `{source}` cannot be had: {error.message}",
        hint=f"{hint}or give another text with `--{role}`",
    )


def is_hub_text(source: str) -> bool:
    """Return whether a source names something on the Hub, well or badly."""
    return source.lower().startswith("hf:")


def find_text(listing: Listing, source: str) -> TextFile:
    """Resolve a source to a commit, a size and a hash, with one or two calls."""
    repo, revision, path = parse_source(source)
    commit = listing.commit(repo, revision or "main", kind="dataset")
    try:
        file = listing.file(repo, commit, path, kind="dataset")
    except HubError as error:
        raise HubError(error.message, hint=_near(listing, repo, commit, path, error)) from error
    return TextFile(source, repo, commit, path, file.nbytes, file.identity)


def pinned(text: TextFile) -> str:
    """Return the source with the commit it was resolved to, which names it for ever."""
    field = split_field(text.source)[1]
    return f"hf://datasets/{text.repo}@{text.commit}/{text.path}" + (f"::{field}" if field else "")


def parse_source(source: str) -> tuple[str, str | None, str]:
    """Return repository, revision and path of a source, or refuse it by what is wrong with it."""
    location = split_field(source)[0]
    if len(source) > _LONGEST or not source.isprintable():
        raise _refused(source, "holds characters that no name has, or too many of them")
    match = _SOURCE.fullmatch(location)
    if match is None:
        raise _refused(source, "is not a file of a dataset", hint=_form(location))
    repo, path = match["repo"], match["path"]
    revision = unquote(match["revision"]) if match["revision"] else None
    if not is_repository(repo):
        raise _refused(source, f"names a dataset `{repo}`, which no dataset can be called")
    if revision is not None and (_NO_REVISION.search(revision) or not revision.isprintable()):
        raise _refused(source, "names a revision as no revision can be called")
    if "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise _refused(source, "does not name a file inside the dataset")
    if not is_text(path):
        raise _refused(source, "is not text that can be read", hint=f"text is {KINDS}")
    return repo, revision, path


def _refused(source: str, why: str, *, hint: str = f"write it as {FORM}") -> UsageError:
    shown = "".join(c if c.isprintable() else "?" for c in source[:200])
    return UsageError(f"the text `{shown}` {why}", hint=hint)


def _form(location: str) -> str:
    rest = location.partition("://")[2]
    if rest.startswith(("models/", "spaces/")):
        return f"text comes from datasets: {FORM}"
    if re.fullmatch(r"datasets/[^/]+/[^/]+/?", rest):
        return f"name a file in it: hf://{rest.rstrip('/')}/path"
    if not rest.startswith("datasets/") and is_repository("/".join(re.split("[/@]", rest)[:2])):
        return f"if that is a dataset, write hf://datasets/{rest}"
    return f"write it as {FORM}"


def _near(listing: Listing, repo: str, commit: str, path: str, error: HubError) -> str:
    folder, _, name = path.rpartition("/")
    try:
        names = listing.client.neighbours(repo, commit, folder, kind="dataset")
    except HubError:  # the folder is not there either
        return error.hint
    near = nearest(name, [n for n in names if is_text(n)])
    return near if near.startswith("did you mean") else error.hint
