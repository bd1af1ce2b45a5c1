"""The text of a plan: read and cut once for all of its subjects.

Text on the Hub: named, resolved to a commit, fetched and checked.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from qaudit.checkpoints.stamps import folder_of, text_path
from qaudit.errors import HubError, SourceError, UnreachableError, UsageError
from qaudit.hub import Hub
from qaudit.hub.answers import is_repository
from qaudit.items.prepare import Reading, read_items
from qaudit.items.tokens import ItemText, item_text
from qaudit.sandbox import Templates
from qaudit.text.chat import Chat, has_template
from qaudit.text.corpus import build_corpus, make_protocol
from qaudit.text.documents import KINDS, is_text, read_choices, split_field, text_of
from qaudit.text.rollouts import (
    must_be_new,
    must_read_alike,
    read_rollouts,
    rollout_text,
    separable,
)
from qaudit.text.tokenizer import (
    Tokenizer,
    borrowed_tokenizer,
    other_tokenizers,
    tokenizer_of,
    tokenizer_sha256,
)
from qaudit.types import REASONING, Corpus, Plan, Protocol, Recipe, TextFile

if TYPE_CHECKING:
    from qaudit.hub import Hub
    from qaudit.hub.fetch import Fetcher
    from qaudit.hub.listing import Listing


def read_corpus(
    plan: Plan,
    *,
    hub: Hub | None = None,
    trust_remote_code: bool = False,
    failed: Mapping[str, SourceError] | None = None,
) -> Corpus:
    """Read the text of a plan, and its tasks, with the tokenizer its subjects share.

    A series without one reads with that of the repository its family names. `failed` has the tasks
    whose data could not be fetched, and why.
    """
    members = [c for s in plan.subjects for c, _ in s.members]
    folders = {c.label: folder_of(c) for c in members}
    if pair := other_tokenizers(folders):
        raise UsageError(
            f"`{pair[0]}` and `{pair[1]}` have different tokenizers: their documents cannot be "
            "compared",
            hint="scan them apart; across tokenizers compare bits per byte",
        )
    borrowed = borrowed_tokenizer(hub, members)
    recipe = plan.recipe
    on_hub = {source: planned_text(plan.texts, source) for _, source in hub_sources(recipe)}
    paths = {source: text_path(text) for source, text in on_hub.items()}
    places = [folder_of(borrowed)] if borrowed else list(folders.values())
    tokenizer, notes = tokenizer_of(places, trust_remote_code)
    protocol = make_protocol(recipe, plan.context, plan.item_context)
    searches = any(subject.is_search for subject in plan.subjects)
    corpus, sources = cut_texts(recipe, paths, tokenizer, protocol, places, searches=searches)
    sources += [(role, name) for role in ("strata", "choices") if (name := getattr(recipe, role))]
    if borrowed:
        sources.append(("tokenizer", f"{borrowed.ref.location}@{borrowed.commit}"))
    recorded: list[tuple[str, str]] = []
    for role, name in sources:  # of a text on the Hub its commit and its hash, too
        text = on_hub.get(name)
        recorded.append((role, pinned(text) if text else name))
        recorded += [(f"{role}_sha256", text.sha256)] if text else []
    notes, rollouts = (*corpus.notes, *notes), corpus.rollouts
    if rollouts and all(rollouts.weights_sha256 != s.content for s in plan.subjects):
        note = (
            f"the rollouts were written by `{rollouts.target}`, whose weights are none of those "
            "that are measured: they are text like any other"
        )
        notes = (*notes, note)
    has_chat_template = recipe.chat_template is not None or has_template(places)
    corpus = replace(
        corpus, notes=notes, sources=tuple(recorded), has_chat_template=has_chat_template
    )
    if not recipe.tasks:
        return corpus
    context = plan.item_context or plan.context
    reading = Reading(recipe, plan.texts, tokenizer_sha256(places), context)
    return _with_items(corpus, *read_items(reading, tokenizer, failed or {}))


def cut_texts(
    recipe: Recipe,
    paths: Mapping[str, Path],
    tokenizer: Tokenizer,
    protocol: Protocol,
    folders: Sequence[Path],
    *,
    searches: bool = False,
) -> tuple[Corpus, list[tuple[str, str]]]:
    """Cut the texts of a recipe; return the corpus, and the role and name of each text.

    Conversations are rendered by the first chat template that one of the folders has.
    """
    choices = recipe.choices
    with Templates() as templates:
        chat = Chat(
            folders, tokenizer, templates, recipe.chat_template, recipe.score, recipe.reasoning
        )
        fed = chat.without_spans()
        calibration_name, calibration = text_of(
            recipe.calibration, "calibration", paths.get(recipe.calibration or ""), chat=fed
        )
        evaluation_name, evaluation = text_of(
            recipe.evaluation, "evaluation", paths.get(recipe.evaluation or ""), recipe.strata, chat
        )
        corpus = build_corpus(
            calibration,
            evaluation,
            tokenizer,
            protocol,
            repeats=recipe.repeats,
            strata=recipe.strata,
            searches=searches,
        )
        if choices is not None:
            items = read_choices(choices, paths.get(choices))
            context = protocol.item_context or protocol.context
            corpus = _with_items(corpus, item_text(tokenizer, items, context), {})
        sources = [("calibration", calibration_name), ("evaluation", evaluation_name)]
        sources += chat.sources or fed.sources
        if recipe.rollouts is None:
            return corpus, sources
        rollouts = read_rollouts(Path(recipe.rollouts))
        must_read_alike(rollouts, recipe.rollouts, tokenizer_sha256(folders))
        for draw in corpus.draws:
            must_be_new(rollouts, recipe.rollouts, draw.calibration)
        eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        markers = chat.token_markers
        thought = [m.end[0] for m in markers if m.role == REASONING and len(m.end) == 1]
        ends = {"turn": rollouts.header.end_ids or eos, "reasoning": thought}
        sources.append(("rollouts", recipe.rollouts))
        sources.append(("rollouts_sha256", rollouts.header.rollouts_sha256))
        markers = separable(markers, tokenizer.added_tokens_decoder)
        return replace(corpus, rollouts=rollout_text(rollouts, ends, markers)), sources


def _with_items(corpus: Corpus, text: ItemText, failed: Mapping[str, SourceError]) -> Corpus:
    first = len(corpus.item_windows)
    windows = (replace(w, document=first + w.document) for w in text.windows)
    return replace(
        corpus,
        items=(*corpus.items, *text.items),
        item_windows=(*corpus.item_windows, *windows),
        notes=(*corpus.notes, *text.notes),
        failed_tasks=tuple((task, error.message) for task, error in failed.items()),
    )


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
            with _needed(role, source):
                texts[source] = find_text(listing, source)
    return tuple(texts.values())


def fetch_texts(fetcher: Fetcher, recipe: Recipe, texts: Sequence[TextFile]) -> None:
    """Fetch and check the texts of a plan; where one cannot be had, the scan ends here."""
    for role, source in hub_sources(recipe):
        with _needed(role, source):
            fetcher.text(planned_text(texts, source))


@contextmanager
def _needed(role: str, source: str) -> Iterator[None]:
    """Say of a text that cannot be had what it is for."""
    try:
        yield
    except (HubError, UnreachableError) as error:
        what = "multiple-choice items" if role == "choices" else f"{role} text"
        hint = error.hint and f"{error.hint}{'' if error.hint.endswith('?') else ';'} "
        raise type(error)(
            f"the {what} `{source}` cannot be had: {error.message}",
            hint=f"{hint}or give another text with `--{role}`",
        ) from error


def hub_sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the texts of a recipe that are on the Hub, and what each is for."""
    for role in ("calibration", "evaluation", "choices"):
        source = getattr(recipe, role)
        if source and is_hub_text(source):
            yield role, source


def planned_text(texts: Sequence[TextFile], source: str) -> TextFile:
    text = next((text for text in texts if text.source == source), None)
    if text is None:
        raise SourceError(
            f"the text `{source}` was not looked up when the audit was planned",
            hint="plan the audit again",
        )
    return text


def is_hub_text(source: str) -> bool:
    """Return whether a source names something on the Hub, well or badly."""
    return source.lower().startswith("hf:")


def find_text(listing: Listing, source: str) -> TextFile:
    """Resolve a source to a commit, a size and a hash, with one or two calls."""
    repo, revision, path = parse_source(source)
    commit = listing.commit(repo, revision or "main", kind="dataset")
    file = listing.file(repo, commit, path, kind="dataset")
    return TextFile(source, repo, commit, path, file.nbytes, file.identity)


def pinned(text: TextFile) -> str:
    """Return the source with the commit it was resolved to, which names it for ever."""
    field = split_field(text.source)[1]
    return f"hf://datasets/{text.repo}@{text.commit}/{text.path}" + (f"::{field}" if field else "")


def parse_source(source: str) -> tuple[str, str | None, str]:
    """Return repository, revision and path of a source, or refuse it by what is wrong with it."""
    match = _SOURCE.fullmatch(split_field(source)[0])
    repo, revision, path = match.group("repo", "revision", "path") if match else ("", None, "")
    revision = unquote(revision) if revision else None
    why, hint = "", f"write it as {FORM}"
    if len(source) > _LONGEST or not source.isprintable():
        why = "holds characters that no name has, or too many of them"
    elif match is None:
        why = "is not a file of a dataset"
    elif not is_repository(repo):
        why = f"names a dataset `{repo}`, which no dataset can be called"
    elif revision is not None and (_NO_REVISION.search(revision) or not revision.isprintable()):
        why = "names a revision as no revision can be called"
    elif "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
        why = "does not name a file inside the dataset"
    elif not is_text(path):
        why, hint = "is not text that can be read", f"name a file: text is {KINDS}"
    if why:
        shown = "".join(c if c.isprintable() else "?" for c in source[:200])
        raise UsageError(f"the text `{shown}` {why}", hint=hint)
    return repo, revision, path
