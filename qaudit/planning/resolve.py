"""Recipe -> Resolved: which checkpoints, soups and texts exactly, down to the hash of each file.

What costs least comes first, because a series has a thousand revisions and the Hub answers a
stranger a few hundred times in five minutes: names (one call for a repository), then the
choice among names, then texts, then the file trees of what was chosen, and never a weight.
A revision without weights is no subject. Where the recipe does not name it, that is a finding;
where it does, an error. Two names for the same weights stay two subjects, with a finding:
they are measured once, because what identifies a measurement is content.

A file that is quantized already is one stream beside its base, so that there is one subject. One
of another architecture or another vocabulary is refused here, where both configurations are on
this machine; the engine checks it again when it opens the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from qaudit.checkpoints import folder
from qaudit.checkpoints.configuration import is_own_code, read_configuration
from qaudit.checkpoints.safetensors import INDEX, weight_map
from qaudit.checkpoints.stamps import folder_of, hash_of, is_gguf, weights_of
from qaudit.core.scheme import Scheme, Shipped, label_for
from qaudit.errors import HubError, QauditError, SourceError, UsageError
from qaudit.formats.gguf import reading as gguf
from qaudit.formats.gguf.header import bits_in, header_by, read_header
from qaudit.formats.weights import (
    QuantizedFolder,
    format_of,
    must_match,
    open_quantized,
    quantization_of,
)
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import find_all, is_hub, parse, revisions_of, weights_on_hub, with_files
from qaudit.items.prepare import find_item_files
from qaudit.items.prepare import needs_hub as items_need_hub
from qaudit.judge.rules import content_findings
from qaudit.recipe.selection import is_default_choice, select
from qaudit.recipe.soups import members_of, needed, resolve_soups
from qaudit.saved.audits import checkpoints_of
from qaudit.saved.results import sha256_of
from qaudit.settings import EXAMPLE_SCHEMES
from qaudit.support.keys import first_of, nearest
from qaudit.support.sizes import size
from qaudit.text.texts import find_texts, hub_sources, with_default_texts
from qaudit.types import Checkpoint, Plan, Recipe, Ref, Resolved, Subject, WeightFile, digest


def needs_hub(recipe: Recipe) -> bool:
    on_hub = any(map(is_hub, (*recipe.targets, *recipe.shipped))) or any(hub_sources(recipe))
    if on_hub or items_need_hub(recipe):
        return True
    return any(folder.has_base_on_hub(target) for target in recipe.targets)


def reads_hub(planned: Plan | Resolved, *further: Subject) -> bool:
    """Return whether something of what is resolved is on the Hub."""
    members = checkpoints_of((*planned.subjects, *further))
    read = (*(source for c in members for source in c.sources), *planned.shipped)
    return bool(planned.texts) or any(checkpoint.commit for checkpoint in read)


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
    default = (
        f"{len(subjects)} of {len(series)} checkpoints, spread over the run and its ends; "
        "choose others with `--checkpoints` or `--set last=N`",
    ) * is_default_choice(recipe, series)
    return Resolved(
        recipe=recipe,
        checkpoints=tuple(c for c in read if not _is_empty(c)),
        subjects=(*subjects, *soups),
        texts=(*texts, *of_items),
        findings=content_findings(read, soups),
        notes=tuple(dict.fromkeys((*default, *(note for c in read for note in c.notes))))
        + item_notes,
        local=local_digest(series, (*read, *shipped)),
        shipped=shipped,
    )


def resolve_soup(recipe: Recipe, hub: Hub | None = None) -> Subject:
    """Find the one soup of a recipe and nothing else; without a text, the mean of all targets."""
    if hub is None and any(map(is_hub, recipe.targets)):
        hub = open_hub()
    series = find_all(recipe.targets, recipe, lambda: (hub or open_hub()).listing)
    if not recipe.soups:
        if len(series) > len(recipe.targets):
            raise UsageError(
                f"{len(series)} checkpoints are in {', '.join(recipe.targets)}, "
                "and its family does not list which of them make the soup",
                hint="say it with `--soup 'A+B+C'`, `--soup last:4` or `--soup 'GLOB'`",
            )
        recipe = replace(recipe, soups=("+".join(checkpoint.label for checkpoint in series),))
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
        _must_have_weights(f"`{checkpoint.label}`, a member,", checkpoint)
    return soups[0]


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

    def base_on_hub(repo: str, revision: str | None) -> Checkpoint:
        """Return the checkpoint of a repository that an adapter was trained on."""
        listing, target = (hub or open_hub()).listing, f"hf://{repo}@{revision or 'main'}"
        (base,) = with_files(listing, find_all((target,), None, lambda: listing))
        _must_have_weights(f"`{repo}`, which an adapter was trained on,", base)
        return base

    found = []
    for checkpoint in hashed:
        if hub is not None and checkpoint.commit and folder.holds_adapter(checkpoint):
            hub.fetcher.settings(checkpoint)  # which name the base
        found.append(folder.with_base(checkpoint, base_on_hub))
    return tuple(found)


def _is_empty(checkpoint: Checkpoint) -> bool:
    """Return whether the Hub has no weights there; a folder's are checked when it is opened."""
    return checkpoint.commit is not None and not checkpoint.files


def _subjects(
    recipe: Recipe, selected: Sequence[Checkpoint], read: Sequence[Checkpoint]
) -> tuple[tuple[Subject, ...], tuple[Subject, ...]]:
    """Return the checkpoints that are measured by themselves, and the soups."""
    places = {(c.ref.location, c.ref.revision, c.ref.subfolder) for c in selected}
    alone = [  # those that were selected, and those in a sub-folder of one
        c
        for c in read
        if any((c.ref.location, c.ref.revision, sub) in places for sub in (None, c.ref.subfolder))
    ]
    targets = {Ref.parse(target) for target in recipe.targets}
    named = {(ref.location, ref.revision) for ref in targets if ref.revision}
    for checkpoint in alone:
        place = checkpoint.ref.location, checkpoint.ref.revision
        # It is named, and not only in a series that is requested.
        if checkpoint.label in recipe.checkpoints or place in named:
            _must_have_weights(f"`{checkpoint.ref}`", checkpoint)
    soups = resolve_soups(recipe, read)
    for soup in soups:
        for checkpoint, _ in soup.members:
            _must_have_weights(f"`{checkpoint.label}`, a member of `{soup.label}`,", checkpoint)
    subjects = tuple(Subject(c.label, ((c, 1.0),)) for c in alone if not _is_empty(c))
    if not subjects and not soups:
        raise SourceError(
            f"none of the {len(alone)} checkpoints chosen of {', '.join(recipe.targets)} "
            "holds weights",
            hint="name others with `--checkpoints`; `qaudit series REPO` lists them",
        )
    return subjects, soups


def _must_have_weights(what: str, checkpoint: Checkpoint) -> None:
    if _is_empty(checkpoint):
        why = f": {checkpoint.suspect[0]}" if checkpoint.suspect else ""
        raise SourceError(
            f"{what} holds no weights{why}",
            hint=f"leave it out; `qaudit series {checkpoint.ref.location}` lists the others",
        )


_CONFIGURATIONS = ("config.json", "quantize_config.json", "quant_config.json")


def find_shipped(places: Sequence[str], hub: Hub | None = None) -> tuple[Checkpoint, ...]:
    """Return the files that are named, hashed, under labels that differ."""
    found = [_on_hub(place, hub) if is_hub(place) else _local(place) for place in places]
    names = []
    for file in found:
        folder = Path(file.ref.location.rstrip("/"))
        weights = weights_of(file, folder)
        names.append(label_for(weights.stem if weights != folder else folder.name))
    counts = Counter(names)
    labels = [
        name if counts[name] == 1 else label_for(str(file.ref))
        for name, file in zip(names, found, strict=True)
    ]
    if twice := [label for label, count in Counter(labels).items() if count > 1]:
        raise UsageError(f"`{twice[0]}` is shipped twice", hint="name each file once")
    return tuple(replace(file, label=label) for file, label in zip(found, labels, strict=True))


def _local(place: str) -> Checkpoint:
    path = Path(place)
    if path.is_file() and is_gguf(path):
        file = WeightFile(path.name, path.stat().st_size, hash_of(path))
        return Checkpoint(Ref(str(path.parent)), path.name, (file,))
    if not path.is_dir():
        what = "is a file that is not read" if path.exists() else "does not exist"
        raise UsageError(
            f"the shipped file `{place}` {what}",
            hint="name the folder of a quantized checkpoint, a `.gguf` file or `org/name`",
        )
    (checkpoint,) = folder.with_hashes([Checkpoint(Ref(str(path)), path.name)])
    if not checkpoint.files:
        QuantizedFolder(path)  # raises the error that names the file
        raise SourceError(f"no weights in `{place}`", hint="download it again")
    return checkpoint


def _on_hub(place: str, hub: Hub | None) -> Checkpoint:
    listing = (hub or open_hub()).listing
    if not is_gguf(place):
        series = with_files(listing, find_all([place], None, lambda: listing))
        if len(series) != 1 or not series[0].files:
            raise UsageError(
                f"`{place}` holds {len(series)} checkpoints with weights, and a shipped file is "
                "one",
                hint="write `org/name@revision`, `org/name@revision//folder`, or "
                "`org/name//file.gguf` for one of several",
            )
        return series[0]
    ref = parse(place)
    path = ref.subfolder or ""
    revision = revisions_of(listing, Ref(ref.location, ref.revision, path))[0]
    files = {file.path: file for file in listing.files(ref.location, revision.commit)}
    if path not in files:
        near = nearest(path, sorted(filter(is_gguf, files)) or sorted(files))
        raise HubError(f"there is no file `{path or place}` in `{ref.location}`", hint=near)
    folder, _, name = path.rpartition("/")
    file = WeightFile(name, files[path].nbytes, files[path].identity)
    return Checkpoint(
        Ref(ref.location, revision.name, folder or None), name, (file,), revision.commit
    )


def all_shipped(
    subjects: Sequence[Subject],
    shipped: Sequence[Checkpoint],
    hub: Hub | None,
    schemes: Sequence[Scheme],
) -> tuple[tuple[Checkpoint, ...], tuple[Shipped, ...]]:
    """Return the files that are quantized already, and what each is measured as.

    A base that is one itself is the only one where nothing is measured beside it.
    """
    base = subjects[0].first
    if not shipped:
        if schemes:
            return (), ()
        if base.commit is not None and hub is not None and len(subjects) == 1:
            hub.fetcher.settings(base)
        if len(subjects) > 1 or subjects[0].merge or quantization_of(folder_of(base)) is None:
            raise UsageError(
                "no scheme is named, and no shipped file", hint=f"for example `{EXAMPLE_SCHEMES}`"
            )
        base = replace(base, label=label_for(base.label))
        return (base,), (_identified(base, *format_of(folder_of(base))),)
    if len(subjects) != 1 or subjects[0].is_search:
        raise UsageError(
            f"shipped files are compared with the one model they were made from, and "
            f"{len(subjects)} are measured",
            hint="name one checkpoint, or choose it with `--checkpoints`",
        )
    taken = {scheme.short for scheme in schemes}
    return tuple(shipped), tuple(_scheme(file, base, hub, taken) for file in shipped)


def _scheme(checkpoint: Checkpoint, base: Checkpoint, hub: Hub | None, taken: set[str]) -> Shipped:
    if checkpoint.label in taken:
        raise UsageError(
            f"the shipped file `{checkpoint.label}` has the name of a scheme",
            hint="rename its folder",
        )
    if (checkpoint.ref, checkpoint.files) == (base.ref, base.files):
        raise UsageError(
            f"`{checkpoint.label}` is the base itself, and not a file beside it",
            hint="leave out `--shipped`; with `--schemes none` a quantized base is run as it ships",
        )
    place = weights_of(checkpoint, folder_of(checkpoint))
    if checkpoint.commit is not None and hub is not None:
        if is_gguf(place):  # its header is read, and no more of it
            (file,) = weights_on_hub(checkpoint)
            read = partial(hub.listing.read, checkpoint.ref.location, checkpoint.commit, file, 0)
            header = read_header(place) if place.is_file() else header_by(place, file.nbytes, read)
            if (folder_of(base) / "config.json").is_file():
                gguf.must_match(checkpoint.label, header, folder_of(base))
            return _identified(checkpoint, "gguf", bits_in(header, place), 16)
        hub.fetcher.settings(checkpoint)
    must_match(checkpoint.label, place, folder_of(base))
    return _identified(checkpoint, *format_of(place))


def _identified(checkpoint: Checkpoint, name: str, bits: int, act: int) -> Shipped:
    folder = folder_of(checkpoint)
    if checkpoint.commit is None:  # refuses stored tensors that do not fit together
        bits = open_quantized(weights_of(checkpoint, folder)).bits
    texts = [sha256_of(folder / name) for name in _CONFIGURATIONS if (folder / name).is_file()]
    identity = digest([checkpoint.content, texts])
    return Shipped(file=checkpoint.label, format=name, bits=bits, act=act, sha256=identity)


_Key = tuple[str | None, tuple[tuple[str, str], ...]]


def without_unread(resolved: Resolved, hub: Hub | None) -> tuple[Resolved, tuple[str, ...]]:
    """Return what is resolved without files that hold nothing that is read, and notes on them."""
    if hub is None or find_spec("torch") is None:  # an installation that only plans
        return resolved, ()
    seen: dict[_Key, frozenset[str]] = {}
    every = dict.fromkeys((*resolved.checkpoints, *checkpoints_of(resolved.subjects)))
    needed = {checkpoint: _needed(checkpoint, hub, seen) for checkpoint in every}
    notes = [
        f"not downloaded of `{c.label}`: {first_of([file.name for file in c.unread])} "
        f"({size(sum(file.nbytes for file in c.unread))}), which nothing reads"
        for c in needed.values()
        if c.unread
    ]
    subjects = tuple(
        replace(s, members=tuple((needed[c], share) for c, share in s.members))
        for s in resolved.subjects
    )
    checkpoints = tuple(needed[c] for c in resolved.checkpoints)
    return replace(resolved, subjects=subjects, checkpoints=checkpoints), tuple(notes)


def whole(subject: Subject) -> Subject:
    """Return a subject with all files of its members, for what is written with their towers."""
    return replace(subject, members=tuple((c.whole, share) for c, share in subject.members))


def _needed(checkpoint: Checkpoint, hub: Hub, seen: dict[_Key, frozenset[str]]) -> Checkpoint:
    """Return a checkpoint without the shards that hold nothing that is read."""
    if checkpoint.commit is None or len(checkpoint.whole.files) < 2:
        return checkpoint
    try:
        folder = hub.fetcher.settings(checkpoint)
        config = read_configuration(folder)
        # Towers beside its text, or blocks that predict further tokens, may be unread.
        towers = any(k.endswith("_config") and k != "quantization_config" for k in config)
        has_more = towers or bool(config.get("num_nextn_predict_layers"))
        if is_own_code(config) or not has_more or quantization_of(folder) is not None:
            return checkpoint
        placed = weight_map(folder / INDEX)
        key = (checkpoint.configuration_sha256, tuple(sorted(placed.items())))
        if key not in seen:
            from qaudit.model.skeleton import unread_in

            unread = unread_in(folder, list(placed))
            read = {file for name, file in placed.items() if name not in unread}
            seen[key] = frozenset(placed.values()) - read if read else frozenset()
    except QauditError:  # what is wrong with it is said where it is opened
        return checkpoint
    files = checkpoint.whole.files
    return replace(
        checkpoint.whole,
        files=tuple(file for file in files if file.name not in seen[key]),
        unread=tuple(file for file in files if file.name in seen[key]),
    )
