"""The text of a plan: read and cut once for all of its subjects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from qaudit.checkpoints.stamps import folder_of, text_path
from qaudit.errors import SourceError
from qaudit.hub import Hub
from qaudit.items.prepare import Reading, read_items
from qaudit.items.tokens import ItemText
from qaudit.sandbox import Templates
from qaudit.text.chat import Chat
from qaudit.text.chat_template import has_template
from qaudit.text.choices import read_choices
from qaudit.text.corpus import build_corpus, make_protocol
from qaudit.text.cutting import Tokenizer
from qaudit.text.documents import text_of
from qaudit.text.hub_texts import hub_sources, pinned, planned_text
from qaudit.text.rollout_roles import separable
from qaudit.text.rollouts import must_be_new, must_read_alike, read_rollouts, rollout_text
from qaudit.text.tokenizer import (
    borrowed_tokenizer,
    must_share_a_tokenizer,
    tokenizer_of,
    tokenizer_sha256,
)
from qaudit.types import REASONING, Corpus, Plan, Protocol, Recipe, TextFile


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
    must_share_a_tokenizer(folders)
    borrowed = borrowed_tokenizer(hub, members)
    recipe = plan.recipe
    on_hub = {source: planned_text(plan.texts, source) for _, source in hub_sources(recipe)}
    paths = {source: text_path(text) for source, text in on_hub.items()}
    if borrowed:
        folders = {borrowed.label: folder_of(borrowed)}
    tokenizer, notes = tokenizer_of(list(folders.values()), trust_remote_code)
    protocol = make_protocol(recipe, plan.context, plan.item_context)
    corpus, sources = cut_texts(recipe, paths, tokenizer, protocol, list(folders.values()))
    if recipe.strata:
        sources.append(("strata", recipe.strata))
    if recipe.choices:
        sources.append(("choices", recipe.choices))
    if borrowed:
        sources.append(("tokenizer", f"{borrowed.ref.location}@{borrowed.commit}"))
    recorded = (pair for role, name in sources for pair in _record(role, name, on_hub.get(name)))
    notes = (*corpus.notes, *notes, *_rollout_notes(corpus, plan))
    corpus = replace(
        corpus,
        notes=notes,
        sources=tuple(recorded),
        has_chat_template=recipe.chat_template is not None or has_template([*folders.values()]),
    )
    if not recipe.tasks:
        return corpus
    key = tokenizer_sha256(list(folders.values()))
    context = plan.item_context or plan.context
    reading = Reading(recipe, plan.texts, key, context)
    items, failed = read_items(reading, tokenizer, failed or {})
    return _with_items(corpus, items, failed)


def _rollout_notes(corpus: Corpus, plan: Plan) -> tuple[str, ...]:
    rollouts = corpus.rollouts
    if rollouts is None or any(rollouts.weights_sha256 == s.content for s in plan.subjects):
        return ()
    return (
        f"the rollouts were written by `{rollouts.target}`, whose weights are none of those that "
        "are measured: they are text like any other",
    )


def cut_texts(
    recipe: Recipe,
    paths: Mapping[str, Path],
    tokenizer: Tokenizer,
    protocol: Protocol,
    folders: Sequence[Path],
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
            read_choices(choices, paths.get(choices)) if choices else (),
            tokenizer,
            protocol,
            repeats=recipe.repeats,
            strata=recipe.strata,
        )
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


def _record(role: str, name: str, text: TextFile | None) -> Iterator[tuple[str, str]]:
    """Yield what is written down about a text: of one on the Hub, its commit and its hash too."""
    yield role, pinned(text) if text else name
    if text:
        yield f"{role}_sha256", text.sha256
