"""The text a plan asks for: found, fetched, read and cut once for all of its subjects.

Subjects can only be compared document by document if they read the same tokens, so that a scan
over several tokenizers is refused before any weights are read, not after.

Models of the Hub are measured on published web text unless another is asked for, because the
text this Python carries tells too little about them. A text that cannot be had ends the scan
before any weights are fetched: another one in its place would give other numbers under the
same name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit import families
from qaudit.checkpoints.places import folder_of, text_path
from qaudit.errors import HubError, QauditError, SourceError, UnreachableError, UsageError
from qaudit.saved.results import sha256_of
from qaudit.text.choices import read_choices
from qaudit.text.corpus import build_corpus, has_own_code, load_tokenizer, make_protocol
from qaudit.text.cutting import Tokenizer
from qaudit.text.documents import text_of
from qaudit.text.hub_texts import find_text, is_hub_text, pinned
from qaudit.types import Checkpoint, Corpus, Plan, Recipe, Ref, TextFile, digest

if TYPE_CHECKING:
    from qaudit.hub import Hub
    from qaudit.hub.fetch import Fetcher
    from qaudit.hub.listing import Listing

DEFAULT_HUB_CALIBRATION = "hf://datasets/allenai/c4/en/c4-train.00001-of-01024.json.gz"
DEFAULT_HUB_EVALUATION = "hf://datasets/allenai/c4/en/c4-validation.00000-of-00008.json.gz"

_DECIDES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Files of a tokenizer that decide how text becomes tokens."""


# ------------------------------------------------------------------- texts that are on the Hub


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
    found: dict[str, TextFile] = {}
    for role, source in hub_sources(recipe):
        if source not in found:
            try:
                found[source] = find_text(listing, source)
            except (HubError, UnreachableError) as error:
                raise _cannot_be_had(role, source, error) from error
    return tuple(found.values())


def fetch_texts(fetcher: Fetcher, recipe: Recipe, texts: Sequence[TextFile]) -> None:
    """Fetch and check the texts of a plan; where one cannot be had, the scan ends here."""
    found = {text.source: text for text in texts}
    for role, source in hub_sources(recipe):
        try:
            fetcher.text(_text(found, source))
        except (HubError, UnreachableError) as error:
            raise _cannot_be_had(role, source, error) from error


def hub_sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the texts of a recipe that are on the Hub, and what each is for."""
    for role in ("calibration", "evaluation", "choices"):
        source = getattr(recipe, role)
        if source and is_hub_text(source):
            yield role, source


def _text(found: dict[str, TextFile], source: str) -> TextFile:
    if source not in found:
        raise SourceError(
            f"the text `{source}` was not looked up when the audit was planned",
            hint="plan the audit again",
        )
    return found[source]


def _cannot_be_had(role: str, source: str, error: QauditError) -> QauditError:
    """Say which text it is; no other text takes its place."""
    what = "multiple-choice items" if role == "choices" else f"{role} text"
    said = f"{error.hint}; " if error.hint else ""
    return type(error)(
        f"the {what} `{source}` cannot be had: {error.message}",
        hint=f"{said}or give another text with `--{role}`",
    )


# ----------------------------------------------------------------------------- text into tokens


def read_corpus(plan: Plan, *, hub: Hub | None = None, trust_remote_code: bool = False) -> Corpus:
    """Read the text of a plan with the tokenizer its subjects share.

    A series without one reads with that of the repository its family names.
    """
    members = [c for s in plan.subjects for c, _ in s.members]
    folders = {c.label: folder_of(c) for c in members}
    _must_share_a_tokenizer(folders)
    borrowed = _borrowed_tokenizer(hub, members)
    recipe = plan.recipe
    found = {text.source: text for text in plan.texts}
    on_hub = {source: _text(found, source) for _, source in hub_sources(recipe)}
    lies = {source: text_path(text) for source, text in on_hub.items()}
    calibration_name, calibration = text_of(
        recipe.calibration, "calibration", lies.get(recipe.calibration or "")
    )
    evaluation_name, evaluation = text_of(
        recipe.evaluation, "evaluation", lies.get(recipe.evaluation or "")
    )
    sources = [("calibration", calibration_name), ("evaluation", evaluation_name)]
    if recipe.choices:
        sources.append(("choices", recipe.choices))
    if borrowed:
        sources.append(("tokenizer", f"{borrowed.ref.location}@{borrowed.commit}"))
        folders = {borrowed.label: folder_of(borrowed)}
    tokenizer, notes = _tokenizer_of(list(folders.values()), trust_remote_code)
    corpus = build_corpus(
        calibration,
        evaluation,
        read_choices(recipe.choices, lies.get(recipe.choices)) if recipe.choices else (),
        tokenizer,
        make_protocol(recipe, plan.context),
        [pair for role, name in sources for pair in _record(role, name, on_hub.get(name))],
        repeats=recipe.repeats,
    )
    return replace(corpus, notes=(*corpus.notes, *notes))


def _record(role: str, name: str, text: TextFile | None) -> Iterator[tuple[str, str]]:
    """Yield what is written down about a text: of one on the Hub, its commit and its hash too."""
    yield role, pinned(text) if text else name
    if text:
        yield f"{role}_sha256", text.sha256


def _tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in _DECIDES if (folder / name).is_file()]


def _borrowed_tokenizer(hub: Hub | None, members: Sequence[Checkpoint]) -> Checkpoint | None:
    """Fetch the tokenizer of another repository, where checkpoints have none and a family says so.

    It is found when text is read and not when it is planned, because only then is it known
    that no checkpoint has one; its commit is in the record.
    """
    if hub is None or any(_tokenizer_files(folder_of(c)) for c in members):
        return None
    known = {family.family: family.tokenizer for family in families.all_families()}
    repos = [repo for c in members if (repo := known.get(c.family or ""))]
    if not repos:
        return None
    found = Checkpoint(Ref(repos[0]), repos[0], commit=hub.listing.commit(repos[0]))
    hub.fetcher.settings(found)
    return found


def _tokenizer_of(
    folders: Sequence[Path], trust_remote_code: bool
) -> tuple[Tokenizer, tuple[str, ...]]:
    """Load the first tokenizer there is: a checkpoint without one reads what the others read."""
    # They import torch, and plans are made without.
    from qaudit.model.config import read_config
    from qaudit.model.remote import is_remote

    failures = []
    for folder in [f for f in folders if _tokenizer_files(f)] or folders[:1]:
        try:
            # The library wants the config too, and says less of what is wrong there.
            config = read_config(folder, trust_remote_code=trust_remote_code)
            known = None if not is_remote(folder) else config  # of others it reads its own
            tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code, config=known)
            return tokenizer, _about(tokenizer, folder)
        except SourceError as error:
            failures.append(error)
    raise failures[0]


def _about(tokenizer: Tokenizer, folder: Path) -> tuple[str, ...]:
    """Say what became of the code that a repository brings for its tokenizer."""
    from qaudit.model.remote import ran

    if not has_own_code(folder):
        return ()
    if type(tokenizer).__module__.startswith("transformers."):
        return ("the tokenizer is the library's: the repository's own code for it was not run",)
    return (f"the tokenizer is the repository's own: {ran(folder)}",)


def other_tokenizers(folders: dict[str, Path]) -> tuple[str, str] | None:
    """Return the first two labels whose tokenizers differ; who has none reads with another's."""
    seen: dict[str, str] = {}
    for label, folder in folders.items():
        if files := _tokenizer_files(folder):
            seen.setdefault(digest([(f.name, sha256_of(f)) for f in files]), label)
    first, *others = [*seen.values()] or [""]
    return (first, others[0]) if others else None


def _must_share_a_tokenizer(folders: dict[str, Path]) -> None:
    if pair := other_tokenizers(folders):
        a, b = pair
        raise UsageError(
            f"`{a}` and `{b}` have different tokenizers: their documents cannot be compared",
            hint="scan them apart; across tokenizers compare bits per byte",
        )
