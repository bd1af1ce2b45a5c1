"""Recipe -> Resolved: which checkpoints, soups and texts exactly, down to the hash of each file.

What costs least comes first, because a series has a thousand revisions and the Hub answers a
stranger a few hundred times in five minutes: names (one call for a repository), then the
choice among names, then texts, then the file trees of what was chosen, and never a weight.
A revision without weights is no subject. Where the recipe does not name it, that is a finding;
where it does, an error. Two names for the same weights stay two subjects, with a finding:
they are measured once, because what identifies a measurement is content.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from qaudit.checkpoints import folder
from qaudit.errors import SourceError, UsageError
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import find_all, is_hub, with_files
from qaudit.items.prepare import find_item_files
from qaudit.items.prepare import needs_hub as items_need_hub
from qaudit.judge.content import content_findings
from qaudit.planning.shipped import find_shipped
from qaudit.recipe.selection import is_default_choice, select
from qaudit.recipe.soups import members_of, needed, resolve_soups
from qaudit.text.hub_texts import find_texts, hub_sources, with_default_texts
from qaudit.types import Checkpoint, Recipe, Ref, Resolved, Subject, digest


def needs_hub(recipe: Recipe) -> bool:
    on_hub = any(map(is_hub, (*recipe.targets, *recipe.shipped))) or any(hub_sources(recipe))
    if on_hub or items_need_hub(recipe):
        return True
    return any(folder.has_base_on_hub(target) for target in recipe.targets)


def resolve(recipe: Recipe, hub: Hub | None = None) -> Resolved:
    """Resolve a recipe; the Hub is queried only if a part of it is there."""
    if hub is None and needs_hub(recipe):
        hub = open_hub()
    series = find_all(recipe.targets, recipe, lambda: (hub or open_hub()).listing)
    recipe = with_default_texts(recipe, on_hub=any(map(is_hub, recipe.targets)))
    selected = select(recipe, series)
    chosen = needed(recipe, series)
    texts = tuple(find_texts(hub.listing, recipe)) if hub else ()
    of_items, item_notes = find_item_files(hub, recipe) if hub else ((), ())
    read = _with_files(chosen, hub)
    shipped = find_shipped(recipe.shipped, hub)
    subjects, soups = _subjects(recipe, selected, read)
    return Resolved(
        recipe=recipe,
        checkpoints=tuple(c for c in read if not _is_empty(c)),
        subjects=(*subjects, *soups),
        texts=(*texts, *of_items),
        findings=content_findings(read, soups),
        notes=(*_notes(recipe, series, subjects, read), *item_notes),
        local=local_digest(series, (*read, *shipped)),
        shipped=shipped,
    )


def resolve_soup(recipe: Recipe, hub: Hub | None = None) -> Subject:
    """Find the one soup of a recipe and nothing else; without a text, the mean of all targets."""
    if hub is None and any(map(is_hub, recipe.targets)):
        hub = open_hub()
    series = find_all(recipe.targets, recipe, lambda: (hub or open_hub()).listing)
    if not recipe.soups:
        recipe = replace(recipe, soups=(_all_of(recipe, series),))
    soups = resolve_soups(recipe, _with_files(members_of(recipe.soups, series), hub))
    if soups[0].is_search:
        raise UsageError(
            f"the members of `{soups[0].label}` are chosen by measuring",
            hint="scan with `--soup` first, then write the soup by the members that it took",
        )
    if len(soups) > 1:
        raise UsageError(
            f"`{recipe.soups[0]}` makes {len(soups)} soups", hint="write one of them by its members"
        )
    for checkpoint, _ in soups[0].members:
        if _is_empty(checkpoint):
            raise _without_weights(f"`{checkpoint.label}`, a member,", checkpoint)
    return soups[0]


def _all_of(recipe: Recipe, series: Sequence[Checkpoint]) -> str:
    """Return the mean of the targets, if each of them is one checkpoint."""
    if len(series) > len(recipe.targets):
        raise UsageError(
            f"{len(series)} checkpoints are in {', '.join(recipe.targets)}, "
            "and its family does not list which of them make the soup",
            hint="say it with `--soup 'A+B+C'`, `--soup last:4` or `--soup 'GLOB'`",
        )
    return "+".join(checkpoint.label for checkpoint in series)


def still_there(recipe: Recipe, resolved: Resolved) -> bool:
    """Return whether folders on this machine hold what they held when a recipe was resolved."""
    local = [target for target in recipe.targets if not is_hub(target)]
    if not local:
        return resolved.local is None
    names = folder.find_all(local, recipe, hashed=False)
    read = {str(c.ref) for c in resolved.checkpoints}
    local_files = folder.with_hashes(c for c in names if str(c.ref) in read)
    shipped = find_shipped([place for place in recipe.shipped if not is_hub(place)])
    return resolved.local == local_digest(names, (*local_files, *shipped))


def local_digest(series: Iterable[Checkpoint], read: Iterable[Checkpoint]) -> str | None:
    """Identify what folders hold: the names of all, and the bytes of those that are read."""
    names = [str(c.ref) for c in series if c.commit is None]
    content = [(str(c.ref), c.content, c.settings_content) for c in read if c.commit is None]
    return digest([sorted(names), sorted(content)]) if names else None


def _with_files(chosen: Sequence[Checkpoint], hub: Hub | None) -> tuple[Checkpoint, ...]:
    """Read the file trees of what was chosen and of nothing else; hash local files."""
    read = with_files(hub.listing, chosen) if hub is not None else chosen
    hashed = (c if c.commit else folder.with_hashes([c])[0] for c in read)
    return tuple(folder.with_base(c, partial(_base_on_hub, hub)) for c in hashed)


def _base_on_hub(hub: Hub | None, repo: str, revision: str | None) -> Checkpoint:
    """Return the checkpoint of a repository that an adapter was trained on."""
    hub = hub or open_hub()
    target = f"hf://{repo}@{revision}" if revision else f"hf://{repo}@main"
    (base,) = with_files(hub.listing, find_all((target,), None, lambda: hub.listing))
    if _is_empty(base):
        raise _without_weights(f"`{repo}`, which an adapter was trained on,", base)
    return base


def _part_of(part: Checkpoint, whole: Checkpoint) -> bool:
    """Return whether a checkpoint is another one, or in a sub-folder of it."""
    a, b = part.ref, whole.ref
    return (a.location, a.revision) == (b.location, b.revision) and b.subfolder in (
        None,
        a.subfolder,
    )


def _is_empty(checkpoint: Checkpoint) -> bool:
    """Return whether the Hub has no weights there; a folder's are checked when it is opened."""
    return checkpoint.commit is not None and not checkpoint.files


def _subjects(
    recipe: Recipe, selected: Sequence[Checkpoint], read: Sequence[Checkpoint]
) -> tuple[tuple[Subject, ...], tuple[Subject, ...]]:
    """Return the checkpoints that are measured by themselves, and the soups."""
    alone = [c for c in read if any(_part_of(c, whole) for whole in selected)]
    for checkpoint in filter(_is_empty, alone):
        if _is_named(recipe, checkpoint):
            raise _without_weights(f"`{checkpoint.ref}`", checkpoint)
    soups = resolve_soups(recipe, read)
    for soup in soups:
        for checkpoint, _ in soup.members:
            if _is_empty(checkpoint):
                raise _without_weights(
                    f"`{checkpoint.label}`, a member of `{soup.label}`,", checkpoint
                )
    subjects = tuple(Subject(c.label, ((c, 1.0),)) for c in alone if not _is_empty(c))
    if not subjects and not soups:
        raise SourceError(
            f"none of the {len(alone)} checkpoints chosen of {', '.join(recipe.targets)} "
            "holds weights",
            hint="name others with `--checkpoints`; `qaudit series REPO` lists them",
        )
    return subjects, soups


def _is_named(recipe: Recipe, checkpoint: Checkpoint) -> bool:
    """Return whether this very checkpoint is requested, and not a series that contains it."""
    targets = {Ref.parse(target) for target in recipe.targets}
    ref = checkpoint.ref
    return checkpoint.label in recipe.checkpoints or any(
        a.revision == ref.revision and a.location == ref.location for a in targets if a.revision
    )


def _without_weights(what: str, checkpoint: Checkpoint) -> SourceError:
    why = f": {checkpoint.suspect[0]}" if checkpoint.suspect else ""
    return SourceError(
        f"{what} holds no weights{why}",
        hint=f"leave it out; `qaudit series {checkpoint.ref.location}` lists the others",
    )


def _notes(
    recipe: Recipe,
    series: Sequence[Checkpoint],
    alone: Sequence[Subject],
    read: Sequence[Checkpoint],
) -> tuple[str, ...]:
    """Return notes on the default choice, and on what is inferred about it."""
    notes = []
    if is_default_choice(recipe, series):
        notes.append(
            f"{len(alone)} of {len(series)} checkpoints, spread over the run and its ends; "
            "choose others with `--checkpoints`, `--stage`, `--every` or `--last`"
        )
    return tuple(dict.fromkeys([*notes, *(note for c in read for note in c.notes)]))
