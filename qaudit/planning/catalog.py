"""Recipe -> Catalog: the checkpoints of a series, and what is known of each before a scan.

Names cost one request for a repository. File trees are read for the selected checkpoints,
because a scan reads them too and keeps them; for more than `MOST_TREES` only with `check`,
which reads all of them. Every tree that was read is kept, so an interrupted walk resumes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from qaudit.checkpoints.folder import family_of, weights_nbytes, with_hashes
from qaudit.checkpoints.series import tell_apart
from qaudit.checkpoints.stamps import folder_of
from qaudit.errors import HubError, Interrupted, ModelError, QauditError, UnreachableError
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import find_all, with_files
from qaudit.judge.content import content_findings
from qaudit.planning.survey import must_be_auditable
from qaudit.recipe.selection import is_default_choice, select
from qaudit.report.catalog import Catalog
from qaudit.types import Checkpoint, Recipe, Watch
from qaudit.whole import read_regular

MOST_TREES = 32
"""File trees to read without `check`: far from the 500 requests that strangers have."""


def read_catalog(
    recipe: Recipe, watch: Watch, *, check: bool = False
) -> tuple[Catalog, dict[str, int]]:
    """Return the catalog of a series, and how many trees failed for which reason."""
    hub = cache(lambda: open_hub(watch=watch))  # opened where something is there
    names = find_all(recipe.targets, recipe, lambda: hub().listing)
    selected = {checkpoint.label for checkpoint in select(recipe, names)}
    wanted = {c.label for c in names} if check else selected
    if len(wanted) > MOST_TREES and not check:
        wanted = set()
    asked = [c for c in names if c.label in wanted and c.commit]
    errors = _fetch_trees(asked, hub(), watch) if asked else {}
    parts: list[tuple[Checkpoint, str]] = []
    for name in names:
        if name.commit is None:
            some = with_hashes([name]) if check else (name,)
        else:
            unread = name.label not in wanted or _place(name) in errors
            some = with_files(hub().listing, [name], known_only=unread, keep_all=True)
        parts += [(part, name.label) for part in some]
    checkpoints = tell_apart(part for part, _ in parts)
    # Of folders beside each other the last with the same configuration is opened. Those of the Hub
    # are asked for with `--check` alone: they are further requests.
    last = {_model(c): c for c in checkpoints if c.commit is None or (c.files and check)}
    refusals = []
    for checkpoint in last.values():
        try:
            must_be_auditable(checkpoint, None if checkpoint.commit is None else hub())
        except ModelError as error:
            refusals.append(f"`{checkpoint.label}` cannot be audited: {error.message}")
        except QauditError:  # damaged, or not reached: another matter
            continue
    families = {c.family: c for c in reversed(names) if c.family}
    catalog = Catalog(
        targets=recipe.targets,
        checkpoints=checkpoints,
        selected=frozenset(
            c.label for c, (_, name) in zip(checkpoints, parts, strict=True) if name in selected
        ),
        by_default=is_default_choice(recipe, names),
        nbytes={
            c.label: weights_nbytes(c) for c in checkpoints if c.commit is None and not c.files
        },
        findings=content_findings(checkpoints),
        refusals=tuple(refusals),
        remarks=tuple(r for name, c in families.items() for r in family_of(c, name).remarks),
    )
    return catalog, dict(Counter(errors.values()))


def _fetch_trees(
    checkpoints: Sequence[Checkpoint], hub: Hub, watch: Watch
) -> dict[tuple[str, str], str]:
    """Read every tree that is not known yet; return why some failed, which leaves the others."""
    errors: dict[tuple[str, str], str] = {}
    places = dict.fromkeys(map(_place, checkpoints))
    missing = [p for p in places if hub.listing.known_files(*p) is None]
    begin, count = time.monotonic(), 0
    try:
        for place in missing:
            try:
                hub.listing.files(*place)
            except HubError as error:
                errors[place] = error.message
            count += 1
            left_seconds = (time.monotonic() - begin) / count * (len(missing) - count)
            watch.count("file trees", count, len(missing), left_seconds)
    except (KeyboardInterrupt, UnreachableError) as error:
        what = getattr(error, "message", "interrupted")
        kind = UnreachableError if isinstance(error, UnreachableError) else Interrupted
        read = f"{count} of {len(missing)} trees were read and are kept"
        raise kind(f"{what}; {read}", hint="run the same command again") from error
    return errors


def _model(checkpoint: Checkpoint) -> tuple[str, bytes]:
    """Return what checkpoints of one model share: the repository, or folder and configuration."""
    if checkpoint.commit is not None:
        return checkpoint.ref.location, b""
    folder, configuration = folder_of(checkpoint), b""
    with suppress(OSError):  # which its headers are refused for
        configuration = read_regular(folder / "config.json")
    return str(folder.parent), configuration


def _place(checkpoint: Checkpoint) -> tuple[str, str]:
    return checkpoint.ref.location, str(checkpoint.commit)
